"""Room for the state of the last world beside that of the next one.

A process that goes on holds its old tensors until the new ones are filled. Before the training
function is entered again it is looked whether each device has room for both. Where an accelerator
has not, the old tensors move to host memory; where the host has not either, they are given up, and
the state comes from the next source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from remesh.core.host_memory import available_memory
from remesh.training.fingerprints import named_tensors

HOST = torch.device("cpu")


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state that a process holds, parts of divided ones included."""
    for _, tensor in named_tensors(state, "state"):
        yield getattr(tensor, "_local_tensor", tensor)  # of a DTensor


def bytes_by_device(tensors: list[torch.Tensor]) -> dict[torch.device, int]:
    """The memory that tensors take on each device; memory that two share counts once."""
    sizes: dict[torch.device, dict[int, int]] = defaultdict(dict)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[tensor.device][storage.data_ptr()] = storage.nbytes()
    return {device: sum(found.values()) for device, found in sizes.items()}


def free_bytes(device: torch.device) -> int | None:
    """What a device has room for; None if that is not known."""
    if device == HOST:
        return available_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return None


def must_move(
    held: Mapping[torch.device, int], free: Mapping[torch.device, int | None]
) -> set[torch.device] | None:
    """The devices whose tensors have to move to the host, as there is no room for a second state.

    None if the host has no room for what it would hold.
    """
    moving = {
        device
        for device, size in held.items()
        if device != HOST and (room := free[device]) is not None and room < size
    }
    needed = held.get(HOST, 0) + sum(held[device] for device in moving)
    room = free[HOST]
    return None if room is not None and room < needed else moving


def make_room(state: Any) -> bool:
    """Move tensors of a state to the host if need be; False if there is no room there either."""
    tensors = list(tensors_of(state))
    held = bytes_by_device(tensors)
    moving = must_move(held, {device: free_bytes(device) for device in {HOST, *held}})
    if moving is None:
        return False
    for tensor in tensors:
        if tensor.device in moving:
            tensor.data = tensor.data.to(HOST)  # neither its identity nor its version changes
    return True
