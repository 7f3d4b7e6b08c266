"""Megatron Core trains, saved and loaded by the drop-in as by its own package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest

from tests.compat.megatron.end_to_end import Job, Run
from tests.compat.megatron.end_to_end.__main__ import compare, layouts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@pytest.mark.slow
def test_megatron_trains_on_from_what_either_package_saved(tmp_path: Path) -> None:
    """Tensors cut over two ranks, then layers; the script has experts and more layouts."""
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


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("optimizer_format", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_eight_ranks_train_on_in_other_layouts(
    model: str, optimizer_format: str, tmp_path: Path
) -> None:
    """What the script says of the formats that the installed release writes."""
    with Job("own") as own, Job("remesh") as remesh:
        lines = compare(
            {"own": own, "remesh": remesh}, layouts(model, optimizer_format, 8), tmp_path
        )
    ways = "equal in own → own, own → remesh, remesh → own, remesh → remesh;"
    assert all(f": {ways}" in line for line in lines)
