"""Comparing the copies of a tensor that several ranks hold.

What counts depends on who says that the copies are equal (`remesh.core.state.Role`):

* None does: plain tensors under one name on several ranks (`ASSUMED`). Every save compares
  digests of all their bytes, and fails if they differ.
* A framework does: `Replicate()` placements, parameters in DDP (`EQUAL`). The first save of a
  layout compares stretches of them, and warns if they differ. It speaks for the ranks that its
  meshes join: copies on others as well (an actor on one mesh, a critic on another, with equal
  names) are compared like those without a promise.
* Buffers of modules in DDP may differ, for DDP gives all ranks those of rank 0 before the next
  forward pass (`FIRST`). These are not compared.
* A description does (`MAIN` and `REPLICA`). These are not compared.

With `verify_replicas=True` digests of all bytes of all copies are compared, and any difference is
an error. A live reshard, which may come every step, compares stretches of assumed copies only.

Memory of a device is digested there, where that is possible.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import xxhash

from remesh._repr import listed
from remesh.checkpoint.local import LocalTensors, finish_device_work
from remesh.core.geometry import BoolArray, IntArray, boxes_of_flat_range
from remesh.core.memory import contiguous_bytes
from remesh.core.state import Role
from remesh.errors import DivergedReplicaError
from remesh.exchange import Exchange, run_joined
from remesh.planner import LocalBoxes
from remesh.planner.saving import Copies

Compares = Literal["sampled", "whole", "equal", "all"]
"""What a save compares: stretches of assumed copies; all of them, with a look at the others; all of
those that ought to be equal; or all of all copies."""

SAMPLE_BLOCKS = 8
"""How many stretches of a tensor are compared where not all of it is."""

SAMPLE_BLOCK_BYTES = 8 << 10
"""Bytes of each; what is no larger than all of them together is compared as a whole."""

CHUNK_BYTES = 16 << 20
"""Bytes that are copied at a time to be digested, where memory is not contiguous."""

DIGEST_BYTES = 17
"""A letter for how the digest was made, and 16 bytes."""

MAX_SHOWN = 5
"""How many tensors a warning names."""

_LOGGER = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The extent of what one save compares; the same on all ranks."""

    compares: Compares  # how much
    looks: bool  # whether it looks at copies that a framework promises to be equal
    chosen: bool  # whether the caller says whose buffers are stored, so that they may differ

    def levels(self, roles: IntArray) -> IntArray:
        """For the role of each copy: 0 not compared, 1 to warn of, 2 to raise."""
        levels = np.zeros(len(roles), dtype=np.int64)
        if self.compares in {"equal", "all"}:
            levels[:] = 2
        elif self.looks and self.compares == "whole":
            levels[roles == Role.EQUAL] = 1
        levels[roles == Role.ASSUMED] = 2
        if self.chosen or self.compares == "equal":
            levels[roles == Role.FIRST] = 0
        return levels


def roles_of_copies(roles: IntArray, apart: BoolArray) -> IntArray:
    """The roles of copies, of which some are `apart`: on ranks that no mesh joins."""
    return np.where(apart & (roles == Role.EQUAL), Role.ASSUMED, roles)


def compare_copies(
    exchange: Exchange,
    tensors: LocalTensors,
    rows: tuple[IntArray, IntArray],
    comparison: Comparison,
    copies: Copies | None,
    local_boxes: Sequence[LocalBoxes],
) -> None:
    """Compare what several ranks hold: `rows` of this rank's tensors, with their roles. Collective.

    Copies and boxes of all ranks are known on rank 0.
    """

    def join(replies: list[bytes]) -> list[bytes]:
        assert copies is not None
        is_done = _compare(copies, local_boxes, comparison, replies)
        return [b"" if is_done else b"again"] * exchange.world_size

    for on_host in (False, True):
        digest = partial(_digests, tensors, rows, comparison, on_host=on_host)
        if run_joined(exchange, digest, join) == b"":
            return


def _digests(
    tensors: LocalTensors,
    rows: tuple[IntArray, IntArray],
    comparison: Comparison,
    *,
    on_host: bool,
) -> bytes:
    """The digests of the rows that are compared, one after the other."""
    finish_device_work(tensors.memories)
    digests = []
    levels = comparison.levels(rows[1])
    for row, level in zip(rows[0].tolist(), levels.tolist(), strict=True):
        if level:
            whole = level == 2 and comparison.compares != "sampled"
            digests.append(_digest(tensors, row, whole=whole, on_host=on_host))
    return b"".join(digests)


def _digest(tensors: LocalTensors, row: int, *, whole: bool, on_host: bool) -> bytes:
    memory, shape = tensors.memories[row], tensors.boxes.box(row).shape
    on_device = None if on_host else memory.digest()
    if on_device is not None:
        return b"d" + on_device
    itemsize = tensors.boxes.tensors.dtype(int(tensors.boxes.tensor[row])).itemsize
    ranges = sample_ranges(shape, itemsize)
    if whole:
        step = max(CHUNK_BYTES // itemsize, 1)
        size = math.prod(shape)
        ranges = [(start, min(start + step, size)) for start in range(0, size, step)]
    digest = xxhash.xxh3_128()
    plain = contiguous_bytes(memory)
    for start, stop in ranges:
        if plain is not None:
            digest.update(plain[start * itemsize : stop * itemsize].data)
            continue
        for part in boxes_of_flat_range(shape, start, stop):
            values = np.empty(part.shape, memory.carrier)
            memory.copy_out(part, values)
            digest.update(values.tobytes())
    return b"h" + digest.digest()


def _compare(
    copies: Copies,
    local_boxes: Sequence[LocalBoxes],
    comparison: Comparison,
    replies: Sequence[bytes],
) -> bool:
    """Rank 0: compare; False if devices and hosts have digested copies of one box."""
    levels = np.zeros(len(copies.rank), np.int64)
    digests = np.zeros(len(copies.rank), f"V{DIGEST_BYTES}")
    for held, mine, reply in zip(local_boxes, copies.by_rank(len(replies)), replies, strict=True):
        roles = roles_of_copies(held.role_of_boxes[copies.row[mine]], copies.apart[mine])
        levels[mine] = comparison.levels(roles)
        digests[mine[levels[mine] > 0]] = np.frombuffer(reply, f"V{DIGEST_BYTES}")
    order = np.flatnonzero(levels)
    order = order[np.lexsort((copies.rank[order], copies.box[order], levels[order]))]
    left, right = order[:-1], order[1:]
    same_box = (copies.box[left] == copies.box[right]) & (levels[left] == levels[right])
    differ = np.flatnonzero(same_box & (digests[left] != digests[right]))
    pairs = [(int(left[number]), int(right[number])) for number in differ.tolist()]
    if any(digests[a].tobytes()[:1] != digests[b].tobytes()[:1] for a, b in pairs):
        return False
    _report(copies, local_boxes, levels, pairs)
    return True


def _report(
    copies: Copies,
    local_boxes: Sequence[LocalBoxes],
    levels: IntArray,
    pairs: list[tuple[int, int]],
) -> None:
    """Raise or warn about pairs of copies that differ."""
    warned: dict[str, tuple[int, int]] = {}
    for a, b in pairs:
        ranks = int(copies.rank[a]), int(copies.rank[b])
        held = local_boxes[ranks[0]]
        row = int(copies.row[a])
        name = held.boxes.tensors.names[held.boxes.tensor[row]]
        if levels[a] == 2:
            what = f"{name}: ranks {ranks[0]} and {ranks[1]} hold different values of shape "
            what += str(held.boxes.box(row).shape)
            if copies.apart[a] and held.role_of_boxes[row] == Role.EQUAL:
                raise DivergedReplicaError(what + _ON_MESHES)
            role = Role(int(held.role_of_boxes[row]))
            raise DivergedReplicaError(_message(what, role))
        warned.setdefault(name, ranks)
    if warned:
        shown = [f"{name} (ranks {a} and {b})" for name, (a, b) in warned.items()]
        _LOGGER.warning(
            "copies of %d tensors differ between ranks, and one of them is stored\n"
            "They are %s. Pass verify_replicas=True to make that an error; for buffers, "
            "buffers='rank0' or 'per_rank' says which count",
            len(warned),
            listed(shown, MAX_SHOWN),
        )


_ON_MESHES = (
    ", and its copies are on different device meshes\nNo mesh of the state joins all ranks that "
    "hold it, so nothing keeps them equal, and one would be stored. If each mesh has its own, "
    "as an actor and a critic have, give them names of their own: another key of the state for "
    "the module and for its optimizer, or remesh.sharding.NamedModule. If they should be equal, "
    "broadcast them from one mesh before saving."
)


def _message(what: str, role: Role) -> str:
    buffers = (
        "If they are buffers of a module, such as the statistics of BatchNorm, say which count: "
        'buffers="rank0" or "per_rank".'
    )
    if role is not Role.ASSUMED:
        return (
            f"{what}, though their replicas should be equal. Broadcast them from one rank, and "
            f"look for what made them differ. {buffers}"
        )
    return (
        f"{what} under this one name. If they are shards of a larger tensor, describe them "
        "(DTensor, or remesh.ShardedTensor with the global shape). If each rank has its own, as "
        "stages of a pipeline have, give them names of their own or wrap them in "
        f"remesh.sharding.ShardedObject. {buffers} If they should be equal, broadcast them "
        "from one rank before saving."
    )


def sample_ranges(shape: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """The stretches of a box that are compared, as ranges of flat elements.

    They are spread evenly from the first element to the last, and consist of whole rows if these
    are short, for each stretch of a device's memory is then one copy.
    """
    size = math.prod(shape)
    length = SAMPLE_BLOCK_BYTES // itemsize
    if size <= SAMPLE_BLOCKS * length:
        return [(0, size)]
    row = shape[-1] if shape[-1] <= length else 1
    length -= length % row
    last = (size - length) // row
    starts = [last * number // (SAMPLE_BLOCKS - 1) * row for number in range(SAMPLE_BLOCKS)]
    return [(start, start + length) for start in starts]
