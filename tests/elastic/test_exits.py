"""How jobs end: of failures, of mistakes in the options, and never of an abort at exit."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from remesh.elastic import launch
from remesh.elastic.lifecycle import EXIT_JOB_FAILED
from tests.elastic.cluster import REMESH, MasterProcess, run_job
from tests.elastic.zygote import Command
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

TWO = ("--nproc-per-node", "2", "--max-restarts", "0")


def test_a_script_that_fails_is_no_fault_of_remesh(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import sys\n"
        "class Marker:\n    def __del__(self, print=print):\n        print('finalised')\n"
        "marker = Marker()\nsys.exit('bad')\n"
    )
    code, output = run_job(tmp_path, *TWO, "fails.py")
    assert code == EXIT_JOB_FAILED
    assert "finalised" not in output  # which is what aborts; see `test_script`
    assert "exitcode  : 1" in output
    assert "fault of remesh" not in output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--nnodes", "3:2", "job.py"), "--nnodes 3:2: the most nodes are fewer than the least"),
        (("--nnodes", "0", "job.py"), "--nnodes 0: give the number of nodes, 1 or more"),
        (("--nnodes", "2:4", "job.py"), "--nnodes 2:4: without --master no other machine can join"),
        (("--nnodes", "two", "job.py"), "--nnodes two: give the number of nodes"),
        (("--max-restarts", "-1", "job.py"), "--max-restarts -1: give 0 or more"),
        (("--nproc-per-node", "0", "job.py"), "--nproc-per-node 0: this node has to start 1"),
        (("--nproc-per-node", "gpu", "job.py"), "--nproc-per-node gpu: Cuda is not available\n"),
        (("--nproc-per-node", "all", "job.py"), "--nproc-per-node all: Unsupported"),
        (("missing.py",), "the script missing.py does not exist\n"),
    ],
)
def test_a_mistake_in_the_options_is_said_before_anything_starts(
    tmp_path: Path,
    words: tuple[str, ...],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "job.py").touch()
    with pytest.raises(SystemExit) as ending:
        launch.main(words)
    assert ending.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {problem}")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--hang-timeout", "-1"),
        ("--drain-seconds", "nan"),
        ("--beat-seconds", "0"),
        ("--last-call", "5s"),
    ],
)
def test_what_is_no_time(capsys: pytest.CaptureFixture[str], option: str, text: str) -> None:
    with pytest.raises(SystemExit) as ending:
        launch.main((option, text, "job.py"))
    assert ending.value.code == 2
    assert f"argument {option}: {text} is not a time; give " in capsys.readouterr().err


def test_exit_codes_are_kept_whoever_starts_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SIGCHLD is ignored, the kernel keeps none, and processes seem to have succeeded."""
    codes: list[int] = []

    def start(_options: object) -> None:
        codes.append(subprocess.run(["false"], check=False).returncode)

    monkeypatch.setattr(launch, "_run", start)
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        launch.main(["--no-python", "true"])
    finally:
        signal.signal(signal.SIGCHLD, former)
    assert codes == [1]


def test_starts_that_keep_failing_follow_after_pauses(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys\nsys.exit('Connection refused')\n")
    code, output = run_job(tmp_path, *TWO, "--max-restarts", "2", "fails.py")
    assert code == EXIT_JOB_FAILED
    assert re.findall(r"starts keep failing, the next one follows in (\d) s", output) == ["1", "2"]
    assert "no other process has failed by itself; no restart left: 2 of 2" in output


@pytest.mark.parametrize(("times", "codes"), [(1, {130}), (2, {130, -signal.SIGINT})])
def test_ctrl_c_ends_a_job_quietly(tmp_path: Path, times: int, codes: set[int]) -> None:
    (tmp_path / "waits.py").write_text("import time\nopen('begun', 'w')\ntime.sleep(1000)\n")
    output = tmp_path / "output"
    job = Command([*REMESH, "run", "waits.py"], output, directory=tmp_path)
    wait_until((tmp_path / "begun").exists, "the script has begun")
    for _ in range(times):
        job.send_signal(signal.SIGINT)
    assert job.wait(300) in codes
    assert "fault of remesh" not in output.read_text()


def test_ctrl_c_ends_a_master_quietly(tmp_path: Path) -> None:
    master = MasterProcess(tmp_path)
    assert master.end(signal.SIGINT) == 130
    assert "Traceback" not in master.log()
