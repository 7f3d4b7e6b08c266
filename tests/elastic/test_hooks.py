"""The command that a master runs for each node that it excludes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remesh.elastic import master
from tests.elastic.agents import Served, serving
from tests.waiting import is_alive, wait_until


@contextmanager
def start(on_excluded: str) -> Iterator[Served]:
    with serving(on_excluded=on_excluded) as served:
        yield served


def exclude_a_node(served: Served) -> None:
    """Have one of two nodes report that its hardware is broken."""
    served.join_all([0, 1])
    served.agent(1).report(served.agent(1).failure(2, exit_code=201))


def output_at_the_end(
    command: str, tmp_path: Path, finish_seconds: float = master.FINISH_SECONDS
) -> str:
    """What a command for an excluded node has written to `$OUT` when the master has ended.

    The master ends as soon as the command has written a line.
    """
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(master, "FINISH_SECONDS", finish_seconds)
        patch.setenv("OUT", str(out))
        with start(command) as served:
            exclude_a_node(served)
            wait_until(lambda: out.exists() and out.read_text().endswith("\n"), "the command runs")
    return out.read_text()


def test_a_command_is_run_for_excluded_nodes(tmp_path: Path) -> None:
    command = 'echo "$REMESH_NODE $REMESH_NODE_ID $REMESH_REASON" >> "$OUT"'
    assert output_at_the_end(command, tmp_path).startswith("host-1 1 ")


def test_the_master_waits_for_a_command_when_it_ends(tmp_path: Path) -> None:
    command = 'echo started > "$OUT"; sleep 0.2; echo ended >> "$OUT"'
    assert output_at_the_end(command, tmp_path, finish_seconds=600.0) == "started\nended\n"


def test_the_master_kills_a_command_that_hangs_when_it_ends(tmp_path: Path) -> None:
    command = 'sleep 1000 & echo $! > "$OUT"; wait'
    written = output_at_the_end(command, tmp_path, finish_seconds=0.0)
    wait_until(lambda: not is_alive(int(written)), "what the command started ends, too")


def test_a_command_that_cannot_be_started(caplog: pytest.LogCaptureFixture) -> None:
    command = f"true {'x' * (1 << 20)}"  # longer than the system takes
    with start(command) as served:
        exclude_a_node(served)
        wait_until(lambda: "cannot be started" in caplog.text, "the failure is reported")
    assert "the excluded node host-1 cannot be started" in caplog.text
