"""CUDA: what is stored is the state at the call, whatever is queued before and after it."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import remesh
from remesh.adapters import cuda
from remesh.pipeline.arena import Arena
from remesh.pipeline.write import CHUNK_SIZE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 40_000_003


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("arena_bytes", [None, 4 * CHUNK_SIZE])
def test_overwriting_right_after_the_return_tears_nothing(
    writer: Literal["thread", "process"], arena_bytes: int | None, tmp_path: Path
) -> None:
    weights = torch.zeros(SIZE, device="cuda")
    strided = torch.zeros(1000, 1003, device="cuda").t()[3:900]
    with remesh.Saver(writer=writer, arena_bytes=arena_bytes) as saver:
        for number in range(3):
            weights.fill_(number)
            strided.fill_(number)
            handle = saver.save_async({"w": weights, "s": strided}, tmp_path / str(number))
            weights.fill_(-1.0)
            strided.fill_(-1.0)
            handle.result(timeout=120)
            checkpoint = remesh.Checkpoint(tmp_path / str(number))
            assert checkpoint.verify().ok
            assert (checkpoint.read_array("w") == number).all()
            assert (checkpoint.read_array("s") == number).all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_work_that_is_queued_on_a_side_stream_is_waited_for(
    asynchronous: bool, tmp_path: Path
) -> None:
    weights = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        weights.fill_(7.0)
        if asynchronous:
            with remesh.Saver() as saver:
                saver.save_async({"w": weights}, tmp_path / "c")
        else:
            remesh.save({"w": weights}, tmp_path / "c")
    assert (remesh.Checkpoint(tmp_path / "c").read_array("w") == 7.0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_the_arena_is_pinned(shared: bool) -> None:
    torch.zeros(1, device="cuda")
    arena = Arena(4 * CHUNK_SIZE, CHUNK_SIZE, shared=shared)
    arena.pin_with(lambda buffer: cuda.pin(buffer, "cuda:0"))
    arena.warm(arena.budget)
    tensors = []
    for _ in range(4):
        chunk = arena.take(threading.Event())
        assert chunk is not None
        tensors.append(torch.from_numpy(chunk.buffer))
    assert all(tensor.is_pinned() for tensor in tensors)
    arena.close()
    assert not any(tensor.is_pinned() for tensor in tensors)


def test_memory_that_cannot_be_pinned_harms_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.zeros(1, device="cuda")
    buffer = np.frombuffer(mmap.mmap(-1, CHUNK_SIZE), np.uint8)
    unpin = cuda.pin(buffer, "cuda:0")
    assert unpin is not None
    assert cuda.pin(buffer, "cuda:0") is None  # it is already
    assert "cannot pin" in caplog.text
    assert torch.ones(3, device="cuda").sum().item() == 3.0
    unpin()
