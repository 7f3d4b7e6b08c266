"""What a device still has to do comes before what a save reads and what a load fills."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.checkpoint import agree, loading
from remesh.checkpoint.local import devices_of
from remesh.core.dtypes import BY_NAME, CarrierDType
from remesh.core.memory import CarrierArray, HostMemory, Memory
from remesh.core.strided import Layout


@dataclass(frozen=True, slots=True)
class MemoryOf(Memory):
    layout: Layout | None = field()
    carrier: CarrierDType = field(default_factory=lambda: BY_NAME["float32"].carrier)


def on(device: str) -> Layout:
    return Layout(device, 8, (1,), (4,), 4)


def test_devices_are_those_that_hold_elements() -> None:
    memories: list[Memory] = [
        MemoryOf(on("cuda:1")),
        MemoryOf(on("cuda:0")),
        MemoryOf(on("cuda:1")),
        MemoryOf(on("cpu")),
        MemoryOf(None),
        HostMemory(np.zeros(3)),
    ]
    assert devices_of(memories) == ["cuda:0", "cuda:1"]
    assert devices_of(memories[3:]) == []


def values_of(memories: Iterable[Memory]) -> list[CarrierArray]:
    return [memory.array.copy() for memory in memories if isinstance(memory, HostMemory)]


@pytest.mark.parametrize("live", [False, True])
def test_targets_are_waited_for_before_they_are_filled(
    live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = {"w": np.ones(4)}, {"w": np.zeros(4)}
    found: list[tuple[str, list[CarrierArray]]] = []
    for name, module in (("source", agree), ("target", loading)):
        monkeypatch.setattr(
            module,
            "finish_device_work",
            lambda memories, name=name: found.append((name, values_of(memories))),
        )
    if live:
        remesh.reshard(source, target)
    else:
        remesh.save(source, tmp_path / "c")
        remesh.load(target, tmp_path / "c")
    np.testing.assert_equal(found, [("source", [np.ones(4)]), ("target", [np.zeros(4)])])
    np.testing.assert_array_equal(target["w"], np.ones(4))
