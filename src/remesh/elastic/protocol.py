"""The messages between agents and the master: JSON over HTTP, `POST /v<version>/<name>`.

The requests of nodes also travel as frames (`remesh.elastic.frames`), in a second encoding of the
same messages.

An agent sends a request, the master replies; the master opens no connection. A request may be lost
or repeated: each names its node, the agent's incarnation and its round, and has no further effect
the second time. A reply with an HTTP status of 400 or above is a `Problem`. `GET
/v<version>/status` returns a `remesh.elastic.status.Status`, and `GET /v<version>/overview` the
part of it that the page shows, a `remesh.elastic.status.Overview`.

A message is a class here and a row in `PURPOSES`. The class says everything else: its tag is the
request's name, its type parameter is the reply. `Client.ask` sends any request and returns its
reply, typed; the server decodes by the same table. A request that is one of the job's events
(`remesh.elastic.job`) is applied as it is, and accepted. The other requests have a
method of the master each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeAlias, TypedDict, TypeVar, get_args

import msgspec

from remesh.elastic.failures import FailureDecision, ProcessFailure
from remesh.elastic.rendezvous import Change, Node, Outcome, Settings

PROTOCOL_VERSION = 2
HEARTBEAT_TIMEOUT = 3.0
"""Seconds without a message after which a node is lost, if nothing else is said."""

R = TypeVar("R")
NodeId: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


# Replies ------------------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True):
    """The request is durable."""


class Problem(msgspec.Struct, frozen=True):
    """The problem with a request, and what to do."""

    error: str


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """The node is in the world of a round."""

    node_id: int
    round: int
    node_rank: int  # its place among the nodes of the world
    num_nodes: int  # nodes of the world
    first_rank: int  # rank of its first process
    world_size: int  # processes of all nodes
    leader: Node  # the node of rank 0
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    """Seconds without a message after which a node is lost."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """No assignment yet; join again."""

    node_id: int
    reason: str  # what the job waits for
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT


class NodeTest(msgspec.Struct, frozen=True, tag=True):
    """Take part in a test, send `ReportTest`, and join again."""

    node_id: int
    round: int  # the round whose world is tested
    check: int  # number of the check
    test_round: int  # number of the test round within it
    group: tuple[Node, ...]  # the nodes of the group, in the order of their ranks in the test
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The node is not used: it failed a check, or another agent has taken over its id."""

    reason: str


class JobEnded(msgspec.Struct, frozen=True, tag=True):
    """The job has ended."""

    outcome: Outcome
    reason: str


JoinReply: TypeAlias = Assignment | Waiting | NodeTest | Rejected | JobEnded


class BeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The instructions for the agent."""

    restart: Change | None = None  # stop the processes and join again, because of this
    reason: str = ""  # why, in a sentence; also for `outcome`
    save: bool = False  # have the ranks save a checkpoint now
    grow: bool = False
    """That is only because the world can grow: it is enough that they wait, if all of them go on in
    the next world."""
    dump: int = 0  # send the stacks of all processes; a new request for stacks has a higher number
    outcome: Outcome | None = None  # the job has ended so: stop


class Value(msgspec.Struct, frozen=True):
    """A value of the round store; None if the key is not there yet."""

    value: str | None


# Requests -----------------------------------------------------------------------------------------


class Request(msgspec.Struct, Generic[R], frozen=True, kw_only=True, omit_defaults=True):
    """A request that is answered by `R`."""

    wait: float = 0.0
    """Seconds that the master may wait for an answer before it replies without one."""


class Sender(TypedDict):
    """The fields of `NodeRequest`."""

    node_id: int
    incarnation: str
    round: int


class NodeRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """A request of a node that has joined."""

    node_id: NodeId
    incarnation: str  # its agent
    round: int  # the round whose processes it runs or ran; 0 before the first


class Join(Request[JoinReply], frozen=True, kw_only=True, tag="join"):
    """An agent has no processes running and is ready for the next round."""

    name: str  # the node's name; a node keeps its id under it
    node_id: NodeId | None  # its place in the order of ranks; None for the smallest free one
    incarnation: str  # differs for every agent process
    address: str  # where other nodes reach it
    num_processes: Annotated[int, msgspec.Meta(ge=1)]  # training processes that it starts
    after_round: int = 0  # the last round that this agent was in; 0 before its first
    settings: Settings  # sizes of the world, and time limits; the same on all nodes
    max_restarts: int = 3  # how many restarts a node may be charged with


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far one rank is."""

    step: int  # the last step that it finished
    age: float  # seconds since it reported that
    step_seconds: float | None = None  # how long its own work of a step takes, if it measures that
    saved_step: int | None = None  # the step of the newest checkpoint that it knows to be committed
    waits: bool = False  # whether it waits for the world to change


class Beat(NodeRequest[BeatReply], frozen=True, kw_only=True, tag="beat"):
    """The agent lives."""

    ranks: dict[int, RankReport] = {}  # what its processes report, by rank; only those that report
    pause: float = 1.0  # seconds, at most, until the next one
    lost_peer: bool = False
    """Whether a process has left its training function because it lost a peer."""


class ReportFailures(NodeRequest[FailureDecision], frozen=True, kw_only=True, tag="failures"):
    """Processes failed."""

    failures: tuple[ProcessFailure, ...]
    """All that failed on the node, before the agent stopped the others."""


class Leave(NodeRequest[Accepted], frozen=True, kw_only=True, tag="leave"):
    """The agent leaves the job."""

    outcome: Outcome  # how its processes ended
    reason: str = ""  # why it leaves


class Drain(NodeRequest[Accepted], frozen=True, kw_only=True, tag="drain"):
    """The node has to leave within some seconds; the ranks should save before."""

    seconds: float
    reason: str = ""


class Put(NodeRequest[Accepted], frozen=True, kw_only=True, tag="put"):
    """Write a value to the round store, for the other nodes of the round."""

    key: str
    value: str


class Get(NodeRequest[Value], frozen=True, kw_only=True, tag="get"):
    """Read a value from the round store."""

    key: str


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a test on one node."""

    __test__ = False  # not a test case, whatever its name

    passed: bool  # whether the collective worked
    broken: bool  # whether the node's own probe failed
    late: bool = False
    """Whether it failed by not ending within the time limit. A node that is merely busy, as the
    others may be, is late too, so the master compares `elapsed` before it decides."""
    seconds: float  # how long its own probe took at best
    elapsed: float = 0.0
    """Seconds from the start of the test process until the probe had passed or failed."""
    message: str = ""  # what went wrong


class ReportTest(NodeRequest[Accepted], frozen=True, kw_only=True, tag="test"):
    """The result of a `NodeTest`."""

    check: int  # number of the check
    test_round: int  # number of the test round
    result: TestResult


class ReportStacks(NodeRequest[Accepted], frozen=True, kw_only=True, tag="stacks"):
    """The stacks of the processes of a node."""

    dump: int  # `BeatReply.dump`, which this answers
    stacks: dict[int, str]  # text by rank


class RequestCheck(Request[Accepted], frozen=True, kw_only=True, tag="check"):
    """Test all nodes before the next round (sent by `remesh check`)."""

    reason: str


PURPOSES: Mapping[type[Request[Any]], str] = {
    Join: "join the next round",
    Beat: "send a heartbeat",
    ReportFailures: "report failed processes",
    Leave: "leave the job",
    Drain: "announce that this node has to leave",
    Put: "publish where the nodes of the round connect",
    Get: "look up where the nodes of the round connect",
    ReportTest: "report the result of a test",
    ReportStacks: "send the stacks of the processes",
    RequestCheck: "request a check of all nodes",
}
"""All requests, and what each is for, as the messages of a waiting client say it."""


def name_of(kind: type[Request[Any]]) -> str:
    """The name of a request, which is the last part of its path."""
    return str(kind.__struct_config__.tag)


def reply_of(kind: type[Request[R]]) -> Any:
    """The type of the replies to a request, for a decoder."""
    (base,) = vars(kind)["__orig_bases__"]
    return get_args(base)[0]
