"""Files that one rank writes, of tensors that lie on several ranks.

In an object store a file has one writer, which writes it from its beginning to its end. So the rank
that writes a file collects the tensors of the file. All ranks go through rounds. In a round a rank
lays out the next chunks of its files; what it does not hold itself, it gets from the other ranks by
the engine that moves boxes between memories (`from_memory`); then it hands the chunks over to be
written. Memory is bounded by the chunks of a round and the messages of a transfer. An object store
takes in what was written beside the next rounds (`remesh.storage.remote`).

If each rank holds all tensors of its files, as data-parallel replicas do, there are no rounds.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.core.dtypes import CarrierDType
from remesh.core.geometry import Box
from remesh.core.index import Index
from remesh.core.memory import CarrierArray, CopyQueue, HostMemory, Memory
from remesh.core.tables import BoxTable
from remesh.exchange import Exchange, Outcome, share_outcomes
from remesh.pipeline.arena import Arena
from remesh.pipeline.from_memory import plan_between_memories
from remesh.pipeline.read import Destination
from remesh.pipeline.stage import NUM_STAGERS, NUM_WRITERS, Consume, Stager
from remesh.pipeline.write import CHUNK_SIZE, FileLayout, Filled
from remesh.planner import ReadLimits, plan_load
from remesh.storage import Buffer

ROUND_BYTES = 32 << 20
"""Bytes of its files that a rank lays out in a round: enough that a round is worth its messages."""


Range = tuple[int, int, tuple[int, ...]]
"""See `Collection.checksums`."""


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """The boxes that the ranks of a save hold together."""

    exchange: Exchange  # the ranks
    index: Index  # all boxes; file `n` stands for what rank `n` holds
    held: BoxTable  # the boxes that this rank holds, copies included
    memories: list[Memory]  # the memory of each
    waiting: list[tuple[int, Box, CarrierArray]] = field(default_factory=list)
    """Tensor, box and destination of what this rank lacks in the current round."""
    checksums: list[Range] = field(default_factory=list)
    """First byte, end, and bytes at which a CRC-32 of that range of the stream stands, behind it;
    ascending."""

    def plan_transfer(self) -> Callable[[], None]:
        """Plan the transfer of all that ranks lack; returns what executes it. Both collective."""
        waiting = self.waiting.copy()
        self.waiting.clear()
        wanted = BoxTable.of(self.index.tensors, [(tensor, box) for tensor, box, _ in waiting])
        destinations = [Destination(box.offset, HostMemory(into)) for _, box, into in waiting]
        regions = plan_load(self.index, wanted, ReadLimits()).regions
        transfer = plan_between_memories(
            self.exchange, self.index, regions, len(destinations), self.held
        )
        return lambda: transfer.execute(
            self.exchange, self.memories, destinations, lambda _num_bytes: None
        )


@dataclass(frozen=True, slots=True, eq=False)
class SpreadMemory(Memory):
    """A whole tensor of which other ranks hold boxes."""

    collection: Collection  # where the boxes are
    tensor: int  # row of the tensor in its index

    @property
    def carrier(self) -> CarrierDType:
        return self.collection.index.tensors.dtype(self.tensor).carrier

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        """Note what is wanted; the array is filled when the transfer of the round has ended."""
        self.collection.waiting.append((self.tensor, box, into))


class Checksums:
    """Puts CRC-32s of ranges of a stream into the stream, which comes chunk after chunk."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = deque(ranges)
        self._value = 0
        self._known: list[tuple[int, bytes]] = []

    def complete(self, start: int, chunk: Buffer) -> None:
        """Put those that are known into a chunk that begins at this byte of the stream."""
        stop = start + len(chunk)
        while self._ranges and self._ranges[0][0] < stop:
            first, last, places = self._ranges[0]
            part = chunk[max(first - start, 0) : min(last, stop) - start]
            self._value = zlib.crc32(part.data, self._value)
            if last > stop:
                break
            self._known += [(place, self._value.to_bytes(4, "little")) for place in places]
            self._ranges.popleft()
            self._value = 0
        for place, value in self._known:
            for at, byte in enumerate(value, place - start):
                if 0 <= at < len(chunk):
                    chunk[at] = byte
        self._known = [(place, value) for place, value in self._known if place + 4 > stop]


class CollectingStager(Stager):
    """A stager of files whose tensors lie on several ranks; `stage` is collective.

    A rank that is cancelled gives its boxes to the others until the last round. `copies` is used if
    there are no rounds.
    """

    def __init__(
        self,
        collection: Collection,
        layout: FileLayout,
        arena: Arena,
        copies: Callable[[], CopyQueue] | None = None,
    ) -> None:
        super().__init__(layout, arena, copies)
        self._collection = collection
        self._checksums = Checksums(collection.checksums)

    def stage(self, consume: Consume, begin: Callable[[], None] = lambda: None) -> None:
        """As in `Stager`; all ranks raise the failure of one."""
        # Two rounds fit into the arena, if it has room for more than one chunk.
        chunks = max(1, min(ROUND_BYTES, self._arena.budget // 2) // CHUNK_SIZE)
        pieces = self._layout.pieces
        lacks = any(isinstance(piece.memory, SpreadMemory) for piece in pieces)
        lacks = lacks or bool(self._collection.checksums)

        with Outcome() as begun:
            begin()
            num_rounds = -(-self._layout.num_chunks // chunks)
            begun.reply = np.array([lacks, num_rounds], "<i8").tobytes()
        replies = share_outcomes(self._collection.exchange, begun)
        rounds = np.array([np.frombuffer(reply, "<i8") for reply in replies])
        if not rounds[:, 0].any():
            super().stage(consume)
            return
        for number in range(int(rounds[:, 1].max())):
            numbers = range(number * chunks, (number + 1) * chunks)
            own = numbers[: self._layout.num_chunks - numbers.start]
            self._round(own, consume)

    def _round(self, numbers: range, consume: Consume) -> None:
        """Lay out some chunks of this rank's files, and get what this rank lacks of them."""
        exchange = self._collection.exchange
        filled: list[Filled] = []

        def complete() -> Iterator[Filled]:
            while filled and not self._stop.is_set():
                self._checksums.complete(filled[0].number * CHUNK_SIZE, filled[0].data)
                yield filled.pop(0)

        try:
            with Outcome() as laid_out:
                for number in numbers:
                    chunk = self._arena.take(self._stop)
                    if chunk is None:
                        self._collection.waiting.clear()
                        break
                    filled.append(Filled(number, 0, chunk))
                    data = self._layout.fill_chunk(number, chunk.buffer)
                    filled[-1] = Filled(number, len(data), chunk)
            share_outcomes(exchange, laid_out)
            execute = self._collection.plan_transfer()
            with Outcome() as moved:
                execute()
                consume(complete())
            share_outcomes(exchange, moved)
        finally:
            for one in filled:
                self._arena.give(one.chunk)


def stager_of(
    layout: FileLayout,
    arena: Arena,
    copies: Callable[[], CopyQueue] | None,
    collection: Collection | None,
    num_threads: int = NUM_STAGERS,
) -> Stager:
    """What stages a stream, which collects its tensors if they lie on several ranks."""
    if collection is None:
        return Stager(layout, arena, copies, num_threads=num_threads)
    return CollectingStager(collection, layout, arena, copies)


def direct_stager(
    layout: FileLayout,
    copies: Callable[[], CopyQueue] | None,
    collection: Collection | None = None,
) -> Stager:
    """What stages a stream through few chunks, to be written by the threads that fill them.

    With a `collection` staging is collective: all ranks raise the failure of `begin`, and what
    another rank raises in a round; a failure after the last round is not known to other ranks.
    """
    most = NUM_WRITERS * CHUNK_SIZE if collection is None else 2 * ROUND_BYTES
    arena = Arena(min(most, 2 * layout.num_chunks * CHUNK_SIZE), CHUNK_SIZE)
    return stager_of(layout, arena, copies, collection, NUM_WRITERS)
