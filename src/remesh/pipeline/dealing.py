"""Who reads which window, when several ranks need it, and whether sharing is worth it. Pure.

Every rank says which windows of the files its plan touches, and how much it reads and needs of
each. From that rank 0 sees what the group would read if each rank read alone, what it reads if
every window is read once, and what must then travel between ranks. If the group shares, the
windows that several ranks touch are dealt to those ranks, in turn, and each rank is told its own
part of the deal; no rank but the first ever sees the windows of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from remesh.geometry import IntArray

MAX_SHARERS = 16
"""Ranks that share a read at most; larger crowds are divided, which bounds what a round packs."""

ROUND_WINDOWS = 8
"""Windows that a rank reads in a round at most: enough for a round to be worth its messages."""

LOCAL_EXCHANGE_COST = 1.25
"""What it costs to move a byte between ranks, in bytes read from a disk of this machine."""

REMOTE_EXCHANGE_COST = 0.25
"""The same for bytes that come over a network anyway: object stores, shared file systems."""

SHARING_BYTES = 16 << 20
"""What the messages that set up the rounds cost, whatever they carry, in bytes read."""


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """The windows that one rank's plan touches.

    Attributes:
        windows: Their numbers, ascending, each once.
        num_read: Bytes that the rank would read of each.
        num_needed: Bytes that it needs of each.
    """

    windows: IntArray
    num_read: IntArray
    num_needed: IntArray

    def encode(self) -> bytes:
        """As a message to rank 0."""
        return _encode(self.windows, self.num_read, self.num_needed)

    @classmethod
    def decode(cls, data: bytes) -> Touched:
        """Of what `encode` gave."""
        return cls(*_decode(data))


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of a deal.

    Attributes:
        windows: The windows that it shares with others, ascending.
        reader: The rank that reads each.
        round: The round in which it does.
        asked_by: Ranks that need something of what this one reads.
        num_rounds: Rounds of the whole group.
    """

    windows: IntArray
    reader: IntArray
    round: IntArray
    asked_by: IntArray
    num_rounds: int

    def rows_of(self, windows: IntArray) -> IntArray:
        """For each window its row here, or -1 if it is not shared."""
        if not len(self.windows):
            return np.full(len(windows), -1, dtype=np.int64)
        row = np.minimum(np.searchsorted(self.windows, windows), len(self.windows) - 1)
        return np.where(self.windows[row] == windows, row, -1)

    def encode(self) -> bytes:
        """As a message from rank 0."""
        rounds = np.array([self.num_rounds], dtype=np.int64)
        return _encode(self.windows, self.reader, self.round, self.asked_by, rounds)

    @classmethod
    def decode(cls, data: bytes) -> Share:
        """Of what `encode` gave."""
        windows, reader, number, asked_by, rounds = _decode(data)
        return cls(windows, reader, number, asked_by, int(rounds[0]))


def _encode(*columns: IntArray) -> bytes:
    return msgspec.msgpack.encode([column.astype("<i8").tobytes() for column in columns])


def _decode(data: bytes) -> list[IntArray]:
    columns = msgspec.msgpack.decode(data, type=list[bytes])
    return [np.frombuffer(column, dtype="<i8") for column in columns]


Dealer = Callable[[Sequence[Touched]], list[Share] | None]
"""Deals windows, given those that each rank touches; a share for each, or None not to share."""


def sharing_pays(read_alone: int, read_once: int, num_moved: int, *, exchange_cost: float) -> bool:
    """Whether it is cheaper to read every window once and pass on what others need of it.

    Args:
        read_alone: Bytes that the group reads if each rank reads for itself.
        read_once: Bytes that it reads if every window is read by one rank.
        num_moved: Bytes that then travel between ranks.
        exchange_cost: What moving a byte costs, in bytes read.
    """
    return read_alone - read_once > exchange_cost * num_moved + SHARING_BYTES


def deal_if_it_pays(touched: Sequence[Touched], *, exchange_cost: float) -> list[Share] | None:
    """Deal the windows that several ranks touch, if sharing them is cheaper than not to."""
    windows = np.concatenate([one.windows for one in touched])
    num_read = np.concatenate([one.num_read for one in touched])
    num_needed = np.concatenate([one.num_needed for one in touched])
    if not len(windows):
        return None
    order = np.argsort(windows, kind="stable")
    first = np.flatnonzero(np.diff(windows[order], prepend=-1))
    num_sharers = np.diff(np.append(first, len(order)))
    # The reader reads at least what the one reads that reads most.
    read_once = np.maximum.reduceat(num_read[order], first)
    needed = np.add.reduceat(num_needed[order], first)
    moved = needed - needed // num_sharers
    alone, once = int(num_read.sum()), int(read_once.sum())
    if not sharing_pays(alone, once, int(moved.sum()), exchange_cost=exchange_cost):
        return None
    return deal(touched)


def deal(touched: Sequence[Touched]) -> list[Share]:
    """Deal the windows that several ranks touch to those ranks, in turn."""
    rank, window, first, counts = _by_window(touched)
    # Ranks that touch one window are divided into the fewest groups, of nearly equal size.
    place = np.arange(len(window)) - np.repeat(first, counts)
    group = place * np.repeat(-(-counts // MAX_SHARERS), counts) // np.repeat(counts, counts)
    is_new = np.ones(len(window), dtype=np.bool_)
    is_new[1:] = (window[1:] != window[:-1]) | (group[1:] != group[:-1])
    start = np.flatnonzero(is_new)
    size = np.diff(np.append(start, len(window)))
    start, size = start[size > 1], size[size > 1]
    reader = rank[start + np.arange(len(start)) % np.maximum(size, 1)]
    return _shares(window, rank, start, size, reader, world_size=len(touched))


def deal_to_owners(
    touched: Sequence[Touched], owner_of: Callable[[IntArray], IntArray]
) -> list[Share]:
    """Deal every window to the one rank that can read it.

    Args:
        touched: The windows that each rank touches.
        owner_of: The rank that can read each window.
    """
    rank, window, first, counts = _by_window(touched)
    owner = owner_of(window[first])
    # An owner reads its window whether or not it needs something of it.
    row = np.append(np.repeat(np.arange(len(first)), counts), np.arange(len(first)))
    rank = np.append(rank, owner)
    row, rank = np.unique(np.stack([row, rank]), axis=1)
    start = np.searchsorted(row, np.arange(len(first)))
    size = np.diff(np.append(start, len(row)))
    return _shares(window[first][row], rank, start, size, owner, world_size=len(touched))


def _by_window(touched: Sequence[Touched]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Pairs of rank and window, sorted by window; first pair and number of pairs of each."""
    rank = np.repeat(np.arange(len(touched)), [len(one.windows) for one in touched])
    window = np.concatenate([one.windows for one in touched])
    order = np.argsort(window, kind="stable")
    _, first, counts = np.unique(window[order], return_index=True, return_counts=True)
    return rank[order], window[order], first, counts


def _shares(
    window: IntArray,
    rank: IntArray,
    start: IntArray,
    size: IntArray,
    reader: IntArray,
    *,
    world_size: int,
) -> list[Share]:
    """Everybody's share; the sharers of each window are `size` pairs from `start` on."""
    turn = _turns(reader)
    # What a rank gets in a round grows with the number of ranks that it gets it from.
    windows_a_round = max(1, min(ROUND_WINDOWS, 2 * MAX_SHARERS // int(size.max(initial=1))))
    number = turn // windows_a_round
    num_rounds = int(number.max(initial=-1)) + 1
    within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    pair = np.repeat(start, size) + within
    dealt = np.repeat(np.arange(len(start)), size)
    order = np.argsort(rank[pair], kind="stable")
    pair, dealt = pair[order], dealt[order]
    bounds = np.searchsorted(rank[pair], np.arange(world_size + 1))
    others = rank[pair] != reader[dealt]
    asked = np.unique(reader[dealt][others] * world_size + rank[pair][others])
    asked_bounds = np.searchsorted(asked, np.arange(world_size + 1) * world_size)
    shares = []
    for one in range(world_size):
        mine = slice(int(bounds[one]), int(bounds[one + 1]))
        asking = asked[asked_bounds[one] : asked_bounds[one + 1]] - one * world_size
        share = dealt[mine]
        shares.append(Share(window[pair[mine]], reader[share], number[share], asking, num_rounds))
    return shares


def _turns(reader: IntArray) -> IntArray:
    """How many earlier windows the reader of each was dealt."""
    order = np.argsort(reader, kind="stable")
    ranks = reader[order]
    first = np.searchsorted(ranks, ranks)
    turn = np.empty(len(reader), dtype=np.int64)
    turn[order] = np.arange(len(reader)) - first
    return turn
