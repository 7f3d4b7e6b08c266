"""What moves between ranks, in which turn, and where it lies in the messages. Pure.

A transfer goes through turns. In a turn each rank sends at most one message to each other rank, and
gets one from each. Sender and receiver make the same `Messages` of the same regions in the same
order, so they agree on every byte without further talk.

Which turn a region has depends on where it comes from. What is read from files goes in the turn of
its window (`remesh.planner.assignment`), for a window is read once and goes to all ranks that need
something of it. What is copied out of memory can be had in any order, so each rank sends to one
other rank a turn: in all turns of one *distance* it sends to the rank that is so many further on,
and gets from the one that is as many before it (`turns_of_distances`). Then a few messages are all
the memory that is needed, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.core.geometry import IntArray
from remesh.core.index import Index
from remesh.core.tables import decode_columns, encode_columns
from remesh.planner.loading import Regions

HEAD_BYTES = 16
"""Bytes before the regions of a message; the first says whether they are good."""

_ALIGNMENT = 16
"""Each region of a message begins at a multiple of this, for copying is faster then."""


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """The messages that one rank sends, or those that it gets, sorted by turn."""

    regions: Regions  # what they carry, message after message
    position: IntArray  # first byte of each region in the buffer of its turn
    turn: IntArray  # turn of each message, ascending
    peers: list[tuple[int, ...]]  # the ranks that each is sent to, or the one that sends it
    first: IntArray  # first region of each message, and the number of regions
    start: IntArray  # first byte of each message in the buffer of its turn
    stop: IntArray  # one past its last byte
    num_bytes: int  # bytes of tensor data, once for each peer

    @classmethod
    def of(
        cls, index: Index, parts: Sequence[tuple[tuple[int, ...], Regions, IntArray]]
    ) -> Messages:
        """The messages of some regions.

        Each part has the ranks that get the same or the one that sends it, the regions, and their
        turns.
        """
        none = np.zeros(0, dtype=np.int64)
        no_boxes = np.zeros((0, index.tensors.shapes.shape[1]), dtype=np.int64)
        regions = Regions.join([Regions(none, none, no_boxes, no_boxes), *(r for _, r, _ in parts)])
        turn = np.concatenate([none, *(turns for *_, turns in parts)])
        part = np.repeat(np.arange(len(parts)), [len(turns) for *_, turns in parts])
        order = np.lexsort((part, turn))
        regions, turn, part = regions.take(order), turn[order], part[order]
        is_first = np.ones(len(turn), dtype=np.bool_)
        is_first[1:] = (turn[1:] != turn[:-1]) | (part[1:] != part[:-1])
        first = np.flatnonzero(is_first)
        sizes = regions.num_bytes(index)
        num_bytes = np.add.reduceat(sizes, first) if len(first) else none
        peers = [parts[number][0] for number in part[first].tolist()]
        padded = sizes + -sizes % _ALIGNMENT
        ends = np.cumsum(padded + HEAD_BYTES * is_first)
        start = (ends - padded)[first] - HEAD_BYTES
        stop = np.append(start[1:], ends[-1:])
        # All that was counted from the first turn on is counted from the beginning of each turn.
        before = start[np.searchsorted(turn[first], turn[first])]
        position = ends - padded - np.repeat(before, np.diff(np.append(first, len(turn))))
        return cls(
            regions,
            position,
            turn[first],
            peers,
            np.append(first, len(turn)),
            start - before,
            stop - before,
            sum(int(size) * len(of) for size, of in zip(num_bytes, peers, strict=True)),
        )

    def in_turn(self, turn: int) -> range:
        """The messages of a turn."""
        return range(*np.searchsorted(self.turn, (turn, turn + 1)).tolist())

    def span(self, number: int) -> tuple[int, int]:
        """First byte of a message in the buffer of its turn, and one past its last."""
        return int(self.start[number]), int(self.stop[number])

    def rows(self, number: int) -> slice:
        """The regions of a message."""
        return slice(int(self.first[number]), int(self.first[number + 1]))

    @property
    def turn_of_region(self) -> IntArray:
        """The turn of each region."""
        return np.repeat(self.turn, np.diff(self.first))

    def buffer_bytes(self, but_from: Container[int] = ()) -> int:
        """Bytes of the messages of a turn, the most of any turn, without those from some ranks."""
        stops = zip(self.stop.tolist(), self.peers, strict=True)
        return max((stop for stop, (rank, *_) in stops if rank not in but_from), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """The regions that one rank takes from its sources, for itself and for others, and gets."""

    local: Regions  # what it takes for itself
    outgoing: Messages  # what it takes for others
    incoming: Messages  # what others send; `want` is the number of the wanted box here
    num_turns: int  # turns of the whole group
    num_arriving: int = 1
    """Turns whose messages may be on their way or not yet unpacked at a time, each in a buffer of
    its own."""

    @classmethod
    def alone(cls, index: Index) -> TransferPlan:
        """The plan of a rank that needs nothing from others, if no rank does."""
        none = Messages.of(index, ())
        return cls(none.regions, none, none, 0)

    def taken(self, num_wanted: int) -> tuple[Regions, IntArray]:
        """All that this rank takes from its sources, and the turn of each wanted box.

        What is for others is numbered as if the regions of `outgoing` were wanted here, after the
        boxes that are; what is for this rank comes after all turns.
        """
        others = self.outgoing.regions
        want = np.arange(num_wanted, num_wanted + len(others))
        regions = [self.local, Regions(want, others.piece, others.offsets, others.extents)]
        turns = [np.full(num_wanted, self.num_turns), self.outgoing.turn_of_region]
        return Regions.join(regions), np.concatenate(turns)


def encode_request(regions: Regions, turn: IntArray) -> bytes:
    """The message to the rank that sends some regions, each in its turn."""
    return encode_columns(
        {
            "piece": regions.piece,
            "offsets": regions.offsets,
            "extents": regions.extents,
            "turn": turn,
        }
    )


def decode_request(data: bytes) -> tuple[Regions, IntArray]:
    """Regions and turns of what `encode_request` returned."""
    columns, _ = decode_columns(data, "request")
    piece = columns["piece"]
    regions = Regions(np.zeros_like(piece), piece, columns["offsets"], columns["extents"])
    return regions, columns["turn"]


def numbers_of_messages(index: Index, regions: Regions, message_bytes: int) -> IntArray:
    """Cut what goes from one memory to another into messages: the number of that of each region.

    A message ends with the region that makes it as long as `message_bytes` or longer.
    """
    sizes = regions.num_bytes(index)
    numbers: IntArray = (np.cumsum(sizes) - sizes) // message_bytes
    return numbers


def turns_of_distances(num_messages: IntArray) -> IntArray:
    """The first turn of each distance between sender and receiver, and the number of turns.

    `num_messages` says how many messages each rank (row) gets from each other rank (column).
    """
    ranks = np.arange(len(num_messages))
    turns = [num_messages[(ranks + by) % len(ranks), ranks].max() for by in ranks.tolist()]
    return np.append(0, np.cumsum(turns))
