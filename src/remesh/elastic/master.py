"""The master: what it does with each request, around the job's pure machine.

A request becomes an event; the event is applied, appended to the journal, and answered when the
journal has it. Requests that come together share one transaction. While the journal cannot be
written (the disk is full, say) the master goes on and says so; it tries again every second. Joining
and asking for a word may wait: they are answered when the world changes, not polled.

Time is the wall clock's when the master starts, and runs steadily from then on: a clock that is set
does not make nodes look dead. All state lives in this object and its journal. Neither torch nor a
GPU is needed. `remesh.elastic.server` gives it its sockets.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from remesh.elastic import events
from remesh.elastic.failures import Decision, Ruling
from remesh.elastic.job import Line, Policy, State, apply, assign_id, record_of
from remesh.elastic.journal import Journal
from remesh.elastic.live import (
    Live,
    events_of_time,
    excuse,
    has_living_agent,
    hear,
    hear_beat,
    hear_stacks,
    is_over,
)
from remesh.elastic.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    BeatReply,
    BeatRequest,
    CheckRequest,
    DrainRequest,
    FailedRequest,
    GetRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    PutRequest,
    StacksRequest,
    TestedRequest,
    Value,
)
from remesh.elastic.rendezvous import Node
from remesh.elastic.replies import beat_reply, join_reply, places_of, waiting
from remesh.errors import StorageError

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
MOST_LATE = 1.0
"""Seconds by which a tick may be late; beyond, the master counts as having stood still."""
RETRY_SECONDS = 1.0
"""Seconds between two attempts to write a journal that could not be written."""
SAY_EVERY = 600.0
"""Seconds after which it is logged again that it cannot."""
MAX_WAIT = 30.0
"""Longest time that a request is kept waiting."""
MAX_WORDS_BYTES = 1 << 20
"""What the nodes of a round may leave for each other."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Trouble:
    """A journal that cannot be written.

    Attributes:
        since: Since when.
        text: Why.
        retry_at: When it is tried again.
        said_at: When it was logged last.
    """

    since: float
    text: str
    retry_at: float
    said_at: float


class RequestError(Exception):
    """A request that cannot be answered; the text says what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class SteadyClock:
    """Seconds since the epoch that never jump.

    Args:
        not_before: Where to go on, if the wall clock is behind that.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        """The time."""
        return self._offset + time.monotonic()


class Master:
    """A job's master, without its sockets.

    Args:
        policy: How the job is treated.
        journal: Where what must not be forgotten is kept.
        clock: The time; by default one that goes on where the journal ended.
    """

    def __init__(
        self, policy: Policy, journal: Journal, clock: Callable[[], float] | None = None
    ) -> None:
        self._journal = journal
        self._state, last = journal.load(policy)
        for text in journal.warnings:
            log.warning(text)
        self._trouble: _Trouble | None = None
        self.clock = SteadyClock(last) if clock is None else clock
        self._live = Live.after_start(self._state, self.clock())
        self._places = places_of(self._state)
        self._changed = asyncio.Event()
        self._pending: list[tuple[float, events.Event]] = []
        self._last_write: asyncio.Task[None] | None = None
        self._next_write: asyncio.Task[None] | None = None
        self.num_requests = 0

    @property
    def state(self) -> State:
        """What must not be forgotten."""
        return self._state

    @property
    def live(self) -> Live:
        """What is known of the nodes at this moment."""
        return self._live

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the master itself, and must be seen."""
        found = [*self._journal.warnings]
        if self._state.forgotten:
            found.append(self._state.forgotten)
        if self._trouble is not None:
            seconds = self.clock() - self._trouble.since
            found.append(f"not written for {seconds:.0f} s: {self._trouble.text}")
        return tuple(found)

    @property
    def is_written(self) -> bool:
        """Whether the journal can be written."""
        return self._trouble is None

    def happen(self, event: events.Event) -> None:
        """Apply an event; `written` says when it is durable."""
        now = self.clock()
        before, after = self._state, apply(self._state, event, now)
        if after is before:
            return
        self._state = after
        self._pending.append((now, event))
        for line in _new_lines(before, after):
            log.info(line.text)
        if _concerns_waiting(before, after):
            self._places = places_of(after)
            self._changed.set()
            self._changed = asyncio.Event()

    async def written(self) -> None:
        """Wait until everything that has happened until now is in the journal, or cannot be."""
        if (self._pending or self._trouble is not None) and self._next_write is None:
            self._next_write = asyncio.create_task(self._write(self._last_write))
        task = self._next_write or self._last_write
        if task is not None:
            await asyncio.shield(task)

    async def _write(self, before: asyncio.Task[None] | None) -> None:
        """Write what is pending, after the write before it has ended."""
        if before is not None:
            await asyncio.wait([before])
        self._last_write, self._next_write = self._next_write, None
        batch, self._pending = self._pending, []
        now = self.clock()
        if self._trouble is not None and now < self._trouble.retry_at:
            return  # the state has it, and is written whole later
        loop = asyncio.get_running_loop()
        work = functools.partial(self._store, batch, self._state, now, self._trouble is not None)
        try:
            await loop.run_in_executor(None, work)
        except StorageError as error:
            self._note_trouble(str(error), now)
        else:
            self._note_recovery(now)

    def _store(
        self, batch: list[tuple[float, events.Event]], state: State, now: float, recover: bool
    ) -> None:
        if recover:
            self._journal.recover(state, now)
        elif batch:
            self._journal.append(batch)
            if self._journal.wants_snapshot:
                self._journal.snapshot(state, batch[-1][0])

    def _note_trouble(self, text: str, now: float) -> None:
        old = self._trouble
        since, said_at = (now, -math.inf) if old is None else (old.since, old.said_at)
        if now - said_at >= SAY_EVERY:
            said_at = now
            log.error(
                "%s; the job goes on, but a master that is started again would not know what "
                "happens from now on: make room, or see why the file cannot be written",
                text,
            )
        self._trouble = _Trouble(since, text, now + RETRY_SECONDS, said_at)

    def _note_recovery(self, now: float) -> None:
        if self._trouble is not None:
            log.warning("the journal is written again, after %.0f s", now - self._trouble.since)
            self._trouble = None

    async def close(self) -> None:
        """Write what is pending, and give the journal back."""
        if self._trouble is not None:
            self._trouble.retry_at = -math.inf
        await self.written()
        try:
            self._journal.close()
        except StorageError as error:
            log.error("%s", error)

    async def keep_time(self, *, end_with_job: bool = False) -> None:
        """Let time pass, until cancelled.

        Args:
            end_with_job: Return when the job is over and no agent is left (`live.is_over`).
        """
        loop = asyncio.get_running_loop()
        while not (end_with_job and is_over(self._live, self._state, self.clock())):
            due = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.tick(loop.time() - due)
            await self.written()

    def tick(self, late: float = 0.0) -> None:
        """Let happen what the passing of time has made true.

        Args:
            late: Seconds by which this comes later than it should. Heartbeats that came while the
                master stood still are not read yet.
        """
        if late > MOST_LATE:
            excuse(self._live, late)
        for event in events_of_time(self._live, self._state, self.clock()):
            self.happen(event)
        self.happen(events.Tick())

    async def _until(self, answer: Callable[[], _T | None], seconds: float) -> _T | None:
        """Wait for an answer, asked anew whenever something has changed that nodes wait for."""
        deadline = self.clock() + min(seconds, MAX_WAIT)
        while (reply := answer()) is None:
            changed, left = self._changed, deadline - self.clock()
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                return answer()
        return reply

    async def join(self, request: JoinRequest) -> JoinReply:
        """A node is ready; waits for its place.

        Nothing here may hold on to a state while it waits: a thousand states of a thousand nodes
        are many.
        """
        self._check_join(request)
        node_id, name = self._identify(request)
        node = Node(
            id=node_id,
            incarnation=request.incarnation,
            name=name,
            address=request.address,
            num_processes=request.num_processes,
        )
        hear(self._live, node.id, node.incarnation, self.clock())
        self.happen(
            events.Join(
                node=node,
                after_round=request.after_round,
                settings=request.settings,
                max_restarts=request.max_restarts,
            )
        )

        def answer() -> JoinReply | None:
            return join_reply(self._state, node, self._places)

        reply: JoinReply | None = await self._until(answer, request.wait)
        await self.written()
        # A node that waits here is alive, however long that takes.
        hear(self._live, node.id, node.incarnation, self.clock())
        if reply is not None:
            return reply
        return waiting(self._state, node)

    def _identify(self, request: JoinRequest) -> tuple[int, str]:
        """The id and the name of a node that joins."""
        now = self.clock()

        def lives(node_id: int) -> bool | None:
            return has_living_agent(self._live, self._state, node_id, request.incarnation, now)

        try:
            identity = assign_id(self._state, request.name, request.node_id, lives)
        except ValueError as error:
            raise RequestError(409, f"{request.name}: {error}") from error
        if identity is None:
            raise RequestError(
                503, f"{request.name} has an agent, which died or will be heard soon"
            )
        return identity

    def _check_join(self, request: JoinRequest) -> None:
        """Refuse a node that does not fit to the job."""
        if request.version != PROTOCOL_VERSION:
            raise RequestError(
                400,
                f"the agent speaks version {request.version} of the protocol, this master "
                f"{PROTOCOL_VERSION}; install the same remesh everywhere",
            )
        world = self._state.rendezvous
        if world is not None and world.settings != request.settings:
            raise RequestError(
                409,
                f"node {request.name} wants {request.settings}, the job runs with "
                f"{world.settings}; start all nodes with the same options",
            )

    async def beat(self, request: BeatRequest) -> BeatReply:
        """A node lives."""
        now = self.clock()
        hear(self._live, request.node_id, request.incarnation, now)
        for event in hear_beat(self._live, self._state, request, now):
            self.happen(event)
        await self.written()
        # A node that waits for the disk here is alive; it beats again when it has its answer.
        hear(self._live, request.node_id, request.incarnation, self.clock())
        return beat_reply(self._state, request, now)

    async def failed(self, request: FailedRequest) -> Ruling:
        """Processes of a node failed."""
        hear(self._live, request.node_id, request.incarnation, self.clock())
        self.happen(
            events.Fail(
                node_id=request.node_id,
                incarnation=request.incarnation,
                round=request.round,
                failures=request.failures,
            )
        )
        await self.written()
        record = record_of(self._state, request.node_id, request.round)
        if record is not None:
            return record.ruling
        return Ruling(
            decision=Decision.RESTART, charged=False, reason=f"round {request.round} is over"
        )

    async def leave(self, request: LeaveRequest) -> Accepted:
        """A node goes."""
        return await self._accept(
            events.Leave(
                node_id=request.node_id,
                incarnation=request.incarnation,
                outcome=request.outcome,
                reason=request.reason,
            )
        )

    async def drain(self, request: DrainRequest) -> Accepted:
        """A node has to go soon."""
        return await self._accept(
            events.Drain(
                node_id=request.node_id,
                incarnation=request.incarnation,
                seconds=request.seconds,
                reason=request.reason,
            )
        )

    async def put(self, request: PutRequest) -> Accepted:
        """A word for the other nodes."""
        size = sum(len(key) + len(value) for key, value in self._state.words.items())
        if size + len(request.key) + len(request.value) > MAX_WORDS_BYTES:
            raise RequestError(413, f"the nodes have left more than {MAX_WORDS_BYTES} bytes")
        return await self._accept(
            events.Put(round=request.round, key=request.key, value=request.value)
        )

    async def get(self, request: GetRequest) -> Value:
        """A word that a node has left."""

        def word() -> str | None:
            world = self._state.rendezvous
            if world is None or world.round != request.round:
                raise RequestError(409, f"round {request.round} is over; join again")
            return self._state.words.get(request.key)

        return Value(await self._until(word, request.wait))

    async def tested(self, request: TestedRequest) -> Accepted:
        """How a test went on a node."""
        hear(self._live, request.node_id, request.incarnation, self.clock())
        return await self._accept(
            events.Tested(
                node_id=request.node_id,
                incarnation=request.incarnation,
                check=request.check,
                test_round=request.test_round,
                passed=request.passed,
                broken=request.broken,
                seconds=request.seconds,
                message=request.message,
            )
        )

    async def stacks(self, request: StacksRequest) -> Accepted:
        """Where the processes of a node were."""
        hear_stacks(self._live, self._state, request)
        return Accepted()

    async def check(self, request: CheckRequest) -> Accepted:
        """Somebody wants the nodes tested."""
        return await self._accept(events.WantCheck(request.reason))

    async def _accept(self, event: events.Event) -> Accepted:
        self.happen(event)
        await self.written()
        return Accepted()


def _new_lines(before: State, after: State) -> list[Line]:
    """The lines of history that an event has added; the oldest may have been dropped."""
    last = before.history[-1] if before.history else None
    lines = []
    for line in reversed(after.history):
        if line is last:
            break
        lines.append(line)
    return lines[::-1]


def _concerns_waiting(before: State, after: State) -> bool:
    """Whether somebody who waits for a place or a word may get an answer now."""
    old, new = before.rendezvous, after.rendezvous
    if old is None or new is None:
        return old is not new
    return (
        (old.round, old.outcome) != (new.round, new.outcome)
        or old.excluded is not new.excluded
        or old.replaced is not new.replaced
        or before.check is not after.check
        or before.words is not after.words
    )
