"""Whether the files that a commit record names are there and have their sizes.

Nothing is read but the record. `Checkpoint.verify` finds damage inside of files, which it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from remesh.core.integrity import Finding, compare_sizes
from remesh.errors import CheckpointReplacedError
from remesh.formats import native
from remesh.storage import Storage


def files_of(record: native.CommitRecord) -> tuple[native.FileRecord, ...]:
    """Every file that a record names."""
    return (record.index, record.values, *record.files)


def read_record_and_sizes(
    root: Storage, name: str = ""
) -> tuple[native.CommitRecord, list[Finding]]:
    """The commit record of a directory, and the files whose sizes differ; the files are listed."""
    before = f"{name}/" if name else ""

    def read_record() -> native.CommitRecord:
        return native.read_record_at(root, before + native.RECORD_NAME)

    def read() -> tuple[native.CommitRecord, list[Finding]]:
        record = read_record()
        sizes: dict[str, int] = {}
        for folder in sorted({file.path.rpartition("/")[0] for file in files_of(record)}):
            prefix = f"{folder}/" if folder else ""
            files = root.list_directory(f"{before}{prefix}".rstrip("/")).files
            sizes.update({f"{prefix}{file}": facts.num_bytes for file, facts in files.items()})
        written = [(file.path, file.num_bytes) for file in files_of(record)]
        findings = compare_sizes(written, sizes.get)
        if findings and read_record() != record:
            raise CheckpointReplacedError(
                f"{root.url}/{name}: replaced by another save while it was looked at"
            )
        return record, findings

    return native.begin_anew(read)


def describe_findings(findings: Sequence[Finding]) -> str:
    """The first finding in words, and how many more there are."""
    if not findings:
        return ""
    first, num_files = findings[0], len({finding.file for finding in findings})
    words = {
        "missing": "is missing",
        "size": f"has {first.num_bytes} bytes, {first.num_written} were written",
        "content": "is not what was written",
    }
    rest = f", and {num_files - 1} more" if num_files > 1 else ""
    return f"{first.file} {words[first.problem]}{rest}"
