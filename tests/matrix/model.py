"""The job that every program of the matrix trains, and how it goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LEARNING_RATE = 0.02


class Model(nn.Module):
    """A model that returns its loss, as the Trainer wants it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def batch(number: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(5, 4, generator=made),
        "labels": torch.randn(5, 3, generator=made),
    }


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, as the Trainer makes them: weights decay, biases do not."""
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
    )


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Any) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = model(**batch(number))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained() -> tuple[Model, torch.optim.AdamW]:
    model = Model()
    optimizer = optimizer_of(model)
    steps(model, optimizer, range(2))
    return model, optimizer
