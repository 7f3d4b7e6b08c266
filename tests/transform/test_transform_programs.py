"""Random programs against a numpy interpreter: whole tensors, regions, cut sources."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh import Transform
from remesh.core.geometry import Box
from remesh.transform import Resolved, TensorInfo
from tests.strategies import boxes_in, partitions
from tests.transform.programs import Program, programs
from tests.transform.simulated import Piece, fetch, pieces_of


def _resolved(program: Program) -> Resolved:
    """All names at the end are targets."""
    sources = {n: TensorInfo(t.dtype, t.array.shape) for n, t in program.sources.items()}
    targets = {n: TensorInfo(t.dtype, t.array.shape) for n, t in program.names.items()}
    resolved = Transform(program.statements).resolve(sources, targets)
    resolved.check()
    return resolved


def _whole_sources(program: Program) -> dict[str, list[Piece]]:
    return {
        name: pieces_of(tensor.array, [Box.whole(tensor.array.shape)])
        for name, tensor in program.sources.items()
    }


@settings(deadline=None)
@given(programs())
def test_whole_tensors(program: Program) -> None:
    resolved = _resolved(program)
    sources = _whole_sources(program)
    for name, tensor in program.names.items():
        box = Box.whole(tensor.array.shape)
        np.testing.assert_array_equal(fetch(resolved.regions(name), sources, box), tensor.array)


@settings(deadline=None)
@given(programs(), st.data())
def test_random_regions_of_randomly_cut_sources(program: Program, data: st.DataObject) -> None:
    resolved = _resolved(program)
    sources = {
        name: pieces_of(tensor.array, data.draw(partitions(tensor.array.shape)))
        for name, tensor in program.sources.items()
    }
    name = data.draw(st.sampled_from(sorted(program.names)))
    array = program.names[name].array
    box = data.draw(boxes_in(array.shape))
    result = fetch(resolved.regions(name, box), sources, box)
    np.testing.assert_array_equal(result, array[box.slices])


@settings(deadline=None)
@given(programs(), st.data())
def test_a_region_reads_no_more_than_it_wants(program: Program, data: st.DataObject) -> None:
    resolved = _resolved(program)
    name = data.draw(st.sampled_from(sorted(program.names)))
    box = data.draw(boxes_in(program.names[name].array.shape))
    regions = resolved.regions(name, box)
    assert sum(region.source_box.size for region in regions) == box.size
    assert sum(region.target_box.size for region in regions) == box.size
    assert all(box.contains(region.target_box) for region in regions)


@settings(deadline=None)
@given(programs())
def test_dictionaries_of_tensors(program: Program) -> None:
    """The same through `apply`, with real dtypes, without targets and into them."""
    transform = Transform(program.statements)
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    tensors = {n: torch.tensor(t.array).to(dtypes[t.dtype]) for n, t in program.sources.items()}
    for name, result in transform.apply(tensors).items():
        expected = program.names[name]
        assert result.dtype == dtypes[expected.dtype]
        np.testing.assert_array_equal(result.to(torch.float32).numpy(), expected.array)
    targets = {
        name: torch.full(t.array.shape, -1, dtype=dtypes[t.dtype])
        for name, t in program.names.items()
    }
    results = transform.apply(tensors, targets)
    for name, expected in program.names.items():
        assert results[name] is targets[name]
        np.testing.assert_array_equal(targets[name].to(torch.float32).numpy(), expected.array)
