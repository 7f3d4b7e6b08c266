"""Trying a place out: does it do what saves need of it, and do all ranks reach the same one?

`try_out` makes a few small files there and removes them. `meet` lets the ranks of a job find each
other through files, so neither torch nor a network is needed: rank 0 asks with a number of its own,
and each other rank that sees the question answers it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from remesh.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from remesh.storage.base import Storage
from remesh.storage.local import is_local
from remesh.storage.local_io import open_direct

_FOLDER = ".remesh-doctor"


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing that was tried."""

    name: str  # what
    status: Literal["good", "slow", "bad"]
    """`good`; `slow`, if remesh works around it; `bad`, if saves there are not safe."""
    detail: str  # what was seen, and what follows


def try_out(storage: Storage) -> list[Trial]:
    """Try a place out with small files, which are removed."""
    folder = f"{_FOLDER}-{secrets.token_hex(4)}"
    trials: list[Trial] = []
    try:
        trials.append(_write_and_read(storage, f"{folder}/file"))
        trials.append(_only_one_writer(storage, f"{folder}/one"))
        trials.append(_replace(storage, f"{folder}/two"))
        if is_local(storage):
            trials += _try_file_system(Path(storage.url) / folder)
        trials.append(_room(storage))
    finally:
        for path in storage.list(f"{folder}/"):
            storage.delete(path)
    return trials


def _write_and_read(storage: Storage, path: str) -> Trial:
    """Write a file of some blocks, make it durable, and read it."""
    data = np.arange(3 * 4096 + 5, dtype=np.uint8)
    began = time.monotonic()
    writer = storage.create(path, data.size)
    try:
        writer.write(0, data)
        writer.finish()
    finally:
        writer.abort()
    storage.sync()
    seconds = time.monotonic() - began
    if storage.read(path) != data.tobytes() or path not in storage.list(path):
        return Trial("write and read", "bad", "a file that was just written reads differently")
    return Trial("write and read", "good", f"a small file is durable after {seconds:.3f} s")


def _only_one_writer(storage: Storage, path: str) -> Trial:
    """Write a file that must not exist, twice."""
    storage.put(path, b"first", overwrite=False)
    with suppress(CheckpointExistsError):
        storage.put(path, b"second", overwrite=False)
        text = "two writers of one file both succeed: let one job at a time save to a directory"
        return Trial("exclusive creation", "bad", text)
    return Trial("exclusive creation", "good", "the second writer of a file is refused")


def _replace(storage: Storage, path: str) -> Trial:
    """Replace a file in one step."""
    storage.put(path, b"old", overwrite=True)
    storage.put(path, b"new", overwrite=True)
    if storage.read(path) != b"new":
        return Trial("atomic replacement", "bad", "a file that was just replaced reads as before")
    return Trial("atomic replacement", "good", "a file is replaced in one step")


def _try_file_system(directory: Path) -> Iterator[Trial]:
    """Try out what only a file system has."""
    file = directory / "file"
    try:
        os.link(file, directory / "link")
    except (OSError, AttributeError) as error:
        yield Trial("hard links", "slow", f"none ({error}); marker files take their place")
    else:
        yield Trial("hard links", "good", "commit records are created with them")
    descriptor = open_direct(file, os.O_RDONLY)
    if descriptor is None:
        yield Trial("direct I/O", "slow", "O_DIRECT is refused: bytes pass through the page cache")
    else:
        os.close(descriptor)
        yield Trial("direct I/O", "good", "O_DIRECT works: saves do not fill the page cache")


def _room(storage: Storage) -> Trial:
    space = storage.space()
    if space is None:
        return Trial("room", "good", "no limit is known")
    return Trial("room", "good", f"{space.free_bytes / 1e9:.1f} GB are free")


def meet(storage: Storage, rank: int, world_size: int, *, seconds: float) -> Trial:
    """Find out whether all ranks reach the same place. Every rank calls it.

    Returns on rank 0 which ranks it sees; on the others, whether they see rank 0.
    """
    return _answer(storage, rank, seconds) if rank else _ask(storage, world_size, seconds)


def _ask(storage: Storage, world_size: int, seconds: float) -> Trial:
    folder = f"{_FOLDER}-ranks/{secrets.token_hex(8)}"
    storage.put(f"{folder}/ask", b"", overwrite=False)
    ends = time.monotonic() + seconds
    missing = set(range(1, world_size))
    try:
        while missing and time.monotonic() < ends:
            missing -= {int(path.rpartition("-")[2]) for path in storage.list(f"{folder}/answer-")}
            if missing:
                time.sleep(0.05)
    finally:
        storage.put(f"{folder}/done", b"", overwrite=True)
        for path in storage.list(f"{folder}/a"):
            storage.delete(path)
        storage.delete(f"{folder}/done")
    if missing:
        names = ", ".join(map(str, sorted(missing)[:16]))
        text = f"no file of these ranks is seen within {seconds:g} s: {names}"
        return Trial("seen by all ranks", "bad", text)
    return Trial("seen by all ranks", "good", f"{world_size} ranks reach the same place")


def _answer(storage: Storage, rank: int, seconds: float) -> Trial:
    ends = time.monotonic() + seconds
    answered: set[str] = set()
    while time.monotonic() < ends:
        asked = {path for path in storage.list(f"{_FOLDER}-ranks/") if path.endswith("/ask")}
        if answered - asked:  # rank 0 has removed its question: it has seen all answers
            break
        for path in asked - answered:
            answer = path.removesuffix("ask") + f"answer-{rank}"
            with suppress(CheckpointExistsError, CheckpointNotFoundError, StorageError):
                storage.put(answer, b"", overwrite=True)
            answered.add(path)
        time.sleep(0.05)
    if answered:
        return Trial("seen by all ranks", "good", f"rank {rank} sees rank 0")
    text = f"rank {rank} sees no file of rank 0 within {seconds:g} s: it is another place"
    return Trial("seen by all ranks", "bad", text)
