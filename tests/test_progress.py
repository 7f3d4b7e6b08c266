"""Progress bars: of saves and loads in the foreground, on rank 0, for terminals alone."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.events import LABEL_LENGTH, progress
from remesh.exchange import Exchange
from tests.engine.scenes import share_of
from tests.support import run_ranks


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, progress: str = "on") -> Terminal:
    """A terminal as the stderr of this process."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("REMESH_PROGRESS", progress)
    return stream


def save_and_load(exchange: Exchange, path: Path) -> None:
    state = {"w": share_of("w", np.ones((8, 6), np.float32), exchange.rank, 2)}
    remesh.save(state, path, group=exchange)
    remesh.load(state, path, group=exchange)


def test_saves_and_loads_show_a_bar_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = terminal(monkeypatch)
    run_ranks(2, save_and_load, tmp_path / "ck")
    shown = stream.getvalue()
    assert shown.index("saving ") < shown.index("loading ")
    assert "100%" in shown
    assert "96/96 bytes" in shown  # the bytes of one rank of two


@pytest.mark.parametrize("value", ["off", ""])
def test_short_work_and_bars_that_are_turned_off_show_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    stream = terminal(monkeypatch, value)
    monkeypatch.setattr("remesh.events.SHOWN_AFTER", 3600.0)
    run_ranks(2, save_and_load, tmp_path / "ck")
    assert stream.getvalue() == ""


def test_logs_get_nothing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMESH_PROGRESS", "on")
    run_ranks(2, save_and_load, tmp_path / "ck")
    assert capfd.readouterr().err == ""


def test_a_label_is_cut_at_its_beginning_and_has_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = terminal(monkeypatch)
    with progress("reading /" + "x" * 100 + "/\x1b]step_00000100", 10) as on_bytes:
        on_bytes(10)
    assert "reading ..." in stream.getvalue()
    assert "?]step_00000100" in stream.getvalue()
    assert "x" * LABEL_LENGTH not in stream.getvalue()


def test_a_failed_save_removes_its_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = terminal(monkeypatch)

    def fail(_event: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        remesh.save({"w": np.ones(3)}, tmp_path / "ck", on_event=fail)
    assert "100%" not in stream.getvalue()
