"""What the master makes of what goes wrong, and when: the job's machine with its clock."""

from __future__ import annotations

import msgspec
import pytest

from remesh.elastic.job import (
    HangDetected,
    JobState,
    NodeLost,
    StacksCollected,
    Tick,
    apply,
    charges_of,
)
from remesh.elastic.liveness import Liveness, events_of_time, long_pause, on_beat, on_message
from remesh.elastic.metrics import render_metrics
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import Beat, Drain, Leave, ReportTest, TestResult
from remesh.elastic.rendezvous import Change, Outcome
from remesh.elastic.status import status_of
from tests.elastic.test_job import COLLATERAL, POLICY, fail, join, joining, node, run


def charged(state: JobState, now: float = 1000.0) -> dict[int, int]:
    counts = {number: charges_of(state, number, now).count for number in state.charges}
    return {number: count for number, count in counts.items() if count}


def history(state: JobState) -> str:
    return "\n".join(line.text for line in state.history)


class TestCharges:
    def test_each_of_two_nodes_that_fail_at_once_is_charged(self) -> None:
        state = fail(fail(run(num_nodes=4), 0, 110.0), 2, 110.2)
        assert charged(state) == {0: 1, 2: 1}

    def test_nodes_whose_processes_fail_of_it_are_not(self) -> None:
        state = run(num_nodes=4)
        for number, message in ((1, COLLATERAL), (0, ""), (3, COLLATERAL)):
            state = fail(state, number, 110.0, message)
        assert charged(state) == {0: 1}

    def test_a_node_that_is_lost_costs_none_a_restart(self) -> None:
        state = apply(run(num_nodes=4), NodeLost(node_id=1, incarnation="a"), 120.0)
        for number in (0, 2, 3):
            state = fail(state, number, 121.0, COLLATERAL)
        state = join(state, 0, 2, 3, now=122.0)
        assert charged(state) == {}
        assert sorted(state.rendezvous.active) == [0, 2]  # in multiples of two

    def test_what_looks_like_the_fault_of_others_is_charged_if_there_is_none(self) -> None:
        state = run(num_nodes=4, max_restarts=1)
        for number in (2, 0, 1, 3):  # a server refuses the connections of all
            state = fail(state, number, 110.0, COLLATERAL)
        assert charged(state) == {}  # a node that is lost may be noticed later
        state = join(state, 0, 1, 2, 3, now=111.0)
        assert charged(state) == {2: 1}
        assert "no other process has failed by itself; 1 of 1 restarts charged" in history(state)
        state = join(fail(state, 2, 120.0, COLLATERAL), 0, 1, 2, 3, now=121.0)
        assert state.rendezvous.outcome is Outcome.FAILED
        assert "by itself; no restart left: 1 of 1 restarts" in state.rendezvous.reason

    def test_a_process_that_is_stopped_from_outside_is_charged_too(self) -> None:
        state = join(fail(run(num_nodes=2), 1, 110.0, exit_code=-15), 0, 1, now=111.0)
        assert charged(state) == {1: 1}

    @pytest.mark.parametrize("cause", ["own", "lost", "drained", "hang", "growth"])
    def test_what_others_explain_is_not(self, cause: str) -> None:
        state = run(num_nodes=2)
        if cause == "hang":
            state = apply(state, HangDetected(1, "no step"), 109.0)
            state = apply(state, StacksCollected(1), 109.0)
        if cause == "growth":
            for number in (2, 3):
                state = apply(state, joining(node(number)), 101.0)
            state = apply(state, Tick(), 109.0)  # no checkpoint is waited for any longer
        state = fail(state, 0, 110.0, COLLATERAL)
        match cause:
            case "own":
                state = fail(state, 1, 110.5)
            case "lost":
                state = apply(state, NodeLost(node_id=1, incarnation="a"), 120.0)
                state = apply(state, joining(node(2)), 121.0)
            case "drained":
                leave = Leave(
                    node_id=1, incarnation="a", round=1, outcome=Outcome.DRAINED, reason="SIGTERM"
                )
                state = apply(state, leave, 110.5)
                state = apply(state, joining(node(2)), 121.0)
        joined = (0,) if cause in ("lost", "drained") else (0, 1)
        state = apply(join(state, *joined, now=130.0), Tick(), 140.0)
        assert state.rendezvous.round == 2
        assert charged(state) == ({1: 1} if cause == "own" else {})

    def test_an_agent_that_was_started_again_explains_it_too(self) -> None:
        state = fail(run(num_nodes=2), 0, 110.0, COLLATERAL)
        assert state.suspect is not None
        again = msgspec.structs.replace(node(1), incarnation="b")
        assert apply(state, joining(again), 110.5).suspect is None

    def test_each_failure_is_charged_until_the_restarts_are_used_up(self) -> None:
        state = run(num_nodes=2, max_restarts=1)
        state = join(fail(state, 1, 110.0), 0, 1, now=111.0)
        state = fail(state, 1, 120.0)
        assert state.rendezvous.outcome is Outcome.FAILED
        assert "no restart left: 1 of 1 restarts charged to its node" in state.rendezvous.reason


def beat(live: Liveness, state: JobState, now: float, **ranks: RankProgress) -> JobState:
    """Both nodes are heard; the ranks of one say how far they are."""
    on_message(live, "a", now)
    request = Beat(
        node_id=0,
        incarnation="a",
        round=1,
        ranks={int(name[1:]): rank for name, rank in ranks.items()},
    )
    for event in on_beat(live, state, request, now):
        state = apply(state, event, now)
    for event in events_of_time(live, state, now):
        state = apply(state, event, now)
    return state


def test_a_job_that_makes_no_step_hangs_and_starts_again() -> None:
    state = run(msgspec.structs.replace(POLICY, hang_timeout=30.0), num_nodes=2)
    live = Liveness.after_start(state, 100.0)
    for now in (101.0, 102.0, 131.0):
        step = min(int(now), 102)
        state = beat(live, state, now, r0=RankProgress(step=step, time=step - now))
        assert state.hanging is None
    state = beat(live, state, 133.0, r0=RankProgress(step=102, time=-31.0))
    assert "the job hangs: no rank has finished a step for 31 s" in history(state)
    assert state.dump == 1  # stacks are asked for first
    assert state.rendezvous.broken is None
    state = beat(live, state, 200.0, r0=RankProgress(step=102, time=-98.0))
    reason = "the job hung: no rank has finished a step for 31 s"
    assert state.rendezvous.broken == (Change.HANG, reason)
    assert charged(state) == {}


def test_a_hang_ends_without_a_limit_that_somebody_gave() -> None:
    state = run(num_nodes=2)
    live = Liveness.after_start(state, 100.0)
    for now in (101.0, 102.0, 103.0):
        state = beat(live, state, now, r0=RankProgress(step=int(now), time=0.0))
    state = beat(live, state, 3702.0, r0=RankProgress(step=103, time=-3599.0))
    assert state.hanging is None
    state = beat(live, state, 3704.0, r0=RankProgress(step=103, time=-3601.0))
    assert state.hanging is not None


def test_a_pause_between_steps_is_seen() -> None:
    state = run(num_nodes=2)
    live = Liveness.after_start(state, 100.0)
    assert status_of(state, live, 100.0).step_age is None
    for now in (101.0, 102.0):
        state = beat(live, state, now, r0=RankProgress(step=int(now), time=0.0))
    assert long_pause(live, state, 160.0) == ""
    assert long_pause(live, state, 163.0) == "no rank has finished a step for 61 s"
    status = status_of(state, live, 163.0)
    assert status.step_age == 61.0
    metrics = render_metrics(status, 0, journal_failing=False).decode()
    assert "remesh_step_age_seconds 61.0" in metrics
    drain = Drain(node_id=0, incarnation="a", round=1, seconds=600.0, reason="SIGTERM")
    assert long_pause(live, apply(state, drain, 163.0), 170.0) == "", "the ranks wait to be saved"
    leave = [Leave(node_id=n, incarnation="a", round=1, outcome=Outcome.FAILED) for n in (0, 1)]
    for event in leave:
        state = apply(state, event, 164.0)
    assert long_pause(live, state, 170.0) == ""


def test_a_slow_rank_is_named_with_its_own_seconds() -> None:
    state = run(num_nodes=2)
    live = Liveness.after_start(state, 100.0)
    ranks = {
        f"r{rank}": RankProgress(step=7, time=0.0, step_seconds=seconds)
        for rank, seconds in enumerate((0.5, 0.5, 0.625, 2.0))
    }
    state = beat(live, state, 101.0, **ranks)
    status = status_of(state, live, 101.0)
    assert {rank.rank: rank.slow for rank in status.ranks if rank.slow} == {3: 2.0 / 0.5625}
    metrics = render_metrics(status, 0, journal_failing=False).decode()
    assert 'remesh_rank_step_seconds{rank="3"} 2.0' in metrics


def checked(num_nodes: int, *, exclude: bool) -> JobState:
    """A job whose nodes were checked before its first round; the last is ten times slower."""
    policy = msgspec.structs.replace(POLICY, check=True, exclude_stragglers=exclude)
    state = run(policy, num_nodes=num_nodes)
    while state.check is not None:
        number, test_round = state.check.number, len(state.check.results)
        for node_id in (node_id for group in state.check.groups for node_id in group):
            seconds = 10.0 if node_id == num_nodes - 1 else 1.0
            report = ReportTest(
                node_id=node_id,
                incarnation="a",
                round=1,
                check=number,
                test_round=test_round,
                result=TestResult(passed=True, broken=False, seconds=seconds),
            )
            state = apply(state, report, 101.0)
    return state


@pytest.mark.parametrize(
    ("num_nodes", "exclude", "excluded"), [(4, True, [3]), (4, False, []), (2, True, [])]
)
def test_a_slow_node_is_done_without_if_asked_for_and_enough_others_are_there(
    num_nodes: int, exclude: bool, excluded: list[int]
) -> None:
    state = checked(num_nodes, exclude=exclude)
    assert list(state.rendezvous.excluded) == excluded
    if num_nodes == 4:
        assert "node 3 is a straggler: its probe takes 10.0 times the median" in history(state)
