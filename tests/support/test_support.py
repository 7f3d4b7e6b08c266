"""What other tests rely on: ranks that fail, die or hang are told as what they are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remesh.errors import MismatchError
from remesh.exchange import Exchange
from tests.support import (
    Died,
    Outcome,
    Raised,
    Returned,
    TimedOut,
    processes,
    run_processes,
    run_processes_outcomes,
    run_ranks_outcomes,
)


class _AwkwardError(Exception):
    """Pickles, and then cannot be rebuilt."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _end(exchange: Exchange, ends: tuple[str, ...], ids: Path) -> str:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (ids / str(exchange.rank)).write_text(str(os.getpid()))
    exchange.all_gather(b"written")
    match ends[exchange.rank]:
        case "raises":
            raise MismatchError("no fit", ("a",), conflicts=("b: shape",))
        case "raises what cannot travel":
            raise _AwkwardError("one", "two")
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            os._exit(7)
        case "hangs":
            time.sleep(600)
    return "fine"


def test_each_end_of_a_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ("returns", "raises", "raises what cannot travel", "is killed", "exits", "hangs")
    reports: list[Outcome[str]] = []
    receive = processes._receive

    def note(*args: Any) -> Outcome[str]:
        reports.append(receive(*args))
        return reports[-1]

    # No time passes until all but the last have reported; then it is up.
    clock = SimpleNamespace(monotonic=lambda: 240.0 * (len(reports) >= len(ends) - 1))
    ids, temporary = tmp_path / "ids", tmp_path / "temporary"
    ids.mkdir()
    temporary.mkdir()
    run_processes(1, _end, ends, ids)  # the fork server, which stays, has a directory as well
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(processes, "_receive", note)
    monkeypatch.setattr(processes, "time", clock)
    fine, fits, awkward, *dead, hung = run_processes_outcomes(len(ends), _end, ends, ids)
    assert fine == Returned("fine")
    assert isinstance(fits, Raised)
    assert isinstance(fits.error, MismatchError)
    assert (fits.error.missing, fits.error.conflicts) == (("a",), ("b: shape",))
    assert "in _end" in fits.traceback
    assert isinstance(awkward, Raised)
    assert "_AwkwardError: one two" in str(awkward.error)
    assert dead == [Died(-signal.SIGKILL), Died(7)]
    assert isinstance(hung, TimedOut)
    for rank in range(len(ends)):
        with pytest.raises(ProcessLookupError):
            os.kill(int((ids / str(rank)).read_text()), 0)
    assert list(temporary.iterdir()) == []


def test_each_end_of_a_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, release = threading.Event(), threading.Event()

    def wait_for_ever() -> None:
        waits.set()
        release.wait()

    def work(exchange: Exchange) -> str:
        exchange.all_gather(b"")
        if exchange.rank == 1:
            raise SystemExit(3)
        if exchange.rank == 2:
            wait_for_ever()
        return "fine"

    def clock() -> Iterator[float]:
        """No time passes until the others have ended and rank 2 waits; then it is up."""
        yield from (0.0, 0.0, 0.0)
        assert waits.wait(240)
        yield 60.5

    fake = SimpleNamespace(monotonic=clock().__next__)
    monkeypatch.setattr("tests.support.ranks.time", fake)
    fine, raised, hung = run_ranks_outcomes(3, work, timeout=60.5)
    release.set()
    assert fine == Returned("fine")
    assert isinstance(hung, TimedOut)
    assert "in wait_for_ever" in hung.traceback
    assert isinstance(raised, Raised)
    assert isinstance(raised.error, SystemExit)
