"""Reading together: what several ranks need, one of them reads, and the others get it from there.

Data-parallel replicas need the same bytes, and ranks that load columns of what was saved as rows
need different parts of the same blocks. Left alone, each reads everything it touches. Together,
storage serves every block once.

1. Every rank says which windows of which files its plan touches. Rank 0 decides whether sharing is
   worth it, and deals the windows that several ranks touch (`remesh.pipeline.dealing`).
2. A rank that needs regions of a window which another one reads tells it which.
3. Reading threads take the windows that this rank was dealt, one after the other: they check the
   digests, fill the rank's own regions, and pack those of the others into messages. Meanwhile the
   main thread goes through rounds of a few windows: all swap the messages of a round, and unpack.
   Reading is ahead by `ROUNDS_AHEAD` rounds at most, so disk and network are busy at the same time
   and the buffers, which are used again and again, bound the memory.
4. The threads end with the windows that nobody else needs.

Ranks that ask for the same regions, as replicas do, are sent the same message, packed once.

A rank that fails to read goes on to the last round, sending nothing but the news of its failure,
so nobody waits in vain. It raises at the end; those who lack its bytes fill nothing with them and
leave it to the caller to make the failure known to all (`remesh.exchange.run_on_all` does).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.exchange import Exchange, run_joined
from remesh.geometry import Box, IntArray, row_products
from remesh.index import Index, decode_columns, encode_columns
from remesh.memory import CarrierArray, HostMemory
from remesh.pipeline.dealing import Dealer, Share, Touched
from remesh.pipeline.read import (
    NUM_REMOTE_THREADS,
    Want,
    Writing,
    longest_run,
    read_run,
    read_runs,
)
from remesh.pipeline.watch import Patience, Reading
from remesh.pipeline.workers import run_workers
from remesh.planner import LoadPlan, ReadLimits, plan_regions, windows_of
from remesh.storage import Buffer, Storage, aligned_buffer, is_remote

NUM_READERS = 4
"""Threads that read from this machine: fewer than one who reads alone has, for these pack messages
as well."""

ROUNDS_AHEAD = 2
"""Rounds whose messages are being packed or sent."""

HEAD_BYTES = 16
"""Bytes before the regions of a message; the first says whether they are good."""

_ALIGNMENT = 16
"""Each region of a message begins at a multiple of this, for copying is faster then."""

_OK, _FAILED = 1, 0
_LOGGER = logging.getLogger("remesh")


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
    patience: Patience,
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
        dealer: Deals the windows that ranks touch; called on rank 0.
        patience: How long that may take.

    Returns:
        Whether reads were shared. If a rank could not read its part, it has raised.

    Raises:
        CorruptCheckpointError: As `read_runs`, on the rank that read it.
        ExchangeError: If a rank died, or did not finish in time.
    """
    windows = windows_of(index, plan.piece, plan.offsets, plan.extents, limits)

    def join(told: list[bytes]) -> list[bytes]:
        shares = dealer([Touched.decode(one) for one in told])
        return [b""] * len(told) if shares is None else [share.encode() for share in shares]

    reply = run_joined(exchange, lambda: _touched(index, plan, windows).encode(), join)
    if not reply:
        read_watched(exchange, storage, index, plan, wants, on_run=on_run, patience=patience)
        return False
    share = Share.decode(reply)
    rows = share.rows_of(windows)
    reader = np.where(rows < 0, -1, np.append(share.reader, -1)[rows])
    mine = _by_reader(index, plan, reader, share, limits)
    asked = _swap_requests(exchange, index, mine, share, limits)
    here = np.flatnonzero((reader < 0) | (reader == exchange.rank))
    own = _Regions.of(index, plan, here, limits)
    mine.pop(exchange.rank, None)
    rounds = _Rounds(exchange, storage, index, wants, share, mine, asked, own, limits)
    rounds.run(on_run, patience)
    return True


def read_watched(
    exchange: Exchange,
    storage: Storage,
    index: Index,
    plan: LoadPlan,
    wants: Sequence[Want],
    *,
    on_run: Callable[[int], None],
    patience: Patience,
) -> None:
    """Execute this rank's load plan, and wait for the other ranks to do so. Collective.

    Args and errors are those of `read_together`.
    """
    reading = Reading(
        lambda count: read_runs(storage, index, plan, wants, count, reading.gate),
        on_run,
        num_bytes=plan.bytes_read,
        patience=patience,
    )
    try:
        reading.start()
        reading.wait_for_all(exchange)
    finally:
        reading.give_up()
    if reading.error is not None:
        raise reading.error


def _touched(index: Index, plan: LoadPlan, windows: IntArray) -> Touched:
    """The windows that a plan touches; the plan is sorted by them."""
    first = np.flatnonzero(np.diff(windows, prepend=-1))
    if not len(first):
        return Touched(first, first, first)
    itemsizes = index.boxes.tensors.itemsizes[index.boxes.tensor[plan.piece]]
    needed = np.add.reduceat(row_products(plan.extents) * itemsizes, first)
    of_run = np.searchsorted(windows[first], windows[plan.run_first[:-1]])
    num_read = np.zeros(len(first), dtype=np.int64)
    np.add.at(num_read, of_run, plan.run_stop - plan.run_start)
    return Touched(windows[first], num_read, needed)


# ---------------------------------------------------------------------------------------------
# Regions, requests and messages
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Regions:
    """Regions that one rank reads for another or for itself, sorted by round where shared.

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


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """The messages that carry some regions from their reader to whoever needs them.

    Both sides make this of the same regions, so they agree about every byte.

    Attributes:
        regions: The regions, sorted by round.
        first: First region of each round, and their number.
        position: Byte of each region in the message of its round.
        num_bytes: Length of the message of each round; 0 if there is none.
    """

    regions: _Regions
    first: IntArray
    position: IntArray
    num_bytes: IntArray

    @classmethod
    def of(cls, index: Index, regions: _Regions, share: Share) -> _Messages:
        """The messages of shared regions."""
        row = share.rows_of(regions.window)
        assert (row >= 0).all(), "a rank asks for a window that is not shared with it"
        number = share.round[row]
        order = np.argsort(number, kind="stable")
        number = number[order]
        sorted_ = _Regions(
            regions.want[order],
            regions.piece[order],
            regions.offsets[order],
            regions.extents[order],
            regions.window[order],
        )
        itemsizes = index.boxes.tensors.itemsizes[index.boxes.tensor[sorted_.piece]]
        sizes = row_products(sorted_.extents) * itemsizes
        sizes += -sizes % _ALIGNMENT
        ends = np.append(0, np.cumsum(sizes))
        first = np.searchsorted(number, np.arange(share.num_rounds + 1))
        position = HEAD_BYTES + ends[:-1] - ends[first[number]]
        totals = ends[first[1:]] - ends[first[:-1]]
        return cls(sorted_, first, position, np.where(totals > 0, totals + HEAD_BYTES, 0))

    @property
    def longest(self) -> int:
        """Bytes of the longest message."""
        return int(self.num_bytes.max(initial=0))

    def views(
        self, index: Index, number: int, message: Buffer
    ) -> Iterator[tuple[int, Box, CarrierArray]]:
        """Wanted box, box and elements of each region in the message of a round."""
        rows = slice(int(self.first[number]), int(self.first[number + 1]))
        regions, tensors = self.regions, index.boxes.tensors
        for want, tensor, offset, extent, position in zip(
            regions.want[rows].tolist(),
            index.boxes.tensor[regions.piece[rows]].tolist(),
            regions.offsets[rows].tolist(),
            regions.extents[rows].tolist(),
            self.position[rows].tolist(),
            strict=True,
        ):
            ndim = int(tensors.ndims[tensor])
            box = Box(tuple(offset[:ndim]), tuple(extent[:ndim]))
            carrier = tensors.dtype(tensor).carrier
            yield want, box, np.ndarray(box.shape, carrier, message.data, position)


def _by_reader(
    index: Index, plan: LoadPlan, reader: IntArray, share: Share, limits: ReadLimits
) -> dict[int, _Messages]:
    """What this rank needs of shared windows, by the rank that reads them."""
    order = np.argsort(reader, kind="stable")
    ranks, first = np.unique(reader[order], return_index=True)
    rows = np.split(order, first)[1:]
    return {
        rank: _Messages.of(index, _Regions.of(index, plan, of_rank, limits), share)
        for rank, of_rank in zip(ranks.tolist(), rows, strict=True)
        if rank >= 0
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What other ranks ask of this one; ranks that ask for the same share an item.

    Attributes:
        messages: The distinct requests.
        number: The request of each rank that asks.
    """

    messages: list[_Messages]
    number: dict[int, int]


def _swap_requests(
    exchange: Exchange,
    index: Index,
    mine: dict[int, _Messages],
    share: Share,
    limits: ReadLimits,
) -> _Asked:
    """Tell each reader what this rank needs from it; what each rank asks of this one."""
    me, none = exchange.rank, np.zeros(0, np.uint8)
    outgoing = [none] * exchange.world_size
    for rank, messages in mine.items():
        if rank != me:
            outgoing[rank] = np.frombuffer(messages.regions.encode(), dtype=np.uint8).copy()
    sizes = [
        np.array([len(data)], dtype="<i8").view(np.uint8) if len(data) else none
        for data in outgoing
    ]
    arriving = [none] * exchange.world_size
    for rank in share.asked_by.tolist():
        arriving[rank] = np.zeros(8, np.uint8)
    exchange.swap(sizes, arriving)
    incoming = [
        np.zeros(int(size.view("<i8")[0]) if len(size) else 0, np.uint8) for size in arriving
    ]
    exchange.swap(outgoing, incoming)
    numbers: dict[bytes, int] = {}
    asked = _Asked([], {})
    for rank in share.asked_by.tolist():
        request = incoming[rank].tobytes()
        number = numbers.setdefault(request, len(numbers))
        asked.number[rank] = number
        if number == len(asked.messages):
            regions = _Regions.decode(request, index, limits)
            asked.messages.append(_Messages.of(index, regions, share))
    return asked


# ---------------------------------------------------------------------------------------------
# The rounds
# ---------------------------------------------------------------------------------------------


class _Gate:
    """Keeps reading threads and rounds in step.

    A thread may pack for a round when the one `ROUNDS_AHEAD` before it was sent; a round is sent
    when all that it carries is packed.
    """

    def __init__(self, num_runs: IntArray) -> None:
        self._left = num_runs.tolist()
        self._num_sent = 0
        self._failed = False
        self._changed = threading.Condition()

    def enter(self, number: int) -> bool:
        """Wait until there is room for a round; False if nobody needs it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or number < self._num_sent + ROUNDS_AHEAD)
            return not self._failed

    def leave(self, number: int) -> None:
        """A run of a round is packed."""
        with self._changed:
            self._left[number] -= 1
            self._changed.notify_all()

    def fail(self) -> None:
        """Nobody is to wait any more."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait(self, number: int, seconds: float) -> bool:
        """Wait until a round is packed or has failed; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failed or not self._left[number], seconds)

    def send(self) -> bool:
        """Whether the round that is about to be sent is good."""
        with self._changed:
            return not self._failed

    def sent(self) -> None:
        """The buffers of a round are free."""
        with self._changed:
            self._num_sent += 1
            self._changed.notify_all()


@dataclass(slots=True, eq=False)
class _Rounds:
    """One rank's side of the rounds.

    Attributes:
        exchange: The ranks that read together.
        storage: Where the checkpoint is.
        index: What is stored.
        wants: Where this rank's wanted boxes go.
        share: Its part of the deal.
        mine: What it needs of others, by reader.
        asked: What others ask of it.
        own: The regions that it reads for itself, shared windows included.
        limits: Those that the regions were cut with.
    """

    exchange: Exchange
    storage: Storage
    index: Index
    wants: Sequence[Want]
    share: Share
    mine: dict[int, _Messages]
    asked: _Asked
    own: _Regions
    limits: ReadLimits
    _plan: LoadPlan = field(init=False)
    _first_foreign: list[int] = field(init=False)
    _order: IntArray = field(init=False)
    _round: IntArray = field(init=False)
    _slots: list[list[Buffer]] = field(init=False)
    _arriving: dict[int, Buffer] = field(init=False)

    def __post_init__(self) -> None:
        own, messages = self.own, self.asked.messages
        tables = [(own.want, own.piece, own.offsets, own.extents)]
        self._first_foreign = [len(self.wants)]
        for one in messages:
            begin = self._first_foreign[-1]
            want = np.arange(begin, begin + len(one.regions.piece))
            tables.append((want, one.regions.piece, one.regions.offsets, one.regions.extents))
            self._first_foreign.append(begin + len(want))
        self._plan = plan_regions(self.index, tables, self.limits)
        self._order, self._round = self._order_of_runs()
        self._slots = [
            [aligned_buffer(one.longest) for one in messages] for _ in range(ROUNDS_AHEAD)
        ]
        self._arriving = {rank: aligned_buffer(one.longest) for rank, one in self.mine.items()}

    def _order_of_runs(self) -> tuple[IntArray, IntArray]:
        """The runs by round, and the round of each; those for nobody else come last."""
        plan, share = self._plan, self.share
        rows = plan.run_first[:-1]
        first = _Regions.of(self.index, plan, rows, self.limits)
        row = share.rows_of(first.window)
        number = np.where(row < 0, share.num_rounds, np.append(share.round, 0)[row])
        order = np.argsort(number, kind="stable")
        return order, number[order]

    def run(self, on_run: Callable[[int], None], patience: Patience) -> None:
        """Read and swap everything."""
        num_runs = np.bincount(self._round, minlength=self.share.num_rounds + 1)
        gate = _Gate(num_runs)
        num_threads = NUM_REMOTE_THREADS if is_remote(self.storage) else NUM_READERS

        def read(count: Callable[[int], None]) -> None:
            def work(task: int, buffer: Buffer) -> None:
                self._read_run(task, buffer, gate, count, reading.gate)

            try:
                run_workers(num_threads, len(self._order), longest_run(self._plan), work)
            except BaseException:
                gate.fail()
                raise

        reading = Reading(read, on_run, num_bytes=self._plan.bytes_read, patience=patience)
        problem: Exception | None = None
        try:
            reading.start()
            for number in range(self.share.num_rounds):
                if problem is None:
                    problem = self._wait(gate, number, reading)
                incoming = self._swap(number, is_good=gate.send())
                gate.sent()
                try:
                    self._unpack(number, incoming)
                except Exception as error:  # noqa: BLE001 - raised when nobody waits any more
                    problem = problem or error
            reading.wait_for_all(self.exchange)
        finally:
            gate.fail()
            reading.give_up()
        if reading.error is not None:
            raise reading.error
        if problem is not None:
            raise problem

    def _wait(self, gate: _Gate, number: int, reading: Reading) -> Exception | None:
        """Wait until this rank has read its part of a round; what to raise if that is too late."""
        rank = self.exchange.rank
        while not gate.wait(number, reading.next_wait()):
            if reading.is_late:
                gate.fail()
                return reading.too_late(f"rank {rank}")
            _LOGGER.warning(
                "reading for %.0f s; the others wait for rank %d, which reads for round %d of %d",
                reading.seconds,
                rank,
                number + 1,
                self.share.num_rounds,
            )
        return None

    def _read_run(
        self,
        task: int,
        buffer: Buffer,
        gate: _Gate,
        count: Callable[[int], None],
        writing: Writing,
    ) -> None:
        """Read a run; fill what is this rank's, and pack what is not."""
        run, number = int(self._order[task]), int(self._round[task])
        is_shared = number < self.share.num_rounds
        if is_shared and not gate.enter(number):
            return

        def place(row: int) -> Want:
            if row < len(self.wants):
                return self.wants[row]
            request = int(np.searchsorted(self._first_foreign, row, side="right")) - 1
            return self._place_in_message(request, row - self._first_foreign[request], number)

        found = (self.storage, self.index, self._plan, run)
        count(read_run(*found, place=place, buffer=buffer, writing=writing))
        if is_shared:
            gate.leave(number)

    def _place_in_message(self, request: int, row: int, number: int) -> Want:
        """Where a region of a request lies in the message that is being packed."""
        messages = self.asked.messages[request]
        regions, tensors = messages.regions, self.index.boxes.tensors
        tensor = int(self.index.boxes.tensor[regions.piece[row]])
        ndim = int(tensors.ndims[tensor])
        message = self._slots[number % ROUNDS_AHEAD][request]
        region: CarrierArray = np.ndarray(
            tuple(regions.extents[row, :ndim].tolist()),
            tensors.dtype(tensor).carrier,
            message.data,
            int(messages.position[row]),
        )
        return Want(tuple(regions.offsets[row, :ndim].tolist()), HostMemory(region))

    def _swap(self, number: int, *, is_good: bool) -> dict[int, Buffer]:
        """Swap the messages of a round; what came, by rank."""
        none = np.zeros(0, np.uint8)
        outgoing = [none] * self.exchange.world_size
        incoming = [none] * self.exchange.world_size
        for rank, request in self.asked.number.items():
            size = int(self.asked.messages[request].num_bytes[number])
            outgoing[rank] = self._slots[number % ROUNDS_AHEAD][request][:size]
            outgoing[rank][:1] = _OK if is_good else _FAILED
        for rank, messages in self.mine.items():
            incoming[rank] = self._arriving[rank][: int(messages.num_bytes[number])]
        self.exchange.swap(outgoing, incoming)
        return {rank: incoming[rank] for rank in self.mine if len(incoming[rank])}

    def _unpack(self, number: int, incoming: dict[int, Buffer]) -> None:
        """Fill this rank's regions from what came, as far as it is good."""
        for rank, message in incoming.items():
            if message[0] == _OK:
                for row, box, region in self.mine[rank].views(self.index, number, message):
                    want = self.wants[row]
                    want.memory.copy_in(box.shift(want.offset, -1), region)
