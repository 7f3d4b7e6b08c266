"""A job without its master, to which a test says what happens and when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from remesh.elastic.job import (
    Event,
    JobState,
    NodeHeld,
    NodeLost,
    Policy,
    RanksWait,
    Tick,
    apply,
    content_of,
)
from remesh.elastic.liveness import Liveness, events_of_time, on_beat, on_message
from remesh.elastic.nodes import Outcome, Settings
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import Beat, Content, Drain, Join, Leave, ReportFailures, Sender
from remesh.elastic.status import Status, status_of
from tests.elastic.agents import failure_of, join_of

SETTINGS = Settings(min_nodes=2, max_nodes=5, node_unit=2, last_call=5.0, join_timeout=1e12)
POLICY = Policy(heartbeat_timeout=10.0, save_grace=5.0, check_timeout=20.0)
NEW = JobState(policy=POLICY)
COLLATERAL = "RuntimeError: Connection closed by peer"


def joining(number: int, agent: str = "a", **changes: Any) -> Join:
    """The event that a node joins."""
    own = {"name": str(number), "incarnation": agent, "settings": SETTINGS, "max_restarts": 3}
    return join_of(number, **{**own, **changes})


@dataclass(frozen=True)
class PlayedJob:
    """A job at one moment: each method gives the job after something has happened.

    The agent of a node has the incarnation `a`, if nothing else is said.
    """

    state: JobState = NEW
    settings: Settings = SETTINGS

    @classmethod
    def running(
        cls,
        num_nodes: int = 2,
        *,
        settings: Settings = SETTINGS,
        max_restarts: int = 3,
        **policy: Any,
    ) -> Self:
        """A job whose first round has begun at 100."""
        job = cls(JobState(policy=msgspec.structs.replace(POLICY, **policy)), settings)
        job = job.join(*range(num_nodes), at=1.0, max_restarts=max_restarts).after(at=100.0)
        assert job.state.round == 1
        return job

    @property
    def world(self) -> tuple[int, list[int]]:
        """The number of the newest world, and its nodes."""
        return self.state.round, [node.id for node in self.state.world]

    def after(self, *events: Event, at: float) -> Self:
        """Events happen at one moment, or only time passes."""
        state = self.state
        for event in events or (Tick(),):
            state = apply(state, event, at)
        return replace(self, state=state)

    def join(self, *numbers: int, at: float, new: bool = False, **changes: Any) -> Self:
        """Nodes join, after the current round or as new ones."""
        own = {"after_round": 0 if new else self.state.round, "settings": self.settings}
        return self.after(*(joining(number, **{**own, **changes}) for number in numbers), at=at)

    def fail(self, number: int, message: str = "", *, at: float, exit_code: int = 1) -> Self:
        now = self.state.round
        failure = failure_of(number, round=now, exit_code=exit_code, time=at, message=message)
        report = ReportFailures(node_id=number, incarnation="a", round=now, failures=(failure,))
        return self.after(report, at=at)

    def leave(self, *numbers: int, outcome: Outcome, at: float) -> Self:
        reason = "SIGTERM" if outcome is Outcome.DRAINED else "done"
        own: dict[str, Any] = {"incarnation": "a", "round": 1, "outcome": outcome, "reason": reason}
        return self.after(*(Leave(node_id=number, **own) for number in numbers), at=at)

    def lose(self, number: int, *, at: float) -> Self:
        return self.after(NodeLost(node_id=number, incarnation="a"), at=at)

    def drain(self, number: int, *, at: float) -> Self:
        own: dict[str, Any] = {"incarnation": "a", "round": 1, "seconds": 60.0, "reason": "SIGTERM"}
        return self.after(Drain(node_id=number, **own), at=at)

    def hold(self, number: int, reason: str | None = "its fan", *, at: float) -> Self:
        return self.after(NodeHeld(number, reason), at=at)

    def save(self, *, at: float) -> Self:
        """All ranks have saved, and wait."""
        return self.after(RanksWait(self.state.round), Tick(), at=at)

    def shown(self, number: int, *, at: float, agent: str = "a") -> Content:
        """What a node that runs processes of round 1 has to do."""
        sender = Sender(node_id=number, incarnation=agent, round=1)
        return content_of(self.after(at=at).state, sender)

    def status(self, *, at: float) -> Status:
        return status_of(self.state, Liveness.after_start(self.state, at), at)

    @property
    def history(self) -> str:
        return "\n".join(line.text for line in self.state.history)

    def beat(
        self, live: Liveness, ranks: dict[int, RankProgress], *, at: float, node: int = 0
    ) -> Self:
        """A node is heard, and time passes."""
        on_message(live, "a", at)
        beat = Beat(node_id=node, incarnation="a", round=1, ranks=ranks)
        job = self.after(*on_beat(live, self.state, beat, at), at=at)
        return job.after(*events_of_time(live, job.state, at), at=at)
