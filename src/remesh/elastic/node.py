"""An agent as the master sees it: it joins until it has an assignment, reports, and leaves.

Its session with the master (`session`) sends the heartbeats, which carry how far the processes are.
The newest instruction says what to do with them.

A node is lost after `heartbeat_timeout` seconds without a message. Heartbeats follow each other in
a quarter of that at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from remesh.elastic import protocol
from remesh.elastic.client import Client
from remesh.elastic.nodes import Outcome
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import (
    Assignment,
    Beat,
    Content,
    JobEnded,
    Join,
    Message,
    Rejected,
    Sender,
    Stop,
)
from remesh.elastic.session import Session
from remesh.errors import MasterError

log = logging.getLogger(__name__)

LEAVE_PATIENCE = 10.0
"""Seconds for which a node that leaves in any case tries to say so."""


class NodeClient:
    """The agent of one node, towards the master."""

    def __init__(
        self,
        client: Client,
        first: Join,
        test: Callable[[protocol.NodeTest], protocol.TestResult],
        *,
        beat_seconds: float = 1.0,
    ) -> None:
        self.client = client
        self.address = first.address
        self._first = first
        self._test = test
        self._beat_seconds = beat_seconds
        self._node_id: int | None = None
        self._round = 0
        self.heartbeat_timeout = protocol.HEARTBEAT_TIMEOUT  # until the master says it
        self._lock = threading.Lock()
        self.assignment: Assignment | None = None  # in the round that it joined last
        self._progress: Mapping[int, RankProgress] = {}  # of the ranks that report it
        self._lost_peer = False  # whether one of them has left its training because of that
        self._session = Session(client, self._beat, self._beat_pause)

    @property
    def content(self) -> Content | None:
        """What the master shows the processes of the round; None before the first instruction."""
        newest = self._session.newest
        content = None if newest is None else newest.content
        is_of_another = isinstance(content, Assignment) and content.round != self._round
        if is_of_another or isinstance(content, protocol.Waiting | protocol.NodeTest):
            return Stop(self._round, f"round {self._round} is over for this node")
        return content

    @property
    def silence(self) -> float:
        """Seconds without a session; 0 while there is one."""
        return self._session.silence

    def sender(self) -> Sender:
        """The fields with which the messages of this node begin."""
        assert self._node_id is not None, "the first message of a node is Join"
        return {
            "node_id": self._node_id,
            "incarnation": self._first.incarnation,
            "round": self._round,
        }

    def join(self) -> Assignment | Rejected | JobEnded:
        """Join the next round, and wait until it begins for this node, or it can be in none.

        Raises:
            MasterError: If the master does not answer.
        """
        seen, tested, said = 0, (0, 0), ""
        self._say_join()

        def newer(instruction: protocol.Instruction) -> protocol.Instruction | None:
            return instruction if instruction.number != seen else None

        while True:
            patience = self.client.patience
            if self._node_id is None:  # the URL may be wrong, as long as no master has answered
                patience = min(patience, self._first.settings.join_timeout)
            newest = self._session.wait(newer, patience)
            seen, content, is_first = newest.number, newest.content, self._node_id is None
            self._node_id, self.heartbeat_timeout = newest.node_id, newest.heartbeat_timeout
            match content:
                case Assignment(round=number) if number > self._round:
                    return self._enter(content)
                case protocol.Waiting(reason, is_held):
                    if reason != said:  # one that is held may wait for days
                        level = logging.WARNING if is_held else logging.INFO
                        log.log(level, "node %d waits: %s", newest.node_id, reason)
                    said = reason
                case protocol.NodeTest(check=check, test_round=number) if (check, number) != tested:
                    tested, result = (check, number), self._test(content)
                    self.say(protocol.ReportTest, check=check, test_round=number, result=result)
                case Stop(round=number) if number > self._round:
                    self._round = number  # it was over before this node had entered it
                    self._say_join()
                case JobEnded(outcome) if is_first:
                    log.warning(
                        "the job had %s before this node joined: it trains nothing\n"
                        "For a new job start a master at %s that has another --state file",
                        outcome,
                        self.client.url,
                    )
                    return content
                case Rejected() | JobEnded():
                    return content

    def _say_join(self) -> None:
        self._session.forget(but=protocol.ReportFailures)
        node_id = self._first.node_id if self._node_id is None else self._node_id
        join = msgspec.structs.replace(self._first, node_id=node_id, after_round=self._round)
        self._session.say(join)

    def _enter(self, assignment: Assignment) -> Assignment:
        with self._lock:
            self._round, self.assignment = assignment.round, assignment
            self._progress, self._lost_peer = {}, False
        self._session.forget()
        log.info(
            "round %d: node %d has node rank %d of %d",
            assignment.round,
            self._node_id,
            assignment.node_rank,
            assignment.num_nodes,
        )
        return assignment

    def show(self, progress: Mapping[int, RankProgress], *, lost_peer: bool) -> None:
        """Send how far the ranks are with the heartbeats of the node.

        The next one is sent at once if a peer is lost or more ranks wait: the master may have been
        waiting for that.
        """
        with self._lock:
            num_waiting = sum(one.waits for one in self._progress.values())
            is_awaited = lost_peer > self._lost_peer or num_waiting < sum(
                one.waits for one in progress.values()
            )
            self._progress, self._lost_peer = progress, self._lost_peer or lost_peer
        if is_awaited:
            self._session.hurry()

    def _beat_pause(self) -> float:
        return min(self._beat_seconds, self.heartbeat_timeout / 4)

    def _beat(self) -> Beat | None:
        if self._node_id is None:
            return None
        with self._lock:
            progress, sender, lost_peer = self._progress, self.sender(), self._lost_peer
        return Beat(
            **sender,
            time=time.monotonic(),
            ranks=dict(progress),
            pause=self._beat_pause(),
            lost_peer=lost_peer,
        )

    def say(self, kind: Callable[..., Message], **fields: object) -> None:
        """Say something of the node; what follows from it stands in the next instruction."""
        self._session.say(kind(**self.sender(), **fields))

    def leave(self, outcome: Outcome, reason: str) -> None:
        """Leave the job.

        The master must know of success, or the others would start again: only that is tried with
        the full patience of the client.

        Raises:
            MasterError: If the master may not know it.
        """
        if self._node_id is None or isinstance(self.content, JobEnded):
            return
        self.say(protocol.Leave, outcome=outcome, reason=reason)
        is_success = outcome is Outcome.SUCCEEDED
        if not self._session.end(self.client.patience if is_success else LEAVE_PATIENCE):
            raise MasterError(f"the master at {self.client.url} has not confirmed that")

    def close(self) -> None:
        self._session.end(0.0)
