"""The test of a group of nodes: can each compute and remember, and can they talk to each other?

One process of each node first probes its own processor and memory: a product of matrices whose
result is known, and a block of memory that is filled and read again, on every device of the node.
Then all processes of the group reduce a tensor together and compare the sum with the one that it
must be. A broken driver may hang or kill the process that finds it, so the test runs in a process
of its own, which `run_test` starts, gives a time limit, and talks to in lines.

The nodes probe at the same time. Each then leaves a word for the first one: whether it is well. The
first leaves the address where the others meet it, or that they need not come, because a node that
is not well would only be waited for.
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

from remesh.elastic.node import Node, TestOutcome
from remesh.elastic.protocol import Test
from remesh.errors import MasterError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not said to be exported

NUM_PROBES = 3
"""Times that the probe is made: anything can be slow once, so the fastest counts."""
MATRIX = 1024
MEMORY_BYTES = 64 << 20
REDUCE_BYTES = 16 << 20
MEET_SECONDS = 30.0
"""How long the members of a group wait for each other once all are well."""
WELL, NOT_WELL = "well", ""
"""Words by which a node says how its own probe went."""

COMMAND = (sys.executable, "-m", "remesh.script", "-m", "remesh.elastic.node_check")


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line that the process prints.

    Attributes:
        stage: `probe`, what it found out about its own node, or `meet`, about the group.
        well: Whether everything was as it should be.
        seconds: Duration of the node's own probe; 0 if it failed.
        message: What went wrong.
        address: Where the others meet the first node of a group.
    """

    stage: Literal["probe", "meet"]
    well: bool
    seconds: float
    message: str = ""
    address: str = ""


def run_test(
    node: Node, test: Test, *, seconds: float = 90.0, command: Sequence[str] = COMMAND
) -> TestOutcome:
    """Take part in a test.

    Args:
        node: This node, through which the nodes of the group leave words for each other.
        test: What the master wants tested.
        seconds: Time limit.
        command: Starts the process; arguments follow.
    """
    ids = [member.id for member in test.group]
    rank = ids.index(test.node_id)
    deadline = time.monotonic() + seconds

    def word_of(number: int) -> str:
        return f"check {test.check}.{test.test_round} of node {number}"

    def go(well: bool, address: str) -> str:
        """What the process is told after its probe: where to meet, or nothing."""
        if rank > 0:
            node.put(test.round, word_of(test.node_id), WELL if well else NOT_WELL)
            return node.get(test.round, word_of(ids[0]), deadline - time.monotonic())
        others = [
            node.get(test.round, word_of(number), deadline - time.monotonic()) for number in ids[1:]
        ]
        together = well and all(other == WELL for other in others)
        node.put(test.round, word_of(ids[0]), address if together else NOT_WELL)
        return address if together else NOT_WELL

    arguments = [*command, "--rank", str(rank), "--size", str(len(ids))]
    arguments += ["--host", test.group[0].address]
    with _Process(arguments, seconds) as process:
        return _talk(process, go if len(ids) > 1 else None)


def run_alone(*, seconds: float = 60.0, command: Sequence[str] = COMMAND) -> TestOutcome:
    """Test this node by itself.

    Args:
        seconds: Time limit.
        command: Starts the process.
    """
    with _Process(command, seconds) as process:
        return _talk(process, None)


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
        self._is_late = True  # before the process ends, which is when somebody asks
        self._process.kill()

    def hear(self) -> ProbeReport:
        """What the process says next; if it cannot say anything any more, that it is broken."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            return msgspec.json.decode(line, type=ProbeReport)
        except msgspec.MsgspecError:
            return ProbeReport(stage="probe", well=False, seconds=0.0, message=self._last_words())

    def _last_words(self) -> str:
        self._process.kill()  # what it writes is no report, so nothing is lost
        errors = self._process.communicate()[1].strip().splitlines()
        if self._is_late:
            return f"the test took more than {self._seconds:g} s"
        said = errors[-1] if errors else "without a word"
        return f"the test ended with exit code {self._process.returncode}: {said}"

    def tell(self, line: str) -> None:
        """Say something to the process; one that has ended will be noticed when it is heard."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


def _talk(process: _Process, go: Callable[[bool, str], str] | None) -> TestOutcome:
    """Hear the probe, and let the process meet the others, if there are any."""
    probed = process.hear()
    if go is None:
        return TestOutcome(
            passed=probed.well,
            broken=not probed.well,
            seconds=probed.seconds,
            message=probed.message,
        )
    try:
        address = go(probed.well, probed.address)
    except MasterError as error:
        met = ProbeReport(stage="meet", well=False, seconds=0.0, message=str(error))
    else:
        if address == NOT_WELL:
            message = "a node of the group is not well"
            met = ProbeReport(stage="meet", well=False, seconds=0.0, message=message)
        else:
            process.tell(address)
            met = process.hear()
    first_wrong = met if probed.well else probed
    return TestOutcome(
        passed=probed.well and met.well,
        broken=not probed.well,
        seconds=probed.seconds,
        message=first_wrong.message,
    )


def probe_device(device: str) -> None:
    """Compute and remember something on a device, and compare.

    Raises:
        RuntimeError: If the result is wrong, or the device fails.
    """
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
        raise RuntimeError(f"{device} does not remember what was written")


def probe() -> float:
    """Probe the processor and every GPU of this node; the seconds that it took at best.

    Raises:
        RuntimeError: If one of them fails.
    """
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
    """The store through which a group meets: the first node makes it, on a free port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # not said to be exported

    limit = dt.timedelta(seconds=MEET_SECONDS)
    return TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=limit)


def meet(store: TCPStore, rank: int, size: int) -> None:
    """Reduce a tensor with the other nodes of the group.

    Args:
        store: Where they meet.
        rank: This node among them.
        size: How many they are.

    Raises:
        RuntimeError: If the others cannot be reached, or the sum is wrong.
    """
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
    """Run the test in this process: report the probe, hear where to meet, report that."""
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
        report(ProbeReport(stage="probe", well=False, seconds=0.0, message=str(error)))
        return
    report(ProbeReport(stage="probe", well=True, seconds=seconds, address=address))
    if options.size == 1:
        return
    host, _, port = sys.stdin.readline().strip().rpartition(":")
    try:
        meet(store or open_store(host, int(port), first=False), options.rank, options.size)
    except (RuntimeError, ValueError, OSError) as error:
        report(ProbeReport(stage="meet", well=False, seconds=seconds, message=str(error)))
        return
    report(ProbeReport(stage="meet", well=True, seconds=seconds))


def report(what: ProbeReport) -> None:
    """Print a line for the agent."""
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
