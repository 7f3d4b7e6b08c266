"""The test of a group of nodes: can each compute and remember, and can they talk to each other?

One process of each node first probes its own processor and memory: a product of matrices whose
result is known, and a block of memory that is filled and read again, on every device of the node.
Then all processes of the group reduce a tensor together and compare the sum with the one that it
must be. A broken driver may hang or kill the process that finds it, so the test runs in a process
of its own, which `run_test` starts, gives a time limit, and reads one line of JSON from.
"""

from __future__ import annotations

import argparse
import datetime as dt
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from remesh.elastic.node import Node, TestOutcome
from remesh.elastic.protocol import Test
from remesh.errors import MasterError

NUM_PROBES = 3
"""Times that the probe is made: anything can be slow once, so the fastest counts."""
MATRIX = 1024
MEMORY_BYTES = 64 << 20
REDUCE_BYTES = 16 << 20
MEET_SECONDS = 30.0
"""How long the members of a group wait for the address of the first one."""

COMMAND = (sys.executable, "-m", "remesh.elastic.node_check")


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the process prints as its last line.

    Attributes:
        stage: `probe` if the node itself failed, `meet` if the group did, `done` if nothing did.
        seconds: Duration of the node's own probe; 0 if it failed.
        message: What went wrong.
    """

    stage: str
    seconds: float
    message: str = ""


def run_test(
    node: Node, test: Test, *, seconds: float = 60.0, command: Sequence[str] = COMMAND
) -> TestOutcome:
    """Take part in a test.

    Args:
        node: This node, which tells the others of the group where to meet.
        test: What the master wants tested.
        seconds: Time limit.
        command: Starts the process; arguments follow.
    """
    ids = [member.id for member in test.group]
    rank = ids.index(test.node_id)
    arguments = [*command, "--rank", str(rank), "--size", str(len(ids))]
    key = f"check {test.check}.{test.test_round} of node {ids[0]}"
    if rank > 0:
        try:
            address = node.get(test.round, key, MEET_SECONDS)
        except MasterError as error:
            return TestOutcome(passed=False, broken=False, seconds=0.0, message=str(error))
        arguments += ["--address", address]
    elif len(ids) > 1:
        arguments += ["--address", f"{test.group[0].address}:0"]

    def tell(address: str) -> None:
        node.put(test.round, key, address)

    return _judge(*_run(arguments, seconds, tell), seconds=seconds)


def run_alone(*, seconds: float = 60.0, command: Sequence[str] = COMMAND) -> TestOutcome:
    """Test this node by itself.

    Args:
        seconds: Time limit.
        command: Starts the process.
    """
    return _judge(*_run(command, seconds, lambda _address: None), seconds=seconds)


def _run(
    arguments: Sequence[str], seconds: float, tell: Callable[[str], None]
) -> tuple[int | None, str, str]:
    """Run the process; its exit code (None: it took too long), its report, and its complaints.

    A first line that begins with `at ` is the address at which it waits for the others.
    """
    with subprocess.Popen(  # noqa: S603 - our own module, or what the caller put in its place
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        try:
            first = process.stdout.readline()
            if first.startswith("at "):
                tell(first.removeprefix("at ").strip())
                first = ""
            out, errors = process.communicate()
        except BaseException:
            process.kill()
            raise
        finally:
            on_time = alarm.is_alive()
            alarm.cancel()
        return process.returncode if on_time else None, first + out, errors


def _judge(exit_code: int | None, out: str, errors: str, *, seconds: float) -> TestOutcome:
    if exit_code is None:
        return TestOutcome(
            passed=False, broken=False, seconds=seconds, message=f"took more than {seconds:g} s"
        )
    lines = out.strip().splitlines()
    try:
        report = msgspec.json.decode(lines[-1] if lines else "", type=ProbeReport)
    except msgspec.MsgspecError:
        said = errors.strip().splitlines()[-1:] or ["without a word"]
        # A process that dies of its own probe says nothing of the others.
        return TestOutcome(
            passed=False,
            broken=True,
            seconds=seconds,
            message=f"the test ended with exit code {exit_code}: {said[0]}",
        )
    return TestOutcome(
        passed=report.stage == "done",
        broken=report.stage == "probe",
        seconds=report.seconds,
        message=report.message,
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


def meet(rank: int, size: int, address: str) -> None:
    """Reduce a tensor with the other nodes of the group.

    Args:
        rank: This node among them.
        size: How many they are.
        address: `host:port` of the first; it takes a free port and prints it.

    Raises:
        RuntimeError: If the others cannot be reached, or the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    host, _, port = address.rpartition(":")
    limit = dt.timedelta(seconds=MEET_SECONDS)
    store = dist.TCPStore(  # type: ignore[attr-defined] # re-exported without saying so
        host, int(port), is_master=rank == 0, wait_for_workers=False, timeout=limit
    )
    if rank == 0:
        sys.stdout.write(f"at {host}:{store.port}\n")
        sys.stdout.flush()
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
    """Run the test in this process and print its report."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--address", default="")
    options = parser.parse_args(arguments)

    try:
        seconds = probe()
    except (RuntimeError, ValueError, OSError) as error:
        report(ProbeReport(stage="probe", seconds=0.0, message=str(error)))
        return
    try:
        if options.size > 1:
            meet(options.rank, options.size, options.address)
    except (RuntimeError, ValueError, OSError) as error:
        report(ProbeReport(stage="meet", seconds=seconds, message=str(error)))
        return
    report(ProbeReport(stage="done", seconds=seconds))


def report(what: ProbeReport) -> None:
    """Print the last line."""
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
