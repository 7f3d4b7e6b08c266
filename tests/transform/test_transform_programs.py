"""Random programs against a numpy interpreter: regions of cut sources, and whole tensors."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh import Transform
from remesh.core.geometry import Box
from remesh.transform import TensorInfo
from tests.strategies import boxes_in, partitions
from tests.transform.programs import Program, factorings, programs
from tests.transform.simulated import cut_evenly, fetch, pieces_of


@settings(deadline=None)
@given(programs(), st.data())
def test_random_regions_of_randomly_cut_sources(program: Program, data: st.DataObject) -> None:
    resolved = Transform(program.statements).resolve(
        {n: TensorInfo(t.dtype, t.array.shape) for n, t in program.sources.items()},
        {n: TensorInfo(t.dtype, t.array.shape) for n, t in program.names.items()},
    )
    resolved.check()
    sources = {
        name: pieces_of(tensor.array, data.draw(partitions(tensor.array.shape)))
        for name, tensor in program.sources.items()
    }
    name = data.draw(st.sampled_from(sorted(program.names)))
    array = program.names[name].array
    box = data.draw(boxes_in(array.shape))
    regions = resolved.regions(name, box)
    np.testing.assert_array_equal(fetch(regions, sources, box), array[box.slices])
    # No region reads more than is wanted of it.
    assert sum(region.source_box.size for region in regions) == box.size
    assert all(box.contains(region.target_box) for region in regions)


# In the last ones a later step cuts what an earlier one has left whole.
@pytest.mark.parametrize("seed", [*range(40), 171, 195, 234])
def test_parts_of_blocks_go_through_permutations_and_reshapes(seed: int) -> None:
    """A chain of them on one tensor, of which ranks hold parts and want a part."""
    dice = random.Random(seed)
    shape = dice.choice([(4, 6, 2), (3, 16), (2, 2, 3, 4)])
    whole = expected = np.arange(48, dtype=np.float32).reshape(shape)
    statements = []
    for _ in range(dice.randint(1, 4)):
        reshaped = dice.choice(factorings(48))
        if dice.random() < 0.6 and reshaped != expected.shape:
            expected = expected.reshape(reshaped)
            statements.append(f"x -> x, reshape={[*reshaped]}")
        else:
            order = dice.sample(range(expected.ndim), expected.ndim)
            expected = expected.transpose(order)
            statements.append(f"x -> x, permute={order}")
    resolved = Transform(statements).resolve({"x": TensorInfo("float32", shape)})
    sources = {"x": pieces_of(whole, cut_evenly(shape, [dice.randint(1, n) for n in shape]))}
    for _ in range(10):
        ends = [sorted(dice.sample(range(n + 1), 2)) for n in expected.shape]
        box = Box.from_slices(*((start, stop) for start, stop in ends))
        found = fetch(resolved.regions("x", box), sources, box)
        np.testing.assert_array_equal(found, expected[box.slices])


@settings(deadline=None)
@given(programs())
def test_dictionaries_of_tensors(program: Program) -> None:
    """Whole, through `apply`, with real dtypes, without targets and into them."""
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
