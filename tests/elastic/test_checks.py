"""Which nodes are tested together, and what the tests prove."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from remesh.elastic.checks import (
    CheckResult,
    GroupResult,
    advance,
    begin,
    evaluate,
    plan_round,
)
from remesh.elastic.protocol import TestResult


def run(
    nodes: list[int], faulty: set[int]
) -> tuple[CheckResult, list[tuple[tuple[int, ...], ...]]]:
    """Check nodes of which some are faulty: a group fails if it has one of them and another."""
    rounds: list[list[GroupResult]] = []
    plans = []
    while plan := plan_round(nodes, rounds):
        plans.append(plan)
        rounds.append(
            [GroupResult(group, len(group) == 1 or not faulty & set(group)) for group in plan]
        )
    return evaluate(nodes, [result for results in rounds for result in results]), plans


def test_the_example_of_six_nodes() -> None:
    verdict, plans = run([1, 2, 3, 4, 5, 6], {6})
    assert plans == [((1, 2), (3, 4), (5, 6)), ((1, 5), (2, 6), (3, 4))]
    assert verdict.healthy == {1, 2, 3, 4, 5}
    assert list(verdict.faulty) == [6]


def test_healthy_nodes_need_one_round() -> None:
    verdict, plans = run(list(range(7)), set())
    assert plans == [((0, 1), (2, 3), (4, 5, 6))]
    assert verdict.healthy == set(range(7))


def test_of_two_nodes_that_fail_together_none_is_thrown_out() -> None:
    verdict, _ = run([0, 1], {1})
    assert (verdict.faulty, sorted(verdict.suspects)) == ({}, [0, 1])


def test_of_two_nodes_the_one_whose_own_probe_fails_is_faulty() -> None:
    result = GroupResult((0, 1), passed=False, broken=frozenset({1}), message="bad memory")
    verdict = evaluate([0, 1], [result])
    assert verdict.faulty == {1: "its own probe failed: bad memory"}
    assert sorted(verdict.suspects) == [0]


def test_a_connection_between_healthy_nodes_is_reported_and_nobody_thrown_out() -> None:
    results = [GroupResult((0, 1), True), GroupResult((2, 3), True), GroupResult((1, 2), False)]
    verdict = evaluate(range(4), results)
    assert verdict.connections == ((1, 2),)
    assert verdict.healthy == {0, 1, 2, 3}


def test_a_node_that_did_not_take_part_is_suspected() -> None:
    verdict = evaluate([0, 1, 2], [GroupResult((0, 1), True)])
    assert verdict.suspects == {2: "did not take part"}


LATE = TestResult(passed=False, broken=True, late=True, elapsed=90.0)


def checked(elapsed: dict[int, float]) -> CheckResult:
    """Check nodes whose tests take these seconds, with a time limit of 90 s."""
    check = begin(1, elapsed, now=0.0)
    for _ in range(4):
        reports = {}
        for group in check.groups:
            passed = all(elapsed[node] < 90 for node in group)
            for node in group:
                own = TestResult(passed=passed, broken=False, elapsed=elapsed[node])
                reports[node] = own if elapsed[node] < 90 else LATE
        after = advance(msgspec.structs.replace(check, reports=reports), 100.0, timeout=200.0)
        if isinstance(after, CheckResult):
            return after
        check = after
    raise AssertionError("a check ends after three rounds")


def test_a_node_that_hangs_while_others_need_seconds_is_faulty() -> None:
    assert list(checked({0: 3.0, 1: 90.0}).faulty) == [1]
    assert list(checked({0: 3.0, 1: 90.0, 2: 5.0, 3: 4.0}).faulty) == [1]


def test_where_all_nodes_are_slow_none_is_faulty_for_being_late() -> None:
    for elapsed in ({0: 40.0, 1: 90.0}, {0: 90.0, 1: 90.0}, {0: 50.0, 1: 90.0, 2: 60.0, 3: 90.0}):
        verdict = checked(elapsed)
        assert not verdict.faulty
        late = {node for node, seconds in elapsed.items() if seconds >= 90}
        assert late <= set(verdict.suspects)


@given(st.integers(1, 24), st.data())
def test_no_healthy_node_is_ever_thrown_out(num_nodes: int, data: st.DataObject) -> None:
    nodes = list(range(num_nodes))
    faulty = data.draw(st.sets(st.sampled_from(nodes)))
    verdict, plans = run(nodes, faulty)
    if num_nodes > 1:
        assert not verdict.healthy & faulty
    assert set(verdict.faulty) <= faulty
    assert verdict.healthy | set(verdict.faulty) | set(verdict.suspects) == set(nodes)
    for plan in plans:
        assert sorted(node for group in plan for node in group) == nodes


@given(st.integers(3, 40), st.data())
def test_a_single_faulty_node_is_always_found(num_nodes: int, data: st.DataObject) -> None:
    faulty = data.draw(st.integers(0, num_nodes - 1))
    verdict, _ = run(list(range(num_nodes)), {faulty})
    assert set(verdict.faulty) == {faulty}
    assert not verdict.suspects


@given(st.integers(8, 40), st.data())
def test_fewer_faulty_than_healthy_groups_are_all_found(
    num_nodes: int, data: st.DataObject
) -> None:
    faulty = data.draw(st.sets(st.integers(0, num_nodes - 1), min_size=1, max_size=num_nodes // 8))
    verdict, _ = run(list(range(num_nodes)), faulty)
    assert set(verdict.faulty) == faulty
