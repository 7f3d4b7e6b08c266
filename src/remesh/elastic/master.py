"""The master: it takes what agents say, and shows each what it has to do.

`on_message` takes a message of a session. A message that is an event is applied to the job;
messages that come together share one write of the journal. What a node has to do follows from the
job as the journal has it (`job.content_of`). That is looked at after each message of the node that
is no heartbeat, and for all nodes when the job has changed in what concerns them all. A session
gets an instruction only if its content is another one than before. While the journal cannot be
written (the disk is full, say) the master goes on, reports it, and tries again every second.

Time is the wall clock's when the master starts, and steady from then on: setting the clock does
not make nodes look dead. All state is in this object and its journal. Neither torch nor a GPU is
needed.
`remesh.elastic.server` adds the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from remesh.elastic import job as jobs
from remesh.elastic import liveness, protocol
from remesh.elastic.job import Event, JobState, NodeHeld, NodeLost, Policy, Tick
from remesh.elastic.journal import Journal
from remesh.elastic.liveness import Liveness
from remesh.elastic.protocol import Sender
from remesh.elastic.rendezvous import MAX_LISTED, Settings, leaving
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
POLL_SECONDS = 0.5
"""Time between two looks whether a node is excluded."""
FINISH_SECONDS = 5.0
"""How long a command that runs when the master ends has to finish, before it is killed."""


class RefusedError(Exception):
    """A message that is refused; the text says what to do."""

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


@dataclass(slots=True, eq=False)
class Connection:
    """An agent's session, as the master sees it."""

    number: int  # differs from those of all others
    give: Callable[[protocol.Instruction], None]  # replaces the instruction that the agent is shown
    end: Callable[[], None]  # ends the connection
    sender: Sender | None = None  # the agent, as it has said last; None before its first message
    given: protocol.Instruction | None = None  # what it is shown


class SteadyClock:
    """Seconds since the epoch that never jump, and begin with a given time at the earliest."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
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
        if ended := journal.ended():  # agents may still have to be told
            journal.warnings.append(ended)
        for text in journal.warnings:
            log.warning(text)
        self._failing_since: float | None = None  # since when the journal cannot be written
        self._problem, self._retry_at = "", 0.0  # why, and when it is tried again
        self._is_pausing = False  # whether it was logged that no steps are made
        self.clock = SteadyClock(last) if clock is None else clock
        self.live = Liveness.after_start(self.job, self.clock())
        self._given = self.job  # the job that was last given to the journal
        self._durable = self.job  # the job that the journal has; instructions follow from it
        self._connections: dict[str, Connection] = {}  # the newest of each agent
        self._due: set[Connection] = set()  # those that are shown what follows from the next write
        self._number = 0  # of the last instruction
        self._last_write: asyncio.Task[None] | None = None
        self._next_write: asyncio.Task[None] | None = None
        self._write_at = 0.0  # when the next write may begin, by the clock of the loop
        self.num_messages = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings for those who operate the job: of the master itself, and of the steps."""
        found = [*self._journal.warnings]
        if pause := liveness.long_pause(self.live, self.job, self.clock()):
            found.append(pause)
        if self.job.missing_rounds:
            found.append(self.job.missing_rounds)
        if self._failing_since is not None:
            seconds = self.clock() - self._failing_since
            found.append(f"not written for {seconds:.0f} s: {self._problem}")
        return tuple(found)

    @property
    def is_written(self) -> bool:
        return self._failing_since is None

    def apply(self, event: Event) -> None:
        """Apply an event to the job; `written` returns when it is durable."""
        before, after = self.job, jobs.apply(self.job, event, self.clock())
        if after is before:
            return
        self.job = after
        for line in _new_lines(before, after):
            log.info(line.text)
        if isinstance(event, NodeLost) and (connection := self._connections.get(event.incarnation)):
            connection.end()  # an agent that lives begins another one

    async def written(self) -> None:
        """Wait until the events up to now are in the journal, or cannot be written."""
        self._begin_write()
        task = self._next_write or self._last_write
        if task is not None:
            await asyncio.shield(task)

    def _begin_write(self) -> None:
        is_due = self.job is not self._given or bool(self._due) or not self.is_written
        if is_due and self._next_write is None:
            self._next_write = asyncio.create_task(self._write(self._last_write))

    async def _write(self, before: asyncio.Task[None] | None) -> None:
        """Write what is pending, after the write before it has ended, and show what follows."""
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(self._write_at - asyncio.get_running_loop().time())
        self._last_write, self._next_write = self._next_write, None
        job, due, now = self.job, self._due, self.clock()
        self._given, self._due = job, set()
        is_new = job is not self._durable or self._failing_since is not None
        if is_new and now >= self._retry_at:
            await self._try_to_write(job, now)
        self._follow(job, due)

    async def _try_to_write(self, job: JobState, now: float) -> None:
        try:
            cost = await asyncio.to_thread(self._store, job, now)
        except StorageError as error:
            self._problem, self._retry_at = str(error), now + RETRY_SECONDS
            if self._failing_since is None:
                self._failing_since = now
                log.error(
                    "%s\n"
                    "The job goes on, but a master that is started again would not know the events "
                    "from now on: free space on the disk, or find why the file cannot be written",
                    error,
                )
            return
        self._write_at = asyncio.get_running_loop().time() + WRITE_PAUSES * cost
        if self._failing_since is not None:
            log.warning("the journal is written again, after %.0f s", now - self._failing_since)
            self._failing_since = None

    def _store(self, job: JobState, now: float) -> float:
        """Write the job; the seconds of the processor that it took."""
        began = time.thread_time()
        self._journal.write(job, now)
        return time.thread_time() - began

    async def close(self) -> None:
        """Write what is pending, and close the journal."""
        self._retry_at = -math.inf
        await self.written()
        self._journal.close()

    def tick(self, late: float = 0.0) -> None:
        """Apply the events that the passing of time causes.

        Heartbeats that came while the master was stopped (`late`, in seconds) are not read yet.
        """
        if late > MOST_LATE:
            liveness.extend_deadlines(self.live, late)
        for event in liveness.events_of_time(self.live, self.job, self.clock()):
            self.apply(event)
        self.apply(Tick())
        pause = liveness.long_pause(self.live, self.job, self.clock())
        if pause and not self._is_pausing:
            log.warning("%s; it may hang", pause)
        self._is_pausing = bool(pause)

    async def keep_time(self, *, end_with_job: bool = False) -> None:
        """Note several times a second that time passes, until this is cancelled."""
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        telling = loop.create_task(report_exclusions(lambda: self.job, self._on_excluded, ending))
        try:
            while not (end_with_job and liveness.is_over(self.live, self.job, self.clock())):
                due = loop.time() + TICK_SECONDS
                await asyncio.sleep(TICK_SECONDS)
                self.tick(loop.time() - due)
                await self.written()
        finally:
            ending.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(telling, FINISH_SECONDS)

    def _follow(self, job: JobState, due: set[Connection]) -> None:
        """Let instructions follow from a job: for all nodes if it concerns them, or those due."""
        before, self._durable = self._durable, job
        everyone = jobs.concerns_all(before, job)
        for connection in list(self._connections.values()) if everyone else due:
            self._show(connection)

    def set_node(self, given: protocol.SetNode) -> protocol.NodeSet:
        """Exclude a node by hand, or use it again.

        Returns:
            Whether a node that is excluded stays for now.

        Raises:
            RefusedError: If there is no such node, it is not excluded, or the job has ended.
        """
        names, held = self.job.names, self.job.rendezvous.held
        node_id = names.get(given.node)
        if node_id is None:
            node_id = next((number for number in names.values() if str(number) == given.node), None)
        if node_id is None:
            known = ", ".join(sorted(names)[:MAX_LISTED]) or "none yet"
            raise RefusedError(f"the job has no node {given.node}; it has {known}")
        if self.job.rendezvous.outcome is not None:
            raise RefusedError(f"the job has {self.job.rendezvous.outcome}: no world follows")
        if not given.is_used:
            self.apply(NodeHeld(node_id, given.reason or "no reason given"))
        elif node_id in held:
            self.apply(NodeHeld(node_id, None))
        else:
            raise RefusedError(
                f"node {given.node} is not excluded by hand\n"
                "One that the master has excluded is used again when its agent is started again"
            )
        nodes = self.job.rendezvous
        stays = node_id in nodes.held and node_id in nodes.active and nodes.broken is None
        return protocol.NodeSet(stays=stays and node_id not in leaving(nodes))

    def on_message(self, connection: Connection, message: protocol.Message) -> None:
        """Take a message of an agent; one that is heard a second time has no further effect.

        Raises:
            RefusedError: If it cannot be accepted.
        """
        now, job = self.clock(), self.job
        sender = connection.sender
        if isinstance(message, protocol.Join):
            message = self._identify(message)
            round_of_node = message.after_round
        else:
            round_of_node = message.round
        node_id = message.node_id
        assert node_id is not None
        pause = message.pause if isinstance(message, protocol.Beat) else None
        number = connection.number
        liveness.on_message(self.live, message.incarnation, now, session=number, pause=pause)
        is_new = sender is None or (sender["node_id"], sender["round"]) != (node_id, round_of_node)
        if is_new:
            old = self._connections.get(message.incarnation)
            if old is not None and old is not connection:
                old.end()  # its connection may look open for hours
            connection.sender = Sender(
                node_id=node_id, incarnation=message.incarnation, round=round_of_node
            )
            self._connections[message.incarnation] = connection
        match message:
            case protocol.Beat():
                for event in liveness.on_beat(self.live, job, message, now):
                    self.apply(event)
            case protocol.ReportStacks():
                liveness.on_stacks(self.live, job, message)
            case protocol.ReportFailures():
                liveness.on_failures(self.live, job, message)
                self.apply(message)
            case _:
                self.apply(message)
        if is_new or not isinstance(message, protocol.Beat):
            self._due.add(connection)
        self._begin_write()

    def end_session(self, connection: Connection, *, by_peer: bool) -> None:
        """A session has ended, by its other end or by this one."""
        if connection.sender is None:
            return
        incarnation = connection.sender["incarnation"]
        if self._connections.get(incarnation) is connection:
            del self._connections[incarnation]
        now = self.clock()
        liveness.on_end_of_session(self.live, connection.number, incarnation, now, by_peer=by_peer)

    def _show(self, connection: Connection) -> None:
        """Give an agent its instruction, if it is another one than before."""
        sender, job, now, old = connection.sender, self._durable, self.clock(), connection.given
        assert sender is not None
        content = jobs.content_of(job, sender)
        dump = job.dump if job.hanging is not None else 0
        if old is not None and (old.content, old.dump) == (content, dump):
            return
        self._number = max(self._number + 1, int(now * 1e6))  # higher also after a restart
        connection.given = protocol.Instruction(number=self._number, content=content, dump=dump)
        connection.give(connection.given)

    def _identify(self, message: protocol.Join) -> protocol.Join:
        """The message with the id and the name of the node, if it fits to the job."""
        wanted = self.job.rendezvous.settings
        if self.job.began is not None and message.settings != wanted:
            raise RefusedError(
                f"node {message.name} has other options than the job\n"
                f"It has {_options(message.settings, wanted)}, the job "
                f"{_options(wanted, message.settings)}; start all nodes with the same options"
            )
        now = self.clock()

        def lives(node_id: int) -> bool | None:
            return liveness.has_living_agent(self.live, self.job, node_id, message.incarnation, now)

        try:
            identity = jobs.assign_id(self.job, message.name, message.node_id, lives)
        except ValueError as error:
            raise RefusedError(f"{message.name}: {error}") from error
        if identity is None:
            raise RefusedError(
                f"{message.name} has an agent, which died or will be heard soon", again=True
            )
        node_id, name = identity
        return msgspec.structs.replace(message, node_id=node_id, name=name)


def _options(given: Settings, other: Settings) -> str:
    """The options of `remesh run` by which settings differ from others."""
    texts = {
        "--nnodes": (f"{given.min_nodes}:{given.max_nodes}", f"{other.min_nodes}:{other.max_nodes}")
    }
    for name in ("node_unit", "last_call", "join_timeout"):
        option = f"--{name.replace('_', '-')}"
        texts[option] = f"{getattr(given, name):g}", f"{getattr(other, name):g}"
    return " ".join(f"{option} {own}" for option, (own, its) in texts.items() if own != its)


def _new_lines(before: JobState, after: JobState) -> list[jobs.HistoryLine]:
    """The lines of history that an event has added; the oldest may have been dropped."""
    last = before.history[-1] if before.history else None
    lines = []
    for line in reversed(after.history):
        if line is last:
            break
        lines.append(line)
    return lines[::-1]


async def report_exclusions(
    current: Callable[[], JobState], command: str | None, ending: asyncio.Event
) -> None:
    """Run a command of the user's, if any, for each node that a job excludes, until `ending`.

    A scheduler does not hear of an exclusion: the command tells it. It runs once for each, one
    after the other, and again after a restart of the master, which cannot know how far the command
    came.
    """
    told: set[tuple[int, str]] = set()
    while command is not None and not ending.is_set():
        job = current()
        for node_id, (incarnation, reason) in job.rendezvous.excluded.items():
            if ending.is_set() or (node_id, incarnation) in told:
                continue
            told.add((node_id, incarnation))
            name = next((name for name, number in job.names.items() if number == node_id), "")
            what = {
                "REMESH_NODE": name,
                "REMESH_NODE_ID": str(node_id),
                "REMESH_REASON": reason,
            }
            await _run(command, what, name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await ending.wait()


async def _run(command: str, what: dict[str, str], name: str) -> None:
    """Run a command, and kill it with all that it has started if this is cancelled."""
    try:
        process = await asyncio.create_subprocess_shell(
            command,
            env=os.environ | what,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,  # what it prints must not be taken for the URL, which is on stdout
            start_new_session=True,
        )
    except OSError as error:
        log.error("the command for the excluded node %s cannot be started: %s", name, error)
        return
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        log.error("the command for the excluded node %s is killed: the master ends", name)
        raise
    if code:
        log.error("the command for the excluded node %s ended with code %d", name, code)
    else:
        log.info("the command for the excluded node %s has run", name)
