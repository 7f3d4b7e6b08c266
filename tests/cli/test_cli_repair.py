"""`remesh repair`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import remesh

from .conftest import Run, RunJson, data_files, flip_byte


def test_a_lost_record(run: Run, run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "remesh.json").unlink()

    result = run("repair", checkpoint, "--to", tmp_path / "proven")
    assert result.exit_code == 1
    assert "left out, because no digest proves them: " in result.stdout
    assert "--keep-unchecked" in result.stdout
    assert remesh.Checkpoint(tmp_path / "proven").values == {}

    result = run("repair", checkpoint, "--to", tmp_path / "new", "--keep-unchecked")

    assert result.exit_code == 1
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["record", "missing"],
        ["index", "decodes"],
        ["values", "decodes"],
    ]
    assert lines[-1] == f"written to {tmp_path / 'new'}"
    new = remesh.Checkpoint(tmp_path / "new")
    assert new.verify().ok
    assert new.values["step"] == 1
    told = run("verify", tmp_path / "new")
    assert told.exit_code == 0
    assert "repaired; no digest proves that these are what was saved: " in told.stdout
    assert "step" in run_json("verify", tmp_path / "new")["checkpoints"][0]["unchecked"]


def test_a_damaged_tensor_is_named(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    flip_byte(data_files(checkpoint)[1], data_files(checkpoint)[1].stat().st_size - 1)

    result = run("repair", checkpoint, "--to", tmp_path / "new")

    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("lost: "))
    assert "  model.embed" in lines[at + 1]
    assert "missing [" in lines[at + 1]
    assert "model.embed" not in remesh.Checkpoint(tmp_path / "new").index


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


def test_nothing_can_be_saved(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    folder = tmp_path / "data-0123456789ab"
    folder.mkdir()
    (folder / "00000.safetensors").write_bytes(b"nothing")

    result = run("repair", tmp_path, "--to", tmp_path / "new")

    assert result.exit_code == 2
    assert "nothing can be saved" in result.stderr
    assert not (tmp_path / "new").exists()
    assert run_json("repair", tmp_path, "--dry-run", exit_code=2)["saved"] == []


def test_wrong_usage(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    assert run("repair", checkpoint).exit_code == 2
    assert "--to TARGET" in run("repair", checkpoint).stderr
    (tmp_path / "file").write_text("")
    occupied = run("repair", checkpoint, "--to", tmp_path)
    assert occupied.exit_code == 2
    assert "is not empty" in occupied.stderr
    nothing = run("repair", tmp_path / "nowhere", "--dry-run")
    assert nothing.exit_code == 2
    assert "nothing to repair" in nothing.stderr


def test_which_of_several_saves(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    save_id = remesh.Checkpoint(checkpoint).record.save_id
    (checkpoint / "remesh.json").unlink()
    (checkpoint / "data-0123456789ab").mkdir()
    (checkpoint / "data-0123456789ab" / "00000.safetensors").write_bytes(b"")

    assert save_id in run("repair", checkpoint, "--dry-run").stderr
    result = run("repair", checkpoint, "--dry-run", "--save", save_id)
    assert result.stdout.splitlines()[0].endswith(f"save {save_id}")


def test_a_repaired_checkpoint_is_marked(run: Run, checkpoint: Path) -> None:
    data_files(checkpoint)[1].unlink()
    run("repair", checkpoint, "--to", checkpoint.parent / "step_2")

    line = next(one for one in run("ls", checkpoint.parent).stdout.splitlines() if "step_2" in one)

    assert line.endswith("(repaired, 4 lost)")
