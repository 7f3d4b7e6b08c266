"""Message buffers that another process sees: those of a real one, of a dead one, and of none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import msgspec
import numpy as np
import pytest

from remesh.pipeline import transfer
from remesh.pipeline.transfer import Offer, SharedBuffers, map_buffers

OFFERING = """
import sys, msgspec, numpy as np
from remesh.pipeline.transfer import SharedBuffers
shared = SharedBuffers(2, 5000)
sys.stdout.buffer.write(msgspec.json.encode(shared.offer) + b"\\n")
sys.stdout.flush()
for line in sys.stdin:
    shared.buffers[1][:] = int(line)
    print(flush=True)
"""


@pytest.fixture
def process() -> Iterator[tuple[Offer, IO[bytes], IO[bytes]]]:
    """A process that offers buffers, and fills the second one with each number that it is told."""
    with subprocess.Popen(
        [sys.executable, "-c", OFFERING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as found:
        assert found.stdin is not None
        assert found.stdout is not None
        offer = msgspec.json.decode(found.stdout.readline(), type=Offer)
        yield offer, found.stdin, found.stdout


def tell(number: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
    stdin.write(b"%d\n" % number)
    stdin.flush()
    stdout.readline()


def test_another_process_is_seen_also_when_it_is_gone(
    process: tuple[Offer, IO[bytes], IO[bytes]],
) -> None:
    offer, stdin, stdout = process
    found = map_buffers(offer, 2, 5000)
    assert found is not None
    for number in (3, 7):
        tell(number, stdin, stdout)
        assert [np.unique(buffer).tolist() for buffer in found] == [[0], [number]]
    assert not found[1].flags.writeable
    stdin.close()
    assert stdout.readline() == b"", "it has ended"
    assert np.unique(found[1]).tolist() == [7]
    assert map_buffers(offer, 2, 5000) is None


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "another"},
        {"machine": ""},
        {"process": 2**22 + 1},
        {"descriptor": 0},
        {"descriptor": 999},
        {"token": b"0" * 16},
        {"num_bytes": 4096},
    ],
    ids=str,
)
def test_what_is_not_what_was_offered_is_not_used(
    change: dict[str, object], process: tuple[Offer, IO[bytes], IO[bytes]]
) -> None:
    offer, *_ = process
    assert map_buffers(msgspec.structs.replace(offer, **change), 2, 5000) is None
    assert map_buffers(offer, 2, 4000) is None


def test_a_system_without_files_in_memory_has_buffers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "_memory_file", lambda _num_bytes: None)
    shared = SharedBuffers(2, 5000)
    assert [len(buffer) for buffer in shared.buffers] == [5000, 5000]
    assert map_buffers(shared.offer, 2, 5000) is None
    shared.close()
