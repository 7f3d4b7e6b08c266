"""Checks that all ranks of a save write to one shared place, and that it has room for their files.

Ranks that write to different places, because the path has a time stamp or because each node has a
disk of its own under the same path, all succeed, and the checkpoint lacks most of its files. Three
checks find that:

* The ranks compare the names of their places while they plan (`check_same_place`).
* Before the commit rank 0 lists the files once, and compares them with what the ranks say that they
  have written (`check_arrived`).
* Ranks of a background save meet only through the storage, so they would wait for each other until
  the deadline. Rank 0 therefore puts a small file before the first save to a directory, and every
  rank looks for it (`check_visible`). That is left out if the file systems prove that it is one
  directory (`is_one_directory`).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from remesh._repr import format_bytes
from remesh.core.geometry import IntArray
from remesh.errors import CheckpointNotFoundError, NoSpaceError, NotSharedError, StorageError
from remesh.storage import FileSystemSpace, Storage

MAX_SHOWN = 8
"""How many ranks an error names at most."""

PATIENCE_SECONDS = 60.0
"""How long a rank looks for a file of rank 0; file systems may remember for half a minute that a
directory was not there."""

_WHAT_IS_SHARED = (
    "All ranks must save to one shared place: a directory of a file system that every node has "
    "mounted under the same path (NFS, Lustre, ...), or one URL of an object store."
)


def check_same_place(urls: Sequence[str]) -> None:
    """Check that all ranks, whose URLs are in rank order, name one place."""
    other = next((rank for rank, url in enumerate(urls) if url != urls[0]), None)
    if other is not None:
        raise NotSharedError(
            f"ranks 0 and {other} save to different places; nothing was written.\n"
            f"rank 0: {urls[0]}\nrank {other}: {urls[other]}\n{_WHAT_IS_SHARED} If the path has a "
            "time stamp or a random part, choose it on rank 0 and broadcast it to the other ranks."
        )


def is_one_directory(spaces: Sequence[FileSystemSpace | None]) -> bool:
    """True if the file systems prove that ranks which name one path mean one directory."""
    directories = {"" if space is None else space.directory for space in spaces}
    return len(directories) == 1 and "" not in directories


def check_arrived(storage: Storage, prefix: str, files: Iterable[tuple[int, str, int]]) -> None:
    """Check on rank 0 that the files which ranks have written are whole, with one listing.

    The paths of all begin with the prefix; of each, rank, path and number of bytes are given.
    """
    written = list(files)
    sizes = storage.list_sizes(prefix)
    absent: dict[int, str] = {}
    for rank, path, num_bytes in written:
        # A listing may be older than the file, as with attributes that a network file system keeps.
        if sizes.get(path) != num_bytes and not _has_bytes(storage, path, num_bytes):
            absent.setdefault(rank, path)
            if len(absent) == MAX_SHOWN:
                break
    if 0 in absent:
        raise StorageError(
            f"{absent[0]}: rank 0 wrote it, and now finds {_found(storage, absent[0])}\n"
            f"It is in {storage.url}. Look for errors of the disk or the file system, or a process "
            "that removes files there, and save again. Nothing was committed."
        )
    if absent:
        (rank, path), more = next(iter(absent.items())), ", ..." if len(absent) == MAX_SHOWN else ""
        shown = ", ".join(map(str, absent)) + more
        raise NotSharedError(
            f"{_shortened(storage.url)}: rank 0 does not see the files of ranks {shown}.\n"
            f"Rank {rank} has written {path}, but in {storage.url} rank 0 finds "
            f"{_found(storage, path)}. {_WHAT_IS_SHARED} Directories on disks of the nodes are not "
            "shared, even if they have the same path on every node. Nothing was committed."
        )


def check_space(
    spaces: Sequence[FileSystemSpace | None], num_bytes: IntArray, url: str, compress: str | None
) -> None:
    """Check that there is room for all files that share a file system; in rank order."""
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for space, size in zip(spaces, num_bytes.tolist(), strict=True):
        if space is not None:
            needed[space.identity] += size
            free[space.identity] = min(space.free_bytes, free.get(space.identity, space.free_bytes))
    for identity, size in needed.items():
        if size > free[identity]:
            existing = next(one.existing for one in spaces if one and one.identity == identity)
            needs = format_bytes(size) + (" before compression" if compress else "")
            raise NoSpaceError(
                f"{url}: the state needs {needs}, {format_bytes(free[identity])} are free there\n"
                f"Nothing was written. {_space_advice(url, existing)}"
            )


def check_visible(storage: Storage, rank: int, path: str) -> None:
    """Check that a rank sees a file that rank 0 has put."""
    started, wait = time.monotonic(), 0.01
    while not storage.exists(path):
        if time.monotonic() - started + wait > PATIENCE_SECONDS:
            raise NotSharedError(
                f"{_shortened(storage.url)}: rank {rank} does not see what rank 0 writes "
                f"there.\nIt looked for {path} in {storage.url}. {_WHAT_IS_SHARED} Directories on "
                "disks of the nodes are not shared, even if they have the same path on every node."
            )
        time.sleep(wait)
        wait = min(2 * wait, 2.0)


def _has_bytes(storage: Storage, path: str, num_bytes: int) -> bool:
    """True if a file ends where it should; opening it makes network file systems look again."""
    end = np.empty(2, np.uint8)
    try:
        return storage.read_into(path, num_bytes - 1, end) == 1
    except CheckpointNotFoundError:
        return False


def _found(storage: Storage, path: str) -> str:
    try:
        return f"{storage.size(path)} bytes of it"
    except StorageError as error:
        return f"a file that it cannot read ({error})"
    except CheckpointNotFoundError:
        return "no such file"


def _shortened(url: str) -> str:
    """A URL that leaves room for a sentence in a line."""
    return url if len(url) <= 40 else f"...{url[-37:]}"


def _space_advice(url: str, existing: str) -> str:
    """Advice where there is too little room; a directory that is missing may be a mount."""
    missing = os.path.relpath(url, existing).split("/") if existing else []
    if len(missing) > 1:
        mount = f"{existing}/{missing[0]}, which does not exist, should be a mount point, mount it."
        return f"Free some space in {existing}, or save elsewhere. If {mount}"
    return "Free some space, or save elsewhere."
