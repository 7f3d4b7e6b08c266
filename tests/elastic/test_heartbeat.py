"""Heartbeats and requests: what is written is what is read, and never a half of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from remesh.elastic.heartbeat import (
    Heartbeat,
    HeartbeatReader,
    clear_request,
    read_heartbeat,
    read_request_file,
    request,
    request_file,
    write_heartbeat,
)
from remesh.errors import StorageError


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
    assert read_request_file(request_file(file)) is None
    request(file, "save")
    assert read_request_file(request_file(file)) == "save"
    request(file, "save-and-stop")
    assert read_request_file(request_file(file)) == "save-and-stop"
    assert (tmp_path / "beat.request").read_text() == "save-and-stop"
    clear_request(file)
    clear_request(file)
    assert read_request_file(request_file(file)) is None
    assert list(tmp_path.iterdir()) == []


def test_requests_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "now"
    file.touch()
    assert read_request_file(file) == ""
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


def run_python(program: str, *arguments: str) -> str:
    """What a program prints in an interpreter of its own, where signals may be set at will."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestStackRequests:
    def test_the_stacks_of_all_threads_are_written(self, tmp_path: Path) -> None:
        program = """
import os, sys, threading
from remesh.elastic.heartbeat import STACK_SIGNAL, answer_stack_requests, stacks_file

waits, stop = threading.Event(), threading.Event()

def waits_here():
    waits.set()
    stop.wait()

thread = threading.Thread(target=waits_here)
thread.start()
waits.wait()
end = answer_stack_requests(sys.argv[1])
os.kill(os.getpid(), STACK_SIGNAL)
print(stacks_file(sys.argv[1]).read_text())
end()
assert not stacks_file(sys.argv[1]).exists()
stop.set()
"""
        stacks = run_python(program, str(tmp_path / "beat"))
        assert "waits_here" in stacks
        assert "<module>" in stacks

    @pytest.mark.parametrize(
        "take",
        [
            "signal.signal(signal.SIGUSR2, lambda *_: print('mine'))",
            "faulthandler.register(signal.SIGUSR2, sys.stdout)",
        ],
    )
    def test_a_handler_that_is_there_is_left_alone(self, tmp_path: Path, take: str) -> None:
        program = f"""
import faulthandler, os, signal, sys
from remesh.elastic.heartbeat import answer_stack_requests, stacks_file
{take}
assert answer_stack_requests(sys.argv[1]) is None
assert not stacks_file(sys.argv[1]).exists()
os.kill(os.getpid(), signal.SIGUSR2)
"""
        said = run_python(program, str(tmp_path / "beat"))
        assert "mine" in said or "<module>" in said

    def test_a_handler_that_comes_later_is_kept(self, tmp_path: Path) -> None:
        program = """
import os, signal, sys
from remesh.elastic.heartbeat import answer_stack_requests
end = answer_stack_requests(sys.argv[1])
signal.signal(signal.SIGUSR2, lambda *_: print('mine'))
end()
os.kill(os.getpid(), signal.SIGUSR2)
"""
        assert run_python(program, str(tmp_path / "beat")) == "mine\n"

    def test_a_directory_that_is_not_there(self, tmp_path: Path) -> None:
        program = """
import sys
from remesh.errors import StorageError
from remesh.elastic.heartbeat import answer_stack_requests
try:
    answer_stack_requests(sys.argv[1])
except StorageError as error:
    print(error)
"""
        said = run_python(program, str(tmp_path / "none" / "beat"))
        assert "cannot write" in said
        assert "beat.stacks" in said


def test_an_agent_goes_on_without_a_heartbeat_that_it_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "beat"
    file.mkdir()
    beats = HeartbeatReader()
    assert [beats.read(file), beats.read(file)] == [None, None]
    assert caplog.text.count(f"cannot read {file}") == 1
    file.rmdir()
    write_heartbeat(file, Heartbeat(7, None, 1.5e9, None))
    assert beats.read(file) == Heartbeat(7, None, 1.5e9, None)
