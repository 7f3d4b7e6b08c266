"""The master's client on a node: it joins until it has an assignment, and sends heartbeats.

A thread sends the heartbeats, so that the node is alive for the master while the launcher waits,
starts processes, or is busy otherwise. They carry how far the processes are, from their heartbeat
files, and the newest reply is kept. Everything else happens in the launcher's thread.

A node is lost after `heartbeat_timeout` seconds without a message. A heartbeat is given up after a
quarter of that, and the next one is sent: one that gets lost does not make its node lost. Nothing
that goes wrong with one heartbeat ends the thread, or the node would be lost while it works.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from remesh.elastic.client import Client
from remesh.elastic.heartbeat import HeartbeatReader
from remesh.elastic.job import Policy
from remesh.elastic.protocol import (
    Assignment,
    Beat,
    BeatReply,
    Get,
    JobEnded,
    Join,
    Leave,
    NodeTest,
    Put,
    RankReport,
    Rejected,
    ReportTest,
    Sender,
    TestResult,
    Waiting,
)
from remesh.elastic.rendezvous import Outcome
from remesh.errors import MasterError

log = logging.getLogger(__name__)

JOIN_WAIT = 10.0
"""`Join.wait` of a node that has an id."""
LEAVE_PATIENCE = 10.0
"""Seconds for which a node that leaves in any case repeats a request."""


def beat_limit(heartbeat_timeout: float) -> float:
    """Seconds for the reply to a heartbeat, after which the next one is sent."""
    return heartbeat_timeout / 4


def next_beat(began: float, now: float, beat_seconds: float, heartbeat_timeout: float) -> float:
    """Seconds until the next heartbeat."""
    return max(began + min(beat_seconds, beat_limit(heartbeat_timeout)) - now, 0.0)


class JobEndedError(Exception):
    """The job has ended and cannot be joined."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(f"the job has {outcome}: {reason}")
        self.outcome = outcome


class NodeRejectedError(Exception):
    """The master does not use this node."""


@dataclass(slots=True)
class _Current:
    """The state that the two threads share."""

    assignment: Assignment | None = None  # the node's assignment in the current round
    reply: BeatReply = field(default_factory=BeatReply)
    """The reply to the newest heartbeat of that round."""
    answered: float = field(default_factory=time.monotonic)  # when it came, or the round began
    files: Mapping[int, str] = field(default_factory=dict)
    """Heartbeat files of the processes, by rank."""
    lost_peer: bool = False
    """Whether one of them has left its training function because it lost a peer."""


class NodeClient:
    """The client of one node."""

    def __init__(
        self,
        client: Client,
        first: Join,
        test: Callable[[NodeClient, NodeTest], TestResult],
        *,
        beat_seconds: float = 1.0,
    ) -> None:
        self.client = client
        self.beats = HeartbeatReader()
        self.address = first.address
        self._first = first
        self._test = test
        self._beat_seconds = beat_seconds
        self._node_id: int | None = None
        self._round = 0
        self._heartbeat_timeout = Policy().heartbeat_timeout  # until the master says it
        self._current = _Current()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._beating: threading.Thread | None = None

    @property
    def assignment(self) -> Assignment | None:
        """The node's assignment in the round that it joined last."""
        return self._current.assignment

    @property
    def reply(self) -> BeatReply:
        """The reply to the newest heartbeat of the round."""
        with self._lock:
            return self._current.reply

    @property
    def silence(self) -> float:
        """Seconds since a heartbeat of the round was answered."""
        with self._lock:
            return time.monotonic() - self._current.answered

    def sender(self, round_of_node: int | None = None) -> Sender:
        """The fields with which the requests of this node begin."""
        assert self._node_id is not None, "the first request of a node is Join"
        return {
            "node_id": self._node_id,
            "incarnation": self._first.incarnation,
            "round": self._round if round_of_node is None else round_of_node,
        }

    def join(self) -> Assignment:
        """Join the next round, and wait until it begins for this node.

        Raises:
            JobEndedError: If the job has ended.
            NodeRejectedError: If the node is not used.
            MasterError: If the master does not answer.
        """
        logged = ""
        while True:
            request, patience = self._first, self.client.patience
            if self._node_id is None:
                # The URL may be wrong, as long as no master has answered. The first reply contains
                # the node's id, which heartbeats need.
                patience = min(patience, request.settings.join_timeout)
            else:
                request = msgspec.structs.replace(
                    request, node_id=self._node_id, after_round=self._round, wait=JOIN_WAIT
                )
            reply = self.client.ask(request, patience=patience)
            if isinstance(reply, Assignment | Waiting | NodeTest):
                self._heartbeat_timeout = reply.heartbeat_timeout
            match reply:
                case Assignment():
                    self._enter(reply)
                    return reply
                case Waiting(node_id, reason):
                    self._node_id = node_id
                    self._begin_to_beat()
                    if reason != logged:
                        log.info("node %d waits: %s", node_id, reason)
                    logged = reason
                case NodeTest(check=check, test_round=test_round):
                    self._node_id = reply.node_id
                    self._begin_to_beat()
                    result = self._test(self, reply)
                    self.client.ask(
                        ReportTest(
                            **self.sender(), check=check, test_round=test_round, result=result
                        )
                    )
                case Rejected(reason):
                    raise NodeRejectedError(reason)
                case JobEnded(outcome, reason):
                    raise JobEndedError(outcome, reason)

    def _enter(self, assignment: Assignment) -> None:
        with self._lock:
            self._node_id, self._round = assignment.node_id, assignment.round
            self._current = _Current(assignment)
        self._begin_to_beat()
        log.info(
            "round %d: node %d has node rank %d of %d",
            assignment.round,
            assignment.node_id,
            assignment.node_rank,
            assignment.num_nodes,
        )

    def watch(self, files: Mapping[int, str]) -> None:
        """Send what the processes report with the heartbeats."""
        with self._lock:
            self._current.files = dict(files)

    def beat_now(self, *, lost_peer: bool = False) -> None:
        """Send the next heartbeat at once: its reply is needed."""
        with self._lock:
            self._current.lost_peer |= lost_peer
        self._hurry.set()

    def _begin_to_beat(self) -> None:
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="remesh-beat", daemon=True)
            self._beating.start()

    def _beat(self) -> None:
        pause = next_beat(0.0, 0.0, self._beat_seconds, self._heartbeat_timeout)
        num_lost, said = 0, ""
        while True:
            self._hurry.wait(pause)
            self._hurry.clear()
            if self._stopping.is_set():
                return
            began, timeout = time.monotonic(), self._heartbeat_timeout
            try:
                self._beat_once(beat_limit(timeout))
                if num_lost:
                    log.warning("heartbeats are answered again; %d were not", num_lost)
                num_lost, said = 0, ""
            except MasterError as error:
                # The training goes on without its master; the next heartbeat may reach it.
                if num_lost == 0:
                    log.warning("a heartbeat is not answered; the next one follows: %s", error)
                num_lost += 1
            except Exception as error:  # a fault of remesh or of the machine, perhaps a passing one
                num_lost += 1
                if repr(error) != said:
                    said = repr(error)
                    log.exception("a heartbeat is not sent; the next one follows")
            pause = next_beat(began, time.monotonic(), self._beat_seconds, timeout)

    def _beat_once(self, limit: float) -> None:
        with self._lock:
            current, sender = self._current, self.sender()
            lost_peer = current.lost_peer
        pause = min(self._beat_seconds, limit)
        ranks = self._reports_of(current.files)
        request = Beat(**sender, ranks=ranks, pause=pause, lost_peer=lost_peer)
        reply = self.client.ask(request, limit=limit, patience=0.0)
        with self._lock:
            if self._current is current:
                current.reply, current.answered = reply, time.monotonic()

    def _reports_of(self, files: Mapping[int, str]) -> dict[int, RankReport]:
        """The reports of the processes that make any."""
        reports = {}
        for rank, file in files.items():
            heartbeat = self.beats.read(file)
            if heartbeat is not None:
                reports[rank] = RankReport(
                    step=heartbeat.step,
                    age=max(time.time() - heartbeat.time, 0.0),
                    step_seconds=heartbeat.step_seconds,
                    saved_step=heartbeat.saved_step,
                    waits=heartbeat.waits,
                )
        return reports

    def put(self, round_of_node: int, key: str, value: str) -> None:
        """Write a value to the store of a round."""
        self.client.ask(Put(**self.sender(round_of_node), key=key, value=value))

    def get(self, round_of_node: int, key: str, seconds: float) -> str:
        """Wait for a value that another node puts into the store of a round."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            request = Get(**self.sender(round_of_node), key=key, wait=min(left, 10.0))
            value = self.client.ask(request).value
            if value is not None:
                return value
        raise MasterError(f"node {self._node_id}: no node has put {key!r} within {seconds:g} s")

    def leave(self, outcome: Outcome, reason: str) -> None:
        """Leave the job; heartbeats go on until `close`.

        The master must know of success, or the others would start again: only that is repeated with
        the full patience of the client.
        """
        if self._node_id is not None:
            patience = None if outcome is Outcome.SUCCEEDED else LEAVE_PATIENCE
            request = Leave(**self.sender(), outcome=outcome, reason=reason)
            self.client.ask(request, patience=patience)

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stopping.set()
        self._hurry.set()
        if self._beating is not None:
            self._beating.join()
        self.client.close()
