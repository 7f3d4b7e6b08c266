"""The project's own format and adapters pass the suites."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import remesh
from remesh.adapters import (
    DescribedOptimizer,
    FlatSpan,
    NamedModule,
    Split,
    flat_partition,
    shard_weight,
)
from remesh.core.index import Index
from remesh.storage import LocalStorage, Storage
from tests.support.state_conformance import (
    AdapterConformance,
    Arrays,
    FormatConformance,
    LayoutConformance,
)


class TestNative(FormatConformance):
    def write(self, arrays: Arrays, folder: Path) -> None:
        remesh.save(dict(arrays), folder)

    def open(self, folder: Path) -> tuple[Storage, Index]:
        return LocalStorage(folder), remesh.Checkpoint(folder).index


class TestTensors(AdapterConformance):
    def make(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        plain = torch.rand(5, 3, generator=generator)
        return {
            "plain": plain,
            "half": plain.bfloat16(),
            "strided": torch.rand(4, 6)[:, ::2] + seed,
        }


class TestNumpy(AdapterConformance):
    def make(self, seed: int) -> Any:
        return {"a": np.random.default_rng(seed).random((3, 4)), "n": seed, "s": {"t": (seed, "x")}}


class TestModule(AdapterConformance):
    def make(self, seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        model(torch.rand(8, 3))
        model.tied = model[2]
        return {"model": model}


class _Optimizer(AdapterConformance):
    optimizer: type[torch.optim.Optimizer]
    options: ClassVar[dict[str, Any]] = {}

    def make(self, seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Linear(3, 4)
        optimizer = self.optimizer(model.parameters(), **self.options)
        for _ in range(2 + seed):
            model(torch.rand(5, 3)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}


class TestAdamW(_Optimizer):
    optimizer = torch.optim.AdamW


class TestSGD(_Optimizer):
    optimizer = torch.optim.SGD
    options: ClassVar[dict[str, Any]] = {"lr": 0.1, "momentum": 0.9}


class TestAdafactor(_Optimizer):
    optimizer = torch.optim.Adafactor


class TestScheduler(AdapterConformance):
    def make(self, seed: int) -> Any:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(3 + seed):
            optimizer.step()
            scheduler.step()
        return {"scheduler": scheduler}


class TestGenerator(AdapterConformance):
    def make(self, seed: int) -> Any:
        return {"generator": torch.Generator().manual_seed(seed)}


class _Sampler:
    def __init__(self, seed: int) -> None:
        self.position = seed
        self.order = random.Random(seed).sample(range(20), 20)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": torch.tensor(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.order = state["order"].tolist()


class TestStateful(AdapterConformance):
    def make(self, seed: int) -> Any:
        return {"sampler": _Sampler(seed)}


class Shards(nn.Module):
    """A weight of 12 rows, of which every rank has some, and a bias that all have."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.split = Split(0, rank, num_ranks)
        self.weight = nn.Parameter(torch.rand(12 // num_ranks, 3))
        self.bias = nn.Parameter(torch.rand(3))

    def sharded_state_dict(self, prefix: str = "") -> dict[str, remesh.ShardedTensor]:
        weight = shard_weight(f"{prefix}weight", self.weight.detach(), self.split)
        bias = shard_weight(f"{prefix}bias", self.bias.detach())
        return {f"{prefix}weight": weight, f"{prefix}bias": bias}


def _stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.rand(parameter.shape)
    optimizer.step()
    return optimizer


class TestShards(LayoutConformance):
    def make(self, rank: int, num_ranks: int, seed: int) -> Any:
        torch.manual_seed(seed)
        module = Shards(rank, num_ranks)
        return {"model": module, "optimizer": _stepped(torch.optim.AdamW(module.parameters()))}


class TestStages(LayoutConformance):
    def make(self, rank: int, num_ranks: int, seed: int) -> Any:
        torch.manual_seed(seed)
        count = 12 // num_ranks
        module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))
        names = {str(n): str(n + rank * count) for n in range(count)}
        optimizer = _stepped(torch.optim.AdamW(module.parameters()))
        return {"model": NamedModule(module, names), "optimizer": optimizer}


class TestFlatSlices(LayoutConformance):
    def make(self, rank: int, num_ranks: int, seed: int) -> Any:
        torch.manual_seed(seed)
        spans = [FlatSpan("weight", (4, 3), 0), FlatSpan("bias", (4,), 13)]
        per_rank = -(-17 // num_ranks)
        flat = nn.Parameter(torch.rand(per_rank))
        optimizer = _stepped(torch.optim.AdamW([flat]))
        slices = flat_partition(spans, flat, start=rank * per_rank)
        return {"optimizer": DescribedOptimizer(optimizer, {flat: slices}, own_key="master")}


class TestDescribedOptimizer(AdapterConformance):
    def make(self, seed: int) -> Any:
        torch.manual_seed(seed)
        module = nn.Linear(3, 4).bfloat16()
        copies = {p.detach().float(): p for p in module.parameters()}
        optimizer = _stepped(torch.optim.AdamW(copies))
        return {
            "model": NamedModule(module, {"": "layers.3"}),
            "optimizer": DescribedOptimizer(optimizer, copies, own_key="master"),
        }
