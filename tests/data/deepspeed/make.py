"""Wrote the checkpoints in this directory: real training steps on two CPU ranks with DeepSpeed.

    pip install torch deepspeed  # DS_BUILD_OPS=0; written with deepspeed 0.19.8 and torch 2.13.0
    python -m tests.data.deepspeed.make

Each directory is what `save_checkpoint` left after two steps of the job of the matrix
(`tests/matrix/model.py`): ZeRO 1, 2 and 3, DeepSpeed's bf16 optimizer, and a model with tied and
frozen parameters and buffers with ZeRO 2 and 3. `universal` is what `ds_to_universal` made of
`zero1`, and `universal3` what it made of `zero3`. `expected.pt` has for each the parameters and
moments that `ds_to_universal` finds in it, and the losses of the next three steps. Python code that
DeepSpeed leaves beside its checkpoints was removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tests.matrix.model import Model, batch, optimizer_of
from torch import nn

HERE = Path(__file__).parent
KINDS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "bf16": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "rich2": {"zero_optimization": {"stage": 2}},
    "rich3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
}
NUM_RANKS = 2


class Rich(nn.Module):
    """A model with a tied weight, a frozen one and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 5, bias=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.norm(self.frozen(self.embed(x))) @ self.head.weight
        return {"loss": (found[:, :3] - labels).square().mean()}


def train(rank: int, name: str) -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    deepspeed.init_distributed(dist_backend="gloo")
    model: nn.Module = Rich() if name.startswith("rich") else Model()
    trained = nn.Module.parameters(model)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW([p for p in trained if p.requires_grad], lr=0.02)
        if name.startswith("rich")
        else optimizer_of(model)
    )
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **KINDS[name],
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses: list[float] = []
    for number in range(5):
        if number == 2:
            engine.save_checkpoint(str(HERE / name), client_state={"epoch": 1})
        is_half = name == "bf16"
        items = {k: v.bfloat16() if is_half else v for k, v in batch(number).items()}
        loss = engine(**items)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if rank == 0:
        groups = [group["weight_decay"] for group in optimizer.param_groups]
        torch.save({"losses": losses[2:], "groups": groups}, HERE / f"{name}.tmp")


def universal(source: str, target: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(HERE / source / "global_step2"),
            output_folder=str(HERE / target / "global_step2_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def state_in(folder: Path, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Parameters and moments in a universal checkpoint."""
    found = {}
    for name, shape in shapes.items():
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            value = torch.load(next(folder.glob(f"*/zero/{name}/{kind}.pt")))
            tensor = value["param"] if isinstance(value, dict) else value
            found[name if kind == "fp32" else f"{name}/{kind}"] = tensor.reshape(shape).clone()
    return found


def main() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    expected = {}
    for name in KINDS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        torch.multiprocessing.spawn(train, (name,), NUM_RANKS)  # type: ignore[no-untyped-call]
        expected[name] = torch.load(HERE / f"{name}.tmp")
        (HERE / f"{name}.tmp").unlink()
        for script in (HERE / name).glob("*.py"):
            script.unlink()
        target = {"zero1": "universal", "zero3": "universal3"}.get(name, f"{name}.tmp")
        shutil.rmtree(HERE / target, ignore_errors=True)
        universal(name, target)
        model = Rich() if name.startswith("rich") else Model()
        shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        expected[name]["state"] = state_in(HERE / target, shapes)
        if target in {"universal", "universal3"}:
            expected[target] = expected[name]
        else:
            shutil.rmtree(HERE / target)
    torch.save(expected, HERE / "expected.pt")


if __name__ == "__main__":
    main()
