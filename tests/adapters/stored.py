"""States of small models, saved into memory and loaded from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import remesh
from remesh.checkpoint.report import RestoreReport
from remesh.storage import MemoryStorage
from tests.conversions.model import Chunk, Place, Shape

SHAPE = Shape(predicts_ahead=False)


def saved(state: Any) -> MemoryStorage:
    storage = MemoryStorage()
    remesh.save(state, storage)
    return storage


def transfer(source: Any, target: Any, **options: Any) -> RestoreReport:
    """Load what one state holds into another; an error if names are missing or left over."""
    return remesh.load(target, saved(source), **{"unexpected": "error", **options})


def check_equal(path: Any, expected: Any) -> None:
    """Check that two checkpoints hold the same, in whatever order groups have their parameters."""
    found, wanted = remesh.Checkpoint(path), remesh.Checkpoint(expected)
    assert set(found.index) == set(wanted.index), path
    assert found.values == wanted.values, path
    lists = [{name: sorted(of.lists[name]) for name in of.lists} for of in (found, wanted)]
    assert lists[0] == lists[1], path
    for name in wanted.index:
        assert torch.equal(found.read(name), wanted.read(name)), f"{path}: {name}"


def transformer(rank: int = 0, size: int = 1, *, layers: int = 2, **options: Any) -> Chunk:
    """Layers of a transformer that is cut by hand, on one of several tensor-parallel ranks."""
    place = Place(tp_rank=rank, tp_size=size, layers=range(layers), **options)
    return Chunk(SHAPE, place)


def randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def optimizer_with_state(module: nn.Module, seed: int) -> torch.optim.AdamW:
    """An optimizer whose moments are random and whose third step is the next."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.25)
    for parameter in module.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(2.0),
            "exp_avg": torch.randn(parameter.shape, generator=generator),
            "exp_avg_sq": torch.rand(parameter.shape, generator=generator),
        }
    return optimizer
