"""The pure decisions: when to save, what to keep."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.catalog import CheckpointInfo, newest_of
from remesh.training.policies import (
    MAX_GAP,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    Note,
    combine,
    decide_retention,
    due_by_step,
    due_by_time,
    next_look,
)

# ---------------------------------------------------------------------------------------------
# When to save
# ---------------------------------------------------------------------------------------------


def test_steps_and_seconds() -> None:
    every = (EverySteps(4), EverySeconds(60), EverySteps(10))
    assert [step for step in range(1, 21) if due_by_step(every, step)] == [4, 8, 10, 12, 16, 20]
    assert due_by_step(every, 20) == "every 4 steps"
    # Steps need not be counted one by one, and may go back.
    calls = [1, 3, 9, 11, 13, 5, 6, 8]
    pairs = zip(calls, [None, *calls], strict=False)
    due = [step for step, before in pairs if due_by_step(every, step, before)]
    assert due == [9, 11, 13, 8]
    assert due_by_time(every, 59.9) == ""
    assert due_by_time(every, 60.0) == "every 60 s"
    assert due_by_step((), 4) == due_by_time((), 1e9) == ""


def test_policies_without_sense_are_refused() -> None:
    for wrong in (
        lambda: EverySteps(0),
        lambda: EverySeconds(0.0),
        lambda: EverySeconds(math.nan),
        lambda: KeepLast(0),
        lambda: KeepEvery(-1),
        lambda: KeepBest("loss", "lowest"),  # type: ignore[arg-type]
        lambda: KeepBest("loss", num_checkpoints=0),
    ):
        with pytest.raises(ValueError, match=r"must be (a |'min')"):
            wrong()


def test_one_note_suffices() -> None:
    quiet = combine([Note(next_look=7), Note(next_look=99)])
    assert (quiet.reason, quiet.stop, quiet.failed, quiet.next_look) == ("", False, False, 7)
    loud = combine([Note(), Note(reason="signal", stop=True), Note(failed=True, reason="b")])
    assert (loud.reason, loud.stop, loud.failed) == ("signal (rank 1)", True, True)
    assert combine([Note(reason="signal")]).reason == "signal"


def test_the_gap_between_looks_grows_to_a_second() -> None:
    def gaps(step_seconds: float, world_size: int = 2) -> list[int]:
        found, gap = [], 1
        for _ in range(12):
            gap = next_look(0, step_seconds, last_gap=gap, world_size=world_size)
            found.append(gap)
        return found

    assert gaps(0.1)[:6] == [2, 4, 8, 10, 10, 10]
    assert set(gaps(3.0)) == {1}
    assert gaps(1e-9)[-1] == MAX_GAP
    assert set(gaps(1e-9, world_size=1)) == {1}
    assert next_look(5, None, last_gap=8, world_size=2) == 6


# ---------------------------------------------------------------------------------------------
# What to keep
# ---------------------------------------------------------------------------------------------

RUNS = ("ours", "theirs", "")


@st.composite
def directories(draw: st.DrawFn) -> list[CheckpointInfo]:
    steps = draw(st.lists(st.integers(0, 30), unique=True, max_size=12))
    losses = st.one_of(st.none(), st.integers(0, 4).map(float))
    return [
        CheckpointInfo(
            name=f"step_{step:08d}",
            path=f"/run/step_{step:08d}",
            step=step,
            run=draw(st.sampled_from((*RUNS, "ours", "ours"))),
            metrics=draw(st.one_of(st.just({}), st.fixed_dictionaries({"loss": losses}))),
            is_pinned=draw(st.integers(0, 5)) == 0,
            in_use_until=draw(st.sampled_from((0.0, 0.0, 50.0, 150.0))),
            problem=draw(st.sampled_from(("", "", "", "flipped"))),
        )
        for step in steps
    ]


KEEPS = st.one_of(
    st.integers(1, 5).map(KeepLast),
    st.integers(1, 7).map(KeepEvery),
    st.builds(KeepBest, st.just("loss"), st.sampled_from(("min", "max")), st.integers(1, 3)),
)


@given(directories(), st.lists(KEEPS, max_size=3))
def test_nothing_that_must_stay_is_ever_removed(
    infos: list[CheckpointInfo], keep: list[KeepPolicy]
) -> None:
    decisions = decide_retention(infos, keep, run="ours", now=100.0)
    assert [decision.info for decision in decisions] == infos
    good = [info for info in infos if not info.problem]
    removed = [decision.info for decision in decisions if not decision.is_kept]
    for info in removed:
        assert keep
        assert info.run == "ours"
        assert not info.is_pinned
        assert info.in_use_until <= 100.0
        assert not info.problem
        assert info != newest_of(good)
        assert info != newest_of([one for one in good if one.run == "ours"])
    # Removing is finished after one pass: what is left stays.
    left = [info for info in infos if info not in removed]
    assert all(decision.is_kept for decision in decide_retention(left, keep, run="ours", now=100.0))


@given(directories(), st.lists(KEEPS, max_size=3), KEEPS)
def test_a_further_policy_only_keeps_more(
    infos: list[CheckpointInfo], keep: list[KeepPolicy], further: KeepPolicy
) -> None:
    def kept(policies: list[KeepPolicy]) -> set[str]:
        decisions = decide_retention(infos, policies, run="ours", now=100.0)
        return {decision.info.name for decision in decisions if decision.is_kept}

    assert not keep or kept(keep) <= kept([*keep, further])


def plain(step: int, loss: float | None = None, **facts: object) -> CheckpointInfo:
    metrics = {} if loss is None else {"loss": loss}
    return CheckpointInfo(name=f"step_{step}", path="", step=step, metrics=metrics, **facts)  # type: ignore[arg-type]


def test_the_best_by_a_metric() -> None:
    infos = [plain(1, 2.0), plain(2, 1.0), plain(3, 1.0), plain(4, 3.0), plain(5), plain(6)]

    def kept(policy: KeepPolicy) -> list[int]:
        decisions = decide_retention(infos, [policy], run="", now=0.0)
        return [decision.info.step for decision in decisions if decision.is_kept]

    assert kept(KeepBest("loss", "min")) == [3, 6]
    assert kept(KeepBest("loss", "min", 2)) == [2, 3, 6]
    assert kept(KeepBest("loss", "max")) == [4, 6]
    assert kept(KeepBest("accuracy", "max")) == [6]
    assert kept(KeepLast(2)) == [5, 6]


def test_policies_are_united() -> None:
    infos = [plain(step, loss) for step, loss in enumerate([9.0, 0.5, 8.0, 7.0, 6.0, 5.0, 4.0], 1)]
    policies: list[KeepPolicy] = [KeepLast(2), KeepEvery(5), KeepBest("loss", "min")]
    decisions = decide_retention(infos, policies, run="", now=0.0)
    assert {one.info.step: one.reasons for one in decisions if one.is_kept} == {
        2: ("among the best 1 by loss:min",),
        5: ("every 5 steps",),
        6: ("among the last 2",),
        7: ("the newest good one", "among the last 2"),
    }
