"""`save_fsdp_flat_param` and `save_fsdp_optim_param`: each rank writes the elements that it has.

What a rank holds of which parameter is what the engine's description says, for FSDP1, FSDP2 and
plain modules alike. The layout of the files only knows ranges of flattened tensors that follow each
other in the order of ranks, which is how FSDP cuts. Rank 0 checks that before it writes the last
file, without which the checkpoint is not complete.

ATorch stores the flat parameter of each FSDP unit under the unit's name. Here every parameter is a
unit of its own, so nothing has to be copied together, and FSDP2, which has no flat parameters, is
stored in the same way.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from remesh.adapters.wrappers import entry_names
from remesh.checkpoint.local import describe_local, exchange_of, memory_of, with_all_names
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box, flat_span
from remesh.core.safetensors_file import encode_header
from remesh.core.sharded import LocalNonpersistentObject
from remesh.core.state import Description, TensorEntry
from remesh.errors import CheckpointExistsError, StateError, UnsupportedValueError
from remesh.exchange import Exchange, run_joined, run_on_one
from remesh.formats import flat_param
from remesh.storage import Storage, open_storage

STATE = "optimizer.state."
GROUPS = "optimizer.param_groups."

_Ranges = dict[str, tuple[int, int, int]]
"""For each tensor of which a rank has a range: its start and stop, and the tensor's size."""


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """The part of a tensor that this rank holds: a range of its elements in row-major order."""

    names: list[str]  # its name in the file, and further names if it is tied
    entry: TensorEntry  # the tensor
    start: int  # first element of the range
    stop: int  # one past its last element
    file_shape: tuple[int, ...]
    """Shape of the range in the file; without dims if every rank has the same value."""


def save_fsdp_flat_param(
    model: nn.Module, path: str | os.PathLike[str], *, group: Any = None
) -> None:
    """Save the parameters and buffers of a model in FSDP1 or FSDP2. Collective.

    On one rank it may be any module. Model and optimizer may share a directory, but nothing in it
    is replaced. Refused is a model that is not cut into ranges that follow each other in the order
    of ranks (tensor parallelism, replicas, no sharding). `group` has the ranks among which the
    model is sharded: a torch process group or an `Exchange`; by default torch's default group, or
    this process alone.
    """
    exchange = exchange_of(group)

    def write(storage: Storage) -> list[_Held]:
        rank, world_size = exchange.rank, exchange.world_size
        buffers = _buffers_of(model)
        no_parameters = {one.names[0] for one in buffers}
        held = [
            _held(entry, names)
            for entry, names in with_all_names(describe_local(model).tensors)
            if entry.parts and entry.name not in no_parameters
        ]
        if rank == 0:
            _write_arrays(storage, flat_param.BUFFERS, buffers)
        _write_arrays(storage, flat_param.file_name("flat_param", rank, world_size), held)
        _put_json(storage, flat_param.file_name("flat_meta", rank, world_size), _meta(held, rank))
        return held

    document = {"version": flat_param.VERSION, "world_size": exchange.world_size}
    _save(exchange, path, "flat_param", write, flat_param.MODEL_META, document)


def save_fsdp_optim_param(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | os.PathLike[str],
    *,
    group: Any = None,
) -> None:
    """Save the state of an optimizer; see `save_fsdp_flat_param`. Collective."""
    exchange = exchange_of(group)
    state = {"model": LocalNonpersistentObject(model), "optimizer": optimizer}
    groups: list[dict[str, object]] = []

    def write(storage: Storage) -> list[_Held]:
        description = describe_local(state)
        groups.extend(_described_groups(description))
        held = [
            # Counts of steps have no dims, and every rank has them.
            _held(entry, [_state_key(entry.name)], None if entry.global_shape else ())
            for entry in description.tensors
            if entry.parts
        ]
        own = flat_param.file_name("optim_param", exchange.rank, exchange.world_size)
        _write_arrays(storage, own, held)
        return held

    _save(exchange, path, "optim_param", write, flat_param.OPTIMIZER_META, groups)


# ---------------------------------------------------------------------------------------------
# What a rank holds
# ---------------------------------------------------------------------------------------------


def _held(entry: TensorEntry, names: list[str], file_shape: tuple[int, ...] | None = None) -> _Held:
    """The range of a tensor that this rank holds, in one dim unless the shape is given."""
    start = stop = -1
    for part in entry.parts:
        first, last, is_contiguous = flat_span(entry.global_shape, part.box)
        if not is_contiguous or stop not in {-1, first}:
            raise StateError(
                f"{entry.name}: this rank holds {', '.join(str(p.box) for p in entry.parts)} of "
                f"{entry.global_shape}\n"
                "That is no range of the flattened tensor, so it cannot be stored in this "
                "layout; use remesh.save"
            )
        start = first if start < 0 else start
        stop = last
    return _Held(names, entry, start, stop, (stop - start,) if file_shape is None else file_shape)


def _buffers_of(model: nn.Module) -> list[_Held]:
    """The buffers of a model, also those that its state dict leaves out, under their own names."""
    buffers = dict(model.named_buffers())
    names = entry_names(model, buffers)
    state = {names[raw].name: buffer for raw, buffer in buffers.items()}
    return [
        _held(entry, [entry.name], entry.global_shape) for entry in describe_local(state).tensors
    ]


def _check_ranges(ranges: Sequence[_Ranges]) -> None:
    """Check that the ranges of all ranks, in their order, are whole tensors."""
    reached: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for rank, own in enumerate(ranges):
        for name, (start, stop, size) in own.items():
            if start != reached.get(name, 0):
                raise StateError(
                    f"{name}: rank {rank} holds elements from {start} on, the ranks before it up "
                    f"to {reached.get(name, 0)}\n"
                    "This layout stores each element once and in the order of ranks; for replicas "
                    "give the group of ranks that share one copy, or use remesh.save"
                )
            reached[name], sizes[name] = stop, size
    for name, size in sizes.items():
        if reached[name] != size:
            raise StateError(f"{name}: the ranks hold {reached[name]} of {size} elements")


def _meta(held: Sequence[_Held], rank: int) -> dict[str, object]:
    """The content of the flat meta file of a rank."""
    parameters = {
        name: {
            "param_names": name,
            "param_shapes": one.entry.global_shape,
            "param_numels": math.prod(one.entry.global_shape),
            "param_offsets": (0, one.stop - one.start),
            "rank": rank,
            "striped_fsdp_name": one.names[0],
        }
        for one in held
        for name in one.names
    }
    return {"param_meta": parameters}


def _state_key(name: str) -> str:
    """The key of a tensor of optimizer state in its file."""
    if not name.startswith(STATE):
        raise UnsupportedValueError(
            f"{name}: only tensors that belong to a parameter can be stored in this layout\nMake "
            "an option of a parameter group a number, or use remesh.save"
        )
    parameter, _, key = name.removeprefix(STATE).rpartition(".")
    return f"{parameter}-{key}"


def _described_groups(description: Description) -> list[dict[str, Any]]:
    options = {**description.merged_lists, **description.values}
    other = next((name for name in options if not name.startswith(GROUPS)), None)
    if other is not None:
        raise UnsupportedValueError(
            f"{other}: only state in tensors and options of parameter groups can be stored in "
            "this layout\nUse remesh.save"
        )
    return groups_of(options)


def groups_of(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups, by the names of their options in a description."""
    groups: dict[int, dict[str, Any]] = {}
    for name, value in options.items():
        number, _, option = name.removeprefix(GROUPS).partition(".")
        groups.setdefault(int(number), {})[option] = value
    return [groups[number] for number in sorted(groups)]


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


def _save(
    exchange: Exchange,
    path: str | os.PathLike[str],
    family: str,
    write: Callable[[Storage], list[_Held]],
    last_file: str,
    document: object,
) -> None:
    """Write on every rank, check that it is complete, and write the last file on rank 0."""
    storage = open_storage(path)

    def refuse_existing() -> bytes:
        found = [path for path in storage.list() if path.startswith(f"{family}.")]
        if found:
            raise CheckpointExistsError(
                f"{storage.url}: {found[0]} is there already; save into a new directory"
            )
        return b""

    def each() -> bytes:
        ranges = {
            one.names[0]: (one.start, one.stop, math.prod(one.entry.global_shape))
            for one in write(storage)
            if one.file_shape
        }
        storage.sync()
        return msgspec.msgpack.encode(ranges)

    def join(replies: list[bytes]) -> list[bytes]:
        _check_ranges([msgspec.msgpack.decode(reply, type=_Ranges) for reply in replies])
        _put_json(storage, last_file, document)
        storage.sync()
        return [b""] * exchange.world_size

    run_on_one(exchange, refuse_existing)
    run_joined(exchange, each, join)


def _put_json(storage: Storage, path: str, document: object) -> None:
    try:
        text = json.dumps(document)
    except (TypeError, ValueError) as error:
        raise UnsupportedValueError(f"{storage.url}/{path}: {error}; use remesh.save") from error
    storage.put(path, text.encode(), overwrite=False)


def _write_arrays(storage: Storage, path: str, held: Sequence[_Held]) -> None:
    """Write a safetensors file, tensor by tensor."""
    tensors = []
    for one in held:
        dtype = BY_NAME[one.entry.dtype]
        if dtype.pairs or dtype.is_opaque:
            raise UnsupportedValueError(
                f"{one.names[0]}: {dtype.name} cannot be stored in this layout; use remesh.save"
            )
        num_bytes = (one.stop - one.start) * dtype.itemsize
        tensors.append((one.names[0], dtype.safetensors, one.file_shape, num_bytes))
    header, positions = encode_header(tensors, {})
    writer = storage.create(path, len(header) + sum(num_bytes for *_, num_bytes in tensors))
    try:
        writer.write(0, np.frombuffer(header, dtype=np.uint8))
        for one, begin in zip(held, positions, strict=True):
            position = begin
            for part in one.entry.parts:
                values = np.empty(part.box.shape, BY_NAME[one.entry.dtype].carrier)
                memory_of(part.data, one.names[0]).copy_out(Box.whole(part.box.shape), values)
                writer.write(position, values.reshape(-1).view(np.uint8))
                position += values.nbytes
        writer.finish()
    except BaseException:
        writer.abort()
        raise
