"""What can happen to a job: the events that its journal keeps (`remesh.elastic.job`)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from remesh.elastic.failures import ProcessFailure
from remesh.elastic.progress import Progress
from remesh.elastic.rendezvous import Node, Outcome, Settings


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An agent is ready; see `protocol.JoinRequest`. The id is decided already."""

    node: Node
    after_round: int
    settings: Settings
    max_restarts: int


class Leave(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An agent goes."""

    node_id: int
    incarnation: str
    outcome: Outcome
    reason: str


class Lose(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Nothing was heard of a node for too long."""

    node_id: int
    incarnation: str


class Fail(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Processes of a node failed."""

    node_id: int
    incarnation: str
    round: int
    failures: tuple[ProcessFailure, ...]


class Drain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node has to go soon."""

    node_id: int
    incarnation: str
    seconds: float
    reason: str


class Put(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A word for the other nodes of the round."""

    round: int
    key: str
    value: str


class Tested(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How a test went on one node; see `protocol.TestedRequest`."""

    node_id: int
    incarnation: str
    check: int
    test_round: int
    passed: bool
    broken: bool
    seconds: float
    message: str


class WantCheck(msgspec.Struct, frozen=True, tag=True):
    """Test all nodes before the next round."""

    reason: str


class Saved(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint of this step is committed."""

    step: int


class Hang(msgspec.Struct, frozen=True, tag=True):
    """No rank has finished a step for too long; the stacks are wanted."""

    round: int
    reason: str


class HangOver(msgspec.Struct, frozen=True, tag=True):
    """The stacks are here, or were waited for long enough: now act."""

    round: int


class Noted(msgspec.Struct, frozen=True, tag=True):
    """How far the training is; kept now and then."""

    progress: Progress


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed."""


Event: TypeAlias = (
    Join
    | Leave
    | Lose
    | Fail
    | Drain
    | Put
    | Tested
    | WantCheck
    | Saved
    | Hang
    | HangOver
    | Noted
    | Tick
)
