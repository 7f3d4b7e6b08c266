"""What nodes say of themselves and of the job, and how nodes are listed in texts."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

MAX_LISTED = 20
"""Numbers, or ranges of them, that a text lists."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of the worlds of a job, and its time limits."""

    min_nodes: int  # fewest nodes that can train
    max_nodes: int  # most nodes that are used
    node_unit: int = 1  # the number of nodes is a multiple of this
    last_call: float = 5.0
    """Seconds without a change after which a world below `max_nodes` is formed."""
    join_timeout: float = 600.0  # seconds without a world after which the job has failed

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"from {self.min_nodes} to {self.max_nodes} nodes is not a range")
        if self.node_unit < 1:
            raise ValueError(f"the node unit must be at least 1, but is {self.node_unit}")
        if self.fitting(self.max_nodes) < self.min_nodes:
            raise ValueError(
                f"no multiple of {self.node_unit} lies in {self.min_nodes}:{self.max_nodes} nodes"
            )
        if self.last_call < 0 or self.join_timeout < 0:
            raise ValueError("waiting times cannot be negative")

    def fitting(self, num_nodes: int) -> int:
        """The size of the largest world that so many nodes can form; 0 if there is none."""
        trimmed = min(num_nodes, self.max_nodes) // self.node_unit * self.node_unit
        return trimmed if trimmed >= self.min_nodes else 0


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node as its agent describes it."""

    id: int  # its place in the order of ranks; the same when it comes back
    incarnation: str  # differs for every agent process
    name: str
    address: str  # where other nodes reach it
    port: int = 0  # where they reach the store of its agent
    num_processes: int  # training processes that it starts


class Outcome(StrEnum):
    """How a node or a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DRAINED = "drained"


def listed(numbers: Iterable[int]) -> str:
    """Numbers as a text of bounded length lists them: many as ranges."""
    ordered = sorted(numbers)
    if len(ordered) <= MAX_LISTED:
        return ", ".join(map(str, ordered))
    grouped = itertools.groupby(enumerate(ordered), lambda placed: placed[1] - placed[0])
    runs = [[number for _, number in run] for _, run in grouped]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    num_left = sum(map(len, runs[MAX_LISTED:]))
    return ", ".join(texts[:MAX_LISTED]) + (f" and {num_left} more" if num_left else "")


def listed_nodes(ids: Collection[int]) -> str:
    """The same, with the word."""
    return f"node{'s' if len(ids) > 1 else ''} {listed(ids)}"
