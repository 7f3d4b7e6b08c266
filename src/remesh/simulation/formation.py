"""From a failure to the next world, played by the master's own state machines.

Agents are a few lines here: each sends a heartbeat a second, leaves its processes when the reply
says so or its own processes fail, and joins. The master is the product's: `job.apply` for what
happens and what agents are told, `live` for heartbeats and silence. Only sockets, the journal and
the clock are missing.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from remesh.elastic.failures import ProcessFailure
from remesh.elastic.job import (
    CheckpointSaved,
    Job,
    Policy,
    Tick,
    apply,
    assignments_of,
    content_of,
)
from remesh.elastic.liveness import Liveness, events_of_time, on_beat, on_message
from remesh.elastic.master import TICK_SECONDS
from remesh.elastic.protocol import (
    HEARTBEAT_TIMEOUT,
    Assignment,
    Beat,
    Join,
    ReportFailures,
    Sender,
    Stop,
)
from remesh.elastic.rendezvous import Settings
from remesh.simulation.cluster import Cluster, FailureKind

LONGEST: Final = 3600.0
"""Seconds after which a world must have formed."""
BEAT_SECONDS: Final = 1.0
"""Time between two heartbeats."""
NOTICE_SECONDS: Final = 0.1
"""Time until an agent notices that its own process has died."""
LATENCY: Final = 0.005
"""Longest time of a message, in seconds."""


@dataclass(frozen=True, slots=True)
class Formation:
    """The times from a failure to a new world."""

    noticed: float  # seconds until the master knew of it
    formed: float  # seconds until the next world was formed
    num_nodes: int  # its size


def form_again(
    cluster: Cluster,
    kind: FailureKind | None,
    num_lost: int,
    rng: np.random.Generator,
    *,
    stop_seconds: float,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
) -> Formation:
    """Play one change of the world; without a kind, a node joins.

    After `stop_seconds` the processes of a node have left the training function, or have ended.
    Worlds of any size may form: whether one is large enough to train is not asked here.
    """
    num_missing = 1 if kind is None else 0
    job = _running(cluster, cluster.num_nodes - num_missing, heartbeat_timeout)
    play = _Play(cluster, job, stop_seconds, rng)
    if kind is None:
        play.later(0.0, lambda: play.join(cluster.num_nodes + cluster.spares))
        lost: frozenset[int] = frozenset()
    elif kind is FailureKind.PROCESS:
        lost = frozenset()
        play.later(NOTICE_SECONDS, lambda: play.fail(0))
    else:
        lost = frozenset(range(num_lost))
    return play.run(lost)


@functools.lru_cache(maxsize=4)
def _running(cluster: Cluster, num_nodes: int, heartbeat_timeout: float) -> Job:
    """A job whose nodes train, and whose spares wait."""
    job = Job(policy=Policy(heartbeat_timeout=heartbeat_timeout))
    num_waiting = cluster.spares if num_nodes == cluster.num_nodes else 0
    for node in range(num_nodes + num_waiting):
        job = apply(job, _join(cluster, node, after_round=0), 0.0)
    return apply(job, Tick(), 0.0 if num_waiting else 10.0)


def _join(cluster: Cluster, node: int, after_round: int) -> Join:
    settings = Settings(min_nodes=1, max_nodes=cluster.num_nodes)
    return Join(
        name=f"node{node}",
        node_id=node,
        incarnation=str(node),
        address="",
        num_processes=cluster.ranks_per_node,
        after_round=after_round,
        settings=settings,
    )


class _Play:
    """The agents, the master and the clock of one play. Times are seconds since the failure.

    The master's clock is `self.now + _EPOCH`: what happened before the failure lies before it.
    """

    def __init__(
        self, cluster: Cluster, job: Job, stop_seconds: float, rng: np.random.Generator
    ) -> None:
        self.cluster = cluster
        self.job = job
        self.stop_seconds = stop_seconds
        self.rng = rng
        self.now = 0.0
        self.noticed: float | None = None
        self.leaving: set[int] = set()
        self.is_saving = False
        self.live = Liveness.after_start(job, _EPOCH)
        self.assignments = assignments_of(job)
        assert job.rendezvous is not None
        self.round = job.rendezvous.round
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), act))

    def run(self, lost: frozenset[int]) -> Formation:
        nodes = self.job.rendezvous
        assert nodes is not None
        for node in (*sorted(nodes.active), *sorted(nodes.ready)):
            before = self.rng.uniform(0.0, BEAT_SECONDS)
            on_message(self.live, node, str(node), _EPOCH - before)
            if node not in lost:
                self.later(BEAT_SECONDS - before, functools.partial(self._beat, node))
        self.later(self.rng.uniform(0.0, TICK_SECONDS), self._tick)
        while self._queue:
            self.now, _, act = heapq.heappop(self._queue)
            act()
            nodes = self.job.rendezvous
            assert nodes is not None
            if nodes.outcome is not None or self.now > LONGEST:
                break
            if nodes.round > self.round:
                noticed = self.now if self.noticed is None else self.noticed
                return Formation(noticed, self.now + self._delay(), len(nodes.world))
        raise RuntimeError(f"no world formed: {nodes.reason or 'no event is left'}")

    def join(self, node: int) -> None:
        self._apply(_join(self.cluster, node, self.round if node in self.leaving else 0))
        on_message(self.live, node, str(node), self.now + _EPOCH)

    def fail(self, node: int) -> None:
        """The agent of a node finds that a process has died."""
        failure = ProcessFailure(
            node_id=node, round=self.round, rank=0, local_rank=0, exit_code=-9, time=self.now
        )
        report = ReportFailures(
            node_id=node, incarnation=str(node), round=self.round, failures=(failure,)
        )
        self.later(self._delay(), lambda: self._apply(report))
        self._leave(node)

    def _delay(self) -> float:
        return self.rng.uniform(0.0, LATENCY)

    def _apply(self, event: object) -> None:
        before = self.job.rendezvous
        assert before is not None
        self.job = apply(self.job, event, self.now + _EPOCH)  # type: ignore[arg-type]
        after = self.job.rendezvous
        assert after is not None
        if self.noticed is None and (after.broken is not None or after.ready != before.ready):
            self.noticed = self.now

    def _tick(self) -> None:
        for event in events_of_time(self.live, self.job, self.now + _EPOCH):
            self._apply(event)
        self._apply(Tick())
        self.later(TICK_SECONDS, self._tick)

    def _beat(self, node: int) -> None:
        self.later(self._delay(), functools.partial(self._hear, node))
        self.later(BEAT_SECONDS, functools.partial(self._beat, node))

    def _hear(self, node: int) -> None:
        """A heartbeat reaches the master, and the node the newest instruction."""
        now = self.now + _EPOCH
        on_message(self.live, node, str(node), now)
        sender = Sender(node_id=node, incarnation=str(node), round=self.round)
        for event in on_beat(self.live, self.job, Beat(**sender), now):
            self._apply(event)
        nodes = self.job.rendezvous
        assert nodes is not None
        if node not in nodes.active:
            return  # it waits for a world already
        content = content_of(self.job, sender, self.assignments, now)
        if isinstance(content, Stop):
            self._leave(node)
        elif isinstance(content, Assignment) and content.save and not self.is_saving:
            self.is_saving = True
            self.later(0.0, lambda: self._apply(CheckpointSaved(1)))

    def _leave(self, node: int) -> None:
        """The processes of a node are stopped, and it joins."""
        if node not in self.leaving:
            self.leaving.add(node)
            self.later(self.stop_seconds + self._delay(), lambda: self.join(node))


_EPOCH = 1000.0
"""The master's time of the failure."""
