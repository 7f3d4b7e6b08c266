"""Orphans: files of saves that were killed, and removing them.

A save that was killed leaves a folder `data-<save id>` that no commit record refers to, and perhaps
hidden files of an unfinished put. Nothing on disk says whether the process behind them still lives,
so age decides: a save that runs changes its files all the time, and what has not changed for long
is dead. Local directories and object stores are scanned; of uploads that were never completed a
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
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from remesh.catalog import folders_of, last_change
from remesh.errors import CheckpointError, CheckpointNotFoundError, StorageError
from remesh.formats import native
from remesh.storage import Directory, Storage, is_local, open_storage

DEFAULT_AGE = 3600.0
"""Seconds without a change after which a save is taken for dead."""

_HIDDEN = re.compile(r"\.remesh-put-.+", re.DOTALL)
_OURS = re.compile(
    r"\d{5,}(-\d+)?\.safetensors|index(-[0-9a-f]{12})?\.safetensors|values\.msgpack|meeting"
    r"|part-\d{5,}\.msgpack|failed(-\d{5,})?\.msgpack|committed\.msgpack"
    r"|\.remesh-put-.+",
    re.DOTALL,
)

RecordState = Literal["readable", "unreadable", "missing"]


@dataclass(frozen=True, slots=True)
class Orphan:
    """Something that no commit record refers to."""

    path: str  # where it is
    kind: Literal["save", "put"]  # a folder of a `save`, or a hidden file of a `put`
    age: float  # seconds since it, or anything in it, was changed; 0 if that is not known
    num_bytes: int  # its size
    kept: str  # why it must not be removed; empty if it may be
    files: tuple[str, ...] = ()  # names of what is in the folder


@dataclass(frozen=True, slots=True)
class Age:
    """The time of a look, and how old something has to be then."""

    now: float  # in seconds since the epoch
    older_than: float  # seconds without a change after which a save is dead


def reason_to_keep(
    record: RecordState,
    modified: float | None,
    age: Age,
    files: Collection[str] = (),
    strange: str = "",
) -> str:
    """Why an orphan must not be removed; empty if it may be.

    It lies beside a record in some state, was modified at a time, and has files, of which no save
    writes one that is strange.
    """
    if record == "unreadable":
        return f"{native.RECORD_NAME} beside it cannot be read and may refer to it"
    if modified is None:
        return "the storage does not say when it was changed"
    if age.now - modified <= age.older_than:
        return "changed not long ago; a save may be running"
    if strange:
        return f"holds something that no save writes: {strange}"
    if record == "missing" and any(file.startswith("index") for file in files):
        return f"complete but for {native.RECORD_NAME}; `remesh repair` can save it"
    return ""


# ---------------------------------------------------------------------------------------------
# Finding
# ---------------------------------------------------------------------------------------------


def find_orphans(root: Any, *, now: float, older_than: float) -> list[Orphan]:
    """The orphans in a directory and below; links are not followed.

    A save is dead `older_than` seconds after its last change, at the time `now`.
    """
    storage = open_storage(root)
    if is_local(storage) and not os.path.isdir(storage.url):
        raise CheckpointNotFoundError(f"{storage.url}: no such directory")
    return list(_orphans_below(storage, "", Age(now, older_than)))


def _orphans_below(storage: Storage, path: str, age: Age) -> Iterator[Orphan]:
    here = storage.list_directory(path)
    yield from _orphans_in(storage, path, here, age)
    for name in here.directories:
        below = _joined(path, name)
        if not native.DATA_FOLDER.fullmatch(name) and not _is_closed(storage, below):
            yield from _orphans_below(storage, below, age)


def _orphans_in(storage: Storage, path: str, here: Directory, age: Age) -> list[Orphan]:
    """Orphans directly in a directory, and in its folders of saves."""
    paths = {
        name: _joined(path, name) for name in here.directories if native.DATA_FOLDER.fullmatch(name)
    }
    inside = {
        name: storage.list_directory(folder)
        for name, folder in paths.items()
        if not _is_closed(storage, folder)
    }
    is_put = any(map(_HIDDEN.fullmatch, here.files))
    # The record is read after the folders: a save that commits meanwhile is then seen.
    record, referred = _read_record(storage, path) if inside or is_put else ("missing", frozenset())
    found = [
        _orphaned_save(storage, paths[name], content, record, age)
        for name, content in inside.items()
        if name not in referred
    ]
    found += _orphaned_puts(_joined(storage.url, path), here, record, age)
    # Hidden files in a folder count for themselves only if the folder belongs to a checkpoint.
    for name, content in inside.items():
        if name in referred:
            found += _orphaned_puts(_joined(storage.url, paths[name]), content, record, age)
    return found


def _orphaned_save(
    storage: Storage, path: str, found: Directory, record: RecordState, age: Age
) -> Orphan:
    url = _joined(storage.url, path)
    modified = last_change(storage, path, found)
    names = tuple(sorted(found.files))
    strange = [
        name
        for name in names
        if _OURS.fullmatch(name) is None or (is_local(storage) and os.path.islink(f"{url}/{name}"))
    ]
    first = next(iter([*strange, *found.directories]), "")
    return Orphan(
        url,
        "save",
        0.0 if modified is None else age.now - modified,
        sum(facts.num_bytes for facts in found.files.values()),
        reason_to_keep(record, modified, age, names, first),
        names,
    )


def _orphaned_puts(url: str, found: Directory, record: RecordState, age: Age) -> Iterator[Orphan]:
    for name, facts in found.files.items():
        if _HIDDEN.fullmatch(name):
            seconds = 0.0 if facts.modified is None else age.now - facts.modified
            kept = reason_to_keep(record, facts.modified, age)
            yield Orphan(_joined(url, name), "put", seconds, facts.num_bytes, kept)


def _read_record(storage: Storage, path: str) -> tuple[RecordState, frozenset[str]]:
    """The state of a directory's record, and the folders that it refers to."""
    try:
        record = native.read_record_at(storage, _joined(path, native.RECORD_NAME))
    except CheckpointNotFoundError:
        return "missing", frozenset()
    except (CheckpointError, StorageError):
        return "unreadable", frozenset()
    return "readable", frozenset(folders_of(record))


def _is_closed(storage: Storage, path: str) -> bool:
    """True for a link, and a directory that this user may not read, such as `lost+found`."""
    directory = _joined(storage.url, path)
    return is_local(storage) and (
        os.path.islink(directory) or not os.access(directory, os.R_OK | os.X_OK, effective_ids=True)
    )


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name


# ---------------------------------------------------------------------------------------------
# Removing
# ---------------------------------------------------------------------------------------------


def remove_orphan(orphan: Orphan, root: Any, *, now: float, older_than: float) -> bool:
    """Remove an orphan with nothing in `kept`, unless it has changed; true if it was removed.

    A directory that holds nothing afterwards goes as well, unless it is `root`, where
    `find_orphans` looked.
    """
    storage = open_storage(root)
    path = orphan.path.removeprefix(storage.url).removeprefix("/")
    directory = path.rpartition("/")[0]
    if orphan.kind == "put" and native.DATA_FOLDER.fullmatch(directory.rpartition("/")[2]):
        directory = directory.rpartition("/")[0]
    here = storage.list_directory(directory)
    for again in _orphans_in(storage, directory, here, Age(now, older_than)):
        if again.path == orphan.path and not again.kept:
            # By name, and not as a tree: a file that has just come is not taken along. Deleting
            # a file that is not there takes an empty folder away.
            names = again.files or ["00000.safetensors"]
            is_save = orphan.kind == "save"
            storage.delete_many([_joined(path, name) for name in names] if is_save else [path])
            return True
    return False


def remove_orphans(storage: Storage) -> None:
    """Remove what dead saves left beside a checkpoint that has just been committed.

    The time is that of the commit record, as the storage says it, so no clock but the storage's
    counts. Storages that do not say it are left alone.
    """
    here = storage.list_directory()
    record = here.files.get(native.RECORD_NAME)
    now = None if record is None else record.modified
    if now is not None:
        for orphan in _orphans_in(storage, "", here, Age(now, DEFAULT_AGE)):
            if not orphan.kept:
                remove_orphan(orphan, storage, now=now, older_than=DEFAULT_AGE)


def remove_files(storage: Storage, save_id: str, *, keep: str = "") -> None:
    """Remove the files of a failed save but one, as far as the storage can."""
    # They are not part of any checkpoint, and what led here matters more than a failure to remove.
    with suppress(StorageError):
        found = storage.list(native.data_folder(save_id) + "/")
        # Where no file was finished, deleting one that is not there takes the empty folder away.
        paths = found or [native.data_path(save_id, 0)]
        storage.delete_many([path for path in paths if path != keep])
