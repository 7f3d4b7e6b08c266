# ruff: noqa: SLF001 - there is no public way to the metadata of flat parameters
"""FullyShardedDataParallel (FSDP1): the shards of flat parameters as boxes of the original ones.

FSDP1 flattens the parameters of each wrapped module into one flat parameter, pads it and gives
every rank an equal slice. What a slice holds of which original parameter is in the flat parameter's
own metadata, so nothing is gathered: each range of a flattened parameter is a few boxes of it
(`remesh.core.geometry.boxes_of_flat_range`), and these are views of the slice. Without sharding
(`NO_SHARD`) the slice is everything.

An optimizer over such a module knows either the flat parameters or, with `use_orig_params=True`,
what the slice has of each original parameter, as one dim. Both are described by the same boxes, so
optimizer state is cut likewise; see `remesh.adapters.optimizer`.

`state_dict()` of such a module communicates, so its entries are taken from the modules themselves:
hooks that change state dicts are not called. After a forward pass a module may still have gathered
parameters; they are given up first, or what is loaded would not show in them.

The metadata (`FlatParameter` in `torch.distributed.fsdp._flat_param`) are not a public interface of
torch; what is used of them is in this module alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from remesh.adapters.declared import (
    EXTRA_STATE,
    NamedModule,
    Placed,
    module_of,
    new_name,
)
from remesh.adapters.wrappers import entry_names
from remesh.core.sharded import Part, ShardedTensor, parts_at
from remesh.core.state import Role
from remesh.errors import UnsupportedValueError


@dataclass(frozen=True, slots=True, eq=False)
class _Original:
    """An original parameter as far as this rank holds it."""

    raw: str  # its name in the root, with wrappers
    aliases: tuple[str, ...]  # further names of it
    shards: ShardedTensor  # its boxes, as views of the slice of the flat parameter
    parameter: torch.Tensor  # what an optimizer knows: the flat parameter, or the original one
    slice: torch.Tensor  # this rank's slice of the flat parameter


def has_fsdp1(module: nn.Module) -> bool:
    """True if a module is, or has in it, a FullyShardedDataParallel."""
    return any(isinstance(child, FullyShardedDataParallel) for child in module.modules())


def fsdp1_entries(
    leaf: nn.Module | NamedModule, where: str
) -> tuple[dict[str, Any], dict[str, Placed], dict[str, nn.Module]]:
    """The entries of a module with FSDP1, where each belongs, and the owners of extra state.

    The entries are those of `state_dict`, with this rank's slices in place of flat parameters.
    """
    module = module_of(leaf)
    originals = _originals(module, where)
    shards = {raw: one for one in originals for raw in (one.raw, *one.aliases)}
    others = dict(_other_entries(module, originals))
    owners = {raw: one for raw, one in others.items() if isinstance(one, nn.Module)}
    entries: dict[str, Any] = {raw: one.slice for raw, one in shards.items()} | others
    entries |= {raw: owner.get_extra_state() for raw, owner in owners.items()}
    places = {
        raw: Placed(name, Role.EQUAL, shards[raw].shards)
        if raw in shards
        else Placed(name, Role.ASSUMED)
        for raw, name in _names(leaf, list(entries)).items()
    }
    return entries, places, owners


def fsdp1_parameters(leaf: nn.Module | NamedModule, where: str) -> dict[int, tuple[Placed, ...]]:
    """The places of the parameters of a module with FSDP1 in it, by their identity."""
    module = module_of(leaf)
    originals = _originals(module, where)
    flat = {id(one.parameter) for one in originals}
    found = [(one.raw, one.parameter, one.shards) for one in originals]
    plain = [(raw, p, None) for raw, p in module.named_parameters() if id(p) not in flat]
    names = _names(leaf, [raw for raw, *_ in [*found, *plain]])
    result = defaultdict[int, tuple[Placed, ...]](tuple)
    for raw, parameter, shards in [*found, *plain]:
        role = Role.ASSUMED if shards is None else Role.EQUAL
        result[id(parameter)] += (Placed(names[raw], role, shards),)
    return result


def _names(leaf: nn.Module | NamedModule, raw_names: list[str]) -> dict[str, str]:
    names = entry_names(module_of(leaf), raw_names)
    renames = leaf.names if isinstance(leaf, NamedModule) else {}
    return {raw: new_name(entry.name, renames) for raw, entry in names.items()}


def _originals(root: nn.Module, where: str) -> list[_Original]:
    """The original parameters of all flat ones, in the order of the modules."""
    found: list[_Original] = []
    for name, module in root.named_modules():
        is_wrapper = isinstance(module, FullyShardedDataParallel)
        if not is_wrapper and callable(getattr(module, "sharded_state_dict", None)):
            raise UnsupportedValueError(
                f"{where}: {name} has shards cut by hand, which FSDP1 has flattened\n"
                "Its method sharded_state_dict describes them. Use "
                "torch.distributed.fsdp.fully_shard (FSDP2) over layers that are cut by hand"
            )
        if isinstance(module, FullyShardedDataParallel):
            handle: Any = module._handle
            if handle is not None:
                _give_up_gathered(handle)
                prefix = f"{name}." if name else ""
                found += _originals_of(handle, f"{prefix}_fsdp_wrapped_module.", where)
    return found


def _give_up_gathered(handle: Any) -> None:
    """Let a module have its slices only, as before a forward pass.

    It may show its slices already and still keep what was gathered for the next pass.
    """
    is_used = hasattr(handle.flat_param, "_local_shard")
    if handle.uses_sharded_strategy and is_used and not handle.needs_unshard():
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


def _originals_of(handle: Any, prefix: str, where: str) -> Iterator[_Original]:
    flat = handle.flat_param
    own: torch.Tensor = getattr(flat, "_local_shard", flat).detach()
    aliases: dict[tuple[str, str], list[str]] = {}
    for shared in flat._shared_param_infos:
        known = aliases.setdefault((shared.prim_module_name, shared.prim_param_name), [])
        known.append(prefix + _joined(shared.module_name, shared.param_name))
    infos = zip(
        flat._param_infos,
        flat._shapes,
        flat._contiguities,
        flat._shard_param_infos,
        flat._params or [flat] * flat._num_params,
        strict=True,
    )
    for info, shape, is_contiguous, place, parameter in infos:
        raw = prefix + _joined(info.module_name, info.param_name)
        if not is_contiguous:
            raise UnsupportedValueError(
                f"{where}: {raw} was not contiguous when FullyShardedDataParallel (FSDP1) "
                "flattened it\nIts elements lie in another order; make it contiguous before "
                "wrapping it"
            )
        parts: tuple[Part, ...] = ()
        if place.in_shard:
            here = own.flatten()[place.offset_in_shard :]
            begin, end = place.intra_param_start_idx, place.intra_param_end_idx + 1
            parts = parts_at((0,) * len(shape), tuple(shape), here, (begin, end))
        further = aliases.get((info.module_name, info.param_name), ())
        shards = ShardedTensor(raw, tuple(shape), parts, None)
        yield _Original(raw, tuple(further), shards, parameter, own)


def _joined(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def _other_entries(
    root: nn.Module, originals: list[_Original]
) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    """Entries outside of flat parameters: tensors, and modules that have extra state."""
    flat = {id(original.parameter) for original in originals}
    flat_names = {raw for original in originals for raw in (original.raw, *original.aliases)}
    for module_name, module in root.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            raw = _joined(module_name, name)
            if parameter is not None and id(parameter) not in flat and raw not in flat_names:
                yield raw, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _joined(module_name, name), buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield _joined(module_name, EXTRA_STATE), module
