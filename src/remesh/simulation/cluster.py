"""The machines of a simulated job, its workload and its failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

DAY = 86400.0


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


def scaled(rates: FailureRates, share: float) -> FailureRates:
    """The rates of a cluster of another size, by the share of its nodes."""
    return {kind: rate * share for kind, rate in rates.items()}
