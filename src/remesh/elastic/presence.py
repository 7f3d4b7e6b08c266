"""Which agents have died, by their connections: a state machine without sockets and clock.

When a process dies, its machine closes its connections at once, long before its silence is
conspicuous. So an agent whose last connection was closed from its side is *suspected*. It is
confirmed dead if it says nothing on another connection until its next heartbeat is overdue: an
agent that lives connects again by then, whatever broke the connection. An agent never closes its
last connection while it lives (`client`). If processes of its world have lost a peer, nothing is
waited for: the world is broken, and the suspected agent is where.

No suspicion follows where the master itself closes connections, to make room or because they were
idle, nor when it begins anew: then it knows no connection of any agent. A machine that dies closes
nothing, and is found by its silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CONFIRM_SECONDS = 1.0
"""How late the heartbeat of a suspected agent may be: it has to connect anew, on a busy machine."""
BEAT_SECONDS = 1.0
"""Time between two heartbeats of an agent that has not said it."""
FORGET_SECONDS = 3600.0


@dataclass(slots=True)
class _Agent:
    """An agent."""

    open: set[int]  # its open connections
    heard: float  # when it said something last
    pause: float = BEAT_SECONDS  # seconds, at most, until its next heartbeat
    suspected: float | None = None
    """Since when it has no connection any more; None if that means nothing."""


@dataclass(slots=True)
class Presence:
    """The agents that have sent something, by incarnation, and their connections, by number."""

    _agents: dict[str, _Agent] = field(default_factory=dict)
    _suspects: set[str] = field(default_factory=set)
    _spoke: dict[int, set[str]] = field(default_factory=dict)

    def hear(
        self, connection: int, incarnation: str, now: float, pause: float | None = None
    ) -> None:
        """A request of an agent has come."""
        agent = self._agents.get(incarnation)
        if agent is None:
            agent = self._agents[incarnation] = _Agent(set(), now)
        if connection not in agent.open:
            agent.open.add(connection)
            self._spoke.setdefault(connection, set()).add(incarnation)
            self._suspects.discard(incarnation)
        agent.heard, agent.suspected = now, None
        agent.pause = agent.pause if pause is None else pause

    def close(self, connection: int, now: float, *, by_peer: bool) -> None:
        """A connection was closed."""
        for incarnation in self._spoke.pop(connection, ()):
            agent = self._agents[incarnation]
            agent.open.discard(connection)
            if not agent.open:
                agent.suspected = now if by_peer else None
                if by_peer:
                    self._suspects.add(incarnation)

    def is_dead(self, incarnation: str, now: float, *, lost_peer: bool = False) -> bool:
        """True if an agent is confirmed dead."""
        agent = self._agents.get(incarnation)
        if agent is None or agent.suspected is None:
            return False
        due = max(agent.suspected, agent.heard + agent.pause) + CONFIRM_SECONDS
        return lost_peer or now > due

    def finds_dead(self, now: float, *, lost_peer: bool) -> bool:
        """True if agents are confirmed dead since this was asked last."""
        dead = {each for each in self._suspects if self.is_dead(each, now, lost_peer=lost_peer)}
        self._suspects -= dead
        return bool(dead)

    def postpone(self, seconds: float) -> None:
        """Do not count seconds in which the master was stopped and received nothing."""
        for agent in self._agents.values():
            agent.heard += seconds
            if agent.suspected is not None:
                agent.suspected += seconds

    def forget(self, now: float) -> None:
        """Forget agents that are gone for long; their incarnations never come again."""
        old = [
            incarnation
            for incarnation, agent in self._agents.items()
            if not agent.open and now - agent.heard > FORGET_SECONDS
        ]
        for incarnation in old:
            del self._agents[incarnation]
