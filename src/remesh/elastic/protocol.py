"""The messages between agents and the master.

Each agent has one session with the master: a WebSocket at `/v<version>/session`, with MessagePack
in binary messages. The agent says what it observes; the master shows it an `Instruction`. The
newest instruction is a state and not an event: it stands until one with a higher number replaces
it, so nothing is lost if an agent misses one, or if a session breaks and the next one repeats it.
Messages of an agent may be repeated as well: each names its node, the agent's incarnation and its
round, and has no further effect the second time. A new session begins with those that still hold.

A message that is one of the job's events (`remesh.elastic.job`) is applied as it is. The end of a
session, closed by the agent after its last message, says that the master has that message. A
message that cannot be accepted ends the session with a `Problem`.

HTTP is for people and other programs: `GET /v<version>/status` returns a
`remesh.elastic.status.Status`, or with a query the part of it that the page shows, and `POST
/v<version>/node` takes a `SetNode`. A reply with an HTTP status of 400 or above is a `Problem`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypedDict

import msgspec

from remesh.elastic.failures import ProcessFailure
from remesh.elastic.nodes import Node, Outcome, Settings
from remesh.elastic.progress import RankProgress

PROTOCOL_VERSION = 6
HEARTBEAT_TIMEOUT = 3.0
"""Seconds without a message after which a node is lost, if nothing else is said."""

NodeId: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


# Instructions -------------------------------------------------------------------------------------


class Problem(msgspec.Struct, frozen=True, tag=True):
    """The problem with a message or a request, and what to do."""

    error: str
    again: bool = False  # whether it may be accepted later


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """The node is in the world of a round."""

    round: int
    node_rank: int  # its place among the nodes of the world
    num_nodes: int  # nodes of the world
    first_rank: int  # rank of its first process
    world_size: int  # processes of all nodes
    leader: Node  # the node of rank 0
    save: bool = False  # have the ranks save a checkpoint now, and wait
    grow: bool = False
    """That is only because the world can grow: it is enough that they wait, if all of them go on in
    the next world."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """No assignment yet."""

    reason: str  # what the job waits for
    is_held: bool = False  # whether an operator has excluded the node


class NodeTest(msgspec.Struct, frozen=True, tag=True):
    """Take part in a test, and send `ReportTest`."""

    round: int  # the round whose world is tested
    check: int  # number of the check
    test_round: int  # number of the test round within it
    group: tuple[Node, ...]  # the nodes of the group, in the order of their ranks in the test
    rank: int  # that of the node in it


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Stop the processes of a round, and join again."""

    round: int
    reason: str  # why, in a sentence
    hangs: bool = False  # whether they hang: send their stacks before


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The node is not used: it failed a check, or another agent has taken over its id."""

    reason: str


class JobEnded(msgspec.Struct, frozen=True, tag=True):
    """The job has ended."""

    outcome: Outcome
    reason: str
    hangs: bool = False  # as for `Stop`


Content: TypeAlias = Assignment | Waiting | NodeTest | Stop | Rejected | JobEnded


class Instruction(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an agent has to do until another instruction takes the place of this one."""

    number: int  # higher than those of all instructions before
    node_id: int  # that of the node; its place in the order of ranks
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT  # seconds of silence after which a node is lost
    content: Content


# Messages of agents -------------------------------------------------------------------------------


class Sender(TypedDict):
    """The fields of `NodeMessage`."""

    node_id: int
    incarnation: str
    round: int


class NodeMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a node that has joined."""

    node_id: NodeId
    incarnation: str  # its agent
    round: int  # the round whose processes it runs or ran; 0 before the first


class Join(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="join"):
    """An agent has no processes running and is ready for the next round."""

    name: str  # the node's name; a node keeps its id under it
    node_id: NodeId | None  # its place in the order of ranks; None for a free one
    incarnation: str  # differs for every agent process
    address: str  # where other nodes reach it
    port: int = 0  # where they reach the store of its agent
    num_processes: Annotated[int, msgspec.Meta(ge=1)]  # training processes that it starts
    after_round: int = 0  # the last round that this agent was in; 0 before its first
    settings: Settings  # sizes of the world, and time limits; the same on all nodes
    command: str = ""  # the script and its arguments; empty if not known
    max_restarts: int = 3  # how many restarts a node may be charged with


class Beat(NodeMessage, frozen=True, kw_only=True, tag="beat"):
    """The agent lives."""

    time: float = 0.0  # when it was sent, by the clock that the ranks have (`RankProgress.time`)
    ranks: dict[int, RankProgress] = {}  # how far its processes are that report it, by rank
    pause: float = 1.0  # seconds, at most, until the next one
    lost_peer: bool = False
    """Whether a process has left its training function because it lost a peer."""


class ReportFailures(NodeMessage, frozen=True, kw_only=True, tag="failures"):
    """Processes failed."""

    failures: tuple[ProcessFailure, ...]
    """All that failed on the node, before the agent stopped the others."""


class Leave(NodeMessage, frozen=True, kw_only=True, tag="leave"):
    """The agent leaves the job."""

    outcome: Outcome  # how its processes ended
    reason: str = ""  # why it leaves


class Drain(NodeMessage, frozen=True, kw_only=True, tag="drain"):
    """The node has to leave within some seconds; the ranks should save before."""

    seconds: float
    reason: str = ""


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a test on one node."""

    __test__ = False  # not a test case, whatever its name

    passed: bool  # whether the collective worked
    broken: bool  # whether the node's own probe failed
    late: bool = False
    """Whether it failed by not ending within the time limit. A node that is merely busy, as the
    others may be, is late too, so the master compares `elapsed` before it decides."""
    elapsed: float = 0.0
    """Seconds from the start of the test process until the probe had passed or failed."""
    message: str = ""  # what went wrong


class ReportTest(NodeMessage, frozen=True, kw_only=True, tag="test"):
    """The result of a `NodeTest`."""

    check: int  # number of the check
    test_round: int  # number of the test round
    result: TestResult


class ReportStacks(NodeMessage, frozen=True, kw_only=True, tag="stacks"):
    """The stacks of the processes of a node, which hang."""

    stacks: dict[int, str]  # text by rank


Message: TypeAlias = Join | Beat | ReportFailures | Leave | Drain | ReportTest | ReportStacks
"""What agents send."""


class SetNode(msgspec.Struct, frozen=True, kw_only=True):
    """Exclude a node from the next world on, or use it again (sent by `remesh node`)."""

    node: str  # its name or id
    is_used: bool
    reason: str = ""
