"""Which nodes form the world of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import pytest

from remesh.elastic import rendezvous
from remesh.elastic.rendezvous import (
    Change,
    Node,
    Outcome,
    Rendezvous,
    Settings,
    listed,
    restart_reason,
    start,
    tick,
)

Event = Callable[..., Rendezvous]
"""A function of a rendezvous and, by keyword, the time."""


def node(number: int, incarnation: str = "a") -> Node:
    return Node(
        id=number,
        incarnation=f"{number}{incarnation}",
        name=f"host-{number}",
        address="127.0.0.1",
        num_processes=2,
    )


def joined(number: int, after_round: int = 0, incarnation: str = "a") -> Event:
    return partial(rendezvous.join, node=node(number, incarnation), after_round=after_round)


def lost(number: int) -> Event:
    return partial(rendezvous.remove, node_id=number, incarnation=f"{number}a")


def left(number: int, outcome: Outcome) -> Event:
    return partial(rendezvous.leave, node_id=number, incarnation=f"{number}a", outcome=outcome)


def excluded(number: int) -> Event:
    return partial(rendezvous.exclude, node=node(number), reason="its memory fails")


def step(state: Rendezvous, event: Event, now: float) -> Rendezvous:
    return tick(event(state, now=now), now)


def play(settings: Settings, *events: tuple[float, Event]) -> Rendezvous:
    state = start(settings, 0.0)
    for now, event in events:
        state = step(state, event, now)
    return state


def world_of(state: Rendezvous) -> list[int]:
    return [member.id for member in state.world]


def running(settings: Settings, numbers: Iterable[int]) -> Rendezvous:
    state = play(settings, *((1.0, joined(number)) for number in numbers))
    return step(state, tick, 1.0 + settings.last_call)


class TestForming:
    def test_ranks_follow_node_ids_not_arrival(self) -> None:
        state = play(
            Settings(min_nodes=3, max_nodes=3), (1, joined(7)), (2, joined(3)), (3, joined(5))
        )
        assert (state.round, world_of(state)) == (1, [3, 5, 7])

    def test_below_the_maximum_it_waits_for_the_last_call(self) -> None:
        settings = Settings(min_nodes=2, max_nodes=4, last_call=5)
        state = play(settings, (1, joined(0)), (3, joined(1)), (7.9, tick))
        assert state.round == 0
        assert world_of(step(state, tick, 8.0)) == [0, 1]

    @pytest.mark.parametrize("last", [tick, joined(3)])
    def test_the_unit_trims_on_every_path(self, last: Event) -> None:
        settings = Settings(min_nodes=2, max_nodes=5, node_unit=2, last_call=5)
        state = play(settings, *((1, joined(n)) for n in (4, 2, 0)), (6, last), (12, tick))
        size = 2 if last is tick else 4
        assert world_of(state) == [0, 2, 3, 4][:size] if size == 4 else [0, 2]

    def test_the_world_is_clamped_and_the_rest_waits(self) -> None:
        state = running(Settings(min_nodes=1, max_nodes=2, last_call=5), [0, 1])
        state = step(state, joined(2), 9)
        assert world_of(state) == [0, 1]
        assert sorted(state.ready) == [2]
        assert restart_reason(state, 0, 1) is None

    def test_too_few_nodes_for_too_long_end_the_job(self) -> None:
        settings = Settings(min_nodes=2, max_nodes=2, join_timeout=60)
        state = play(settings, (1, joined(0)), (59, tick))
        assert state.outcome is None
        state = step(state, tick, 60)
        assert state.outcome is Outcome.FAILED
        assert "1 nodes have joined within 60 s, at least 2" in state.reason

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"min_nodes": 3, "max_nodes": 2}, "not a range"),
            ({"min_nodes": 3, "max_nodes": 3, "node_unit": 2}, "no multiple of 2 lies in 3:3"),
            ({"min_nodes": 1, "max_nodes": 1, "node_unit": 0}, "unit must be at least 1"),
        ],
    )
    def test_settings_that_nothing_satisfies(self, wrong: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Settings(**wrong)


class TestChanging:
    settings = Settings(min_nodes=2, max_nodes=4, node_unit=2, last_call=5)

    def test_a_lost_member_restarts_the_others_and_the_world_shrinks(self) -> None:
        state = running(self.settings, [0, 1, 2, 3])
        state = step(state, lost(1), 20)
        assert restart_reason(state, 0, 1) == (Change.LOST, "node 1 left or died")
        for number in (0, 2, 3):
            assert state.round == 1
            state = step(state, joined(number, 1), 21)
        # At once: node 1 is known to be dead, and no other is missing.
        assert (state.round, world_of(state), sorted(state.ready)) == (2, [0, 2], [3])

    @pytest.mark.parametrize(
        "event",
        [lost(2), left(2, Outcome.DRAINED), excluded(2)],
    )
    def test_nodes_that_are_known_to_be_gone_get_no_last_call(self, event: Event) -> None:
        state = step(running(Settings(min_nodes=1, max_nodes=4), [0, 1, 2]), event, 20)
        state = step(state, joined(0, 1), 21)
        assert state.round == 1  # node 1 is alive and has not joined
        state = step(state, joined(1, 1), 22)
        assert (state.round, world_of(state)) == (2, [0, 1])

    def test_members_that_have_finished_get_the_last_call(self) -> None:
        settings = Settings(min_nodes=1, max_nodes=4, last_call=5)
        state = step(running(settings, [0, 1, 2]), left(2, Outcome.SUCCEEDED), 20)
        state = step(step(state, lost(1), 21), joined(0, 1), 22)
        assert state.round == 1
        assert world_of(step(state, joined(2, 1), 23)) == [0, 2]
        assert world_of(step(state, tick, 27)) == [0]

    def test_growing_is_announced_and_can_wait(self) -> None:
        state = running(self.settings, [0, 1])
        state = step(state, joined(3), 20)
        assert restart_reason(state, 0, 1) is None  # three nodes are no larger world
        state = step(state, joined(2), 30)
        reason = restart_reason(state, 0, 1)
        assert reason is not None
        assert reason[0] is Change.GROW
        state = step(step(state, joined(0, 1), 40), joined(1, 1), 41)
        assert (state.round, world_of(state)) == (2, [0, 1, 2, 3])

    def test_all_back_after_a_failure_need_no_last_call(self) -> None:
        state = running(self.settings, [0, 1])
        state = step(state, joined(1, 1), 20)
        assert restart_reason(state, 0, 1) == (Change.RESTARTED, "node 1 stopped the processes")
        state = step(state, joined(0, 1), 20.5)
        assert (state.round, world_of(state)) == (2, [0, 1])

    def test_an_old_copy_of_a_join_changes_nothing(self) -> None:
        state = running(self.settings, [0, 1])
        assert step(state, joined(0), 30) == state

    def test_a_new_agent_takes_over_and_the_old_one_cannot_speak(self) -> None:
        state = running(self.settings, [0, 1])
        state = step(state, joined(1, 0, "b"), 20)
        assert restart_reason(state, 0, 1) is not None
        assert state.ready[1].incarnation == "1b"
        assert step(state, joined(1, 1), 21) == state
        assert step(state, left(1, Outcome.FAILED), 21) == state

    def test_who_was_declared_lost_and_comes_back_is_told(self) -> None:
        state = step(running(self.settings, [0, 1]), lost(1), 20)
        reason = restart_reason(state, 1, 1)
        assert reason is not None
        assert reason[0] is Change.STALE
        state = step(step(state, joined(1, 1), 21), joined(0, 1), 22)
        assert (state.round, world_of(state)) == (2, [0, 1])

    def test_a_finished_member_stops_growth_and_all_finished_end_the_job(self) -> None:
        state = running(self.settings, [0, 1])
        state = step(step(state, joined(2), 20), joined(3), 20)
        state = step(state, left(0, Outcome.SUCCEEDED), 21)
        assert restart_reason(state, 1, 1) is None
        state = step(state, left(1, Outcome.SUCCEEDED), 22)
        assert state.outcome is Outcome.SUCCEEDED

    def test_an_excluded_node_is_out_until_its_agent_is_replaced(self) -> None:
        state = step(running(self.settings, [0, 1]), excluded(1), 20)
        assert step(state, joined(1, 1), 21).ready == {}
        assert 1 in step(state, joined(1, 0, "b"), 22).ready


@pytest.mark.parametrize(
    ("finished", "leaving"), [((), [3, 1]), ((0,), [])], ids=["whole", "ending"]
)
def test_as_many_held_members_leave_as_the_others_can_do_without(
    finished: tuple[int, ...], leaving: list[int]
) -> None:
    state = running(Settings(min_nodes=2, max_nodes=4), range(4))
    for number in (3, 1, 0):
        state = rendezvous.hold(state, number, "its fan", 10.0)
    for number in finished:
        state = step(state, left(number, Outcome.SUCCEEDED), 11.0)
    assert rendezvous.leaving(state) == leaving


def test_a_state_survives_its_encoding() -> None:
    state = running(Settings(min_nodes=1, max_nodes=4), [0, 3])
    state = step(step(state, joined(5), 30), excluded(3), 31)
    assert msgspec.json.decode(msgspec.json.encode(state), type=Rendezvous) == state


def test_many_numbers_are_listed_as_ranges() -> None:
    assert listed([3, 1, 2]) == "1, 2, 3"
    assert listed(range(10_000)) == "0 to 9999"
    assert listed([*range(50), 60, *range(70, 80)]) == "0 to 49, 60, 70 to 79"
    text = listed(range(0, 1000, 2))
    assert text.startswith("0, 2, 4, ")
    assert text.endswith(", 38 and 480 more")
