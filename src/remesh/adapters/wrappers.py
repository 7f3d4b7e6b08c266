"""The names of entries without what wrappers put into them.

A model has the same names whether or not it is compiled, in DistributedDataParallel or FSDP1, or
checkpoints its activations. Wrappers are found by looking at the objects along a name, not by its
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from remesh.adapters.memory import alias_key
from remesh.core.state import TensorEntry, Walk


@dataclass(frozen=True, slots=True, eq=False)
class EntryName:
    """The name of an entry of a module, or the beginning of one."""

    name: str  # without wrappers
    in_ddp: bool  # whether it lies inside a DistributedDataParallel
    module: nn.Module | None  # where it leads; None past the last module


def entry_names(root: nn.Module, raw_names: Iterable[str]) -> dict[str, EntryName]:
    """The names, without wrappers, of parameters or state-dict entries of a module."""
    known = {"": EntryName("", False, root)}
    return {raw: _name_of(raw, known) for raw in raw_names}


def ignored_by_ddp(module: nn.Module) -> set[object]:
    """Alias keys of the tensors that a DistributedDataParallel was told not to synchronise."""
    keys: set[object] = set()
    for wrapper in module.modules():
        if isinstance(wrapper, DistributedDataParallel):
            ignored = set(wrapper.parameters_to_ignore)
            if not wrapper.broadcast_buffers:
                ignored.update(name for name, _ in wrapper.module.named_buffers())
            for tensors in (wrapper.module.named_parameters(), wrapper.module.named_buffers()):
                keys.update(alias_key(tensor) for name, tensor in tensors if name in ignored)
    return keys


def note_groups(walk: Walk, module: nn.Module) -> None:
    """Record the process groups whose ranks wrappers in a module keep equal."""
    known = walk.description.meshes
    for wrapper in module.modules():
        if isinstance(wrapper, DistributedDataParallel | FullyShardedDataParallel):
            for group in (wrapper.process_group, getattr(wrapper, "_inter_node_pg", None)):
                if group is not None and id(group) not in known:
                    with suppress(KeyError):  # it is destroyed: the process goes on with others
                        known[id(group)] = min(dist.get_process_group_ranks(group))


def _name_of(raw: str, known: dict[str, EntryName]) -> EntryName:
    """The name of an entry, or of the beginning of one; `known` holds those found so far."""
    if raw not in known:
        parent, _, part = raw.rpartition(".")
        known[raw] = _step(_name_of(parent, known), part)
    return known[raw]


def _step(place: EntryName, part: str) -> EntryName:
    """One part of a name further on, passing through wrappers."""
    module, in_ddp = place.module, place.in_ddp
    while module is not None and (attribute := inner_attribute(module)) is not None:
        in_ddp = in_ddp or isinstance(module, DistributedDataParallel)
        module = getattr(module, attribute)
        if part == attribute:
            return EntryName(place.name, in_ddp, module)
    child = getattr(module, part, None)
    name = f"{place.name}.{part}" if place.name else part
    return EntryName(name, in_ddp, child if isinstance(child, nn.Module) else None)


def key_of(raw: str) -> str:
    """The key in a state dict of a parameter or buffer: activation checkpointing changes names."""
    return raw.replace("_checkpoint_wrapped_module.", "")


def inner_attribute(module: nn.Module) -> str | None:
    """The attribute under which a wrapper keeps the module it wraps; None if it is no wrapper."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    if isinstance(module, ActivationWrapper):
        return "_checkpoint_wrapped_module"
    if isinstance(module, FullyShardedDataParallel):
        return "_fsdp_wrapped_module"
    # The class is asked for by name, because importing its module takes seconds.
    if any(kind.__module__ == "torch._dynamo.eval_frame" for kind in type(module).__mro__):
        return "_orig_mod"
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """What is in the wrappers of a module."""
    while (attribute := inner_attribute(module)) is not None:
        module = getattr(module, attribute)
    return module


def without_undeclared_ties(state: Any, entries: list[TensorEntry]) -> list[TensorEntry]:
    """The tensors of a state for files of transformers, which ties what its models declare alone.

    Other names that share memory become tensors of their own.
    """
    parts = state if isinstance(state, Mapping) else {"": state}
    for key, leaf in parts.items():
        model = unwrapped(leaf) if isinstance(leaf, nn.Module) else leaf
        declared = getattr(model, "__dict__", {}).get("all_tied_weights_keys")
        if declared is not None:
            prefix = f"{key}." if key else ""
            tied = {f"{prefix}{name}" for pair in declared.items() for name in pair}
            entries = [
                replace(entry, alias_key=None)
                if entry.name.startswith(prefix) and entry.name not in tied
                else entry
                for entry in entries
            ]
    return entries
