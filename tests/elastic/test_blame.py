"""What the master makes of what goes wrong, and when: the job's machine with its clock."""

from __future__ import annotations

import pytest

from remesh.elastic.job import HangDetected
from remesh.elastic.liveness import Liveness
from remesh.elastic.metrics import render_metrics
from remesh.elastic.nodes import Outcome
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import Stop
from remesh.elastic.status import status_of
from tests.elastic.played_job import COLLATERAL, PlayedJob


class TestCharges:
    def test_each_of_two_nodes_that_fail_at_once_is_charged(self) -> None:
        job = PlayedJob.running(4).fail(0, at=110.0).fail(2, at=110.2)
        assert job.state.charges == {0: 1, 2: 1}

    def test_what_looks_like_the_fault_of_others_is_charged_if_there_is_none(self) -> None:
        job = PlayedJob.running(4, max_restarts=1)
        for number in (2, 0, 1, 3):  # a server refuses the connections of all
            job = job.fail(number, COLLATERAL, at=110.0)
        assert job.state.charges == {}  # a node that is lost may be noticed later
        job = job.join(0, 1, 2, 3, at=111.0)
        assert job.state.charges == {2: 1}
        words = "no other process has failed by itself; 1 of 1 restarts charged"
        assert words in job.history
        job = job.fail(2, COLLATERAL, at=120.0).join(0, 1, 2, 3, at=121.0)
        assert job.state.outcome is Outcome.FAILED
        assert "by itself; no restart left: 1 of 1 restarts" in job.state.reason

    def test_a_process_that_is_stopped_from_outside_is_charged_too(self) -> None:
        job = PlayedJob.running().fail(1, at=110.0, exit_code=-15).join(0, 1, at=111.0)
        assert job.state.charges == {1: 1}

    @pytest.mark.parametrize("cause", ["own", "lost", "drained", "hang", "growth"])
    def test_what_others_explain_is_not(self, cause: str) -> None:
        job = PlayedJob.running()
        if cause == "hang":
            job = job.after(HangDetected(1, "no step"), at=109.0)
        if cause == "growth":  # no checkpoint is waited for any longer
            job = job.join(2, 3, at=101.0, new=True).after(at=109.0)
        job = job.fail(0, COLLATERAL, at=110.0)
        if cause == "own":
            job = job.fail(1, at=110.5)
        if cause == "lost":
            job = job.lose(1, at=120.0)
        if cause == "drained":
            job = job.leave(1, outcome=Outcome.DRAINED, at=110.5)
        if cause in ("lost", "drained"):
            job = job.join(2, at=121.0, new=True).join(0, at=130.0)
        else:
            job = job.join(0, 1, at=130.0)
        job = job.after(at=140.0)
        assert job.state.round == 2
        assert job.state.charges == ({1: 1} if cause == "own" else {})

    def test_an_agent_that_was_started_again_explains_it_too(self) -> None:
        job = PlayedJob.running().fail(0, COLLATERAL, at=110.0)
        assert job.state.suspect is not None
        assert job.join(1, at=110.5, agent="b", new=True).state.suspect is None


def test_a_job_that_makes_no_step_hangs_and_starts_again() -> None:
    job = PlayedJob.running(hang_timeout=30.0)
    live = Liveness.after_start(job.state, 100.0)
    for now in (101.0, 102.0, 131.0):
        step = min(int(now), 102)
        job = job.beat(live, {0: RankProgress(step=step, time=step - now)}, at=now)
        assert job.state.broken is None
    job = job.beat(live, {0: RankProgress(step=102, time=-31.0)}, at=133.0)
    assert "the job hangs: no rank has finished a step for 31 s" in job.history
    reason = "the job hung: no rank has finished a step for 31 s"
    assert job.shown(0, at=134.0) == Stop(1, reason, hangs=True)
    assert job.state.charges == {}


def test_a_slow_rank_is_named_with_its_own_seconds() -> None:
    job = PlayedJob.running()
    live = Liveness.after_start(job.state, 100.0)
    ranks = {
        rank: RankProgress(step=7, time=0.0, step_seconds=seconds)
        for rank, seconds in enumerate((0.5, 0.5, 0.625, 2.0))
    }
    status = status_of(job.beat(live, ranks, at=101.0).state, live, 101.5)
    assert {rank.rank: rank.slow for rank in status.ranks if rank.slow} == {3: 2.0 / 0.5625}
    assert {node.last_heard for node in status.nodes} == {0.5}
    metrics = render_metrics(status, 0, journal_failing=False).decode()
    assert 'remesh_rank_step_seconds{rank="3"} 2.0' in metrics
