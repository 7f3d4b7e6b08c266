"""`remesh ls`: what a checkpoint holds, and what is in a directory of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh import catalog
from remesh.formats import native
from remesh.storage import open_storage

from .conftest import Run, RunJson, change_record, data_files

# ----- a checkpoint -----


def test_how_far_files_are_compressed(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    plain, compressed = tmp_path / "plain", tmp_path / "compressed"
    remesh.save({"a": np.zeros(300_000)}, plain)
    options = ["--format", "remesh", "--compress", "zstd"]
    assert run("convert", plain, compressed, *options).exit_code == 0
    assert "compressed" not in run("ls", plain).output.replace(str(tmp_path), "")
    assert "in all, compressed to 0 % of 2.4 MB\n" in run("ls", compressed).output
    before, after = (run_json("ls", path)["totals"] for path in (plain, compressed))
    assert before["num_uncompressed_bytes"] == after["num_uncompressed_bytes"] > 2_400_000
    assert before["num_file_bytes"] > 2_400_000 > 100_000 > after["num_file_bytes"]


def test_pieces_say_where_the_bytes_are(run_json: RunJson, places: dict[str, Path]) -> None:
    tensor = run_json("show", places["one"], "model.embed")
    whole = np.arange(48, dtype=np.float32).reshape(8, 6)

    assert [piece["offset"] for piece in tensor["pieces"]] == [[0, 0], [4, 0]]
    for piece, rows in zip(tensor["pieces"], (whole[:4], whole[4:]), strict=True):
        content = (places["one"] / piece["file"]).read_bytes()
        stored = content[piece["start"] : piece["start"] + piece["num_bytes"]]
        assert stored == rows.tobytes()


def test_patterns_choose_names_of_every_kind(run_json: RunJson, places: dict[str, Path]) -> None:
    document = run_json("ls", places["one"], "model.t*", "*.9", "st?p", "rng/*_[1]_2")

    names = {
        kind: [one["name"] for one in document[kind]] for kind in ("tensors", "values", "objects")
    }
    assert names == {
        "tensors": ["layers.9", "model.tied"],
        "values": ["step"],
        "objects": ["rng/shard_1_2"],
    }
    assert document["tensors"][1]["tied_to"] == "model.head"
    assert document["totals"]["num_tensors"] == 5


def test_control_characters_in_names_are_escaped(run: Run, tmp_path: Path) -> None:
    remesh.save({"a\x1b[31mred": np.zeros(3), "v": "\x07"}, tmp_path / "ck")

    shown = run("ls", tmp_path / "ck", "--values").stdout

    assert r"a\x1b[31mred" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_no_tensors(run: Run, tmp_path: Path) -> None:
    remesh.save({"step": 3}, tmp_path)

    assert "0 tensors in 0 pieces, 0 B" in run("ls", tmp_path).stdout


def test_missing_file_is_reported_after_the_listing(
    run: Run, run_json: RunJson, checkpoint: Path
) -> None:
    gone = data_files(checkpoint)[1]
    gone.unlink()
    file = str(gone.relative_to(checkpoint))

    result = run("ls", checkpoint)
    assert result.exit_code == 1
    assert "model.tied -> model.head\n" in result.stdout
    assert f"{file} is missing" in result.stderr

    document = run_json("ls", checkpoint, exit_code=1)
    assert document["status"] == "damaged"
    assert [(one["file"], one["problem"]) for one in document["damages"]] == [(file, "missing")]


# ----- a directory of checkpoints -----


def test_the_newest_is_the_one_that_a_job_resumes_from(
    run: Run, run_json: RunJson, runs: Path
) -> None:
    def newest() -> list[str]:
        checkpoints = run_json("ls", runs)["checkpoints"]
        return [step["name"] for step in checkpoints if step["newest"]]

    for step, created in ((9, "2026-01-01"), (100, "2026-01-02"), (10, "2026-01-03")):
        change_record(runs / f"step_{step}", created=f"{created}T00:00:00+00:00")
    (runs / "step_10").rename(runs / "final")
    assert newest() == ["step_100"]
    assert run("latest", runs).stdout == f"{runs / 'step_100'}\n"
    catalog.note_failure(open_storage(runs), "step_100", "a wrong bit")
    assert newest() == ["step_9"]
    assert run("latest", runs).stdout == f"{runs / 'step_9'}\n"
    assert "step_100: a wrong bit\n" in run("ls", runs).stdout


def test_checkpoints_are_listed_by_step_and_latest_says_the_same(
    run_json: RunJson, runs: Path
) -> None:
    (runs / "step_9").rename(runs / "final")
    listed = run_json("ls", runs)["checkpoints"]
    steps = {"final": None, "step_10": 10, "step_100": 100, "step_200": 200}
    assert [(one["name"], one["step"]) for one in listed] == list(steps.items())
    statuses = ["committed", "committed", "committed", "unfinished"]
    assert [one["status"] for one in listed] == statuses
    [newest] = [one for one in listed if one.pop("newest")]
    assert run_json("latest", runs) == newest


def test_what_a_newer_remesh_has_written_is_told_in_lines(run: Run, runs: Path) -> None:
    change_record(runs / "step_10", version=native.FORMAT_VERSION + 1)
    shown = run("ls", runs).stdout.splitlines()
    [told] = [line for line in shown if line.startswith("step_10: ")]
    assert told.endswith(f"version {native.FORMAT_VERSION + 1}")
    assert "Upgrade remesh" in shown[shown.index(told) + 1]


@pytest.mark.parametrize("damage", ["record", "missing", "short"])
def test_damaged_checkpoints_are_never_the_newest(
    run: Run, run_json: RunJson, runs: Path, damage: str
) -> None:
    (data,) = data_files(runs / "step_100")
    if damage == "record":
        (runs / "step_100" / "remesh.json").write_text("{}")
        reason = "remesh.json is not what was written"
    elif damage == "missing":
        data.unlink()
        reason = f"{data.relative_to(runs / 'step_100')} is missing"
    else:
        size = data.stat().st_size
        os.truncate(data, size - 1)
        file = data.relative_to(runs / "step_100")
        reason = f"{file} has {size - 1} bytes, {size} were written"

    steps = {step["name"]: step for step in run_json("ls", runs)["checkpoints"]}

    assert steps["step_100"]["status"] == "damaged"
    assert steps["step_100"]["problem"] == reason
    assert steps["step_10"]["newest"] is True
    shown = run("ls", runs).stdout
    assert f"step_100: {reason}\n" in shown
    for name in ("step_100", "step_200"):  # each that is broken
        assert f"remesh repair {runs / name} --dry-run\n" in shown
    assert run("latest", runs).stdout == f"{runs / 'step_10'}\n"


def test_links_are_listed_unless_they_lead_to_what_is_listed(
    run_json: RunJson, runs: Path, tmp_path: Path
) -> None:
    (runs / "latest").symlink_to("step_100")
    (runs / "loop").symlink_to("loop")
    (runs / "broken").symlink_to("nowhere")
    remesh.save({"w": np.zeros(3)}, tmp_path / "big_disk" / "saved")
    (runs / "step_11").symlink_to(tmp_path / "big_disk" / "saved")

    names = [step["name"] for step in run_json("ls", runs)["checkpoints"]]

    assert names == ["step_9", "step_10", "step_11", "step_100", "step_200"]
