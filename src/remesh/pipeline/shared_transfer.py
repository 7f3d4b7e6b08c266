"""The transfer between ranks that all see each other's messages in shared memory.

Here nothing is sent. Each rank counts in shared memory which turns it has packed and which it has
unpacked, and looks at the counters of the ranks that it exchanges messages with. It has three
kinds of work, each in its order: to pack messages, to unpack them, and to copy what it has itself.
A thread does the first of the three that can be done, so that other ranks wait as little as
possible, and what a rank has itself is copied while there is nothing else to do. As many threads do
this as the rank has cores, for two that copy at once on one core only hinder each other. If some of
the memory is not of the host, each kind of work has a thread, for it waits for devices.

A counter tells neither that a rank has died nor that it has stopped. A thread that has waited for a
second lets the caller's thread talk to the other ranks (`MonitoredRead.look`), which fails if one
of them is gone. Those that live answer within the interval of `remesh.pipeline.monitoring`, however
long they copy, and no thread that copies waits for an answer. Until then the caller's thread waits;
at the end it waits for all ranks, so the next transfer finds all buffers free.

A rank that fails goes through its turns all the same, and marks its messages as bad.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remesh.exchange import Exchange
from remesh.pipeline.monitoring import MonitoredRead
from remesh.pipeline.read import Destination
from remesh.pipeline.transfer import (
    BAD,
    GOOD,
    Arrived,
    MessageBuffers,
    Tasks,
    place_in,
    unpacker,
)
from remesh.pipeline.workers import run_threads
from remesh.planner import TransferPlan
from remesh.storage import Buffer, aligned_buffer

_PACKED, _UNPACKED, _TRANSFERS = 0, 8, 16
"""Counters: turns packed and unpacked in all transfers together, and transfers begun. They lie in
cache lines of their own."""

_PAUSES = (50e-6, 1e-3)
"""Seconds of the shortest and of the longest pause between two looks at counters."""

_PATIENCE = 1.0
"""Seconds after which a thread that waits wants to know whether the other ranks live."""


@dataclass(slots=True, eq=False)
class _Lane:
    """Work that is done in order, by one thread at a time.

    Attributes:
        num_jobs: How much there is.
        is_ready: Whether a job can be done now, given its number; asked in order.
        perform: Does it.
        next: The first job that is not done.
        is_busy: Whether it is being done.
    """

    num_jobs: int
    is_ready: Callable[[int], bool]
    perform: Callable[[int], object]
    next: int = 0
    is_busy: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether no job is left to begin."""
        return self.next + self.is_busy == self.num_jobs


def execute_shared(
    exchange: Exchange,
    plan: TransferPlan,
    tasks: Tasks,
    destinations: Sequence[Destination],
    *,
    on_read: Callable[[int], None],
    buffers: MessageBuffers,
    is_on_host: bool,
) -> None:
    """Execute the transfer plans of all ranks. Collective.

    Args:
        exchange: The ranks.
        plan: What moves; each rank sends one message a turn at most, and gets one.
        tasks: How this rank takes it from its sources: a task for each message, then all others.
        destinations: Where each wanted box goes.
        on_read: Called after each task, in the thread that performed it, with what that read.
        buffers: For the messages, with counters.
        is_on_host: Whether all memory that is copied to and from is memory of the host.

    Raises:
        Exception: What a task of this rank raised.
        ExchangeError: If a rank died.
    """
    problems: list[BaseException] = []

    def attempt(action: Callable[[], object]) -> bool:
        """Do something unless this rank has failed; False if it has."""
        if not problems:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                problems.append(error)
        return not problems

    def read(count: Callable[[int], None]) -> None:
        buffer = aligned_buffer(tasks.buffer_bytes)

        def perform(task: int) -> bool:
            return attempt(lambda: count(tasks.perform(task, buffer, place, reading.gate)))

        lanes = _lanes_of(exchange.rank, plan, tasks, buffers, perform, unpack)
        cores = cores_of_rank(exchange.world_size) if is_on_host else len(lanes)
        work = functools.partial(_work, lanes, threading.Lock(), reading)
        run_threads(min(cores, len(lanes)), work, reading.give_up)

    def unpack(number: int, buffer: Buffer) -> None:
        # The only message of its turn, it begins where the buffer does.
        attempt(lambda: unpack_from([Arrived(number, buffer, 0)]))

    reading = MonitoredRead(read, on_read, num_bytes=tasks.num_bytes, timeout=None)
    place = place_in(buffers, destinations)
    unpack_from = unpacker(buffers.incoming, destinations, reading.gate, ())
    try:
        reading.start()
        reading.wait_for_all(exchange)
    finally:
        reading.give_up()
    for problem in (*problems, reading.error):
        if problem is not None:
            raise problem


def _lanes_of(
    rank: int,
    plan: TransferPlan,
    tasks: Tasks,
    buffers: MessageBuffers,
    perform: Callable[[int], bool],
    unpack: Callable[[int, Buffer], None],
) -> list[_Lane]:
    """What a rank has to do, the most urgent first."""
    assert buffers.counters is not None
    counters, own = buffers.counters, buffers.counters[rank]
    before = int(own[_TRANSFERS]) * plan.num_turns
    own[_TRANSFERS] += 1
    outgoing, incoming, num_shared = plan.outgoing, plan.incoming, len(buffers.leaving)
    sent, arriving, start = outgoing.turn.tolist(), incoming.turn.tolist(), outgoing.start.tolist()

    def is_free(number: int) -> bool:
        """Whether what the message would replace is unpacked; messages before are free already."""
        return all(
            counters[reader][_UNPACKED] > before + sent[earlier]
            for earlier in range(max(number - num_shared, 0), number)
            if sent[earlier] <= sent[number] - num_shared
            for reader in outgoing.peers[earlier]
        )

    def pack(number: int) -> None:
        is_good, turn = perform(number), sent[number]
        buffers.leaving[turn % num_shared][start[number]] = GOOD if is_good else BAD
        own[_PACKED] = before + turn + 1

    def has_come(number: int) -> bool:
        [sender] = incoming.peers[number]
        return bool(counters[sender][_PACKED] > before + arriving[number])

    def take(number: int) -> None:
        [sender] = incoming.peers[number]
        unpack(number, buffers.seen[sender][arriving[number] % num_shared])
        own[_UNPACKED] = before + arriving[number] + 1

    return [
        _Lane(len(sent), is_free, pack),
        _Lane(len(arriving), has_come, take),
        _Lane(len(tasks.turn) - len(sent), lambda _: True, lambda n: perform(len(sent) + n)),
    ]


def _work(lanes: Sequence[_Lane], lock: threading.Lock, reading: MonitoredRead) -> None:
    """Do what can be done, until all is done or the caller has given up."""
    shortest, longest = _PAUSES
    pause, waited = shortest, 0.0
    while not reading.gate.is_closed:
        with lock:
            if all(lane.is_begun for lane in lanes):
                return
            lane = next(
                (
                    one
                    for one in lanes
                    if not one.is_busy and not one.is_begun and one.is_ready(one.next)
                ),
                None,
            )
            if lane is not None:
                lane.is_busy = True
        if lane is not None:
            lane.perform(lane.next)
            with lock:
                lane.next, lane.is_busy = lane.next + 1, False
            pause, waited = shortest, 0.0
            continue
        time.sleep(pause)
        pause, waited = min(2 * pause, longest), waited + pause
        if waited >= _PATIENCE:
            reading.look()
            waited = 0.0


def cores_of_rank(num_ranks: int) -> int:
    """Cores that each of the ranks of this machine has, at least 1."""
    return max(min((os.cpu_count() or 1) // num_ranks, len(os.sched_getaffinity(0))), 1)
