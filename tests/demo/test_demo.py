"""The demo as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from remesh.checkpoint import Checkpoint
from remesh.errors import CheckpointNotFoundError
from tests.waiting import wait_until

COMMAND = [sys.executable, "-W", "error", "-c", "from remesh.cli import main; main()", "demo"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [*COMMAND, "--out", str(out)],
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    result = json.loads((out / "result.json").read_text())

    reference, killed, *resumed, recovered = result["runs"]
    assert result["passed"] is True
    assert result["max_difference"] <= 1e-5
    layouts = [(run["run"]["layout"], run["run"]["num_ranks"]) for run in resumed]
    assert layouts == [("FSDP2", 2), ("tensor parallel", 2)]
    for run in resumed:
        assert (run["first_step"], run["last_step"]) == (20, 40)
        assert run["num_compared"] == 20
        differences = [
            abs(loss - reference["losses"][step]) for step, loss in run["losses"].items()
        ]
        assert max(differences) == run["max_difference"] <= 1e-5
    # The others went on where they were: every step is there, and none was made twice.
    assert (recovered["first_step"], recovered["num_compared"]) == (0, 40)
    assert recovered["max_difference"] <= 1e-5
    death = recovered["death"]
    assert (death["step"], death["num_went_on"], death["num_repeated"]) == (20, 3, 0)

    assert reference["losses"]["40"] < reference["losses"]["1"] - 1

    assert killed["commits"] == [10, 20]
    assert (killed["death"]["rank"], killed["death"]["step"]) == (2, 30)
    assert killed["death"]["num_bytes"] > 0
    assert result["refusal"].startswith("CheckpointNotFoundError")
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint(out / "step_00000030")
    assert Checkpoint(out / "step_00000020").verify().ok
    assert result["resumed_from"] == str(out / "step_00000020")

    # Everything on the page comes from this run.
    page = ET.parse(out / "layout.html").getroot()
    boxes = [e.attrib for e in page.iter() if "data-tensor" in e.attrib]
    assert len({box["data-tensor"] for box in boxes}) == 6
    assert len(boxes) == 6 * 4 + 6 * 2 + 5 * 2 + 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*COMMAND, "--out", str(out)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        logs = out / "logs" / "run-a"
        wait_until(lambda: len(list(logs.glob("*.jsonl"))) == 4, "all ranks have begun")
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in errors
    wait_until(lambda: members_of_session(process.pid) == [], "no process is left")


def members_of_session(session: int) -> list[int]:
    """Processes that are alive in a session."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members
