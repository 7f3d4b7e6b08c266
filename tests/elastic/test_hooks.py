"""The command that a master runs for each node that it excludes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.agents import Served, serving
from tests.waiting import wait_until


def exclude_a_node(served: Served) -> None:
    """Have one of two nodes report that its hardware is broken."""
    served.join_all([0, 1])
    served.agent(1).report(served.agent(1).failure(2, exit_code=201))


def test_a_command_is_run_for_excluded_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    command = 'echo "$REMESH_NODE $REMESH_NODE_ID $REMESH_REASON" >> "$OUT" # of two'
    with serving(on_excluded=command) as served:
        exclude_a_node(served)
        wait_until(lambda: out.exists() and out.read_text().endswith("\n"), "the command runs")
    assert out.read_text().startswith("host-1 1 ")


def test_a_command_goes_on_when_the_master_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    waits = 'echo started > "$OUT"; while [ ! -e "$OUT.end" ]; do sleep 0.1; done; echo x >> "$OUT"'
    with serving(on_excluded=waits) as served:
        exclude_a_node(served)
        wait_until(lambda: out.exists() and out.read_text() == "started\n", "the command runs")
    Path(f"{out}.end").touch()
    wait_until(lambda: out.read_text() == "started\nx\n", "the command ends")


def test_a_command_that_cannot_be_started(caplog: pytest.LogCaptureFixture) -> None:
    command = f"true {'x' * (1 << 20)}"  # longer than the system takes
    with serving(on_excluded=command) as served:
        exclude_a_node(served)
        wait_until(lambda: "does not start" in caplog.text, "the failure is reported")
    assert "the excluded node host-1 does not start" in caplog.text
