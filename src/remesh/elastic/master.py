"""The master: it takes what agents say, and shows each what it has to do.

`on_message` takes a message of a session. A message that is an event is applied to the job;
messages that come together share one write of the journal. What a node has to do follows from the
job as the journal has it (`job.content_of`). That is looked at after each message of the node that
is no heartbeat, and for all nodes when the job has changed in what concerns them all. A session
gets an instruction only if its content is another one than before. While the journal cannot be
written (the disk is full, say) the master goes on, reports it, and tries again.

Time is the wall clock's when the master starts, and steady from then on: setting the clock does
not make nodes look dead. All state is in this object and its journal. Neither torch nor a GPU is
needed.
`remesh.elastic.server` adds the sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
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
from remesh.elastic.nodes import MAX_LISTED, Settings
from remesh.elastic.protocol import Sender
from remesh.errors import StorageError

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
MOST_LATE = 1.0
"""Seconds by which a tick may be late; beyond, the master counts as having been stopped."""
WRITE_PAUSES = 4.0
"""How many times as long as the processor is busy with a write no other one follows: however large
the job is, a fifth of a core writes it."""


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
        self._reported: set[tuple[int, str]] = set()  # the nodes for which it has run
        self.job, last = journal.load(policy)
        for text in journal.warnings:
            log.warning(text)
        self._problem = ""  # why the journal cannot be written; empty if it can
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
        """The warnings for those who operate the job."""
        found = [*self._journal.warnings]
        if self._problem:
            found.append(f"not written: {self._problem}")
        return tuple(found)

    @property
    def is_written(self) -> bool:
        return not self._problem

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
        if job is not self._durable or self._problem:
            await self._try_to_write(job, now)
        self._follow(job, due)

    async def _try_to_write(self, job: JobState, now: float) -> None:
        try:
            cost = await asyncio.to_thread(self._store, job, now)
        except StorageError as error:
            if not self._problem:
                log.error(
                    "%s\n"
                    "The job goes on, but a master that is started again would not know the events "
                    "from now on: free space on the disk, or find why the file cannot be written",
                    error,
                )
            self._problem = str(error)
            self._write_at = asyncio.get_running_loop().time() + TICK_SECONDS
            return
        self._write_at = asyncio.get_running_loop().time() + WRITE_PAUSES * cost
        if self._problem:
            log.warning("the journal is written again")
            self._problem = ""

    def _store(self, job: JobState, now: float) -> float:
        """Write the job; the seconds of the processor that it took."""
        began = time.thread_time()
        self._journal.write(job, now)
        return time.thread_time() - began

    async def close(self) -> None:
        """Write what is pending, and close the journal."""
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

    async def keep_time(self, *, end_with_job: bool = False) -> None:
        """Note several times a second that time passes, until this is cancelled."""
        loop = asyncio.get_running_loop()
        while not (end_with_job and liveness.is_over(self.live, self.job, self.clock())):
            due = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.tick(loop.time() - due)
            if self._on_excluded is not None:
                self._report_exclusions(self._on_excluded)
            await self.written()

    def _report_exclusions(self, command: str) -> None:
        """Run a command of the user's for each node that the job has excluded since.

        A scheduler does not hear of an exclusion: the command tells it. It runs by itself, and
        again after a restart of the master, which cannot know how far it came.
        """
        for node_id, (incarnation, reason) in self.job.excluded.items():
            if (node_id, incarnation) in self._reported:
                continue
            self._reported.add((node_id, incarnation))
            name = next((name for name, number in self.job.names.items() if number == node_id), "")
            what = {"REMESH_NODE": name, "REMESH_NODE_ID": str(node_id), "REMESH_REASON": reason}
            try:
                subprocess.run(  # noqa: S602 - the user's own
                    f"(\n{command}\n) &",
                    shell=True,
                    check=False,
                    env=os.environ | what,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,  # what it prints must not be taken for the URL, on stdout
                    start_new_session=True,
                )
            except OSError as error:
                log.error("the command for the excluded node %s does not start: %s", name, error)

    def _follow(self, job: JobState, due: set[Connection]) -> None:
        """Let instructions follow from a job: for all nodes if it concerns them, or those due."""
        before, self._durable = self._durable, job
        everyone = jobs.concerns_all(before, job)
        for connection in list(self._connections.values()) if everyone else due:
            self._show(connection)

    def set_node(self, given: protocol.SetNode) -> None:
        """Exclude a node by hand, or use it again.

        Raises:
            RefusedError: If there is no such node, it is not excluded, the others cannot go on
                without it, or the job has ended.
        """
        job, names = self.job, self.job.names
        node_id = names.get(given.node)
        if node_id is None:
            node_id = next((number for number in names.values() if str(number) == given.node), None)
        if node_id is None:
            known = ", ".join(sorted(names)[:MAX_LISTED]) or "none yet"
            raise RefusedError(f"the job has no node {given.node}; it has {known}")
        if job.outcome is not None:
            raise RefusedError(f"the job has {job.outcome}: no world follows")
        if not given.is_used:
            if node_id in job.active and not jobs.fits_without(job, {node_id, *job.held}):
                raise RefusedError(
                    f"the others cannot go on without node {given.node}\nStart another node first"
                )
            self.apply(NodeHeld(node_id, given.reason or "no reason given"))
        elif node_id in job.held:
            self.apply(NodeHeld(node_id, None))
        else:
            raise RefusedError(
                f"node {given.node} is not excluded by hand\n"
                "One that the master has excluded is used again when its agent is started again"
            )

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
                liveness.on_stacks(self.live, message)
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
        if old is not None and old.content == content:
            return
        self._number = max(self._number + 1, int(now * 1e6))  # higher also after a restart
        connection.given = protocol.Instruction(
            number=self._number,
            node_id=sender["node_id"],
            heartbeat_timeout=job.policy.heartbeat_timeout,
            content=content,
        )
        connection.give(connection.given)

    def _identify(self, message: protocol.Join) -> protocol.Join:
        """The message with the id and the name of the node, if it fits to the job."""
        wanted = self.job.settings
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
