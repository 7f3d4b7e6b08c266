"""A training job over weeks of failures, with one strategy for its state: simulated in a second.

Between two failures a job makes steps at a constant pace, so what it has done by then is computed
and not played; only failures, repairs and changes of the world are events. What a failure costs is
the time until the next world is formed (`formation_seconds`), the start of processes, the transfer
of the state, and the steps that are made again because the newest state that is left is older.

Where the state comes from follows the rules of `Manager.resume`: the newest step, and of one step
live memory before snapshots before storage. Not modelled: background traffic that slows steps, slow
nodes, failures of the storage and of the master, and lost heartbeats.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from remesh.checkpoint.scattered import replica_distances
from remesh.elastic.liveness import BEAT_SECONDS
from remesh.elastic.master import TICK_SECONDS
from remesh.elastic.protocol import HEARTBEAT_TIMEOUT

DAY = 86400.0
NOTICE_SECONDS = 0.1
"""Time until an agent notices that its own process has died."""
COPY_SHARE = 1.3
"""A background save blocks training for this part of the time of one copy: more than was measured
(docs/performance.md)."""


class FailureKind(StrEnum):
    """A kind of failure."""

    PROCESS = "process"  # a training process dies; its node goes on
    NODE = "node"  # falls silent
    RACK = "rack"  # all its nodes fall silent at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a job."""

    num_nodes: int  # nodes of the full world
    spares: int = 0  # further nodes that wait for a place
    ranks_per_node: int = 8  # training processes of a node
    nodes_per_rack: int = 16  # nodes that a failure of a rack takes
    min_nodes: int = 1  # fewest nodes that can train
    link: float = 25e9  # bytes a second that a node receives from other nodes
    memory: float = 40e9  # bytes a second that a node copies in its memory, all ranks together
    storage_write: float = 100e9  # bytes a second that the storage takes from all nodes together
    storage_read: float = 100e9  # bytes a second that it gives
    repair_seconds: float = 4 * 3600.0  # time after which a node that has failed is ready again

    def __post_init__(self) -> None:
        counts = self.num_nodes, self.ranks_per_node, self.nodes_per_rack
        rates = self.link, self.memory, self.storage_write, self.storage_read
        if min(*counts, self.min_nodes) < 1 or min(*rates) <= 0 or self.spares < 0:
            raise ValueError(f"sizes and bandwidths of a cluster must be positive: {self}")
        if not self.fitting(self.num_nodes):
            raise ValueError(f"{self.num_nodes} nodes are fewer than {self.min_nodes}")

    def fitting(self, num_nodes: int) -> int:
        """The size of the largest world that so many nodes can form; 0 if there is none."""
        return min(num_nodes, self.num_nodes) if num_nodes >= self.min_nodes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The state and the steps of a job."""

    state_bytes: float  # bytes of the state, each element once: weights, moments, master weights
    step_seconds: float  # time of a step of the full world
    copies: int = 1
    """Nodes that hold each element in a step's course: 1 if the state is fully sharded, the
    number of data-parallel replicas if each of them holds all of it."""

    def __post_init__(self) -> None:
        if self.state_bytes <= 0 or self.step_seconds <= 0 or self.copies < 1:
            raise ValueError(f"sizes and times of a workload must be positive: {self}")

    def node_bytes(self, num_nodes: int) -> float:
        """Bytes of the state that each of so many nodes holds."""
        return self.state_bytes * self.copies / num_nodes


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure."""

    time: float  # seconds since the start of the job
    kind: FailureKind  # what fails
    first_node: int  # the place of its node in the world, or of the rack's first node


FailureRates = Mapping[FailureKind, float]
"""Failures a day of the whole cluster, by kind."""


def draw_failures(
    cluster: Cluster, rates: FailureRates, seconds: float, seed: int
) -> tuple[Failure, ...]:
    """Draw the failures of a job: each kind comes at a constant rate, independent of the others."""
    rng = np.random.default_rng(seed)
    failures = []
    for kind, per_day in sorted(rates.items()):  # in an order of their own: draws must repeat
        if per_day <= 0:
            continue
        time = rng.exponential(DAY / per_day)
        while time < seconds:
            node = int(rng.integers(cluster.num_nodes))
            if kind is FailureKind.RACK:
                node -= node % cluster.nodes_per_rack
            failures.append(Failure(time, kind, node))
            time += rng.exponential(DAY / per_day)
    return tuple(sorted(failures, key=lambda failure: failure.time))


LLAMA3_RATES: FailureRates = {
    FailureKind.PROCESS: 419 * 0.15 / 54,
    FailureKind.NODE: 419 * 0.766 / 54,
    FailureKind.RACK: 419 * 0.084 / 54,
}
"""Failures a day on 16,384 GPUs: "The Llama 3 Herd of Models", section 3.3.4 and table 5.

There were 419 unexpected interruptions in 54 days. Network switches and cables, 8.4 %, count as
failures of a rack here; software bugs, dependencies and watchdog timeouts, 15 %, as failures of a
process; all others as failures of a node.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to keep the state of a job."""

    name: str  # in tables
    storage_every: int  # steps between two checkpoints in storage
    snapshot_every: int | None = None  # steps between two snapshots in memory; None for none
    replicas: int = 0  # on how many further nodes each file of a snapshot lies
    reenters: bool = False
    """Processes that survive are entered again and keep their state; otherwise all end and start
    anew."""

    def __post_init__(self) -> None:
        intervals = (self.storage_every, self.snapshot_every or 1)
        if min(intervals) < 1 or self.replicas < 0:
            raise ValueError(f"intervals are steps, 1 at least: {self}")


def blocked_seconds(cluster: Cluster, strategy: Strategy, node_bytes: float) -> float:
    """Seconds a step, on average, that saves and snapshots block training."""
    copy = node_bytes / cluster.memory
    seconds = COPY_SHARE * copy / strategy.storage_every
    if strategy.snapshot_every is not None:
        replicate = strategy.replicas * node_bytes / cluster.link
        seconds += (copy + replicate) / strategy.snapshot_every
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Times of the parts of a recovery that are not the master's."""

    start: float = 60.0
    """From the start of a process to a training function that can resume: imports, devices, model,
    compilation."""
    stop: float = 5.0  # until processes have ended that are replaced
    leave: float = 0.5  # until a process that is entered again has left its training function
    enter: float = 2.0
    """Until it is ready to resume: process groups and what the function makes anew."""
    warm: float = 10.0
    """Until a process that takes the place of another is ready, if its interpreter is warm."""


@dataclass(slots=True)
class Outcome:
    """The result of a job."""

    seconds: float  # its duration
    goodput: float = 0.0
    """Part of the time that went into steps that count, at the pace of the full world."""
    num_failures: int = 0  # failures; one during a recovery counts too
    steps: int = 0  # steps that count
    steps_lost: int = 0  # steps that were made again
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each failure to the next step."""
    bytes_moved: float = 0.0
    """Bytes that recoveries brought to nodes, over network or from storage."""
    sources: Counter[str] = field(default_factory=Counter)  # recoveries by source of the state
    waiting: float = 0.0  # seconds without enough nodes


def formation_seconds(
    kind: FailureKind | None, num_nodes: int, num_lost: int, stop_seconds: float
) -> float:
    """Mean time in seconds from a failure, or from a join (None), to the next world.

    The first node whose heartbeats end is noticed at the first tick of the master after the
    timeout. The others learn of it with their next heartbeat, the last of them within nearly the
    whole time between two; then their processes stop, and they join.
    """
    num_left = num_nodes - num_lost
    told = 0.0 if num_nodes == 1 else BEAT_SECONDS * num_left / (num_left + 1)
    noticed = 0.0 if kind is None else NOTICE_SECONDS
    if num_lost:
        first_overdue = BEAT_SECONDS * num_lost / (num_lost + 1)
        noticed = HEARTBEAT_TIMEOUT - first_overdue + TICK_SECONDS / 2
    return noticed + told + stop_seconds


def snapshot_survives(num_nodes: int, replicas: int, lost: Sequence[int]) -> bool:
    """True if each file of a snapshot is on a node that is left."""
    gone, distances = set(lost), [0, *replica_distances(num_nodes, replicas)]
    return not any(all((node + far) % num_nodes in gone for far in distances) for node in gone)


def memory_survives(num_nodes: int, copies: int, lost: Sequence[int]) -> bool:
    """True if each element is in the memory of a process that is left.

    Of `n` nodes with `c` copies, each `n / c` neighbours hold the whole state once.
    """
    gone, apart = set(lost), max(math.ceil(num_nodes / copies), 1)
    return not any(
        all(other in gone for other in range(node % apart, num_nodes, apart)) for node in gone
    )


def simulate(
    cluster: Cluster,
    workload: Workload,
    strategy: Strategy,
    failures: Sequence[Failure],
    seconds: float,
    *,
    durations: Durations | None = None,
) -> Outcome:
    """Run a job; `failures` are in the order of time."""
    durations, outcome = durations or Durations(), Outcome(seconds)
    nodes, spares = cluster.num_nodes, cluster.spares
    _Job(cluster, workload, strategy, durations, outcome, nodes, spares).run(failures)
    return outcome


@dataclass(frozen=True, slots=True)
class _State:
    step: int
    source: str  # where it is: in storage, a snapshot, or live memory


@dataclass(slots=True)
class _Job:
    cluster: Cluster
    workload: Workload
    strategy: Strategy
    durations: Durations
    outcome: Outcome
    num_nodes: int  # nodes of the world
    spares: int  # further nodes that are ready
    now: float = 0.0  # seconds since its start
    step: int = 0  # steps that count at `now`
    part: float = 0.0  # part of the step after that which is done
    repairs: list[float] = field(default_factory=list)
    """When nodes come back that have failed: a heap."""
    stored: int = 0  # the newest step in storage
    saving: tuple[int, float] | None = None  # a step whose save has not ended, and when it ends
    snapshot: int | None = None  # the step of the newest snapshot

    def run(self, failures: Sequence[Failure]) -> None:
        end, pending = self.outcome.seconds, list(reversed(failures))
        while True:
            changes = [end, *self.repairs[:1], *(failure.time for failure in pending[-1:])]
            self._train(max(min(changes), self.now))
            if self.now >= end:
                break
            if pending and pending[-1].time <= self.now:
                self._fail(pending)
            else:
                heapq.heappop(self.repairs)
                self.spares += 1
                self._grow()
        self.outcome.steps = self.step
        self.outcome.goodput = self.step * self.workload.step_seconds / end

    def _pace(self) -> float:
        """Seconds of a step, with what saves and snapshots add to it."""
        seconds = self.workload.step_seconds * self.cluster.num_nodes / self.num_nodes
        node_bytes = self.workload.node_bytes(self.num_nodes)
        return seconds + blocked_seconds(self.cluster, self.strategy, node_bytes)

    def _train(self, until: float) -> None:
        pace, began = self._pace(), self.now - self.part * self._pace()
        first, done = self.step, (until - began) / pace
        self.now, self.step, self.part = until, first + int(done), done % 1.0
        if self.saving is not None and self.saving[1] <= until:
            self.stored, self.saving = self.saving[0], None
        every = self.strategy.storage_every
        save_seconds = self.workload.state_bytes / self.cluster.storage_write
        newest = self.step // every * every
        ended = int((until - save_seconds - began) / pace)  # steps whose save would have ended
        durable = (first + ended) // every * every
        if ended > 0 and durable > max(self.stored, first):
            self.stored = durable
        if newest > max(self.stored, first) and self.saving is None:
            self.saving = newest, began + (newest - first) * pace + save_seconds
        if self.strategy.snapshot_every is not None:
            snapshot = self.step // self.strategy.snapshot_every * self.strategy.snapshot_every
            if snapshot > first:
                self.snapshot = snapshot

    def _fail(self, pending: list[Failure]) -> None:
        """A failure has come; others may come before the job has recovered from it."""
        before, began = self.step, self.now
        began_again = began
        lost: set[int] = set()  # nodes that are gone
        dead: set[int] = set()  # nodes with processes that are gone
        while True:
            failure = pending.pop()
            self.outcome.num_failures += 1
            began_again = max(failure.time, began)
            nodes = self._nodes_of(failure)
            dead |= nodes
            if failure.kind is not FailureKind.PROCESS and not nodes <= lost:
                lost |= nodes
                for _ in nodes:
                    back = failure.time + self.cluster.repair_seconds
                    heapq.heappush(self.repairs, back)
            size = self._size_without(lost)
            began_again = max(began_again, self.now)
            state = self._newest_state(lost, dead)
            seconds, num_bytes = self._transfer(state, size, len(lost))
            seconds += self._seconds_to_start(failure.kind, len(lost))
            if not (pending and pending[-1].time < began_again + seconds):
                break
        self.spares += self.num_nodes - len(lost) - size
        self.now, self.part = began_again + seconds, 0.0
        self.step, self.num_nodes, self.saving = state.step, size, None
        self.snapshot = None if lost else self.snapshot
        self.outcome.steps_lost += before - state.step
        self.outcome.recoveries.append(self.now - began)
        self.outcome.bytes_moved += num_bytes
        self.outcome.sources[state.source] += 1

    def _nodes_of(self, failure: Failure) -> set[int]:
        """The places in the world that a failure takes."""
        count = self.cluster.nodes_per_rack if failure.kind is FailureKind.RACK else 1
        first = failure.first_node % self.num_nodes
        return set(range(first, min(first + count, self.num_nodes)))

    def _size_without(self, lost: set[int]) -> int:
        """The size of the next world; waits for repairs while there can be none."""
        while not (size := self.cluster.fitting(self.num_nodes - len(lost) + self.spares)):
            back = max(heapq.heappop(self.repairs), self.now)
            self.outcome.waiting += max(min(back, self.outcome.seconds) - self.now, 0.0)
            self.now = back
            self.spares += 1
        return size

    def _newest_state(self, lost: set[int], dead: set[int]) -> _State:
        states = [_State(self.stored, "storage")]
        replicas = self.strategy.replicas
        if self.snapshot is not None and snapshot_survives(self.num_nodes, replicas, sorted(lost)):
            states.append(_State(self.snapshot, "snapshot"))
        copies = self.workload.copies if self.strategy.reenters else 0
        if copies and memory_survives(self.num_nodes, copies, sorted(dead)):
            states.append(_State(self.step, "live memory"))
        order = ("storage", "snapshot", "live memory")
        return max(states, key=lambda state: (state.step, order.index(state.source)))

    def _transfer(self, state: _State, size: int, num_lost: int) -> tuple[float, float]:
        """Seconds and bytes of bringing a state to the nodes of a world."""
        whole = self.workload.state_bytes * self.workload.copies
        share = whole / size
        if state.source == "storage":
            read = self.workload.state_bytes / self.cluster.storage_read
            return read + share / self.cluster.link, whole
        seconds = share / self.cluster.memory if state.source == "snapshot" else 0.0
        if size != self.num_nodes:  # another layout: all may have to move
            return seconds + share / self.cluster.link, whole
        if num_lost:
            return seconds + share / self.cluster.link, share * num_lost
        if state.source == "snapshot":
            return seconds, 0.0
        rank = share / self.cluster.ranks_per_node  # of the process that died
        return rank / self.cluster.link, rank

    def _seconds_to_start(self, kind: FailureKind | None, num_lost: int) -> float:
        """Seconds until processes of the next world can resume."""
        times, reenters = self.durations, self.strategy.reenters
        stop = times.leave if reenters else times.stop
        start = max(times.enter, times.warm) if reenters else times.start
        return formation_seconds(kind, self.num_nodes, num_lost, stop) + start

    def _grow(self) -> None:
        """Form a larger world, if there can be one: after a save, so no step is lost."""
        size = self.cluster.fitting(self.num_nodes + self.spares)
        if size == self.num_nodes or not size:
            return
        source = "live memory" if self.strategy.reenters else "storage"
        seconds, num_bytes = self._transfer(_State(self.step, source), size, 0)
        seconds += self._seconds_to_start(None, 0)
        self.spares += self.num_nodes - size
        self.now += seconds
        self.num_nodes, self.part, self.snapshot, self.saving = size, 0.0, None, None
        if source == "storage":
            self.stored = self.step
        self.outcome.bytes_moved += num_bytes
