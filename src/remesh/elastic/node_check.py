"""The test of a group of nodes: processor and memory of each, and a collective among them.

One process of each node first probes its own processor and memory: a product of matrices whose
result is known, and a block of memory that is filled and read again, on every device of the node.
Then all processes of the group reduce a tensor together and compare the sum with the one that it
must be. They meet in the store of the first node's agent, where each sets that its probe has
passed. A broken driver may hang or kill the process that finds it, so the test runs in a process of
its own with a time limit, and the agent tells the others in the store if a probe has failed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

import msgspec

from remesh.elastic.protocol import NodeTest, TestResult

if TYPE_CHECKING:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not said to be exported

MATRIX = 1024
MEMORY_BYTES = 64 << 20
REDUCE_BYTES = 16 << 20
MEET_SECONDS = 30.0
"""How long the members of a group wait for each other after their probes have passed."""
PASSED, FAILED = "passed", "failed"
"""Values of the store: results of the probe of a node."""

COMMAND = (sys.executable, "-m", "remesh.elastic.script", "-m", "remesh.elastic.node_check")


def run_test(
    test: NodeTest, *, seconds: float = 90.0, command: Sequence[str] = COMMAND
) -> TestResult:
    """Take part in a test."""
    result = run_alone(test, seconds=seconds, command=command)
    if result.broken and len(test.group) > 1:
        with contextlib.suppress(RuntimeError):  # without the store, no other can pass either
            open_store(test).set(str(test.rank), FAILED)
    return result


def run_alone(
    test: NodeTest | None = None, *, seconds: float = 60.0, command: Sequence[str] = COMMAND
) -> TestResult:
    """Test this node, by itself unless a test names others."""
    started, is_late, code = time.monotonic(), False, 0
    arguments = [*command, msgspec.json.encode(test).decode(), str(started)]
    try:
        ended = subprocess.run(  # noqa: S603 - our own module, or the caller's
            arguments, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        output, is_late = error.stdout or b"", True
        problem = f"the test took more than {seconds:g} s"
    else:
        output, code = ended.stdout, ended.returncode
        errors = ended.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        problem = f"the test ended with exit code {code}: {errors[-1]}"
    try:
        result = msgspec.json.decode(output.splitlines()[-1], type=TestResult)
    except (IndexError, msgspec.MsgspecError):
        elapsed = time.monotonic() - started
        return TestResult(passed=False, broken=True, late=is_late, elapsed=elapsed, message=problem)
    if (is_late or code) and not (result.passed or result.message):  # while the group met
        return msgspec.structs.replace(result, passed=False, message=problem)
    return result


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


def probe() -> None:
    """Probe the processor and every GPU of this node."""
    import torch

    for device in ("cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))):
        probe_device(device)


def open_store(test: NodeTest) -> PrefixStore:
    """The part of the store of the first node's agent in which the group of a test meets."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # likewise

    first, limit = test.group[0], dt.timedelta(seconds=MEET_SECONDS)
    key = f"check {test.check}.{test.test_round} of round {test.round}"
    return PrefixStore(key, TCPStore(first.address, first.port, is_master=False, timeout=limit))


def meet(test: NodeTest) -> None:
    """Reduce a tensor with the other nodes of the group, when the probes of all have passed."""
    import torch
    import torch.distributed as dist

    store, rank, size = open_store(test), test.rank, len(test.group)
    store.set(str(rank), PASSED)
    for other in map(str, range(size)):
        store.wait([other], dt.timedelta(days=1))  # this process is killed long before
        if store.get(other).decode() != PASSED:
            raise RuntimeError("the probe of a node of the group failed")
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


def main() -> None:
    """Run the test in this process: print the result of the probe, then that of the group."""
    test = msgspec.json.decode(sys.argv[1], type=NodeTest | None)
    is_alone = test is None or len(test.group) == 1
    # The output is for results alone: libraries write to it as well, some of them late.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    message = ""
    try:
        probe()
    except (RuntimeError, ValueError, OSError) as error:
        message = str(error) or type(error).__name__
    probed = TestResult(
        passed=not message and is_alone,
        broken=bool(message),
        elapsed=time.monotonic() - float(sys.argv[2]),
        message=message,
    )
    report(probed, output)
    if test is None or is_alone or probed.broken:
        return
    try:
        meet(test)
    except (RuntimeError, ValueError, OSError) as error:
        message = str(error) or type(error).__name__
    report(msgspec.structs.replace(probed, passed=not message, message=message), output)


def report(result: TestResult, output: TextIO) -> None:
    """Write a result as a line."""
    output.write(msgspec.json.encode(result).decode() + "\n")
    output.flush()


if __name__ == "__main__":
    main()
