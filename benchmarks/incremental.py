"""What a save costs where little or nothing has changed since the save before.

One process with a Llama-shaped model in bfloat16. Two runs:

* `adapter`: the model is frozen; adapters of rank 4 beside the matrices of the attention are
  trained with their AdamW state, as in LoRA;
* `full`: everything changes, so that nothing can be kept.

For each, the bytes that each save writes and keeps, the CPU seconds of the process, the time until
the trainer may go on, and the time until the checkpoint is durable, beside DCP's `async_save` and,
as the limit, the bytes of all tensors written raw as in `benchmarks.save_load`. Contestants take
turns; medians of the saves from the fourth on.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import remesh
from benchmarks.report import median, print_table, write_json
from benchmarks.save_load import raw_write, shapes_of
from remesh.events import Event

RANK = 4
NUM_FIRST = 3
"""Saves that are not counted."""


@dataclass
class Run:
    """A state, and what changes between two saves."""

    state: dict[str, Any]
    step: Callable[[], None]


@dataclass
class Saves:
    """What was measured of the saves of one contestant."""

    written: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        """Listen to the saves of remesh."""
        if event.point == "save.parts_gathered":
            self.written.append(event.num_bytes)
        elif event.point == "save.kept":
            self.kept.append(event.num_bytes)

    def take(self, start: Callable[[], Any]) -> None:
        """Measure one save; `start` returns what is waited for."""
        cpu, started = time.process_time(), time.perf_counter()
        handle = start()
        self.blocked.append(time.perf_counter() - started)
        handle.result()
        self.durable.append(time.perf_counter() - started)
        self.cpu.append(time.process_time() - cpu)


def model_of(gibibytes: float, *, frozen: bool) -> torch.nn.ParameterDict:
    # The shapes are those of a state with 14 bytes a parameter; here it has 2.
    return torch.nn.ParameterDict(
        {
            name.replace(".", "_"): torch.nn.Parameter(
                torch.empty(shape, dtype=torch.bfloat16).uniform_(), requires_grad=not frozen
            )
            for name, shape in shapes_of(gibibytes * 7).items()
        }
    )


def adapter(gibibytes: float) -> Run:
    base = model_of(gibibytes, frozen=True)
    shapes = [tuple(one.shape) for name, one in base.items() if "attention" in name]
    adapters = torch.nn.ParameterList(
        torch.nn.Parameter(torch.rand(shape))
        for rows, columns in shapes
        for shape in ((rows, RANK), (RANK, columns))
    )
    optimizer = torch.optim.AdamW(adapters.parameters())

    def step() -> None:
        for one in adapters:
            one.grad = torch.rand_like(one)
        optimizer.step()

    return Run({"base": base, "adapters": adapters, "optimizer": optimizer}, step)


def changing(gibibytes: float) -> Run:
    model = model_of(gibibytes, frozen=False)
    moving = [one.data for one in model.parameters()]

    def step() -> None:
        for one in moving:
            one.view(torch.int16).add_(1)

    return Run({"model": model}, step)


def measure(run: Run, folder: Path, rounds: int) -> dict[str, Any]:
    ours, theirs, limits = Saves(), Saves(), []
    num_bytes = 0
    with remesh.Saver(run.state, on_event=ours.hear) as saver:
        for number in range(NUM_FIRST + rounds):
            run.step()
            place = folder / str(number)
            ours.take(lambda: saver.save_async(run.state, place / "remesh"))  # noqa: B023
            num_bytes = ours.written[-1] + ours.kept[-1]
            if number >= NUM_FIRST:
                flat = {
                    name: value.state_dict()
                    for name, value in run.state.items()
                    if isinstance(value, torch.nn.Module)
                }
                theirs.take(lambda: dcp.async_save(flat, checkpoint_id=place / "dcp"))  # noqa: B023
                started = time.perf_counter()
                raw_write(place / "raw", num_bytes)
                limits.append(time.perf_counter() - started)
                shutil.rmtree(place / "dcp")
                shutil.rmtree(place / "raw")
            if number:
                shutil.rmtree(folder / str(number - 1))
    limit = median(limits)
    return {
        "num_bytes": num_bytes,
        "limit_seconds": limit,
        "written_by_save": ours.written,
        "written": median(ours.written[NUM_FIRST:]) / num_bytes,
        "blocked": median(ours.blocked[NUM_FIRST:]) / limit,
        "durable": median(ours.durable[NUM_FIRST:]) / limit,
        "cpu_seconds": median(ours.cpu[NUM_FIRST:]),
        "dcp_blocked": median(theirs.blocked) / limit,
        "dcp_durable": median(theirs.durable) / limit,
        "dcp_cpu_seconds": median(theirs.cpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=".", help="where to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], Run]] = {
        "adapter": lambda: adapter(arguments.gib),
        "full": lambda: changing(arguments.gib),
    }
    results = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place).resolve()
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        for name, make in runs.items():
            results[name] = measure(make(), folder / name, arguments.rounds)
        dist.destroy_process_group()
    print_table(
        f"{arguments.gib} GiB of model, {arguments.rounds} rounds; times as multiples of the limit",
        ["run", "written", "blocked", "durable", "CPU", "DCP: blocked", "durable", "CPU"],
        [
            [
                name,
                f"{row['written']:.1%}",
                f"{row['blocked']:.2f}",
                f"{row['durable']:.2f}",
                f"{row['cpu_seconds']:.2f} s",
                f"{row['dcp_blocked']:.2f}",
                f"{row['dcp_durable']:.2f}",
                f"{row['dcp_cpu_seconds']:.2f} s",
            ]
            for name, row in results.items()
        ],
    )
    write_json("incremental", {"gibibytes": arguments.gib, "runs": results})


if __name__ == "__main__":
    main()
