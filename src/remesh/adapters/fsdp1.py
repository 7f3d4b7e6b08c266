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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from remesh.adapters.declared import EXTRA_STATE
from remesh.core.sharded import Part, ShardedTensor, parts_at
from remesh.errors import UnsupportedValueError


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """An original parameter as far as this rank holds it."""

    raw: str  # its name in the root, with wrappers
    aliases: tuple[str, ...]  # further names of it
    shards: ShardedTensor  # its boxes, as views of the slice of the flat parameter
    parameter: torch.Tensor  # what an optimizer knows: the flat parameter, or the original one
    slice: torch.Tensor  # this rank's slice of the flat parameter


def has_fsdp1(module: nn.Module) -> bool:
    """True if a module is, or has in it, a FullyShardedDataParallel."""
    return any(isinstance(child, FullyShardedDataParallel) for child in module.modules())


def fsdp1_entries(root: nn.Module, originals: list[Original]) -> dict[str, Any]:
    """The entries of `state_dict`, with this rank's slices in place of flat parameters."""
    entries: dict[str, Any] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        module._save_to_state_dict(entries, f"{name}." if name else "", keep_vars=True)
    flat = {id(one.parameter) for one in originals}
    slices = {raw: one.slice for one in originals for raw in (one.raw, *one.aliases)}
    return slices | {
        raw: entry for raw, entry in entries.items() if id(entry) not in flat and raw not in slices
    }


def set_extra_state(module: nn.Module, entries: Mapping[str, Any]) -> None:
    """Hand the extra state among the entries to its modules; tensors are filled in place."""
    for raw, entry in entries.items():
        owner, _, key = raw.rpartition(".")
        if key == EXTRA_STATE:
            module.get_submodule(owner).set_extra_state(entry)


def fsdp1_originals(root: nn.Module, where: str) -> list[Original]:
    """The original parameters of all flat ones in a module, in the order of its modules."""
    found: list[Original] = []
    if not has_fsdp1(root):
        return found
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


def _originals_of(handle: Any, prefix: str, where: str) -> Iterator[Original]:
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
        yield Original(raw, tuple(further), shards, parameter, own)


def _joined(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name
