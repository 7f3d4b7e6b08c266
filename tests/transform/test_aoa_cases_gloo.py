"""The acceptance cases on gloo processes: saved by ranks that hold parts, loaded by ranks that do.

One job runs all cases, as starting processes takes longer than the cases. Each tensor is cut into
a part for each rank, along another axis when it is loaded. Where what a statement means depends on
how a tensor is cut, it is cut as the case says, and ranks that are left over hold replicas.
"""

from __future__ import annotations

from pathlib import Path

import torch

import remesh
from remesh import RemeshError, ShardedTensor
from remesh.exchange import Exchange
from remesh.sharding import Part
from remesh.transform import TensorInfo
from tests.support import run_processes
from tests.transform.cases import CASES, Case, Setting, setting_of, tensor_of
from tests.transform.simulated import Array, cut_evenly


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


def _depends_on_cuts(setting: Setting) -> bool:
    text = str(setting.transform)
    return "fused_ffn" in text or "fused_qkv_old" in text


def _save(exchange: Exchange, setting: Setting, path: Path) -> None:
    as_stated = _depends_on_cuts(setting)
    state = {
        name: _held(exchange, setting.sources[name], name, array, None if as_stated else axis)
        for axis, (name, array) in enumerate(setting.arrays.items())
    }
    remesh.save(state, path, group=exchange)


def _load(exchange: Exchange, setting: Setting, path: Path) -> dict[str, ShardedTensor]:
    as_stated = _depends_on_cuts(setting)
    targets = {
        name: _held(exchange, setting.targets[name], name, array, None if as_stated else axis + 1)
        for axis, (name, array) in enumerate(setting.initial.items())
    }
    remesh.load(targets, path, transform=setting.transform, group=exchange)
    return targets


def _check(setting: Setting, targets: dict[str, ShardedTensor], where: str) -> None:
    for name, target in targets.items():
        expected = torch.from_numpy(setting.expected[name])
        for part in target.parts:
            assert isinstance(part.data, torch.Tensor)
            wanted = expected[part.box.slices]
            assert torch.equal(part.data.float(), wanted), f"{where}, {name} {part.box}"


def _run_case(exchange: Exchange, case: Case, path: Path) -> None:
    try:
        setting = setting_of(case)
        _save(exchange, setting, path)
        targets = _load(exchange, setting, path)
    except RemeshError:
        if not case.get("expect_error"):
            raise
        return
    assert not case.get("expect_error"), f"{case['name']} should raise"
    _check(setting, targets, case["name"])


def _run_cases(exchange: Exchange, folder: Path) -> int:
    for number, case in enumerate(CASES.values()):
        _run_case(exchange, case, folder / str(number))
    return len(CASES)


def test_all_cases(tmp_path: Path) -> None:
    assert run_processes(2, _run_cases, tmp_path) == [len(CASES)] * 2
