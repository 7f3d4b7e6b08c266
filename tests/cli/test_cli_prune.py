"""`remesh prune`: it lists, and removes only with --yes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import Run, RunJson

DEAD = "data-0123456789ab"


@pytest.fixture
def dead(runs: Path) -> Path:
    """Beside the checkpoints of `runs`, the folder of a save that died long ago."""
    folder = runs / "step_300" / DEAD
    folder.mkdir(parents=True)
    (folder / "00000.safetensors").write_bytes(bytes(1500))
    for path in (folder / "00000.safetensors", folder):
        os.utime(path, (1e9, 1e9))
    return folder


def test_without_yes_it_only_lists(run: Run, runs: Path, dead: Path) -> None:
    result = run("prune", runs, "--incomplete")

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["what", "age", "size", "path"]
    listed = {line.split()[0]: line for line in lines[1:-1]}
    assert listed["garbage"].split()[2:] == ["1.5", "kB", str(dead)]
    # What the fixture's save of step 200 left is complete but for its record, and young.
    assert str(runs / "step_200") in listed["kept"]
    assert "may be running" in listed["kept"]
    assert lines[-1] == "1 leftover, 1.5 kB; --yes removes them"
    assert dead.exists()


def test_with_yes_it_removes(run: Run, runs: Path, dead: Path) -> None:
    others = {path for path in runs.rglob("*") if not path.is_relative_to(dead.parent)}
    result = run("prune", runs, "--incomplete", "--yes")

    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "removed 1 leftover, 1.5 kB"
    assert set(runs.rglob("*")) == others


def test_json(run_json: RunJson, runs: Path, dead: Path) -> None:
    listed = {item["path"]: item for item in run_json("prune", runs, "--incomplete")["leftovers"]}
    assert listed[str(dead)]["kept"] == ""
    assert listed[str(dead)]["num_bytes"] == 1500
    assert not any(item["removed"] for item in listed.values())

    listed = {
        item["path"]: item
        for item in run_json("prune", runs, "--incomplete", "--older-than", "2d", "--yes")[
            "leftovers"
        ]
    }
    assert [path for path, item in listed.items() if item["removed"]] == [str(dead)]


def test_wrong_usage(run: Run, tmp_path: Path) -> None:
    assert "--incomplete" in run("prune", tmp_path).stderr
    assert run("prune", tmp_path).exit_code == 2
    wrong = run("prune", tmp_path, "--incomplete", "--older-than", "1")
    assert wrong.exit_code == 2
    assert "write it like 90s" in wrong.stderr
    assert run("prune", tmp_path / "nowhere", "--incomplete").exit_code == 2


def test_nothing_is_left(run: Run, tmp_path: Path) -> None:
    assert run("prune", tmp_path, "--incomplete").stdout == "nothing is left of dead saves\n"
