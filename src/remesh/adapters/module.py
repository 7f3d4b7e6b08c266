"""Modules: the entries of `state_dict()` under names that do not depend on wrappers.

What a module stores is what its `state_dict()` says, so state-dict hooks, buffers that are not
persistent and extra state are honoured. The names lose what wrappers put into them
(`remesh.adapters.wrappers`). Modules that say themselves of what their tensors are shards, and
names that are changed, are in `remesh.adapters.declared`.

FSDP1, whose modules cannot give a state dict without communication, is in `remesh.adapters.fsdp1`,
which takes the entries from the modules.

The tensors of a state dict share memory with the parameters and buffers, so loading fills them in
place. Afterwards the filled state dict is handed to `load_state_dict`: for the tensors this is a
copy onto themselves; it is there for load hooks, extra state, and entries that a state-dict hook
has generated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from remesh.adapters.declared import (
    EXTRA_STATE,
    NamedModule,
    Placed,
    add_shards,
    declared_shards,
    has_sharded_state_dict,
    local_of,
    module_of,
    new_name,
)
from remesh.adapters.fsdp1 import (
    Original,
    fsdp1_entries,
    fsdp1_originals,
    has_fsdp1,
    set_extra_state,
)
from remesh.adapters.memory import alias_key
from remesh.adapters.nested import describe_copy
from remesh.adapters.peft import check_unmerged
from remesh.adapters.tensor import amend, describe_tensor, is_in_parts
from remesh.adapters.tensor_subclass import forget_scale
from remesh.adapters.wrappers import entry_names, ignored_by_ddp, key_of, note_groups
from remesh.core.state import (
    Loaded,
    Path,
    Rebuild,
    Role,
    Walk,
    name_of,
    role_of,
)
from remesh.errors import NameCollisionError, StateError


def describe_module(walk: Walk, path: Path, leaf: nn.Module | NamedModule) -> Rebuild:
    """Describe a module; loading fills it in place and returns the same leaf."""
    module = module_of(leaf)
    check_unmerged(module)
    note_groups(walk, module)
    is_fsdp1, originals = has_fsdp1(module), fsdp1_originals(module, name_of(path))
    entries = fsdp1_entries(module, originals) if is_fsdp1 else module.state_dict()
    places = _places(leaf, entries, entries, originals, name_of(path))
    rebuilds: dict[str, Rebuild] = {}
    taken: dict[str, str] = {}
    buffers = {key_of(raw) for raw, _ in module.named_buffers(remove_duplicate=False)}
    own = {key_of(raw): one for raw, one in module.named_parameters(remove_duplicate=False)}
    for raw, entry in entries.items():
        place, parameter = places[raw], own.get(key_of(raw))
        if place.shards is None and taken.setdefault(place.name, raw) != raw:
            raise NameCollisionError(
                f"{name_of(path)}: entries {taken[place.name]!r} and {raw!r} of the module's "
                "state dict\n"
                f"Both are stored as {place.name!r}; rename one of them"
            )
        if isinstance(entry, torch.Tensor) and not raw.endswith(EXTRA_STATE):
            num_tensors = len(walk.description.tensors)
            if place.shards is None:
                rebuilds[raw] = describe_tensor(walk, (*path, place.name), entry, place.role)
            else:
                add_shards(walk, (*path, place.name), entry, place, place.shards.parts)
            described = walk.description.tensors[num_tensors:]
            if len(described) == 1 and not described[0].parts:
                # Without memory of it on this rank, a tie shows in the parameter alone.
                tied = place.shards if parameter is None else id(parameter)
                amend(walk, num_tensors, alias_key=tied and ("nothing of", tied))
            if parameter is not None and not parameter.requires_grad:
                amend(walk, num_tensors, is_frozen=True)
            if (
                key_of(raw) in buffers
                and place.shards is None
                and not isinstance(entry, DTensor)
                and not is_in_parts(entry)
            ):
                amend(walk, num_tensors, is_buffer=True)
        else:
            rebuilds[raw] = describe_copy(walk, (*path, place.name), entry)

    def rebuild(loaded: Loaded) -> nn.Module | NamedModule:
        # In place, because a state dict carries the versions of its modules as an attribute.
        for raw, make in rebuilds.items():
            entries[raw] = make(loaded)
        if is_fsdp1:
            set_extra_state(module, entries)
        else:
            result = module.load_state_dict(entries, strict=False)
            # A class may return something else from a method of its own.
            _refuse_lost(module, entries, getattr(result, "unexpected_keys", ()), path)
        for parameter in module.parameters():
            forget_scale(parameter)
        return leaf

    return rebuild


def _refuse_lost(
    module: nn.Module, entries: Mapping[str, Any], unexpected: Iterable[str], path: Path
) -> None:
    """Refuse what a state-dict hook has made and no load hook takes, if the module has it not."""
    made = {
        raw: entries[raw]
        for raw in unexpected
        if isinstance(entries.get(raw), torch.Tensor) and not raw.endswith(EXTRA_STATE)
    }
    # What shares memory with the module, or follows from its tensors, is there all the same.
    now = module.state_dict() if made else {}
    lost = [raw for raw, entry in made.items() if not _is_there(now.get(raw), entry)]
    if lost:
        raise StateError(
            f"{name_of((*path, lost[0]))}: made by a state-dict hook, and no load hook takes it\n"
            f"After loading, {type(module).__qualname__} has not what is stored as "
            f"{', '.join(lost)}. Give it the other direction, for instance with "
            "register_load_state_dict_pre_hook, or leave the entries out of its state dict."
        )


def _is_there(entry: object, other: torch.Tensor) -> bool:
    """True if an entry is another one, up to rounding of what is computed again."""
    if not isinstance(entry, torch.Tensor) or entry.shape != other.shape:
        return False
    if is_in_parts(entry) or is_in_parts(other):
        return True  # they are not looked into
    now, stored = local_of(entry), local_of(other)
    if alias_key(now) == alias_key(stored):
        return True
    try:
        torch.testing.assert_close(
            now, stored, equal_nan=True, check_device=False, check_dtype=False
        )
    except AssertionError:
        return False
    return True


def placed_parameters(
    leaf: nn.Module | NamedModule, wanted: Callable[[torch.Tensor], bool], where: str
) -> list[tuple[torch.Tensor, tuple[Placed, ...]]]:
    """The wanted parameters of a module, with the global tensors that they are or hold parts of."""
    module = module_of(leaf)
    if not any(map(wanted, module.parameters())):
        return []
    originals = fsdp1_originals(module, where)
    found = {one.raw: one.parameter for one in originals}
    flat = {id(parameter) for parameter in found.values()}
    found |= {raw: tensor for raw, tensor in module.named_parameters() if id(tensor) not in flat}
    found = {raw: tensor for raw, tensor in found.items() if wanted(tensor)}
    entries = module.state_dict() if not originals and has_sharded_state_dict(module) else {}
    places = _places(leaf, found, entries, originals, where)
    of_parameter = defaultdict[int, list[Placed]](list)
    for raw, tensor in found.items():
        of_parameter[id(tensor)].append(places[raw])
    by_id = {id(tensor): tensor for tensor in found.values()}
    return [(by_id[key], tuple(of_one)) for key, of_one in of_parameter.items()]


def _places(
    leaf: nn.Module | NamedModule,
    tensors: Mapping[str, Any],
    entries: Mapping[str, Any],
    originals: list[Original],
    where: str,
) -> dict[str, Placed]:
    """Where tensors of a module belong, by their names in it."""
    module = module_of(leaf)
    names = entry_names(module, tensors)
    flat = {raw: one.shards for one in originals for raw in (one.raw, *one.aliases)}
    by_key = declared_shards(module, entries, where)
    shards = {one.name: by_key[raw] for raw, one in entry_names(module, by_key).items()}
    unsynchronised = ignored_by_ddp(module)
    buffers = {key_of(raw) for raw, _ in module.named_buffers(remove_duplicate=False)}
    places = {}
    for raw, tensor in tensors.items():
        declared = shards.get(names[raw].name)
        equal = (
            raw in flat
            or isinstance(tensor, DTensor)
            or (
                names[raw].in_ddp
                and isinstance(tensor, torch.Tensor)
                and alias_key(tensor) not in unsynchronised
            )
        )
        role = Role.EQUAL if equal else Role.ASSUMED
        if names[raw].in_ddp and role is Role.EQUAL and key_of(raw) in buffers:
            # DDP lets them differ, and gives all ranks those of rank 0 before a forward pass.
            role = Role.FIRST
        name = names[raw].name if declared is None else declared.name
        if declared is not None and declared.replica_id is not None:
            role = role_of(declared)
        if isinstance(leaf, NamedModule):
            name = new_name(name, leaf.names)
        places[raw] = Placed(name, role, flat.get(raw, declared))
    return places
