"""Heartbeats and requests: what is written is what is read, and never a half of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from remesh.errors import StorageError
from remesh.heartbeat import (
    Heartbeat,
    clear_request,
    read_heartbeat,
    read_request,
    read_request_file,
    request,
    write_heartbeat,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "beat"
    assert read_heartbeat(file) is None
    for beat in (Heartbeat(7, None, 1.5e9, None), Heartbeat(8, 4, 1.5e9 + 0.25, 0.125)):
        write_heartbeat(file, beat)
        assert read_heartbeat(file) == beat
    assert [path.name for path in tmp_path.iterdir()] == ["beat"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"step": "x"}', b"\xff"])
def test_a_spoiled_heartbeat_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "beat").write_bytes(content)
    assert read_heartbeat(tmp_path / "beat") is None


def test_readers_never_see_a_half(tmp_path: Path) -> None:
    file = tmp_path / "beat"
    write_heartbeat(file, Heartbeat(0, None, 0.0, None))

    def write() -> None:
        for step in range(1, 300):
            write_heartbeat(file, Heartbeat(step, step, float(step), None))

    writer = threading.Thread(target=write)
    writer.start()
    seen = [0]
    while writer.is_alive():
        beat = read_heartbeat(file)
        assert beat is not None
        assert beat.time == beat.step
        seen.append(beat.step)
    writer.join()
    assert seen == sorted(seen)


def test_a_request_is_put_replaced_and_cleared(tmp_path: Path) -> None:
    file = tmp_path / "beat"
    assert read_request(file) is None
    request(file, "save")
    assert read_request(file) == "save"
    request(file, "save-and-stop")
    assert read_request(file) == "save-and-stop"
    assert (tmp_path / "beat.request").read_text() == "save-and-stop"
    clear_request(file)
    clear_request(file)
    assert read_request(file) is None
    assert list(tmp_path.iterdir()) == []


def test_requests_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "now"
    file.touch()
    assert read_request_file(file) == "save"
    file.write_text("save-and-stop\n")
    assert read_request_file(file) == "save-and-stop"
    file.write_text("quit")
    with pytest.raises(StorageError, match="asks for 'quit'; write one of save, save-and-stop"):
        read_request_file(file)


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "beat").mkdir()
    with pytest.raises(StorageError, match="cannot read"):
        read_heartbeat(tmp_path / "beat")
    with pytest.raises(StorageError, match="cannot write"):
        write_heartbeat(tmp_path / "no" / "beat", Heartbeat(1, None, 0.0, None))
