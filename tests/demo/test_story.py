"""The parts of the story that need no processes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from remesh.checkpoint import save
from remesh.cli import cli
from remesh.demo import story
from remesh.demo.story import Death, DemoError, DemoResult, Entry, Run, RunResult, compare
from remesh.errors import OptionError


def planned(name: str = "C", *, dies_in_save: bool = False) -> Run:
    return Run(
        name=name, purpose="resumed", layout="FSDP2", num_ranks=3, logs="/l", root="/r",
        dies_in_save=dies_in_save,
    )  # fmt: skip


def test_a_new_directory_is_made_and_an_own_one_replaced(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    story.prepare_directory(out)
    (out / "step_00000010" / "data").mkdir(parents=True)
    (out / "step_00000010" / "data" / "file").write_text("x")
    (out / "result.json").write_text("{}")
    (out / "logs").mkdir()
    (out / "notes.txt").write_text("mine")
    story.prepare_directory(out)
    assert sorted(path.name for path in out.iterdir()) == [".remesh-demo", "notes.txt"]


def test_directories_of_others_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(OptionError, match="not empty and was not made by the demo"):
        story.prepare_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(OptionError, match="is a file"):
        story.prepare_directory(file)
    with pytest.raises(OptionError, match=r"(?s)cannot be used \(.*Not a directory"):
        story.prepare_directory(file / "below")


def test_newest_committed_skips_what_was_not_committed(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="no committed checkpoint"):
        story.newest_committed(tmp_path)
    save({"w": np.arange(6.0)}, tmp_path / "step_00000010")
    with pytest.raises(DemoError, match="should be step_00000020"):
        story.newest_committed(tmp_path)
    save({"w": np.arange(6.0)}, tmp_path / "step_00000020")
    half = tmp_path / "step_00000030"
    (half / "data-0").mkdir(parents=True)
    with pytest.raises(DemoError, match="nothing was written"):
        story.refusal_of(half)
    (half / "data-0" / "00000.safetensors").write_bytes(b"12345")
    assert story.newest_committed(tmp_path) == tmp_path / "step_00000020"
    assert story.refusal_of(half).startswith("CheckpointNotFoundError: ")
    with pytest.raises(DemoError, match="opens as a checkpoint"):
        story.refusal_of(tmp_path / "step_00000010")


def test_compare() -> None:
    assert compare({3: 1.0, 4: 2.0, 9: 5.0}, {3: 1.5, 4: 1.75}) == (2, 0.5)
    assert compare({}, {1: 1.0}) == (0, 0.0)
    assert compare({1: 1.0, 2: math.nan, 3: 1.0}, {1: 1.0, 2: 1.0, 3: 1.0}) == (3, math.inf)


def entry(at: float, rank: int, **what: object) -> Entry:
    return {"time": at, "rank": rank, "pid": 10 + rank, **what}


def test_a_killed_run_in_numbers() -> None:
    entries = [
        *(entry(0.0, rank, begins=0) for rank in range(2)),
        *(entry(1.0, rank, step=1, loss=5.0) for rank in range(2)),
        *(entry(2.0, rank, saved=1) for rank in range(2)),
        *(entry(3.0, rank, step=2, loss=4.0) for rank in range(2)),
        entry(4.0, 1, dies=2, num_bytes=4),
    ]
    run = story.summarise(planned(dies_in_save=True), entries, 9.0, {1: 5.0, 2: 4.5, 3: 4.0})
    assert (run.first_step, run.last_step, run.commits) == (0, 2, (1,))
    assert (run.num_compared, run.max_difference) == (2, 0.5)
    assert run.death == Death(rank=1, step=2, num_bytes=4, seconds=None)
    assert "in the middle of the save of step 2" in story.death_text(run.run, run.death)


def test_a_resumed_run_in_numbers() -> None:
    entries = [entry(0.0, 1, begins=20), entry(0.0, 0, begins=20), entry(1.0, 0, step=21, loss=3.0)]
    run = story.summarise(planned(), entries, 9.0, {21: 3.0})
    assert (run.first_step, run.last_step) == (20, 21)
    assert run.death is None
    assert not run.agrees  # one step is too few to say so


def test_how_the_others_went_on() -> None:
    entries = [
        entry(float(step), rank, step=step, loss=float(step))
        for step in (1, 2)
        for rank in (0, 1, 2)
    ]
    entries += [entry(2.5, 2, dies=2), *(entry(3.25, rank, step=3, loss=3.0) for rank in (0, 1, 3))]
    found = story.death_in(entries)
    assert found == Death(rank=2, step=2, seconds=0.75, num_went_on=2, num_repeated=0)
    assert story.losses_of(entries) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert "2 others went on" in story.death_text(planned(), found)


@pytest.mark.parametrize(
    ("code", "dies_in_save", "message"),
    [(3, False, "run C ended with code 3"), (0, True, "run C ended with code 0")],
)
def test_a_run_that_ends_otherwise_than_planned_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, dies_in_save: bool, message: str
) -> None:
    begin = subprocess.Popen

    def start(_command: object, **options: object) -> subprocess.Popen[bytes]:
        return begin([sys.executable, "-c", f"raise SystemExit({code})"], **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(story, "subprocess", SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT))
    run = replace(planned(dies_in_save=dies_in_save), logs=str(tmp_path / "logs"))
    with pytest.raises(DemoError, match=message):
        story.play(run, lambda _: None)


def test_a_silent_run_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, started = subprocess.Popen, []

    def start(_command: object, **options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(begin(command, **options))  # type: ignore[call-overload]
        return started[0]  # type: ignore[no-any-return]

    monkeypatch.setattr(story, "subprocess", SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT))
    monkeypatch.setattr(story, "SILENCE_LIMIT", 0.2)
    with pytest.raises(DemoError, match="run C ended with code -9"):
        story.play(replace(planned(), logs=str(tmp_path / "logs")), lambda _: None)
    assert [process.returncode for process in started] == [-9]


def result_with(*, difference: float) -> DemoResult:
    run = RunResult(
        run=replace(planned("A"), purpose="reference"), first_step=0, last_step=12,
        losses=dict.fromkeys(range(12), 1.0), commits=(), death=None, num_compared=12,
        max_difference=0.0, seconds=1.0,
    )  # fmt: skip
    resumed = replace(
        run, run=planned("C"), first_step=2, num_compared=10, max_difference=difference
    )
    return DemoResult(
        passed=resumed.agrees,
        max_difference=difference,
        runs=(run, resumed),
        half_written=Path("/x/y"),
        refusal="r",
        resumed_from=Path("/x/z"),
        seconds=3.0,
    )


def test_result_as_json() -> None:
    read = json.loads(result_with(difference=1e-5).to_json())
    assert read["passed"] is True
    assert read["runs"][0]["losses"]["3"] == 1.0
    assert read["half_written"] == "/x/y"


@pytest.mark.parametrize(("difference", "code"), [(1e-5, 0), (1.1e-5, 1), (math.inf, 1)])
def test_the_exit_code_says_whether_losses_agree(
    monkeypatch: pytest.MonkeyPatch, difference: float, code: int
) -> None:
    monkeypatch.setattr(story, "tell", lambda *_: result_with(difference=difference))
    told = CliRunner().invoke(cli, ["demo", "--out", "/x"])
    assert told.exit_code == code
    assert ("the losses of run C are not those of the reference" in told.output) == (code == 1)
    assert f"in 10 steps after the resume is {difference:.1e}" in told.output


def test_what_goes_wrong_is_one_line_and_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> DemoResult:
        raise DemoError("run C: rank 1 ended with code 1")

    monkeypatch.setattr(story, "tell", fail)
    told = CliRunner().invoke(cli, ["demo", "--out", "/x"])
    assert told.exit_code == 1
    assert told.output == "error: run C: rank 1 ended with code 1\n"
