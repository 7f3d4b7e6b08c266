"""`remesh verify`: all damage, whatever is damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import remesh
from remesh.core.integrity import BLOCK_SIZE
from remesh.formats import native
from remesh.storage import open_storage
from tests.engine.small_checkpoint import flip

from .conftest import Run, RunJson, change_record, data_files


def damages_of(run_json: RunJson, checkpoint: Path) -> list[dict[str, Any]]:
    (verdict,) = run_json("verify", checkpoint, exit_code=1)["checkpoints"]
    assert verdict["status"] == "damaged"
    damages: list[dict[str, Any]] = verdict["damages"]
    return damages


def test_sound(run_json: RunJson, places: dict[str, Path]) -> None:
    assert run_json("verify", places["one"]) == {
        "checkpoints": [
            {
                "path": str(places["one"]),
                "status": "sound",
                "num_files": 2,
                "num_bytes": sum(file.stat().st_size for file in data_files(places["one"])),
                "damages": [],
                "error": "",
                "has_digests": True,
                "unchecked": [],
                "incomplete": [],
                "advice": "",
            }
        ]
    }


def test_a_flipped_byte(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    file = data_files(checkpoint)[0]
    size, name = file.stat().st_size, str(file.relative_to(checkpoint))
    flip(file, size - 1)

    (damage,) = damages_of(run_json, checkpoint)
    assert (damage["file"], damage["problem"]) == (name, "content")
    assert (damage["start"], damage["stop"]) == (0, size)
    assert "model.embed" in damage["tensors"]

    result = run("verify", checkpoint)
    assert result.exit_code == 1
    found = result.stdout.splitlines()[2]
    assert found.split()[:4] == ["wrong", "bytes", f"0:{size}", name]
    assert found.endswith(", ".join(damage["tensors"]))


def test_blocks_are_told_apart_and_neighbours_are_united(run_json: RunJson, tmp_path: Path) -> None:
    remesh.save(
        {name: np.zeros(2 * BLOCK_SIZE, np.uint8) for name in ("a", "b", "c")}, tmp_path / "ck"
    )
    (file,) = data_files(tmp_path / "ck")
    start = file.stat().st_size - 6 * BLOCK_SIZE
    # Blocks are those of the file, whose header comes first: block 2 holds the end of a tensor and
    # the beginning of the next, the blocks 1 and 5 lie inside one.
    for block in (1, 2, 5):
        flip(file, block * BLOCK_SIZE + start)

    damages = damages_of(run_json, tmp_path / "ck")

    assert [(d["start"] // BLOCK_SIZE, d["stop"] // BLOCK_SIZE) for d in damages] == [
        (1, 3),
        (5, 6),
    ]
    assert [len(d["tensors"]) for d in damages] == [2, 1]
    assert len(set(damages[0]["tensors"]) | set(damages[1]["tensors"])) == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [(-1, ("size", -1, 0)), (10, ("size", 0, 10)), (None, ("missing", 0, 0))],
)
def test_a_file_of_another_size(
    run: Run, run_json: RunJson, checkpoint: Path, change: int | None, expected: Any
) -> None:
    first, file = data_files(checkpoint)
    size = file.stat().st_size
    if change is None:
        file.unlink()
    else:
        os.truncate(file, size + change)

    (damage,) = damages_of(run_json, checkpoint)

    problem, before, after = expected
    start = 0 if change is None else size + before
    assert (damage["problem"], damage["start"], damage["stop"]) == (problem, start, size + after)
    names = set(damage["tensors"])
    assert {"model.embed", "layers.9"} <= names if change is None else len(names) <= 1
    assert ("wrong size" in run("verify", checkpoint).stdout) == (problem == "size")
    flip(first, 0)  # all damage is listed
    assert [one["problem"] for one in damages_of(run_json, checkpoint)] == ["content", problem]


@pytest.mark.parametrize("name", ["index.safetensors", "values.msgpack"])
@pytest.mark.parametrize("problem", ["content", "size", "missing"])
def test_damaged_small_files(
    run: Run, run_json: RunJson, checkpoint: Path, name: str, problem: str
) -> None:
    (file,) = checkpoint.glob(f"data-*/{name}")
    size = file.stat().st_size
    if problem == "content":
        flip(file, size // 2)
    elif problem == "size":
        os.truncate(file, size - 3)
    else:
        file.unlink()
    # A data file is damaged as well; its size is checked even without an index.
    data_files(checkpoint)[0].unlink()

    (found,) = (one for one in damages_of(run_json, checkpoint) if one["file"].endswith(name))
    assert found == {
        "file": str(file.relative_to(checkpoint)),
        "problem": problem,
        "start": size - 3 if problem == "size" else 0,
        "stop": size,
        "tensors": [],
        "num_bytes": size - 3 if problem == "size" else None,
        "num_written": size if problem == "size" else None,
    }
    assert len(damages_of(run_json, checkpoint)) == 2
    shown = run("verify", checkpoint).stdout
    assert name in shown
    if problem != "missing":
        what = "other bytes" if problem == "content" else f"{size - 3} bytes of {size}"
        advice = f"To see what can be saved: remesh repair {checkpoint} --dry-run"
        assert shown.endswith(f"{name}: not what was written ({what})\n  {advice}\n")


def test_a_damaged_record(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    record = checkpoint / "remesh.json"
    text = record.read_text().replace('"world_size": 2', '"world_size": 3')
    record.write_text(text)

    (damage,) = damages_of(run_json, checkpoint)
    assert (damage["file"], damage["problem"]) == ("remesh.json", "content")
    assert (damage["start"], damage["stop"]) == (0, len(text))
    assert "the commit record was changed after it was written" in run("verify", checkpoint).stdout


def test_index_and_record_of_different_saves(run_json: RunJson, checkpoint: Path) -> None:
    record = native.read_record(open_storage(checkpoint))
    files = [msgspec.structs.replace(file, digest="0" * 32) for file in record.files]
    change_record(checkpoint, files=tuple(files))

    (verdict,) = run_json("verify", checkpoint, exit_code=1)["checkpoints"]

    assert verdict["status"] == "damaged"
    assert "belong to different saves" in verdict["error"]


def test_many_checkpoints(run: Run, run_json: RunJson, checkpoint: Path, runs: Path) -> None:
    flip(data_files(runs / "step_10")[0], 0)
    paths = [checkpoint, runs / "step_10", runs / "step_200", runs / "README"]

    verdicts = run_json("verify", *paths, exit_code=1)["checkpoints"]

    assert [verdict["path"] for verdict in verdicts] == [str(path) for path in paths]
    assert [verdict["status"] for verdict in verdicts] == ["sound", "damaged", "absent", "absent"]
    assert verdicts[3]["damages"] == []
    result = run("verify", *paths)
    assert result.stdout.startswith(f"{checkpoint}: sound")
    assert result.stderr.count("error: ") == 2


def test_a_directory_of_checkpoints(run: Run, run_json: RunJson, runs: Path) -> None:
    assert run("verify", runs).exit_code == 0  # an unfinished save is no damage
    (data,) = data_files(runs / "step_10")
    flip(data, 0)

    verdicts = run_json("verify", runs, exit_code=1)["checkpoints"]

    assert {Path(verdict["path"]).name: verdict["status"] for verdict in verdicts} == {
        "step_9": "sound",
        "step_10": "damaged",
        "step_100": "sound",
        "step_200": "unfinished",
    }
    for name in ("step_10", "step_200"):
        assert f"remesh repair {runs / name} --dry-run" in run("verify", runs).stdout


def test_an_unfinished_save_without_a_byte_is_to_be_removed(run: Run, runs: Path) -> None:
    (runs / "step_300" / "data-0123456789ab").mkdir(parents=True)
    for command in ("ls", "verify"):
        told = f"remesh prune {runs / 'step_300'} --incomplete --yes"
        assert told in run(command, runs).stdout


def test_a_newer_format_is_not_damage(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    change_record(checkpoint, version=native.FORMAT_VERSION + 1)

    (verdict,) = run_json("verify", checkpoint, exit_code=2)["checkpoints"]
    assert verdict["status"] == "unreadable"
    assert "Upgrade remesh" in verdict["error"]

    for command in (["verify"], ["ls"]):
        result = run(*command, checkpoint)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ")
        assert "Upgrade remesh" in result.stderr
