"""`remesh ls`: what a checkpoint holds, and what is in a directory of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

import remesh
from remesh import catalog
from remesh.formats import native
from remesh.storage import open_storage

from .conftest import Run, RunJson, data_files


def table_of(text: str, first_title: str) -> list[list[str]]:
    """The rows of the table whose titles begin with a word, cut at runs of two blanks."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(first_title))
    rows = []
    for line in lines[start + 1 :]:
        if not line:
            break
        rows.append([cell.strip() for cell in line.split("  ") if cell.strip()])
    return rows


def set_created(checkpoint: Path, created: str) -> None:
    """Rewrite a commit record as if it were of another time."""
    record = native.read_record(open_storage(checkpoint))
    changed = msgspec.structs.replace(record, created=created)
    (checkpoint / "remesh.json").write_bytes(native.encode_record(changed))


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
    result = run("convert", plain, tmp_path / "dcp", "--format", "torch_dcp", "--compress", "zstd")
    assert result.exit_code == 2
    assert "files of format 'torch_dcp' are never compressed" in result.stderr


def test_tensors_in_natural_order_with_ties(run: Run, checkpoint: Path) -> None:
    result = run("ls", checkpoint)

    assert result.exit_code == 0
    assert result.stderr == ""
    assert table_of(result.stdout, "dtype") == [
        ["int32", "[4]", "1", "16 B", "layers.9"],
        ["int32", "[4]", "1", "16 B", "layers.10"],
        ["float32", "[8, 6]", "2", "192 B", "model.embed"],
        ["float16", "[2, 3]", "1", "12 B", "model.half"],
        ["int64", "[6]", "1", "48 B", "model.head"],
        ["int64", "[6]", "1", "48 B", "model.tied -> model.head"],
    ]


def test_head_says_who_saved_what(run: Run, checkpoint: Path) -> None:
    set_created(checkpoint, "2026-01-31T12:00:00+00:00")
    facts = dict(
        line.strip().split("  ", 1) for line in run("ls", checkpoint).stdout.splitlines()[1:7]
    )

    assert facts["saved"].strip() == (
        f"2026-01-31 12:00:00 UTC by 2 ranks, remesh {remesh.__version__}, format 1"
    )
    assert facts["tensors"].strip() == "5 tensors in 6 pieces, 284 B, 1 tie"
    assert facts["elements"].strip() == "68: model 60, layers 8"
    assert facts["values"].strip() == "3 values, 2 objects (--values lists them)"
    assert facts["files"].strip().startswith("2 files with tensors, ")
    assert facts["metadata"].strip() == "{'git': 'abc'}"


def test_values_and_objects_are_listed_on_request(run: Run, checkpoint: Path) -> None:
    assert "betas" not in run("ls", checkpoint).stdout

    shown = run("ls", checkpoint, "--values").stdout
    assert table_of(shown, "type   value") == [
        ["tuple", "betas", "(0.9, 0.95)"],
        ["int", "step", "1"],
        ["float", "worst", "nan"],
    ]
    assert table_of(shown, "type  object") == [
        ["dict", "rng/shard_0_2", r"{'seed': 0, 'raw': b'\x01\xff'}"],
        ["dict", "rng/shard_1_2", r"{'seed': 1, 'raw': b'\x01\xff'}"],
    ]


def test_pieces_say_where_the_bytes_are(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    (tensor,) = run_json("ls", checkpoint, "model.embed", "--pieces")["tensors"]
    whole = np.arange(48, dtype=np.float32).reshape(8, 6)

    assert [(piece["offset"], piece["shape"]) for piece in tensor["pieces"]] == [
        ([0, 0], [4, 6]),
        ([4, 0], [4, 6]),
    ]
    for piece, rows in zip(tensor["pieces"], (whole[:4], whole[4:]), strict=True):
        content = (checkpoint / piece["file"]).read_bytes()
        stored = content[piece["start"] : piece["start"] + piece["num_bytes"]]
        assert stored == rows.tobytes()

    lines = run("ls", checkpoint, "model.embed", "--pieces").stdout.splitlines()
    for piece, box in zip(tensor["pieces"], ("[0:4, 0:6]", "[4:8, 0:6]"), strict=True):
        span = f"{piece['start']}:{piece['start'] + 96}"
        assert f"    {box}  96 B  {span}  {piece['file']}" in lines


def test_json_of_a_checkpoint(run_json: RunJson, checkpoint: Path) -> None:
    set_created(checkpoint, "2026-01-31T12:00:00+00:00")
    document = run_json("ls", checkpoint, "--values")
    tensors = document.pop("tensors")
    num_bytes = sum(file.stat().st_size for file in checkpoint.glob("data-*/*") if file.is_file())

    assert document == {
        "kind": "checkpoint",
        "path": str(checkpoint),
        "status": "committed",
        "damages": [],
        "format": "remesh",
        "created": "2026-01-31T12:00:00+00:00",
        "world_size": 2,
        "remesh_version": remesh.__version__,
        "format_version": 1,
        "metadata": {"git": "abc"},
        "totals": {
            "num_tensors": 5,
            "num_ties": 1,
            "num_pieces": 6,
            "num_elements": 68,
            "num_tensor_bytes": 284,
            "num_values": 3,
            "num_objects": 2,
            "num_files": 2,
            "num_file_bytes": num_bytes,
            "num_uncompressed_bytes": sum(f.stat().st_size for f in data_files(checkpoint)),
        },
        "values": [
            {"name": "betas", "type": "tuple", "value": [0.9, 0.95]},
            {"name": "step", "type": "int", "value": 1},
            {"name": "worst", "type": "float", "value": "nan"},
        ],
        "objects": [
            {"name": "rng/shard_0_2", "type": "dict", "value": {"seed": 0, "raw": "01ff"}},
            {"name": "rng/shard_1_2", "type": "dict", "value": {"seed": 1, "raw": "01ff"}},
        ],
    }
    assert [tensor["name"] for tensor in tensors if tensor["tied_to"] is None] == [
        "layers.9",
        "layers.10",
        "model.embed",
        "model.half",
        "model.head",
    ]
    assert run_json("ls", checkpoint)["values"][1] == {"name": "step", "type": "int"}
    assert tensors[-1] == {
        "name": "model.tied",
        "tied_to": "model.head",
        "dtype": "int64",
        "shape": [6],
        "num_pieces": 1,
        "num_bytes": 48,
    }


def test_patterns_choose_names_of_every_kind(run: Run, run_json: RunJson, checkpoint: Path) -> None:
    document = run_json("ls", checkpoint, "model.h*", "*.9", "st?p", "rng/*_[1]_2")

    assert [tensor["name"] for tensor in document["tensors"]] == [
        "layers.9",
        "model.half",
        "model.head",
    ]
    assert [value["name"] for value in document["values"]] == ["step"]
    assert [element["name"] for element in document["objects"]] == ["rng/shard_1_2"]
    assert document["totals"]["num_tensors"] == 5

    assert table_of(run("ls", checkpoint, "step").stdout, "type") == [["int", "step", "1"]]


def test_a_pattern_that_chooses_nothing_is_an_error(run: Run, checkpoint: Path) -> None:
    result = run("ls", checkpoint, "model.[xyz]*")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"error: no name in {checkpoint} matches model.[xyz]*\n"


def test_control_characters_in_names_are_escaped(run: Run, tmp_path: Path) -> None:
    remesh.save({"a\x1b[31mred": np.zeros(3), "v": "\x07"}, tmp_path / "ck")

    shown = run("ls", tmp_path / "ck", "--values").stdout

    assert r"a\x1b[31mred" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_no_tensors_scalars_and_empty_ones(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    remesh.save({"step": 3}, tmp_path / "none")
    remesh.save({"s": np.full((), 2.0), "e": np.zeros((0, 3))}, tmp_path / "some")

    assert "0 tensors in 0 pieces, 0 B" in run("ls", tmp_path / "none").stdout
    assert run_json("ls", tmp_path / "none")["tensors"] == []
    found = run_json("ls", tmp_path / "some", "--pieces")["tensors"]
    shapes = {tensor["name"]: (tensor["shape"], tensor["num_bytes"]) for tensor in found}
    assert shapes == {"s": ([], 8), "e": ([0, 3], 0)}
    assert run("ls", tmp_path / "some", "--pieces").exit_code == 0


def test_missing_file_is_reported_after_the_listing(
    run: Run, run_json: RunJson, checkpoint: Path
) -> None:
    gone = data_files(checkpoint)[1]
    size = gone.stat().st_size
    gone.unlink()
    file = str(gone.relative_to(checkpoint))

    result = run("ls", checkpoint)
    assert result.exit_code == 1
    assert len(table_of(result.stdout, "dtype")) == 6
    assert f"{file} is missing" in result.stderr

    document = run_json("ls", checkpoint, exit_code=1)
    assert document["status"] == "damaged"
    assert document["damages"] == [
        {
            "file": file,
            "problem": "missing",
            "start": 0,
            "stop": size,
            "tensors": [],
            "num_bytes": None,
            "num_written": None,
        }
    ]


# ----- a directory of checkpoints -----


def test_directory_in_order_of_numbers(run: Run, runs: Path) -> None:
    result = run("ls", runs)

    assert result.exit_code == 0
    rows = table_of(result.stdout, "status")
    assert [(row[0], row[-1]) for row in rows] == [
        ("committed", "step_9"),
        ("committed", "step_10"),
        ("committed", "step_100 *"),
        ("unfinished", "step_200"),
    ]
    assert result.stdout.splitlines()[-2:] == [
        "step_200: no commit record: a save is running, was interrupted, or the record was lost",
        f"To see what can be saved: remesh repair {runs / 'step_200'} --dry-run",
    ]


def test_json_of_a_directory(run_json: RunJson, runs: Path) -> None:
    set_created(runs / "step_9", "2026-01-31T12:00:00+00:00")
    document = run_json("ls", runs)
    first, last = document["checkpoints"][0], document["checkpoints"][-1]

    assert (document["kind"], document["path"]) == ("directory", str(runs))
    common = {"format": "remesh", "repaired_from": "", "num_lost": 0, "newest": False}
    for found, name in ((first, "step_9"), (last, "step_200")):
        num_bytes = sum(file.stat().st_size for file in (runs / name).glob("data-*/*"))
        place = {"name": name, "path": str(runs / name), "num_bytes": num_bytes}
        assert {key: found.pop(key) for key in {**common, **place}} == {**common, **place}
    created = "2026-01-31T12:00:00+00:00"
    assert first == {
        "status": "committed",
        "reason": "",
        "created": created,
        "world_size": 1,
        "step": 9,
    }
    reason = "no commit record: a save is running, was interrupted, or the record was lost"
    absent = dict.fromkeys(("created", "world_size", "step"))
    assert last == {"status": "unfinished", "reason": reason, **absent}


def test_the_newest_is_the_one_that_a_job_resumes_from(
    run: Run, run_json: RunJson, runs: Path
) -> None:
    def newest() -> list[str]:
        checkpoints = run_json("ls", runs)["checkpoints"]
        return [step["name"] for step in checkpoints if step["newest"]]

    for step, created in ((9, "2026-01-01"), (100, "2026-01-02"), (10, "2026-01-03")):
        set_created(runs / f"step_{step}", f"{created}T00:00:00+00:00")
    (runs / "step_10").rename(runs / "final")
    assert newest() == ["step_100"]
    assert run("latest", runs).stdout == f"{runs / 'step_100'}\n"
    catalog.note_failure(open_storage(runs), "step_100", "a wrong bit")
    assert newest() == ["step_9"]
    assert run("latest", runs).stdout == f"{runs / 'step_9'}\n"
    assert "step_100: a wrong bit\n" in run("ls", runs).stdout


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
    assert steps["step_100"]["reason"] == reason
    assert steps["step_10"]["newest"] is True
    assert f"step_100: {reason}\n" in run("ls", runs).stdout
    assert run("latest", runs).stdout == f"{runs / 'step_10'}\n"


def test_a_newer_format_is_unreadable(run_json: RunJson, runs: Path) -> None:
    record = native.read_record(open_storage(runs / "step_9"))
    newer = msgspec.structs.replace(record, version=native.FORMAT_VERSION + 1)
    (runs / "step_9" / "remesh.json").write_bytes(native.encode_record(newer))

    step = run_json("ls", runs)["checkpoints"][0]

    assert (step["name"], step["status"]) == ("step_9", "unreadable")
    assert "version 1" in step["reason"]


def test_a_link_to_a_listed_checkpoint_is_left_out(run_json: RunJson, runs: Path) -> None:
    (runs / "latest").symlink_to("step_100")
    (runs / "loop").symlink_to("loop")
    (runs / "broken").symlink_to("nowhere")

    names = [step["name"] for step in run_json("ls", runs)["checkpoints"]]

    assert names == ["step_9", "step_10", "step_100", "step_200"]


def test_a_link_to_a_checkpoint_elsewhere_is_listed(run_json: RunJson, tmp_path: Path) -> None:
    remesh.save({"w": np.zeros(3)}, tmp_path / "big_disk" / "saved")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step_1").symlink_to(tmp_path / "big_disk" / "saved")

    (step,) = run_json("ls", tmp_path / "runs")["checkpoints"]

    assert (step["name"], step["status"]) == ("step_1", "committed")


def test_patterns_choose_checkpoints(run: Run, run_json: RunJson, runs: Path) -> None:
    names = [step["name"] for step in run_json("ls", runs, "step_1*")["checkpoints"]]
    assert names == ["step_10", "step_100"]

    result = run("ls", runs, "epoch_*")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: no checkpoint in {runs} matches epoch_*\n"


# ----- nothing there -----


def test_nothing_there(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.gguf").touch()
    (tmp_path / "file").touch()

    for name, message in {
        "nowhere": "no such directory",
        "empty": "no checkpoint there, the directory is empty",
        "foreign": "not a checkpoint (no remesh.json); it holds model.gguf. Looked for: ",
        "file": "a file that is no checkpoint by itself; give the directory of one, or a file",
    }.items():
        result = run("ls", tmp_path / name)
        assert (result.exit_code, result.stdout) == (2, ""), name
        assert result.stderr.startswith(f"error: {tmp_path / name}: {message}")


def test_an_unfinished_save_is_not_a_checkpoint(run: Run, runs: Path) -> None:
    result = run("ls", runs / "step_200")

    assert result.exit_code == 2
    assert "but files of a save that was interrupted" in result.stderr
    assert f"remesh repair {runs / 'step_200'} --dry-run" in result.stderr
