"""What is at a path: a checkpoint, a directory of checkpoints, or something else.

Looking is cheap: it reads commit records and asks for the sizes of files, and never reads tensors.
It finds files that are missing or have another size than the record says; damage inside a file is
found by reading it, which `remesh verify` does.

Directories are looked at one level deep, those of buckets too: a bucket is asked for what lies
directly in a place, and what is no checkpoint is not listed any further. A request takes longer
than a page of names, so the sizes of a checkpoint's files come from one listing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from remesh import catalog
from remesh.checkpoint import Checkpoint
from remesh.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    RemeshError,
    StorageError,
)
from remesh.formats import native
from remesh.formats.table import format_at, place_of
from remesh.storage import (
    Directory,
    DirectoryListing,
    FileFacts,
    SizedListing,
    Storage,
    is_local,
    list_sizes,
    open_storage,
    shown_url,
)

Problem = Literal["missing", "size", "content"]
Status = Literal["committed", "unfinished", "damaged", "unreadable"]

_NO_RECORD = "no commit record: a save is running or was interrupted"


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
        step: Steps done when it was saved; None if that is not known.
    """

    name: str
    path: str
    status: Status
    reason: str = ""
    num_bytes: int = 0
    created: str | None = None
    world_size: int | None = None
    step: int | None = None


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


def is_checkpoint(path: str) -> bool:
    """Whether a path holds one checkpoint, of remesh or of another system that it reads.

    Raises:
        StateError: If it could be read as several formats.
        StorageError: If the storage fails.
    """
    place = place_of(path)
    try:
        format_at(place)
    except CheckpointNotFoundError:
        return False
    except StorageError:
        # Other systems' files are looked for further down, and a directory there may be closed to
        # us. If it is this one, asking for the record says so.
        return holds_record(place.storage)
    return True


def open_checkpoint(place: str) -> Checkpoint:
    """Open a committed checkpoint, of remesh or of another system that it reads.

    Raises:
        CheckpointNotFoundError: If there is none; the message says what is there.
        CorruptCheckpointError: If its small files are damaged.
        FormatVersionError: If it was written by a newer remesh.
        StorageError: If the storage fails.
    """
    if not is_checkpoint(place):
        raise nothing_at(open_storage(place))
    return Checkpoint(place)


def nothing_at(storage: Storage) -> CheckpointNotFoundError:
    """What to say where there is no checkpoint; looks at one directory and those directly in it."""
    root = storage.url
    if is_local(storage):
        directory = Path(root)
        if not directory.exists():
            return CheckpointNotFoundError(f"{root}: no such directory")
        if not directory.is_dir():
            return CheckpointNotFoundError(
                f"{root}: a file; give the directory of a checkpoint, which holds "
                f"{native.RECORD_NAME}"
            )
        found = {entry.name for entry in _entries(directory)}
        # Unlike `Path.exists`, this takes a directory that we may not look into for one without.
        holding = {name for name in found if os.path.exists(directory / name / native.RECORD_NAME)}
    else:
        here = _directory(storage, "")
        found = {name for name in (*here.directories, *here.files) if not name.startswith(".")}
        holding = {
            name
            for name in here.directories
            if not name.startswith("data-")
            and native.RECORD_NAME in _directory(storage, name).files
        }
    names, committed = sorted(found, key=natural_key), sorted(holding, key=natural_key)
    if not names:
        return CheckpointNotFoundError(f"{root}: no checkpoint there, {_emptiness(storage)}")
    if any(name.startswith("data-") for name in names):
        return CheckpointNotFoundError(
            f"{root}: no checkpoint there, only files of a save that was not finished (no "
            f"{native.RECORD_NAME}). Use another checkpoint; unless a save is running, this "
            "directory may be deleted."
        )
    if committed:
        return CheckpointNotFoundError(
            f"{root}: not a checkpoint itself, but it holds {len(committed)}; name one of them, "
            f"such as {root}/{committed[-1]}"
        )
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return CheckpointNotFoundError(
        f"{root}: not a remesh checkpoint (no {native.RECORD_NAME}); it holds {shown}"
    )


def _emptiness(storage: Storage) -> str:
    if is_local(storage):
        return "the directory is empty"
    return "no file has a name that begins so"


def scan(storage: Storage) -> list[Step]:
    """The checkpoints and unfinished saves directly in a directory, sorted by their numbers.

    A link to a directory that is listed anyway (`latest`) is left out.

    Raises:
        StorageError: If the directory itself cannot be read.
    """
    if not is_local(storage):
        return _scan_listing(storage)
    root = Path(storage.url)
    if not root.is_dir():
        return []
    # Links come first, so that of two names for one place the directory's own is kept.
    entries = sorted(_entries(root), key=lambda entry: not entry.is_symlink())
    places = {os.path.realpath(entry): entry for entry in entries}
    steps = [step for entry in places.values() if (step := _step_at(entry)) is not None]
    return sorted(steps, key=lambda step: natural_key(step.name))


def newest_of(steps: list[Step]) -> Step | None:
    """The one that a job resumes from: committed, and with the highest step; None if none is."""
    committed = [step for step in steps if step.status == "committed" and step.step is not None]
    return max(
        committed, key=lambda one: (one.step or 0, one.created or "", one.name), default=None
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
        record, findings = read_record_and_sizes(storage)
        problem = catalog.known_problem(open_storage(entry.parent), name)
    except CorruptCheckpointError:
        return Step(name, path, "damaged", f"{native.RECORD_NAME} is not what was written")
    except (OSError, RemeshError) as error:
        return Step(name, path, "unreadable", str(error))
    return _committed(name, path, record, describe_findings(findings) or problem)


def _committed(name: str, path: str, record: native.CommitRecord, problem: str) -> Step:
    """A step whose record could be read."""
    step = None
    try:
        step = catalog.step_of(name, record, path)
    except CorruptCheckpointError as error:
        problem = problem or str(error)
    return Step(
        name,
        path,
        "damaged" if problem else "committed",
        problem,
        sum(file.num_bytes for file in files_of(record)),
        record.created,
        record.world_size,
        step,
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
    return Step(name, path, "unfinished", _NO_RECORD, num_bytes)


def _directory(storage: Storage, path: str) -> Directory:
    """What lies directly in a directory of a storage that is not local."""
    if isinstance(storage, DirectoryListing):
        return storage.list_directory(path)
    directories, files = set(), {}
    for file, size in list_sizes(storage).items():
        if not path or file.startswith(f"{path}/"):
            name, slash, _ = file[len(path) + 1 if path else 0 :].partition("/")
            if slash:
                directories.add(name)
            else:
                files[name] = FileFacts(size, None)
    return Directory(tuple(sorted(directories)), files)


def _sizes_below(storage: Storage, path: str) -> dict[str, int]:
    """Relative path → bytes of all files below a directory."""
    prefix = f"{path}/"
    found = list_sizes(storage, prefix)
    return {file.removeprefix(prefix): size for file, size in found.items()}


def _scan_listing(storage: Storage) -> list[Step]:
    """The steps directly below the root of a storage that is not local."""
    names = [name for name in _directory(storage, "").directories if not name.startswith(".")]
    found = (_step_listed(storage, name) for name in names)
    return sorted(
        (step for step in found if step is not None), key=lambda step: natural_key(step.name)
    )


def _step_listed(storage: Storage, name: str) -> Step | None:
    """The step that a directory of a storage is, or None if it is something else."""
    path = f"{storage.url}/{name}"
    here = _directory(storage, name)
    folders = [folder for folder in here.directories if folder.startswith("data-")]
    if native.RECORD_NAME not in here.files:
        num_bytes = sum(
            sum(_sizes_below(storage, f"{name}/{folder}").values()) for folder in folders
        )
        return Step(name, path, "unfinished", _NO_RECORD, num_bytes) if folders else None
    try:
        record, findings = native.begin_anew(lambda: _record_and_sizes_listed(storage, name))
        problem = catalog.known_problem(storage, name)
    except CorruptCheckpointError:
        return Step(name, path, "damaged", f"{native.RECORD_NAME} is not what was written")
    except RemeshError as error:
        return Step(name, path, "unreadable", str(error))
    return _committed(name, path, record, describe_findings(findings) or problem)


def _record_and_sizes_listed(
    storage: Storage, name: str
) -> tuple[native.CommitRecord, list[Finding]]:
    """`read_record_and_sizes` of a directory of a storage, read once."""
    path = f"{storage.url}/{name}"

    def read() -> native.CommitRecord:
        return native.decode_record(storage.read(f"{name}/{native.RECORD_NAME}"), path)

    record = read()
    folder = native.data_folder(record.save_id)
    below = _sizes_below(storage, f"{name}/{folder}")
    sizes = {f"{folder}/{file}": size for file, size in below.items()}
    findings = _compare_sizes(record, sizes.get)
    if findings and read() != record:
        raise CheckpointReplacedError(f"{path}: replaced by another save while it was looked at")
    return record, findings


def files_of(record: native.CommitRecord) -> tuple[native.FileRecord, ...]:
    """Every file that a record names."""
    return (record.index, record.values, *record.files)


def findings_of(storage: Storage, checkpoint: Checkpoint) -> list[Finding]:
    """Files that are missing or have another size; other systems record no sizes."""
    is_native = checkpoint.format == native.FORMAT_NAME
    return check_sizes(storage, checkpoint.record) if is_native else []


def read_record_and_sizes(storage: Storage) -> tuple[native.CommitRecord, list[Finding]]:
    """The commit record, and what `check_sizes` finds of it.

    Raises:
        CheckpointError: If there is no record, or it is damaged.
        StorageError: If the storage fails.
    """

    def read() -> tuple[native.CommitRecord, list[Finding]]:
        record = native.read_record(storage)
        return record, check_sizes(storage, record)

    return native.begin_anew(read)


def check_sizes(storage: Storage, record: native.CommitRecord) -> list[Finding]:
    """Compare the files with the record, without reading them.

    Raises:
        CheckpointReplacedError: If files are missing because the record has been replaced.
        StorageError: If the storage fails.
    """

    def size_of(path: str) -> int | None:
        try:
            return storage.size(path)
        except CheckpointNotFoundError:
            return None

    if isinstance(storage, SizedListing):
        findings = _compare_sizes(record, storage.list_sizes().get)
    else:
        findings = _compare_sizes(record, size_of)
    if findings:
        native.check_current(storage, native.identity_of(record))
    return findings


def _compare_sizes(
    record: native.CommitRecord, size_of: Callable[[str], int | None]
) -> list[Finding]:
    findings = []
    for file in files_of(record):
        size = size_of(file.path)
        if size is None:
            findings.append(Finding(file.path, "missing", 0, file.num_bytes))
        elif size != file.num_bytes:
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


def no_such_name(path: str, name: str, names: Sequence[str]) -> str:
    """What to say about a name under which nothing is stored."""
    import difflib

    near = difflib.get_close_matches(name, names, n=3)
    hint = (
        f"near are {', '.join(near)}"
        if near
        else f"remesh ls {shown_url(path)} --values lists the names"
    )
    return f"{name}: nothing is stored under this name; {hint}"
