"""Modules: the entries of `state_dict()` under names that do not depend on wrappers.

What a module stores is what its `state_dict()` says, so state-dict hooks, buffers that are not
persistent and extra state are honoured. The names lose what wrappers put into them: a model has
the same names whether or not it is compiled, in DistributedDataParallel, or checkpoints its
activations. Wrappers are found by looking at the objects along a name, not by its text.

The tensors of a state dict share memory with the parameters and buffers, so loading fills them in
place. Afterwards the filled state dict is handed to `load_state_dict`: for the tensors this is a
copy onto themselves; it is there for load hooks, extra state, and entries that a state-dict hook
has made up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from remesh.adapters.memory import alias_key
from remesh.adapters.nested import describe_copy
from remesh.adapters.tensor import describe_tensor
from remesh.errors import NameCollisionError, UnsupportedValueError
from remesh.state import (
    Loaded,
    Path,
    Rebuild,
    Role,
    Walk,
    name_of,
)

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class EntryName:
    """The name of an entry of a module.

    Attributes:
        name: Its name without wrappers.
        in_ddp: Whether it lies inside a DistributedDataParallel.
    """

    name: str
    in_ddp: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where the beginning of an entry's name leads; module is None past the last module."""

    name: str
    module: nn.Module | None
    in_ddp: bool


def describe_module(walk: Walk, path: Path, module: nn.Module) -> Rebuild:
    """Describe a module; loading fills it in place and returns the same module.

    Raises:
        StateError: If an entry of its state dict cannot be stored.
    """
    refuse_fsdp1(module, name_of(path))
    entries: dict[str, Any] = module.state_dict()
    names = entry_names(module, entries)
    unsynchronised = ignored_by_ddp(module)
    rebuilds: dict[str, Rebuild] = {}
    taken: dict[str, str] = {}
    for raw, entry in entries.items():
        name = names[raw].name
        if taken.setdefault(name, raw) != raw:
            raise NameCollisionError(
                f"{name_of(path)}: entries {taken[name]!r} and {raw!r} of the module's state dict "
                f"are both {name!r} without the names of wrappers; rename one of them"
            )
        if isinstance(entry, torch.Tensor) and not raw.endswith(_EXTRA_STATE):
            equal = names[raw].in_ddp and alias_key(entry) not in unsynchronised
            role = Role.EQUAL if equal else Role.ASSUMED
            rebuilds[raw] = describe_tensor(walk, (*path, name), entry, role)
        else:
            rebuilds[raw] = describe_copy(walk, (*path, name), entry)

    def rebuild(loaded: Loaded) -> nn.Module:
        # In place, because a state dict carries the versions of its modules as an attribute.
        for raw, make in rebuilds.items():
            entries[raw] = make(loaded)
        module.load_state_dict(entries, strict=False)
        return module

    return rebuild


def entry_names(root: nn.Module, raw_names: Iterable[str]) -> dict[str, EntryName]:
    """The names, without wrappers, of parameters or state-dict entries of a module.

    Args:
        root: The module that the raw names belong to.
        raw_names: Names as in `named_parameters()` or `state_dict()`.
    """
    known = {"": _Place("", root, in_ddp=False)}
    places = {raw: _place_of(raw, known) for raw in raw_names}
    return {raw: EntryName(place.name, place.in_ddp) for raw, place in places.items()}


def refuse_fsdp1(module: nn.Module, where: str) -> None:
    """Refuse modules inside FullyShardedDataParallel.

    Raises:
        UnsupportedValueError: If there is one.
    """
    for name, child in module.named_modules():
        if isinstance(child, FullyShardedDataParallel):
            raise UnsupportedValueError(
                f"{where}: {name or 'the module'} is wrapped in FullyShardedDataParallel (FSDP1), "
                "which flattens parameters and cannot be saved or loaded yet. Shard the module "
                "with torch.distributed.fsdp.fully_shard (FSDP2) instead."
            )


def ignored_by_ddp(module: nn.Module) -> set[object]:
    """Alias keys of the tensors that a DistributedDataParallel was told not to synchronise."""
    keys: set[object] = set()
    for wrapper in module.modules():
        if isinstance(wrapper, DistributedDataParallel):
            ignored = set(wrapper.parameters_to_ignore)
            for tensors in (wrapper.module.named_parameters(), wrapper.module.named_buffers()):
                keys.update(alias_key(tensor) for name, tensor in tensors if name in ignored)
    return keys


def _place_of(prefix: str, known: dict[str, _Place]) -> _Place:
    """The place of the beginning of a name; `known` holds those found so far."""
    if prefix not in known:
        parent, _, part = prefix.rpartition(".")
        known[prefix] = _step(_place_of(parent, known), part)
    return known[prefix]


def _step(place: _Place, part: str) -> _Place:
    """One part of a name further on, passing through wrappers."""
    module, in_ddp = place.module, place.in_ddp
    while module is not None and (attribute := _wrapped_attribute(module)) is not None:
        in_ddp = in_ddp or isinstance(module, DistributedDataParallel)
        module = getattr(module, attribute)
        if part == attribute:
            return _Place(place.name, module, in_ddp)
    child = getattr(module, part, None)
    name = f"{place.name}.{part}" if place.name else part
    return _Place(name, child if isinstance(child, nn.Module) else None, in_ddp)


def _wrapped_attribute(module: nn.Module) -> str | None:
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
