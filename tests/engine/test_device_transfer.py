"""State between layouts on devices whose memory the group sends as it is.

Without a GPU, the memory of the host stands for that of a device, and gloo for the backend that
sends it: all is as on a GPU but for streams. `test_gpu.py` has the same with NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import remesh
from remesh.adapters.memory import MOVABLE, DeviceMemory, TorchDevice
from remesh.checkpoint.local import DeviceInUse, agree_on_devices, device_in_use
from remesh.core.dtypes import BY_NAME
from remesh.core.memory import Memory
from remesh.core.sharded import dtype_name
from remesh.exchange import Alone, Exchange
from tests.engine.test_reshard import (
    check_that_the_other_learns,
    die_in_a_push,
    fail_in_a_push,
)
from tests.support import run_processes

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn)
SHAPES = ((37, 11), (5, 3, 2), (1, 300))
PAIRS = (
    ("rows", "columns"),
    ("columns", "rows"),
    ("rows", "grid"),
    ("grid", "columns"),
    ("first", "last"),
    ("last", "rows"),
)


@contextmanager
def on_devices(message_bytes: int = 4000) -> Iterator[None]:
    """Take all tensors of this process for those of a device."""

    def memory_of(tensor: torch.Tensor, where: str, *, writable: bool = False) -> Memory:
        del writable
        carrier = BY_NAME[dtype_name(tensor, where)].carrier
        return DeviceMemory(tensor.detach().view(MOVABLE[tensor.itemsize]), carrier)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("remesh.adapters.memory_of", memory_of)
        patched.setattr(
            "remesh.checkpoint.resharding.agree_on_devices", lambda *_: TorchDevice("cpu")
        )
        patched.setattr("remesh.pipeline.from_memory.DEVICE_MESSAGE_BYTES", message_bytes)
        yield


def check_buffers(pushing: remesh.Resharder) -> None:
    transfer = pushing._transfer
    assert transfer is not None
    assert transfer.buffers.device is not None


def layouts() -> dict[str, tuple[DeviceMesh, list[Any]]]:
    """Of four ranks."""
    ranks = torch.arange(4)
    line = DeviceMesh("cpu", ranks)
    return {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "grid": (DeviceMesh("cpu", ranks.reshape(2, 2)), [Shard(0), Shard(1)]),
        "first": (DeviceMesh("cpu", ranks[:2]), [Shard(0)]),
        "last": (DeviceMesh("cpu", ranks[2:]), [Shard(1)]),
    }


def state_of(
    layout: tuple[DeviceMesh, list[Any]], factor: int, *, casts: bool = False
) -> dict[str, Any]:
    """Tensors of many dtypes and shapes, the numbers times a factor; nothing outside the mesh."""
    mesh, placements = layout
    if mesh.get_coordinate() is None:
        return {}
    state = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 * factor
            stored = torch.bfloat16 if casts and dtype == torch.float32 else dtype
            state[f"{dtype} {shape}"] = distribute_tensor(
                numbers.to(stored), mesh, placements, src_data_rank=None
            )
    turned = torch.arange(600.0).reshape(20, 30).t() * factor
    state["turned"] = distribute_tensor(turned, mesh, placements, src_data_rank=None)
    return state


def bytes_of(tensor: Any) -> bytes:
    """The bytes of this rank's part of a DTensor."""
    local = tensor.to_local().contiguous().reshape(-1).view(torch.uint8)
    return bytes(local.numpy())


def reshard_between_layouts(exchange: Exchange) -> list[str]:
    wrong: list[str] = []
    found = layouts()
    with on_devices():
        for before, after in PAIRS:
            casts = before == "rows"
            wanted = state_of(found[after], 0, casts=casts)
            expected = state_of(found[after], 1, casts=casts)
            held = state_of(found[before], 1)
            pushing = remesh.Resharder(held, wanted, group=exchange, cast=casts)
            for _ in range(2):
                pushing.push()
                check_buffers(pushing)
                for name, tensor in wanted.items():
                    if bytes_of(tensor) != bytes_of(expected[name]):
                        wrong.append(f"{before} to {after}: {name}")
                    tensor.to_local().zero_()
    return wrong


def reshard_transformed(exchange: Exchange) -> list[str]:
    mesh, whole = DeviceMesh("cpu", torch.arange(2)), torch.arange(24.0).reshape(4, 6)
    held = {"a": distribute_tensor(whole.clone(), mesh, [Shard(0)])}
    wrong = []
    for transform, expected in (
        ("a -> b", whole),
        ("a^T -> b", whole.t()),
        ('a -> b, dtype="bfloat16"', whole.bfloat16()),
    ):
        wanted = {"b": distribute_tensor(torch.zeros_like(expected), mesh, [Shard(1)])}
        with on_devices():
            pushing = remesh.Resharder(held, wanted, group=exchange, transform=transform)
            pushing.push()
        check_buffers(pushing)
        if not torch.equal(wanted["b"].full_tensor(), expected):
            wrong.append(transform)
    return wrong


def test_layouts_become_others() -> None:
    assert run_processes(4, reshard_between_layouts) == [[]] * 4


def fail_and_transform(exchange: Exchange) -> list[str]:
    with on_devices(message_bytes=1 << 20):
        check_buffers(fail_in_a_push(exchange))
    return reshard_transformed(exchange)


def test_a_push_that_failed_is_made_again_and_what_is_transformed_passes_the_host() -> None:
    assert run_processes(2, fail_and_transform) == [[]] * 2


def die_on_devices(exchange: Exchange) -> None:
    with on_devices():
        die_in_a_push(exchange)


def test_ranks_learn_that_one_died_in_a_push() -> None:
    check_that_the_other_learns(die_on_devices)


class Connected(Alone):
    """A group of three whose backend sends memory of devices, or does not; this is rank 1."""

    rank, world_size = 1, 3

    def __init__(self, *, connects: bool) -> None:
        self.connects = connects
        self.connected: list[str] = []

    def connect(self, device: str) -> bool:
        self.connected.append(device)
        return self.connects

    def begin_swap(self, outgoing: Any, incoming: Any) -> Any:
        raise AssertionError


def three(*of_rank: tuple[str, str]) -> list[DeviceInUse]:
    return [DeviceInUse(name, identity) for name, identity in of_rank]


@pytest.mark.parametrize(
    ("in_use", "connects", "is_agreed"),
    [
        (three(("cuda:0", "a"), ("cuda:1", "b"), ("cuda:0", "c")), True, True),
        (three(("cuda:0", "a"), ("cuda:1", "b"), ("cuda:0", "c")), False, False),
        (three(("cuda:0", "a"), ("cuda:0", "a"), ("cuda:1", "c")), True, False),
        (three(("cuda:0", "a"), ("xpu:0", "b"), ("cuda:1", "c")), True, False),
        (three(("cuda:0", "a"), ("cpu", ""), ("cuda:1", "c")), True, False),
        (three(("cuda:0", "a"), ("", ""), ("cuda:1", "c")), True, False),
    ],
    ids=["devices", "no backend", "one device twice", "two kinds", "host", "nothing"],
)
def test_messages_go_from_device_to_device_if_all_ranks_can(
    in_use: list[DeviceInUse], connects: bool, is_agreed: bool
) -> None:
    exchange = Connected(connects=connects)
    assert (agree_on_devices(exchange, in_use) is not None) == is_agreed
    assert exchange.connected == (["cuda:1"] if is_agreed or not connects else [])


def test_a_rank_alone_copies_on_its_device() -> None:
    assert agree_on_devices(Alone(), [DeviceInUse("cuda:0", "a")]) is not None
    assert agree_on_devices(Alone(), [DeviceInUse("cpu")]) is None
    source, target = {"a": torch.arange(7.0)}, {"a": torch.zeros(7, dtype=torch.bfloat16)}
    with on_devices():
        pushing = remesh.Resharder(source, target, cast=True)
        pushing.push()
        check_buffers(pushing)
    assert torch.equal(target["a"], torch.arange(7.0).bfloat16())


def test_the_device_of_a_rank_is_that_of_most_of_its_bytes() -> None:
    assert device_in_use([]) == DeviceInUse()
    assert device_in_use([remesh.adapters.memory_of(torch.ones(8), "a")]) == DeviceInUse("cpu")
