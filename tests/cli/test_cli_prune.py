"""`remesh latest`, `pin`, `unpin` and `prune`, which lists, and removes only with --yes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.exchange import Alone
from remesh.training.manager import Manager

from .conftest import Run, RunJson

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: 2.25}


@pytest.fixture
def managed(tmp_path: Path) -> Path:
    """A run with five checkpoints and their losses."""
    root = tmp_path / "run"
    with Manager(root, group=Alone()) as manager:
        for step, loss in LOSSES.items():
            manager.save(step, {"w": np.full(3, step)}, metrics={"loss": loss})
    return root


def steps(root: Path) -> list[int]:
    return sorted(int(path.parent.name[-8:]) for path in root.glob("step_*/remesh.json"))


def test_latest(run: Run, run_json: RunJson, managed: Path) -> None:
    newest = managed / "step_00000050"
    assert run("latest", managed).stdout == f"{newest}\n"
    found = run_json("latest", managed)
    assert (found["path"], found["step"], found["metrics"]) == (str(newest), 50, {"loss": 2.25})
    (newest / "remesh.json").write_text("{}")
    assert run_json("latest", managed)["step"] == 40


def test_where_there_is_nothing_to_choose_from(run: Run, managed: Path, tmp_path: Path) -> None:
    step = managed / "step_00000050"
    remesh.save({"w": np.zeros(3)}, tmp_path / "others" / "best")
    for command in (["latest"], ["prune", "--keep-last", 1]):
        itself, others = (run(*command, place) for place in (step, tmp_path / "others"))
        assert (itself.exit_code, others.exit_code) == (2, 2)
        assert itself.stderr.startswith(f"error: {step}: a checkpoint itself; give the directory ")
        assert "no checkpoint of remesh whose name ends with a step\n  remesh ls" in others.stderr


def test_without_yes_nothing_is_removed(run: Run, run_json: RunJson, managed: Path) -> None:
    assert run("pin", managed / "step_00000020").exit_code == 0
    before = sorted(managed.rglob("*"))
    options = ("--keep-last", 2)
    lines = run("prune", managed, *options).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["superfluous", "10"],
        ["kept", "20"],
        ["superfluous", "30"],
        ["kept", "40"],
        ["kept", "50"],
    ]
    assert lines[2].endswith("step_00000020  (pinned)")
    assert lines[-1].startswith("2 checkpoints, ")
    assert lines[-1].endswith("; --yes removes them")
    listed = run_json("prune", managed, *options)["checkpoints"]
    assert not any(one["removed"] for one in listed)
    assert sorted(managed.rglob("*")) == before


def test_with_yes_they_are_removed(run: Run, run_json: RunJson, managed: Path) -> None:
    listed = run_json("prune", managed, "--keep-last", 3, "--yes")["checkpoints"]
    assert [one["step"] for one in listed if one["removed"]] == [10, 20]
    assert steps(managed) == [30, 40, 50]
    result = run("prune", managed, "--keep-last", 1, "--yes")
    assert result.stdout.splitlines()[-1].startswith("removed 2 checkpoints, ")
    assert steps(managed) == [50]
    assert run("prune", managed, "--keep-last", 1).stdout.endswith("nothing to remove\n")


def test_pinned_checkpoints_stay(run: Run, managed: Path) -> None:
    assert run("pin", managed / "step_00000010").exit_code == 0
    run("prune", managed, "--keep-last", 1, "--yes")
    assert steps(managed) == [10, 50]
    assert run("unpin", managed / "step_00000010").exit_code == 0
    run("prune", managed, "--keep-last", 1, "--yes")
    assert steps(managed) == [50]


def test_a_truncated_newest_is_not_the_last_good_one(run: Run, managed: Path) -> None:
    (file,) = (managed / "step_00000050").glob("data-*/00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    listing = run("prune", managed, "--keep-last", 1, "--yes").stdout
    assert f"has {file.stat().st_size} bytes, {file.stat().st_size + 1} were written" in listing
    assert steps(managed) == [40, 50]


def test_other_runs_are_left_alone(run: Run, run_json: RunJson, managed: Path) -> None:
    remesh.save({"w": np.zeros(3)}, managed / "step_00000005")
    run("prune", managed, "--keep-last", 1, "--yes")
    assert steps(managed) == [5, 50]
    assert run_json("prune", managed, "--keep-last", 1, "--run", "")["run"] == ""
    remesh.save({"w": np.zeros(3)}, managed / "step_00000004")
    run("prune", managed, "--keep-last", 1, "--run", "", "--yes")
    assert steps(managed) == [5, 50]


# ----- what dead saves left -----


@pytest.fixture
def dead(runs: Path) -> Path:
    """Beside the checkpoints of `runs`, the folder of a save that died long ago."""
    folder = runs / "step_300" / "data-0123456789ab"
    folder.mkdir(parents=True)
    (folder / "00000.safetensors").write_bytes(bytes(1500))
    for path in (folder / "00000.safetensors", folder):
        os.utime(path, (1e9, 1e9))
    return folder


def test_what_dead_saves_left_is_listed(
    run: Run, run_json: RunJson, runs: Path, dead: Path
) -> None:
    listed = {item["path"]: item for item in run_json("prune", runs, "--incomplete")["leftovers"]}
    assert (listed[str(dead)]["kept"], listed[str(dead)]["num_bytes"]) == ("", 1500)
    assert not any(item["removed"] for item in listed.values())
    # What the fixture's save of step 200 left is complete but for its record, and young.
    (kept,) = (item["kept"] for path, item in listed.items() if "step_200" in path)
    assert "may be running" in kept
    assert "1 leftover, 1.5 kB; --yes removes them\n" in run("prune", runs, "--incomplete").stdout
    assert dead.exists()


def test_what_dead_saves_left_is_removed(
    run: Run, run_json: RunJson, runs: Path, dead: Path
) -> None:
    others = {path for path in runs.rglob("*") if not path.is_relative_to(dead.parent)}
    options = ("--incomplete", "--yes")
    listed = run_json("prune", runs, *options)["leftovers"]
    assert [item["path"] for item in listed if item["removed"]] == [str(dead)]
    assert set(runs.rglob("*")) == others
    assert run("prune", runs, *options).stdout.endswith("removed 0 leftovers, 0 B\n")
