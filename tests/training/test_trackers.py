"""Runs of experiment trackers, against the real libraries in their offline modes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

import remesh
from remesh.catalog import TrackerRun
from remesh.training.trackers import resume_arguments, run_id_of


def through_a_checkpoint(run: TrackerRun | None, directory: Path) -> TrackerRun:
    assert run is not None
    remesh.save({"tracker": asdict(run)}, directory)
    state: dict[str, Any] = {"tracker": asdict(TrackerRun("", ""))}
    remesh.load(state, directory)
    return TrackerRun(**state["tracker"])


def test_tensorboard(tmp_path: Path) -> None:
    first = SummaryWriter(str(tmp_path / "logs"))
    for step in (5, 7):
        first.add_scalar("loss", 1.0, step)
    run = through_a_checkpoint(run_id_of(first), tmp_path / "c")
    first.close()
    assert run == TrackerRun("tensorboard", str(tmp_path / "logs"))
    assert resume_arguments(run) == {"log_dir": run.run_id}
    second = SummaryWriter(**resume_arguments(run, step=5))
    assert run_id_of(second) == run
    second.add_scalar("loss", 2.0, 6)
    second.close()
    curves = event_accumulator.EventAccumulator(str(tmp_path / "logs"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("loss")] == [5, 6]


@pytest.mark.parametrize(
    ("name", "begin", "end", "options"),
    [
        ("wandb", "init", "finish", {"project": "small", "mode": "offline"}),
        ("swanlab", "init", "finish", {"project": "small", "mode": "offline", "log_dir": "logs"}),
        ("mlflow", "start_run", "end_run", {}),
    ],
)
def test_a_run_is_found_and_opened_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    begin: str,
    end: str,
    options: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "120")  # seconds, for its process to start
    # The small distribution of MLflow has no other store without a server.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    module: Any = importlib.import_module(name)
    assert run_id_of(module) is None
    found = run_id_of(getattr(module, begin)(**options))
    assert run_id_of(module) == found
    run = through_a_checkpoint(found, tmp_path / "c")
    getattr(module, end)()
    assert (run.tracker, run.project) == (name, "small" if name == "wandb" else "")
    again = getattr(module, begin)(**(options | resume_arguments(run, step=5)))
    assert run_id_of(again) == run
    getattr(module, end)()


def test_a_swanlab_run_that_a_server_knows() -> None:
    kind = type("Run", (), {"__module__": "swanlab.sdk.internal.run", "mode": "online"})
    tracker = kind()
    tracker.id, tracker.path = "abc", "/me/small/abc"
    run = run_id_of(tracker)
    assert run == TrackerRun("swanlab", "abc", "small", "me")
    assert resume_arguments(run) == {
        "id": "abc",
        "resume": "allow",
        "project": "small",
        "workspace": "me",
    }


def test_what_derives_from_a_tracker_counts_as_one(tmp_path: Path) -> None:
    class Mine(SummaryWriter):
        """A writer of somebody's own."""

    writer = Mine(str(tmp_path))
    assert run_id_of(writer) == TrackerRun("tensorboard", str(tmp_path))
    writer.close()


def test_what_is_no_tracker() -> None:
    assert run_id_of(None) is None
    for other in (torch.nn.Linear(1, 1), ModuleType("logging"), 3):
        with pytest.raises(ValueError, match="is of no tracker that is known here"):
            run_id_of(other)
    with pytest.raises(ValueError, match="'neptune' is none of the known trackers"):
        resume_arguments(TrackerRun("neptune", "1"))


def test_nothing_is_imported_to_look() -> None:
    script = (
        "import sys; from remesh.training.trackers import run_id_of; run_id_of(None);"
        "print([m for m in ('wandb', 'swanlab', 'mlflow', 'tensorboard', 'torch') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
