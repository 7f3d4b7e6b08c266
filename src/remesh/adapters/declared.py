"""Modules that say themselves which part of a global tensor their parameters are.

A layer that was cut by hand holds plain tensors, which do not tell what they are shards of. Such a
module says so in a method, `sharded_state_dict(prefix)`, that returns a `ShardedTensor` for each
entry of its state dict: under which global name, in which boxes. The keys of what it returns are
those of `state_dict(prefix=prefix)`; what the tensors are stored as is in the `ShardedTensor`s, so
that a pipeline stage may name its first layer `layers.4`, and a rank its first expert `experts.8`.

The method is found wherever it is in a tree of modules and describes everything below. Entries
that are not declared are whole, and equal on every rank that has them; that is compared when they
are saved. A parameter that carries the mark of a shard (`tensor_model_parallel`, `is_distributed`)
must be described.

`default_sharded_state_dict` is what a module without the method says; a method of one's own starts
from it and changes what is special, most often names (`rename_shards`). `NamedModule` changes
names where there is no method to write: a leaf of a state that stands for its module.

A description is of memory: its parts are views of the module's tensors. Whatever else has the same
form as one of these tensors, above all optimizer state, can therefore be described by the same
views of its own memory (`parts_like`); the `Placed` of its parameter names and cuts it. What has a
method `to_remesh`, as the descriptions of the drop-ins have, counts as what that returns.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from remesh._repr import short_repr
from remesh.adapters.dtensor import local_tensor, note_mesh, parts_of_dtensor
from remesh.adapters.memory import alias_key, check_strided, strided_layout
from remesh.adapters.tensor_subclass import unwrapped
from remesh.adapters.wrappers import entry_names, inner_attribute
from remesh.core.geometry import Box
from remesh.core.sharded import Part, ShardedTensor, dtype_name
from remesh.core.state import Path, Role, TensorEntry, Walk, name_of
from remesh.errors import StateError

Names = Mapping[str, str] | Callable[[str], str]
"""New names: beginnings of names, up to a dot, and what they become; or a function of names."""

_MARKS = ("tensor_model_parallel", "is_distributed")
"""Attributes that say that a parameter is a shard: Megatron's and Paddle's."""

EXTRA_STATE = "_extra_state"
"""How the keys of what `get_extra_state` returns end."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedModule:
    """A module whose entries have other names in the checkpoint than in the module.

    Put it into a state in place of the module. For pipeline stages, virtual stages and experts,
    whose layers are numbered from 0 on every rank.
    """

    module: nn.Module
    """The module."""
    names: Names
    """What its names become: a mapping of beginnings, of which the longest that ends at a dot
    counts, or a function."""

    __repr__ = short_repr


def _tensors_of(entries: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict, extra state left out."""
    return {
        key: entry
        for key, entry in entries.items()
        if isinstance(entry, torch.Tensor) and not key.endswith(EXTRA_STATE)
    }


def module_of(leaf: nn.Module | NamedModule) -> nn.Module:
    """The module that stands in a state."""
    return leaf.module if isinstance(leaf, NamedModule) else leaf


def new_name(name: str, names: Names) -> str:
    """The new name of a name."""
    if callable(names):
        return names(name)
    parts = name.split(".")
    beginnings = {tuple(part for part in old.split(".") if part): old for old in names}
    for length in range(len(parts), -1, -1):
        old = beginnings.get(tuple(parts[:length]))
        if old is not None:
            return ".".join(part for part in (*names[old].split("."), *parts[length:]) if part)
    return name


def rename_shards(shards: Mapping[str, ShardedTensor], names: Names) -> dict[str, ShardedTensor]:
    """Store the same shards under other names; the keys do not change.

    Args:
        shards: What a `sharded_state_dict` method returns.
        names: What stored names become; see `NamedModule`.
    """
    return {
        key: dataclasses.replace(tensor, name=new_name(tensor.name, names))
        for key, tensor in shards.items()
    }


def default_sharded_state_dict(module: nn.Module, prefix: str = "") -> dict[str, ShardedTensor]:
    """Describe the state dict of a module that has no `sharded_state_dict` method.

    Calls the method of its children. Tensors that no child describes are whole.

    Args:
        module: The module; a method of its own is not called.
        prefix: Put before every key and name; ends with a dot unless empty.

    Returns:
        A `ShardedTensor` for each tensor of `module.state_dict(prefix=prefix)`.

    Raises:
        StateError: If a child describes something else than its own tensors, or a parameter that
            is marked as a shard is not described.
    """
    entries: dict[str, object] = module.state_dict()
    tensors = _tensors_of(entries)
    described_by_key = _declared(module, tensors, prefix, with_root=False)
    refuse_marked(module, described_by_key, prefix)
    names = entry_names(module, entries)
    result = {}
    for raw, tensor in tensors.items():
        if raw in described_by_key:
            result[prefix + raw] = described_by_key[raw]
        else:
            name = prefix + names[raw].name
            shape = tuple(tensor.shape)
            result[prefix + raw] = ShardedTensor(name, shape, parts_of(tensor, name), None)
    return result


def has_sharded_state_dict(module: nn.Module) -> bool:
    """True if a module, or one below it, has a `sharded_state_dict` method."""
    return any(callable(getattr(one, "sharded_state_dict", None)) for one in module.modules())


def declared_shards(
    module: nn.Module, entries: Mapping[str, object], where: str
) -> dict[str, ShardedTensor]:
    """The shards that modules describe by a method of their own, by key of the state dict."""
    described_by_key = _declared(module, _tensors_of(entries))
    refuse_marked(module, described_by_key, f"{where}." if where else "")
    return described_by_key


def refuse_marked(module: nn.Module, described_by_key: Iterable[str], prefix: str) -> None:
    """Refuse parameters that are marked as shards and not described."""
    # Keys of a state dict lack what activation checkpointing puts into the names of parameters.
    described = {one.name for one in entry_names(module, described_by_key).values()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = entry_names(module, parameters)
    for raw, parameter in parameters.items():
        if names[raw].name in described or isinstance(parameter, DTensor):
            continue
        for mark in _MARKS:
            if getattr(parameter, mark, False) is True:
                raise StateError(
                    f"{prefix}{names[raw].name}: this parameter has {mark}=True\nIt is "
                    "a shard, but nothing says of what. Give its module a "
                    "sharded_state_dict(prefix) method that describes it; "
                    "remesh.sharding.build_sharded_state_dict makes what the method returns."
                )


def parts_of(tensor: torch.Tensor, where: str) -> tuple[Part, ...]:
    """This rank's boxes of a tensor as it is: all of it, or those of a DTensor."""
    if isinstance(tensor, DTensor):
        return parts_of_dtensor(tensor, local_tensor(tensor), where)
    return (Part(Box.whole(tuple(tensor.shape)), local_of(tensor)),)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank: that of its shard if it is a DTensor."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else unwrapped(tensor).detach()


def has_form_of(tensor: torch.Tensor, model: torch.Tensor) -> bool:
    """True if the memory of two tensors on this rank has one shape."""
    return local_of(tensor).shape == local_of(model).shape


def parts_like(
    shards: ShardedTensor, model: torch.Tensor, tensor: torch.Tensor, where: str
) -> tuple[Part, ...]:
    """The boxes of a tensor laid out like `model`, of which the parts of `shards` are views."""
    source, target = local_of(model), local_of(tensor)
    if _layout(source) != _layout(target):
        raise StateError(
            f"{where}: its memory has shape and strides {_layout(target)}, that of its "
            f"parameter {_layout(source)}\n"
            "What is known of the parameter's place does not hold for it; make it with "
            "torch.zeros_like(parameter), or make both contiguous"
        )
    shift = target.storage_offset() - source.storage_offset()
    parts = []
    for part in shards.parts:
        view = part.data
        assert isinstance(view, torch.Tensor)
        data = target.as_strided(view.shape, view.stride(), view.storage_offset() + shift)
        parts.append(Part(part.box, data))
    return tuple(parts)


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape, and strides where they mean something."""
    strides = (s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    return tuple(tensor.shape), tuple(strides) if tensor.numel() else ()


def _declared(
    root: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    prefix: str = "",
    *,
    with_root: bool = True,
) -> dict[str, ShardedTensor]:
    """The shards that a module and those below it declare, by key of its state dict.

    A module declares for all below it. Its prefix has no wrappers, and keys need not have them.
    """
    if not has_sharded_state_dict(root):
        return {}
    names = {entry.name: raw for raw, entry in entry_names(root, tensors).items()}
    modules = dict(root.named_modules(remove_duplicate=False))
    declaring = {
        entry.name: modules[raw]
        for raw, entry in entry_names(root, modules).items()
        if inner_attribute(modules[raw]) is None
        and callable(getattr(modules[raw], "sharded_state_dict", None))
        and (with_root or modules[raw] is not root)
    }
    below = defaultdict[str, dict[str, str]](dict)
    for name, raw in names.items():
        parts = name.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts)))
        owner = next((one for one in above if one in declaring), None)
        if owner is not None:
            below[owner][prefix + name] = raw
    found: dict[str, ShardedTensor] = {}
    for owner, keys in below.items():
        own_prefix = f"{prefix}{owner}." if owner else prefix
        found |= _checked(declaring[owner], own_prefix, keys, tensors)
    return found


def _checked(
    module: Any, prefix: str, raw_names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, ShardedTensor]:
    """What a module declares, by key of the root's state dict, once it is sound."""
    where = f"{type(module).__qualname__}.sharded_state_dict({prefix!r})"
    found: dict[str, ShardedTensor] = {}
    said: dict[str, Any] = module.sharded_state_dict(prefix)
    own_names = entry_names(module, [key.removeprefix(prefix) for key in said])
    for key, described in said.items():
        if key.endswith(EXTRA_STATE):
            continue
        tensor = described.to_remesh() if hasattr(described, "to_remesh") else described
        if not isinstance(tensor, ShardedTensor):
            raise StateError(
                f"{where}: {key!r} is a {type(tensor).__module__}.{type(tensor).__qualname__}\n"
                "Each entry must be a remesh.ShardedTensor, or a ShardedWeight or ShardedTensor of "
                "remesh.compat."
            )
        raw = raw_names.get(prefix + own_names[key.removeprefix(prefix)].name)
        if raw is None or not key.startswith(prefix):
            raise StateError(
                f"{where}: {key!r} is no tensor of the module's state dict\nA key is the prefix "
                "and the name in the module; the name in the checkpoint is the ShardedTensor's."
            )
        _check_views(tensor, tensors[raw], where)
        found[raw] = tensor
    left_out = [raw for raw in raw_names.values() if raw not in found]
    if left_out:
        raise StateError(
            f"{where} leaves out {', '.join(left_out)}\nStart from "
            "remesh.sharding.default_sharded_state_dict, which has every entry"
        )
    return found


def _check_views(shards: ShardedTensor, entry: torch.Tensor, where: str) -> None:
    """Refuse parts that are not views of the tensor that they describe."""
    local = local_of(entry)
    for part in shards.parts:
        if not _is_view(part.data, local):
            raise StateError(
                f"{where}: the data of {shards.name!r} is not memory of the module's tensor\n"
                "Loading would not reach it; describe views of it, not copies"
            )


def _is_view(data: object, tensor: torch.Tensor) -> bool:
    """True if all elements of an array are elements of a tensor."""
    if not isinstance(data, torch.Tensor) or data.dtype != tensor.dtype:
        return False
    if data.numel() == 0:
        return True
    (start, stop), (first, last) = strided_layout(data).span, strided_layout(tensor).span
    same_storage = data.untyped_storage() is tensor.untyped_storage()
    return same_storage and first <= start and stop <= last


# ---------------------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The global tensor that a parameter is, or is a part of."""

    name: str
    role: Role  # what is known of copies on other ranks of plain tensors
    shards: ShardedTensor | None = None
    """Which boxes the parameter holds, as views of it; None if it is a whole tensor or a DTensor,
    which speak for themselves."""
    full_name: str | None = None
    """Name of the parameter in the state, which begins with the path of its module; None if it is
    in no module."""


def add_shards(
    walk: Walk, path: Path, tensor: torch.Tensor, place: Placed, parts: tuple[Part, ...]
) -> None:
    """Record a tensor of which this rank holds declared boxes."""
    assert place.shards is not None
    check_strided(local_of(tensor), name_of(path))
    if isinstance(tensor, DTensor):
        note_mesh(walk, tensor)
    shape = place.shards.global_shape
    views = [(part.box, alias_key(part.data)) for part in parts]  # type: ignore[arg-type]
    key = ("shards", shape, *views) if views and views[0][1] is not None else None
    name = walk.claim(path)
    dtype = dtype_name(local_of(tensor), name)
    may_resize = place.shards.allow_shape_mismatch
    walk.description.tensors.append(
        TensorEntry(name, dtype, shape, parts, place.role, may_resize, alias_key=key)
    )
