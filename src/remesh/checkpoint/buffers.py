"""Buffers of modules that differ between ranks, such as the running statistics of BatchNorm.

Frameworks shard parameters and leave buffers alone, so every rank has statistics of its own
samples. The caller says which of them a checkpoint gets:

* `rank0`: those of the lowest rank that has them.
* `mean`: the mean over the ranks that have them, computed in float64, of buffers with floating
  point elements; of others, such as counters, those of the lowest rank.
* `per_rank`: those of the lowest rank and, under names of their own, those of every rank. A load
  gives each rank those of the rank with its number. A rank that had no counterpart gets those of
  the lowest rank.

The state itself is not changed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from remesh.checkpoint.local import LocalTensors, casting_memory_of, memory_of
from remesh.errors import StateError
from remesh.exchange import Exchange, run_joined
from remesh.geometry import Box, IntArray
from remesh.planner import Copies
from remesh.state import Role, TensorEntry

Buffers = Literal["rank0", "mean", "per_rank"]
"""Whose buffers a checkpoint gets."""

_OF_RANK = re.compile(r"(.*)@rank_\d{5,}", re.DOTALL)


def check_buffers(buffers: Buffers | None) -> Buffers | None:
    """The option, if there is such a one.

    Raises:
        StateError: If there is not.
    """
    if buffers not in {None, "rank0", "mean", "per_rank"}:
        raise StateError(f'buffers must be "rank0", "mean", "per_rank" or None, not {buffers!r}')
    return buffers


def name_on_rank(name: str, rank: int) -> str:
    """The stored name of a rank's own copy of a buffer."""
    return f"{name}@rank_{rank:05d}"


def choose_buffers(
    entries: Iterable[TensorEntry], buffers: Buffers | None, rank: int
) -> list[TensorEntry]:
    """The tensors of this rank as an option says that they are stored."""
    if buffers is None:
        return list(entries)
    chosen = []
    for entry in entries:
        if not entry.is_buffer:
            chosen.append(entry)
            continue
        chosen.append(dataclasses.replace(entry, role=Role.FIRST))
        if buffers == "per_rank":
            chosen.append(
                dataclasses.replace(
                    entry, name=name_on_rank(entry.name, rank), role=Role.MAIN, alias_key=None
                )
            )
    return chosen


def own_buffers(
    entries: Iterable[TensorEntry], stored: Container[str], rank: int
) -> list[TensorEntry]:
    """The tensors that a rank loads: its own buffers, where they are stored."""
    return [
        dataclasses.replace(entry, name=name_on_rank(entry.name, rank))
        if entry.is_buffer and name_on_rank(entry.name, rank) in stored
        else entry
        for entry in entries
    ]


def without_buffers_of_ranks(names: Iterable[str], extra: Iterable[str]) -> list[str]:
    """Those of some stored names that are not of buffers which are stored for each rank.

    Not every copy of such a buffer is asked for in every world size.

    Args:
        names: All stored names.
        extra: Those to choose from.
    """
    bases = {match[1] for match in map(_OF_RANK.fullmatch, names) if match is not None}
    copies = {name_on_rank(base, 0)[:-5] for base in bases}
    return [
        name for name in extra if name not in bases and name[: name.rfind("_") + 1] not in copies
    ]


def take_mean(
    exchange: Exchange, tensors: LocalTensors, rows: IntArray, copies: Copies | None
) -> None:
    """Replace the memories of buffers by their means over ranks. Collective.

    Args:
        exchange: The ranks.
        tensors: What this rank holds; the memories of buffers are replaced.
        rows: Rows of it that other ranks hold as well.
        copies: On rank 0, the copies of all ranks.
    """
    mine = [row for row in rows.tolist() if _has_mean(tensors, row)]

    def give() -> bytes:
        values = {row: _as_float64(tensors, row).tobytes() for row in mine}
        return msgspec.msgpack.encode(values)

    def join(replies: list[bytes]) -> list[bytes]:
        assert copies is not None
        given = [msgspec.msgpack.decode(reply, type=dict[int, bytes]) for reply in replies]
        return [msgspec.msgpack.encode(means) for means in _means(copies, given)]

    reply = run_joined(exchange, give, join)
    for row, data in msgspec.msgpack.decode(reply, type=dict[int, bytes]).items():
        part = tensors.parts[row]
        copy: Any = part.detach().clone() if hasattr(part, "detach") else np.array(part)
        name, shape = _name(tensors, row), tensors.boxes.box(row).shape
        mean = np.frombuffer(data, np.float64).reshape(shape)
        casting_memory_of(copy, "float64", name).copy_in(Box.whole(shape), mean)
        tensors.memories[row] = memory_of(copy, name)


def _means(copies: Copies, given: Sequence[dict[int, bytes]]) -> list[dict[int, bytes]]:
    """For each rank, the means of the buffers that it has given."""
    sums: dict[int, Any] = {}
    counts: dict[int, int] = {}
    places = [
        (box, rank, row)
        for box, rank, row in zip(
            copies.box.tolist(), copies.rank.tolist(), copies.row.tolist(), strict=True
        )
        if row in given[rank]
    ]
    for box, rank, row in places:
        values = np.frombuffer(given[rank][row], np.float64)
        sums[box] = values + sums[box] if box in sums else values
        counts[box] = counts.get(box, 0) + 1
    means: list[dict[int, bytes]] = [{} for _ in given]
    for box, rank, row in places:
        means[rank][row] = (sums[box] / counts[box]).tobytes()
    return means


def _has_mean(tensors: LocalTensors, row: int) -> bool:
    dtype = tensors.boxes.tensors.dtype(int(tensors.boxes.tensor[row])).name
    return tensors.roles[row] == Role.FIRST and dtype.startswith(("float", "bfloat"))


def _as_float64(tensors: LocalTensors, row: int) -> Any:
    shape = tensors.boxes.box(row).shape
    values = np.empty(shape, np.float64)
    memory = casting_memory_of(tensors.parts[row], "float64", _name(tensors, row))
    memory.copy_out(Box.whole(shape), values)
    return values


def _name(tensors: LocalTensors, row: int) -> str:
    return str(tensors.boxes.tensors.names[tensors.boxes.tensor[row]])
