"""`remesh repair`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import remesh

from .conftest import Run, RunJson, data_files


def test_what_no_digest_proves_is_left_out(
    run: Run, run_json: RunJson, checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "remesh.json").unlink()

    result = run("repair", checkpoint, "--to", tmp_path / "proven")
    assert result.exit_code == 1
    assert "left out, because no digest proves them: " in result.stdout
    assert remesh.Checkpoint(tmp_path / "proven").values == {}

    result = run("repair", checkpoint, "--to", tmp_path / "new", "--keep-unchecked")
    assert (result.exit_code, result.stderr) == (1, "")
    new = remesh.Checkpoint(tmp_path / "new")
    assert new.verify().ok
    assert new.values["step"] == 1
    assert "step" in run_json("verify", tmp_path / "new")["checkpoints"][0]["unchecked"]


def test_of_many_names_the_first_are_listed(run: Run, tmp_path: Path) -> None:
    remesh.save({f"value_{number:03}": number for number in range(200)}, tmp_path / "many")
    (tmp_path / "many" / "remesh.json").unlink()

    text = run("repair", tmp_path / "many", "--dry-run").stdout
    kept = run("repair", tmp_path / "many", "--dry-run", "--keep-unchecked").stdout

    assert "because no digest proves them: value_000, value_001" in text
    assert "value_007 and 192 more" in text
    assert "value_007 and 192 more" in kept


def test_json_of_a_dry_run(run_json: RunJson, checkpoint: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in checkpoint.parent.rglob("*")}
    report = run_json("repair", checkpoint, "--dry-run")

    assert report["target"] == ""
    assert report["is_complete"] is True
    assert [file["state"] for file in report["files"]] == ["sound", "sound"]
    assert report["lost"] == report["unchecked"] == report["left_out"] == report["notes"] == []
    assert {file: file.stat().st_mtime_ns for file in checkpoint.parent.rglob("*")} == before

    data_files(checkpoint)[0].unlink()
    report = run_json("repair", checkpoint, "--dry-run", exit_code=1)
    lost = {tensor["name"]: tensor for tensor in report["lost"]}
    assert lost["model.embed"]["holes"][0]["offset"] == [0, 0]
    assert report["files"][0]["state"] == "missing"


def test_a_repaired_checkpoint_is_marked(run: Run, checkpoint: Path) -> None:
    data_files(checkpoint)[1].unlink()
    run("repair", checkpoint, "--to", checkpoint.parent / "step_2")

    line = next(one for one in run("ls", checkpoint.parent).stdout.splitlines() if "step_2" in one)

    assert line.endswith("(repaired, 4 lost)")
