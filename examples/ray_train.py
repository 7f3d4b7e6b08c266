"""Ray Train starts the workers and replaces them; remesh saves, and resumes in another world size.

    pip install 'remesh[torch]' 'ray[train]'
    python examples/ray_train.py --storage /shared/results --workers 2 --most-workers 8 --use-gpu

Ray's storage path is the root of the checkpoints: `STORAGE/NAME/checkpoints`. When workers or nodes
die, Ray starts the train function again with as many workers as it can place, and so it does when
nodes join. Each time the loop goes on after the newest checkpoint, in whatever world size.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.fsdp import fully_shard

import remesh

SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""How the URLs of Ray's file systems begin."""


def checkpoint_root() -> str:
    """Where the checkpoints of this run are: in its directory on Ray's storage path."""
    storage = ray.train.get_context().get_storage()
    scheme = SCHEMES[storage.storage_filesystem.type_name]
    return f"{scheme}{storage.experiment_fs_path}/checkpoints"


def train(config: dict[str, Any]) -> None:
    """What each worker runs; Ray has made the process group."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    with remesh.Manager(checkpoint_root(), every=config["every"], keep=3) as manager:
        manager.resume(state)
        print(f"rank {rank} of {num_ranks} goes on after step {state['step']}", flush=True)
        while state["step"] < config["steps"]:
            batch = torch.randn(24, 8, generator=torch.Generator().manual_seed(state["step"]))
            inputs = batch[rank::num_ranks]
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            manager.step(state["step"], state)
            ray.train.report({"step": state["step"], "loss": loss.item(), "num_workers": num_ranks})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model on Ray.")
    parser.add_argument("--storage", required=True, help="Ray's storage path: all nodes see it")
    parser.add_argument("--name", default="first")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--most-workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="steps from save to save")
    parser.add_argument("--use-gpu", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "every": args.every},
        scaling_config=ScalingConfig(
            num_workers=(args.workers, args.most_workers), use_gpu=args.use_gpu
        ),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
