"""docs/elastic.md and docs/how-to/torchrun.md, as a reader would use them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from remesh.cli.output import EXIT_INTERRUPTED, EXIT_USAGE
from remesh.elastic import handler
from remesh.elastic.failures import read_patterns
from remesh.elastic.launch import make_parser
from remesh.elastic.lifecycle import EXIT_DRAINED, EXIT_REPLACE
from tests.elastic.cluster import run_job

DOCS = Path(__file__).parents[2] / "docs"
SBATCH = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
PAGE = (DOCS / "elastic.md").read_text()
TORCHRUN = (DOCS / "how-to/torchrun.md").read_text()


def block(kind: str) -> str:
    (text,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


@pytest.mark.timeout(600)
def test_the_script_survives_its_accident(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("python"))
    assert "$ remesh run --nproc-per-node 2 train.py\n" in PAGE
    code, output = run_job(tmp_path, "--nproc-per-node", "2", "train.py")
    assert code == 0, output
    assert "done: step 20" in output
    assert len(re.findall(r"process \d+ goes on after step 12", output)) == 2
    assert re.search(r"again: rank \d \(local rank \d\) on node 0 failed \(exit code 1\)", output)


def test_the_patterns_are_patterns(tmp_path: Path) -> None:
    file = tmp_path / "patterns.json"
    file.write_text(block("json"))
    patterns = read_patterns(str(file))
    assert patterns.node_exit_codes == (201, 202, 77)
    assert patterns.collateral == read_patterns(None).collateral


def test_options_that_are_named_are_there() -> None:
    run = make_parser().format_help()
    from click.testing import CliRunner

    from remesh.cli import cli

    master = CliRunner().invoke(cli, ["master", "--help"]).output
    for option in set(re.findall(r"`(--[a-z-]+)[ `]", PAGE)) - {"--json"}:
        assert option in run or option in master, option


def test_exit_codes() -> None:
    table = PAGE.partition("## Exit codes")[2].partition("##")[0]
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert codes == [0, 1, EXIT_USAGE, EXIT_REPLACE, EXIT_INTERRUPTED, EXIT_DRAINED]


def test_options_of_the_handler() -> None:
    keys = re.findall(r"^\| `([a-z_]+)` \|", TORCHRUN, re.MULTILINE)
    source = Path(handler.__file__).read_text()
    read = re.findall(r"parameters\.get(?:_as_int)?\(\s*\"([a-z_]+)\"", source)
    assert sorted(keys) == sorted(set(read) - {"max_restarts"})


def _stub(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _task(
    tmp_path: Path, array: int, task: int, least: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run the script for Slurm as a task of an array whose least task is given."""
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUN": str(tmp_path / "run"),
        "SBATCH": str(SBATCH),
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": str(array),
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_ARRAY_TASK_MIN": str(least),
    }
    return subprocess.run(
        ["bash", str(SBATCH), "train.py"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_task_that_slurm_requeues_after_the_end_ends_as_the_training_did(tmp_path: Path) -> None:
    run = tmp_path / "run"
    wait = 'until [ -e "$RUN/over" ]; do sleep 0.02; done'
    _stub(tmp_path / "remesh", f"echo http://node:1; {wait}; rm $RUN/over; exit 3")
    # While task 0 trains, task 4 of another array joins; then the training ends.
    other = "SLURM_ARRAY_JOB_ID=8 SLURM_ARRAY_TASK_ID=4 SLURM_ARRAY_TASK_MIN=4"
    _stub(
        tmp_path / "srun",
        f'echo "$4" >>"$RUN/trained"; [ "$SLURM_ARRAY_TASK_ID" = 0 ] || exit 0\n'
        f'{other} bash "$SBATCH" train.py; touch "$RUN/over"; exit 3',
    )
    assert _task(tmp_path, 6, 0).returncode == 3
    assert (run / "trained").read_text().splitlines() == [f"{run}/url-6"] * 2
    assert not (run / "url").is_symlink()
    for array, task, least in ((6, 1, 0), (8, 4, 4), (8, 5, 4)):
        late = _task(tmp_path, array, task, least)
        assert late.returncode == 3
        assert late.stdout.startswith("the training has ended without this task")
    assert _task(tmp_path, 9, 0).returncode == 3  # one that is new has a training of its own
    trained = (run / "trained").read_text().splitlines()
    assert trained == [f"{run}/url-6"] * 2 + [f"{run}/url-9"]


def test_the_script_for_slurm_shows_why_the_master_does_not_start(tmp_path: Path) -> None:
    _stub(tmp_path / "remesh", 'echo "error: cannot start: $*" >&2\nexit 2')
    done = _task(tmp_path, 6, 0)
    assert done.returncode == 1
    first, said = done.stderr.splitlines()
    assert first == f"the master has ended; the end of {tmp_path}/run/master.log:"
    assert said.startswith("error: cannot start: master --host ")
    assert " --port 0 " in said
    assert f" --state {tmp_path}/run/master-6.json " in said
