"""This process's part of a save or load: its exchange, and its state as boxes in memory.

A process that has not imported torch holds no torch objects. Its state is described without the
adapters, and torch is not imported, unless there are objects with a state dict in it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from remesh.checkpoint.buffers import own_buffers
from remesh.core.geometry import Box, IntArray
from remesh.core.memory import CopyQueue, Device, HostMemory, Memory, memory_of_numpy
from remesh.core.sharded import ArrayLike, Part
from remesh.core.state import Description, Path, Rebuild, Role, Stored, TensorEntry, Walk, describe
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import NameCollisionError, StateError
from remesh.exchange import Alone, Exchange
from remesh.pipeline.arena import Pin
from remesh.pipeline.transfer import machine


def exchange_of(group: Any) -> Exchange:
    """The exchange that a caller's `group` means.

    None means torch's default group if there is one, and else this process alone.
    """
    if hasattr(group, "all_gather") and hasattr(group, "world_size"):
        return group  # type: ignore[no-any-return]
    if "torch" not in sys.modules:
        return Alone()
    import torch.distributed as dist

    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    from remesh.exchange.torch_group import TorchGroup

    return TorchGroup(group)


def describe_local(
    state: Any, stored: Stored | None = None, rank: int | None = None
) -> Description:
    """Describe this rank's state (see `remesh.core.state.describe`), unless it is a description.

    A rank that loads gets its own buffers, where they are stored for each rank.
    """
    is_described = isinstance(state, Description)
    description = state if is_described else describe(state, _describe_leaf, stored)
    if stored is not None and rank is not None:
        description.tensors = own_buffers(description.tensors, stored, rank)
    return description


def _describe_leaf(walk: Walk, path: Path, node: Any) -> Rebuild | None:
    """Describe a leaf by the adapters; None without torch, but for objects with a state dict."""
    if "torch" not in sys.modules:
        # Such an object may be what imports torch, and its state dict may have tensors.
        is_stateful = hasattr(node, "state_dict") and hasattr(node, "load_state_dict")
        if not (is_stateful and find_spec("torch")):
            return None
    from remesh.adapters import describe_leaf

    return describe_leaf(walk, path, node)


def describe_weights(state: Any) -> Description:
    """Describe weights for Hugging Face's files, with no ties but those that transformers makes."""
    description = describe_local(state)
    if "torch" in sys.modules and not isinstance(state, Description):
        from remesh.adapters.wrappers import without_undeclared_ties

        description.tensors = without_undeclared_ties(state, description.tensors)
    return description


def target_of(state: Any, stored: Iterable[str], *, is_transformed: bool) -> Any:
    """What a load fills of a state: of a model of peft the adapters, if these are files of peft."""
    if "peft" not in sys.modules:
        return state
    from remesh.adapters.peft import adapter_target

    return adapter_target(state, stored, is_transformed=is_transformed)


def memory_of(array: ArrayLike, where: str, *, writable: bool = False) -> Memory:
    """The memory of an array or tensor; what is a memory itself is taken as it is.

    Others, and such as cannot be filled if they are to be `writable`, are refused with a message
    that has `where`.
    """
    if isinstance(array, Memory):
        return array
    if isinstance(array, np.ndarray):
        return memory_of_numpy(array, where, writable=writable)
    from remesh import adapters

    return adapters.memory_of(array, where, writable=writable)


def casting_memory_of(array: ArrayLike, stored_dtype: str, where: str) -> Memory:
    """The memory of an array that is filled with converted elements of the stored dtype."""
    from remesh import adapters

    return adapters.casting_memory_of(array, stored_dtype, where)


def finish_device_work(memories: Iterable[Memory]) -> None:
    """Wait until what the caller has queued on the devices of some memories is done.

    Other threads, which queue on other streams, then see what the caller would see.
    """
    devices = devices_of(memories)
    if devices:
        from remesh.adapters import cuda

        cuda.finish_work(devices)


def device_staging(memories: Iterable[Memory]) -> tuple[Pin, Callable[[], CopyQueue]] | None:
    """How memories of CUDA devices are staged: pinning host memory, making queues for copies.

    None if no such device holds any of them.
    """
    devices = devices_of(memories)
    if not devices:
        return None
    from remesh.adapters import cuda

    copies = functools.partial(cuda.CudaCopies, devices)
    return functools.partial(cuda.pin, device=devices[0]), copies


def devices_of(memories: Iterable[Memory]) -> list[str]:
    """The CUDA devices that hold any of the memories."""
    # Nearly all memories are the host's; to ask each for its layout would take much longer.
    layouts = [memory.layout for memory in memories if not isinstance(memory, HostMemory)]
    found = {layout.device for layout in layouts if layout is not None}
    return sorted(device for device in found if device.startswith("cuda"))


class DeviceInUse(msgspec.Struct, frozen=True):
    """The device on which most bytes of a rank lie."""

    name: str = ""
    """Its name on this rank, such as `cuda:0`; `cpu` is the host; empty if there are none."""
    identity: str = ""  # equal on ranks that use the same one


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
    kinds = {one.name.partition(":")[0] for one in in_use}
    if kinds & {"", "cpu"} or len(kinds) > 1:
        return None
    if len({one.identity for one in in_use}) < len(in_use):
        return None
    name = in_use[exchange.rank].name
    if exchange.world_size > 1 and not exchange.connect(name):
        return None
    from remesh.adapters.memory import TorchDevice

    return TorchDevice(name)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensors:
    """The boxes of tensors that this rank holds."""

    boxes: BoxTable  # their table
    roles: IntArray  # role of each
    memories: list[Memory]  # memory of each
    parts: list[ArrayLike]  # array of each
    aliases: dict[str, str]  # names that are the same memory as another: alias → name
    is_frozen: npt.NDArray[np.bool_]
    """Whether each box is of a tensor that training does not change."""

    def given(self, rows: IntArray) -> LocalTensors:
        """Those that this rank may give to others: rows that it writes, and equal copies."""
        is_given = self.roles != Role.FIRST
        if is_given.all():
            return self
        is_given[rows] = True
        numbers = np.flatnonzero(is_given)
        boxes = self.boxes
        return replace(
            self,
            boxes=BoxTable(
                boxes.tensors, boxes.tensor[numbers], boxes.offsets[numbers], boxes.extents[numbers]
            ),
            roles=self.roles[numbers],
            memories=[self.memories[number] for number in numbers],
            parts=[self.parts[number] for number in numbers],
            is_frozen=self.is_frozen[numbers],
        )


def tensors_to_store(description: Description) -> LocalTensors:
    """Tabulate what this rank holds; tied tensors are kept once."""
    entries, aliases = split_aliases(description.tensors)
    tensors: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for entry in entries:
        what = (entry.name, entry.dtype, entry.global_shape)
        known = tensors.setdefault(entry.name, what)
        if known != what:
            raise StateError(f"{entry.name}: described twice, as {known[1:]} and {what[1:]}")
    rows = {name: row for row, name in enumerate(tensors)}
    held = [(entry, part) for entry in entries for part in entry.parts]
    if len(held) > len(tensors):
        _refuse_equal_claims(held)
    boxes = [(rows[entry.name], part.box) for entry, part in held]
    return LocalTensors(
        BoxTable.of(TensorTable.of(list(tensors.values())), boxes),
        np.array([int(entry.role) for entry, _ in held], dtype=np.int64),
        [memory_of(part.data, entry.name) for entry, part in held],
        [part.data for _, part in held],
        aliases,
        np.array([entry.is_frozen for entry, _ in held], dtype=np.bool_),
    )


def _refuse_equal_claims(held: Sequence[tuple[TensorEntry, Part]]) -> None:
    """Refuse a box of a tensor that is there twice, each time as what is stored."""
    claimed: set[tuple[str, Box]] = set()
    for entry, part in held:
        if entry.role == Role.REPLICA:
            continue
        if (entry.name, part.box) in claimed:
            raise NameCollisionError(
                f"{entry.name}: two tensors of the state have this stored name and the same "
                f"box {part.box}\nRename one of them, or give one a replica_id that is not 0"
            )
        claimed.add((entry.name, part.box))


def split_aliases(entries: list[TensorEntry]) -> tuple[list[TensorEntry], dict[str, str]]:
    """Leaves without those that are the same memory as an earlier one, and alias → name."""
    first_of: dict[object, str] = {}
    kept, aliases = [], {}
    for entry in entries:
        key = entry.alias_key
        name = entry.name if key is None else first_of.setdefault(key, entry.name)
        if name == entry.name:
            kept.append(entry)
        else:
            aliases[entry.name] = name
    return kept, aliases


def with_all_names(entries: list[TensorEntry]) -> list[tuple[TensorEntry, list[str]]]:
    """Leaves as `split_aliases` keeps them, each with its own name and those of its aliases."""
    kept, aliases = split_aliases(entries)
    names = {entry.name: [entry.name] for entry in kept}
    for alias, name in aliases.items():
        names[name].append(alias)
    return [(entry, names[entry.name]) for entry in kept]
