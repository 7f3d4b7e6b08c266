"""Whether the ranks send each other the memory of their devices as it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from remesh.core.memory import Device, HostMemory, Memory
from remesh.exchange import Exchange
from remesh.pipeline import machine


class DeviceInUse(msgspec.Struct, frozen=True):
    """The device on which most bytes of a rank lie."""

    name: str = ""
    """Its name on this rank, such as `cuda:0`; `cpu` is the host; empty if there are none."""
    identity: str = ""  # equal on ranks that use the same one

    @property
    def kind(self) -> str:
        """Its name without its number."""
        return self.name.partition(":")[0]


def device_in_use(memories: Iterable[Memory]) -> DeviceInUse:
    """The device on which most bytes of some memories lie."""
    num_bytes: Counter[str] = Counter()
    for memory in memories:
        if isinstance(memory, HostMemory):
            num_bytes["cpu"] += memory.array.nbytes
        elif (layout := memory.layout) is not None:
            num_bytes[layout.device] += math.prod(layout.shape) * layout.itemsize
    if not num_bytes:
        return DeviceInUse()
    [(name, _)] = num_bytes.most_common(1)
    if name == "cpu":
        return DeviceInUse(name)
    from remesh.adapters.memory import identity_of

    return DeviceInUse(name, f"{machine()} {identity_of(name)}")


def agree_on_devices(exchange: Exchange, in_use: Sequence[DeviceInUse]) -> Device | None:
    """The device of this rank, if messages go from device to device. Collective.

    They do if all ranks have most of their bytes on devices of one kind (`in_use`, in rank order),
    no two on the same one, and the group has a backend that moves them.
    """
    kinds = {one.kind for one in in_use}
    if kinds & {"", "cpu"} or len(kinds) > 1:
        return None
    if len({one.identity for one in in_use}) < len(in_use):
        return None
    name = in_use[exchange.rank].name
    is_alone = exchange.world_size == 1
    if not is_alone and not exchange.connect(name):
        return None
    from remesh.adapters.memory import TorchDevice

    return TorchDevice(name)
