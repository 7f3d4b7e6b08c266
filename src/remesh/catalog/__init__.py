"""What is a checkpoint, which is newest, which is unfinished or damaged: the only scanner.

The manager, the command line, the rescue of snapshots, and the interfaces of other systems ask this
package. `list_checkpoints` lists directories, one level deep, and reads commit records and the
small files beside them. If asked to, it also compares the sizes of files, and finds unfinished
saves and, in local directories, checkpoints of other systems. It never reads tensors.

A checkpoint lies in a directory whose name ends with its step (`step_00001000`), local or in a
bucket. What a manager knows when it saves is in the commit record, as metadata under `manager`
(`ManagerNote`). What is learned later stands in small files beside the record:

* `pinned.json`: keep this one. `pin` and `unpin`.
* `in-use-<token>.json`: a process reads this one, until a time at the latest. `lease`.
* `failures.json`: how often it could not be loaded, and why. `note_failure`.
* `removing.json`: it is being removed. `remove`.

A save that replaces a checkpoint removes its failures, and its pin unless told to leave it.

Those with content have a digest of it, and are read again if it does not fit. A reader's mark that
stays wrong counts for ever.

Removing takes the commit record away first and the files afterwards, so that there is never half a
checkpoint. If the process dies in between, `removing.json` tells the next one to finish the work.
It names the folders of the checkpoint: others may be of a save that is about to be committed there.
A reader puts its mark before it reads the record; a remover looks for marks and pins once more when
the record is gone, and puts the record back if there is one. So of the two, one always notices the
other.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from os.path import islink
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from remesh._repr import listed, short_repr, shown
from remesh.core.integrity import NUM_READINGS, Finding, compare_sizes, hex_digest, repair_advice
from remesh.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    FormatVersionError,
    NoSpaceError,
    RemeshError,
    StateError,
    StorageError,
)
from remesh.formats import native
from remesh.formats.checks import MALFORMED
from remesh.formats.place import Place
from remesh.formats.table import FORMATS, format_at
from remesh.storage import Directory, Storage, ask_together, is_local, open_storage

__all__ = ["CheckpointInfo", "ManagerNote", "lease", "pin", "unpin"]

_LOGGER = logging.getLogger("remesh")

NOTE_KEY = "manager"
"""Where the metadata of a commit record holds the `ManagerNote`."""

LEASE_SECONDS = 6 * 3600.0
"""How long a lease counts if its reader dies without ending it."""

_PINNED = "pinned.json"
_OUTLASTING = b'{"outlasts": "a save"}\n'
_FAILURES = "failures.json"
_REMOVING = "removing.json"
_NAME = re.compile(r"(?:.*[^0-9])?([0-9]+)", re.DOTALL)
_IN_USE = re.compile(r"in-use-[0-9a-f]+\.json")

_NO_RECORD = "no commit record: a save is running, was interrupted, or the record was lost"


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """A run of an experiment tracker."""

    tracker: str
    """`tensorboard`, `wandb`, `swanlab` or `mlflow`."""
    run_id: str
    """Its id there; for TensorBoard the directory of its event files."""
    project: str = ""
    """The project of the run, if the id alone does not find it: the project of Weights & Biases or
    SwanLab. Empty elsewhere."""
    owner: str = ""
    """The owner of that project; empty if unknown."""


class ManagerNote(msgspec.Struct, frozen=True, kw_only=True):
    """A manager's record of a checkpoint."""

    step: int
    """Steps done."""
    run: str
    """Names the run to which the checkpoint belongs; kept when the run is resumed."""
    metrics: dict[str, float | None] = {}
    """Name → value; None for one that is not finite."""
    role_grid: tuple[tuple[str, int], ...] = ()
    """Axes of the grid of roles, and their sizes (`remesh.training.rng`)."""
    streams: tuple[str, ...] = ()
    """Names of the random number generators that are stored."""
    trackers: dict[str, TrackerRun] = {}
    """Name → run of an experiment tracker."""
    parent: str = ""
    """The checkpoint from which the process had resumed, as `path#save id`; empty if it had not."""

    __repr__ = short_repr


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON has them: None for what is not a finite number."""
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise StateError(f"metrics: {name!r} is no number, but {shown(value)}") from error
        found[name] = number if math.isfinite(number) else None
    return found


Status = Literal["committed", "unfinished", "damaged", "unreadable"]


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a checkpoint that are known without opening it."""

    name: str
    """Name of its directory."""
    path: str
    """Where it is."""
    status: Status = "committed"
    """`committed`; `unfinished`, without a commit record; `damaged`; or `unreadable`, because the
    storage refused or a newer remesh wrote it."""
    problem: str = ""
    """Why it is not simply committed; empty if it is."""
    step: int
    """Steps done: as its manager noted, or else what its name ends with; -1 if its name does not
    end with a number."""
    run: str = ""
    """The run that it belongs to; empty if it was not saved by a manager."""
    created: str = ""
    """When it was committed, ISO 8601 in UTC; empty if that cannot be read."""
    num_bytes: int = 0
    """Size of its files."""
    world_size: int = 0
    """Number of ranks that saved it; 0 if that cannot be read."""
    save_id: str = ""
    """Names the save."""
    metrics: dict[str, float | None] = {}
    """Name → value."""
    is_pinned: bool = False
    """Whether it must not be removed."""
    in_use_until: float = 0.0
    """Until when it must not be removed, in seconds since the epoch; 0 if no process reads it."""
    num_failures: int = 0
    """How often it could not be loaded."""
    note: ManagerNote | None = None
    """What its manager recorded; None if it was saved without one."""
    format: str = native.FORMAT_NAME
    """`remesh`, or the name of another system's format."""
    repaired_from: str = ""
    """The damaged checkpoint from which `remesh repair` made it; empty for others."""
    num_lost: int = 0
    """Names of tensors and values that the repair knew of and could not save."""

    __repr__ = short_repr


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    digest: str = ""  # of all else; older marks have none


class _Failures(_Mark, frozen=True):
    count: int
    reason: str


class _InUse(_Mark, frozen=True):
    until: float
    run: str = ""


class _Removing(_Mark, frozen=True):
    folders: list[str]  # those of the checkpoint


_AnyMark = TypeVar("_AnyMark", bound=_Mark)


def step_name(step: int) -> str:
    """The name of the directory of a step's checkpoint."""
    return f"step_{step:08d}"


def place_of(root: str | os.PathLike[str], name: str) -> str:
    """The path or URL of something directly below a root."""
    return str(Path(root) / name) if isinstance(root, os.PathLike) else f"{root.rstrip('/')}/{name}"


# ---------------------------------------------------------------------------------------------
# Looking
# ---------------------------------------------------------------------------------------------


def list_checkpoints(
    storage: Storage, *, compare_sizes: bool = False, with_others: bool = False
) -> list[CheckpointInfo]:
    """The committed checkpoints directly below a root whose names end with a number, by age.

    Args:
        storage: The root.
        compare_sizes: Find out whether files are missing or have another size. Otherwise nothing
            is read but small files.
        with_others: List the rest as well: what has no number, unfinished saves, checkpoints of
            other systems, and what cannot be read, which is an error otherwise.
    """
    # Directories without a number may be large, or closed to this user.
    names = _names_below(storage, with_number=not with_others)
    looks = [partial(_look, storage, name, compare_sizes, with_others) for name in names]
    infos = ask_together(storage, looks)
    return sorted((info for info in infos if info is not None), key=age_key)


def age_key(info: CheckpointInfo) -> tuple[int, str, str]:
    """A key that sorts checkpoints by age: by step, and those of one step by time of commit."""
    return info.step, info.created, info.name


def newest_of(infos: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The newest from which a job would resume: whole, of remesh, and with a known step."""
    good = (info for info in infos if not info.problem and info.format == native.FORMAT_NAME)
    return max((info for info in good if info.step >= 0), key=age_key, default=None)


def number_in(name: str) -> int | None:
    """The number with which a name ends; None if it does not end with one."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def _names_below(storage: Storage, *, with_number: bool = False) -> Sequence[str]:
    """Names of directories below a root; of several for one place that which is not a link."""
    found = storage.list_directory().directories
    # File systems have `lost+found`, which is closed to users.
    names = [name for name in found if not name.startswith(".") and name != "lost+found"]
    if with_number:
        names = [name for name in names if number_in(name) is not None]
    if not is_local(storage):
        return names
    # Links come first, so that the directory's own name replaces them.
    names.sort(key=lambda name: not _is_link(storage, name))
    return list({os.path.realpath(f"{storage.url}/{name}"): name for name in names}.values())


def _is_link(storage: Storage, name: str) -> bool:
    """True of a link to a directory: what lies elsewhere is not removed through it."""
    return is_local(storage) and islink(f"{storage.url}/{name}")


def _look(
    storage: Storage, name: str, compare_sizes: bool, with_others: bool
) -> CheckpointInfo | None:
    """What a directory holds; None if that is not to be listed."""
    number = number_in(name)
    step = -1 if number is None else number
    info = CheckpointInfo(name=name, path=f"{storage.url}/{name}", step=step)
    try:
        here = storage.list_directory(name)
        if native.RECORD_NAME in here.files:
            return _committed(storage, info, set(here.files), compare_sizes)
        return _without_record(storage, info, here) if with_others else None
    except CheckpointNotFoundError:
        return None  # it is being removed just now
    except RemeshError as error:
        if not with_others:
            raise
        return msgspec.structs.replace(info, status="unreadable", problem=str(error))


def _committed(
    storage: Storage, info: CheckpointInfo, files: set[str], compare_sizes: bool
) -> CheckpointInfo:
    """The properties of a checkpoint by its commit record, and by the marks beside it."""
    name, findings = info.name, list[Finding]()
    failures = _failures(storage, name) if _FAILURES in files else _Failures(count=0, reason="")
    info = msgspec.structs.replace(
        info,
        is_pinned=_PINNED in files or _is_link(storage, name),
        in_use_until=_in_use_until(storage, name, files),
        num_failures=failures.count,
    )
    try:
        if compare_sizes:
            record, findings = read_record_and_sizes(storage, name)
        else:
            record = native.read_record_at(storage, f"{name}/{native.RECORD_NAME}")
    except CorruptCheckpointError:
        return _damaged(info, f"{native.RECORD_NAME} is not what was written")
    except FormatVersionError as error:
        return msgspec.structs.replace(info, status="unreadable", problem=str(error))
    info, problem = with_record(info, record), describe_findings(findings) or failures.reason
    return _damaged(info, problem) if problem else info


def _damaged(info: CheckpointInfo, problem: str) -> CheckpointInfo:
    return msgspec.structs.replace(info, status="damaged", problem=problem)


def _without_record(
    storage: Storage, info: CheckpointInfo, here: Directory
) -> CheckpointInfo | None:
    """An unfinished save, or a checkpoint of another system; None if a directory is neither."""
    folders = [folder for folder in here.directories if folder.startswith("data-")]
    if folders:
        sizes = (storage.list_sizes(f"{info.name}/{folder}/") for folder in folders)
        num_bytes = sum(sum(found.values()) for found in sizes)
        return msgspec.structs.replace(
            info, status="unfinished", problem=_NO_RECORD, num_bytes=num_bytes
        )
    is_empty = not (here.files or here.directories)
    if is_empty or info.name.startswith("data-") or not is_local(storage):
        return None
    place = Place(open_storage(info.path))
    for row in FORMATS:
        # Of directories with directories no listing is made, so that no tree is walked.
        if not (row.needs_listing and here.directories) and row.is_at(place):
            num_bytes = sum(place.storage.list_sizes().values())
            return msgspec.structs.replace(info, format=row.name, num_bytes=num_bytes)
    return None


def with_record(info: CheckpointInfo, record: native.CommitRecord) -> CheckpointInfo:
    """The properties of a checkpoint with what its commit record says."""
    metadata = record.metadata
    try:
        note = msgspec.convert(metadata.get(NOTE_KEY), ManagerNote | None)
    except msgspec.ValidationError as error:
        note, what = None, f"its metadata under {NOTE_KEY!r} is not a manager's ({error})"
        info = _damaged(info, f"{info.path}: {what}\nLoad it with remesh.load")
    return msgspec.structs.replace(
        info,
        step=info.step if note is None or info.step < 0 else note.step,
        run="" if note is None else note.run,
        created=record.created,
        num_bytes=sum(file.num_bytes for file in files_of(record)),
        world_size=record.world_size,
        save_id=record.save_id,
        metrics={} if note is None else note.metrics,
        note=note,
        repaired_from=str(metadata.get("repaired_from", "")),
        num_lost=lost if isinstance(lost := metadata.get("num_lost", 0), int) else 0,
    )


def _failures(storage: Storage, name: str) -> _Failures:
    try:
        found = _read_mark(storage, f"{name}/{_FAILURES}", _Failures)
    except CheckpointNotFoundError:
        return _Failures(count=0, reason="")
    return found or _Failures(count=1, reason=f"{_FAILURES} cannot be read")


def _in_use_until(storage: Storage, name: str, files: set[str]) -> float:
    """The latest time until which a reader has marked a checkpoint."""
    latest = 0.0
    for file in files:
        if _IN_USE.fullmatch(file):
            with suppress(CheckpointNotFoundError):  # the reader has just finished
                mark = _read_mark(storage, f"{name}/{file}", _InUse)
                latest = max(latest, math.inf if mark is None else mark.until)
    return latest


def _read_mark(storage: Storage, path: str, kind: type[_AnyMark]) -> _AnyMark | None:
    """A mark, read again if it is not what was written; None if it stays wrong."""
    for _ in range(NUM_READINGS):
        with suppress(*MALFORMED):
            mark = msgspec.json.decode(storage.read(path), type=kind)
            if mark.digest in {"", _with_digest(mark).digest}:
                return mark
    return None


def _with_digest(mark: _AnyMark) -> _AnyMark:
    text = msgspec.json.encode(msgspec.structs.replace(mark, digest=""))
    return msgspec.structs.replace(mark, digest=hex_digest(text))


# ---------------------------------------------------------------------------------------------
# Marks
# ---------------------------------------------------------------------------------------------


def pin(path: str | os.PathLike[str]) -> None:
    """Keep a checkpoint even if policies would remove it.

    Raises:
        CheckpointNotFoundError: If there is none, or it has been removed meanwhile.
        StorageError: If the storage fails.
    """
    storage = open_storage(path)
    storage.size(native.RECORD_NAME)
    storage.put(_PINNED, b"{}\n", overwrite=True)
    try:
        storage.size(native.RECORD_NAME)  # after the pin is there, as in `lease`
    except CheckpointNotFoundError:
        storage.delete(_PINNED)
        raise


def unpin(path: str | os.PathLike[str]) -> None:
    """Remove the pin of a checkpoint, if it has one: policies apply again.

    Raises:
        CheckpointNotFoundError: If there is none.
        StorageError: If the storage fails.
    """
    storage = open_storage(path)
    storage.size(native.RECORD_NAME)
    storage.delete(_PINNED)


@contextmanager
def lease(
    path: str | os.PathLike[str],
    *,
    seconds: float = LEASE_SECONDS,
    run: str = "",
    now: float | None = None,
) -> Iterator[None]:
    """Keep a checkpoint from being removed while it is read.

    Args:
        path: The checkpoint.
        seconds: After which the mark does not count any more, if this process dies.
        run: The run that resumes from it; empty for other readers.
        now: The time, in seconds since the epoch; by default that of this machine's clock.

    Raises:
        CheckpointNotFoundError: If there is none, or it has been removed meanwhile.
        StorageError: If the storage cannot be read. One that takes no mark is warned of: the
            checkpoint is readable, but other jobs do not see that it is read.
    """
    storage = open_storage(path)
    storage.size(native.RECORD_NAME)
    mark = f"in-use-{secrets.token_hex(6)}.json"
    with best_effort(f"marking {storage.url} as in use"):
        until = (time.time() if now is None else now) + seconds
        data = msgspec.json.encode(_with_digest(_InUse(until=until, run=run)))
        storage.put(mark, data, overwrite=True)
    try:
        # Checked after the mark is there; `remove` checks in the opposite order.
        storage.size(native.RECORD_NAME)
        yield
    finally:
        with best_effort(f"removing the mark {storage.url}/{mark}"):
            storage.delete(mark)


@contextmanager
def best_effort(action: str) -> Iterator[None]:
    """Log a warning where the storage refuses the action in the block, and go on.

    For marks and removals. A checkpoint is readable without them, also on a full or read-only disk.
    """
    try:
        yield
    except StorageError as error:
        _LOGGER.warning("%s failed and is left out: %s", action, error)


def release(storage: Storage, info: CheckpointInfo) -> None:
    """Remove the marks of a run that died while it resumed, when it begins to resume again."""
    for path in storage.list(f"{info.name}/in-use-"):
        with suppress(CheckpointNotFoundError):
            mark = _read_mark(storage, path, _InUse)
            if mark is not None and mark.run and mark.run == info.run:
                storage.delete(path)


def note_failure(storage: Storage, name: str, reason: str) -> int:
    """Record that a checkpoint could not be loaded; returns how often that has been so."""
    count = _failures(storage, name).count + 1
    data = msgspec.json.encode(_with_digest(_Failures(count=count, reason=reason)))
    storage.put(f"{name}/{_FAILURES}", data, overwrite=True)
    return count


def forget_failures(storage: Storage, name: str) -> None:
    """Forget them, since it was loaded."""
    storage.delete(f"{name}/{_FAILURES}")


def forget_replaced(storage: Storage) -> None:
    """Remove the pin and the failures of a checkpoint that another one has replaced."""
    storage.delete(_FAILURES)
    with suppress(CheckpointNotFoundError):
        if storage.read(_PINNED) != _OUTLASTING:
            storage.delete(_PINNED)


def keep_pin(storage: Storage, name: str) -> bool:
    """Let a pin outlast the next save there, until `pin` puts it again; False if there is none."""
    has_pin = storage.exists(f"{name}/{_PINNED}")
    if has_pin:
        storage.put(f"{name}/{_PINNED}", _OUTLASTING, overwrite=True)
    return has_pin


# ---------------------------------------------------------------------------------------------
# Removing
# ---------------------------------------------------------------------------------------------


def remove(storage: Storage, name: str, *, now: float) -> bool:
    """Remove a checkpoint, unless it has just been pinned or is being read; true if it is gone."""
    record_path = f"{name}/{native.RECORD_NAME}"
    try:
        record, removing = _record_to_remove(storage, record_path)
    except CheckpointNotFoundError:
        return False
    mark = msgspec.json.encode(_with_digest(removing))
    try:
        storage.put(f"{name}/{_REMOVING}", mark, overwrite=True)
    except NoSpaceError:  # there is room for it when the record is gone, but not for both
        if _is_held(storage, name, now):
            return False
    storage.delete(record_path)
    with suppress(NoSpaceError):  # or has none still, as others write there
        storage.put(f"{name}/{_REMOVING}", mark, overwrite=True)
    storage.sync()  # that the record is gone
    if _is_held(storage, name, now) or storage.exists(record_path):
        with suppress(CheckpointExistsError):  # another save has just been committed there
            storage.put(record_path, record, overwrite=False)
        storage.delete(f"{name}/{_REMOVING}")
        return False
    _remove_files(storage, name, removing)
    return True


def _is_held(storage: Storage, name: str, now: float) -> bool:
    """True if a checkpoint is pinned or being read."""
    files = set(storage.list_directory(name).files)
    return _PINNED in files or _in_use_until(storage, name, files) > now


def _record_to_remove(storage: Storage, path: str) -> tuple[bytes, _Removing]:
    """The text of a commit record, to be put again, and the mark that it is being removed."""
    for _ in range(NUM_READINGS):
        text = storage.read(path)
        with suppress(CheckpointError):
            record = native.decode_record(text, path)
            dead = _folders_before(storage, path.removesuffix(f"/{native.RECORD_NAME}"))
            return text, _Removing(folders=sorted(folders_of(record) | dead))
    # It is damaged where it lies. The index is what a save writes last in a folder.
    files = (file.split("/") for file in storage.list(path.removesuffix(native.RECORD_NAME)))
    whole = {keys[-2] for keys in files if keys[-1].startswith("index")}
    return text, _Removing(folders=sorted(whole))


def _folders_before(storage: Storage, name: str) -> set[str]:
    """The folders in which nothing has changed since the commit: of saves that were killed before.

    Both times are the storage's, whatever the clocks of those who saved.
    """
    here = storage.list_directory(name)
    record = here.files.get(native.RECORD_NAME)
    found = set()
    for folder in filter(native.DATA_FOLDER.fullmatch, here.directories):
        path = f"{name}/{folder}"
        changed = last_change(storage, path, storage.list_directory(path))
        if record and record.modified and changed is not None and changed < record.modified:
            found.add(folder)
    return found


def last_change(storage: Storage, path: str, here: Directory) -> float | None:
    """When anything in a folder was changed last; None if the storage does not say.

    A file that is a link to one of an earlier checkpoint is as old as that.
    """
    times = [facts.modified for facts in here.files.values()]
    if is_local(storage):
        with suppress(OSError):  # it has just gone
            times.append(os.lstat(f"{storage.url}/{path}").st_mtime)
    known = [time for time in times if time is not None]
    return max(known) if known and len(known) == len(times) else None


def finish_removals(storage: Storage) -> list[str]:
    """Finish what died while it removed checkpoints; returns the names of what is gone."""
    finished = []
    names = _names_below(storage, with_number=True)
    found = ask_together(storage, [partial(storage.list_directory, name) for name in names])
    for name, here in zip(names, found, strict=True):
        if _REMOVING not in here.files or _is_link(storage, name):
            continue
        if native.RECORD_NAME in here.files:
            storage.delete(f"{name}/{_REMOVING}")
        else:
            with suppress(CheckpointNotFoundError):  # another process has finished
                removing = _read_mark(storage, f"{name}/{_REMOVING}", _Removing)
                _remove_files(storage, name, removing or _Removing(folders=[]))
                finished.append(name)
    return finished


def _remove_files(storage: Storage, name: str, removing: _Removing) -> None:
    """Remove what is ours of a checkpoint without a record, the mark of that last."""
    files = [path.removeprefix(f"{name}/") for path in storage.list(f"{name}/")]
    own = [file for file in files if file in {_PINNED, _FAILURES} or _IN_USE.fullmatch(file)]
    ours = set(filter(native.DATA_FOLDER.fullmatch, removing.folders))
    own += [file for file in files if file.partition("/")[0] in ours]
    storage.delete_many([f"{name}/{file}" for file in own])
    storage.delete(f"{name}/{_REMOVING}")


def files_of(record: native.CommitRecord) -> tuple[native.FileRecord, ...]:
    """Every file that a record names."""
    return (record.index, record.values, *record.files)


def folders_of(record: native.CommitRecord) -> set[str]:
    """The folders in which the files of a record lie."""
    folders = {file.path.partition("/")[0] for file in files_of(record)}
    return {native.data_folder(record.save_id), *folders}


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

    return native.retry_if_replaced(read)


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


def natural_key(name: str) -> tuple[str | int, ...]:
    """A key that sorts the digits in names as numbers: `step_9` before `step_10`."""
    parts = re.split(r"([0-9]+)", name)
    # Text and numbers alternate, so that only like is compared with like.
    return tuple(int(part) if number % 2 else part for number, part in enumerate(parts))


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
        raise absence from (error if isinstance(error, StorageError) else None)


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
    infos = list_checkpoints(storage, compare_sizes=True, with_others=True)
    if infos:
        return CheckpointNotFoundError(f"{root}: not a checkpoint itself; {_suggestion(infos)}")
    names = sorted(found, key=natural_key)
    looked = "; ".join(row.marker for row in FORMATS)
    return CheckpointNotFoundError(
        f"{root}: not a checkpoint (no {native.RECORD_NAME}); it holds {listed(names, 5)}. "
        f"Looked for: {looked}."
    )


def _suggestion(infos: Sequence[CheckpointInfo]) -> str:
    """Which of the checkpoints in a directory to name instead of the directory."""
    whole = [info for info in infos if not info.problem]
    if not whole:
        return (
            f"it holds {len(infos)} damaged or unfinished, none that is whole. "
            f"{repair_advice(infos[-1].path)}"
        )
    if len(whole) == 1:
        return f"it holds 1 checkpoint, {whole[0].path}; name that"
    newest = newest_of(whole) or whole[-1]
    return f"it holds {len(whole)} checkpoints; name one of them, the newest is {newest.path}"
