"""How an agent and its processes exchange orders and reports: files, and a bell.

Beside the heartbeat file of a process lie its newest order (`.order`) and its newest report
(`.report`), each replaced in one step. A named pipe (`.bell`) wakes the process when there is a
new order. It carries no information: a process that missed it looks again after a second.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path
from typing import TypeVar

import msgspec

from remesh.elastic.reentry import Order, Report

LOOK_SECONDS = 1.0
"""How often a process looks for orders for which the bell was not heard."""

M = TypeVar("M")


def send_order(heartbeat_file: str, order: Order) -> None:
    """Give a process an order, which takes the place of the last."""
    _write(f"{heartbeat_file}.order", order)
    # A process that ends just now has no bell any more, or nothing that reads it.
    with contextlib.suppress(OSError):
        descriptor = os.open(f"{heartbeat_file}.bell", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b".")
        finally:
            os.close(descriptor)


def read_order(heartbeat_file: str) -> Order | None:
    """The newest order; None if there is none."""
    return _read(f"{heartbeat_file}.order", Order)  # type: ignore[arg-type] # a union


def write_report(heartbeat_file: str, report: Report) -> None:
    """Say how a process is."""
    _write(f"{heartbeat_file}.report", report)


def read_report(heartbeat_file: str) -> Report | None:
    """The last report of a process; None if it has made none."""
    return _read(f"{heartbeat_file}.report", Report)


def remove(heartbeat_file: str) -> None:
    """Remove the order and the report of a process that has ended."""
    for end in ("order", "report", "bell"):
        Path(f"{heartbeat_file}.{end}").unlink(missing_ok=True)


class Bell:
    """The bell of a process."""

    def __init__(self, heartbeat_file: str) -> None:
        self._path = Path(f"{heartbeat_file}.bell")
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path)
        # Open for both, so that it does not end when the agent closes it.
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def ring(self) -> None:
        """Wake the one who waits."""
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._descriptor, b".")

    def wait(self, seconds: float = LOOK_SECONDS) -> None:
        """Wait until it rings, at most so long."""
        if select.select([self._descriptor], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, 4096)

    def close(self) -> None:
        """Remove it."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _write(path: str, message: msgspec.Struct) -> None:
    beside = Path(f"{path}.new")
    beside.write_bytes(msgspec.json.encode(message))
    beside.replace(path)


def _read(path: str, kind: type[M]) -> M | None:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except FileNotFoundError:
        return None
