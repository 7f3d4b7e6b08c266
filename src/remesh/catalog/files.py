"""Whether the files that a commit record names are there and have their sizes.

Nothing is read but the record. `Checkpoint.verify` finds damage inside of files, which it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from remesh.errors import CheckpointNotFoundError, CheckpointReplacedError
from remesh.formats import native
from remesh.storage import Storage

Problem = Literal["missing", "size", "content"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A stretch of a file that is not as it was written."""

    file: str  # the file, relative to the checkpoint
    problem: Problem  # the file is `missing`, has another `size`, or other `content`
    start: int  # first byte that is wrong, missing or too much
    stop: int  # one past the last
    tensors: tuple[str, ...] = ()  # names of the tensors that lie there, as far as they are known
    num_bytes: int | None = None  # size of the file, if it has another than was written
    num_written: int | None = None  # the size that was written, likewise


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
        findings = compare_sizes(record, sizes.get)
        if findings and read_record() != record:
            raise CheckpointReplacedError(
                f"{root.url}/{name}: replaced by another save while it was looked at"
            )
        return record, findings

    return native.begin_anew(read)


def check_sizes(storage: Storage, record: native.CommitRecord) -> list[Finding]:
    """Compare the files with the record, without reading them."""

    def size_of(path: str) -> int | None:
        try:
            return storage.size(path)
        except CheckpointNotFoundError:
            return None

    if storage.lists_sizes:
        findings = compare_sizes(record, storage.list_sizes().get)
    else:
        findings = compare_sizes(record, size_of)
    if findings:
        native.check_current(storage, native.identity_of(record))
    return findings


def compare_sizes(
    record: native.CommitRecord, size_of: Callable[[str], int | None]
) -> list[Finding]:
    """The files whose sizes are not those of the record."""
    findings = []
    for file in files_of(record):
        size = size_of(file.path)
        if size is None:
            findings.append(Finding(file.path, "missing", 0, file.num_bytes))
        elif size != file.num_bytes:
            start, stop = sorted((size, file.num_bytes))
            findings.append(
                Finding(file.path, "size", start, stop, num_bytes=size, num_written=file.num_bytes)
            )
    return findings


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
