"""Lightning: the loader whose epoch has one length, and callbacks beside ours."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import remesh
from remesh.elastic.training_job import TrainingJob
from remesh.exchange import Alone
from remesh.training import EverySteps, OnSignals, ResumableBatchSampler, ResumableSampler

pl = pytest.importorskip("lightning.pytorch")

from remesh.training.integrations.lightning import (  # noqa: E402 - it needs Lightning
    EpochLoader,
    RemeshCallback,
)
from tests.training.example import (  # noqa: E402
    PowerCutError,
    latest,
    load_example,
    wait_for_last_saves,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model"),
    pytest.mark.filterwarnings("ignore:The checkpoint was not created with WeightAveraging"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
]


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    num_done=st.integers(0, 20),
    drop_last=st.booleans(),
)
def test_an_epoch_has_the_same_length_wherever_it_begins(
    num_samples: int, batch_size: int, num_done: int, drop_last: bool
) -> None:
    sampler = ResumableSampler(num_samples, drop_last=drop_last, rank=0, world_size=1)
    batches = ResumableBatchSampler(sampler, batch_size)
    loader = EpochLoader(range(num_samples), batches)
    length = len(loader)
    num_done = min(num_done, max(0, length - 1))
    for _ in itertools.islice(batches, num_done):
        batches.advance()
    assert len(loader) == length
    assert loader.num_done == num_done
    assert len(list(loader)) == length - num_done


def test_workers_that_persist_have_begun_before_random_numbers_are_put_back() -> None:
    """Later epochs of the run that was saved began none."""
    batches = ResumableBatchSampler(ResumableSampler(4, rank=0, world_size=1), 4)
    loader = EpochLoader(range(4), batches, num_workers=1, persistent_workers=True)
    loader.before_batch = lambda: torch.manual_seed(3)
    next(iter(loader))
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3))


def test_a_callback_can_be_sent_to_processes_that_are_spawned() -> None:
    loader = EpochLoader(
        range(4), ResumableBatchSampler(ResumableSampler(4, rank=0, world_size=1), 2)
    )
    callback = pickle.loads(pickle.dumps(RemeshCallback("root", loader, every=3)))
    assert callback.manager is None


def trainer_with(*callbacks: Any, max_epochs: int = 1, **options: Any) -> Any:
    """A trainer that prints and stores nothing by itself."""
    return pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **options,
    )


def test_a_signal_is_answered_by_a_save_and_goes_to_others_when_the_training_has_ended(
    tmp_path: Path,
) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    loader = EpochLoader(data, ResumableBatchSampler(ResumableSampler(data), 4))

    class Preempt(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                signal.raise_signal(signal.SIGTERM)

    heard: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        callback = RemeshCallback(tmp_path, loader, every=[EverySteps(100), OnSignals()])
        model = load_example("lightning_callback").Regression()
        trainer_with(callback, Preempt()).fit(model, loader)
        assert "step_00000002" in [place.name for place in tmp_path.iterdir()]
        assert loader.before_batch() is None
        assert not heard
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize("is_first", [True, False])
def test_averages_that_take_the_place_of_the_weights_at_the_end_are_not_saved(
    tmp_path: Path, is_first: bool
) -> None:
    model = load_example("lightning_callback").Regression()
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    loader = EpochLoader(data, ResumableBatchSampler(ResumableSampler(data), 4))
    trained: list[torch.Tensor] = []

    class Look(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, *_: Any) -> None:
            trained[:] = [parameter.detach().clone() for parameter in model.parameters()]

    callbacks = [
        RemeshCallback(tmp_path, loader, every=100),
        pl.callbacks.WeightAveraging(),
    ]
    trainer_with(Look(), *(callbacks if is_first else callbacks[::-1])).fit(model, loader)
    remesh.load({"model": model}, tmp_path / "step_00000004")
    torch.testing.assert_close(list(model.parameters()), trained, rtol=0, atol=0)


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are made with random numbers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 16) + torch.randn(8)


class Everything(pl.LightningModule):  # type: ignore[name-defined, misc]
    """Changes weights and learning rate wherever Lightning lets it; validation draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Dropout(0.2))

    def training_step(self, batch: torch.Tensor, _batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, _batch_idx: int) -> None:
        self.log("val_step", self.layers(batch).mean() * 0 + self.global_step)

    def on_train_epoch_end(self) -> None:
        torch.nn.init.normal_(next(self.layers.parameters()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        epochs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.8, patience=0)
        return [optimizer], [
            {"scheduler": rate, "monitor": "loss", "interval": "step"},
            {"scheduler": epochs, "monitor": "val_step"},
        ]


@pytest.mark.parametrize("cut_at", [1, 2, 4, 6])
def test_a_step_is_saved_when_all_of_it_is_complete(
    tmp_path: Path, cut_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_last_saves(monkeypatch)

    class PowerCut(pl.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == cut_at and trainer.default_root_dir == "cut":
                raise PowerCutError

    def train(root: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        module, data = Everything(), Noisy()
        sampler = ResumableSampler(data, rank=0, world_size=1)
        loader = EpochLoader(data, ResumableBatchSampler(sampler, 4))
        callback = RemeshCallback(root, loader, every=1)
        options = {"val_check_interval": 2, "default_root_dir": name}
        trainer = trainer_with(callback, PowerCut(), max_epochs=3, **options)
        with contextlib.suppress(PowerCutError):
            trainer.fit(module, loader, torch.utils.data.DataLoader(Noisy()))
        return trainer.optimizers[0].state_dict(), module.state_dict()

    expected = train(tmp_path / "whole", "whole")
    train(tmp_path / "run", "cut")
    metrics = latest(tmp_path / "run").metrics
    assert metrics.get("val_step", 0) == cut_at // 2 * 2, "validation follows every second step"
    torch.testing.assert_close(train(tmp_path / "run", "again"), expected, rtol=0, atol=0)


def test_averages_begin_anew_with_the_weights_that_are_resumed(tmp_path: Path) -> None:
    """Not with those before that, which nothing has trained."""

    def train(max_steps: int) -> Any:
        model = load_example("lightning_callback").Regression()
        data = torch.utils.data.TensorDataset(torch.randn(16, 8))
        loader = EpochLoader(data, ResumableBatchSampler(ResumableSampler(data), 4))
        averages = pl.callbacks.EMAWeightAveraging(update_every_n_steps=100)
        callback = RemeshCallback(tmp_path, loader, every=2)
        trainer_with(averages, callback, max_steps=max_steps).fit(model, loader)
        return model

    train(2)
    ended, trained = train(4), load_example("lightning_callback").Regression()
    remesh.load({"model": trained}, tmp_path / "step_00000002")
    torch.testing.assert_close(ended.state_dict(), trained.state_dict(), rtol=0, atol=0)


class Averaged:
    """One process that trains with averages and evaluates with them, as Lightning's callback does.

    It enters its function again.
    """

    def __init__(self, job: TrainingJob, root: Path) -> None:
        torch.manual_seed(0)
        self.model = load_example("lightning_callback").Regression()
        self.trainer = pl.Trainer(accelerator="cpu", logger=False)
        self.averaging = pl.callbacks.WeightAveraging()
        self.averaging.setup(self.trainer, self.model, "fit")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "averages": self.averaging._average_model,
        }
        self.manager = remesh.Manager(root, group=Alone(), job=job)

    def make_step(self, step: int) -> None:
        self.model.layers(torch.ones(2, 8)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.averaging._average_model.update_parameters(self.model)
        self.manager.step(step, self.state)

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize("is_evaluating", [False, True])
def test_averages_are_not_taken_for_the_trained_weights(
    tmp_path: Path, is_evaluating: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainingJob(is_reentrant=True)
    before = Averaged(job, tmp_path)
    for step in (1, 2, 3):
        before.make_step(step)
    before.manager.save(3, before.state)
    before.manager.wait()
    expected = before.values()
    before.averaging.on_validation_epoch_start(before.trainer, before.model)
    averages = before.values()
    if not is_evaluating:
        before.averaging.on_validation_epoch_end(before.trainer, before.model)
    before.manager.abandon("the world changes")

    entered = Averaged(job, tmp_path)
    resumed = entered.manager.resume(entered.state)
    assert resumed is not None
    assert (resumed.step, resumed.live) == (3, not is_evaluating)
    assert ("step 3 is not taken from memory: state.model." in caplog.text) == is_evaluating
    torch.testing.assert_close(entered.values(), expected, rtol=0, atol=0)
    entered.averaging.on_validation_epoch_start(entered.trainer, entered.model)
    torch.testing.assert_close(entered.values(), averages, rtol=0, atol=0)
