"""A small model with known contents, in the parallel layouts that torch offers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

State = dict[str, Any]
CPU = torch.device("cpu")


class Block(nn.Module):
    """Extents that divide by nothing, a parameter of one element, a buffer and extra state."""

    counts: torch.Tensor

    def __init__(self, calls: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("counts", torch.arange(3.0))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.scale * self.down(self.norm(self.up(x)).tanh())
        return result

    def get_extra_state(self) -> object:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Model(nn.Module):
    """Two blocks between an embedding and the head that is tied to it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(Block(seed) for _ in range(2))
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embedding.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def job(module: nn.Module) -> State:
    # The optimizer comes first: it is described while FSDP still has what it has gathered.
    return {"optimizer": torch.optim.AdamW(module.parameters(), lr=0.125), "model": module}


def set_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer moments that follow from the parameter that they are of."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = parameter.detach()
            optimizer.state[parameter] = {
                "step": torch.tensor(2.0),
                "exp_avg": 2 * own,
                "exp_avg_sq": own.square(),
            }


def evaluate(module: nn.Module) -> None:
    """A forward pass without gradients, after which FSDP keeps what it has gathered."""
    with torch.no_grad():
        module(torch.zeros(1, 1, dtype=torch.long))


def train(state: State, steps: int = 2) -> list[float]:
    """The losses of some steps."""
    losses = []
    for step in range(steps):
        tokens = torch.arange(6).reshape(2, 3) + step
        logits = state["model"](tokens).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def mesh_of(*shape: int) -> DeviceMesh:
    shape = shape or (torch.distributed.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    if options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = mesh_of(2, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated")
        warnings.filterwarnings("ignore", "FSDP.*deprecated", FutureWarning)
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, **options)


def fsdp2(model: Model, mesh: DeviceMesh | None = None) -> nn.Module:
    for layer in (*model.blocks, model):
        fully_shard(layer, mesh=mesh)
    return model


def tensor_parallel(model: Model, mesh: DeviceMesh | None = None) -> nn.Module:
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, mesh or mesh_of(), plan)


def fsdp2_over_tensor_parallel(model: Model) -> nn.Module:
    mesh = mesh_of(2, 2)
    tensor_parallel(model, mesh["tp"])
    return fsdp2(model, mesh["dp"])


_HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FSDP1: dict[str, dict[str, Any]] = {
    "full": {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "mixed": {"mixed_precision": _HALF},
}
LAYOUTS: dict[str, Callable[[Model], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": lambda model: fsdp2(model, mesh_of()),
    "hybrid fsdp2": lambda model: fsdp2(model, mesh_of(2, 2)),
    "tensor parallel": tensor_parallel,
    "fsdp2 over tensor parallel": fsdp2_over_tensor_parallel,
    # The optimizer knows the flat parameters, or the original ones.
    **{
        f"{name} {kind}": functools.partial(fsdp1, use_orig_params=kind == "original", **options)
        for name, options in FSDP1.items()
        for kind in ("flat", "original")
    },
}
"""How a model is brought into a layout."""
NOT_RUN = {"tensor parallel", "fsdp2 over tensor parallel"}
"""Layouts in which torch stores and loads extents that divide by nothing, but does not run them."""
