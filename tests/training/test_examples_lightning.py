"""`examples/lightning_callback.py`: killed anywhere, resumed, and compared with one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.catalog import CheckpointInfo
from remesh.exchange import Exchange
from tests.support import run_processes
from tests.training.example import PowerCutError, load_example, wait_for_last_saves

pl = pytest.importorskip("lightning.pytorch")
from tests.training.reentered_lightning import DIES_AFTER  # noqa: E402 - if lightning is there

pytestmark = [
    # Of Lightning and for its users, in this order: on machines with Slurm, on loaders without
    # workers, and what torch says to Lightning.
    pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
]


def train(directory: Path, *callbacks: Any, every: int = 3) -> Any:
    example = load_example("lightning_callback")
    words = ["--directory", str(directory), "--every", str(every)]
    return example.train(example.parse_args(words), *callbacks)


class PowerCut(pl.Callback):  # type: ignore[misc, name-defined]
    """Ends a run when a step begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise PowerCutError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that nobody interrupts: 2 epochs of 8 steps."""
    model = train(tmp_path_factory.mktemp("whole"))
    assert model.trainer.global_step == 16
    return model


@pytest.mark.parametrize(
    ("every", "cut_at", "saved"),
    [
        pytest.param(3, 7, 6, id="middle of an epoch"),
        pytest.param(4, 10, 8, id="end of an epoch", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_is_the_same_run(
    whole: Any, tmp_path: Path, every: int, cut_at: int, saved: int
) -> None:
    with pytest.raises(PowerCutError):
        train(tmp_path, PowerCut(cut_at), every=every)
    assert latest(tmp_path).step == saved

    resumed = train(tmp_path, every=every)
    assert resumed.trainer.global_step == 16
    assert resumed.trainer.current_epoch == 2
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    rates = [model.trainer.optimizers[0].param_groups[0]["lr"] for model in (whole, resumed)]
    assert rates[0] == rates[1] == 1e-2 / 4
    assert latest(tmp_path).metrics["loss"] is not None


def sharded(exchange: Exchange, directory: str) -> None:
    """A launch on one of several ranks, cut off at its fifth step."""
    rank, world_size = str(exchange.rank), str(exchange.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size)
    warnings.simplefilter("ignore")
    wait_for_last_saves(pytest.MonkeyPatch())
    example = load_example("lightning_callback")
    args = example.parse_args(["--directory", directory, "--shard"])
    with suppress(PowerCutError):
        example.train(args, PowerCut(4))


@pytest.mark.slow
def test_shards_of_two_ranks_are_resumed_by_one_process(tmp_path: Path) -> None:
    run_processes(2, sharded, str(tmp_path))
    saved = latest(tmp_path)
    assert (saved.step, saved.world_size) == (3, 2)
    pieces = remesh.Checkpoint(saved.path).index.pieces("model.layers.0.weight")
    assert [piece.box.shape for piece in pieces] == [(8, 8), (8, 8)]

    resumed = train(tmp_path)
    assert resumed.trainer.global_step == 3 + 2 + 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_goes_on_when_another_dies(tmp_path: Path) -> None:
    """Lightning computes the gradients in a closure of the optimizer, where the peer is missed."""
    remesh_run = [str(Path(sys.executable).with_name("remesh")), "run", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("reentered_lightning.py")
    done = subprocess.run(
        [*remesh_run, "--reentry-timeout", "120", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ended = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    ended.sort(key=lambda one: one["rank"])
    same = {"live": True, "from": DIES_AFTER, "step": 8}
    assert ended == [{"rank": 0, "entries": 1} | same, {"rank": 1, "entries": 0} | same]


def latest(directory: Path) -> CheckpointInfo:
    with remesh.Manager(directory) as manager:
        assert manager.latest is not None
        return manager.latest
