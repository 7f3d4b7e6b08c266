"""Reading together: what several ranks need, one of them reads, and the others get it from there.

Data-parallel replicas need the same bytes, and ranks that load columns of what was saved as rows
need different parts of the same blocks. Left alone, each reads everything it touches. Together,
storage serves every block once.

1. Every rank says which windows of which files its plan touches. Windows that one rank touches are
   its own business. The others are dealt to the ranks that need them, in turn.
2. A rank that needs regions of a window which another one reads tells it which.
3. In rounds of a few windows, each rank reads what it was dealt, checks the digests, fills its own
   regions and packs those of the others; then all swap, and unpack. Exactly the bytes of the
   regions travel, and a round bounds the memory.

A rank that fails to read goes on to the last round, sending nothing but the news of its failure,
so nobody waits in vain. It raises at the end; those who lack its bytes fill nothing with them and
leave it to the caller to make the failure known to all (`remesh.exchange.run_on_all` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remesh.exchange import Exchange
from remesh.geometry import Box, IntArray, row_products
from remesh.index import Index, decode_columns, encode_columns
from remesh.memory import CarrierArray, HostMemory
from remesh.pipeline.read import Want, read_runs
from remesh.planner import LoadPlan, ReadLimits, plan_regions, windows_of
from remesh.storage import Buffer, Storage

MAX_SHARERS = 16
"""Ranks that share a read at most; larger crowds are divided, which bounds what a round packs."""

ROUND_WINDOWS = 4
"""Windows that a rank reads in a round."""

HEAD_BYTES = 16
"""Bytes before the regions of a message; the first says whether they are good."""

_OK, _FAILED = 1, 0


def read_together(
    exchange: Exchange,
    storage: Storage,
    index: Index,
    plan: LoadPlan,
    wants: Sequence[Want],
    *,
    limits: ReadLimits,
    on_run: Callable[[int], None],
    dealer: Dealer,
) -> bool:
    """Execute the load plans of all ranks, reading shared windows once. Collective.

    Args:
        exchange: The ranks that read together.
        storage: Where the checkpoint is.
        index: Its index.
        plan: What this rank needs.
        wants: Where each wanted box of the plan goes.
        limits: Those that the plan was made with.
        on_run: Called after each run that this rank reads, with its size in bytes.
        dealer: Deals the windows that ranks touch, usually `deal`.

    Returns:
        Whether this rank got everything. If not, some rank has raised.

    Raises:
        CorruptCheckpointError: As `read_runs`, on the rank that read it.
        ExchangeError: If a rank died.
    """
    windows = windows_of(index, plan.piece, plan.offsets, plan.extents, limits)
    touched = exchange.all_gather(np.unique(windows).astype("<i8").tobytes())
    dealt = dealer([np.frombuffer(data, dtype=np.int64) for data in touched])
    rows = dealt.rows_of(exchange.rank, windows)
    reader = np.where(rows < 0, -1, np.append(dealt.reader, -1)[rows])
    mine = [
        _Regions.of(index, plan, np.flatnonzero(reader == rank), limits)
        for rank in range(exchange.world_size)
    ]
    others = _swap_requests(exchange, index, mine, dealt, limits)
    sharing = _Sharing(exchange.rank, index, wants, dealt, mine, others, limits)
    problem: Exception | None = None
    is_served = True
    for number in range(dealt.num_rounds):
        outgoing, job, job_wants = sharing.prepare(number)
        try:
            if problem is None:
                read_runs(storage, index, job, job_wants, on_run)
        except Exception as error:  # noqa: BLE001 - raised when nobody waits any more
            problem = error
        for message in outgoing:
            message[:1] = _OK if problem is None else _FAILED
        incoming = sharing.incoming(number)
        exchange.swap(outgoing, incoming)
        try:
            is_served &= sharing.unpack(number, incoming)
        except Exception as error:  # noqa: BLE001 - as above
            problem = problem or error
    if problem is not None:
        raise problem
    alone = _Regions.of(index, plan, np.flatnonzero(reader < 0), limits)
    read_runs(storage, index, plan_regions(index, [alone.columns], limits), wants, on_run)
    return is_served


# ---------------------------------------------------------------------------------------------
# Who reads what
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """Who reads which window; the same on every rank.

    Attributes:
        windows: Numbers of the windows that several ranks touch, ascending; once for each group of
            ranks that share a read.
        reader: The rank that reads each.
        round: The round in which it does.
        sharers: (windows, ranks) whether each rank is among those that share it.
    """

    windows: IntArray
    reader: IntArray
    round: IntArray
    sharers: npt.NDArray[np.bool_]

    @property
    def num_rounds(self) -> int:
        """How many rounds there are."""
        return int(self.round.max()) + 1 if len(self.round) else 0

    def rows_of(self, rank: int, windows: IntArray) -> IntArray:
        """For each of a rank's windows its row here, or -1 if the rank shares it with nobody."""
        rows = np.full(len(windows), -1, dtype=np.int64)
        shared = np.flatnonzero(self.sharers[:, rank])
        if len(shared):
            place = np.searchsorted(self.windows[shared], windows)
            row = shared[np.minimum(place, len(shared) - 1)]
            found = self.windows[row] == windows
            rows[found] = row[found]
        return rows


Dealer = Callable[[Sequence[IntArray]], Deal]
"""Deals windows: given those that each rank touches, ascending, each once."""


def deal(touched: Sequence[IntArray]) -> Deal:
    """Deal the windows that several ranks touch to those ranks, in turn.

    Args:
        touched: The windows that each rank touches, ascending, each once.
    """
    rank, window, first, counts = _by_window(touched)
    # Ranks that touch one window are divided into the fewest groups, of nearly equal size.
    place = np.arange(len(window)) - np.repeat(first, counts)
    group = place * np.repeat(-(-counts // MAX_SHARERS), counts) // np.repeat(counts, counts)
    is_new = np.ones(len(window), dtype=np.bool_)
    is_new[1:] = (window[1:] != window[:-1]) | (group[1:] != group[:-1])
    start = np.flatnonzero(is_new)
    size = np.diff(np.append(start, len(window)))
    start, size = start[size > 1], size[size > 1]
    reader = rank[start + np.arange(len(start)) % size]
    return _dealt(window[start], reader, rank, start, size, len(touched))


def deal_to_owners(touched: Sequence[IntArray], owner_of: Callable[[IntArray], IntArray]) -> Deal:
    """Deal every window to the one rank that can read it.

    Args:
        touched: The windows that each rank touches, ascending, each once.
        owner_of: The rank that can read each window.
    """
    rank, window, first, counts = _by_window(touched)
    windows = window[first]
    return _dealt(windows, owner_of(windows), rank, first, counts, len(touched))


def _by_window(touched: Sequence[IntArray]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Pairs of rank and window, sorted by window; first pair and number of pairs of each."""
    rank = np.repeat(np.arange(len(touched)), [len(windows) for windows in touched])
    window = np.concatenate(touched)
    order = np.lexsort((rank, window))
    _, first, counts = np.unique(window[order], return_index=True, return_counts=True)
    return rank[order], window[order], first, counts


def _dealt(
    windows: IntArray,
    reader: IntArray,
    rank: IntArray,
    start: IntArray,
    size: IntArray,
    world_size: int,
) -> Deal:
    """The deal of windows; the ranks that share each are `size` items of `rank` from `start` on."""
    row = np.repeat(np.arange(len(windows)), size)
    within = np.arange(len(row)) - np.repeat(np.cumsum(size) - size, size)
    sharers = np.zeros((len(windows), world_size), dtype=np.bool_)
    sharers[row, rank[start[row] + within]] = True
    turn = np.zeros(len(windows), dtype=np.int64)
    for one in range(world_size):
        dealt = np.flatnonzero(reader == one)
        turn[dealt] = np.arange(len(dealt))
    return Deal(windows, reader, turn // ROUND_WINDOWS, sharers)


# ---------------------------------------------------------------------------------------------
# Regions, requests and messages
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Regions:
    """Regions that one rank reads for another or for itself.

    Attributes:
        want: Row of each in the wanted boxes of the rank that needs it; zeros on another one.
        piece: Row of its piece in the index.
        offsets: (rows, d) offsets in their tensors.
        extents: (rows, d) shapes.
        window: The window of each.
    """

    want: IntArray
    piece: IntArray
    offsets: IntArray
    extents: IntArray
    window: IntArray

    @property
    def columns(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """What `plan_regions` takes."""
        return self.want, self.piece, self.offsets, self.extents

    @classmethod
    def of(cls, index: Index, plan: LoadPlan, rows: IntArray, limits: ReadLimits) -> _Regions:
        """Some of the regions of a plan."""
        piece, offsets, extents = plan.piece[rows], plan.offsets[rows], plan.extents[rows]
        window = windows_of(index, piece, offsets, extents, limits)
        return cls(plan.want[rows], piece, offsets, extents, window)

    def encode(self) -> bytes:
        """The request to the rank that reads them."""
        return encode_columns(
            {"piece": self.piece, "offsets": self.offsets, "extents": self.extents}
        )

    @classmethod
    def decode(cls, data: bytes, index: Index, limits: ReadLimits) -> _Regions:
        """What another rank asks for."""
        columns, _ = decode_columns(data, "request")
        piece, offsets, extents = columns["piece"], columns["offsets"], columns["extents"]
        window = windows_of(index, piece, offsets, extents, limits)
        return cls(np.zeros_like(piece), piece, offsets, extents, window)

    def take(self, rows: IntArray) -> _Regions:
        """Some of them."""
        return _Regions(
            self.want[rows],
            self.piece[rows],
            self.offsets[rows],
            self.extents[rows],
            self.window[rows],
        )

    def message(self, index: Index) -> Buffer:
        """A message that has room for them after its head; empty if there are none."""
        if not len(self.piece):
            return np.zeros(0, np.uint8)
        itemsizes = index.boxes.tensors.itemsizes[index.boxes.tensor[self.piece]]
        return np.zeros(HEAD_BYTES + int((row_products(self.extents) * itemsizes).sum()), np.uint8)

    def views(self, index: Index, message: Buffer) -> Iterator[tuple[Box, CarrierArray]]:
        """The box of each region, and its place in a message."""
        position = HEAD_BYTES
        tensors = index.boxes.tensors
        for tensor, offset, extent in zip(
            index.boxes.tensor[self.piece].tolist(),
            self.offsets.tolist(),
            self.extents.tolist(),
            strict=True,
        ):
            ndim, dtype = int(tensors.ndims[tensor]), tensors.dtype(tensor)
            box = Box(tuple(offset[:ndim]), tuple(extent[:ndim]))
            region: CarrierArray = np.ndarray(
                box.shape, dtype.carrier, buffer=message.data, offset=position
            )
            position += box.size * dtype.itemsize
            yield box, region


def _swap_requests(
    exchange: Exchange, index: Index, mine: Sequence[_Regions], dealt: Deal, limits: ReadLimits
) -> list[_Regions | None]:
    """Tell each reader what this rank needs from it; what each rank asks of this one."""
    me = exchange.rank
    is_asked_by = dealt.sharers[dealt.reader == me].any(axis=0)
    is_asked_by[me] = False
    none = np.zeros(0, np.uint8)
    outgoing = [
        np.frombuffer(regions.encode(), dtype=np.uint8).copy()
        if rank != me and len(regions.piece)
        else none
        for rank, regions in enumerate(mine)
    ]
    sizes = [
        np.array([len(data)], dtype="<i8").view(np.uint8) if len(data) else none
        for data in outgoing
    ]
    arriving = [np.zeros(8 if asked else 0, np.uint8) for asked in is_asked_by.tolist()]
    exchange.swap(sizes, arriving)
    incoming = [
        np.zeros(int(size.view("<i8")[0]) if len(size) else 0, np.uint8) for size in arriving
    ]
    exchange.swap(outgoing, incoming)
    return [
        _Regions.decode(data.tobytes(), index, limits) if len(data) else None for data in incoming
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Sharing:
    """One rank's side of the rounds.

    Attributes:
        rank: This rank.
        index: What is stored.
        wants: Where this rank's wanted boxes go.
        dealt: Who reads what.
        mine: For each rank, the shared regions of this one that it reads, this one included.
        others: For each rank, what it asks this one to read.
        limits: Those that the regions were cut with.
    """

    rank: int
    index: Index
    wants: Sequence[Want]
    dealt: Deal
    mine: Sequence[_Regions]
    others: Sequence[_Regions | None]
    limits: ReadLimits

    def prepare(self, number: int) -> tuple[list[Buffer], LoadPlan, list[Want]]:
        """What this rank reads in a round, and the messages in which others' regions are packed."""
        wants = list(self.wants)
        tables = [self._in_round(self.rank, self.mine[self.rank], number).columns]
        outgoing = []
        for rank, asked in enumerate(self.others):
            if asked is None:
                outgoing.append(np.zeros(0, np.uint8))
                continue
            regions = self._in_round(rank, asked, number)
            message = regions.message(self.index)
            outgoing.append(message)
            want = np.arange(len(regions.piece)) + len(wants)
            tables.append((want, regions.piece, regions.offsets, regions.extents))
            wants += [
                Want(box.offset, HostMemory(region))
                for box, region in regions.views(self.index, message)
            ]
        return outgoing, plan_regions(self.index, tables, self.limits), wants

    def incoming(self, number: int) -> list[Buffer]:
        """Buffers for what this rank gets in a round."""
        return [
            np.zeros(0, np.uint8)
            if rank == self.rank
            else self._in_round(self.rank, regions, number).message(self.index)
            for rank, regions in enumerate(self.mine)
        ]

    def unpack(self, number: int, incoming: Sequence[Buffer]) -> bool:
        """Fill this rank's regions from what it got; False if a rank could not read its part."""
        is_served = True
        for rank, message in enumerate(incoming):
            if not len(message):
                continue
            if message[0] != _OK:
                is_served = False
                continue
            regions = self._in_round(self.rank, self.mine[rank], number)
            views = regions.views(self.index, message)
            for row, (box, region) in zip(regions.want.tolist(), views, strict=True):
                want = self.wants[row]
                want.memory.copy_in(box.shift(want.offset, -1), region)
        return is_served

    def _in_round(self, sharer: int, regions: _Regions, number: int) -> _Regions:
        """Those of a sharer's regions that are read in a round."""
        rows = self.dealt.rows_of(sharer, regions.window)
        assert (rows >= 0).all(), "a rank asks for a window that is not shared with it"
        return regions.take(np.flatnonzero(self.dealt.round[rows] == number))
