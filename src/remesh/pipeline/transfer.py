"""The engine that moves boxes between ranks: takes them from sources, sends, gets, and fills.

A frozen `TransferPlan` says what moves. What its sources are, windows of files or live memory, is
in the `Tasks` alone (`from_files`, `from_memory`): each task takes some regions, and puts those for
this rank into its memory and those for others into messages.

Threads perform the tasks in the order of the turns. Meanwhile the caller's thread goes through the
turns: it waits until the messages of a turn are packed, swaps them with the other ranks, and lets
another thread unpack what came. Packing is ahead by a few turns at most, so sources and network are
busy at the same time, and the buffers, which are used again and again, bound the memory. While all
open turns are packed, the threads perform the tasks that are for this rank only. Where a source is
far away, they take what later turns need instead, and hold it until it can be packed: so the
requests that are under way do not depend on the size of the turns.

Ranks that ask for the same regions in the same turns, as replicas do, are sent the same message,
packed once.

On one machine, messages are packed into memory that the receiver has mapped as well: what is sent
is where they are, and what is sent back is that they are unpacked. The memory is an unnamed file,
so nothing is left behind however the processes end, and what a process has mapped stays readable
when the other one is dead. Another process opens the file by way of `/proc`, once, and reads it
only. Whether it may, and whether it is on the same machine at all, depends on users, containers and
namespaces. Nothing is concluded from any of these: the file begins with a random token, and a
process that does not find it there gets messages through the network.

After some turns all ranks meet, so that one that has none of the messages of many turns is not left
waiting for the others in a call that has a time limit.

A rank that fails continues to the last turn and marks its messages as bad, so that no rank waits
for it. It raises at the end; those that lack its bytes fill nothing with them and leave it to the
caller to make the failure known to all (`remesh.exchange.run_on_all` does).

If the group sends memory of the devices on which the tensors lie, messages are packed on the
device, sent from there by the group's backend (NCCL, which goes over NVLink within a machine), and
unpacked on the device: the host queues this and moves no tensor data, but for tensors that lie in
its own memory. It does so in the caller's thread, so all copies come after what the caller has
queued itself, on the stream that is current for it. While messages of one turn are under way, those
of the next are packed, and those of the turn before are unpacked; what a rank has itself is copied
beside the first.
"""

from __future__ import annotations

import functools
import mmap
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from remesh.core.dtypes import DTYPES, CarrierDType
from remesh.core.geometry import Box, IntArray
from remesh.core.index import Index
from remesh.core.memory import Device, HostMemory, Memory, MessageBuffer, copy_directly
from remesh.exchange import Exchange, Outcome, run_each, share_outcomes
from remesh.pipeline.read import Destination, Place
from remesh.pipeline.task_pool import TaskPool, Tasks
from remesh.planner import Regions, TransferPlan
from remesh.planner.transfer import Messages, decode_request, encode_request
from remesh.storage import Buffer, aligned_buffer, map_memory, touch

_TOKEN_BYTES = 16


class Offer(msgspec.Struct, frozen=True):
    """Where other processes find a file in memory."""

    machine: str = ""
    """Names the kernel and the namespace in which `process` is a number; empty if there is no file.
    """
    process: int = 0  # the process that has it open
    descriptor: int = 0  # its descriptor there
    num_bytes: int = 0  # its size
    token: bytes = b""  # what it begins with


class SharedBuffers:
    """Some buffers of one size that other processes may map.

    Attributes:
        buffers: The memory.
        offer: Where others find it, until `close`.

    Raises:
        MemoryError: If the system refuses the memory.
    """

    def __init__(self, num_buffers: int, num_bytes: int) -> None:
        self.offer = Offer()
        size = mmap.PAGESIZE + num_buffers * num_bytes
        self._file = _memory_file(size)
        memory = map_memory(size, self._file)
        touch(memory)
        self.buffers = _cut(memory, num_buffers, num_bytes)
        if self._file is not None:
            token = secrets.token_bytes(_TOKEN_BYTES)
            memory[:_TOKEN_BYTES] = np.frombuffer(token, np.uint8)
            self.offer = Offer(machine(), os.getpid(), self._file, size, token)

    def close(self) -> None:
        """Let no further process map the buffers; those that have keep them."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def map_buffers(offer: Offer, num_buffers: int, num_bytes: int) -> list[Buffer] | None:
    """The buffers of another process, to read only; None if they are out of reach."""
    if not offer.machine or offer.machine != machine():
        return None
    if offer.num_bytes != mmap.PAGESIZE + num_buffers * num_bytes:
        return None
    try:
        # What this opens may be anything, if it is not what was offered: it must not block.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", flags)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != offer.num_bytes:
            return None
        mapped = mmap.mmap(file, offer.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError:
        return None
    finally:
        os.close(file)
    memory = np.frombuffer(mapped, np.uint8)
    if memory[:_TOKEN_BYTES].tobytes() != offer.token:
        return None
    return _cut(memory, num_buffers, num_bytes)


def _cut(memory: Buffer, num_buffers: int, num_bytes: int) -> list[Buffer]:
    starts = (mmap.PAGESIZE + number * num_bytes for number in range(num_buffers))
    return [memory[start : start + num_bytes] for start in starts]


def _memory_file(num_bytes: int) -> int | None:
    """A new file in memory; None if the system has none, or no room for it."""
    if not machine():
        return None
    try:
        file = os.memfd_create("remesh-messages", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        return None
    return file


@functools.cache
def machine() -> str:
    """A name of the running kernel and of this process's namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


_BAD, _GOOD = 0, 1
"""What a message begins with."""

NUM_PACKED = 2
"""Turns whose messages are packed while others are on their way or not yet unpacked. With one, the
sources rest whenever a rank waits for another."""

_NOWHERE = -1


class Carried(NamedTuple):
    """A region of a message."""

    want: int  # `Regions.want`
    box: Box
    carrier: CarrierDType
    position: int  # `Messages.position`
    turn: int


def carried_by(index: Index, messages: Messages) -> list[Carried]:
    """The regions of some messages, taken out of their columns."""
    regions = messages.regions
    dtypes = index.tensors.dtypes[index.tensor_of(regions.piece)].tolist()
    carriers = [DTYPES[code].carrier for code in dtypes]
    columns = (messages.position.tolist(), messages.turn_of_region.tolist())
    return list(map(Carried, regions.want.tolist(), regions.boxes(index), carriers, *columns))


@dataclass(frozen=True, slots=True, eq=False)
class HostBuffer:
    """Bytes in memory of the host."""

    array: Buffer

    def __len__(self) -> int:
        return len(self.array)

    def part(self, start: int, stop: int) -> Buffer:
        return self.array[start:stop]

    def memory(self, position: int, shape: tuple[int, ...], carrier: CarrierDType) -> Memory:
        return HostMemory(np.ndarray(shape, carrier, self.array.data, position))


@dataclass(frozen=True, slots=True, eq=False)
class MessageBuffers:
    """Memory for the messages of a plan, and what lies where in it."""

    outgoing: list[Carried]  # what the messages to others carry
    incoming: list[Carried]  # what those that others send carry
    leaving: Sequence[MessageBuffer]
    """For the messages to others, turn by turn; on the host `NUM_PACKED` more than `arriving`."""
    arriving: Sequence[MessageBuffer]  # for those that others send
    readers: Container[int] = frozenset()
    """The ranks that see `leaving`, and are sent nothing but where a message is there."""
    seen: Mapping[int, Sequence[MessageBuffer]] = field(default_factory=dict)
    """The `leaving` of other ranks that this rank sees."""
    device: Device | None = None  # where the memory is; None on the host

    def place_in(self, destinations: Sequence[Destination]) -> Place:
        """Where what is taken goes: into this rank's memory or into messages."""
        leaving, outgoing = self.leaving, self.outgoing

        def place(want: int) -> Destination:
            if want < len(destinations):
                return destinations[want]
            _, box, carrier, position, turn = outgoing[want - len(destinations)]
            memory = leaving[turn % len(leaving)].memory(position, box.shape, carrier)
            return Destination(box.offset, memory)

        return place

    def unpack(
        self,
        rows: slice,
        buffer: MessageBuffer,
        ahead: int,
        destinations: Sequence[Destination],
    ) -> None:
        """Fill this rank's memory from the rows of a message, so many bytes ahead in a buffer."""
        for want, box, carrier, position, _ in self.incoming[rows]:
            values, target = buffer.memory(ahead + position, box.shape, carrier), destinations[want]
            into = box.shift(target.offset, -1)
            copy_directly(values, Box.whole(box.shape), target.memory, into)


def request_regions(
    exchange: Exchange,
    index: Index,
    wanted: Mapping[int, tuple[Regions, IntArray]],
    asked_by: Iterable[int],
) -> tuple[Messages, Messages]:
    """Ask other ranks for regions: the messages that this rank sends and gets. Collective.

    `wanted` has for each other rank what this one needs of it, and in which turns it is sent.
    """
    outgoing: list[list[Buffer]] = [[] for _ in range(exchange.world_size)]
    arriving: list[list[Buffer]] = [[] for _ in range(exchange.world_size)]
    for rank, (regions, turn) in wanted.items():
        outgoing[rank].append(np.frombuffer(bytearray(encode_request(regions, turn)), np.uint8))
    for rank in asked_by:
        arriving[rank].append(np.zeros(8, np.uint8))
    sizes = [[np.array([len(one)], "<i8").view(np.uint8) for one in some] for some in outgoing]
    exchange.swap(sizes, arriving)
    incoming = [[np.zeros(int(one.view("<i8")[0]), np.uint8) for one in some] for some in arriving]
    exchange.swap(outgoing, incoming)
    askers: dict[bytes, list[int]] = {}
    for rank, requests in enumerate(incoming):
        for request in requests:
            askers.setdefault(request.tobytes(), []).append(rank)
    asked = [(tuple(ranks), *decode_request(request)) for request, ranks in askers.items()]
    return (
        Messages.of(index, asked),
        Messages.of(index, [((rank,), *of_rank) for rank, of_rank in wanted.items()]),
    )


def message_buffers(exchange: Exchange, index: Index, plan: TransferPlan) -> MessageBuffers:
    """Memory for the messages of a plan; ranks of this machine see what they get. Collective.

    In a turn each rank sends one message at most to each other rank.
    """
    carried = carried_by(index, plan.outgoing), carried_by(index, plan.incoming)
    if not plan.num_turns:
        return MessageBuffers(*carried, (), ())
    num_leaving = plan.num_arriving + NUM_PACKED
    shared: SharedBuffers | None = None
    seen: dict[int, Sequence[MessageBuffer]] = {}
    try:
        with Outcome() as offered:
            shared = SharedBuffers(num_leaving, plan.outgoing.buffer_bytes())
            offered.reply = msgspec.msgpack.encode((shared.offer, plan.outgoing.buffer_bytes()))
        offers = share_outcomes(exchange, offered)
        with Outcome() as looked:
            for rank in sorted({rank for peers in plan.incoming.peers for rank in peers}):
                offer, num_bytes = msgspec.msgpack.decode(offers[rank], type=tuple[Offer, int])
                found = map_buffers(offer, num_leaving, num_bytes)
                if found is not None:
                    seen[rank] = list(map(HostBuffer, found))
            looked.reply = msgspec.msgpack.encode(list(seen))
        replies = share_outcomes(exchange, looked)
    finally:
        if shared is not None:
            shared.close()
    assert shared is not None
    by_rank = [msgspec.msgpack.decode(reply, type=list[int]) for reply in replies]
    arriving = plan.incoming.buffer_bytes(but_from=seen)
    return MessageBuffers(
        *carried,
        list(map(HostBuffer, shared.buffers)),
        [HostBuffer(aligned_buffer(arriving)) for _ in range(plan.num_arriving)],
        frozenset(rank for rank, saw in enumerate(by_rank) if exchange.rank in saw),
        seen,
    )


def execute(
    exchange: Exchange,
    plan: TransferPlan,
    tasks: Tasks,
    destinations: Sequence[Destination],
    *,
    on_read: Callable[[int], None],
    buffers: MessageBuffers,
    timeout: float | None = None,
) -> None:
    """Execute the transfer plans of all ranks. Collective.

    `on_read` is called after each task, in the thread that performed it, with what that read.
    `timeout` is in seconds.

    Raises:
        Exception: What a task of this rank raised.
        ExchangeError: If a rank died, or did not finish in time.
    """
    turns = _Turns(exchange, plan, buffers)
    num_packed = len(buffers.leaving)
    pool = TaskPool(exchange, tasks, plan.num_turns, num_packed, on_read=on_read, timeout=timeout)

    def unpack(arrived: Iterable[tuple[int, MessageBuffer, int]]) -> None:
        for number, buffer, start in arrived:
            if buffer.part(start, start + 1) == _GOOD:
                ahead = start - plan.incoming.span(number)[0]
                with pool.writing():
                    buffers.unpack(plan.incoming.rows(number), buffer, ahead, destinations)

    problems: list[BaseException | None] = []
    with ThreadPoolExecutor(1, "remesh-unpack") as unpacking:
        try:
            pool.start(buffers.place_in(destinations))
            unpacked: deque[Future[None]] = deque()
            for turn in range(plan.num_turns):
                problems.append(pool.wait(turn))
                if len(unpacked) == plan.num_arriving:
                    problems.append(unpacked.popleft().exception())
                turns.swap(turn, are_good=not pool.has_failed)
                pool.free(turns.num_free(turn))
                unpacked.append(unpacking.submit(unpack, turns.arrived(turn)))
                pool.meet_after(turn)
            problems += [future.exception() for future in unpacked]
            pool.wait_for_all()
        finally:
            pool.close()
    for problem in (pool.error, *problems):
        if problem is not None:
            raise problem


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """The messages of ranks to each other, turn by turn.

    A rank that sees its message is only told where it is. That it is unpacked, the rank says
    as many turns later as may be arriving: then the buffer is free. So it unpacks while the next
    turn is swapped.
    """

    exchange: Exchange
    plan: TransferPlan
    buffers: MessageBuffers
    heads: dict[int, Buffer] = field(default_factory=dict)

    def swap(self, turn: int, *, are_good: bool) -> None:
        """Swap the messages of a turn."""
        plan, buffers = self.plan, self.buffers
        outgoing: list[list[Buffer]] = [[] for _ in range(self.exchange.world_size)]
        incoming: list[list[Buffer]] = [[] for _ in range(self.exchange.world_size)]
        for rank in self._peers(plan.incoming, turn - plan.num_arriving, buffers.seen):
            outgoing[rank].append(np.zeros(1, np.uint8))
        for rank in self._readers(turn - plan.num_arriving):
            incoming[rank].append(np.zeros(1, np.uint8))
        for number in plan.outgoing.in_turn(turn):
            start, stop = plan.outgoing.span(number)
            message = buffers.leaving[turn % len(buffers.leaving)].part(start, stop)
            message[0] = _GOOD if are_good else _BAD
            head = _head(start if are_good else _NOWHERE)
            for rank in plan.outgoing.peers[number]:
                outgoing[rank].append(head if rank in buffers.readers else message)
        for number in plan.incoming.in_turn(turn):
            [rank] = plan.incoming.peers[number]
            if rank in buffers.seen:
                self.heads[rank] = _head(_NOWHERE)
                incoming[rank].append(self.heads[rank])
            else:
                arriving = buffers.arriving[turn % len(buffers.arriving)]
                incoming[rank].append(arriving.part(*plan.incoming.span(number)))
        self.exchange.swap(outgoing, incoming)

    def num_free(self, turn: int) -> int:
        """Turns whose buffers for leaving messages are free when those of a turn are swapped."""
        lag = self.plan.num_arriving
        is_seen = any(self._readers(one) for one in range(turn + 1 - lag, turn + 1))
        return max(turn + 1 - lag, 0) if is_seen else turn + 1

    def _readers(self, turn: int) -> list[int]:
        """The ranks that see what this one sends them in a turn."""
        return self._peers(self.plan.outgoing, turn, self.buffers.readers)

    def arrived(self, turn: int) -> list[tuple[int, MessageBuffer, int]]:
        """The messages of a turn that has just been swapped, as far as they are there.

        Of each its row in `TransferPlan.incoming`, the buffer that it lies in, and its first byte.
        """
        incoming, found = self.plan.incoming, []
        for number in incoming.in_turn(turn):
            [rank] = incoming.peers[number]
            if rank in self.buffers.seen:
                buffers, start = self.buffers.seen[rank], int(self.heads[rank].view("<i8")[0])
            else:
                buffers, start = self.buffers.arriving, int(incoming.start[number])
            if start != _NOWHERE:
                found.append((number, buffers[turn % len(buffers)], start))
        return found

    @staticmethod
    def _peers(messages: Messages, turn: int, ranks: Container[int]) -> list[int]:
        """Those of some ranks that have to do with the messages of a turn."""
        peers = (rank for number in messages.in_turn(turn) for rank in messages.peers[number])
        return [rank for rank in peers if rank in ranks]


def _head(start: int) -> Buffer:
    """The only part to send of a message that the other rank sees: where it begins."""
    return np.array([start], "<i8").view(np.uint8)


DEVICE_MESSAGE_BYTES = 32 << 20
"""A message ends with the region that makes it as long or longer: long enough for a link of some
hundred GB/s, and two that leave and two that arrive take little of the memory of a device."""

_NUM_BUFFERS = 2
"""Turns of which messages are in memory: those under way, and those that are packed or unpacked."""


def device_buffers(
    exchange: Exchange, device: Device, index: Index, plan: TransferPlan
) -> MessageBuffers:
    """Memory for the messages of a plan. Collective: if it is refused anywhere, all ranks raise."""

    def make() -> MessageBuffers:
        leaving = device.buffers(_NUM_BUFFERS, plan.outgoing.buffer_bytes())
        arriving = device.buffers(_NUM_BUFFERS, plan.incoming.buffer_bytes())
        carried = carried_by(index, plan.outgoing), carried_by(index, plan.incoming)
        return MessageBuffers(*carried, leaving, arriving, device=device)

    return run_each(exchange, make)


def execute_on_device(
    exchange: Exchange,
    plan: TransferPlan,
    tasks: Tasks,
    destinations: Sequence[Destination],
    *,
    on_read: Callable[[int], None],
    buffers: MessageBuffers,
) -> None:
    """Execute the transfer plans of all ranks. Collective.

    The devices are connected if there are messages. `on_read` is called after each task,
    which may be queued only, with what that read.
    """
    problems: list[Exception] = []

    def attempt(action: Callable[[], object]) -> None:
        """Do something unless this rank has failed."""
        if not problems:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - raised when all turns are through
                problems.append(error)

    place = buffers.place_in(destinations)
    begins = np.searchsorted(tasks.turn, np.arange(plan.num_turns + 1))
    bounds = [*begins.tolist(), len(tasks.turn)]
    no_buffer = np.empty(0, np.uint8)

    def take(turn: int) -> None:
        """Perform the tasks of a turn; after the last come those for this rank only."""
        for task in range(bounds[turn], bounds[turn + 1]):
            on_read(tasks.perform(task, no_buffer, place, nullcontext))

    def unpack(turn: int) -> None:
        """Fill this rank's memory from the messages of a turn."""
        for number in plan.incoming.in_turn(turn):
            rows = plan.incoming.rows(number)
            buffers.unpack(rows, buffers.arriving[turn % _NUM_BUFFERS], 0, destinations)

    swapped: Callable[[], None] | None = None
    for turn in range(plan.num_turns):
        attempt(lambda: take(turn))  # noqa: B023 - called at once
        swapping = exchange.begin_swap(*_tensors(exchange.world_size, plan, buffers, turn))
        if turn == 0:
            attempt(lambda: take(plan.num_turns))
        if swapped is not None:
            swapped()
            attempt(lambda: unpack(turn - 1))  # noqa: B023 - called at once
        swapped = swapping
    if swapped is None:
        attempt(lambda: take(plan.num_turns))
    else:
        swapped()
        attempt(lambda: unpack(plan.num_turns - 1))
    assert buffers.device is not None
    attempt(buffers.device.finish)
    if problems:
        raise problems[0]


def _tensors(
    world_size: int, plan: TransferPlan, buffers: MessageBuffers, turn: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """The tensors that each rank is sent in a turn, and those that each sends."""
    found: list[list[list[Any]]] = []
    for messages, of_turns in ((plan.outgoing, buffers.leaving), (plan.incoming, buffers.arriving)):
        tensors: list[list[Any]] = [[] for _ in range(world_size)]
        for number in messages.in_turn(turn):
            message = of_turns[turn % _NUM_BUFFERS].part(*messages.span(number))
            for rank in messages.peers[number]:
                tensors[rank].append(message)
        found.append(tensors)
    outgoing, incoming = found
    return outgoing, incoming
