"""How a process gets from one world into the next without ending: what it and its agent say.

A training function that can be entered again is called by `remesh.elastic.run`. When the world
changes, the agent orders its processes to *leave* the world, and then orders those that are *out*
to *enter* the next one, with their places in it.

Orders and reports are states and not events: the agent keeps the newest order for each process, a
process its newest report, each in a file beside the heartbeats (`.order`, `.report`) that is
replaced in one step. So it does no harm if one is read late, twice, or not at all because the next
has taken its place. Orders are numbered; a process carries out the newest that it knows, once.
A report names the newest order that the process has carried out and its process id, so a report of
a process that was replaced does not count for its successor.

`next_act` is the process; the agent is `remesh.elastic.lifecycle`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

M = TypeVar("M")


class LeaveWorld(msgspec.Struct, frozen=True, tag=True):
    """Leave the training function."""

    number: int  # number of the order


class EnterWorld(msgspec.Struct, frozen=True, tag=True):
    """Enter the training function, leaving it before if need be."""

    number: int  # number of the order
    environment: dict[str, str]  # variables of the new world, such as the rank


Order: TypeAlias = LeaveWorld | EnterWorld


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
    return Act.ENTER if isinstance(order, EnterWorld) else Act.CONFIRM


def send_order(heartbeat_file: str, order: Order) -> None:
    """Give a process an order, which takes the place of the last."""
    _write(f"{heartbeat_file}.order", order)


def read_order(heartbeat_file: str) -> Order | None:
    """The newest order; None if there is none."""
    return _read(f"{heartbeat_file}.order", Order)  # type: ignore[arg-type] # a union


def write_report(heartbeat_file: str, report: Report) -> None:
    """Say how a process is."""
    _write(f"{heartbeat_file}.report", report)


def read_report(heartbeat_file: str) -> Report | None:
    """The last report of a process; None if it has made none."""
    return _read(f"{heartbeat_file}.report", Report)


def forget(heartbeat_file: str) -> None:
    """Remove the order and the report of a process that is not entered again."""
    for end in ("order", "report"):
        Path(f"{heartbeat_file}.{end}").unlink(missing_ok=True)


def _write(path: str, message: msgspec.Struct) -> None:
    beside = Path(f"{path}.new")
    beside.write_bytes(msgspec.json.encode(message))
    beside.replace(path)


def _read(path: str, kind: type[M]) -> M | None:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except FileNotFoundError:
        return None
