"""`examples/huggingface_trainer.py`: killed anywhere, resumed, and compared with one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import remesh
from remesh.catalog import CheckpointInfo
from remesh.errors import CheckpointError
from tests.training.example import PowerCutError, load_example

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(
    # Of Trainer itself, on machines without an accelerator.
    "ignore:'pin_memory' argument is set as true:UserWarning",
)


class Failing(Dataset[dict[str, torch.Tensor]]):
    """The example's data, until so many samples were read."""

    def __init__(self, data: Any, num_samples: int) -> None:
        self.data = data
        self.left = num_samples

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.left -= 1
        if self.left < 0:
            raise PowerCutError
        sample: dict[str, torch.Tensor] = self.data[index]
        return sample


def train(directory: Path, *, num_samples: int = 10_000, every: int = 3) -> Any:
    """One launch, with the power going out when so many samples were read."""
    example = load_example("huggingface_trainer")
    args = example.parse_args(["--directory", str(directory), "--every", str(every)])
    return example.train(args, Failing(example.Counting(), num_samples))


def losses_of(trainer: Any) -> dict[int, float]:
    return {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}


# An epoch has 4 steps of 4 samples. The power goes out when the second one begins.
@pytest.mark.parametrize(
    "every",
    [
        pytest.param(3, id="resumed in the middle of an epoch"),
        pytest.param(4, id="resumed at the end of an epoch", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_is_the_same_run(tmp_path: Path, every: int) -> None:
    whole = train(tmp_path / "whole")
    assert whole.state.global_step == 8
    with pytest.raises(PowerCutError):
        train(tmp_path / "cut", num_samples=16, every=every)
    assert latest(tmp_path / "cut").step == every

    resumed = train(tmp_path / "cut", every=every)
    assert resumed.state.global_step == 8
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert losses_of(resumed)[2] == losses_of(whole)[2]
    assert losses_of(resumed)[8] == losses_of(whole)[8]
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    assert latest(tmp_path / "cut").step == 8
    assert latest(tmp_path / "cut").metrics["loss"] == losses_of(whole)[8]


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    example = load_example("huggingface_trainer")
    with remesh.Manager(tmp_path) as manager:
        callback = example.RemeshCallback(manager)
        assert callback.resume_point() is None
        manager.save(1, {"step": 1})
        manager.wait()
        with pytest.raises(CheckpointError, match="holds no state of a Trainer"):
            callback.resume_point()


def latest(directory: Path) -> CheckpointInfo:
    with remesh.Manager(directory / "checkpoints") as manager:
        assert manager.latest is not None
        return manager.latest
