"""The examples whose loop is their own: killed, resumed on other ranks, compared with one run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import remesh
from remesh.exchange import Exchange
from tests.support import Died, run_processes, run_processes_outcomes
from tests.training.example import PowerCutError, load_example, wait_for_last_saves

Weights = dict[str, torch.Tensor]


def weights_of(model: torch.nn.Module) -> Weights:
    """The whole weights, by names without wrappers."""
    return {
        name.removeprefix("module."): (
            value.full_tensor() if isinstance(value, DTensor) else value
        ).detach()
        for name, value in model.state_dict().items()
    }


def assert_close(ours: Weights, theirs: Weights) -> None:
    """Equal up to the order of additions, which depends on the number of ranks."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


def assert_equal(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def steps_in(directory: Path) -> list[int]:
    with remesh.Manager(directory) as manager:
        return [info.step for info in manager.checkpoints]


# ---------------------------------------------------------------------------------------------
# A plain loop
# ---------------------------------------------------------------------------------------------


def plain(
    exchange: Exchange | None, directory: str, kill_at: int | None = None
) -> tuple[Weights, dict[int, list[int]]]:
    """One launch on this rank: the weights in the end, and the samples of each step."""
    example = load_example("plain_loop")
    seen: dict[int, list[int]] = {}

    def on_step(step: int, samples: list[int], _loss: float) -> None:
        seen[step] = samples
        if step == kill_at and exchange is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == kill_at:
            raise PowerCutError

    model = example.train(example.parse_args(["--directory", directory]), on_step)
    return weights_of(model), seen


def test_a_plain_loop_goes_on_as_the_same_run(tmp_path: Path) -> None:
    whole, samples = plain(None, str(tmp_path / "whole"))
    with pytest.raises(PowerCutError):
        plain(None, str(tmp_path / "cut"), 11)
    resumed, seen = plain(None, str(tmp_path / "cut"))
    assert_equal(whole, resumed)
    assert seen == {step: samples[step] for step in range(10, 17)}
    assert steps_in(tmp_path / "cut") == [15, 16]


@pytest.mark.slow
def test_a_plain_loop_survives_a_kill_and_another_number_of_ranks(tmp_path: Path) -> None:
    whole, samples = plain(None, str(tmp_path / "whole"))
    outcomes = run_processes_outcomes(2, plain, str(tmp_path / "cut"), 8)
    assert Died(-signal.SIGKILL) in outcomes
    assert steps_in(tmp_path / "cut")[-1] in (3, 6)

    resumed = run_processes(4, plain, str(tmp_path / "cut"))
    for weights, _ in resumed:
        assert_close(whole, weights)
    last = samples[16]
    assert sorted(i for _, seen in resumed for i in seen[16]) == sorted(last)


# ---------------------------------------------------------------------------------------------
# Accelerate
# ---------------------------------------------------------------------------------------------


def accelerate(
    exchange: Exchange | None, directory: str, cut_at: int | None = None
) -> tuple[Weights, dict[int, list[int]]]:
    """One launch on this rank: the weights in the end, and the samples of each step."""
    rank, world_size = (exchange.rank, exchange.world_size) if exchange else (0, 1)
    if world_size > 1:  # where Accelerate looks; the process group is there already
        wait_for_last_saves(pytest.MonkeyPatch())
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    example = load_example("accelerate_loop")
    seen: dict[int, list[int]] = {}

    def on_step(step: int, samples: list[int]) -> None:
        seen[step] = samples
        if step == cut_at:
            raise PowerCutError

    try:
        model = example.train(example.parse_args(["--directory", directory]), on_step)
    except PowerCutError:
        return {}, seen
    return weights_of(model), seen


def test_accelerate_goes_on_as_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole, samples = accelerate(None, str(tmp_path / "whole"))
    assert accelerate(None, str(tmp_path / "cut"), 8)[0] == {}
    resumed, seen = accelerate(None, str(tmp_path / "cut"))
    assert_equal(whole, resumed)
    assert seen == {step: samples[step] for step in range(7, 17)}


@pytest.mark.slow
def test_accelerate_on_two_processes_goes_on_on_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    first = run_processes(2, accelerate, str(tmp_path), 8)
    _, seen = accelerate(None, str(tmp_path))
    assert min(seen) == 7
    in_epoch = [i for _, steps in first for step in range(1, 7) for i in steps[step]]
    assert sorted(in_epoch + seen[7] + seen[8]) == list(range(64))
