"""The timeline: every moment is kept, and the trace is well-formed and true."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np

import remesh
from remesh.events import CHUNK_POINTS, LOAD_POINTS, SAVE_POINTS, Event, Timeline
from remesh.exchange import Exchange
from tests.engine.scenes import share_of
from tests.support import run_ranks

ROWS = 1 << 21


def trace_of(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    """The events of the trace, without those that name tracks."""
    timeline.write_chrome_trace(path)
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    return [event for event in document["traceEvents"] if event["ph"] != "M"]


def save_and_load(exchange: Exchange, path: Path, timeline: Timeline) -> None:
    state = {"rows": share_of("rows", np.ones((2 * ROWS, 2), np.float32), exchange.rank, 2)}
    remesh.save(state, path, group=exchange, on_event=timeline)
    remesh.load(state, path, group=exchange, on_event=timeline)


def test_a_save_and_a_load_of_two_ranks(tmp_path: Path) -> None:
    timeline = Timeline()
    run_ranks(2, save_and_load, tmp_path / "step", timeline)

    moments = timeline.moments
    points = [moment.event.point for moment in moments if moment.event.rank == 0]
    ordered = [point for point in points if point not in CHUNK_POINTS]
    expected = [*SAVE_POINTS, *LOAD_POINTS]
    assert ordered == [p for p in expected if p not in (*CHUNK_POINTS, "save.staged")]
    assert [m.seconds for m in moments] == sorted(m.seconds for m in moments)

    events = trace_of(timeline, tmp_path / "trace.json")
    assert len(events) == len(moments)
    for rank in (0, 1):
        written = [e for e in events if e["pid"] == rank and e["name"] == "save.chunk_written"]
        assert all(event["ph"] == "X" and event["dur"] >= 0 for event in written)
        path = f"/{rank:05d}.safetensors"
        files = remesh.Checkpoint(tmp_path / "step").index.files
        (size,) = [file.num_bytes for file in files if file.path.endswith(path)]
        assert sum(event["args"]["num_bytes"] for event in written) == size
    # Slices of a track follow each other.
    tracks: dict[tuple[int, int], float] = {}
    for event in events:
        key = (event["pid"], event["tid"])
        assert event["ts"] + 1 >= tracks.get(key, 0.0)
        tracks[key] = event["ts"] + event.get("dur", 0.0)


def test_durations(tmp_path: Path) -> None:
    times = iter([1.0, 2.0, 2.5, 4.0, 5.0, 9.0])
    timeline = Timeline(lambda: next(times))
    points = [
        ("save.described", 0),
        ("save.file_created", 0),
        ("save.chunk_written", 10),
        ("save.chunk_written", 20),
        ("save.done", 0),
        ("save.described", 0),
    ]
    for point, num_bytes in points:
        timeline(Event(3, point, num_bytes))
    events = trace_of(timeline, tmp_path / "trace.json")
    assert [(e["name"], e["ph"], e["ts"] / 1e6, e.get("dur", 0) / 1e6) for e in events] == [
        ("save.described", "i", 1.0, 0),
        ("save.file_created", "X", 1.0, 1.0),
        ("save.chunk_written", "X", 2.0, 0.5),
        ("save.chunk_written", "X", 2.5, 1.5),
        ("save.done", "X", 2.0, 3.0),
        # What lies between two saves belongs to neither.
        ("save.described", "i", 9.0, 0),
    ]
    assert {event["pid"] for event in events} == {3}
    assert [event["args"] for event in events][2:4] == [{"num_bytes": 10}, {"num_bytes": 20}]


def test_tracks_have_names(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline(Event(1, "load.opened"))

    thread = threading.Thread(target=timeline, args=(Event(1, "load.run_read", 5),), name="reader")
    thread.start()
    thread.join()

    timeline.write_chrome_trace(tmp_path / "trace.json")
    named = [
        (event["name"], event["pid"], event["args"]["name"])
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["ph"] == "M"
    ]
    assert named == [
        ("process_name", 1, "rank 1"),
        ("thread_name", 1, "phases"),
        ("thread_name", 1, "reader"),
    ]


def test_saves_in_the_background(tmp_path: Path) -> None:
    timeline = Timeline()
    with remesh.Saver(on_event=timeline) as saver:
        saver.save_async({"rows": np.ones((ROWS, 2), np.float32)}, tmp_path / "step").result()
    seen = {moment.event.point for moment in timeline.moments}
    assert seen == set(SAVE_POINTS)
    assert len({moment.thread for moment in timeline.moments}) > 1
    assert trace_of(timeline, tmp_path / "trace.json")


def test_the_guide_lists_every_moment() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    listed = re.findall(r"^\| `((?:save|load)\.\w+)` \|", guide, re.MULTILINE)
    assert listed == [*SAVE_POINTS, *LOAD_POINTS]
