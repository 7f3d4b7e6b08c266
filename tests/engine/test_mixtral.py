"""A real model in tensor parallelism as transformers applies it: packed weights, a few experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import AdamW

import remesh
from remesh.exchange import Exchange
from tests.support import run_processes


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
