"""The test of a group of nodes: processor and memory of each, and a collective among them.

One process of each node first probes its own processor and memory: a product of matrices whose
result is known, and a block of memory that is filled and read again, on every device of the node.
Then all processes of the group reduce a tensor together and compare the sum with the one that it
must be. A broken driver may hang or kill the process that finds it, so the test runs in a process
of its own with a time limit; `run_test` and the process exchange lines.

The nodes probe at the same time. Each then sets in the store of the first node's agent whether its
probe passed. The first node sets the address where the others connect to its process; or nothing,
if a probe failed, because the others would wait for that node until the time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from remesh.elastic.protocol import NodeTest, TestResult

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not said to be exported

NUM_PROBES = 3
"""Times that the probe is made: anything can be slow once, so the fastest counts."""
MATRIX = 1024
MEMORY_BYTES = 64 << 20
REDUCE_BYTES = 16 << 20
MEET_SECONDS = 30.0
"""How long the members of a group wait for each other after their probes have passed."""
PASSED, FAILED = "passed", "failed"
"""Values of the store: results of the probe of a node."""

COMMAND = (sys.executable, "-m", "remesh.elastic.script", "-m", "remesh.elastic.node_check")


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line that the process prints."""

    stage: Literal["probe", "meet"]  # `probe`, of its own node, or `meet`, of the group
    passed: bool  # whether it passed
    seconds: float  # duration of the node's own probe; 0 if it failed
    message: str = ""  # what went wrong
    address: str = ""  # where the others connect to the first node of a group


def run_test(
    store: TCPStore, test: NodeTest, *, seconds: float = 90.0, command: Sequence[str] = COMMAND
) -> TestResult:
    """Take part in a test; `store` is that of this node's agent."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not said to be exported

    ids = [member.id for member in test.group]
    rank = ids.index(test.node_id)
    deadline = time.monotonic() + seconds

    def key_of(number: int) -> str:
        return f"check {test.check}.{test.test_round} of node {number}"

    def meet_at(passed: bool, address: str) -> str:
        """The address where the group connects; `FAILED` if a probe failed."""
        place, first = store, test.group[0]
        if rank > 0:
            limit = dt.timedelta(seconds=MEET_SECONDS)
            place = TCPStore(first.address, first.port, is_master=False, timeout=limit)

        def value_of(number: int) -> str:
            left = max(deadline - time.monotonic(), 0.001)
            place.wait([key_of(number)], dt.timedelta(seconds=left))
            return place.get(key_of(number)).decode()

        if rank > 0:
            place.set(key_of(test.node_id), PASSED if passed else FAILED)
            return value_of(ids[0])
        together = passed and all(value_of(number) == PASSED for number in ids[1:])
        place.set(key_of(ids[0]), address if together else FAILED)
        return address if together else FAILED

    arguments = [*command, "--rank", str(rank), "--size", str(len(ids))]
    arguments += ["--host", test.group[0].address]
    with _Process(arguments, seconds) as process:
        return _run(process, meet_at if len(ids) > 1 else None)


def run_alone(*, seconds: float = 60.0, command: Sequence[str] = COMMAND) -> TestResult:
    """Test this node by itself."""
    with _Process(command, seconds) as process:
        return _run(process, None)


class _Process:
    """The process of a test, which is killed after some time."""

    def __init__(self, arguments: Sequence[str], seconds: float) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module, or the caller's
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._seconds = seconds
        self._started = time.monotonic()
        self._elapsed = 0.0
        self._is_late = False
        self._alarm = threading.Timer(seconds, self._end)
        self._alarm.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._alarm.cancel()
        self._process.kill()
        self._process.communicate()

    def _end(self) -> None:
        self._is_late = True  # before the process ends: it is read after that
        self._process.kill()

    def read(self) -> ProbeReport:
        """The next report of the process; that of a failed probe if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._elapsed = self._elapsed or time.monotonic() - self._started
        try:
            return msgspec.json.decode(line, type=ProbeReport)
        except msgspec.MsgspecError:
            return ProbeReport(
                stage="probe", passed=False, seconds=0.0, message=self._end_message()
            )

    def result(self, probed: ProbeReport, failed: ProbeReport | None) -> TestResult:
        """The result of the test."""
        return TestResult(
            passed=failed is None,
            broken=not probed.passed,
            late=not probed.passed and self._is_late,
            seconds=probed.seconds,
            elapsed=self._elapsed,
            message="" if failed is None else failed.message,
        )

    def _end_message(self) -> str:
        self._process.kill()  # what it writes is no report, so nothing is lost
        errors = self._process.communicate()[1].strip().splitlines()
        if self._is_late:
            return f"the test took more than {self._seconds:g} s"
        last = errors[-1] if errors else "no message"
        return f"the test ended with exit code {self._process.returncode}: {last}"

    def write(self, line: str) -> None:
        """Write a line to the process; `read` detects that it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


def _run(process: _Process, meet_at: Callable[[bool, str], str] | None) -> TestResult:
    """Read the report of the probe, and let the process connect to the others, if there are any."""
    probed = process.read()
    if meet_at is None:
        return process.result(probed, None if probed.passed else probed)
    try:
        address = meet_at(probed.passed, probed.address)
    except RuntimeError as error:
        met = ProbeReport(stage="meet", passed=False, seconds=0.0, message=str(error))
    else:
        if address == FAILED:
            message = "the probe of a node of the group failed"
            met = ProbeReport(stage="meet", passed=False, seconds=0.0, message=message)
        else:
            process.write(address)
            met = process.read()
    return process.result(probed, next((each for each in (probed, met) if not each.passed), None))


def probe_device(device: str) -> None:
    """Multiply matrices and fill memory on a device, and compare the results."""
    import torch

    # Small whole numbers: every partial sum is exact, in whatever order it is made.
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-4, 5, (MATRIX, MATRIX), generator=generator).float()
    right = torch.randint(-4, 5, (MATRIX, MATRIX), generator=generator).float()
    product = (left.to(device) @ right.to(device)).cpu()
    expected = left @ (right @ torch.ones(MATRIX, 1))
    if not torch.equal(product.sum(1, keepdim=True), expected):
        raise RuntimeError(f"{device} computes wrong sums")
    pattern = torch.arange(MEMORY_BYTES // 8, dtype=torch.int64, device=device)
    if not torch.equal(pattern.cpu(), torch.arange(MEMORY_BYTES // 8)):
        raise RuntimeError(f"{device} returns other data than was written")


def probe() -> float:
    """Probe the processor and every GPU of this node; the seconds that it took at best."""
    import torch

    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    durations = []
    for _ in range(NUM_PROBES):
        started = time.monotonic()
        for device in devices:
            probe_device(device)
        durations.append(time.monotonic() - started)
    return min(durations)


def open_store(host: str, port: int, *, first: bool) -> TCPStore:
    """The store of a group: the first node makes it, on a free port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not said to be exported

    limit = dt.timedelta(seconds=MEET_SECONDS)
    return TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=limit)


def meet(store: TCPStore, rank: int, size: int) -> None:
    """Reduce a tensor with the other nodes of the group."""
    import torch
    import torch.distributed as dist

    limit = dt.timedelta(seconds=MEET_SECONDS)
    cuda = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=limit
    )
    try:
        mine = torch.full((REDUCE_BYTES // 4,), float(rank + 1), device="cuda:0" if cuda else "cpu")
        dist.all_reduce(mine)
        total = size * (size + 1) / 2
        if not bool((mine == total).all()):
            raise RuntimeError("the sum over the group is wrong")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the test in this process: report the probe, read where to connect, report the result."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--host", default="")
    options = parser.parse_args(arguments)

    first, address, store = options.rank == 0, "", None
    try:
        seconds = probe()
        if first and options.size > 1:
            store = open_store(options.host, 0, first=True)
            address = f"{options.host}:{store.port}"
    except (RuntimeError, ValueError, OSError) as error:
        report(ProbeReport(stage="probe", passed=False, seconds=0.0, message=str(error)))
        return
    report(ProbeReport(stage="probe", passed=True, seconds=seconds, address=address))
    if options.size == 1:
        return
    host, _, port = sys.stdin.readline().strip().rpartition(":")
    try:
        meet(store or open_store(host, int(port), first=False), options.rank, options.size)
    except (RuntimeError, ValueError, OSError) as error:
        report(ProbeReport(stage="meet", passed=False, seconds=seconds, message=str(error)))
        return
    report(ProbeReport(stage="meet", passed=True, seconds=seconds))


def report(what: ProbeReport) -> None:
    """Print a report as a line."""
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
