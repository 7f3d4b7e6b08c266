"""Orphans: files of saves that were killed, and removing them.

A save that was killed leaves a folder `data-<save id>` that no commit record refers to, and perhaps
hidden files of an unfinished put. Nothing on disk says whether the process behind them still lives,
so age decides: a save that runs changes its files all the time, and what has not changed for long
is dead. `find_orphans` is a pure function of what `scan` found and of the time; `remove_orphan`
removes. Local directories and object stores are scanned; of uploads that were never completed a
bucket shows nothing, so a lifecycle rule of the bucket must remove those.

Nothing is removed

* that a commit record refers to, or that lies beside a record which cannot be read;
* that is not recognisably remesh's: another name of a folder, a file that no save writes;
* whose age the storage does not tell;
* that is complete but for its commit record, with no other record beside it: the record may have
  been lost, and `remesh repair` saves such a checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from remesh.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
)
from remesh.formats import native
from remesh.storage import (
    Directory,
    Storage,
    is_local,
    open_storage,
)

DEFAULT_AGE = 3600.0
"""Seconds without a change after which a save is taken for dead."""

_FOLDER = re.compile(r"data-[0-9a-f]{12}")
_HIDDEN = re.compile(r"\.remesh-put-.+", re.DOTALL)
_OURS = re.compile(
    r"\d{5,}(-\d+)?\.safetensors|index(-[0-9a-f]{12})?\.safetensors|values\.msgpack|meeting"
    r"|(part|progress)-\d{5,}\.msgpack|failed(-\d{5,})?\.msgpack|committed\.msgpack"
    r"|\.remesh-put-.+",
    re.DOTALL,
)

RecordState = Literal["readable", "unreadable", "missing"]


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    """A folder of a save, or a hidden file of a put."""

    path: str  # where it is
    kind: Literal["save", "put"]  # which of the two
    modified: float | None
    """When it, or anything in it, was last changed: seconds since the epoch; None if the storage
    does not say."""
    num_bytes: int  # its size
    files: tuple[str, ...] = ()  # names of what is in the folder
    strange: str = ""  # name of something in it that no save writes; empty if there is nothing


@dataclass(frozen=True, slots=True)
class ScannedDirectory:
    """A directory that has something of remesh's in it."""

    path: str  # where it is
    record: RecordState  # whether it has a commit record, and whether that can be read
    referred: frozenset[str]  # names of the folders that the record refers to
    seen: tuple[ScannedEntry, ...]  # what lies there


@dataclass(frozen=True, slots=True)
class Orphan:
    """Something that no commit record refers to."""

    path: str  # where it is
    kind: Literal["save", "put"]  # a folder of a `save`, or a hidden file of a `put`
    age: float  # seconds since its last change; 0 if that is not known
    num_bytes: int  # its size
    kept: str  # why it must not be removed; empty if it may be


def find_orphans(
    places: Sequence[ScannedDirectory], *, now: float, older_than: float
) -> list[Orphan]:
    """Files of no commit record; a save is dead `older_than` seconds after its last change."""
    return [
        Orphan(
            seen.path,
            seen.kind,
            0.0 if seen.modified is None else now - seen.modified,
            seen.num_bytes,
            _reason_to_keep(place, seen, now, older_than),
        )
        for place in places
        for seen in place.seen
        if seen.kind == "put" or PurePath(seen.path).name not in place.referred
    ]


def _reason_to_keep(
    place: ScannedDirectory, seen: ScannedEntry, now: float, older_than: float
) -> str:
    if place.record == "unreadable":
        return f"{native.RECORD_NAME} beside it cannot be read and may refer to it"
    if seen.modified is None:
        return "the storage does not say when it was changed"
    if now - seen.modified <= older_than:
        return "changed not long ago; a save may be running"
    if seen.strange:
        return f"holds something that no save writes: {seen.strange}"
    if place.record == "missing" and any(file.startswith("index") for file in seen.files):
        return f"complete but for {native.RECORD_NAME}; `remesh repair` can save it"
    return ""


# ---------------------------------------------------------------------------------------------
# Scanning
# ---------------------------------------------------------------------------------------------


def scan(root: Any) -> list[ScannedDirectory]:
    """Find what remesh left in a directory and below; links are not followed."""
    storage = open_storage(root)
    if is_local(storage) and not os.path.isdir(storage.url):
        raise CheckpointNotFoundError(f"{storage.url}: no such directory")
    return _scan_below(storage, "")


def _scan_below(storage: Storage, path: str) -> list[ScannedDirectory]:
    """`scan` for a directory and those below."""
    here = storage.list_directory(path)
    place = _scan_directory(storage, path, here)
    places = [place] if place.seen else []
    for name in here.directories:
        below = _joined(path, name)
        if not _FOLDER.fullmatch(name) and not _is_link(storage, below):
            places += _scan_below(storage, below)
    return places


def _scan_directory(storage: Storage, path: str, here: Directory) -> ScannedDirectory:
    """Entries directly in a directory, and in its folders of saves."""
    url = _joined(storage.url, path)
    folders = [
        name
        for name in here.directories
        if _FOLDER.fullmatch(name) and not _is_link(storage, _joined(path, name))
    ]
    inside = {name: storage.list_directory(_joined(path, name)) for name in folders}
    saves = [_seen_folder(storage, _joined(path, name), found) for name, found in inside.items()]
    puts = list(_seen_puts(url, here))
    # The record is read after the folders: a save that commits meanwhile is then seen.
    record, referred = _read_record(storage, path) if saves or puts else ("missing", frozenset())
    # Hidden files in a folder count for themselves only if the folder belongs to a checkpoint.
    for name in folders:
        if name in referred:
            puts += _seen_puts(_joined(url, name), inside[name])
    return ScannedDirectory(url, record, referred, (*saves, *puts))


def _seen_folder(storage: Storage, path: str, found: Directory) -> ScannedEntry:
    url = _joined(storage.url, path)
    times = [facts.modified for facts in found.files.values()]
    if is_local(storage):
        with suppress(OSError):  # it has just gone
            times.append(os.lstat(url).st_mtime)
    known = [time for time in times if time is not None]
    names = tuple(sorted(found.files))
    strange = [
        name
        for name in names
        if _OURS.fullmatch(name) is None or _is_link(storage, _joined(path, name))
    ]
    return ScannedEntry(
        url,
        "save",
        max(known) if known and len(known) == len(times) else None,
        sum(facts.num_bytes for facts in found.files.values()),
        names,
        next(iter([*strange, *found.directories]), ""),
    )


def _seen_puts(url: str, found: Directory) -> Iterator[ScannedEntry]:
    for name, facts in found.files.items():
        if _HIDDEN.fullmatch(name):
            yield ScannedEntry(_joined(url, name), "put", facts.modified, facts.num_bytes)


def _read_record(storage: Storage, path: str) -> tuple[RecordState, frozenset[str]]:
    """The state of a directory's record, and the folders that it refers to."""
    try:
        record = native.read_record_at(storage, _joined(path, native.RECORD_NAME))
    except CheckpointNotFoundError:
        return "missing", frozenset()
    except (CheckpointError, StorageError):
        return "unreadable", frozenset()
    files = (record.index, record.values, *record.files)
    folders = {file.path.partition("/")[0] for file in files}
    return "readable", frozenset({native.data_folder(record.save_id), *folders})


def _is_link(storage: Storage, path: str) -> bool:
    return is_local(storage) and os.path.islink(_joined(storage.url, path))


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name


# ---------------------------------------------------------------------------------------------
# Removing
# ---------------------------------------------------------------------------------------------


def remove_orphan(orphan: Orphan, root: Any, *, now: float, older_than: float) -> bool:
    """Remove an orphan with nothing in `kept`, unless it has changed; true if it was removed.

    A directory that holds nothing afterwards goes as well, unless it is `root`, where `scan`
    looked.
    """
    storage = open_storage(root)
    path = orphan.path.removeprefix(storage.url).removeprefix("/")
    directory = path.rpartition("/")[0]
    if orphan.kind == "put" and _FOLDER.fullmatch(directory.rpartition("/")[2]):
        directory = directory.rpartition("/")[0]
    place = _scan_directory(storage, directory, storage.list_directory(directory))
    again = find_orphans([place], now=now, older_than=older_than)
    if not any(one.path == orphan.path and not one.kept for one in again):
        return False
    files = [path]
    if orphan.kind == "save":
        # By name, and not as a tree: a file that has just come is not taken along.
        seen = next(seen for seen in place.seen if seen.path == orphan.path)
        # Deleting a file that is not there takes an empty folder away.
        files = [_joined(path, file) for file in seen.files or ["00000.safetensors"]]
    storage.delete_many(files)
    return True


def remove_orphans(storage: Storage, *, older_than: float = DEFAULT_AGE) -> None:
    """Remove what dead saves left beside a checkpoint that has just been committed.

    The time is that of the commit record, as the storage says it, so no clock but the storage's
    counts. Storages that do not say it are left alone.
    """
    here = storage.list_directory()
    record = here.files.get(native.RECORD_NAME)
    now = None if record is None else record.modified
    if now is not None:
        place = _scan_directory(storage, "", here)
        for orphan in find_orphans([place], now=now, older_than=older_than):
            if not orphan.kept:
                remove_orphan(orphan, storage, now=now, older_than=older_than)


def remove_files(storage: Storage, save_id: str, *, keep: str = "") -> None:
    """Remove the files of a failed save but one, as far as the storage can."""
    # They are not part of any checkpoint, and what led here matters more than a failure to remove.
    with suppress(StorageError):
        found = storage.list(native.data_folder(save_id) + "/")
        # Where no file was finished, deleting one that is not there takes the empty folder away.
        paths = found or [native.data_path(save_id, 0)]
        storage.delete_many([path for path in paths if path != keep])
