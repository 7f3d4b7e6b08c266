"""Which nodes form the world of a round."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from remesh.elastic.job import larger_size, leaving, stop_reason
from remesh.elastic.nodes import Outcome, Settings, listed
from tests.elastic.played_job import SETTINGS, PlayedJob


def told(job: PlayedJob, number: int) -> str | None:
    """Why a node should stop the processes of round 1."""
    return stop_reason(job.state, number, 1)


class TestForming:
    def waiting(self, **settings: float) -> PlayedJob:
        return PlayedJob(settings=Settings(**settings))  # type: ignore[arg-type]

    def test_below_the_maximum_it_waits_for_the_last_call(self) -> None:
        job = self.waiting(min_nodes=2, max_nodes=4, last_call=5).join(0, at=1).join(1, at=3)
        assert job.after(at=7.9).world == (0, [])
        assert job.after(at=8.0).world == (1, [0, 1])

    def test_the_unit_trims_on_every_path(self) -> None:
        job = self.waiting(min_nodes=2, max_nodes=5, node_unit=2, last_call=5)
        job = job.join(4, 2, 0, at=1)
        assert job.after(at=12).world == (1, [0, 2])
        assert job.join(3, at=6).after(at=12).world == (1, [0, 2, 3, 4])

    def test_the_world_is_clamped_and_the_rest_waits(self) -> None:
        job = self.waiting(min_nodes=1, max_nodes=2).join(0, 1, at=1).join(2, at=9)
        assert job.world == (1, [0, 1])
        assert sorted(job.state.ready) == [2]
        assert told(job, 0) is None

    def test_too_few_nodes_for_too_long_end_the_job(self) -> None:
        job = self.waiting(min_nodes=2, max_nodes=2, join_timeout=60).join(0, at=1)
        assert job.after(at=60).state.outcome is None
        ended = job.after(at=61).state
        assert ended.outcome is Outcome.FAILED
        assert "1 nodes have joined within 60 s, at least 2" in ended.reason

    def test_too_few_nodes_for_too_long_after_a_loss_end_the_job(self) -> None:
        settings = msgspec.structs.replace(SETTINGS, join_timeout=60)
        job = PlayedJob.running(settings=settings).lose(1, at=110).join(0, at=120)
        assert job.after(at=179).state.outcome is None
        assert job.after(at=180).state.outcome is Outcome.FAILED

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"min_nodes": 3, "max_nodes": 2}, "not a range"),
            ({"min_nodes": 3, "max_nodes": 3, "node_unit": 2}, "no multiple of 2 lies in 3:3"),
            ({"min_nodes": 1, "max_nodes": 1, "node_unit": 0}, "unit must be at least 1"),
            ({"min_nodes": 1, "max_nodes": 1, "last_call": -1}, "cannot be negative"),
            ({"min_nodes": 1, "max_nodes": 1, "join_timeout": -1}, "cannot be negative"),
        ],
    )
    def test_settings_that_nothing_satisfies(self, wrong: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Settings(**wrong)


IN_TWOS = Settings(min_nodes=2, max_nodes=4, node_unit=2)
ANY = Settings(min_nodes=1, max_nodes=4)


class TestChanging:
    def test_a_lost_member_restarts_the_others_and_the_world_shrinks(self) -> None:
        job = PlayedJob.running(4, settings=IN_TWOS).lose(1, at=120)
        assert told(job, 0) == "node 1 left or died"
        for number in (0, 2, 3):
            assert job.state.round == 1
            job = job.join(number, at=121)
        # At once: node 1 is known to be dead, and no other is missing.
        assert (job.world, sorted(job.state.ready)) == ((2, [0, 2]), [3])

    @pytest.mark.parametrize(
        "gone",
        [
            pytest.param(lambda job: job.lose(2, at=120), id="lost"),
            pytest.param(lambda job: job.leave(2, outcome=Outcome.DRAINED, at=120), id="drained"),
            pytest.param(lambda job: job.fail(2, exit_code=201, at=120), id="excluded"),
        ],
    )
    def test_nodes_that_are_known_to_be_gone_get_no_last_call(
        self, gone: Callable[[PlayedJob], PlayedJob]
    ) -> None:
        job = gone(PlayedJob.running(3, settings=ANY)).join(0, at=121)
        assert job.state.round == 1  # node 1 is alive and has not joined
        assert job.join(1, at=122).world == (2, [0, 1])

    def test_members_that_have_finished_get_the_last_call(self) -> None:
        job = PlayedJob.running(3, settings=ANY).leave(2, outcome=Outcome.SUCCEEDED, at=120)
        job = job.lose(1, at=121).join(0, at=122)
        assert job.state.round == 1
        assert job.join(2, at=123).world == (2, [0, 2])
        assert job.after(at=127).world == (2, [0])

    def test_growing_is_announced_and_can_wait(self) -> None:
        job = PlayedJob.running(settings=IN_TWOS).join(3, at=120, new=True)
        assert larger_size(job.state) is None  # three nodes are none
        job = job.join(2, at=130, new=True)
        assert (larger_size(job.state), told(job, 0)) == (4, None)
        assert job.join(0, at=140).join(1, at=141).world == (2, [0, 1, 2, 3])

    def test_a_new_agent_takes_over_and_the_old_one_cannot_speak(self) -> None:
        job = PlayedJob.running(settings=IN_TWOS).join(1, at=120, new=True, agent="b")
        assert told(job, 0) is not None
        assert job.state.ready[1].incarnation == "b"
        assert job.join(1, at=121).state == job.state
        assert job.leave(1, outcome=Outcome.FAILED, at=121).state == job.state

    def test_a_finished_member_stops_growth_and_all_finished_end_the_job(self) -> None:
        job = PlayedJob.running(settings=IN_TWOS).join(2, 3, at=120, new=True)
        job = job.leave(0, outcome=Outcome.SUCCEEDED, at=121)
        assert told(job, 1) is None
        ended = job.leave(1, outcome=Outcome.SUCCEEDED, at=122)
        assert ended.state.outcome is Outcome.SUCCEEDED

    def test_an_excluded_node_is_out_until_its_agent_is_replaced(self) -> None:
        job = PlayedJob.running(settings=IN_TWOS).fail(1, exit_code=201, at=120)
        assert job.join(1, at=121).state.ready == {}
        assert 1 in job.join(1, at=122, new=True, agent="b").state.ready


@pytest.mark.parametrize(
    ("held", "finished", "left"),
    [((3, 1), (), [3, 1]), ((3, 1), (0,), []), ((3, 1, 0), (), [])],
    ids=["whole", "ending", "too many"],
)
def test_held_members_leave_if_the_others_can_do_without(
    held: tuple[int, ...], finished: tuple[int, ...], left: list[int]
) -> None:
    job = PlayedJob.running(4, settings=Settings(min_nodes=2, max_nodes=4))
    job = job.leave(*finished, outcome=Outcome.SUCCEEDED, at=110)
    for number in held:
        job = job.hold(number, at=111)
    assert leaving(job.state) == left


def test_many_numbers_are_listed_as_ranges() -> None:
    assert listed([3, 1, 2]) == "1, 2, 3"
    assert listed(range(10_000)) == "0 to 9999"
    assert listed([*range(50), 60, *range(70, 80)]) == "0 to 49, 60, 70 to 79"
    text = listed(range(0, 1000, 2))
    assert text.startswith("0, 2, 4, ")
    assert text.endswith(", 38 and 480 more")
