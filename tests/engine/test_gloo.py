"""Real process groups, real parallel layouts, real training steps: no bit is lost on the way.

Every rank returns the full tensors that its layout stands for, gathered by torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that torch users know
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import remesh
from remesh.demo.training import ModelConfig, Transformer
from remesh.exchange import Exchange
from tests.engine.bits import bits_of
from tests.support import (
    run_processes,
)
from tests.support.torch_versions import needs

# Extents that four ranks do not share evenly: 31 rows of the embedding, 50 of the inner MLP.
CONFIG = ModelConfig(
    vocab_size=31, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=50
)
TIED = ModelConfig(vocab_size=31, dim=16, num_layers=1, hidden_dim=50)
"""Of a model whose output has the weight of its embedding."""

Contents = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name → dtype, shape and bytes of the full tensor."""


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def transformer(config: ModelConfig) -> Transformer:
    """The whole model, in plain tensors."""
    model = Transformer(config)
    if config == TIED:
        model.output.weight = model.embedding.weight
    return model


@dataclass(frozen=True)
class Job:
    """A model in some layout with what trains it; `part` is the rank's slice of the data."""

    model: nn.Module
    optimizer: AdamW
    scheduler: LambdaLR
    part: int

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "scheduler": self.scheduler}


def plain(model: Transformer) -> tuple[nn.Module, int]:
    return model, 0


def ddp(model: Transformer) -> tuple[nn.Module, int]:
    return DistributedDataParallel(model), dist.get_rank()


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp(model: Transformer) -> tuple[nn.Module, int]:
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, dist.get_rank()


def hsdp(model: Transformer) -> tuple[nn.Module, int]:
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    return model, dist.get_rank()


def fsdp_over_tp(model: Transformer) -> tuple[nn.Module, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, ParallelStyle] = {
        **{f"attention.{name}_proj": ColwiseParallel() for name in "qkv"},
        "attention.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    shard(model, mesh["dp"])
    return model, mesh.get_local_rank("dp")


LAYOUTS: dict[str, Callable[[Transformer], tuple[nn.Module, int]]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "fsdp over tp": fsdp_over_tp,
}


def build(layout: str, config: ModelConfig, seed: int) -> Job:
    """A job with fresh weights, the same on every rank."""
    torch.manual_seed(seed)
    model, part = LAYOUTS[layout](transformer(config))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=0.01)
    return Job(model, optimizer, LambdaLR(optimizer, lambda step: 0.9**step), part)


def train(job: Job, steps: range) -> list[float]:
    """Some steps on this rank's slice of the data; its losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + job.part)
        tokens = torch.randint(31, (2, 9), generator=generator)
        logits = job.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.scheduler.step()
        losses.append(loss.item())
    return losses


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def contents_of(job: Job) -> Contents:
    """Parameters and their optimizer state under remesh's names, as full tensors. Collective."""
    contents = {}
    for raw, parameter in job.model.named_parameters():
        name = raw.removeprefix("module.")
        contents[f"model.{name}"] = bits_of(full(parameter))
        for key, value in job.optimizer.state.get(parameter, {}).items():
            contents[f"optim.state.{name}.{key}"] = bits_of(full(value))
    return contents


def contents_of_checkpoint(path: Path) -> Contents:
    checkpoint = remesh.Checkpoint(path)
    assert checkpoint.verify().ok
    names = [name for name in checkpoint.index if name not in checkpoint.index.aliases]
    return {name: bits_of(checkpoint.read(name)) for name in names}


# ---------------------------------------------------------------------------------------------
# From layout to layout
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """One stop of a journey: load, train a little, save."""

    layout: str
    source: Path | None
    target: Path
    seed: int
    config: ModelConfig = CONFIG


@dataclass(frozen=True)
class Stop:
    """What a rank had after loading and when saving, and its losses in between."""

    loaded: Contents
    saved: Contents
    losses: list[float]
    step: int


def travel(_exchange: Exchange, legs: Sequence[Leg]) -> list[Stop]:
    stops = []
    for leg in legs:
        job = build(leg.layout, leg.config, leg.seed)
        if leg.source is not None:
            remesh.load(job.state, leg.source, unexpected="error")
        loaded, first = contents_of(job), job.scheduler.last_epoch
        losses = train(job, range(first, first + 2))
        remesh.save(job.state, leg.target)
        stops.append(Stop(loaded, contents_of(job), losses, first))
    return stops


def load_plain(path: Path, config: ModelConfig = CONFIG) -> Job:
    job = build("plain", config, seed=99)
    remesh.load(job.state, path, unexpected="error")
    return job


@needs("strided shards")
def test_a_job_that_moves_through_layouts_keeps_every_bit(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(4)]
    first = run_processes(4, travel, [Leg("fsdp", None, paths[0], seed=0)])
    second = run_processes(2, travel, [Leg("fsdp", paths[0], paths[1], seed=1)])
    legs = [
        Leg("fsdp over tp", paths[1], paths[2], seed=2),
        Leg("hsdp", paths[2], paths[3], seed=3),
    ]
    rest = run_processes(4, travel, legs)
    journey = [[stops[0] for stops in first], [stops[0] for stops in second]]
    journey += [[stops[number] for stops in rest] for number in range(2)]
    before: Contents = {}
    for number, (stops, path) in enumerate(zip(journey, paths, strict=True)):
        for rank, stop in enumerate(stops):
            if number:
                assert stop.loaded == before, (number, rank)
            assert stop.saved == stops[0].saved, (number, rank)
            assert stop.step == 2 * number
        before = stops[0].saved
        assert contents_of_checkpoint(path) == before
        job = load_plain(path)
        assert contents_of(job) == before
        assert job.scheduler.get_last_lr() == [0.01 * 0.9 ** (2 * number + 2)] * 2
    names = {name.split(".")[0] for name in before}
    assert names == {"model", "optim"}
    assert len(before) == 4 * len(list(Transformer(CONFIG).parameters()))


def test_tied_weights_from_ddp_to_fsdp_and_to_one_process(tmp_path: Path) -> None:
    """Each then computes the loss that the other has on the same data."""
    path = tmp_path / "a"
    legs = [Leg("ddp", None, path, 0, TIED), Leg("fsdp", path, tmp_path / "b", 1, TIED)]
    stops = run_processes(2, travel, legs)
    saved = stops[0][0].saved
    assert stops[0][1].loaded == stops[1][1].loaded == saved
    job = load_plain(path, TIED)
    assert contents_of(job) == saved
    assert remesh.Checkpoint(path).index.aliases == {
        "model.output.weight": "model.embedding.weight"
    }
    weight = job.model.get_parameter("output.weight")
    assert weight is job.model.get_parameter("embedding.weight")
    for stop, part in zip((stops[0][1], stops[1][1]), (0, 1), strict=True):
        one = load_plain(path, TIED)
        losses = train(Job(one.model, one.optimizer, one.scheduler, part), range(2, 3))
        assert losses == pytest.approx(stop.losses[:1], rel=1e-6)


# ---------------------------------------------------------------------------------------------
# Packed shards
# ---------------------------------------------------------------------------------------------


def packed_tensor(exchange: Exchange, values: torch.Tensor) -> DTensor:
    """Two blocks in one tensor, of each of which every rank has a half."""
    mesh = init_device_mesh("cpu", (2,))
    blocks = values.reshape(2, 2, -1, values.shape[1])
    local = blocks[:, exchange.rank].reshape(-1, values.shape[1]).clone()
    return DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=2)], shape=values.shape,
        stride=values.stride(), run_check=False,
    )  # fmt: skip


PACKED = torch.arange(24.0).reshape(12, 2)


def save_packed(exchange: Exchange, path: Path) -> str:
    """Save with torch and with remesh; what torch says."""
    tensor = packed_tensor(exchange, PACKED)
    try:
        dcp_save({"w": tensor}, checkpoint_id=path / "dcp")
        answer = "saved"
    except CheckpointException as error:
        answer = str(error)
    remesh.save({"w": tensor}, path / "remesh")
    target = packed_tensor(exchange, torch.zeros(12, 2))
    remesh.load({"w": target}, path / "remesh")
    assert torch.equal(target.to_local(), tensor.to_local())
    sharded = distribute_tensor(torch.zeros(12, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    remesh.load({"w": sharded}, path / "remesh")
    assert torch.equal(sharded.full_tensor(), PACKED)
    return answer


@needs("strided shards")
def test_packed_shards_which_torch_cannot_save(tmp_path: Path) -> None:
    answers = run_processes(2, save_packed, tmp_path)
    assert all("CheckpointException" in answer for answer in answers), answers
    assert torch.equal(remesh.Checkpoint(tmp_path / "remesh").read("w"), PACKED)
    target = {"w": torch.zeros(12, 2)}
    remesh.load(target, tmp_path / "remesh")
    assert torch.equal(target["w"], PACKED)


# ---------------------------------------------------------------------------------------------
# transformers
# ---------------------------------------------------------------------------------------------


def mixtral(seed: int) -> Any:
    """A tiny mixture of experts, whose gate and up projections are packed into one tensor."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def train_mixtral(model: Any, optimizer: AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel_mixtral(_exchange: Exchange, source: Path, target: Path) -> list[float]:
    """Load into tensor-parallel ranks, train, save; the losses."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = mixtral(seed=1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    optimizer = AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optim": optimizer}
    remesh.load(state, source, unexpected="error")
    losses = train_mixtral(model, optimizer, range(2, 4))
    remesh.save(state, target)
    kinds = {type(p.placements[0]) for p in model.parameters() if isinstance(p, DTensor)}
    assert kinds == {Shard, _StridedShard}
    return losses


@pytest.mark.slow
def test_mixtral_in_tensor_parallel(tmp_path: Path) -> None:
    """From one process to two and back: training goes on as in one, up to rounding."""
    pytest.importorskip("transformers.distributed.tensor_parallel")
    model = mixtral(seed=0)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train_mixtral(model, optimizer, range(2))
    remesh.save({"model": model, "optim": optimizer}, tmp_path / "one")
    results = run_processes(2, parallel_mixtral, tmp_path / "one", tmp_path / "two", timeout=240)
    expected = train_mixtral(model, optimizer, range(2, 4))
    for losses in results:
        assert losses == pytest.approx(expected, rel=1e-5)
    target = mixtral(seed=2)
    resumed = AdamW(target.parameters(), lr=0.01)
    remesh.load({"model": target, "optim": resumed}, tmp_path / "two", unexpected="error")
    for (name, mine), theirs in zip(target.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)
    assert train_mixtral(target, resumed, range(4, 6)) == pytest.approx(
        train_mixtral(model, optimizer, range(4, 6)), rel=1e-4
    )
