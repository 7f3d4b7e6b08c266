"""What moves from rank to rank: found out once, then moved as often as wanted.

What a rank wants is planned against an index of imaginary files, each of which is what one rank
holds (`remesh.resharding`). A region that the rank has itself, as the one that would send it or as
a copy, is copied from tensor to tensor. The others are asked for, once, and from then on both sides
know the order in which they come. They travel in messages of bounded size: in each turn every rank
sends one message to the rank that is some number further on, and gets one from the rank that is as
many before it. A thread packs the message of the next turn and another one unpacks that of the
last, so a few messages are all the memory that is needed, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from remesh.exchange import Exchange, run_joined
from remesh.geometry import Box, IntArray
from remesh.index import BoxTable, Index, decode_columns, encode_columns
from remesh.memory import HostMemory, Memory
from remesh.pipeline.read import Want
from remesh.pipeline.watch import WriteGate
from remesh.planner import LoadPlan
from remesh.storage import Buffer, aligned_buffer

MESSAGE_BYTES = 8 << 20
"""A message ends with the region by which it would become longer. No region is longer, for what is
planned is cut at the windows of the imaginary files."""

SLOTS = 2
"""Messages in either direction that exist at once: one travels, one is packed or unpacked."""

_ALIGNMENT = 16
"""Each region of a message begins at a multiple of this, for copying is faster then."""


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A region on one of its ends.

    Attributes:
        row: Of a tensor that this rank holds, or of a box that it wants.
        box: The region in it.
        position: Where it begins in its message, in bytes.
    """

    row: int
    box: Box
    position: int = 0


Messages = list[list[_Copy]]
"""What one rank sends another, message by message."""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """All that moves on this rank.

    Attributes:
        local: What it has itself: where it is, and where it goes.
        outgoing: What it sends to each rank.
        incoming: What it gets from each rank.
        sizes_out: Bytes of the messages to each rank.
        sizes_in: Bytes of the messages from each rank.
        turns: For each turn how far messages go, and which of the messages for that rank it is.
        bytes_local: Bytes of tensor data of `local`.
        bytes_sent: Bytes of tensor data that this rank sends.
        bytes_received: Bytes of tensor data that it gets.
        group_bytes_sent: Bytes of tensor data that all ranks send.
        buffers: For messages to others, and from others.
    """

    local: list[tuple[_Copy, _Copy]]
    outgoing: list[Messages]
    incoming: list[Messages]
    sizes_out: list[list[int]]
    sizes_in: list[list[int]]
    turns: list[tuple[int, int]]
    bytes_local: int
    bytes_sent: int
    bytes_received: int
    group_bytes_sent: int
    buffers: tuple[list[Buffer], list[Buffer]]

    @property
    def buffer_bytes(self) -> int:
        """Memory that the messages take, the most at any time."""
        return sum(len(buffer) for slots in self.buffers for buffer in slots)


@dataclass(frozen=True, slots=True, eq=False)
class _Regions:
    """Regions of stored tensors, a row each: rows of the index's pieces, offsets, extents."""

    index: Index
    piece: IntArray
    offsets: IntArray
    extents: IntArray

    def take(self, rows: Sequence[int]) -> _Regions:
        """Some of the rows."""
        return _Regions(self.index, self.piece[rows], self.offsets[rows], self.extents[rows])

    def boxes(self) -> list[tuple[str, Box, int]]:
        """Tensor, box and bytes of each."""
        tensors = self.index.boxes.tensors
        found = []
        for tensor, offset, extent in zip(
            self.index.boxes.tensor[self.piece].tolist(),
            self.offsets.tolist(),
            self.extents.tolist(),
            strict=True,
        ):
            ndim = int(tensors.ndims[tensor])
            box = Box(tuple(offset[:ndim]), tuple(extent[:ndim]))
            num_bytes = box.size * tensors.dtype(tensor).itemsize
            found.append((tensors.names[tensor], box, num_bytes))
        return found

    def encode(self) -> bytes:
        """For the rank that sends them."""
        return encode_columns(
            {"piece": self.piece, "offsets": self.offsets, "extents": self.extents}
        )

    @classmethod
    def decode(cls, index: Index, data: bytes) -> _Regions:
        """Of what `encode` gave."""
        columns, _ = decode_columns(data, "a request")
        return cls(index, columns["piece"], columns["offsets"], columns["extents"])


def find_routes(
    exchange: Exchange,
    index: Index,
    owners: Sequence[int],
    plan: LoadPlan,
    wants: Sequence[Want],
    held: BoxTable,
) -> Routes:
    """Find out what this rank has itself, and ask the others for the rest. Collective.

    Args:
        exchange: The ranks.
        index: What lies in which imaginary file.
        owners: The rank that has each file.
        plan: What this rank wants of them.
        wants: Where each wanted box of the plan goes.
        held: What this rank holds, copies of what is in other files included.
    """
    regions = _Regions(index, plan.piece, plan.offsets, plan.extents)
    find = _finder(held)
    local: list[tuple[_Copy, _Copy]] = []
    bytes_local = 0
    foreign: list[list[int]] = [[] for _ in range(exchange.world_size)]
    ends: list[list[tuple[int, Box, int]]] = [[] for _ in range(exchange.world_size)]
    of_piece = np.array(owners, dtype=np.int64)[index.file[plan.piece]].tolist() if owners else []
    wanted = plan.want.tolist()
    for row, (name, box, num_bytes) in enumerate(regions.boxes()):
        want = wants[wanted[row]]
        corner = tuple(o - w for o, w in zip(box.offset, want.offset, strict=True))
        there = Box(corner, box.shape)
        here = find(name, box)
        if here is not None:
            local.append((here, _Copy(wanted[row], there)))
            bytes_local += num_bytes
        else:
            foreign[of_piece[row]].append(row)
            ends[of_piece[row]].append((wanted[row], there, num_bytes))
    requests = [regions.take(rows).encode() if rows else b"" for rows in foreign]
    asked = []
    for request in _swap_bytes(exchange, requests):
        begins: list[tuple[int, Box, int]] = []
        for name, box, num_bytes in _Regions.decode(index, request).boxes() if request else ():
            source = find(name, box)
            assert source is not None, f"rank {exchange.rank} does not have {name} {box}"
            begins.append((source.row, source.box, num_bytes))
        asked.append(begins)
    return _routes(exchange, local, bytes_local, asked, ends)


def _routes(
    exchange: Exchange,
    local: list[tuple[_Copy, _Copy]],
    bytes_local: int,
    asked: list[list[tuple[int, Box, int]]],
    ends: list[list[tuple[int, Box, int]]],
) -> Routes:
    """Cut what travels into messages, and agree on the turns. Collective."""
    outgoing, sizes_out = zip(*map(_messages, asked), strict=True)
    incoming, sizes_in = zip(*map(_messages, ends), strict=True)
    rank, world_size = exchange.rank, exchange.world_size
    num_sent = sum(num_bytes for of_rank in asked for *_, num_bytes in of_rank)
    counts = [len(sizes_out[(rank + shift) % world_size]) for shift in range(world_size)]

    def unite(replies: list[bytes]) -> list[bytes]:
        told = [msgspec.msgpack.decode(reply, type=tuple[list[int], int]) for reply in replies]
        turns = [max(column) for column in zip(*(one for one, _ in told), strict=True)]
        return [msgspec.msgpack.encode((turns, sum(sent for _, sent in told)))] * len(told)

    num_turns, group_sent = msgspec.msgpack.decode(
        run_joined(exchange, lambda: msgspec.msgpack.encode((counts, num_sent)), unite),
        type=tuple[list[int], int],
    )
    buffers = tuple(
        [aligned_buffer(max((max(of, default=0) for of in sizes), default=0)) for _ in range(SLOTS)]
        for sizes in (sizes_out, sizes_in)
    )
    return Routes(
        local,
        list(outgoing),
        list(incoming),
        list(sizes_out),
        list(sizes_in),
        [(shift, number) for shift, count in enumerate(num_turns) for number in range(count)],
        bytes_local,
        num_sent,
        sum(num_bytes for of_rank in ends for *_, num_bytes in of_rank),
        group_sent,
        (buffers[0], buffers[1]),
    )


def _messages(regions: Iterable[tuple[int, Box, int]]) -> tuple[Messages, list[int]]:
    """Regions as messages of bounded length, and the length of each; both ends do the same."""
    messages: Messages = []
    sizes: list[int] = []
    for row, box, num_bytes in regions:
        padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if not sizes or sizes[-1] + padded > MESSAGE_BYTES:
            messages.append([])
            sizes.append(0)
        messages[-1].append(_Copy(row, box, sizes[-1]))
        sizes[-1] += padded
    return messages, sizes


def _finder(table: BoxTable) -> Callable[[str, Box], _Copy | None]:
    """Finds a region among the boxes that this rank holds."""
    held: dict[str, list[tuple[int, Box]]] = {}
    for row, tensor in enumerate(table.tensor.tolist()):
        held.setdefault(table.tensors.names[tensor], []).append((row, table.box(row)))

    def find(name: str, box: Box) -> _Copy | None:
        for row, own in held.get(name, ()):
            if own.contains(box):
                return _Copy(row, box.shift(own.offset, -1))
        return None

    return find


def _swap_bytes(exchange: Exchange, outgoing: Sequence[bytes]) -> list[bytes]:
    """Send each rank some bytes; what each has sent here."""
    sizes = [np.array([len(data)], dtype="<i8").view(np.uint8) for data in outgoing]
    arriving = [np.zeros(8, np.uint8) for _ in outgoing]
    exchange.swap(sizes, arriving)
    incoming = [np.zeros(int(size.view("<i8")[0]), np.uint8) for size in arriving]
    exchange.swap([np.frombuffer(bytearray(data), np.uint8) for data in outgoing], incoming)
    return [data.tobytes() for data in incoming]


# ---------------------------------------------------------------------------------------------
# Moving
# ---------------------------------------------------------------------------------------------


def deliver(
    exchange: Exchange, routes: Routes, sources: Sequence[Memory], wants: Sequence[Want]
) -> None:
    """Copy what is here, and go through the turns. Collective.

    What fails on this rank is raised after the last turn, for the others count on its messages.

    Args:
        exchange: The ranks.
        routes: What this rank found out.
        sources: The memory of each box that it holds.
        wants: Where each wanted box goes.

    Raises:
        ExchangeError: If a rank died.
    """
    rank, world_size = exchange.rank, exchange.world_size
    outgoing, incoming = routes.buffers
    none = np.zeros(0, np.uint8)
    writing = WriteGate()

    def pack(turn: int) -> None:
        shift, number = routes.turns[turn]
        messages = routes.outgoing[(rank + shift) % world_size]
        for copy in messages[number] if number < len(messages) else ():
            memory = sources[copy.row]
            memory.copy_out(copy.box, _view(outgoing[turn % SLOTS], copy, memory))

    def unpack(turn: int) -> None:
        shift, number = routes.turns[turn]
        messages = routes.incoming[(rank - shift) % world_size]
        for copy in messages[number] if number < len(messages) else ():
            memory = wants[copy.row].memory
            with writing:
                memory.copy_in(copy.box, _view(incoming[turn % SLOTS], copy, memory))

    # When this ends early, by Ctrl-C say, copies that have not begun are not made any more.
    with ThreadPoolExecutor(SLOTS, "remesh-reshard") as pool, closing(writing):
        done: list[Future[None]] = [pool.submit(pack, 0)] if routes.turns else []
        packed, unpacked = done[:1], list[Future[None]]()
        done.append(pool.submit(_copy_here, routes.local, sources, wants, writing))
        for turn, (shift, number) in enumerate(routes.turns):
            wait(packed)
            if turn + 1 < len(routes.turns):
                packed = [pool.submit(pack, turn + 1)]
                done += packed
            wait(unpacked[:-1])
            leaving, arriving = [none] * world_size, [none] * world_size
            to, by = (rank + shift) % world_size, (rank - shift) % world_size
            leaving[to] = outgoing[turn % SLOTS][: _size(routes.sizes_out[to], number)]
            arriving[by] = incoming[turn % SLOTS][: _size(routes.sizes_in[by], number)]
            exchange.swap(leaving, arriving)
            unpacked = [*unpacked[-1:], pool.submit(unpack, turn)]
            done += unpacked[-1:]
        for future in done:
            future.result()


def _size(sizes: Sequence[int], number: int) -> int:
    return sizes[number] if number < len(sizes) else 0


def _view(message: Buffer, copy: _Copy, memory: Memory) -> Any:
    """The elements of a region in a message."""
    return np.ndarray(copy.box.shape, memory.carrier, message.data, copy.position)


def _copy_here(
    local: Iterable[tuple[_Copy, _Copy]],
    sources: Sequence[Memory],
    wants: Sequence[Want],
    writing: WriteGate,
) -> None:
    """Copy what this rank has itself."""
    for source, target in local:
        memory = sources[source.row]
        if isinstance(memory, HostMemory):
            # Without dims numpy gives a number, not an array.
            values = np.asarray(memory.array[source.box.slices])
        else:
            values = np.empty(source.box.shape, memory.carrier)
            memory.copy_out(source.box, values)
        with writing:
            wants[target.row].memory.copy_in(target.box, values)
