"""What agents and the master say to each other: JSON over HTTP, one `POST /v1/<request>` each.

The agent asks, the master answers; the master never calls. A request may be lost or sent twice:
each names its node, the agent's incarnation and the round it speaks of, and does the same a second
time. Every request is answered by its reply or, with an HTTP status of 400 and above, by `Problem`.

=========  ===============  =============================================================
request    reply            meaning
=========  ===============  =============================================================
`join`     `JoinReply`      ready for the next round; waits some seconds for the answer
`beat`     `BeatReply`      alive, this is how far the ranks are; what should I do?
`failed`   `Ruling`         these processes failed; what should I do?
`leave`    `Accepted`       going, and how it ended
`drain`    `Accepted`       have to go soon: let the ranks save first
`put`      `Accepted`       leave a word for the other nodes of the round
`get`      `Value`          ask for one; waits some seconds for it
`tested`   `Accepted`       the result of a test that a `join` was answered with
`stacks`   `Accepted`       where every process of the node was, when a job hangs
`check`    `Accepted`       (people) test all nodes before the next round
`status`   `Status`         (people, `GET`) everything there is to see
=========  ===============  =============================================================
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from remesh.elastic.failures import ProcessFailure, Ruling
from remesh.elastic.rendezvous import Change, Node, Outcome, Settings

PROTOCOL_VERSION = 1


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An agent has no processes running and is ready for the next round.

    Attributes:
        version: The protocol's version.
        name: What people call the node; keeps its id when no id is given.
        node_id: Its place in the order of ranks; None to be given the smallest free one.
        incarnation: Differs for every agent process.
        address: Where other nodes reach it.
        num_processes: Training processes that it starts.
        after_round: The last round that this agent was in; 0 before its first.
        settings: What the job wants; the same on all nodes.
        wait: Seconds after which an answer is wanted in any case.
        max_restarts: How many restarts a node may be charged with.
    """

    version: int = PROTOCOL_VERSION
    name: str
    node_id: int | None
    incarnation: str
    address: str
    num_processes: int
    after_round: int
    settings: Settings
    wait: float = 10.0
    max_restarts: int = 3


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The node is in the world of a round.

    Attributes:
        node_id: Its id.
        round: The round.
        rank: Its place among the nodes.
        num_nodes: Nodes of the round.
        first_process: Rank of its first process.
        num_processes: Processes of all nodes of the round.
        leader: The node of rank 0.
        heartbeat_timeout: Seconds of silence after which a node is lost.
    """

    node_id: int
    round: int
    rank: int
    num_nodes: int
    first_process: int
    num_processes: int
    leader: Node
    heartbeat_timeout: float = 10.0


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """No place yet; ask again.

    Attributes:
        node_id: The node's id.
        reason: What is waited for.
        heartbeat_timeout: Seconds of silence after which a node is lost.
    """

    node_id: int
    reason: str
    heartbeat_timeout: float = 10.0


class Test(msgspec.Struct, frozen=True, tag=True):
    """First take part in a test, report it by `tested`, and join again.

    Attributes:
        node_id: The node's id.
        round: The round whose world is tested.
        check: Number of the check.
        test_round: Number of the test round within it.
        group: The nodes of the group, in the order of their ranks in the test.
        heartbeat_timeout: Seconds of silence after which a node is lost.
    """

    __test__ = False  # not a test case, whatever its name

    node_id: int
    round: int
    check: int
    test_round: int
    group: tuple[Node, ...]
    heartbeat_timeout: float = 10.0


class Barred(msgspec.Struct, frozen=True, tag=True):
    """The node is not used: it failed a check, or another agent has taken over its id."""

    reason: str


class Over(msgspec.Struct, frozen=True, tag=True):
    """The job has ended."""

    outcome: Outcome
    reason: str


JoinReply: TypeAlias = Placed | Waiting | Test | Barred | Over


class Speaker(msgspec.Struct, frozen=True, kw_only=True):
    """Who speaks: every request after the first `join` begins with it.

    Attributes:
        node_id: The node.
        incarnation: Its agent.
        round: The round whose processes it runs or ran; 0 before the first.
    """

    node_id: int
    incarnation: str
    round: int


class RankBeat(msgspec.Struct, frozen=True, kw_only=True):
    """How far one rank is.

    Attributes:
        step: The last step that it finished.
        age: Seconds since it said so.
        step_seconds: How long its own work of a step takes, if it measures that.
        saved_step: The step of the newest checkpoint that it knows to be committed.
    """

    step: int
    age: float
    step_seconds: float | None = None
    saved_step: int | None = None


class BeatRequest(Speaker, frozen=True, kw_only=True):
    """The agent lives.

    Attributes:
        ranks: What its processes report, by rank; only those that report.
    """

    ranks: dict[int, RankBeat] = {}


class BeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent should do.

    Attributes:
        restart: Stop the processes and join again, because of this.
        reason: Why, in a sentence; also for `over`.
        save: Ask the processes for a checkpoint now.
        dump: Send the stacks of all processes; a number that is higher for every new wish.
        over: The job has ended so: stop.
    """

    restart: Change | None = None
    reason: str = ""
    save: bool = False
    dump: int = 0
    over: Outcome | None = None


class FailedRequest(Speaker, frozen=True, kw_only=True):
    """Processes failed; answered by a `Ruling`.

    Attributes:
        failures: All that failed on the node, before the agent stopped the others.
    """

    failures: tuple[ProcessFailure, ...]


class LeaveRequest(Speaker, frozen=True, kw_only=True):
    """The agent goes.

    Attributes:
        outcome: How its processes ended.
        reason: Why it goes.
    """

    outcome: Outcome
    reason: str = ""


class DrainRequest(Speaker, frozen=True, kw_only=True):
    """The node has to go within some seconds, and would like the ranks to save before."""

    seconds: float
    reason: str = ""


class PutRequest(Speaker, frozen=True, kw_only=True):
    """Leave a word for the other nodes of the round."""

    key: str
    value: str


class GetRequest(Speaker, frozen=True, kw_only=True):
    """Ask for a word; answered within `wait` seconds."""

    key: str
    wait: float = 10.0


class Value(msgspec.Struct, frozen=True):
    """A word that was left; None if there is none yet."""

    value: str | None


class TestedRequest(Speaker, frozen=True, kw_only=True):
    """How a test went on one node.

    Attributes:
        check: Number of the check.
        test_round: Number of the test round.
        passed: Whether the collective worked.
        broken: Whether the node's own probe failed.
        seconds: How long its own probe took.
        message: What went wrong.
    """

    check: int
    test_round: int
    passed: bool
    broken: bool
    seconds: float
    message: str = ""


class StacksRequest(Speaker, frozen=True, kw_only=True):
    """Where the processes of a node were.

    Attributes:
        dump: The wish that this answers.
        stacks: Text by rank.
    """

    dump: int
    stacks: dict[int, str]


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Test all nodes before the next round, because of this."""

    reason: str


class Accepted(msgspec.Struct, frozen=True):
    """Heard."""


class Problem(msgspec.Struct, frozen=True):
    """What is wrong with a request, in a sentence that says what to do."""

    error: str


__all__ = [
    "PROTOCOL_VERSION",
    "Accepted",
    "Barred",
    "BeatReply",
    "BeatRequest",
    "CheckRequest",
    "DrainRequest",
    "FailedRequest",
    "GetRequest",
    "JoinReply",
    "JoinRequest",
    "LeaveRequest",
    "Over",
    "Placed",
    "Problem",
    "PutRequest",
    "RankBeat",
    "Ruling",
    "Speaker",
    "StacksRequest",
    "Test",
    "TestedRequest",
    "Value",
    "Waiting",
]
