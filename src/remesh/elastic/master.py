"""The master: how it answers requests, around the job's pure state machine.

A request that is an event is applied to the job, and answered when the journal has the job after
it. Requests that come together share one write. While the journal cannot be written (the disk is
full, say) the master goes on, reports it, and tries again every second. `Join` and `Get` are
answered when the world changes, not polled.

Time is the wall clock's when the master starts, and steady from then on: setting the clock does
not make nodes look dead. All state is in this object and its journal. Neither torch nor a GPU is
needed.
`remesh.elastic.server` adds the sockets.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from remesh.elastic.checks import RunningCheck
from remesh.elastic.failures import FailureAction, FailureDecision
from remesh.elastic.hooks import report_exclusions
from remesh.elastic.job import (
    Event,
    HistoryLine,
    Job,
    NodeEvent,
    Policy,
    Tick,
    apply,
    assign_id,
    assignments_of,
    beat_reply,
    failure_record,
    join_reply,
    node_of,
    waiting,
)
from remesh.elastic.journal import Journal
from remesh.elastic.live import (
    Live,
    events_of_time,
    extend_deadlines,
    has_living_agent,
    hear,
    hear_beat,
    hear_failures,
    hear_stacks,
    is_over,
    long_pause,
)
from remesh.elastic.protocol import (
    Accepted,
    Beat,
    BeatReply,
    Get,
    Join,
    JoinReply,
    NodeRequest,
    Put,
    ReportFailures,
    ReportStacks,
    Request,
    Value,
)
from remesh.errors import StorageError

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
MOST_LATE = 1.0
"""Seconds by which a tick may be late; beyond, the master counts as having been stopped."""
WRITE_PAUSES = 4.0
"""How many times as long as the processor is busy with a write no other one follows: however large
the job is, a fifth of a core writes it."""
RETRY_SECONDS = 1.0
"""Seconds between two attempts to write a journal that could not be written."""
MAX_WAIT = 30.0
"""Longest time that a request may wait."""
MAX_STORE_BYTES = 1 << 20
"""Size of the round store."""

_T = TypeVar("_T")
R = TypeVar("R")


@dataclass(slots=True)
class _JournalFailure:
    """A journal that cannot be written."""

    since: float  # since when
    text: str  # why
    retry_at: float  # when it is tried again


class RequestError(Exception):
    """A request that is refused; the text says what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class SteadyClock:
    """Seconds since the epoch that never jump, and begin with a given time at the earliest."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        """The time."""
        return self._offset + time.monotonic()


class Master:
    """A job's master, without its sockets."""

    def __init__(
        self,
        policy: Policy,
        journal: Journal,
        clock: Callable[[], float] | None = None,
        on_excluded: str | None = None,
    ) -> None:
        self._journal = journal
        self._on_excluded = on_excluded
        self.job, last = journal.load(policy)
        for text in journal.warnings:
            log.warning(text)
        self._journal_failure: _JournalFailure | None = None
        self._is_pausing = False  # whether it was logged that no steps are made
        self.clock = SteadyClock(last) if clock is None else clock
        self.live = Live.after_start(self.job, self.clock())
        self._assignments = assignments_of(self.job)
        self._waiting: set[asyncio.Future[bool]] = set()
        self._given = self.job  # the job that was last given to the journal
        self._last_write: asyncio.Task[None] | None = None
        self._next_write: asyncio.Task[None] | None = None
        self._write_at = 0.0  # when the next write may begin, by the clock of the loop
        self.num_requests = 0
        # The answers to requests that are no events, or whose replies or limits are their own.
        self._answers: dict[type, Callable[[Any], Awaitable[object]]] = {
            Join: self._join,
            Beat: self._beat,
            ReportFailures: self._failures,
            Put: self._put,
            Get: self._get,
            ReportStacks: self._stacks,
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings for those who operate the job: of the master itself, and of the steps."""
        found = [*self._journal.warnings]
        if pause := long_pause(self.live, self.job, self.clock()):
            found.append(pause)
        if self.job.missing_rounds:
            found.append(self.job.missing_rounds)
        if self._journal_failure is not None:
            seconds = self.clock() - self._journal_failure.since
            found.append(f"not written for {seconds:.0f} s: {self._journal_failure.text}")
        return tuple(found)

    @property
    def is_written(self) -> bool:
        """True if the journal can be written."""
        return self._journal_failure is None

    def apply(self, event: Event) -> None:
        """Apply an event to the job; `written` returns when it is durable."""
        before, after = self.job, apply(self.job, event, self.clock())
        if after is before:
            return
        self.job = after
        for line in _new_lines(before, after):
            log.info(line.text)
        if _is_assigned_anew(before, after):
            self._assignments = assignments_of(after)
        if _may_answer_waiting(before, after):
            for change in self._waiting:
                _wake(change, is_late=False)

    async def written(self) -> None:
        """Wait until the events up to now are in the journal, or cannot be written."""
        is_due = self.job is not self._given or self._journal_failure is not None
        if is_due and self._next_write is None:
            self._next_write = asyncio.create_task(self._write(self._last_write))
        task = self._next_write or self._last_write
        if task is not None:
            await asyncio.shield(task)

    async def _write(self, before: asyncio.Task[None] | None) -> None:
        """Write what is pending, after the write before it has ended."""
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(self._write_at - asyncio.get_running_loop().time())
        self._last_write, self._next_write = self._next_write, None
        self._given, now = self.job, self.clock()
        if self._journal_failure is not None and now < self._journal_failure.retry_at:
            return  # it is written later
        try:
            cost = await asyncio.to_thread(self._store, self._given, now)
        except StorageError as error:
            self._record_journal_failure(str(error), now)
        else:
            self._write_at = asyncio.get_running_loop().time() + WRITE_PAUSES * cost
            self._note_recovery(now)

    def _store(self, job: Job, now: float) -> float:
        """Write the job; the seconds of the processor that it took."""
        began = time.thread_time()
        self._journal.write(job, now)
        return time.thread_time() - began

    def _record_journal_failure(self, text: str, now: float) -> None:
        since = now
        if self._journal_failure is not None:
            since = self._journal_failure.since
        else:
            log.error(
                "%s\n"
                "The job goes on, but a master that is started again would not know the events "
                "from now on: free space on the disk, or find why the file cannot be written",
                text,
            )
        self._journal_failure = _JournalFailure(since, text, now + RETRY_SECONDS)

    def _note_recovery(self, now: float) -> None:
        if self._journal_failure is not None:
            log.warning(
                "the journal is written again, after %.0f s", now - self._journal_failure.since
            )
            self._journal_failure = None

    async def close(self) -> None:
        """Write what is pending, and close the journal."""
        if self._journal_failure is not None:
            self._journal_failure.retry_at = -math.inf
        await self.written()
        self._journal.close()

    def tick(self, late: float = 0.0) -> None:
        """Apply the events that the passing of time causes.

        Heartbeats that came while the master was stopped (`late`, in seconds) are not read yet.
        """
        if late > MOST_LATE:
            extend_deadlines(self.live, late)
        for event in events_of_time(self.live, self.job, self.clock()):
            self.apply(event)
        self.apply(Tick())
        pause = long_pause(self.live, self.job, self.clock())
        if pause and not self._is_pausing:
            log.warning("%s; it may hang", pause)
        self._is_pausing = bool(pause)

    async def keep_time(self, *, end_with_job: bool = False) -> None:
        """Note several times a second that time passes, until this is cancelled."""
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        telling = loop.create_task(report_exclusions(lambda: self.job, self._on_excluded, ending))
        try:
            while not (end_with_job and is_over(self.live, self.job, self.clock())):
                due = loop.time() + TICK_SECONDS
                await asyncio.sleep(TICK_SECONDS)
                self.tick(loop.time() - due)
                await self.written()
        finally:
            ending.set()
            await telling

    async def _until(self, answer: Callable[[], _T | None], seconds: float) -> _T | None:
        """Wait for an answer, computed anew whenever the job has changed in what nodes wait for."""
        deadline = self.clock() + min(seconds, MAX_WAIT)
        loop = asyncio.get_running_loop()
        while (reply := answer()) is None:
            left = deadline - self.clock()
            if left <= 0:
                return None
            change: asyncio.Future[bool] = loop.create_future()
            timer = loop.call_later(left, functools.partial(_wake, change, is_late=True))
            self._waiting.add(change)
            try:
                if await change:
                    return answer()
            finally:
                timer.cancel()
                self._waiting.discard(change)
        return reply

    def close_connection(self, number: int, *, by_peer: bool) -> None:
        """A connection was closed, by its other end or by this one."""
        self.live.presence.close(number, self.clock(), by_peer=by_peer)

    async def answer(self, request: Request[R], connection: int | None = None) -> R:
        """Answer a request."""
        special = self._answers.get(type(request))
        if connection is not None and isinstance(request, NodeRequest | Join):
            pause = request.pause if isinstance(request, Beat) else None
            self.live.presence.hear(connection, request.incarnation, self.clock(), pause)
        if isinstance(request, NodeRequest):
            self._hear(request.node_id, request.incarnation)
        if special is not None:
            reply = await special(request)
        else:
            assert isinstance(request, NodeEvent), "what is no event has an answer of its own"
            self.apply(request)
            reply = Accepted()
            await self.written()
        if isinstance(request, NodeRequest):
            # A node that waits for the reply is alive, however long that takes.
            self._hear(request.node_id, request.incarnation)
        return cast("R", reply)

    def answer_now(self, request: Request[R], connection: int) -> R | None:
        """Answer a heartbeat for which nothing has to be written; None if `answer` has to.

        A heartbeat that is heard a second time has no further effect.
        """
        if not isinstance(request, Beat) or not self._is_all_written():
            return None
        now = self.clock()
        self.live.presence.hear(connection, request.incarnation, now, request.pause)
        hear(self.live, request.node_id, request.incarnation, now)
        for event in hear_beat(self.live, self.job, request, now):
            self.apply(event)
        is_changed = self.job is not self._given
        return None if is_changed else cast("R", beat_reply(self.job, request, now))

    def _is_all_written(self) -> bool:
        if self.job is not self._given or self._next_write is not None:
            return False
        if self._journal_failure is not None:
            return False
        return self._last_write is None or self._last_write.done()

    def _hear(self, node_id: int, incarnation: str) -> None:
        hear(self.live, node_id, incarnation, self.clock())

    async def _join(self, request: Join) -> JoinReply:
        """A node is ready; wait for its assignment.

        Nothing here may keep a job while it waits: a thousand versions of a job of a thousand nodes
        are many.
        """
        event = self._identify(request)
        node = node_of(event)
        self._hear(node.id, node.incarnation)
        self.apply(event)

        def answer() -> JoinReply | None:
            return join_reply(self.job, node, self._assignments)

        reply: JoinReply | None = await self._until(answer, request.wait)
        await self.written()
        self._hear(node.id, node.incarnation)
        return waiting(self.job, node) if reply is None else reply

    def _identify(self, request: Join) -> Join:
        """The request with the id and the name of the node, if it fits to the job."""
        nodes = self.job.rendezvous
        if nodes is not None and nodes.settings != request.settings:
            raise RequestError(
                409,
                f"node {request.name} wants {request.settings}, the job runs with "
                f"{nodes.settings}; start all nodes with the same options",
            )
        now = self.clock()

        def lives(node_id: int) -> bool | None:
            return has_living_agent(self.live, self.job, node_id, request.incarnation, now)

        try:
            identity = assign_id(self.job, request.name, request.node_id, lives)
        except ValueError as error:
            raise RequestError(409, f"{request.name}: {error}") from error
        if identity is None:
            raise RequestError(
                503, f"{request.name} has an agent, which died or will be heard soon"
            )
        node_id, name = identity
        return msgspec.structs.replace(request, node_id=node_id, name=name, wait=0.0)

    async def _beat(self, request: Beat) -> BeatReply:
        now = self.clock()
        for event in hear_beat(self.live, self.job, request, now):
            self.apply(event)
        await self.written()
        return beat_reply(self.job, request, now)

    async def _failures(self, request: ReportFailures) -> FailureDecision:
        hear_failures(self.live, self.job, request)
        self.apply(request)
        await self.written()
        record = failure_record(self.job, request.node_id, request.round)
        if record is not None:
            return record.decision
        reason = f"round {request.round} is over"
        return FailureDecision(action=FailureAction.RESTART, charged=False, reason=reason)

    async def _put(self, request: Put) -> Accepted:
        size = sum(len(key) + len(value) for key, value in self.job.round_store.items())
        if size + len(request.key) + len(request.value) > MAX_STORE_BYTES:
            raise RequestError(413, f"the round store would exceed {MAX_STORE_BYTES} bytes")
        self.apply(request)
        await self.written()
        return Accepted()

    async def _get(self, request: Get) -> Value:
        def value() -> str | None:
            nodes = self.job.rendezvous
            if nodes is None or nodes.round != request.round:
                raise RequestError(409, f"round {request.round} is over; join again")
            return self.job.round_store.get(request.key)

        return Value(await self._until(value, request.wait))

    async def _stacks(self, request: ReportStacks) -> Accepted:
        hear_stacks(self.live, self.job, request)
        return Accepted()


def _new_lines(before: Job, after: Job) -> list[HistoryLine]:
    """The lines of history that an event has added; the oldest may have been dropped."""
    last = before.history[-1] if before.history else None
    lines = []
    for line in reversed(after.history):
        if line is last:
            break
        lines.append(line)
    return lines[::-1]


def _wake(change: asyncio.Future[bool], *, is_late: bool) -> None:
    if not change.done():
        change.set_result(is_late)


def _is_assigned_anew(before: Job, after: Job) -> bool:
    """True if nodes have other assignments than before."""
    old, new = before.rendezvous, after.rendezvous
    return old is None or new is None or new.world is not old.world


def _may_answer_waiting(before: Job, after: Job) -> bool:
    """True if many a waiting `Join` or `Get` may have its answer now.

    All of them look. An agent that another one has replaced has time to learn of it.
    """
    old, new = before.rendezvous, after.rendezvous
    if old is None or new is None:
        return old is not new
    return (
        (old.round, old.outcome) != (new.round, new.outcome)
        or old.excluded is not new.excluded
        or _stage(before.check) != _stage(after.check)
        or before.round_store is not after.round_store
    )


def _stage(check: RunningCheck | None) -> tuple[int, int] | None:
    """Which tests a check has given to the nodes."""
    return None if check is None else (check.number, len(check.results))
