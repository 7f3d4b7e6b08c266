"""CUDA: memory of a device in and out, also in the background; NCCL. Skips without a device."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import remesh
from remesh.adapters import cuda
from remesh.exchange import Exchange
from remesh.pipeline.arena import Arena
from remesh.pipeline.write import CHUNK_SIZE
from tests.engine.bits import bits_of, random_tensor
from tests.support import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 40_000_003
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bits_of(a.cpu()) == bits_of(b.cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_from_and_to_the_device(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = random_tensor(dtype, (70, 33, 5)).cuda()
    source = {"plain": whole, "strided": whole.transpose(0, 2)[1:4], "scalar": whole[0, 0, 0]}
    remesh.save(source, tmp_path)
    for device in ("cuda", "cpu"):
        target = {name: torch.zeros_like(t, device=device) for name, t in source.items()}
        remesh.load(target, tmp_path)
        for name, tensor in source.items():
            assert same_bits(target[name], tensor), name
    from_host = {name: tensor.cpu() for name, tensor in source.items()}
    remesh.save(from_host, tmp_path, overwrite=True)
    strided = {"strided": torch.zeros_like(whole).transpose(0, 2)[1:4]}
    remesh.load(strided, tmp_path)
    assert same_bits(strided["strided"], source["strided"])


def test_large_tensor_in_many_chunks(tmp_path: Path) -> None:
    source = {"w": torch.randn(50_000_003, device="cuda"), "v": torch.randn(3, 5, device="cuda")}
    remesh.save(source, tmp_path)
    target = {"w": torch.zeros(50_000_003, device="cuda"), "v": torch.zeros(3, 5, device="cuda")}
    remesh.load(target, tmp_path)
    assert all(same_bits(target[name], tensor) for name, tensor in source.items())


def test_cast_on_load(tmp_path: Path) -> None:
    source = {"w": torch.randn(1000, 7, device="cuda")}
    remesh.save(source, tmp_path)
    target = {"w": torch.zeros(1000, 7, device="cuda", dtype=torch.bfloat16)}
    remesh.load(target, tmp_path, cast=True)
    assert same_bits(target["w"], source["w"].bfloat16())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("live", [False, True])
def test_work_that_is_queued_on_a_side_stream_comes_before_what_is_loaded(
    stored: torch.dtype, live: bool, tmp_path: Path
) -> None:
    source = {"w": torch.full((1_000_003,), 7.0, dtype=stored, device="cuda")}
    target = {"w": torch.zeros(1_000_003, device="cuda")}
    remesh.save(source, tmp_path / "c")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        target["w"].fill_(-1.0)
        if live:
            remesh.reshard(source, target, cast=True)
        else:
            remesh.load(target, tmp_path / "c", cast=True)
    torch.cuda.synchronize()
    assert (target["w"] == 7.0).all()


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_training_goes_on_as_if_never_stopped(option: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.param_groups[0][option] = True
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(job: tuple[nn.Module, torch.optim.Optimizer, object], steps: range) -> list[float]:
        model, optimizer, scheduler = job
        losses = []
        for step in steps:
            generator = torch.Generator("cuda").manual_seed(step)
            batch = torch.randn(16, 32, device="cuda", generator=generator)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()  # type: ignore[attr-defined]
            losses.append(loss.item())
        return losses

    def state_of(job: tuple[nn.Module, torch.optim.Optimizer, object]) -> dict[str, object]:
        model, optimizer, scheduler = job
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "generator": torch.cuda.default_generators[0],
            "scaler": torch.amp.GradScaler("cuda", init_scale=8.0),
        }

    job = build()
    train(job, range(5))
    remesh.save(state_of(job), tmp_path)
    expected = train(job, range(5, 10))
    resumed = build()
    remesh.load(state_of(resumed), tmp_path, unexpected="error")
    assert train(resumed, range(5, 10)) == expected


def test_random_numbers_continue(tmp_path: Path) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    torch.rand(7, device="cuda", generator=generator)
    remesh.save({"rng": generator}, tmp_path)
    expected = torch.rand(5, device="cuda", generator=generator)
    other = torch.Generator("cuda").manual_seed(9)
    remesh.load({"rng": other}, tmp_path)
    assert torch.equal(torch.rand(5, device="cuda", generator=other), expected)


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


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    store = tmp_path / "store"
    dist.init_process_group("nccl", f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_a_nccl_group_of_one(tmp_path: Path) -> None:
    source: dict[str, object] = {"w": torch.randn(100, 7, device="cuda"), "step": 3}
    remesh.save(source, tmp_path / "checkpoint")
    target: dict[str, object] = {"w": torch.zeros(100, 7, device="cuda"), "step": 0}
    remesh.load(target, tmp_path / "checkpoint")
    assert isinstance(target["w"], torch.Tensor)
    assert isinstance(source["w"], torch.Tensor)
    assert same_bits(target["w"], source["w"])
    assert target["step"] == 3


def push_rows_to_columns(exchange: Exchange, num_devices: int) -> bool:
    """Push on a side stream again and again; whether it went from device to device."""
    rank, world_size = exchange.rank, exchange.world_size
    torch.cuda.set_device(rank % num_devices)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    whole = torch.arange(24_000_000.0, device="cuda").reshape(6000, 4000) % 200
    held = whole.chunk(world_size)[rank].clone()
    wanted = torch.zeros_like(whole.chunk(world_size, 1)[rank], dtype=torch.bfloat16)
    step = torch.zeros(())  # of the host, as the steps of optimizers are
    split = remesh.ShardedTensor.from_rank_offsets
    pushing = remesh.Resharder(
        {"w": split("w", held, (0, rank, world_size)), "step": step + 5},
        {"w": split("w", wanted, (1, rank, world_size)), "step": step},
        cast=True,
        group=group,
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for number in range(3):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            held += 1
            pushing.push()
            expected = (whole + number + 1).chunk(world_size, 1)[rank].bfloat16()
            assert same_bits(wanted, expected), number
    assert step == 5
    assert pushing._transfer is not None
    return pushing._transfer.buffers.device is not None


def test_ranks_on_one_device_send_through_the_host() -> None:
    assert run_processes(2, push_rows_to_columns, 1) == [False] * 2


def test_a_rank_alone_copies_on_its_device() -> None:
    assert run_processes(1, push_rows_to_columns, 1) == [True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_send_from_device_to_device() -> None:
    world_size = min(torch.cuda.device_count(), 4)
    assert run_processes(world_size, push_rows_to_columns, world_size) == [True] * world_size
