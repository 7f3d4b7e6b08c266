"""The acceptance cases of the language, whole and cut over simulated ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from remesh import RemeshError
from remesh.core.geometry import Box
from remesh.transform import arrays
from tests.transform.cases import CASES, VALID, Setting, setting_of, tensor_of
from tests.transform.simulated import Array, cut_evenly, move, pieces_of


def _apply_whole(setting: Setting) -> dict[str, torch.Tensor]:
    tensors = {n: tensor_of(a, setting.sources[n].dtype) for n, a in setting.arrays.items()}
    targets = {n: tensor_of(a, setting.targets[n].dtype) for n, a in setting.initial.items()}
    return arrays.apply(setting.resolve(), tensors, targets)


@pytest.mark.parametrize("name", CASES)
def test_case_whole(name: str) -> None:
    case = CASES[name]
    if case.get("expect_error"):
        with pytest.raises(RemeshError):
            _apply_whole(setting_of(case))
        return
    setting = setting_of(case)
    for target, result in _apply_whole(setting).items():
        assert str(result.dtype) == f"torch.{setting.targets[target].dtype}"
        np.testing.assert_array_equal(result.to(torch.float32).numpy(), setting.expected[target])


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", VALID)
def test_case_cut_over_ranks(name: str, num_ranks: int) -> None:
    """How data is cut has nothing to do with the layout that the `fused_` macros are told of."""
    setting = setting_of(CASES[name])
    sources = {
        source: pieces_of(array, _boxes(array, num_ranks, axis))
        for axis, (source, array) in enumerate(setting.arrays.items())
    }
    boxes = {
        target: _boxes(array, num_ranks, axis + 1)
        for axis, (target, array) in enumerate(setting.expected.items())
    }
    results = move(setting.resolve(), sources, boxes, setting.initial)
    assert results.keys() == setting.expected.keys()
    for target, result in results.items():
        np.testing.assert_array_equal(result, setting.expected[target])


def _boxes(array: Array, num_ranks: int, axis: int) -> list[Box]:
    """One box a rank, cut along an axis that differs from tensor to tensor."""
    counts = [1] * array.ndim
    if array.ndim:
        counts[axis % array.ndim] = num_ranks
    return cut_evenly(array.shape, counts)


def test_no_case_is_lost() -> None:
    assert sum(not name.startswith("further-") for name in CASES) == 36
