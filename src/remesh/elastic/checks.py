"""Checks: which nodes are tested together, and what the tests prove. Pure.

A test runs a collective among the nodes of a group, after each node has probed its own processor
and memory. A group passes or fails as a whole; a failed group says that one of its members or the
connection between them is bad, not which.

The first round tests pairs of neighbours. The second pairs every *suspect*, a member of a group
that failed, with a node that is known to be healthy: by status, not by time; suspects for whom no
healthy node is left are paired with suspects of other groups. A third round follows only if some
node is still undecided. A node that passed with another one is healthy; if all others of a failed
group are healthy, the remaining one is faulty. Where that decides nothing (two nodes whose only
test failed), no node is excluded, and the suspicion is reported.

A test that reaches its time limit proves nothing by itself: where all nodes are busy, the tests of
healthy nodes are slow. The node is faulty if other nodes need far less, otherwise a suspect.

The scheme of two rounds of pairs is DLRover's; it pairs by time and does not handle three nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import median

import msgspec

from remesh.elastic.nodes import listed_nodes
from remesh.elastic.protocol import TestResult

MAX_ROUNDS = 3
LATE_FACTOR = 4.0
"""A node whose test reached the time limit is faulty if that is this many times the median."""


class GroupResult(msgspec.Struct, frozen=True):
    """The result of the test of one group."""

    members: tuple[int, ...]  # node ids
    passed: bool  # whether the collective worked on all of them
    broken: frozenset[int] = frozenset()
    """Members whose own probe failed; the collective was not tried with them."""
    late: frozenset[int] = frozenset()
    """Members whose own probe reached the time limit where others were slow as well, so that it
    proves nothing; the collective was not tried with them either."""
    message: str = ""  # what went wrong


class RunningCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check of the members of a world."""

    number: int  # counts the checks
    nodes: tuple[int, ...]  # ids of the members
    groups: tuple[tuple[int, ...], ...]  # the groups of the test round that runs
    since: float  # when it began
    reports: dict[int, TestResult] = {}  # results of nodes in it, by node id
    results: tuple[tuple[GroupResult, ...], ...] = ()  # the test rounds before it


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome that the tests of a check prove."""

    healthy: frozenset[int]  # nodes that passed with another node, or alone if they are alone
    faulty: Mapping[int, str]  # nodes that are proven bad, with the reason
    suspects: Mapping[int, str]  # nodes about which nothing is proven, with the reason
    connections: tuple[tuple[int, ...], ...] = ()
    """Groups that failed although all their members are healthy."""


def begin(number: int, nodes: Iterable[int], now: float) -> RunningCheck:
    """A check that begins with its first test round."""
    ordered = tuple(sorted(nodes))
    return RunningCheck(number=number, nodes=ordered, groups=plan_round(ordered, ()), since=now)


def advance(check: RunningCheck, now: float, timeout: float) -> RunningCheck | CheckResult:
    """The check after a test round has ended: its next round, or its result."""
    if len(check.reports) < len(check.nodes) and now - check.since < timeout:
        return check  # every node is in a group of every test round
    results = (*check.results, tuple(_result_of(group, check.reports) for group in check.groups))
    groups = plan_round(check.nodes, results)
    if not groups:
        return evaluate(check.nodes, [result for done in results for result in done])
    return msgspec.structs.replace(check, groups=groups, since=now, reports={}, results=results)


def _result_of(group: tuple[int, ...], reports: Mapping[int, TestResult]) -> GroupResult:
    reported = {node: reports[node] for node in group if node in reports}
    late = {node for node in reported if _is_busy(reported[node], reports.values())}
    messages = [
        f"node {node}: {report.message}" for node, report in reported.items() if report.message
    ]
    messages += [f"node {node} did not report in time" for node in group if node not in reports]
    return GroupResult(
        members=group,
        passed=len(reported) == len(group) and all(each.passed for each in reported.values()),
        broken=frozenset(node for node, report in reported.items() if report.broken) - late,
        late=frozenset(late),
        message="; ".join(messages),
    )


def _is_busy(report: TestResult, others: Iterable[TestResult]) -> bool:
    """True if a test reached its time limit where those of other nodes were slow as well."""
    passed = [other.elapsed for other in others if not other.broken]
    return report.late and not (passed and report.elapsed > LATE_FACTOR * median(passed))


def plan_round(
    nodes: Iterable[int], rounds: Sequence[Sequence[GroupResult]]
) -> tuple[tuple[int, ...], ...]:
    """The groups of the next round; none if more tests would prove nothing."""
    ordered = sorted(nodes)
    if not rounds:
        return _pairs(ordered)
    if len(rounds) >= MAX_ROUNDS:
        return ()
    proven = evaluate(ordered, [result for results in rounds for result in results])
    suspects = sorted(proven.suspects)
    met = {
        frozenset((one, other))
        for results in rounds
        for result in results
        for one in result.members
        for other in result.members
    }
    groups: list[tuple[int, ...]] = []
    partners = sorted(proven.healthy)
    num_served = min(len(suspects), len(partners))
    groups += zip(suspects[:num_served], partners[:num_served], strict=True)
    groups += _strangers(suspects[num_served:], met)
    if not any(len(group) > 1 for group in groups):
        return ()
    groups += _pairs(partners[num_served:])
    groups += [(node,) for node in proven.faulty]
    return tuple(tuple(sorted(group)) for group in groups)


def _strangers(nodes: Sequence[int], met: AbstractSet[frozenset[int]]) -> list[tuple[int, ...]]:
    """Pairs of nodes that were not tested together before; without a partner a node is alone."""
    waiting = list(nodes)
    groups: list[tuple[int, ...]] = []
    while waiting:
        one = waiting.pop(0)
        other = next((node for node in waiting if frozenset((one, node)) not in met), None)
        if other is None:
            groups.append((one,))
        else:
            waiting.remove(other)
            groups.append((one, other))
    return groups


def _pairs(ordered: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Pairs of neighbours; of an odd number above three, the last are three together.

    Of three nodes one stays alone: a failed triple would prove nothing about any node.
    """
    if not ordered:
        return ()
    if len(ordered) in (1, 3):
        return (*_pairs(ordered[:-1]), (ordered[-1],))
    odd = len(ordered) % 2
    stop = len(ordered) - 3 * odd
    groups = [tuple(ordered[start : start + 2]) for start in range(0, stop, 2)]
    return (*groups, tuple(ordered[stop:])) if odd else tuple(groups)


def evaluate(nodes: Iterable[int], results: Sequence[GroupResult]) -> CheckResult:
    """The faults of nodes that results prove.

    A node that appears in no result is a suspect: it did not take part.
    """
    everyone = frozenset(nodes)
    alone = len(everyone) == 1
    faulty = {
        node: f"its own probe failed: {result.message}".removesuffix(": ")
        for result in results
        for node in result.broken
    }
    healthy = {
        node
        for result in results
        if result.passed and (alone or len(result.members) > 1)
        for node in result.members
    } - set(faulty)
    failed = [
        result
        for result in results
        if not (result.passed or result.late or set(result.members) & set(faulty))
    ]
    for result in failed:
        unproven = [node for node in result.members if node not in healthy]
        if len(unproven) == 1 and len(result.members) > 1:
            others = set(result.members) - set(unproven)
            faulty[unproven[0]] = f"failed with {listed_nodes(others)} {result.message}".rstrip()
    suspects = {node: _suspicion(node, results) for node in everyone - healthy - set(faulty)}
    connections = tuple(result.members for result in failed if healthy.issuperset(result.members))
    return CheckResult(frozenset(healthy), faulty, suspects, connections)


def _suspicion(node: int, results: Sequence[GroupResult]) -> str:
    mine = [result for result in results if node in result.members]
    failed = [result for result in mine if not result.passed]
    if failed:
        others = {other for result in failed for other in result.members} - {node}
        message = failed[-1].message
        return f"the test with {listed_nodes(others)} failed{': ' + message if message else ''}"
    return "was tested alone only" if mine else "did not take part"
