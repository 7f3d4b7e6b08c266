"""Checks of a place: does it do what saves need of it?

A few small files are made there, and removed. Whether all ranks of a job reach the same place, each
save finds out (`remesh.checkpoint.sharing`).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from remesh.errors import CheckpointExistsError
from remesh.storage.base import Storage
from remesh.storage.local import is_local, open_direct

_FOLDER = ".remesh-doctor"


@dataclass(frozen=True, slots=True)
class PlaceCheck:
    """The result of one check."""

    name: str  # what was checked
    status: Literal["good", "slow", "bad"]
    """`good`; `slow`, if remesh works around it; `bad`, if saves there are not safe."""
    detail: str  # what was seen, and what follows


def check_place(storage: Storage) -> list[PlaceCheck]:
    """Check a place with small files, which are removed."""
    folder = f"{_FOLDER}-{secrets.token_hex(4)}"
    try:
        return list(_checks(storage, folder))
    finally:
        storage.delete_many(storage.list(f"{folder}/"))


def _result(name: str, is_good: bool, good: str, bad: str) -> PlaceCheck:
    return PlaceCheck(name, "good" if is_good else "bad", good if is_good else bad)


def _checks(storage: Storage, folder: str) -> Iterator[PlaceCheck]:
    path, data = f"{folder}/file", np.arange(3 * 4096 + 5, dtype=np.uint8)
    began = time.monotonic()
    writer = storage.create(path, data.size)
    try:
        writer.write(0, data)
        writer.finish()
    finally:
        writer.abort()
    storage.sync()
    good = f"a small file is durable after {time.monotonic() - began:.3f} s"
    is_there = storage.read(path) == data.tobytes() and path in storage.list(path)
    bad = "a file that was just written reads differently"
    yield _result("write and read", is_there, good, bad)

    storage.put(f"{folder}/one", b"first", overwrite=False)
    is_refused = False
    try:
        storage.put(f"{folder}/one", b"second", overwrite=False)
    except CheckpointExistsError:
        is_refused = True
    bad = "two writers of one file both succeed: let one job at a time save to a directory"
    good = "the second writer of a file is refused"
    yield _result("exclusive creation", is_refused, good, bad)

    for content in (b"old", b"new"):
        storage.put(f"{folder}/two", content, overwrite=True)
    is_new = storage.read(f"{folder}/two") == b"new"
    bad = "a file that was just replaced reads as before"
    yield _result("atomic replacement", is_new, "a file is replaced in one step", bad)

    if is_local(storage):
        yield from _checks_of_file_system(Path(storage.url) / folder)
    space = storage.space()
    free = "no limit is known" if space is None else f"{space.free_bytes / 1e9:.1f} GB are free"
    yield PlaceCheck("room", "good", free)


def _checks_of_file_system(directory: Path) -> Iterator[PlaceCheck]:
    """Check what only a file system has."""
    file = directory / "file"
    try:
        os.link(file, directory / "link")
    except (OSError, AttributeError) as error:
        yield PlaceCheck("hard links", "slow", f"none ({error}); marker files take their place")
    else:
        yield PlaceCheck("hard links", "good", "commit records are created with them")
    descriptor = open_direct(file, os.O_RDONLY)
    if descriptor is None:
        text = "O_DIRECT is refused: bytes pass through the page cache"
        yield PlaceCheck("direct I/O", "slow", text)
    else:
        os.close(descriptor)
        text = "O_DIRECT works: saves do not fill the page cache"
        yield PlaceCheck("direct I/O", "good", text)
