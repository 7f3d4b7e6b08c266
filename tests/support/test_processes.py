from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from remesh.errors import MismatchError, RankFailedError
from remesh.exchange import Exchange
from tests.support import (
    Died,
    Raised,
    RankDiedError,
    Returned,
    TimedOut,
    run_processes,
    run_processes_outcomes,
)


def _describe(exchange: Exchange, tensor: torch.Tensor) -> tuple[int, int, str, torch.Tensor]:
    total = tensor * (exchange.rank + 1)
    dist.all_reduce(total)
    return os.getpid(), torch.get_num_threads(), dist.get_backend(), total


def test_ranks_are_processes_with_a_gloo_group() -> None:
    results = run_processes(3, _describe, torch.ones(2))
    assert len({pid for pid, *_ in results} | {os.getpid()}) == 4
    for _, num_threads, backend, total in results:
        assert (num_threads, backend, total.tolist()) == (1, "gloo", [6.0, 6.0])


class _AwkwardError(Exception):
    """Pickles, and then cannot be rebuilt."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _raise(exchange: Exchange, kind: str) -> None:
    if exchange.rank == 0:
        return
    if kind == "awkward":
        raise _AwkwardError("one", "two")
    raise MismatchError("no fit", ("a",), conflicts=("b: shape",))


def test_exceptions_arrive_with_their_attributes() -> None:
    with pytest.raises(MismatchError, match="no fit") as caught:
        run_processes(2, _raise, "mismatch")
    assert (caught.value.missing, caught.value.conflicts) == (("a",), ("b: shape",))
    assert "in _raise" in caught.value.__notes__[0]


def test_exceptions_that_cannot_travel_are_described() -> None:
    with pytest.raises(RankFailedError, match=r"_AwkwardError: one two") as caught:
        run_processes(2, _raise, "awkward")
    assert caught.value.error_type.endswith("_AwkwardError")


def _end(exchange: Exchange, how: str) -> str:
    if exchange.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    return "fine"


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 7)])
def test_dead_ranks_are_reported(how: str, code: int) -> None:
    assert run_processes_outcomes(3, _end, how) == [Returned("fine"), Died(code), Returned("fine")]
    message = "rank 1 was killed by SIGKILL" if code < 0 else "rank 1 exited with status 7"
    with pytest.raises(RankDiedError, match=message):
        run_processes(3, _end, how)


def _die_while_reporting(exchange: Exchange) -> None:
    def send_half(connection: Connection, data: bytes) -> None:
        os.write(connection.fileno(), data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = send_half  # type: ignore[attr-defined]


def test_a_rank_that_dies_in_its_report_is_dead() -> None:
    assert run_processes_outcomes(1, _die_while_reporting) == [Died(-signal.SIGKILL)]


def _exit_politely(exchange: Exchange) -> NoReturn:
    sys.exit(5)


def test_system_exit_is_an_outcome() -> None:
    [outcome] = run_processes_outcomes(1, _exit_politely)
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, SystemExit)


def _hang(exchange: Exchange, directory: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(directory, str(exchange.rank)).write_text(str(os.getpid()))
    exchange.all_gather(b"written")
    if exchange.rank == 1:
        time.sleep(600)


def test_ranks_that_hang_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By this clock the job begins, waits for the first report, and has no time left after it.
    clock = iter([0.0, 0.0, 240.0])
    fake = SimpleNamespace(monotonic=clock.__next__)
    monkeypatch.setattr("tests.support.processes.time", fake)
    outcomes = run_processes_outcomes(2, _hang, str(tmp_path))
    assert outcomes == [Returned(None), TimedOut(240)]
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _return_what_does_not_pickle(exchange: Exchange) -> object:
    return lambda: None


def test_results_must_pickle() -> None:
    with pytest.raises(Exception, match="pickle"):
        run_processes(1, _return_what_does_not_pickle)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_processes(1, _end, "not at all")  # the fork server, which stays, has a directory as well
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_processes_outcomes(2, _end, "kill")
    assert list(tmp_path.iterdir()) == []


def _address(exchange: Exchange) -> set[str]:
    """Local addresses of this process's TCP sockets, in the kernel's notation."""
    exchange.all_gather(b"connect")
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}").strip("socket:[]"))
        except FileNotFoundError:
            continue
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if os.path.exists(table)
        for line in Path(table).read_text().splitlines()[1:]
    ]
    found = {fields[1].partition(":")[0] for fields in lines if fields[9] in inodes}
    exchange.all_gather(b"looked")
    return found


def test_only_the_loopback_interface_is_used() -> None:
    for addresses in run_processes(2, _address):
        assert addresses == {"0100007F"}
