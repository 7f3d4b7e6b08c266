"""Averages as libraries keep and swap them: memory is taken only if it is the boundary's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from remesh import Manager
from remesh.elastic.training_job import TrainingJob
from remesh.exchange import Alone

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning")


class Model(pl.LightningModule):
    """Also a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 200), torch.nn.Linear(200, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(inputs)
        return result


class Averages:
    """Averaged weights of a model.

    Attributes:
        part: What of them is in the state.
    """

    part: Any

    def update(self) -> None:
        """Take the weights of a step in."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Evaluate with the averages, as the library does it."""
        raise NotImplementedError


class Torch(Averages):
    def __init__(self, model: Model) -> None:
        decay: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        self.model, self.part = model, AveragedModel(model, multi_avg_fn=decay)

    def update(self) -> None:
        self.part.update_parameters(self.model)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        own = [parameter.data for parameter in self.model.parameters()]
        averages = self.part.module.parameters()
        for parameter, average in zip(self.model.parameters(), averages, strict=True):
            parameter.data = average.data.clone()
        yield
        for parameter, kept in zip(self.model.parameters(), own, strict=True):
            parameter.data = kept


class Lightning(Averages):
    def __init__(self, model: Model) -> None:
        self.model, self.trainer = model, pl.Trainer(accelerator="cpu", logger=False)
        self.callback = WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        self.callback.setup(self.trainer, model, "fit")
        self.part = self.callback._average_model

    def update(self) -> None:
        assert self.callback._average_model is not None
        self.callback._average_model.update_parameters(self.model)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        self.callback.on_validation_epoch_start(self.trainer, self.model)
        yield
        self.callback.on_validation_epoch_end(self.trainer, self.model)


LIBRARIES = (Torch, Lightning)


class Training:
    """One process that trains, and enters its function again."""

    def __init__(self, kind: Callable[[Model], Averages], job: TrainingJob, root: Path) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.averages = kind(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "averages": self.averages.part,
            "step": 0,
        }
        self.manager = Manager(root, group=Alone(), job=job)

    def compute(self) -> None:
        torch.autograd.backward(self.model(torch.ones(2, 8)).square().sum())

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["step"] += 1

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize("kind", LIBRARIES)
def test_averages_that_move_before_the_boundary_are_taken_with_it(
    tmp_path: Path, kind: Callable[[Model], Averages]
) -> None:
    job = TrainingJob(is_reentrant=True)
    training = Training(kind, job, tmp_path)
    for _ in range(3):
        training.compute()
        training.optimize()
        training.averages.update()
        training.manager.step(training.state["step"], training.state)
    with training.averages.swapped_in():
        averages = training.values()
    expected = training.values()
    training.compute()  # and is left
    training.manager.abandon("the world changes")

    entered = Training(kind, job, tmp_path)
    resumed = entered.manager.resume(entered.state)
    assert resumed is not None
    assert (resumed.step, resumed.live) == (3, True)
    torch.testing.assert_close(entered.values(), expected, rtol=0, atol=0)
    with entered.averages.swapped_in():
        torch.testing.assert_close(entered.values(), averages, rtol=0, atol=0)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_an_evaluation_with_averages_is_not_taken_for_the_trained_weights(
    tmp_path: Path, kind: Callable[[Model], Averages], caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainingJob(is_reentrant=True)
    training = Training(kind, job, tmp_path)
    for step in (1, 2):
        training.compute()
        training.optimize()
        training.averages.update()
        if step == 2:
            training.manager.save(step, training.state)
        training.manager.step(step, training.state)
    expected = training.values()
    swap = training.averages.swapped_in()
    swap.__enter__()  # and is left by the loss of the process's peers
    training.manager.abandon("the world changes")

    entered = Training(kind, job, tmp_path)
    resumed = entered.manager.resume(entered.state)
    assert resumed is not None
    assert (resumed.step, resumed.live) == (2, False)
    assert "step 2 is not taken from memory: state.model." in caplog.text
    torch.testing.assert_close(entered.values(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_averages_that_move_after_the_boundary_are_not_taken(
    tmp_path: Path, kind: Callable[[Model], Averages], caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainingJob(is_reentrant=True)
    training = Training(kind, job, tmp_path)
    training.compute()
    training.optimize()
    training.manager.step(1, training.state)
    training.averages.update()
    training.manager.abandon("the world changes")
    entered = Training(kind, job, tmp_path)
    assert entered.manager.resume(entered.state) is None
    assert "step 1 is not taken from memory: state.averages." in caplog.text
