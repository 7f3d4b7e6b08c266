"""How long an asynchronous save keeps the trainer waiting, and how much it slows training down.

One process with a Llama-shaped state in host memory (see `benchmarks.save_load`).

`blocked` is the time until the call returns and the state may change, also relative to one copy of
the state into memory that was touched before, which is the least that any staging can take by one
thread. `durable` is the time until the checkpoint is committed, also relative to `limit`: the same
bytes written raw, as in `benchmarks.save_load`. Contestants take turns within each round; medians
over the rounds, the first round apart because memory is new then.

`step` is the time of a training step (a small model, forward, backward, optimizer) while a save is
under way in the background, relative to the same step with nothing beside it. `raw` is what the
disk's own traffic costs: another process, which has nothing else to do, writes the same number of
bytes with direct I/O.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import remesh
from benchmarks.report import median, print_table, write_json
from benchmarks.save_load import raw_write, shapes_of

DTYPES = {
    "model": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}

RAW = """
import sys
from remesh.storage import LocalStorage, aligned_buffer
block, size = 4 << 20, int(sys.argv[2])
buffer = aligned_buffer(block)
buffer[:] = 1
print("ready", flush=True)
sys.stdin.readline()
writer = LocalStorage(sys.argv[1]).create("raw", size)
for start in range(0, size - block + 1, block):
    writer.write(start, buffer)
writer.finish()
print("done", flush=True)
"""


def make_state(gibibytes: float) -> dict[str, torch.Tensor]:
    return {
        f"{kind}.{name}": torch.empty(shape, dtype=dtype).uniform_()
        for name, shape in shapes_of(gibibytes).items()
        for kind, dtype in DTYPES.items()
    }


def change(state: dict[str, torch.Tensor]) -> None:
    """Change every block of a state, as training does; what does not change is not written."""
    for tensor in state.values():
        tensor.view(-1)[:: 1 << 16] += 1


def measure_remesh(saver: remesh.Saver, state: Any, path: Path) -> tuple[float, float]:
    started = time.perf_counter()
    handle = saver.save_async(state, path)
    blocked = time.perf_counter() - started
    handle.result()
    return blocked, time.perf_counter() - started


def measure_dcp(state: Any, path: Path) -> tuple[float, float]:
    started = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=path)
    blocked = time.perf_counter() - started
    assert isinstance(future, Future)
    future.result()
    return blocked, time.perf_counter() - started


def measure_blocking(state: Any, folder: Path, rounds: int) -> tuple[list[list[str]], Any]:
    """Rows and results of the first table."""
    found: dict[str, list[tuple[float, float]]] = {}
    copies, raw = [], []
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    copy = {name: tensor.clone() for name, tensor in state.items()}
    with (
        remesh.Saver() as cold,
        remesh.Saver(state) as warm,
        remesh.Saver(state, writer="process") as process,
    ):
        time.sleep(3)  # what a job does before its first save
        for number in range(rounds):
            change(state)
            started = time.perf_counter()
            for name, tensor in state.items():
                copy[name].copy_(tensor)
            copies.append(time.perf_counter() - started)
            place = folder / f"round-{number}"
            started = time.perf_counter()
            raw_write(place / "raw", num_bytes)
            raw.append(time.perf_counter() - started)
            contestants: dict[str, Callable[[], tuple[float, float]]] = {
                "Saver()": lambda: measure_remesh(cold, state, place / "cold"),  # noqa: B023
                "Saver(state)": lambda: measure_remesh(warm, state, place / "warm"),  # noqa: B023
                'Saver(state, writer="process")': lambda: measure_remesh(
                    process,
                    state,
                    place / "process",  # noqa: B023
                ),
                "DCP async_save": lambda: measure_dcp(state, place / "dcp"),  # noqa: B023
            }
            for name, action in contestants.items():
                found.setdefault(name, []).append(action())
            subprocess.run(["rm", "-r", place], check=True)
    one_copy, limit = median(copies), median(raw)
    rows, results = [], []
    for name, times in found.items():
        for when, some in (("first save", times[:1]), ("later saves", times[1:])):
            blocked, durable = median([b for b, _ in some]), median([d for _, d in some])
            row = [f"{name}, {when}", f"{blocked:.2f} s", f"{blocked / one_copy:.2f}"]
            rows.append([*row, f"{durable:.2f} s", f"{durable / limit:.2f}"])
            results.append(
                {"contestant": name, "when": when, "blocked": blocked, "durable": durable}
            )
    return rows, {"copy_seconds": one_copy, "limit_seconds": limit, "results": results}


class Training:
    """A training loop whose steps are timed."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(32, 256)

    def step(self) -> float:
        """Take one step; its seconds."""
        started = time.perf_counter()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started

    def steps(self, go_on: Callable[[], bool]) -> list[float]:
        """Take steps, at least one; the seconds of each."""
        times = [self.step()]
        while go_on():
            times.append(self.step())
        return times


def steps_for(training: Training, seconds: float) -> list[float]:
    ends = time.perf_counter() + seconds
    return training.steps(lambda: time.perf_counter() < ends)


def steps_beside_raw(training: Training, folder: Path, num_bytes: int) -> list[float]:
    command = [sys.executable, "-c", RAW, str(folder), str(num_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write("go\n")
        process.stdin.flush()
        return training.steps(lambda: process.poll() is None)


def steps_beside_save(
    training: Training, saver: remesh.Saver, state: Any, place: Path
) -> list[float]:
    handle = saver.save_async(state, place)
    times = training.steps(lambda: not handle.done())
    handle.result()
    return times


def measure_slowdown(state: Any, folder: Path, rounds: int) -> tuple[list[list[str]], Any]:
    """Rows and results of the second table."""
    training = Training()
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    found: dict[str, list[float]] = {}
    with remesh.Saver(state) as thread, remesh.Saver(state, writer="process") as process:
        for number in range(rounds):
            place = folder / f"steps-{number}"
            change(state)
            contestants: dict[str, Callable[[], list[float]]] = {
                "nothing": lambda: steps_for(training, 1.0),
                "raw": lambda: steps_beside_raw(training, place / "raw", num_bytes),  # noqa: B023
                "thread": lambda: steps_beside_save(
                    training,
                    thread,
                    state,
                    place / "thread",  # noqa: B023
                ),
                "process": lambda: steps_beside_save(
                    training,
                    process,
                    state,
                    place / "process",  # noqa: B023
                ),
            }
            # Who comes after whom changes, for the disk tidies up after what was removed.
            order = [*contestants.items()]
            for name, action in order[number % 4 :] + order[: number % 4]:
                times = action()
                found.setdefault(name, []).append(sum(times) / len(times))
            subprocess.run(["rm", "-r", place], check=True)
            time.sleep(1)
    alone = median(found["nothing"])
    rows = [
        [name, f"{median(times) * 1e3:.2f} ms", f"{median(times) / alone:.2f}"]
        for name, times in found.items()
    ]
    return rows, {name: median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="where to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place).resolve()
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        state = make_state(arguments.gib)
        blocking, blocking_results = measure_blocking(state, folder, arguments.rounds)
        slowdown, slowdown_results = measure_slowdown(state, folder, arguments.rounds)
        dist.destroy_process_group()
    title = f"{arguments.gib} GiB of state, {arguments.rounds} rounds"
    one_copy, limit = blocking_results["copy_seconds"], blocking_results["limit_seconds"]
    print_table(
        f"{title}; one copy takes {one_copy:.2f} s, the limit is {limit:.2f} s",
        ["", "blocked", "x copy", "durable after", "x limit"],
        blocking,
    )
    print_table(f"{title}: training beside a save", ["beside", "step", "x nothing"], slowdown)
    size = {"gibibytes": arguments.gib, "rounds": arguments.rounds}
    write_json("async_save", {**size, **blocking_results, "step_seconds": slowdown_results})


if __name__ == "__main__":
    main()
