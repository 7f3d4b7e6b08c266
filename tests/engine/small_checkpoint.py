"""A small checkpoint of two ranks, in which every kind of file is there, and what it must hold.

The files are the record, the values, the index, and two data files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import remesh
from remesh.core.index import Index
from remesh.core.integrity import BLOCK_SIZE
from remesh.core.sharded import ShardedObject
from remesh.exchange import Exchange
from remesh.formats import native
from remesh.pipeline import Compress
from remesh.storage import LocalStorage, MemoryStorage, Storage
from tests.engine.scenes import share_of
from tests.support import run_ranks

NUM_RANKS = 2
KINDS = ("record", "values", "index", "first data", "second data")


def arrays(fill: bool) -> dict[str, Any]:
    """The global tensors; zeros if not filled."""
    whole = {
        "weight": np.arange(1, 241, dtype=np.float32).reshape(20, 12),
        "moment": np.linspace(-1, 1, 120).reshape(20, 6),
        "steps": np.array(77, dtype=np.int64),
        "mask": (np.arange(60) % 3 == 0).reshape(20, 3),
    }
    return whole if fill else {name: np.zeros_like(array) for name, array in whole.items()}


VALUES = {"epoch": 3, "name": "run", "history": [0.5, 0.25], "nothing": None}


def part_of_state(rank: int, num_ranks: int, *, fill: bool) -> dict[str, Any]:
    """Some rows of every tensor, all values, and an element of an object."""
    state: dict[str, Any] = {"values": dict(VALUES) if fill else dict.fromkeys(VALUES)}
    for name, array in arrays(fill).items():
        state[name] = share_of(name, array, rank, num_ranks) if array.ndim else array
    state["rng"] = ShardedObject("rng", [rank, b"seed"] if fill else None, (num_ranks,), (rank,))
    return state


def whole_state() -> dict[str, Any]:
    """A target for everything that two ranks save."""
    rngs = [ShardedObject("rng", None, (NUM_RANKS,), (rank,)) for rank in range(NUM_RANKS)]
    return {**arrays(fill=False), "values": dict.fromkeys(VALUES), "rngs": rngs}


def is_right(state: dict[str, Any]) -> bool:
    """Whether a loaded `whole_state` holds what was saved."""
    return (
        all(state[name].tobytes() == array.tobytes() for name, array in arrays(fill=True).items())
        and state["values"] == VALUES
        and [element.data for element in state["rngs"]] == [[0, b"seed"], [1, b"seed"]]
    )


def nothing_wrong_in(state: dict[str, Any]) -> bool:
    """Whether every element is right or still what it was."""
    return all(
        ((state[name] == array) | (state[name] == np.zeros_like(array))).all()
        for name, array in arrays(fill=True).items()
    )


def save_part(
    exchange: Exchange,
    place: Storage | Path,
    compress: Compress | None = None,
    *,
    fill: bool = True,
) -> None:
    state = part_of_state(exchange.rank, exchange.world_size, fill=fill)
    remesh.save(state, place, overwrite=True, compress=compress, group=exchange)


def load_part(exchange: Exchange, place: Storage | Path) -> None:
    state = part_of_state(exchange.rank, exchange.world_size, fill=False)
    remesh.load(state, place, group=exchange)


def load_numbers(exchange: Exchange, place: Storage | Path) -> None:
    """Load some rows of the tensors of many rows; for any number of ranks that divides them."""
    state = part_of_state(exchange.rank, exchange.world_size, fill=False)
    del state["rng"], state["steps"]
    remesh.load(state, place, group=exchange)


def file_of(checkpoint: Path, kind: str) -> Path:
    """The file of a kind; to be asked while the record is sound."""
    record = native.read_record(LocalStorage(checkpoint))
    names = [native.RECORD_NAME, record.values.path, record.index.path]
    names += [file.path for file in record.files]
    assert len(names) == len(KINDS)
    return checkpoint / names[KINDS.index(kind)]


def stored_place(index: Index, row: int, position: int) -> int:
    """Where a byte of a file is stored; in a compressed one, the middle of its block."""
    table, block = index.block_table(row), position // BLOCK_SIZE
    return position if table is None else int(table.begin[block] + table.length[block] // 2)


def flip(file: Path, position: int, mask: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= mask
    file.write_bytes(content)


def loading_error(checkpoint: Path) -> Exception | None:
    """The error of loading everything; None if all is right."""
    state = whole_state()
    try:
        remesh.load(state, checkpoint, unexpected="error")
    except remesh.RemeshError as error:
        assert nothing_wrong_in(state)
        return error
    assert is_right(state)
    return None


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A directory of a user whom permissions bind; the superuser becomes one for the while."""
    directory = Path(tempfile.mkdtemp(prefix="remesh-test-"))
    is_superuser = os.geteuid() == 0
    nobody = 65534
    # Whatever is imported late must be by now: nobody may not be allowed to read it.
    run_ranks(NUM_RANKS, save_part, MemoryStorage())
    try:
        if is_superuser:
            os.chown(directory, nobody, nobody)
            os.seteuid(nobody)
        yield directory
    finally:
        if is_superuser:
            os.seteuid(0)
        for path in directory.rglob("*"):
            path.chmod(0o700)
        directory.chmod(0o700)
        shutil.rmtree(directory)
