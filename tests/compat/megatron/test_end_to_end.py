"""Megatron Core trains, saved and loaded by the drop-in as by its own package."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.compat.megatron.end_to_end import Job, Run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@pytest.mark.slow
def test_megatron_trains_on_from_what_either_package_saved(tmp_path: Path) -> None:
    """Tensors cut over two ranks, then layers; the long form has experts and more layouts."""
    first = Run("gpt", 2, 1, 1, 2, "fully_reshardable", steps=1)
    other = msgspec.structs.replace(first, tensor=1, pipeline=2)
    by_own, by_remesh = str(tmp_path / "own"), str(tmp_path / "remesh")

    def loading(run: Run, source: str) -> Run:
        return msgspec.structs.replace(run, source=source)

    with Job("own") as own, Job("remesh") as remesh:
        losses = own.run(msgspec.structs.replace(first, target=by_own))
        assert remesh.run(msgspec.structs.replace(first, target=by_remesh)) == losses
        assert remesh.run(loading(first, by_own)) == losses[1:]
        elsewhere = own.run(loading(other, by_remesh))
        assert remesh.run(loading(other, by_own)) == elsewhere
    assert elsewhere == pytest.approx(losses[1:], abs=1e-2)


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


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("optimizer_format", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_eight_ranks_train_on_in_other_layouts(
    model: str, optimizer_format: str, tmp_path: Path
) -> None:
    """In the formats that the installed release writes."""
    with Job("own") as own, Job("remesh") as remesh:
        lines = compare(
            {"own": own, "remesh": remesh}, layouts(model, optimizer_format, 8), tmp_path
        )
    ways = "equal in own → own, own → remesh, remesh → own, remesh → remesh;"
    assert all(f": {ways}" in line for line in lines)
