"""The parts of the story that need no processes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from remesh.checkpoint import save
from remesh.cli.demo import demo
from remesh.demo import recovery, report, story
from remesh.demo.config import Kind, Layout, RunSpec, TrainConfig
from remesh.demo.launch import Ended, RunEnd
from remesh.demo.messages import AboutToDie, Failed, Message, Ready, SaveDone, StepDone
from remesh.demo.result import (
    DemoError,
    DemoResult,
    HalfWritten,
    RecoveryResult,
    RunResult,
    StoredResult,
    compare,
)
from remesh.demo.story import Told


def spec(name: str = "B", num_ranks: int = 3) -> RunSpec:
    return RunSpec(
        name=name, purpose="test", layout=Layout(Kind.FSDP2, num_ranks), train=TrainConfig()
    )


def told(messages: list[tuple[int, Message]], *ended: Ended) -> Told:
    return Told(spec(num_ranks=len(ended)), tuple(messages), RunEnd(tuple(ended), 1.5))


FINE = Ended(0, by_launcher=False)


def test_a_new_directory_is_made_and_an_own_one_replaced(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    story.prepare_directory(out)
    (out / "step_00000010" / "data").mkdir(parents=True)
    (out / "step_00000010" / "data" / "file").write_text("x")
    (out / "result.json").write_text("{}")
    (out / "logs" / "old.log").write_text("old")
    (out / "notes.txt").write_text("mine")
    story.prepare_directory(out)
    assert sorted(path.name for path in out.iterdir()) == [".remesh-demo", "logs", "notes.txt"]
    assert list((out / "logs").iterdir()) == []


def test_directories_of_others_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(DemoError, match="not empty and was not made by the demo"):
        story.prepare_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(DemoError, match="is a file"):
        story.prepare_directory(file)
    with pytest.raises(DemoError, match=r"(?s)cannot be used \(.*Not a directory"):
        story.prepare_directory(file / "below")


def test_newest_committed_skips_what_was_not_committed(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="no committed checkpoint"):
        story.newest_committed(tmp_path)
    for step in (10, 20):
        save({"w": np.arange(6.0)}, tmp_path / f"step_{step:08d}")
    half = tmp_path / "step_00000030"
    (half / "data-0").mkdir(parents=True)
    (half / "data-0" / "00000.safetensors").write_bytes(b"12345")
    assert story.newest_committed(tmp_path) == tmp_path / "step_00000020"
    left = story.examine_half_written(half)
    assert (left.num_files, left.num_bytes) == (1, 5)
    assert left.refusal.startswith("CheckpointNotFoundError: ")
    with pytest.raises(DemoError, match="opens as a checkpoint"):
        story.examine_half_written(tmp_path / "step_00000010")


def test_counts_of_a_stored_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step_00000004"
    save({"w": np.zeros((3, 5)), "n": 7}, path)
    stored = story.examine_stored(path, 4)
    assert (stored.num_tensors, stored.num_bytes) == (1, 3 * 5 * 8)
    with pytest.raises(DemoError, match="should be that of step 8"):
        story.examine_stored(path, 8)
    assert stored.num_file_bytes == sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def test_compare() -> None:
    assert compare({3: 1.0, 4: 2.0, 9: 5.0}, {3: 1.5, 4: 1.75}) == (2, 0.5)
    assert compare({}, {1: 1.0}) == (0, 0.0)
    assert compare({1: 1.0, 2: math.nan, 3: 1.0}, {1: 1.0, 2: 1.0, 3: 1.0}) == (3, math.inf)


def test_a_killed_run_in_numbers() -> None:
    messages: list[tuple[int, Message]] = [
        (0, Ready(0, (), None)),
        (1, Ready(0, (), None)),
        (2, Ready(0, (), None)),
        (0, StepDone(1, 5.0)),
        (1, StepDone(1, 5.0)),
        (0, SaveDone(1, 0.5)),
        (0, StepDone(2, 4.0)),
        (1, AboutToDie(2, "save.chunk_written", 4)),
        (2, Failed("ExchangeError: gone")),
    ]
    ended = (
        Ended(-15, by_launcher=True),
        Ended(-9, by_launcher=False),
        Ended(1, by_launcher=False),
    )
    run = story.summarise(told(messages, *ended), {1: 5.0, 2: 4.5, 3: 4.0})
    assert (run.first_step, run.last_step, run.commits) == (0, 2, (1,))
    assert (run.num_compared, run.max_difference) == (2, 0.5)
    assert run.load_seconds is None
    assert run.kill is not None
    assert (run.kill.rank, run.kill.step, run.kill.exit_code) == (1, 2, -9)
    assert (run.kill.num_noticed, run.kill.num_ended_by_launcher) == (1, 1)
    assert run.kill.errors == ("rank 2: ExchangeError: gone",)


def test_a_resumed_run_in_numbers() -> None:
    messages: list[tuple[int, Message]] = [
        (1, Ready(20, (), 0.25)),
        (0, Ready(20, (), 0.5)),
        (0, StepDone(21, 3.0)),
    ]
    run = story.summarise(told(messages, FINE, FINE), {21: 3.0})
    assert (run.first_step, run.last_step, run.load_seconds) == (20, 21, 0.5)
    assert run.kill is None
    assert not run.agrees  # one step is too few to say so


def test_a_failed_rank_is_named_with_its_reason_and_log(tmp_path: Path) -> None:
    bad = told([(1, Failed("OSError: disk"))], FINE, Ended(1, by_launcher=False))
    with pytest.raises(
        DemoError, match=r"(?s)rank 1 ended with code 1: OSError: disk .*rank-1\.log"
    ):
        story._require_success(bad, tmp_path)
    story._require_success(told([], FINE, FINE), tmp_path)


def test_a_survivor_that_noticed_nothing_is_an_error(tmp_path: Path) -> None:
    failed, killed = Ended(1, by_launcher=False), Ended(-9, by_launcher=False)
    story._require_death(told([], failed, failed, killed, failed), tmp_path)
    with pytest.raises(DemoError, match="rank 3 did not notice"):
        story._require_death(told([], failed, failed, killed, FINE), tmp_path)
    with pytest.raises(DemoError, match="rank 2 should have been killed"):
        story._require_death(told([], failed, failed, failed, failed), tmp_path)


def result_with(*, difference: float) -> DemoResult:
    run = RunResult(
        name="A", purpose="reference", layout="FSDP2 x 1", num_ranks=1, first_step=0, last_step=12,
        losses=dict.fromkeys(range(12), 1.0), commits=(), kill=None, num_compared=12,
        max_difference=0.0, load_seconds=None, seconds=1.0,
    )  # fmt: skip
    resumed = replace(
        run, name="C", purpose="resumed", first_step=2, num_compared=10, max_difference=difference
    )
    return DemoResult(
        passed=resumed.agrees,
        tolerance=1e-5,
        max_difference=difference,
        runs=(run, resumed),
        half_written=HalfWritten(path=Path("/x/y"), num_files=1, num_bytes=2, refusal="r"),
        resumed_from=StoredResult(
            path=Path("/x/z"), step=1, num_tensors=1, num_bytes=1, num_file_bytes=1
        ),
        recovery=RecoveryResult(rank=2, step=20, seconds=0.5, num_went_on=3, num_repeated=0),
        picture=Path("/x/p.html"),
        seconds=3.0,
    )


def test_how_the_others_went_on() -> None:
    def entry(at: float, pid: int, step: int) -> recovery.Entry:
        return {"time": at, "rank": pid - 10, "pid": pid, "step": step, "loss": float(step)}

    dies = {"time": 2.5, "rank": 2, "pid": 12, "dies": 2}
    entries = [entry(float(step), pid, step) for step in (1, 2) for pid in (10, 11, 12)]
    with pytest.raises(DemoError, match="rank 2 was not killed"):
        recovery.summarise(entries)
    with pytest.raises(DemoError, match="no step came after the kill"):
        recovery.summarise([*entries, dies])
    entries += [dies, *(entry(3.25, pid, 3) for pid in (10, 11, 13))]
    found = recovery.summarise(entries)
    assert found == RecoveryResult(rank=2, step=2, seconds=0.75, num_went_on=2, num_repeated=0)
    assert recovery.losses_of(entries) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert "2 others went on" in report.recovery_text(found)


def test_result_as_json() -> None:
    read = json.loads(result_with(difference=1e-5).to_json())
    assert read["passed"] is True
    assert read["runs"][0]["losses"]["3"] == 1.0
    assert read["half_written"]["path"] == "/x/y"


@pytest.mark.parametrize(("difference", "code"), [(1e-5, 0), (1.1e-5, 1), (math.inf, 1)])
def test_the_exit_code_says_whether_losses_agree(
    monkeypatch: pytest.MonkeyPatch, difference: float, code: int
) -> None:
    monkeypatch.setattr(story, "tell", lambda *_: result_with(difference=difference))
    told = CliRunner().invoke(demo, ["--out", "/x"])
    assert told.exit_code == code
    assert ("the losses of run C are not those of the reference" in told.output) == (code == 1)
    assert f"in 10 steps after the resume is {difference:.1e}" in told.output


def test_what_goes_wrong_is_one_line_and_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> DemoResult:
        raise DemoError("run C: rank 1 ended with code 1")

    monkeypatch.setattr(story, "tell", fail)
    told = CliRunner().invoke(demo, ["--out", "/x"])
    assert told.exit_code == 1
    assert told.output == "error: run C: rank 1 ended with code 1\n"
