"""The example `examples/minimind.py`: interrupted on some ranks, resumed on others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.exchange import Exchange
from tests.elastic.cluster import run_torchrun
from tests.support import run_processes
from tests.training.example import EXAMPLES, PowerCutError, load_example

Steps = list[tuple[int, int, list[int]]]


def _train(_exchange: Exchange, directory: str, stop_at: int, words: tuple[str, ...]) -> Steps:
    """One start of the script on this rank: its finished steps until it is interrupted."""
    minimind = load_example("minimind")
    done: Steps = []

    def on_step(epoch: int, step: int, samples: list[int]) -> None:
        done.append((epoch, step, samples))
        if step == stop_at:
            raise PowerCutError

    args = minimind.parse_args(["--save-dir", directory, "--hidden-size", "8", *words])
    with suppress(PowerCutError):
        minimind.train(args, on_step)
    return done


def samples_of(ranks: list[Steps], last_step: int) -> list[int]:
    return [
        i for steps in ranks for _, step, samples in steps if step <= last_step for i in samples
    ]


@pytest.mark.parametrize("step", [20, pytest.param(300, marks=pytest.mark.nightly)])
def test_interrupted_on_two_ranks_and_resumed_on_four(tmp_path: Path, step: int) -> None:
    last = step // 2 + 10
    words = ("--save-interval", str(step), "--num-samples", str(last * 4 * 16))
    first = run_processes(2, _train, str(tmp_path), step + 5, words)
    assert [len(steps) for steps in first] == [step + 5] * 2
    before = samples_of(first, step)
    assert len(set(before)) == len(before) == step * 2 * 16

    found = load_example("minimind").load_run(str(tmp_path / "full_sft_8_resume.pth"), 4)
    assert (found["step"], found["epoch"], found["world_size"]) == (step // 2, 0, 2)

    second = run_processes(4, _train, str(tmp_path), 0, (*words, "--from-resume"))
    assert [steps[0][:2] for steps in second] == [(0, step // 2 + 1)] * 4
    assert [steps[-1][:2] for steps in second] == [(0, last)] * 4
    assert sorted(before + samples_of(second, last)) == list(range(last * 4 * 16))

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "full_sft_8.pth",
        "full_sft_8_resume.pth",
    ]
    weights = torch.load(tmp_path / "full_sft_8.pth")
    stored = remesh.Checkpoint(tmp_path / "full_sft_8_resume.pth").state()
    assert stored["step"] == last
    assert weights.keys() == stored["model"].keys()
    for name, value in weights.items():
        assert value.dtype == torch.float16
        assert stored["model"][name].dtype == torch.float32
        assert torch.equal(value, stored["model"][name].half())


def test_both_modes_of_one_call(tmp_path: Path) -> None:
    minimind = load_example("minimind")
    config = minimind.LMConfig(16, use_moe=True)
    assert minimind.lm_checkpoint(config, weight="pretrain", save_dir=str(tmp_path)) is None

    def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        model = minimind.LanguageModel(config)
        return model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")

    model, optimizer, scaler = parts()
    scaler.scale(model(torch.arange(12).reshape(2, 6))).backward()
    scaler.step(optimizer)
    scaler.update()
    run: Any = type("Run", (), {"__module__": "wandb.sdk.wandb_run", "id": "abc123"})()
    run.project = run.entity = "p"
    for step, tracker in ((6, None), (7, run)):
        saved = minimind.lm_checkpoint(
            config,
            weight="pretrain",
            model=model,
            optimizer=optimizer,
            epoch=1,
            step=step,
            save_dir=str(tmp_path),
            scaler=scaler,
            wandb=tracker,
            note="a value",
            nothing=None,
        )
        assert saved is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pretrain_16_moe.pth",
        "pretrain_16_moe_resume.pth",
    ]
    data = minimind.lm_checkpoint(config, weight="pretrain", save_dir=str(tmp_path))
    found = (data["epoch"], data["step"], data["note"], data["wandb_id"])
    assert found == (1, 7, "a value", "abc123")
    assert "nothing" not in data
    other, other_optimizer, other_scaler = parts()
    other.load_state_dict(data["model"])
    other_optimizer.load_state_dict(data["optimizer"])
    other_scaler.load_state_dict(data["scaler"])
    assert other_scaler.state_dict() == scaler.state_dict()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        state, other_state = optimizer.state[ours], other_optimizer.state[theirs]
        assert state["step"] == other_state["step"] == 1
        assert torch.equal(state["exp_avg_sq"], other_state["exp_avg_sq"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_as_a_user_runs_it(tmp_path: Path) -> None:
    words = ["--hidden-size", "8", "--num-samples", "640", "--save-interval", "5"]
    minimind = load_example("minimind")
    minimind.train(minimind.parse_args([*words, "--save-dir", str(tmp_path / "checkpoints")]))
    script = str(EXAMPLES / "minimind.py")
    resumed = ("--from-resume", "--epochs", "2")
    code, output = run_torchrun(tmp_path, "--nproc-per-node=2", script, *words, *resumed)
    assert code == 0, output
    assert "1 ranks, now 2: step 20" in output
    assert "epoch 2, step 20/20" in output
    assert remesh.Checkpoint(tmp_path / "checkpoints/full_sft_8_resume.pth").values["epoch"] == 1
