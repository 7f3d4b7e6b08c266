"""How jobs end: of failures, of mistakes in the options, and never of an abort at exit."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remesh.elastic import launch
from remesh.elastic.lifecycle import EXIT_JOB_FAILED
from tests.campaigns.settings import share
from tests.elastic.cluster import REMESH, run_job

pytestmark = pytest.mark.timeout(600)

TWO = ("--nproc-per-node", "2", "--max-restarts", "0")


def test_a_script_that_fails_is_no_fault_of_remesh(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys\nsys.exit('bad')\n")
    code, output = run_job(tmp_path, *TWO, "fails.py")
    assert code == EXIT_JOB_FAILED
    assert "exitcode  : 1" in output
    assert "fault of remesh" not in output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--nnodes", "3:2", "job.py"), "--nnodes 3:2: the most nodes are fewer than the least"),
        (("--nnodes", "0", "job.py"), "--nnodes 0: give the number of nodes, 1 or more"),
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


TRAINS = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def spin() -> None:
    while True:
        pass


@pytest.fixture
def load() -> Iterator[None]:
    """Two busy processes a processor, so that threads are interrupted anywhere."""
    context = multiprocessing.get_context("forkserver")
    count = 2 * len(os.sched_getaffinity(0))
    processes = [context.Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("load")
def test_of_many_jobs_none_aborts_at_its_end(
    tmp_path: Path, covered: Callable[[str], None]
) -> None:
    """100 jobs at night, beside as many of torchrun, which show the race."""
    (tmp_path / "train.py").write_text(TRAINS)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    num_jobs, num_aborts = max(1, share()), 0
    for _ in range(num_jobs):
        plain, ours = (
            subprocess.run(
                [*launcher, "--nproc-per-node", "4", "--max-restarts", "0", "train.py"],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=1200,
                check=False,
            )
            for launcher in (torchrun, (*REMESH, "run"))
        )
        assert ours.returncode == 0, ours.stderr
        num_aborts += plain.returncode != 0
        assert plain.returncode == 0 or "Signal 6 (SIGABRT)" in plain.stderr, plain.stderr
    covered(f"{num_jobs} jobs: {num_aborts} of torchrun's aborted, none of remesh's")
