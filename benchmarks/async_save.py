"""How long an asynchronous save keeps the trainer waiting: remesh and torch's `async_save`.

One process with a Llama-shaped state in host memory (see `benchmarks.save_load`). `blocked` is
the time until the call returns and the state may change; `durable` the time until the checkpoint
is committed. Both are given in seconds and relative to one copy of the state into memory that
was touched before, which is the least that any staging can take. Contestants take turns within
each round; medians over the rounds, the first round apart because memory is new then.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import remesh
from benchmarks.report import median, print_table, write_json
from benchmarks.save_load import shapes_of

DTYPES = {
    "model": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}


def make_state(gibibytes: float) -> dict[str, torch.Tensor]:
    return {
        f"{kind}.{name}": torch.empty(shape, dtype=dtype).uniform_()
        for name, shape in shapes_of(gibibytes).items()
        for kind, dtype in DTYPES.items()
    }


def measure_remesh(saver: remesh.Saver, state: Any, path: Path) -> tuple[float, float]:
    started = time.perf_counter()
    handle = saver.save_async(state, path)
    blocked = time.perf_counter() - started
    handle.wait()
    return blocked, time.perf_counter() - started


def measure_dcp(state: Any, path: Path) -> tuple[float, float]:
    started = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=path)
    blocked = time.perf_counter() - started
    future.result()
    return blocked, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="where to write")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    copies = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place, remesh.Saver() as saver:
        folder = Path(place).resolve()
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        state = make_state(arguments.gib)
        copy = {name: tensor.clone() for name, tensor in state.items()}
        for number in range(arguments.rounds):
            started = time.perf_counter()
            for name, tensor in state.items():
                copy[name].copy_(tensor)
            copies.append(time.perf_counter() - started)
            contestants: dict[str, Callable[[], tuple[float, float]]] = {
                "remesh": lambda: measure_remesh(saver, state, folder / f"remesh-{number}"),  # noqa: B023
                "torch dcp": lambda: measure_dcp(state, folder / f"dcp-{number}"),  # noqa: B023
            }
            for name, action in contestants.items():
                found.setdefault(name, []).append(action())
        dist.destroy_process_group()
    limit = median(copies)
    rows, results = [], []
    for name, times in found.items():
        for when, some in (("first save", times[:1]), ("later saves", times[1:])):
            blocked, durable = median([b for b, _ in some]), median([d for _, d in some])
            rows.append(
                [
                    f"{name}, {when}",
                    f"{blocked:.2f} s",
                    f"{blocked / limit:.2f}",
                    f"{durable:.2f} s",
                ]
            )
            results.append(
                {"contestant": name, "when": when, "blocked": blocked, "durable": durable}
            )
    print_table(
        f"{arguments.gib} GiB of state, {arguments.rounds} rounds; one copy takes {limit:.2f} s",
        ["", "blocked", "x copy", "durable after"],
        rows,
    )
    write_json("async_save", {"copy_seconds": limit, "results": results})


if __name__ == "__main__":
    main()
