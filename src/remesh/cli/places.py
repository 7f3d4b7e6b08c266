"""What is at a path: a checkpoint, a directory of checkpoints, or something else.

Looking is cheap: it reads commit records and asks for the sizes of files, and never reads tensors.
It finds files that are missing or have another size than the record says; damage inside a file is
found by reading it, which `remesh verify` does.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from remesh.checkpoint import Checkpoint
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RemeshError,
    StorageError,
)
from remesh.formats import native
from remesh.storage import Storage, open_storage

Problem = Literal["missing", "size", "content"]
Status = Literal["committed", "unfinished", "damaged", "unreadable"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A stretch of a file that is not as it was written.

    Attributes:
        file: The file, relative to the checkpoint.
        problem: The file is `missing`, has another `size`, or other `content`.
        start: First byte that is wrong, missing or too much.
        stop: One past the last.
        tensors: Names of the tensors that lie there, as far as they are known.
    """

    file: str
    problem: Problem
    start: int
    stop: int
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A checkpoint, or what a save left behind, in a directory of them.

    Attributes:
        name: The name of its directory.
        path: Where it is.
        status: `committed`; `unfinished`, without a commit record; `damaged`; or `unreadable`,
            because the storage refused or a newer remesh wrote it.
        reason: Why it is not simply committed; empty if it is.
        num_bytes: Size of its files, by the commit record where there is one.
        created: When it was committed, ISO 8601 in UTC; None if that is not known.
        world_size: Number of ranks that saved it; None if that is not known.
    """

    name: str
    path: str
    status: Status
    reason: str = ""
    num_bytes: int = 0
    created: str | None = None
    world_size: int | None = None


def natural_key(name: str) -> tuple[str | int, ...]:
    """A key that sorts the digits in names as numbers: `step_9` before `step_10`."""
    parts = re.split(r"([0-9]+)", name)
    # Text and numbers alternate, so that only like is compared with like.
    return tuple(int(part) if number % 2 else part for number, part in enumerate(parts))


def holds_record(storage: Storage) -> bool:
    """Whether there is a commit record; it may be damaged."""
    try:
        storage.size(native.RECORD_NAME)
    except CheckpointNotFoundError:
        return False
    return True


def open_checkpoint(place: str) -> Checkpoint:
    """Open a committed checkpoint.

    Raises:
        CheckpointNotFoundError: If there is none; the message says what is there.
        CorruptCheckpointError: If its small files are damaged.
        FormatVersionError: If it was written by a newer remesh.
        StorageError: If the storage fails.
    """
    storage = open_storage(place)
    if not holds_record(storage):
        raise nothing_at(storage)
    return Checkpoint(storage)


def nothing_at(storage: Storage) -> CheckpointNotFoundError:
    """What to say where there is no checkpoint; looks at one directory and those directly in it."""
    root = Path(storage.url)
    if not root.exists():
        return CheckpointNotFoundError(f"{root}: no such directory")
    if not root.is_dir():
        return CheckpointNotFoundError(
            f"{root}: a file; give the directory of a checkpoint, which holds {native.RECORD_NAME}"
        )
    names = sorted((entry.name for entry in _entries(root)), key=natural_key)
    if not names:
        return CheckpointNotFoundError(f"{root}: no checkpoint there, the directory is empty")
    if any(name.startswith("data-") for name in names):
        return CheckpointNotFoundError(
            f"{root}: no checkpoint there, only files of a save that was not finished (no "
            f"{native.RECORD_NAME}). Use another checkpoint; unless a save is running, this "
            "directory may be deleted."
        )
    # Unlike `Path.exists`, this takes a directory that we may not look into for one without.
    committed = [name for name in names if os.path.exists(root / name / native.RECORD_NAME)]
    if committed:
        return CheckpointNotFoundError(
            f"{root}: not a checkpoint itself, but it holds {len(committed)}; name one of them, "
            f"such as {root / committed[-1]}"
        )
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return CheckpointNotFoundError(
        f"{root}: not a remesh checkpoint (no {native.RECORD_NAME}); it holds {shown}"
    )


def scan(storage: Storage) -> list[Step]:
    """The checkpoints and unfinished saves directly in a directory, sorted by their numbers.

    A link to a directory that is listed anyway (`latest`) is left out.

    Raises:
        StorageError: If the directory itself cannot be read.
    """
    root = Path(storage.url)
    if not root.is_dir():
        return []
    # Links come first, so that of two names for one place the directory's own is kept.
    entries = sorted(_entries(root), key=lambda entry: not entry.is_symlink())
    places = {os.path.realpath(entry): entry for entry in entries}
    steps = [step for entry in places.values() if (step := _step_at(entry)) is not None]
    return sorted(steps, key=lambda step: natural_key(step.name))


def newest_of(steps: list[Step]) -> Step | None:
    """The committed checkpoint that was committed last."""
    committed = [step for step in steps if step.status == "committed"]
    return max(
        committed, key=lambda step: (step.created or "", natural_key(step.name)), default=None
    )


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, hidden names excepted."""
    try:
        return [entry for entry in directory.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise StorageError(
            f"cannot list {directory}: {error.strerror}; check its permissions"
        ) from error


def _step_at(entry: Path) -> Step | None:
    """The step that an entry of a directory is, or None if it is something else."""
    storage = open_storage(entry)
    name, path = entry.name, str(entry)
    try:
        if not entry.is_dir():
            return None
        if not holds_record(storage):
            return _unfinished(storage, name, path)
        record = native.read_record(storage)
        findings = check_sizes(storage, record)
    except CorruptCheckpointError:
        return Step(name, path, "damaged", f"{native.RECORD_NAME} is not what was written")
    except (OSError, RemeshError) as error:
        return Step(name, path, "unreadable", str(error))
    return Step(
        name,
        path,
        "damaged" if findings else "committed",
        describe_findings(findings),
        sum(file.num_bytes for file in files_of(record)),
        record.created,
        record.world_size,
    )


def _unfinished(storage: Storage, name: str, path: str) -> Step | None:
    """A directory without a record: None if it has no files of a save either."""
    if not any(entry.name.startswith("data-") for entry in _entries(Path(path))):
        return None
    num_bytes = 0
    for file in storage.list("data-"):
        try:
            num_bytes += storage.size(file)
        except CheckpointNotFoundError:
            # A running save may be giving up just now.
            continue
    reason = "no commit record: a save is running or was interrupted"
    return Step(name, path, "unfinished", reason, num_bytes)


def files_of(record: native.CommitRecord) -> tuple[native.FileRecord, ...]:
    """Every file that a record names."""
    return (record.index, record.values, *record.files)


def check_sizes(storage: Storage, record: native.CommitRecord) -> list[Finding]:
    """Compare the files with the record, without reading them.

    Raises:
        StorageError: If the storage fails.
    """
    findings = []
    for file in files_of(record):
        try:
            size = storage.size(file.path)
        except CheckpointNotFoundError:
            findings.append(Finding(file.path, "missing", 0, file.num_bytes))
            continue
        if size != file.num_bytes:
            start, stop = sorted((size, file.num_bytes))
            findings.append(Finding(file.path, "size", start, stop))
    return findings


def describe_findings(findings: list[Finding]) -> str:
    """The first finding in words, and how many more there are."""
    if not findings:
        return ""
    first, num_files = findings[0], len({finding.file for finding in findings})
    words = {
        "missing": "is missing",
        "size": "has another size than was written",
        "content": "is not what was written",
    }
    rest = f", and {num_files - 1} more" if num_files > 1 else ""
    return f"{first.file} {words[first.problem]}{rest}"
