"""A state of which some blocks can be compressed and some cannot, saved in compressed files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import remesh
from remesh.core.geometry import IntArray
from remesh.core.index import Index
from remesh.core.integrity import hex_digest
from remesh.exchange import Exchange
from remesh.formats import native
from remesh.storage import Storage
from tests.engine.bits import TORCH_DTYPES, random_tensor, zeros_like
from tests.engine.scenes import share_of

ROWS, COLUMNS = 48, 32768
"""Of a tensor of 6 blocks; each of three ranks has rows of two."""


def truth() -> dict[str, Any]:
    dice = np.random.default_rng(0)
    weight = (dice.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    # Noise between what can be compressed, and zeros behind it.
    weight[8:32] = dice.integers(0, 1 << 32, (24, COLUMNS), np.uint32).view(np.float32)
    weight[36:] = 0
    return {
        "weight": weight,
        "moment": np.zeros((ROWS, 2048), np.float64),
        "bias": dice.standard_normal((ROWS, 5)).astype(np.float16),
    }


def small_tensors() -> dict[str, torch.Tensor]:
    """A tensor of each dtype, and the smallest ones."""
    found = {
        f"kinds.{dtype}".replace("torch.", ""): random_tensor(dtype, (3, 41))
        for dtype in TORCH_DTYPES
    }
    return found | {
        "empty": torch.zeros(0, 4, dtype=torch.int8),
        "one": torch.tensor([7], dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
    }


def part_of_state(rank: int, num_ranks: int, dim: int, *, fill: bool) -> dict[str, Any]:
    """A rank's rows or columns of the large tensors, and the small ones whole."""
    state: dict[str, Any] = {
        name: share_of(name, array if fill else np.full_like(array, 3), rank, num_ranks, dim)
        for name, array in truth().items()
    }
    for name, tensor in small_tensors().items():
        state[name] = tensor if fill else zeros_like(tensor)
    return state


def save_rows(exchange: Exchange, place: Path | Storage, **options: Any) -> None:
    state = part_of_state(exchange.rank, exchange.world_size, 0, fill=True)
    remesh.save(state, place, group=exchange, **{"compress": "zstd", **options})


def stored_bytes(path: Path) -> int:
    """Bytes of the data files of a checkpoint, which its record also says."""
    record = remesh.Checkpoint(path).record
    sizes = [(path / file.path).stat().st_size for file in record.files]
    assert sizes == [file.num_bytes for file in record.files]
    return sum(sizes)


def places_of(index: Index, row: int) -> tuple[IntArray, IntArray]:
    """Where the blocks of a compressed file begin in it, and their lengths."""
    table = index.block_table(row)
    assert table is not None
    return table.begin, table.length


def replace_index(storage: Storage, index: Index) -> None:
    """Give a checkpoint another index, and a record that says it is right."""
    record, data = native.read_record(storage), index.encode()
    known = msgspec.structs.replace(record.index, num_bytes=len(data), digest=hex_digest(data))
    changed = msgspec.structs.replace(record, index=known)
    storage.put(record.index.path, data, overwrite=True)
    storage.put(native.RECORD_NAME, native.encode_record(changed), overwrite=True)
