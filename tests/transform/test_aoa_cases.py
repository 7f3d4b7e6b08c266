"""The acceptance cases of the language: on dicts of tensors, and saved and loaded by ranks.

Each tensor is cut into a part for each rank, along another axis when it is loaded. Where what a
statement means depends on how a tensor is cut, it is cut as the case says, and ranks that are left
over hold replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh import RemeshError, ShardedTensor
from remesh.exchange import Exchange
from remesh.sharding import Part
from remesh.storage import MemoryStorage
from remesh.transform import TensorInfo, arrays
from tests.support import run_ranks
from tests.transform.cases import CASES, Setting, setting_of, tensor_of
from tests.transform.simulated import Array, cut_evenly


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


def _held(
    exchange: Exchange, info: TensorInfo, name: str, array: Array, axis: int | None
) -> ShardedTensor:
    """One rank's parts of a tensor, cut along an axis or, if that is None, as it says itself."""
    assert info.num_pieces is not None
    counts = list(info.num_pieces)
    if axis is not None and array.ndim:
        counts = [1] * array.ndim
        counts[axis % array.ndim] = exchange.world_size
    boxes = cut_evenly(array.shape, counts)
    replica, place = divmod(exchange.rank, len(boxes))
    mine = boxes[place :: exchange.world_size]
    parts = [Part(box, tensor_of(array[box.slices], info.dtype)) for box in mine if box.size]
    return ShardedTensor(name, array.shape, tuple(parts), replica_id=replica)


def _save_and_load(exchange: Exchange, setting: Setting, storage: MemoryStorage) -> None:
    text = str(setting.transform)
    as_stated = "fused_ffn" in text or "fused_qkv_old" in text

    def held(infos: Mapping[str, TensorInfo], values: Mapping[str, Array], first: int) -> Any:
        return {
            name: _held(exchange, infos[name], name, array, None if as_stated else axis)
            for axis, (name, array) in enumerate(values.items(), first)
        }

    remesh.save(held(setting.sources, setting.arrays, 0), storage, group=exchange)
    targets = held(setting.targets, setting.initial, 1)
    remesh.load(targets, storage, transform=setting.transform, group=exchange)
    for name, target in targets.items():
        for part in target.parts:
            wanted = torch.from_numpy(setting.expected[name][part.box.slices])
            assert torch.equal(part.data.float(), wanted), (name, part.box)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_case_of_ranks(name: str, num_ranks: int) -> None:
    case = CASES[name]
    if case.get("expect_error"):
        with pytest.raises(RemeshError):
            run_ranks(num_ranks, _save_and_load, setting_of(case), MemoryStorage())
        return
    run_ranks(num_ranks, _save_and_load, setting_of(case), MemoryStorage())


def test_no_case_is_lost() -> None:
    assert len(CASES) == 36
