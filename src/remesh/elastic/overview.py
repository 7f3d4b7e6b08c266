"""What the page shows of a job: a status that is cut to a bounded size.

A job of a thousand nodes has some megabytes of status, and a page asks for it every second. The
overview has one page of the nodes that match a filter, and one page of the ranks, those in trouble
first; it counts the others. Of failures, stacks and history it has what is newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from remesh.elastic.job import HistoryLine, Job, SavedCheckpoint
from remesh.elastic.live import Live
from remesh.elastic.status import (
    FailureStatus,
    RoundFailures,
    Status,
    Survey,
    status_of,
    survey_of,
)
from remesh.elastic.trend import Sample, num_ranks, sample

PAGE_ROWS = 50
"""Nodes, or ranks, on a page."""
MAX_ROUNDS = 10
"""Rounds with failures that are shown."""
MAX_FAILURES = 5
"""Failures of a round that are shown."""
MAX_STACKS = 10
"""Ranks whose stacks are shown."""
MAX_LINES = 100
"""Lines of history that are shown."""
MAX_LINE = 500
"""Characters of such a line."""
MAX_TEXT = 4000
"""Characters of a message, a log or a stack."""

_T = TypeVar("_T")


class Query(msgspec.Struct, frozen=True):
    """What a page asks for."""

    find: str = ""  # words that a node shows, in its id, name, address, state or check
    nodes: int = 1  # which page of them; the first is 1
    ranks: int = 1  # which page of the ranks


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a list is shown."""

    page: int
    """Number of the page."""
    num_pages: int
    """Pages that there are."""
    num_found: int
    """Rows on all of them."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its page shows it."""

    job: Status  # its status, without what other pages show
    nodes_by_state: dict[str, int]  # state → number of nodes
    nodes: Part  # which nodes are in `job`
    ranks: Part  # which ranks are in `job`; slow ranks and those behind the others come first
    num_slow: int  # ranks that are slow
    num_behind: int  # ranks that have finished fewer steps than others
    trend: tuple[Sample, ...]  # how the training went, oldest first; the last sample is of now
    checkpoints: tuple[SavedCheckpoint, ...]  # the newest checkpoints, newest first
    num_stacks: int  # ranks that have sent their stacks
    more_failures: tuple[int, ...]  # for each round in `job`, the failures that are not shown


def overview_of(
    job: Job, live: Live, now: float, warnings: tuple[str, ...], query: Query
) -> Overview:
    """The overview of a job."""
    survey = survey_of(job, live)
    nodes, nodes_part = _page(_found(job, survey, query.find), query.nodes)
    ranks, ranks_part = _page(survey.ranks(live), query.ranks)
    status = status_of(job, live, now, warnings, (survey, nodes, ranks))
    rounds = status.failures[:MAX_ROUNDS]
    stacks = sorted(status.stacks.items())[:MAX_STACKS]
    shown = msgspec.structs.replace(
        status,
        failures=tuple(_cut_round(failed) for failed in rounds),
        stacks={rank: text[:MAX_TEXT] for rank, text in stacks},
        reason=status.reason[:MAX_TEXT],
        history=tuple(
            HistoryLine(line.time, line.text[:MAX_LINE]) for line in status.history[:MAX_LINES]
        ),
    )
    return Overview(
        job=shown,
        nodes_by_state=status.nodes_by_state,
        nodes=nodes_part,
        ranks=ranks_part,
        num_slow=len(survey.slow),
        num_behind=len(survey.behind),
        trend=(*job.trend.samples, *_present(job, live, now)),
        checkpoints=job.checkpoints[::-1],
        num_stacks=len(live.stacks),
        more_failures=tuple(max(len(one.failures) - MAX_FAILURES, 0) for one in rounds),
    )


def _present(job: Job, live: Live, now: float) -> list[Sample]:
    """A sample of now, of a job that runs."""
    if job.rendezvous is None or job.ended is not None:
        return []
    return [sample(live.progress, num_ranks(job.rendezvous), now)]


def _found(job: Job, survey: Survey, find: str) -> list[int]:
    """The nodes that show all of some words."""
    words, nodes = find.casefold().split(), job.rendezvous
    if not words or nodes is None:
        return list(survey.states)
    names = {node_id: name for name, node_id in job.names.items()}

    def shown(node_id: int, state: str) -> str:
        node = nodes.ready.get(node_id) or nodes.member(node_id)
        where = (names.get(node_id), "") if node is None else (node.name, node.address)
        reason = nodes.excluded[node_id][1] if state == "excluded" else ""
        why = reason or job.check_findings.get(node_id, "")
        return f"{node_id} {where[0]} {where[1]} {state} {why}".casefold()

    return [
        node_id
        for node_id, state in survey.states.items()
        if all(word in shown(node_id, state) for word in words)
    ]


def _page(rows: Sequence[_T], number: int) -> tuple[tuple[_T, ...], Part]:
    """One page of a list; the last one if there are not so many."""
    num_pages = max(-(-len(rows) // PAGE_ROWS), 1)
    number = min(max(number, 1), num_pages)
    shown = tuple(rows[(number - 1) * PAGE_ROWS : number * PAGE_ROWS])
    return shown, Part(page=number, num_pages=num_pages, num_found=len(rows))


def _cut_round(failed: RoundFailures) -> RoundFailures:
    failures = tuple(map(_cut_failure, failed.failures[:MAX_FAILURES]))
    return msgspec.structs.replace(failed, failures=failures)


def _cut_failure(failure: FailureStatus) -> FailureStatus:
    """A failure with the beginning of its message and the end of its log."""
    message, log_tail = failure.message[:MAX_TEXT], failure.log_tail[-MAX_TEXT:]
    return msgspec.structs.replace(failure, message=message, log_tail=log_tail)
