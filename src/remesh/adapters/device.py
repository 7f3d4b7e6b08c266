"""Memory of devices that ranks send each other as it is, by a backend such as NCCL."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from remesh.adapters.memory import MOVABLE, DeviceMemory
from remesh.core.dtypes import CarrierDType


@dataclass(frozen=True, slots=True, eq=False)
class TorchBuffer:
    """A tensor of bytes; a `remesh.core.memory.DeviceBuffer`."""

    tensor: torch.Tensor

    def __len__(self) -> int:
        return self.tensor.numel()

    def part(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def memory(self, position: int, shape: tuple[int, ...], carrier: CarrierDType) -> DeviceMemory:
        raw = self.tensor[position : position + math.prod(shape) * carrier.itemsize]
        return DeviceMemory(raw.view(MOVABLE[carrier.itemsize]).reshape(shape), carrier)


class TorchDevice:
    """A `remesh.core.memory.Device`."""

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)

    def buffers(self, number: int, num_bytes: int) -> list[TorchBuffer]:
        empty = (
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(number)
        )
        return [TorchBuffer(tensor) for tensor in empty]

    def finish(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).current_stream(self._device).synchronize()


def identity_of(device: str) -> str:
    """A name that no other device of the machine has, by whatever number processes call it."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_properties(device).uuid)
    return device
