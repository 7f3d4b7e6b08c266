"""What lies in a directory of checkpoints: whole ones, unfinished saves, damaged ones.

A scan lists directories, one level deep, reads commit records, and compares the sizes of files. It
never reads tensors. Checkpoints of other systems are recognised in local directories.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from remesh.catalog.checkpoints import known_problem, newest_of, number_in, step_of
from remesh.core.integrity import Finding, compare_sizes, repair_advice
from remesh.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    RemeshError,
    StorageError,
)
from remesh.formats import native
from remesh.formats.place import Place
from remesh.formats.table import FORMATS, format_at
from remesh.storage import (
    Directory,
    Storage,
    is_local,
    open_storage,
)


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


Status = Literal["committed", "unfinished", "damaged", "unreadable"]

_NO_RECORD = "no commit record: a save is running, was interrupted, or the record was lost"
_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint, or what a save left behind, in a directory of them."""

    name: str  # the name of its directory
    path: str  # where it is
    status: Status
    """`committed`; `unfinished`, without a commit record; `damaged`; or `unreadable`, because the
    storage refused or a newer remesh wrote it."""
    reason: str = ""  # why it is not simply committed; empty if it is
    num_bytes: int = 0  # size of its files, by the commit record where there is one
    created: str | None = None  # when it was committed, ISO 8601 in UTC; None if that is not known
    world_size: int | None = None  # number of ranks that saved it; None if that is not known
    step: int | None = None  # steps done when it was saved; None if that is not known
    format: str = native.FORMAT_NAME  # `remesh`, or the name of another system's format
    repaired_from: str = ""  # the damaged checkpoint from which `repair` made it; empty for others
    num_lost: int = 0  # names of tensors and values that the repair knew of and could not save


def natural_key(name: str) -> tuple[str | int, ...]:
    """A key that sorts the digits in names as numbers: `step_9` before `step_10`."""
    parts = re.split(r"([0-9]+)", name)
    # Text and numbers alternate, so that only like is compared with like.
    return tuple(int(part) if number % 2 else part for number, part in enumerate(parts))


def scan(storage: Storage) -> list[Entry]:
    """The checkpoints and unfinished saves in a directory, by number; no second links to them."""
    names = [name for name in storage.list_directory().directories if not name.startswith(".")]
    if is_local(storage):
        names = _without_second_links(Path(storage.url), names)
    found = (_entry_at(storage, name) for name in names)
    return sorted(
        (entry for entry in found if entry is not None), key=lambda entry: natural_key(entry.name)
    )


def newest_entry(entries: Sequence[Entry], *, native_only: bool = True) -> Entry | None:
    """The newest whole checkpoint of a directory: that from which a job resumes.

    Those of other systems count only where no other is, and with `native_only` not at all. None if
    there is no whole checkpoint whose step is known.
    """
    whole = [one for one in entries if one.status == "committed" and one.step is not None]
    ours = newest_of([one for one in whole if one.format == native.FORMAT_NAME])
    return ours if native_only or ours is not None else newest_of(whole)


def _without_second_links(root: Path, names: Sequence[str]) -> list[str]:
    """Names of directories; of several names for one place that which is not a link."""
    # Links come first, so that the directory's own name replaces them.
    ordered = sorted(names, key=lambda name: not (root / name).is_symlink())
    return list({os.path.realpath(root / name): name for name in ordered}.values())


def _entry_at(root: Storage, name: str) -> Entry | None:
    """The entry that a directory is, or None if it is something else."""
    path = f"{root.url}/{name}"
    try:
        here = root.list_directory(name)
        folders = [folder for folder in here.directories if folder.startswith("data-")]
        if native.RECORD_NAME not in here.files:
            if folders:
                sizes = (root.list_sizes(f"{name}/{folder}/") for folder in folders)
                num_bytes = sum(sum(found.values()) for found in sizes)
                return Entry(name, path, "unfinished", _NO_RECORD, num_bytes)
            return _foreign_entry(name, path, here) if is_local(root) else None
        record, findings = read_record_and_sizes(root, name)
        problem = known_problem(root, name)
    except CorruptCheckpointError:
        return Entry(name, path, "damaged", f"{native.RECORD_NAME} is not what was written")
    except RemeshError as error:
        return Entry(name, path, "unreadable", str(error))
    return _committed(name, path, record, describe_findings(findings) or problem)


def _committed(name: str, path: str, record: native.CommitRecord, problem: str) -> Entry:
    """An entry whose record could be read."""
    step = None
    try:
        step = step_of(name, record, path)
    except CorruptCheckpointError as error:
        problem = problem or str(error)
    return Entry(
        name,
        path,
        "damaged" if problem else "committed",
        problem,
        sum(file.num_bytes for file in files_of(record)),
        record.created,
        record.world_size,
        step,
        repaired_from=str(record.metadata.get("repaired_from", "")),
        num_lost=lost if isinstance(lost := record.metadata.get("num_lost", 0), int) else 0,
    )


def _foreign_entry(name: str, path: str, here: Directory) -> Entry | None:
    """A checkpoint of another system."""
    if name.startswith("data-") or not (here.files or here.directories):
        return None
    place = Place(open_storage(path))
    for row in FORMATS:
        # Of directories with directories no listing is made, so that no tree is walked.
        if not (row.needs_listing and here.directories) and row.is_at(place):
            num_bytes = sum(place.storage.list_sizes().values())
            return Entry(
                name,
                path,
                "committed",
                num_bytes=num_bytes,
                step=number_in(name),
                format=row.name,
            )
    return None


# ---------------------------------------------------------------------------------------------
# Where there is no checkpoint
# ---------------------------------------------------------------------------------------------


def is_checkpoint(place: Place) -> bool:
    """True if a place holds one checkpoint, of remesh or of another system that it reads."""
    try:
        format_at(place)
    except CheckpointNotFoundError:
        return False
    except StorageError:
        # Other systems' files are looked for further down, and a directory there may be closed to
        # us. If it is this one, asking for the record says so.
        return place.storage.exists(native.RECORD_NAME)
    return True


@contextmanager
def explained_absence(place: Place) -> Iterator[None]:
    """Open what is at a place; if there is no checkpoint, the error says what is there instead."""
    try:
        yield
    except (CheckpointNotFoundError, StorageError) as error:
        if place.file or place.format is not None:
            raise
        try:
            absence = None if is_checkpoint(place) else nothing_at(place.storage)
        except StorageError:
            raise error from None  # the first says as much
        if absence is None:
            raise
        raise absence from error


def nothing_at(storage: Storage) -> CheckpointNotFoundError:
    """The error where there is no checkpoint; looks at one directory and those directly in it."""
    root = storage.url
    if is_local(storage) and not os.path.isdir(root):
        if not os.path.lexists(root):
            return CheckpointNotFoundError(f"{root}: no such directory")
        return CheckpointNotFoundError(
            f"{root}: a file that is no checkpoint by itself; give the directory of one, or a file "
            "*.safetensors, *.pt, *.pth, *.bin or *.ckpt"
        )
    here = storage.list_directory()
    found = [name for name in (*here.directories, *here.files) if not name.startswith(".")]
    if not found:
        empty = (
            "the directory is empty" if is_local(storage) else "no file has a name that begins so"
        )
        return CheckpointNotFoundError(f"{root}: no checkpoint there, {empty}")
    if any(name.startswith("data-") for name in here.directories):
        return CheckpointNotFoundError(
            f"{root}: no commit record ({native.RECORD_NAME}), but files of a save that was "
            "interrupted, is still running, or has lost its record. "
            f"{repair_advice(root)}"
        )
    entries = scan(storage)
    if entries:
        return CheckpointNotFoundError(f"{root}: not a checkpoint itself; {_suggestion(entries)}")
    names = sorted(found, key=natural_key)
    shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
    looked = "; ".join(row.marker for row in FORMATS)
    return CheckpointNotFoundError(
        f"{root}: not a checkpoint (no {native.RECORD_NAME}); it holds {shown}. "
        f"Looked for: {looked}."
    )


def _suggestion(entries: Sequence[Entry]) -> str:
    """Which of the checkpoints in a directory to name instead of the directory."""
    whole = [entry for entry in entries if entry.status == "committed"]
    count = f"1 checkpoint, {whole[0].path}" if len(whole) == 1 else f"{len(whole)} checkpoints"
    newest = newest_entry(entries, native_only=False)
    if newest is None and whole:
        newest = whole[-1]
    if newest is None:
        return (
            f"it holds {len(entries)} damaged or unfinished, none that is whole. "
            f"{repair_advice(entries[-1].path)}"
        )
    if len(whole) == 1:
        return f"it holds {count}; name that"
    return f"it holds {count}; name one of them, the newest is {newest.path}"
