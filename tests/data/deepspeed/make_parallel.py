"""Wrote `pipe0`, `pipe1`, `moe0` and `moe2` here: pipeline stages and experts on two CPU ranks.

    pip install torch deepspeed  # DS_BUILD_OPS=0; written with deepspeed 0.19.8 and torch 2.13.0
    python -m tests.data.deepspeed.make_parallel

Each is what `save_checkpoint` left after two steps, without ZeRO (0) or with that stage: a
`PipelineModule` of two stages, and a model with four experts, two on each rank. `parallel.pt` has
for each the parameters, and moments for `pipe1`, that DeepSpeed's own functions gave out.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from tests.matrix.model import batch
from torch import nn

HERE = Path(__file__).parent
KINDS = {"pipe0": 0, "pipe1": 1, "moe0": 0, "moe2": 2}
NUM_RANKS = NUM_LOCAL_EXPERTS = 2
EXPERT = re.compile(r"(?<=deepspeed_experts\.)\d+")


class Experts(nn.Module):
    """A model with a layer of experts."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.moe = MoE(6, expert=nn.Linear(6, 6), num_experts=4, ep_size=2, min_capacity=4)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, other_loss, _ = self.moe(self.first(x).tanh().unsqueeze(0))
        loss = (self.last(hidden.squeeze(0)) - labels).square().mean()
        total: torch.Tensor = loss + 0.01 * other_loss
        return total


def make_engine(name: str) -> Any:
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import LayerSpec, PipelineModule

    groups: Any
    if name.startswith("pipe"):
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Linear, 4, 6), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 6, 3)]
        loss = nn.MSELoss()
        model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
        groups = model.parameters()
    else:
        model = Experts()
        whole = {"params": [*model.parameters()], "name": "all"}
        groups = split_params_into_different_moe_groups_for_optimizer(whole)
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": KINDS[name]},
    }
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def state_of(engine: Any, rank: int) -> dict[str, torch.Tensor]:
    """Parameters and moments, as far as this rank has them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    has_moments = not hasattr(engine.module, "moe")  # for experts that function fails
    for name, parameter in engine.module.named_parameters():
        own = EXPERT.sub(lambda match: str(int(match[0]) + rank * NUM_LOCAL_EXPERTS), name)
        if engine.zero_optimization():
            found[own] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq") if has_moments else ():
                found[f"{own}/{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
        else:
            found[own] = parameter.detach().clone()
    return found


def train(rank: int, name: str) -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    deepspeed.init_distributed(dist_backend="gloo")
    engine = make_engine(name)
    for number in range(2):
        x, labels = batch(number).values()
        if name.startswith("pipe"):
            engine.train_batch(iter([(x, labels)]))
        else:
            engine.backward(engine(x, labels))
            engine.step()
    engine.save_checkpoint(str(HERE / name), client_state={"epoch": 1})
    torch.save(state_of(engine, rank), HERE / f"{name}.{rank}.tmp")


def main() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29872"}
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for name in KINDS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        torch.multiprocessing.spawn(train, (name,), NUM_RANKS)  # type: ignore[no-untyped-call]
        expected[name] = {}
        for rank in range(NUM_RANKS):
            part = HERE / f"{name}.{rank}.tmp"
            expected[name] |= torch.load(part)
            part.unlink()
        for script in (HERE / name).glob("*.py"):
            script.unlink()
    torch.save(expected, HERE / "parallel.pt")


if __name__ == "__main__":
    main()
