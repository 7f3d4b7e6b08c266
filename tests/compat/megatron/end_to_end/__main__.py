"""Train Megatron models on the CPU, saved and loaded through the drop-in and Megatron's own.

`python -m tests.compat.megatron.end_to_end [--sources CHECKOUT] [--ranks 4]`

For each model and each format of the distributed optimizer: a run with each package saves, and runs
with each package load both checkpoints, in the same layout and in another one, and train on. All
must give the same losses to the last bit, and in the same layout those of the run that went on.
Needs megatron-core, or a checkout of Megatron-LM (https://github.com/NVIDIA/Megatron-LM).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.compat.megatron.end_to_end import Job, Run

PACKAGES = ("own", "remesh")
FORMATS = ("fully_reshardable", "dp_reshardable", "fully_sharded_model_space")


def layouts(model: str, optimizer_format: str, num_ranks: int) -> list[Run]:
    """The layout to save in, and another one to load in.

    What `dp_reshardable` saves loads in another number of ranks, in the same layout otherwise.
    """
    is_moe, is_wide = model == "moe", num_ranks > 4
    first = Run(model, 2, 2 if is_wide else 1, 2 if is_moe else 1, num_ranks, optimizer_format)
    other = msgspec.structs.replace(first, tensor=1, pipeline=2)
    if is_wide:
        other = msgspec.structs.replace(other, **({"expert": 4} if is_moe else {"pipeline": 4}))
    if optimizer_format == "dp_reshardable":
        if is_moe:
            first = msgspec.structs.replace(first, tensor=1)
        other = msgspec.structs.replace(first, world_size=num_ranks // 2)
    return [first, other]


def name_of(run: Run) -> str:
    """A layout in short."""
    axes = [("TP", run.tensor), ("PP", run.pipeline), ("EP", run.expert)]
    named = [f"{axis}{size}" for axis, size in axes if size > 1]
    return " ".join([*named, f"on {run.world_size}"])


def compare(jobs: dict[str, Job], runs: Sequence[Run], folder: Path) -> list[str]:
    """A line for each layout to load in: whether all losses are equal."""
    first = runs[0]
    saved = {}
    for package, job in jobs.items():
        place = str(folder / f"{first.model} {first.optimizer_format} {package}")
        try:
            saved[package] = place, job.run(msgspec.structs.replace(first, target=place))
        except RuntimeError:
            saved[package] = place, []
    lines = []
    reference = saved["remesh"][1]
    for run in runs:
        found = {}
        for writer, (place, losses) in saved.items():
            for reader, job in jobs.items():
                able = losses and saved[reader][1]
                source = msgspec.structs.replace(run, source=place)
                found[f"{writer} → {reader}"] = job.run(source) if able else []
        told = {way: losses for way, losses in found.items() if losses}
        equal = len({tuple(losses) for losses in told.values()}) == 1
        apart = max(
            abs(loss - other)
            for losses in told.values()
            for loss, other in zip(losses, reference[run.steps :], strict=True)
        )
        lines.append(
            f"{run.model:4} {run.optimizer_format:26} {name_of(first)} → {name_of(run)}: "
            f"{'equal' if equal else 'NOT EQUAL'} in {', '.join(told)}; {apart:.1e} from the run "
            "that went on"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.megatron.end_to_end")
    parser.add_argument("--sources", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--ranks", type=int, default=8, help="how many ranks; 8 or 4")
    parser.add_argument("--models", nargs="*", default=["gpt", "moe"])
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS)
    arguments = parser.parse_args()
    if arguments.sources is None and importlib.util.find_spec("megatron") is None:
        sys.exit("megatron-core is not installed, and --sources names no checkout of Megatron-LM")
    jobs = {package: Job(package, arguments.sources) for package in PACKAGES}
    with tempfile.TemporaryDirectory() as folder, jobs["own"], jobs["remesh"]:
        for model in arguments.models:
            for optimizer_format in arguments.formats:
                runs = layouts(model, optimizer_format, arguments.ranks)
                print(*compare(jobs, runs, Path(folder)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
