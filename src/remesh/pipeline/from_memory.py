"""Transfers out of memory, between live layouts: planned once, executed as often as wanted.

What a rank wants is planned against an index in which a file stands for what one rank gives
(`SavePlan.index_of_holders`). A region that the rank has itself, as the one that would
send it or as a copy, is copied from tensor to tensor. It asks others for the rest, and from then on
both sides know in which turns it comes. A task packs a message or copies as much from tensor to
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from remesh.core.geometry import Box, IntArray
from remesh.core.index import Index
from remesh.core.memory import Device, Memory, copy_box, copy_directly
from remesh.core.tables import BoxTable
from remesh.exchange import Exchange, run_joined
from remesh.pipeline.read import Destination, Place, Writing
from remesh.pipeline.task_pool import Tasks
from remesh.pipeline.transfer import (
    DEVICE_MESSAGE_BYTES,
    MessageBuffers,
    device_buffers,
    execute,
    execute_on_device,
    message_buffers,
    request_regions,
)
from remesh.planner import Regions, TransferPlan
from remesh.planner.transfer import numbers_of_messages, turns_of_distances
from remesh.storage import Buffer

MESSAGE_BYTES = 8 << 20
"""A message from memory to memory ends with the region that makes it as long or longer. No region
is longer than the window of reads that it was planned with."""

NUM_THREADS = 2
"""Threads that pack messages and copy from tensor to tensor; memory is not faster for more."""

NUM_ARRIVING = 2
"""Turns whose messages arrive or are unpacked: one of each."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A region that one rank takes from its memory."""

    want: int  # `Regions.want` of it, as `TransferPlan.taken` numbers them
    box: Box  # the region
    held: tuple[int, Box]  # row of the box that the rank holds, and the part of that box
    num_bytes: int  # its size


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTransfer:
    """The moves of one rank between memories."""

    index: Index  # what each rank gives
    plan: TransferPlan  # what moves
    copies: list[_Copy]  # all that this rank takes from its memory, sorted by turn
    turn: IntArray
    """For each copy its turn; those of this rank are cut into tasks as if they were sent."""
    group_bytes_sent: int  # bytes of tensor data that all ranks send
    buffers: MessageBuffers  # for the messages

    @property
    def bytes_local(self) -> int:
        """Bytes of tensor data that this rank has itself."""
        return int(self.plan.local.num_bytes(self.index).sum())

    @property
    def buffer_bytes(self) -> int:
        """Memory that the messages take, the most at any time."""
        buffers = self.buffers
        return sum(len(buffer) for buffer in (*buffers.leaving, *buffers.arriving))

    def execute(
        self,
        exchange: Exchange,
        memories: Sequence[Memory],
        destinations: Sequence[Destination],
        on_read: Callable[[int], None],
    ) -> None:
        """Move everything. Collective; `on_read` gets the bytes that each task took."""
        on_device = self.buffers.device is not None
        run, copy = (execute_on_device, copy_directly) if on_device else (execute, copy_box)
        tasks = self._tasks(memories, copy)
        run(exchange, self.plan, tasks, destinations, on_read=on_read, buffers=self.buffers)

    def _tasks(
        self, memories: Sequence[Memory], copy: Callable[[Memory, Box, Memory, Box], None]
    ) -> Tasks:
        """The copies of this rank, to others and to itself."""
        turn, first = np.unique(self.turn, return_index=True)
        bounds = [*first.tolist(), len(self.turn)]

        def perform(task: int, _buffer: Buffer, place: Place, writing: Writing) -> int:
            copies = self.copies[bounds[task] : bounds[task + 1]]
            with writing():
                for one in copies:
                    (held, part), target = one.held, place(one.want)
                    corner = one.box.shift(target.offset, -1)
                    copy(memories[held], part, target.memory, corner)
            return sum(one.num_bytes for one in copies)

        num_bytes = sum(one.num_bytes for one in self.copies)
        return Tasks(turn, num_bytes, NUM_THREADS, 0, perform)


def plan_between_memories(
    exchange: Exchange,
    index: Index,
    regions: Regions,
    num_wanted: int,
    held: BoxTable,
    *,
    device: Device | None = None,
) -> MemoryTransfer:
    """Find what this rank has itself, and ask the others for the rest. Collective.

    The files of `index` stand for ranks, in rank order. `held` is what this rank holds, copies of
    what other ranks give included; `device` is this rank's, if all ranks send memory of their
    devices as it is.
    """
    here = _find(index, regions, held)
    is_here = np.array([source is not None for source in here], dtype=np.bool_)
    owner = np.array(index.rows(regions.piece).file, dtype=np.int64)
    owner[is_here] = exchange.rank
    lacking = {
        rank: regions.take(np.flatnonzero(owner == rank))
        for rank in np.unique(owner).tolist()
        if rank != exchange.rank
    }
    message_bytes = MESSAGE_BYTES if device is None else DEVICE_MESSAGE_BYTES
    numbers = {
        rank: numbers_of_messages(index, of_rank, message_bytes)
        for rank, of_rank in lacking.items()
    }
    first_turn, asked_by, group_sent = _agree_on_turns(
        exchange,
        {rank: int(of_rank[-1]) + 1 for rank, of_rank in numbers.items()},
        sum(int(of_rank.num_bytes(index).sum()) for of_rank in lacking.values()),
    )
    wanted = {
        rank: (
            of_rank,
            numbers[rank] + first_turn[(exchange.rank - rank) % exchange.world_size],
        )
        for rank, of_rank in lacking.items()
    }
    outgoing, incoming = request_regions(exchange, index, wanted, asked_by)
    local = regions.take(np.flatnonzero(owner == exchange.rank))
    plan = TransferPlan(local, outgoing, incoming, first_turn[-1], NUM_ARRIVING)
    taken, turns = plan.taken(num_wanted)
    turn = turns[taken.want]
    turn[: len(local)] += numbers_of_messages(index, local, message_bytes)
    sources = [*filter(None, here), *filter(None, _find(index, outgoing.regions, held))]
    assert len(sources) == len(taken), f"rank {exchange.rank} does not have what it should have"
    want, boxes, sizes = taken.want.tolist(), taken.boxes(index), taken.num_bytes(index).tolist()
    order = np.argsort(turn, kind="stable")
    return MemoryTransfer(
        index,
        plan,
        [_Copy(want[row], boxes[row], sources[row], sizes[row]) for row in order.tolist()],
        turn[order],
        group_sent,
        device_buffers(exchange, device, index, plan)
        if device
        else message_buffers(exchange, index, plan),
    )


def _agree_on_turns(
    exchange: Exchange, num_messages: dict[int, int], num_bytes: int
) -> tuple[list[int], list[int], int]:
    """Agree on the turns. Collective."""
    world_size = exchange.world_size

    def join(replies: list[bytes]) -> list[bytes]:
        counts = np.zeros((world_size, world_size), dtype=np.int64)
        total = 0
        for rank, reply in enumerate(replies):
            of_rank, size = msgspec.msgpack.decode(reply, type=tuple[dict[int, int], int])
            counts[rank, list(of_rank)] = list(of_rank.values())
            total += size
        turns = turns_of_distances(counts).tolist()
        return [
            msgspec.msgpack.encode((turns, np.flatnonzero(counts[:, rank]).tolist(), total))
            for rank in range(world_size)
        ]

    reply = run_joined(exchange, lambda: msgspec.msgpack.encode((num_messages, num_bytes)), join)
    return msgspec.msgpack.decode(reply, type=tuple[list[int], list[int], int])


def _find(index: Index, regions: Regions, held: BoxTable) -> list[tuple[int, Box] | None]:
    """Where each region lies in the boxes that a rank holds: row, and part of the box."""
    rows: dict[str, list[tuple[int, Box]]] = {}
    for row, tensor in enumerate(held.tensor.tolist()):
        rows.setdefault(held.tensors.names[tensor], []).append((row, held.box(row)))
    names, tensors = index.tensors.names, index.tensor_of(regions.piece).tolist()
    return [
        next(
            (
                (row, box.shift(own.offset, -1))
                for row, own in rows.get(names[tensor], ())
                if own.contains(box)
            ),
            None,
        )
        for tensor, box in zip(tensors, regions.boxes(index), strict=True)
    ]
