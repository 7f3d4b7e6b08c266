"""Training in any layout is the training of one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch users know
from torch.distributed.tensor import DTensor

from remesh.demo.training import (
    ModelConfig,
    TrainConfig,
    Transformer,
    batch_of,
    build,
    read_tokens,
    train_step,
)
from remesh.demo.worker import held_boxes
from remesh.exchange import Exchange
from tests.support import run_processes

NUM_STEPS = 4
Layout = tuple[str, int]
LAYOUTS: list[Layout] = [("FSDP2", 2), ("tensor parallel", 2), ("DDP", 2), ("FSDP2", 3)]

Trained = tuple[list[float], dict[str, torch.Tensor], dict[str, object]]


CONFIG = TrainConfig(
    model=ModelConfig(dim=32, num_layers=2, num_heads=4, hidden_dim=40),
    num_sequences=6,
    seq_len=12,
    num_warmup_steps=2,
    num_steps=8,
)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def trained_by(_exchange: Exchange, layout: Layout) -> Trained:
    """What one rank has after a few steps: losses, whole parameters, its own boxes."""
    torch.set_num_threads(1)
    trainee = build(CONFIG, layout[0])
    tokens = read_tokens()
    losses = [train_step(trainee, tokens, step) for step in range(NUM_STEPS)]
    parameters = {
        name.removeprefix("module."): whole(p) for name, p in trainee.model.named_parameters()
    }
    return losses, parameters, held_boxes(trainee.model)


@cache
def trained_alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps, spelled out without any of the demo's training code."""
    config = CONFIG
    torch.manual_seed(config.seed)
    model = Transformer(config.model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-5)
    losses = []
    for step, factor in zip(range(NUM_STEPS), (0.5, 1.0, 1.0, 1.0), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        inputs, targets = batch_of(read_tokens(), config, step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train_in_turn(exchange: Exchange, layouts: list[Layout]) -> dict[Layout, Trained]:
    """Several trainings in one job, which saves the time of starting it."""
    return {layout: trained_by(exchange, layout) for layout in layouts}


@pytest.fixture(scope="module")
def trained() -> dict[Layout, list[Trained]]:
    """What every rank has after training, by layout."""
    results: dict[Layout, list[Trained]] = {}
    for num_ranks in (2, 3):
        layouts = [layout for layout in LAYOUTS if layout[1] == num_ranks]
        ranks = run_processes(num_ranks, train_in_turn, layouts)
        results.update({key: [of_rank[key] for of_rank in ranks] for key in ranks[0]})
    return results


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_trains_like_one_process(
    trained: dict[Layout, list[Trained]], layout: Layout
) -> None:
    expected_losses, expected = trained_alone()
    assert len(trained[layout]) == layout[1]
    for losses, parameters, _ in trained[layout]:
        assert losses == pytest.approx(expected_losses, abs=2e-6)
        assert parameters.keys() == expected.keys()
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], atol=2e-5, rtol=0, msg=name)


def test_held_boxes_are_those_of_the_layout(
    trained: dict[Layout, list[Trained]],
) -> None:
    by_rank = [held for _, _, held in trained["tensor parallel", 2]]
    gate, down = "blocks.1.gate_proj.weight", "blocks.1.down_proj.weight"
    assert by_rank[0][gate] == ((40, 32), [((0, 0), (20, 32))])
    assert by_rank[1][gate] == ((40, 32), [((20, 0), (20, 32))])
    assert by_rank[1][down] == ((32, 40), [((0, 20), (32, 20))])
    assert by_rank[1]["embedding.weight"] == ((257, 32), [((129, 0), (128, 32))])
    for rank in range(2):
        assert by_rank[rank]["norm.weight"] == ((32,), [((0,), (32,))])
