"""A process that writes what is staged: same results, same errors, and a life of its own."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.background import status_files
from remesh.errors import ExchangeError, NoSpaceError, StorageError
from remesh.events import Event
from remesh.exchange import Exchange
from remesh.formats import native
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import MemoryStorage, Storage
from tests.engine.scenes import part_of, stored_value
from tests.support import (
    run_processes_outcomes,
    run_ranks,
)
from tests.support.outcomes import Died, Returned
from tests.waiting import is_alive, wait_until

WORLD_SIZE = 2
state_of = partial(part_of, WORLD_SIZE)


def stage_and_wait_for_death(exchange: Exchange, path: Path, ids: Path) -> None:
    saver = remesh.Saver(group=exchange, writer="process")
    # The writer is stopped, so that nothing can be written before the trainer is dead.
    assert saver.writer_process_id is not None
    wait_until(
        lambda: b"background.process" in command_of(saver.writer_process_id), "the writer starts"
    )
    os.kill(saver.writer_process_id, signal.SIGSTOP)
    (ids / str(exchange.rank)).write_text(str(saver.writer_process_id))
    handle = saver.save_async(state_of(exchange.rank, 5.0), path)
    assert handle.staged
    assert not handle.done()
    exchange.all_gather(b"")
    os.kill(os.getpid(), signal.SIGKILL)


def command_of(process_id: int | None) -> bytes:
    return Path(f"/proc/{process_id}/cmdline").read_bytes()


def test_what_is_staged_outlives_a_killed_trainer(tmp_path: Path) -> None:
    path, ids = tmp_path / "c", tmp_path / "ids"
    ids.mkdir()
    outcomes = run_processes_outcomes(WORLD_SIZE, stage_and_wait_for_death, path, ids)
    assert outcomes == [Died(-signal.SIGKILL)] * WORLD_SIZE
    writers = [int((ids / str(rank)).read_text()) for rank in range(WORLD_SIZE)]
    with pytest.raises(remesh.CheckpointNotFoundError):
        remesh.Checkpoint(path)
    for writer in writers:
        os.kill(writer, signal.SIGCONT)
    wait_until(lambda: not any(map(is_alive, writers)), "the writers end")
    assert stored_value(path) == 5.0


def die_while_staging(exchange: Exchange, path: Path, ids: Path) -> str:
    def on_event(event: Event) -> None:
        if event.point == "save.chunk_staged" and event.rank == 1:
            (ids / "staging").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    saver = remesh.Saver(group=exchange, writer="process", on_event=on_event)
    (ids / str(exchange.rank)).write_text(str(saver.writer_process_id))
    handle = saver.save_async(state_of(exchange.rank, 2.0), path, overwrite=True)
    with pytest.raises(ExchangeError, match="rank 1 ended while it staged") as caught:
        handle.result(timeout=240)
    assert caught.value.rank == 1
    return "told"


@pytest.mark.slow
def test_a_trainer_killed_while_staging_ends_the_save_for_all(tmp_path: Path) -> None:
    path, ids = tmp_path / "c", tmp_path / "ids"
    ids.mkdir()
    run_ranks(WORLD_SIZE, lambda e: remesh.save(state_of(e.rank, 1.0), path, group=e))
    outcomes = run_processes_outcomes(WORLD_SIZE, die_while_staging, path, ids)
    assert isinstance(outcomes[1], Died)
    assert outcomes[0] == Returned("told")
    writers = [int((ids / str(rank)).read_text()) for rank in range(WORLD_SIZE)]
    wait_until(lambda: not any(map(is_alive, writers)), "the writers end")
    assert stored_value(path) == 1.0


def test_errors_are_those_of_a_thread(tmp_path: Path) -> None:
    saver = remesh.Saver(writer="process")
    assert saver.writer_process_id is not None
    # Files of the writer may not be as large as the one that it is given.
    resource.prlimit(saver.writer_process_id, resource.RLIMIT_FSIZE, (CHUNK_SIZE, CHUNK_SIZE))
    handle = saver.save_async({"w": np.ones(CHUNK_SIZE // 4)}, tmp_path / "c")
    with pytest.raises(
        NoSpaceError, match=rf"(?s){tmp_path}/c/data-.*/00000.safetensors"
    ) as caught:
        handle.result(timeout=240)
    assert caught.value.rank == 0
    # The failure is raised by the next save as well, once, and then all is well again.
    with pytest.raises(NoSpaceError):
        saver.save_async({"w": np.ones(10)}, tmp_path / "c")
    with pytest.raises(StorageError, match="Pass a path or a URL"):
        saver.save_async({"w": np.ones(10)}, MemoryStorage())
    saver.save_async({"w": np.ones(10)}, tmp_path / "c")
    saver.close()
    assert remesh.Checkpoint(tmp_path / "c").verify().ok


@pytest.mark.parametrize("faults", [0, 1])
def test_a_killed_writer_fails_its_save_everywhere_and_is_replaced(
    faults: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the storage fails when the trainer looks whether the save is committed."""
    failures = [StorageError("stale") for _ in range(faults)]

    def read(storage: Storage) -> native.CommitRecord:
        if failures:
            raise failures.pop()
        return native.read_record(storage)

    monkeypatch.setattr(status_files, "read_record", read)

    def train(exchange: Exchange) -> str:
        saver = remesh.Saver(group=exchange, writer="process", deadline=240)
        if exchange.rank == 1:
            assert saver.writer_process_id is not None
            os.kill(saver.writer_process_id, signal.SIGSTOP)
        handle = saver.save_async(state_of(exchange.rank, 1.0), tmp_path / "c")
        if exchange.rank == 1:
            assert saver.writer_process_id is not None
            os.kill(saver.writer_process_id, signal.SIGKILL)
        with pytest.raises(ExchangeError) as caught:
            handle.result(timeout=240)
        with pytest.raises(ExchangeError):
            saver.wait()
        exchange.all_gather(b"")
        saver.save_async(state_of(exchange.rank, 2.0), tmp_path / "c", overwrite=True)
        saver.close()
        return str(caught.value)

    for message in run_ranks(WORLD_SIZE, train):
        assert "rank 1" in message
        assert "was killed by signal 9" in message
    assert stored_value(tmp_path / "c") == 2.0
    assert failures == []


FORKING = """
import os, signal, sys, time
import numpy as np
import remesh

saver = remesh.Saver(
    writer=sys.argv[1],
    on_event=lambda event: time.sleep(1) if event.point == "save.before_commit" else None,
)
first = saver.save_async({"w": np.ones(10)}, f"{sys.argv[2]}/0")
for number in (1, 2):
    if os.fork() == 0:
        signal.alarm(60)
        saver.save_async({"w": np.full(1 << 20, number)}, f"{sys.argv[2]}/{number}").result()
        os._exit(0)
first.result()
print([os.wait()[1] for _ in "12"])
"""


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_saver_in_forked_processes(writer: str, tmp_path: Path) -> None:
    """They have neither the threads of their parent nor the save that it began."""
    command = [sys.executable, "-c", FORKING, writer, str(tmp_path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.stdout == "[0, 0]\n"
    for number in range(3):
        stored = remesh.Checkpoint(tmp_path / str(number)).read_array("w")
        assert (stored == max(number, 1)).all()


SCRIPT = """
import os, signal, sys, time
import numpy as np
import remesh

saver = remesh.Saver(writer="process", at_exit=sys.argv[1])
os.kill(saver.writer_process_id, signal.SIGSTOP)
saver.save_async({"w": np.ones(10)}, sys.argv[2])
os.kill(saver.writer_process_id, signal.SIGCONT) if sys.argv[1] == "wait" else None
print(saver.writer_process_id, flush=True)
import threading
threading.Timer(0.5, os.kill, (saver.writer_process_id, signal.SIGCONT)).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("at_exit", ["wait", "abort"])
def test_the_end_of_the_interpreter(at_exit: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, at_exit, tmp_path / "c"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    wait_until(lambda: not is_alive(int(done.stdout)), "the writer ends")
    assert done.stderr == ""
    if at_exit == "wait":
        assert remesh.Checkpoint(tmp_path / "c").read_array("w").tolist() == [1.0] * 10


@pytest.mark.slow
def test_an_idle_writer_ends_with_its_trainer(tmp_path: Path) -> None:
    code = """
import os, signal, remesh
saver = remesh.Saver(writer="process")
if os.fork() == 0:  # a child that outlives its parent
    os.read(0, 1)
    os._exit(0)
print(saver.writer_process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        writer = int(trainer.stdout.readline())
        assert trainer.wait(240) == -signal.SIGKILL
        wait_until(lambda: not is_alive(writer), "the writer ends")
        # Here the child reads the end of its input, and ends as well.
