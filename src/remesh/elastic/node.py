"""A node's talk with the master: join until there is a place, beat meanwhile and ever after.

A thread beats, so that the node lives for the master while the launcher waits, starts processes, or
is busy otherwise. It passes on how far the processes are, from their heartbeat files, and keeps the
newest answer. Everything else happens in the launcher's thread.

A node is lost after `heartbeat_timeout` seconds of silence. A beat is given up after a quarter of
that, and the next one is sent: a beat that gets lost on the way costs no node its place.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from remesh.elastic.client import Client
from remesh.elastic.failures import ProcessFailure, Ruling
from remesh.elastic.job import Policy
from remesh.elastic.protocol import (
    Barred,
    BeatReply,
    BeatRequest,
    DrainRequest,
    FailedRequest,
    GetRequest,
    JoinRequest,
    LeaveRequest,
    Over,
    Placed,
    PutRequest,
    RankBeat,
    StacksRequest,
    Test,
    TestedRequest,
    Waiting,
)
from remesh.elastic.rendezvous import Outcome, Settings
from remesh.errors import MasterError
from remesh.heartbeat import read_heartbeat

log = logging.getLogger(__name__)

JOIN_WAIT = 10.0
"""Seconds that a request to join is kept waiting at the master."""
LAST_WORDS = 10.0
"""Seconds for which a node that goes in any case tries to tell the master."""


def beat_limit(heartbeat_timeout: float) -> float:
    """Seconds for the answer to a heartbeat, after which the next one is sent."""
    return heartbeat_timeout / 4


def next_beat(began: float, now: float, beat_seconds: float, heartbeat_timeout: float) -> float:
    """Seconds until the next heartbeat.

    Args:
        began: When the last one was sent.
        now: When its answer came, or was given up.
        beat_seconds: Time between two heartbeats; at most a quarter of the time for silence is.
        heartbeat_timeout: Seconds of silence after which a node is lost.
    """
    return max(began + min(beat_seconds, beat_limit(heartbeat_timeout)) - now, 0.0)


class JobOverError(Exception):
    """The job has ended; there is nothing to join."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(f"the job has {outcome}: {reason}")
        self.outcome = outcome


class NodeBarredError(Exception):
    """The master does not want this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """How a test of this node went; see `protocol.TestedRequest`."""

    __test__ = False  # not a test case, whatever its name

    passed: bool
    broken: bool
    seconds: float
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a node tells the master of itself.

    Attributes:
        name: What people call it.
        node_id: Its place in the order of ranks; None to be given one.
        address: Where other nodes reach it.
        num_processes: Training processes that it starts.
        settings: What the job wants.
        max_restarts: How many restarts a node may be charged with.
        beat_seconds: Time between two heartbeats.
    """

    name: str
    node_id: int | None
    address: str
    num_processes: int
    settings: Settings
    max_restarts: int = 3
    beat_seconds: float = 1.0


class _SpeakerFields(TypedDict):
    """The fields with which every request begins (`protocol.Speaker`)."""

    node_id: int
    incarnation: str
    round: int


@dataclass(slots=True)
class _Now:
    """What the two threads share.

    Attributes:
        placed: The node's place in the current round.
        reply: The master's answer to the newest heartbeat of that round.
        files: Heartbeat files of the processes, by rank.
    """

    placed: Placed | None = None
    reply: BeatReply = field(default_factory=BeatReply)
    files: Mapping[int, str] = field(default_factory=dict)


class Node:
    """This node, as far as the master is concerned.

    Args:
        client: Asks the master.
        options: What it is told.
        test: Takes part in a test and says how it went.
    """

    def __init__(
        self,
        client: Client,
        options: NodeOptions,
        test: Callable[[Node, Test], TestOutcome],
    ) -> None:
        self.client = client
        self.options = options
        self._test = test
        self._incarnation = uuid.uuid4().hex
        self._node_id: int | None = None
        self._round = 0
        self._heartbeat_timeout = Policy().heartbeat_timeout  # until the master says it
        self._now = _Now()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._beating: threading.Thread | None = None

    @property
    def placed(self) -> Placed | None:
        """The node's place in the round that it joined last."""
        return self._now.placed

    @property
    def reply(self) -> BeatReply:
        """What the master wants of the node now."""
        with self._lock:
            return self._now.reply

    @property
    def _speaker(self) -> _SpeakerFields:
        assert self._node_id is not None, "a node joins before it says anything else"
        return {"node_id": self._node_id, "incarnation": self._incarnation, "round": self._round}

    def join(self) -> Placed:
        """Be ready for the next round, and wait until it begins for this node.

        Raises:
            JobOverError: If the job has ended.
            NodeBarredError: If the node is not wanted.
            MasterError: If the master cannot be asked.
        """
        said = ""
        while True:
            request = JoinRequest(
                name=self.options.name,
                node_id=self.options.node_id if self._node_id is None else self._node_id,
                incarnation=self._incarnation,
                address=self.options.address,
                num_processes=self.options.num_processes,
                after_round=self._round,
                settings=self.options.settings,
                # The first answer tells the node its id, without which it cannot beat.
                wait=0.0 if self._node_id is None else JOIN_WAIT,
                max_restarts=self.options.max_restarts,
            )
            # A master that has never answered may have been named wrongly.
            patience = self.client.patience
            if self._node_id is None:
                patience = min(patience, self.options.settings.join_timeout)
            reply = self.client.join(request, patience)
            if isinstance(reply, Placed | Waiting | Test):
                self._heartbeat_timeout = reply.heartbeat_timeout
            match reply:
                case Placed() as placed:
                    self._enter(placed)
                    return placed
                case Waiting(node_id, reason):
                    self._node_id = node_id
                    self._begin_to_beat()
                    if reason != said:
                        log.info("node %d waits: %s", node_id, reason)
                    said = reason
                case Test() as test:
                    self._node_id = test.node_id
                    self._begin_to_beat()
                    self._take_part(test)
                case Barred(reason):
                    raise NodeBarredError(reason)
                case Over(outcome, reason):
                    raise JobOverError(outcome, reason)

    def _enter(self, placed: Placed) -> None:
        with self._lock:
            self._node_id, self._round = placed.node_id, placed.round
            self._now = _Now(placed)
        self._begin_to_beat()
        log.info(
            "round %d: node %d is number %d of %d",
            placed.round,
            placed.node_id,
            placed.rank,
            placed.num_nodes,
        )

    def _take_part(self, test: Test) -> None:
        result = self._test(self, test)
        self.client.tested(
            TestedRequest(
                **self._speaker,
                check=test.check,
                test_round=test.test_round,
                passed=result.passed,
                broken=result.broken,
                seconds=result.seconds,
                message=result.message,
            )
        )

    def watch(self, files: Mapping[int, str]) -> None:
        """Pass on what the processes report.

        Args:
            files: The heartbeat file of each process, by rank.
        """
        with self._lock:
            self._now.files = dict(files)

    def _begin_to_beat(self) -> None:
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="remesh-beat", daemon=True)
            self._beating.start()

    def _beat(self) -> None:
        pause = next_beat(0.0, 0.0, self.options.beat_seconds, self._heartbeat_timeout)
        num_lost = 0
        while not self._stopping.wait(pause):
            began, silence = time.monotonic(), self._heartbeat_timeout
            try:
                self._beat_once(beat_limit(silence))
                if num_lost:
                    log.warning("the master hears this node again; %d heartbeats failed", num_lost)
                num_lost = 0
            except MasterError as error:
                # The training goes on without its master; the next beat may reach it.
                if num_lost == 0:
                    log.warning("no heartbeat, the next one follows: %s", error)
                num_lost += 1
            pause = next_beat(began, time.monotonic(), self.options.beat_seconds, silence)

    def _beat_once(self, limit: float) -> None:
        with self._lock:
            now, speaker = self._now, self._speaker
        request = BeatRequest(**speaker, ranks=_beats_of(now.files))
        reply = self.client.beat(request, limit)
        with self._lock:
            if self._now is now:
                now.reply = reply

    def failed(self, failures: tuple[ProcessFailure, ...]) -> Ruling:
        """Say which processes failed, and be told what to do."""
        return self.client.failed(FailedRequest(**self._speaker, failures=failures))

    def drain(self, seconds: float, reason: str) -> None:
        """Say that the node has to go within some seconds."""
        request = DrainRequest(**self._speaker, seconds=seconds, reason=reason)
        self.client.drain(request, LAST_WORDS)

    def send_stacks(self, dump: int, stacks: dict[int, str]) -> None:
        """Say where the processes were."""
        self.client.stacks(StacksRequest(**self._speaker, dump=dump, stacks=stacks), LAST_WORDS)

    def put(self, round_of_word: int, key: str, value: str) -> None:
        """Leave a word for the other nodes of a round."""
        speaker = self._speaker
        speaker["round"] = round_of_word
        self.client.put(PutRequest(**speaker, key=key, value=value))

    def get(self, round_of_word: int, key: str, seconds: float) -> str:
        """Wait for a word that another node leaves.

        Raises:
            MasterError: If it does not come in time, or the round is over.
        """
        speaker = self._speaker
        speaker["round"] = round_of_word
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            request = GetRequest(**speaker, key=key, wait=min(left, 10.0))
            value = self.client.get(request)
            if value is not None:
                return value
        raise MasterError(f"node {self._node_id}: no node said {key!r} within {seconds:g} s")

    def leave(self, outcome: Outcome, reason: str) -> None:
        """Say that the node goes; it beats until `close`.

        Success must be known, or the others would start again: only that is said for as long as it
        takes.
        """
        if self._node_id is not None:
            request = LeaveRequest(**self._speaker, outcome=outcome, reason=reason)
            self.client.leave(request, None if outcome is Outcome.SUCCEEDED else LAST_WORDS)

    def close(self) -> None:
        """Stop beating."""
        self._stopping.set()
        if self._beating is not None:
            self._beating.join()
        self.client.close()


def _beats_of(files: Mapping[int, str]) -> dict[int, RankBeat]:
    """What the processes report, for those that do."""
    beats = {}
    for rank, file in files.items():
        heartbeat = read_heartbeat(file)
        if heartbeat is not None:
            beats[rank] = RankBeat(
                step=heartbeat.step,
                age=max(time.time() - heartbeat.time, 0.0),
                step_seconds=heartbeat.step_seconds,
                saved_step=heartbeat.saved_step,
            )
    return beats
