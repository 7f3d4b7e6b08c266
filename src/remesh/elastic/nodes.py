"""Which nodes form the world of a round: a pure state machine.

Every agent *joins* before it starts processes, and again after each time they have stopped. A node
that has joined is *ready*. When enough are ready, they become the *world* of the next round:
ordered by node id, clamped to `max_nodes`, trimmed to a multiple of `node_unit`. The other nodes
stay ready, and restart nothing, until a larger world is possible.

Members of the world are *active* from its beginning until they join again, finish, leave or are
lost. A new world is formed only when no member is active any more; until then `restart_reason`
tells the active ones that they should stop, and why.

A round begins at once if nothing is gained by waiting: `max_nodes` are ready, or every member of
the last world is ready or known to be gone. Otherwise it waits until nothing has changed for
`last_call` seconds.

Messages may be lost, repeated and reordered. Joining says after which round it happens, so an old
copy of it changes nothing; and it carries the agent's incarnation, so messages of an agent that was
replaced do not count for its successor.

There is a function for each event: `join`, `leave`, `remove` (a lost node), `break_world`,
`exclude`, `hold`, `end` and `tick`. Each takes the rendezvous and, where it matters, the time, and
returns the next one. What follows, such as a new world, follows at the next `tick`. The times are
of a clock that never jumps (`master.SteadyClock`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import TypeVar

import msgspec

V = TypeVar("V")

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


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a job, and the world that they form."""

    settings: Settings = Settings(min_nodes=1, max_nodes=1)
    """Sizes and time limits: those of the first node that joins."""
    round: int = 0  # number of the last world that was formed; 0 before the first
    world: tuple[Node, ...] = ()  # its members, in the order of their ranks
    first_ranks: tuple[int, ...] = ()  # the rank of the first process of each
    active: dict[int, None] = {}  # ids of members that are still in it
    finished: frozenset[int] = frozenset()  # ids of members that succeeded
    ready: dict[int, Node] = {}  # nodes that have joined for the next round, by id
    excluded: dict[int, tuple[str, str]] = {}
    """Incarnation and reason of nodes that are not to be used, by id."""
    held: dict[int, str] = {}
    """Why an operator has excluded nodes, by id: they wait, also if their agents start anew."""
    newest: dict[int, str] = {}  # the incarnation that joined last, by id
    replaced: frozenset[str] = frozenset()
    """Incarnations whose node id another agent has taken over."""
    changed_at: float = 0.0  # when the set of ready nodes changed last
    without_world_since: float | None = None  # since when no member is active; None while one is
    broken: str | None = None
    """Why the members of the world should stop and join again; None while it is whole."""
    hangs: bool = False  # whether that is because it hangs
    outcome: Outcome | None = None  # how the job ended; None while it runs
    reason: str = ""  # why it ended so

    @property
    def num_ranks(self) -> int:
        """Ranks of the last world."""
        return self.first_ranks[-1] + self.world[-1].num_processes if self.world else 0

    @property
    def usable(self) -> dict[int, Node]:
        """The nodes that are ready and not held."""
        if not self.held:
            return self.ready
        return {number: node for number, node in self.ready.items() if number not in self.held}

    def place(self, node_id: int) -> int | None:
        """The place of a node in the last world; None if it was not in it."""
        if node_id < len(self.world) and self.world[node_id].id == node_id:
            return node_id  # most often ids are ranks
        place = bisect_left(self.world, node_id, key=lambda node: node.id)
        return place if place < len(self.world) and self.world[place].id == node_id else None

    def member(self, node_id: int) -> Node | None:
        """The member of the last world that has this id."""
        place = self.place(node_id)
        return None if place is None else self.world[place]

    def known(self, node_id: int) -> Node | None:
        """The newest agent that spoke for this id and has not gone."""
        if node_id in self.ready:
            return self.ready[node_id]
        return self.member(node_id) if node_id in self.active else None


def start(settings: Settings, now: float) -> Rendezvous:
    """A job that waits for its first nodes."""
    return Rendezvous(settings=settings, changed_at=now, without_world_since=now)


def join(state: Rendezvous, node: Node, after_round: int, now: float) -> Rendezvous:
    """An agent is ready for the round after `after_round`, the last that it was in (or 0)."""
    if node.incarnation in state.replaced or exclusion_of(state, node) is not None:
        return state
    member = state.member(node.id)
    in_world = member is not None and member.incarnation == node.incarnation
    if in_world and node.id in state.active and after_round < state.round:
        return state  # a late copy of the message that led to this world
    if after_round > state.round:
        # The master has forgotten rounds. Their numbers must not come again.
        state = msgspec.structs.replace(state, round=after_round)
    newest = state.newest.get(node.id, node.incarnation)
    if newest != node.incarnation:
        state = msgspec.structs.replace(state, replaced=state.replaced | {newest})
    if state.newest.get(node.id) != node.incarnation:
        state = msgspec.structs.replace(state, newest={**state.newest, node.id: node.incarnation})
    if state.ready.get(node.id) == node:
        return state
    return msgspec.structs.replace(
        state,
        ready={**state.ready, node.id: node},
        active=_without(state.active, node.id),
        excluded=_without(state.excluded, node.id),
        changed_at=now,
    )


def leave(
    state: Rendezvous, node_id: int, incarnation: str, outcome: Outcome, now: float
) -> Rendezvous:
    """An agent leaves, and says how its processes ended."""
    member = state.member(node_id)
    was_active = (
        member is not None and member.incarnation == incarnation and node_id in state.active
    )
    state = remove(state, node_id, incarnation, now)
    if not was_active or outcome is not Outcome.SUCCEEDED:
        return state
    finished = state.finished | {node_id}
    state = msgspec.structs.replace(state, finished=finished)
    if finished == {node.id for node in state.world}:
        return end(state, Outcome.SUCCEEDED, "the processes of all nodes succeeded")
    return state


def remove(state: Rendezvous, node_id: int, incarnation: str, now: float) -> Rendezvous:
    """No message of a node has come for too long, or it is known to be dead."""
    known = state.known(node_id)
    if known is None or known.incarnation != incarnation:
        return state
    return msgspec.structs.replace(
        state,
        ready=_without(state.ready, node_id),
        active=_without(state.active, node_id),
        changed_at=now,
    )


def exclude(state: Rendezvous, node: Node, reason: str, now: float) -> Rendezvous:
    """A node is not to be used, for as long as its agent is the same."""
    excluded = {**state.excluded, node.id: (node.incarnation, reason)}
    new = msgspec.structs.replace(state, excluded=excluded)
    return remove(new, node.id, node.incarnation, now)


def hold(state: Rendezvous, node_id: int, reason: str | None, now: float) -> Rendezvous:
    """A node is held from the next world on, for a reason; without one, it may be used again."""
    held = _without(state.held, node_id)
    if reason is not None:
        held = {**held, node_id: reason}
    return msgspec.structs.replace(state, held=held, changed_at=now)


def leaving(state: Rendezvous) -> list[int]:
    """The members that are held, if the others can form a world without them.

    None of a world that is broken, or is ending: members that have finished start no other one.
    """
    if state.broken is not None or state.finished or state.outcome is not None:
        return []
    held = [node_id for node_id in state.held if node_id in state.active]
    return held if fits_without(state, held) else []


def fits_without(state: Rendezvous, node_ids: Collection[int]) -> bool:
    """True if the nodes that are there form a world without some, and without those that wait."""
    left = (state.active.keys() | state.usable.keys()) - set(node_ids)
    return bool(state.settings.fitting(len(left)))


def break_world(state: Rendezvous, reason: str, *, hangs: bool = False) -> Rendezvous:
    """The members of the world should stop and join again."""
    return msgspec.structs.replace(state, broken=reason, hangs=hangs)


def end(state: Rendezvous, outcome: Outcome, reason: str) -> Rendezvous:
    """The job has ended, whatever its nodes do."""
    if state.outcome is not None:
        return state
    return msgspec.structs.replace(state, outcome=outcome, reason=reason)


def tick(state: Rendezvous, now: float) -> Rendezvous:
    """Time has passed."""
    if state.outcome is not None:
        return state
    return _form_world(_note_break(_note_absence(state, now)), now)


def _without(items: dict[int, V], node_id: int) -> dict[int, V]:
    if node_id not in items:
        return items
    left = items.copy()  # several times as fast as a comprehension, for each node that joins
    del left[node_id]
    return left


def _note_absence(state: Rendezvous, now: float) -> Rendezvous:
    """Keep `without_world_since` in step with `active`."""
    if state.active:
        since = None
    else:
        since = now if state.without_world_since is None else state.without_world_since
    if since == state.without_world_since:
        return state
    return msgspec.structs.replace(state, without_world_since=since)


def _form_world(state: Rendezvous, now: float) -> Rendezvous:
    if state.active:
        return state
    settings = state.settings
    candidates = state.usable
    size = settings.fitting(len(candidates))
    since = state.without_world_since
    if not size:
        if since is not None and now - since >= settings.join_timeout:
            reason = (
                f"{len(candidates)} nodes have joined within {settings.join_timeout:g} s, "
                f"at least {settings.min_nodes} in multiples of {settings.node_unit} are needed"
            )
            return end(state, Outcome.FAILED, reason)
        return state
    cannot_grow = size == settings.fitting(settings.max_nodes)
    # No member is active here: one that is neither ready nor finished has left or is lost. Those
    # that have finished are alive and will join.
    all_back = bool(state.world) and state.finished <= state.ready.keys()
    if not (cannot_grow or all_back or now - state.changed_at >= settings.last_call):
        return state
    chosen = sorted(candidates)[:size]
    rest = sorted(state.ready.keys() - set(chosen))
    world = tuple(state.ready[node_id] for node_id in chosen)
    counts = (node.num_processes for node in world[:-1])
    return msgspec.structs.replace(
        state,
        round=state.round + 1,
        world=world,
        first_ranks=tuple(itertools.accumulate(counts, initial=0)),
        active=dict.fromkeys(chosen),
        finished=frozenset(),
        ready={node_id: state.ready[node_id] for node_id in rest},
        without_world_since=None,
        broken=None,
        hangs=False,
    )


def exclusion_of(state: Rendezvous, node: Node) -> str | None:
    """Why a node is not used; None if it may be used. It holds for its agent only."""
    incarnation, reason = state.excluded.get(node.id, ("", ""))
    return reason if incarnation == node.incarnation else None


def restart_reason(state: Rendezvous, node_id: int, round_of_node: int) -> str | None:
    """Why a node that runs processes in a round should stop them; None if it should go on.

    A world that is whole can go on, though it could be larger (`larger_size`). Nodes that have
    finished are asked back when others have to start again: a job ends together.
    """
    if state.outcome is not None:
        return None
    if round_of_node != state.round or not (node_id in state.active or node_id in state.finished):
        return f"round {round_of_node} is over for node {node_id}"
    return state.broken


def larger_size(state: Rendezvous) -> int | None:
    """How large the world could be with the nodes that are ready; None if that is no larger."""
    if state.finished or state.broken is not None or not state.usable:
        return None
    size = state.settings.fitting(len(state.active) + len(state.usable))
    return size if size > len(state.world) else None


def _note_break(state: Rendezvous) -> Rendezvous:
    """Note why the world is no longer whole, once: it is asked for with every heartbeat."""
    # No member is both active and finished.
    if state.broken is not None or len(state.active) + len(state.finished) == len(state.world):
        return state
    gone = [
        node.id
        for node in state.world
        if node.id not in state.active and node.id not in state.finished
    ]
    lost = [node_id for node_id in gone if node_id not in state.ready]
    if lost:
        return break_world(state, f"{listed_nodes(lost)} left or died")
    return break_world(state, f"{listed_nodes(gone)} stopped the processes")


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
