"""The manager on real ranks: modules in two layouts, and a signal that one of them gets."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from remesh import catalog
from remesh.elastic.process_socket import ProcessSockets
from remesh.exchange.torch_group import TorchGroup
from remesh.storage import open_storage
from remesh.training.manager import Manager
from remesh.training.policies import EverySeconds, OnSignals
from tests.support import run_processes


def build() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1),
        "seen": 0,
    }


def take_step(state: dict[str, Any]) -> None:
    scaler = state["scaler"]
    scaler.scale(state["model"](torch.ones(3, 6)).square().mean()).backward()
    scaler.step(state["optimizer"])
    scaler.update()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["seen"] += 3


def facts(state: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same after a resume, whatever the layout."""
    moments = [
        moment["exp_avg"].full_tensor().tolist() for moment in state["optimizer"].state.values()
    ]
    weights = [parameter.full_tensor().tolist() for parameter in state["model"].parameters()]
    rates = state["scheduler"].get_last_lr()
    return weights, moments, rates, state["scaler"].get_scale(), state["seen"]


def train(exchange: TorchGroup, root: Path) -> tuple[int, Any, list[float]]:
    """Train until rank 1's signal has stopped everybody."""
    os.environ["REMESH_AGENT_SOCKET"] = f"{root.parent}/{exchange.rank}.socket"
    state = build()
    random.seed(exchange.rank)
    with Manager(root, every=[OnSignals(), EverySeconds(3600)]) as manager:
        assert manager.resume(state) is None
        for step in itertools.count(1):
            take_step(state)
            if (exchange.rank, step) == (1, 4):
                os.kill(os.getpid(), signal.SIGTERM)
            manager.step(step, state)
            if manager.should_stop:
                break
    return step, facts(state), [random.random() for _ in range(3)]


def go_on(exchange: TorchGroup, root: Path) -> tuple[int, Any, list[float], bool]:
    state = build()
    with Manager(root) as manager:
        resumed = manager.resume(state)
        assert resumed is not None
    return resumed.step, facts(state), [random.random() for _ in range(3)], resumed.same_random


def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with contextlib.closing(ProcessSockets(str(tmp_path), 2)) as sockets:
        first, second = run_processes(2, train, root)
        sockets.take()
        heard = sockets.progress()
    assert first[:2] == second[:2]
    step, state, _ = first
    assert step >= 4
    assert [info.step for info in catalog.list_checkpoints(open_storage(root))] == [step]
    assert [(heard[rank].step, heard[rank].saved_step) for rank in range(2)] == [(step, step)] * 2
    same = run_processes(2, go_on, root)
    assert same == [(step, state, numbers, True) for _, _, numbers in (first, second)]
    assert same[0][2] != same[1][2]
    others = run_processes(3, go_on, root)
    assert [one[:2] for one in others] == [(step, state)] * 3
    assert not any(one[3] for one in others)
    assert len({tuple(one[2]) for one in others}) == 3
