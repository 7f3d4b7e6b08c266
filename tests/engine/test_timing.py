"""One log line for each save and load."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.events import timed
from tests.engine.scenes import saved_by, share_of

ROWS = 300_000


def test_rank_0_logs_a_line_for_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "remesh")
    whole = np.ones((2 * ROWS, 2), np.float32)
    saved_by(2, lambda rank: {"rows": share_of("rows", whole, rank, 2)}, tmp_path)
    num_bytes = sum(file.num_bytes for file in remesh.Checkpoint(tmp_path).index.files)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    found = re.fullmatch(
        r"saved (.*) MB in (.*) s, .* GB/s \(agree (.*) s, write (.*) s, commit (.*) s\): (.*)",
        line,
    )
    assert found is not None, line
    assert found[1] == f"{num_bytes / 1e6:.1f}"
    assert found[6] == str(tmp_path)
    shares = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert sorted(share.partition(" MB")[0] for share in shares) == [
        "rank 0 wrote 2.4",
        "rank 1 wrote 2.4",
    ]


def test_loads_and_background_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "remesh")
    state = {"rows": np.ones((ROWS, 2), np.float32)}
    with remesh.Saver() as saver:
        saver.save_async(state, tmp_path).result()
    remesh.load(state, tmp_path)
    saved, loaded = (r.getMessage() for r in caplog.records if r.levelno == logging.INFO)
    assert saved.startswith("saved 2.4 MB in ")
    assert loaded.startswith(f"loaded {tmp_path}: 1 restored; read 2.4 MB for 2.4 MB wanted in ")
    (share,) = [r.getMessage() for r in caplog.records if " read 2.4 MB in " in r.getMessage()]
    assert re.search(r"rank 0 read .*\(open .* s, plan .* s, read .* s, apply .* s\)", share)


def test_a_compressed_save_says_what_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "remesh")
    remesh.save({"a": np.zeros(300_000)}, tmp_path, compress="zstd")
    (saved,) = caplog.records
    assert re.search(r"^saved 2\.4 MB in .*\); compressed to 0\.0 MB: ", saved.getMessage())


def test_what_fails_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "remesh")
    with pytest.raises(remesh.CheckpointNotFoundError):
        remesh.load({"a": np.ones(3)}, tmp_path)
    assert caplog.records == []


def test_the_phases_add_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "remesh")
    times = iter([0.0, 1.0, 2.0, 3.0, 7.0, 8.0, 10.0, 20.0])
    points = ["save.described", "save.planned", "save.file_created", "save.chunk_written"]
    points += ["save.file_finished", "save.parts_gathered", "save.done"]
    told: list[tuple[str, int]] = []
    mark = timed(
        lambda point, size=0: told.append((point, size)), "save", 0, "here", lambda: next(times)
    )
    for point in points:
        mark(point, 2_000_000_000)
    assert [point for point, _ in told] == points
    (record,) = caplog.records
    assert record.getMessage() == (
        "saved 2000.0 MB in 20.00 s, 0.10 GB/s (agree 2.00 s, write 6.00 s, commit 12.00 s): here"
    )
