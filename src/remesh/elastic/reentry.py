"""How the processes of a node get from one world into the next without ending: pure functions.

A training function that can be entered again is called by `remesh.elastic.run`. When the world
changes, the agent orders its processes to *leave* the function, waits until they are *out*, and
then orders those that are out to *enter* it again with their places in the new world. What has
ended, or is not out when the patience is over, is killed and started anew.

Orders and reports are states and not events: the agent keeps the newest order for each process, a
process its newest report, each in a file. So it does no harm if one is read late, twice, or not at
all because the next has taken its place. Orders are numbered; a process carries out the newest that
it knows, once. A report names the newest order that the process has carried out and its process id,
so a report of a process that was replaced does not count for its successor.

`next_act` is the process, `Recovery` with its functions is the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

import msgspec


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Leave the training function."""

    number: int  # number of the order


class Enter(msgspec.Struct, frozen=True, tag=True):
    """Enter the training function, leaving it before if need be."""

    number: int  # number of the order
    environment: dict[str, str]  # variables of the new world, such as the rank


Order: TypeAlias = Leave | Enter


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a process on itself."""

    pid: int  # its id
    number: int = 0  # the newest order that it has carried out; 0 before the first
    is_out: bool = False  # whether it is outside of the training function
    error: str = ""  # why it left without an order: what it raised when it lost a peer


class Act(StrEnum):
    """The next act of a process."""

    GO_ON = "go on"
    LEAVE = "leave"
    CONFIRM = "confirm"
    ENTER = "enter"


def next_act(report: Report, order: Order | None) -> Act:
    """The next act of a process, given all that it knows.

    `GO_ON` also for a process that is out and has to wait; `CONFIRM` for one that is out already
    when it is ordered to leave.
    """
    if order is None or order.number <= report.number:
        return Act.GO_ON
    if not report.is_out:
        return Act.LEAVE
    return Act.ENTER if isinstance(order, Enter) else Act.CONFIRM


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a node between two worlds, by local rank."""

    number: int  # number of the order to leave
    deadline: float  # when those that are not out are given up
    leaving: dict[int, int]  # process ids of those that have to leave
    out: dict[int, int] = {}  # process ids of those that are out, and can enter again
    missing: frozenset[int] = frozenset()  # those that have to be started

    @property
    def is_settled(self) -> bool:
        """True if it is known of each process whether it enters again."""
        return not self.leaving


def begin(
    number: int,
    living: Mapping[int, int],
    reports: Mapping[int, Report],
    *,
    num_processes: int,
    deadline: float,
) -> Recovery | None:
    """Begin a recovery; None if no process can be entered again.

    `number` is that of the order to leave, higher than all before.
    """
    able = {
        rank: pid for rank, pid in living.items() if rank in reports and reports[rank].pid == pid
    }
    if not able:
        return None
    missing = frozenset(range(num_processes)) - able.keys()
    return Recovery(number=number, deadline=deadline, leaving=able, missing=missing)


def hear(recovery: Recovery, local_rank: int, report: Report) -> Recovery:
    """A process has reported."""
    pid = recovery.leaving.get(local_rank)
    if report.pid != pid or not report.is_out or report.number < recovery.number:
        return recovery
    return msgspec.structs.replace(
        recovery,
        leaving=_without(recovery.leaving, local_rank),
        out={**recovery.out, local_rank: report.pid},
    )


def end(recovery: Recovery, local_rank: int) -> Recovery:
    """A process has ended."""
    return msgspec.structs.replace(
        recovery,
        leaving=_without(recovery.leaving, local_rank),
        out=_without(recovery.out, local_rank),
        missing=recovery.missing | {local_rank},
    )


def overdue(recovery: Recovery, now: float) -> dict[int, int]:
    """The processes that have to be killed: they were not out in time. `end` follows for each."""
    return dict(recovery.leaving) if now >= recovery.deadline else {}


def _without(table: dict[int, int], key: int) -> dict[int, int]:
    return {other: value for other, value in table.items() if other != key}
