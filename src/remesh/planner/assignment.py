"""Which rank reads which window of the files, where several ranks need it. Pure.

Every rank says which windows its plan touches, and how much it reads and needs of each
(`touched_windows`). From that rank 0 sees what the group would read if each rank read alone, what
it reads if every window is read once, and what must then travel between ranks. If the group shares
reads, the windows that several ranks touch are assigned to those ranks in turn, and each rank gets
its own part of the assignment; only rank 0 sees the windows of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from remesh.core.geometry import IntArray
from remesh.core.index import Index
from remesh.planner.loading import LoadPlan, ReadLimits

MAX_SHARERS = 16
"""Ranks that share a read at most; larger groups are divided, which bounds what a turn packs."""

TURN_BYTES = 16 << 20
"""Bytes of the windows that a rank reads in a turn, about: enough to be worth its messages."""

ARRIVING_BYTES = 64 << 20
"""Bytes of the windows that the sharers of a window read in a turn together, about: what a rank
gets in one grows with the ranks that it gets it of."""

LOCAL_EXCHANGE_COST = 1.25
"""What it costs to move a byte between ranks, in bytes read from a disk of this machine."""

REMOTE_EXCHANGE_COST = 0.25
"""The same for bytes that come over a network anyway: object stores, shared file systems."""

SHARING_BYTES = 16 << 20
"""What the messages that prepare a transfer cost, whatever it carries, in bytes read."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadAssignment:
    """One rank's part of the assignment of windows to readers."""

    windows: IntArray  # the windows that it shares with others, ascending
    reader: IntArray  # the rank that reads each
    turn: IntArray  # the turn in which that rank sends what others need of it
    asked_by: IntArray  # ranks that need something of what this one reads
    num_turns: int  # turns of the whole group

    def rows_of(self, windows: IntArray) -> IntArray:
        """For each window its row here, or -1 if it is not shared."""
        if not len(self.windows):
            return np.full(len(windows), -1, dtype=np.int64)
        row = np.minimum(np.searchsorted(self.windows, windows), len(self.windows) - 1)
        return np.where(self.windows[row] == windows, row, -1)

    def encode(self) -> bytes:
        """As a message from rank 0."""
        columns = (self.windows, self.reader, self.turn, self.asked_by)
        encoded = [column.astype("<i8").tobytes() for column in columns]
        return msgspec.msgpack.encode((encoded, self.num_turns))

    @classmethod
    def decode(cls, data: bytes) -> ReadAssignment:
        """The assignment of what `encode` returned."""
        encoded, num_turns = msgspec.msgpack.decode(data, type=tuple[list[bytes], int])
        windows, reader, turn, asked_by = (np.frombuffer(one, dtype="<i8") for one in encoded)
        return cls(windows, reader, turn, asked_by, num_turns)


Assign = Callable[[Sequence[IntArray], ReadLimits], list[ReadAssignment] | None]
"""Assigns windows to readers, given the `touched_windows` of each rank and how ranks read; None
not to share reads."""


def touched_windows(index: Index, plan: LoadPlan) -> IntArray:
    """The windows that a plan touches, a row each: its number, bytes read of it, bytes needed."""
    windows = plan.windows(index)
    first = np.flatnonzero(np.diff(windows, prepend=-1))  # the plan is sorted by window
    if not len(first):
        return np.zeros((0, 3), dtype=np.int64)
    num_read = np.add.reduceat(plan.run_stop - plan.run_start, first)
    needed = np.add.reduceat(plan.num_bytes(index), first)
    return np.stack([windows[first], num_read, needed], axis=1)


def assign_readers_if_cheaper(
    touched: Sequence[IntArray], limits: ReadLimits, *, exchange_cost: float
) -> list[ReadAssignment] | None:
    """Assign the windows that several ranks touch, if sharing them is cheaper than not to.

    `exchange_cost` is what moving a byte between ranks costs, in bytes read.
    """
    windows, num_read, num_needed = np.concatenate(touched).T
    if not len(windows):
        return None
    order = np.argsort(windows, kind="stable")
    first = np.flatnonzero(np.diff(windows[order], prepend=-1))
    num_sharers = np.diff(np.append(first, len(order)))
    # The reader reads at least what the one reads that reads most.
    read_once = np.maximum.reduceat(num_read[order], first)
    needed = np.add.reduceat(num_needed[order], first)
    moved = needed - needed // num_sharers
    num_spared = int(num_read.sum() - read_once.sum())
    is_cheaper = num_spared > exchange_cost * int(moved.sum()) + SHARING_BYTES
    return assign_readers(touched, limits) if is_cheaper else None


def assign_readers(touched: Sequence[IntArray], limits: ReadLimits) -> list[ReadAssignment]:
    """Assign the windows that several ranks touch to those ranks, in turn."""
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
    turn = _turns(reader, size, limits)
    return _assignments(window, rank, start, size, reader, turn, world_size=len(touched))


def assign_to_owners(
    touched: Sequence[IntArray], limits: ReadLimits, owner_of: Callable[[IntArray], IntArray]
) -> list[ReadAssignment]:
    """Assign every window to the one rank that can read it."""
    rank, window, first, counts = _by_window(touched)
    owner = owner_of(window[first])
    # An owner reads its window whether or not it needs something of it.
    row = np.append(np.repeat(np.arange(len(first)), counts), np.arange(len(first)))
    rank = np.append(rank, owner)
    row, rank = np.unique(np.stack([row, rank]), axis=1)
    start = np.searchsorted(row, np.arange(len(first)))
    size = np.diff(np.append(start, len(row)))
    turn = _turns(owner, size, limits)
    return _assignments(window[first][row], rank, start, size, owner, turn, world_size=len(touched))


def _by_window(touched: Sequence[IntArray]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Pairs of rank and window, sorted by window; first pair and number of pairs of each."""
    rank = np.repeat(np.arange(len(touched)), [len(rows) for rows in touched])
    window = np.concatenate(touched)[:, 0]
    order = np.argsort(window, kind="stable")
    _, first, counts = np.unique(window[order], return_index=True, return_counts=True)
    return rank[order], window[order], first, counts


def _turns(reader: IntArray, size: IntArray, limits: ReadLimits) -> IntArray:
    """The turn of each window, given its reader and how many share it."""
    num_bytes = min(TURN_BYTES, ARRIVING_BYTES // int(size.max(initial=1)))
    most = min(num_bytes // limits.window_bytes, limits.num_reads // 2)  # two are read at a time
    turn: IntArray = _num_earlier(reader) // max(1, most)
    return turn


def _assignments(
    window: IntArray,
    rank: IntArray,
    start: IntArray,
    size: IntArray,
    reader: IntArray,
    turn: IntArray,
    *,
    world_size: int,
) -> list[ReadAssignment]:
    """Each rank's part; the sharers of each window are `size` pairs from `start` on."""
    num_turns = int(turn.max(initial=-1)) + 1
    within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    pair = np.repeat(start, size) + within
    row = np.repeat(np.arange(len(start)), size)
    order = np.argsort(rank[pair], kind="stable")
    pair, row = pair[order], row[order]
    bounds = np.searchsorted(rank[pair], np.arange(world_size + 1))
    others = rank[pair] != reader[row]
    asked = np.unique(reader[row][others] * world_size + rank[pair][others])
    asked_bounds = np.searchsorted(asked, np.arange(world_size + 1) * world_size)
    assignments = []
    for one in range(world_size):
        mine = slice(int(bounds[one]), int(bounds[one + 1]))
        asking = asked[asked_bounds[one] : asked_bounds[one + 1]] - one * world_size
        rows = row[mine]
        assignments.append(
            ReadAssignment(window[pair[mine]], reader[rows], turn[rows], asking, num_turns)
        )
    return assignments


def _num_earlier(reader: IntArray) -> IntArray:
    """How many earlier windows the reader of each was assigned."""
    order = np.argsort(reader, kind="stable")
    ranks = reader[order]
    first = np.searchsorted(ranks, ranks)
    earlier = np.empty(len(reader), dtype=np.int64)
    earlier[order] = np.arange(len(reader)) - first
    return earlier
