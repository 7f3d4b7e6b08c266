"""The events of a job (`remesh.elastic.job`).

Most of them are requests of agents (`remesh.elastic.protocol`), applied as they came: a `Join` with
the id and the name that the master has given to the node. The others are found by the master
itself, from heartbeats and the time.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from remesh.elastic.progress import TrainingProgress
from remesh.elastic.protocol import (
    Drain,
    Join,
    Leave,
    Put,
    ReportFailures,
    ReportTest,
    RequestCheck,
)


class NodeLost(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node is lost."""

    node_id: int
    incarnation: str  # its agent
    is_closed: bool = False
    """Whether its agent has died, by its connections; otherwise no message has come for too long.
    """


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint of this step is committed."""

    step: int


class RanksWait(msgspec.Struct, frozen=True, tag=True):
    """All ranks of the world wait for it to change; there is nothing to save."""

    round: int


class HangDetected(msgspec.Struct, frozen=True, tag=True):
    """No rank has finished a step for too long; the stacks are requested."""

    round: int
    reason: str


class StacksCollected(msgspec.Struct, frozen=True, tag=True):
    """The stacks of a hanging job have come, or their time limit has passed."""

    round: int


class ProgressRecorded(msgspec.Struct, frozen=True, tag=True):
    """How far the training is; recorded every few seconds."""

    progress: TrainingProgress


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed."""


NodeEvent: TypeAlias = Join | ReportFailures | Leave | Drain | Put | ReportTest | RequestCheck
"""Requests that are events."""
Event: TypeAlias = (
    NodeEvent
    | NodeLost
    | CheckpointSaved
    | RanksWait
    | HangDetected
    | StacksCollected
    | ProgressRecorded
    | Tick
)
