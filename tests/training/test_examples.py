"""The examples: interrupted, resumed on as many ranks or others, compared with one long run."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import remesh
from remesh.errors import CheckpointError
from remesh.exchange import Exchange
from tests.elastic.cluster import PRELOAD, run_job
from tests.support import Died, Outcome, Returned, run_processes, run_processes_outcomes
from tests.training.example import PowerCutError, latest, load_example, wait_for_last_saves

pytestmark = [
    # Of Lightning and for its users, in this order: on machines with Slurm, on loaders without
    # workers, and what torch says to Lightning. The last is of Hugging Face's Trainer, on machines
    # without an accelerator.
    pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


@dataclass(frozen=True)
class Ended:
    """A launch that came to its end, on this rank."""

    num_steps: int
    weights: dict[str, torch.Tensor]  # whole, by names without wrappers
    samples: dict[int, list[int]] = field(default_factory=dict)  # of each step of this launch
    others: Any = None  # what else must be the same after an interruption


Launch = Callable[[Path, int, int | None], Ended]
"""Trains in a directory, saves every so many steps, and is interrupted at a step if one is given.
"""


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): (
            value.full_tensor() if isinstance(value, DTensor) else value
        ).detach()
        for name, value in model.state_dict().items()
    }


def plain_loop(directory: Path, every: int, cut_at: int | None = None) -> Ended:
    return _own_loop("plain_loop", directory, every, cut_at)


def killed_loop(directory: Path, every: int, cut_at: int | None = None) -> Ended:
    return _own_loop("plain_loop", directory, every, cut_at, is_killed=True)


def accelerate(directory: Path, every: int, cut_at: int | None = None) -> Ended:
    pytest.importorskip("accelerate")
    return _own_loop("accelerate_loop", directory, every, cut_at)


def _own_loop(
    name: str, directory: Path, every: int, cut_at: int | None, *, is_killed: bool = False
) -> Ended:
    example = load_example(name)
    samples: dict[int, list[int]] = {}

    def on_step(step: int, own: list[int], _loss: float = 0.0) -> None:
        samples[step] = own
        if step == cut_at and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == cut_at:
            raise PowerCutError

    args = example.parse_args(["--directory", str(directory), "--every", str(every)])
    model = example.train(args, on_step)
    return Ended(max(samples), weights_of(model), samples)


def huggingface(
    directory: Path, every: int, cut_at: int | None = None, words: tuple[str, ...] = ()
) -> Ended:
    pytest.importorskip("transformers")
    example = load_example("huggingface_trainer")

    class Data(example.Counting):  # type: ignore[misc, name-defined]
        """The example's data, of which each step reads four samples."""

        num_read = 0

        def __getitem__(self, index: int) -> Any:
            if self.num_read == 4 * (cut_at or 1000):
                raise PowerCutError
            self.num_read += 1
            return super().__getitem__(index)

    words = ("--directory", str(directory), "--every", str(every), *words)
    trainer = example.train(example.parse_args([*words]), Data())
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    # A loss is logged of the steps since the last one, also if the launch began in between.
    others = losses[2], losses[8], trainer.lr_scheduler.state_dict()
    return Ended(trainer.state.global_step, weights_of(trainer.model), others=others)


def huggingface_in_memory(directory: Path, every: int, cut_at: int | None = None) -> Ended:
    """With a snapshot that is newer than the newest checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMESH_SNAPSHOT_DIR", str(directory / "memory"))
        return huggingface(directory, every, cut_at, ("--memory-every", "1"))


def lightning(
    directory: Path, every: int, cut_at: int | None = None, words: tuple[str, ...] = ()
) -> Ended:
    pl = pytest.importorskip("lightning.pytorch")

    class PowerCut(pl.Callback):  # type: ignore[misc, name-defined]
        """Ends a run when a step begins."""

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == cut_at:
                raise PowerCutError

    example = load_example("lightning_callback")
    words = ("--directory", str(directory), "--every", str(every), *words)
    model = example.train(example.parse_args([*words]), PowerCut())
    trainer = model.trainer
    schedules = [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs]
    others = trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"], schedules
    return Ended(trainer.global_step, weights_of(model), others=others)


@pytest.mark.parametrize(
    ("launch", "every", "cut_at", "saved"),
    [
        pytest.param(plain_loop, 3, 11, 9, id="plain loop"),
        pytest.param(accelerate, 3, 8, 6, id="Accelerate"),
        pytest.param(huggingface, 3, 4, 3, id="Trainer, middle of an epoch"),
        pytest.param(huggingface_in_memory, 4, 6, 4, id="Trainer, from memory"),
        pytest.param(huggingface, 4, 4, 4, id="Trainer, end of an epoch", marks=pytest.mark.slow),
        pytest.param(lightning, 3, 7, 6, id="Lightning, middle of an epoch"),
        pytest.param(lightning, 4, 10, 8, id="Lightning, end of an epoch", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_is_the_same_run(
    tmp_path: Path, launch: Launch, every: int, cut_at: int, saved: int
) -> None:
    whole = launch(tmp_path / "whole", 3, None)
    with pytest.raises(PowerCutError):
        launch(tmp_path / "cut", every, cut_at)
    assert latest(tmp_path / "cut").step == saved

    resumed = launch(tmp_path / "cut", every, None)
    assert resumed.weights.keys() == whole.weights.keys()
    for name, value in whole.weights.items():
        assert torch.equal(value, resumed.weights[name]), name
    assert resumed.others == whole.others
    assert resumed.samples == {step: own for step, own in whole.samples.items() if step > saved}
    infos = [latest(tmp_path / root) for root in ("whole", "cut")]
    assert [info.step for info in infos] == [whole.num_steps] * 2 == [resumed.num_steps] * 2
    losses = [info.metrics.get("loss") for info in infos]
    assert losses[0] == losses[1]
    assert (losses[0] is None) == (launch is plain_loop)  # which saves its last step by itself


def test_lightning_counts_the_epoch_that_a_resume_begins(tmp_path: Path) -> None:
    """The second resume is in the middle of it; then its end changes the learning rate."""
    whole = lightning(tmp_path / "whole", 4)
    for cut_at in (9, 13):
        with pytest.raises(PowerCutError):
            lightning(tmp_path / "cut", 4, cut_at)
    resumed = lightning(tmp_path / "cut", 4)
    assert (resumed.num_steps, resumed.others) == (whole.num_steps, whole.others)
    assert all(torch.equal(value, resumed.weights[name]) for name, value in whole.weights.items())


def on_rank(
    exchange: Exchange, launch: Launch, directory: Path, cut_at: int | None
) -> Ended | None:
    """A launch on one of several ranks; None if it was interrupted."""
    rank, world_size = str(exchange.rank), str(exchange.world_size)
    # Where frameworks look; the process group is there already.
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    warnings.simplefilter("ignore")
    wait_for_last_saves(pytest.MonkeyPatch())
    with suppress(PowerCutError):
        return launch(directory, 3, cut_at)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "outcome", "world_size"),
    [(killed_loop, Died(-signal.SIGKILL), 4), (accelerate, Returned(None), 1)],
)
def test_a_run_of_two_ranks_goes_on_on_others(
    tmp_path: Path, launch: Launch, outcome: Outcome[None], world_size: int
) -> None:
    whole = launch(tmp_path / "whole", 3, None)
    cut = tmp_path / "cut"
    assert outcome in run_processes_outcomes(2, on_rank, launch, cut, 8)
    saved = latest(cut).step
    assert saved in ((3, 6) if launch is killed_loop else (6,))

    resumed = run_processes(world_size, on_rank, launch, cut, None)
    for step in range(saved + 1, whole.num_steps + 1):
        samples = [sample for own in resumed if own is not None for sample in own.samples[step]]
        assert sorted(samples) == sorted(whole.samples[step])
    if launch is killed_loop:  # the other one has dropout
        for own in resumed:
            assert own is not None
            # The order of additions depends on the number of ranks.
            torch.testing.assert_close(own.weights, whole.weights, rtol=1e-4, atol=1e-5)


def sharded_lightning(directory: Path, every: int, cut_at: int | None) -> Ended:
    return lightning(directory, every, cut_at, ("--shard",))


@pytest.mark.slow
def test_shards_of_two_ranks_are_resumed_by_one_process(tmp_path: Path) -> None:
    run_processes(2, on_rank, sharded_lightning, tmp_path, 4)
    saved = latest(tmp_path)
    assert (saved.step, saved.world_size) == (3, 2)
    pieces = remesh.Checkpoint(saved.path).index.pieces("model.layers.0.weight")
    assert [piece.box.shape for piece in pieces] == [(8, 8), (8, 8)]
    assert lightning(tmp_path, 3).num_steps == 3 + 2 + 8


def lightning_job(directory: Path, script: str, *options: str) -> list[Any]:
    """What the two processes of a job with Lightning wrote at its end, by the names of files."""
    pytest.importorskip("lightning.pytorch")
    preload = ("--preload", f"{PRELOAD},lightning.pytorch")
    timeout = ("--reentry-timeout", "120")
    path = str(Path(__file__).with_name(script))
    started = ("--nproc-per-node", "2", *timeout, *preload, *options, path, str(directory))
    code, output = run_job(directory, *started)
    assert code == 0, output
    files = sorted(directory.glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_goes_on_when_another_dies(tmp_path: Path) -> None:
    """Lightning computes the gradients in a closure of the optimizer, where the peer is missed."""
    ended = lightning_job(tmp_path, "reentered_lightning.py")
    from tests.training.reentered_lightning import DIES_AFTER

    ended.sort(key=lambda one: one["rank"])
    same = {"live": True, "from": DIES_AFTER, "step": 8}
    assert ended == [{"rank": 0, "entries": 1} | same, {"rank": 1, "entries": 0} | same]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_death_interrupts_at_the_end_of_a_step_is_made_up_for(tmp_path: Path) -> None:
    """Validations, ends of epochs and schedulers are those of Lightning alone."""
    survivor, newcomer = lightning_job(tmp_path, "reentered_validation.py", "--max-restarts", "4")
    assert survivor["interrupted"] == survivor["whole"]
    whole = newcomer["whole"]
    assert newcomer["interrupted"] | {"seen": {}} == whole | {"seen": {}}
    assert newcomer["interrupted"]["seen"].items() <= whole["seen"].items()
    assert latest(tmp_path / "run").step == whole["steps"]


class Plain(torch.nn.Module):
    """A model for `Trainer` that is not one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(32, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.weights(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("made_by", ["caller", "trainer"])
def test_a_trainer_resumes_a_module_of_any_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_by: str
) -> None:
    transformers = pytest.importorskip("transformers")
    example = load_example("huggingface_trainer")

    class Own(Plain):
        """A class that no `Trainer` has seen."""

    def trainer(model: Plain, *args: Any, **options: Any) -> Any:
        if made_by == "caller":
            return transformers.Trainer(model, *args, **options)
        return transformers.Trainer(None, *args, model_init=Own, **options)

    monkeypatch.setattr(example, "GPT2LMHeadModel", lambda _: Own())
    monkeypatch.setattr(example, "Trainer", trainer)
    whole = huggingface(tmp_path / "whole", 3)
    with pytest.raises(PowerCutError):
        huggingface(tmp_path / "cut", 3, 4)
    assert latest(tmp_path / "cut").step == 3
    resumed = huggingface(tmp_path / "cut", 3)
    assert torch.equal(resumed.weights["weights.weight"], whole.weights["weights.weight"])


def test_a_checkpoint_that_is_none_of_the_trainer_s_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    example = load_example("huggingface_trainer")
    with remesh.Manager(tmp_path) as manager:
        callback = example.RemeshCallback(manager)
        assert callback.resume_point() is None
        manager.save(1, {"step": 1})
        manager.wait()
        with pytest.raises(CheckpointError, match="holds no state of a Trainer"):
            callback.resume_point()
