"""FullyShardedDataParallel (FSDP1) on gloo processes, to and from everything else.

The reference for what its slices mean is torch itself: its gathered state dicts.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import remesh
from remesh.adapters import DescribedOptimizer, NamedModule, describe_leaf
from remesh.core.state import describe
from remesh.errors import UnsupportedValueError
from remesh.exchange import Exchange
from tests.support import run_processes
from tests.support.torch_versions import needs

State = dict[str, Any]
CPU = torch.device("cpu")


class Block(nn.Module):
    counts: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, width, bias=False)
        self.register_buffer("counts", torch.arange(3.0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = x + self.down(self.norm(self.up(x)).tanh())
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
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embedding.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.device.type != "meta":
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.arange(6).reshape(2, 3) + step
        loss = nn.functional.cross_entropy(module(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp1(model: Model, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated")
        warnings.filterwarnings("ignore", "FSDP.*deprecated", FutureWarning)
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=CPU,
            **options,
        )


def hybrid(model: Model, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, torch.distributed.get_world_size() // 2))
    return fsdp1(
        model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, **options
    )


def mixed(model: Model, **options: Any) -> nn.Module:
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp1(model, mixed_precision=half, **options)


def fsdp2(model: Model, **_: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


STRATEGIES: dict[str, Callable[..., nn.Module]] = {
    "full": fsdp1,
    "grad_op": lambda m, **o: fsdp1(m, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, **o),
    "no_shard": lambda m, **o: fsdp1(m, sharding_strategy=ShardingStrategy.NO_SHARD, **o),
    "hybrid": hybrid,
    "mixed": mixed,
}


def both(strategy: str) -> list[tuple[str, bool]]:
    """A strategy with and without `use_orig_params`."""
    return [(strategy, False), (strategy, True)]


def job(wrap: Callable[..., nn.Module], seed: int, **options: Any) -> State:
    module = wrap(Model(seed), **options)
    return {"model": module, "optimizer": torch.optim.AdamW(module.parameters(), lr=0.125)}


def set_moments(optimizer: torch.optim.Optimizer) -> None:
    """Moments that follow from the parameter that they are of."""
    for parameter, own in optimizer.state.items():
        own["exp_avg"].copy_(2 * parameter.detach())
        own["exp_avg_sq"].copy_(parameter.detach().square())


def gathered(module: nn.Module) -> dict[str, torch.Tensor]:
    """The entries of the module, as torch gathers them, and the moments that follow from them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "When using ``NO_SHARD``")
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT):
            entries = copy.deepcopy(module.state_dict())
    tensors = {name: t for name, t in entries.items() if isinstance(t, torch.Tensor)}
    result = {f"model.{name}": tensor for name, tensor in tensors.items()}
    for name, _ in Model(0).named_parameters():
        result[f"optimizer.state.{name}.step"] = torch.tensor(2.0)
        result[f"optimizer.state.{name}.exp_avg"] = 2 * tensors[name]
        result[f"optimizer.state.{name}.exp_avg_sq"] = tensors[name].square()
    return result


def save_all(
    exchange: Exchange, folder: Path, cases: list[tuple[str, bool]]
) -> dict[str, dict[str, torch.Tensor]]:
    """Train in each layout and save; what torch gathers then."""
    found = {}
    for name, use in cases:
        state = job(STRATEGIES[name], 1, use_orig_params=use)
        train(state["model"], state["optimizer"])
        set_moments(state["optimizer"])
        with torch.no_grad():
            state["model"](torch.zeros(1, 1, dtype=torch.long))  # leaves gathered parameters
        remesh.save(state, folder / f"{name}-{use}")
        found[f"{name}-{use}"] = gathered(state["model"])
    return found if exchange.rank == 0 else {}


def sliced(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def load_all(
    exchange: Exchange, folder: Path, source: Path, cases: list[tuple[str, bool]]
) -> dict[str, list[float]]:
    """Load one checkpoint into each layout, save it again, and train on."""
    losses = {}
    layouts: dict[str, State] = {"fsdp2": job(fsdp2, 2)}
    layouts["ddp"] = job(DistributedDataParallel, 2)
    for name, use in cases:
        layouts[f"{name}-{use}"] = job(STRATEGIES[name], 2, use_orig_params=use)
    # The inner width divides by nothing: torch stores and loads that, but does not run it.
    tensor_parallel = job(sliced, 2)
    remesh.load(tensor_parallel, source, unexpected="error")
    remesh.save(tensor_parallel, folder / "again-sliced")
    for name, state in layouts.items():
        if name.startswith(("grad_op", "full")):
            with torch.no_grad():
                state["model"](torch.zeros(1, 1, dtype=torch.long))
        remesh.load(state, source, unexpected="error")
        remesh.save(state, folder / f"again-{name}")
        losses[name] = train(state["model"], state["optimizer"])
    return losses


def check_same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = remesh.Checkpoint(path)
    assert set(checkpoint.index) == set(expected), path
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor), f"{path}: {name}"


@needs("gloo averages")
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, [("full", False), ("grad_op", True)]),
        pytest.param(2, [*both("no_shard"), *both("mixed")], marks=pytest.mark.slow),
        pytest.param(4, [("full", True), *both("hybrid")], marks=pytest.mark.slow),
    ],
)
def test_every_layout_stores_what_torch_gathers_and_loads_it(
    tmp_path: Path, world_size: int, cases: list[tuple[str, bool]]
) -> None:
    found = run_processes(world_size, save_all, tmp_path, cases)[0]
    for name, expected in found.items():
        check_same(tmp_path / name, expected)
    name = next(iter(found))
    names = set(found[name])
    assert {"model.blocks.1.up.weight", "model.head.weight", "model.blocks.0.counts"} <= names
    state = job(lambda m: m, 3)
    remesh.load(state, tmp_path / name, unexpected="error")
    assert state["model"].blocks[0].calls == 3
    assert len(state["optimizer"].state) == len(list(state["model"].parameters()))
    single = train(state["model"], state["optimizer"])
    losses = run_processes(world_size, load_all, tmp_path, tmp_path / name, cases)
    check_same(tmp_path / "again-sliced", found[name])
    for layout, of_layout in losses[0].items():
        check_same(tmp_path / f"again-{layout}", found[name])
        tolerance = 0.05 if layout.startswith("mixed") else 1e-5
        assert of_layout == pytest.approx(single, rel=tolerance), layout


class Speaking(nn.Linear):
    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        return {}


def refused() -> None:
    """What cannot be taken apart."""
    own = FullyShardedDataParallel(nn.Sequential(Speaking(2, 2)), device_id=CPU)
    with pytest.raises(UnsupportedValueError, match=r"(?s)m: .*sharded_state_dict.*fully_shard"):
        describe({"m": own}, describe_leaf)
    turned = nn.Linear(3, 2)
    turned.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2).t())
    own = FullyShardedDataParallel(turned, device_id=CPU)
    with pytest.raises(UnsupportedValueError, match=r"(?s)m: .*weight was not contiguous"):
        describe({"m": own}, describe_leaf)


def uneven(folder: Path) -> None:
    """Slices that hold padding only; names that change; parameters that FSDP1 does not manage."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(2, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 1.0)
    wrapped = nn.Sequential(
        FullyShardedDataParallel(model[0], device_id=CPU),
        FullyShardedDataParallel(
            model[1], device_id=CPU, ignored_states=[model[1].get_parameter("bias")]
        ),
    )
    leaf = NamedModule(wrapped, {"0": "layers.4", "1": "layers.5"})
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    remesh.save({"m": leaf, "o": optimizer}, folder / "uneven")


def from_meta(source: Path) -> tuple[int, list[Any]]:
    """Build without memory, give memory to slices only, load what they hold."""
    with torch.device("meta"):
        model = nn.Sequential(Block(5), Block(5))
    module = fsdp1(
        cast("Model", model),
        use_orig_params=True,
        param_init_fn=lambda m: m.to_empty(device=CPU, recurse=False),
    )
    report = remesh.load({"model": module}, source)
    return report.bytes_needed, module(torch.ones(2, 5)).tolist()


def local_copies(folder: Path) -> None:
    """An optimizer over plain copies of this rank's parts of FSDP2's parameters."""
    torch.manual_seed(0)
    block = Block(5)
    whole = copy.deepcopy(block)
    fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    copies = {cast("DTensor", p).to_local().detach() + 1: p for p in block.parameters()}
    described = DescribedOptimizer(torch.optim.AdamW(copies), copies, own_key="master")
    remesh.save({"m": block, "o": described}, folder / "copies")
    checkpoint = remesh.Checkpoint(folder / "copies")
    for name, parameter in whole.named_parameters():
        assert torch.equal(checkpoint.read(f"o.state.{name}.master"), parameter.detach() + 1)


def corner_cases(_exchange: Exchange, folder: Path, source: Path) -> tuple[int, list[Any]]:
    refused()
    local_copies(folder)
    uneven(folder)
    offloaded = fsdp1(Model(1), cpu_offload=CPUOffload(offload_params=True), use_orig_params=False)
    remesh.save({"model": offloaded}, folder / "offloaded")
    return from_meta(source)


def test_corner_cases(tmp_path: Path) -> None:
    """Only padding on a rank; ignored parameters; offloaded ones; from the meta device."""
    blocks = nn.Sequential(Block(5), Block(5))
    remesh.save({"model": blocks}, tmp_path / "blocks")
    results = run_processes(2, corner_cases, tmp_path, tmp_path / "blocks")

    index = remesh.Checkpoint(tmp_path / "uneven").index
    shapes = {name: stored.shape for name, stored in index.items() if name.startswith("m.")}
    assert shapes == {
        "m.layers.4.weight": (1, 1),
        "m.layers.5.weight": (3, 2),
        "m.layers.5.bias": (3,),
    }
    assert "o.state.layers.4.weight.exp_avg" in index
    assert "o.state.layers.5.bias.exp_avg" in index

    checkpoint = remesh.Checkpoint(tmp_path / "offloaded")
    for name, tensor in Model(1).state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(checkpoint.read(f"model.{name}"), tensor)

    whole = 4 * sum(p.numel() for p in blocks.parameters())
    for needed, output in results:
        assert needed < 0.6 * whole
        torch.testing.assert_close(torch.tensor(output), blocks(torch.ones(2, 5)))
