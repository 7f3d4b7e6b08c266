"""Optimizers: state by the names of parameters, so that it can be loaded into any other layout.

An optimizer numbers its parameters, in an order that depends on the layout. What is stored says
their names instead, which are looked up by identity in the modules of the same state and are the
names that torch's own `get_optimizer_state_dict` gives:

* `state.<parameter>.<key>`: tensors and values of the optimizer's state. A parameter without state
  (frozen, or not stepped yet) has none here either.
* `param_groups.<number>.<option>`: the options of each group.
* `param_groups.<number>.params`: the names of its parameters. With pipeline parallelism a rank
  knows only its own; the union is stored.

Loading goes by what is stored. Parameters are matched by name, whatever their order. State that a
fresh optimizer does not have yet is allocated as the optimizer would allocate it: like the
parameter if it has the parameter's shape, so that the moments of a DTensor are DTensors. Nothing
changes in the optimizer until all has been read. Then its groups are updated, never replaced,
because schedulers hold on to them. Options that say how to compute on this machine rather than
what (`fused`, `foreach`, ...) stay what they are: they decide where `step` has to be.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from remesh._repr import short_repr
from remesh.adapters.declared import NamedModule, Placed, module_of, parts_like, parts_of
from remesh.adapters.module import placed_parameters
from remesh.adapters.nested import describe_copy, leaves_of
from remesh.adapters.optimizer_state import (
    NO_OPTIONS,
    OptimizedTensor,
    check_not_a_bare_shard,
    describe_states,
    with_first_state,
    without_empty_shards,
)
from remesh.adapters.tensor_subclass import is_of_torchao
from remesh.core.sharded import LocalNonpersistentObject, ShardedTensor
from remesh.core.state import (
    Loaded,
    Path,
    Rebuild,
    Stored,
    Walk,
    name_of,
    role_of,
)
from remesh.errors import StateError

_log = logging.getLogger("remesh")
_MAX_LISTED = 3
_ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"
_OF_THIS_MACHINE = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True, slots=True, eq=False)
class DescribedOptimizer:
    """An optimizer over copies or flat partitions of the model's parameters.

    Put it into a state in place of the optimizer. It is stored like an optimizer over the
    parameters. For flat partitions (`flat_partition`) and master copies.
    """

    optimizer: Optimizer
    """The optimizer."""
    stands_for: Mapping[torch.Tensor, torch.Tensor | Sequence[ShardedTensor]]
    """For each tensor in its groups the parameter that it is a copy of, whose module must be in the
    same state; or descriptions, by views of the tensor, of the parts of parameters that it
    consists of. Tensors that are not named are parameters themselves."""
    own_key: str | None = None
    """If given, the tensors that are named are stored too, under this key of the parameter's state
    ("master", say)."""

    __repr__ = short_repr


def describe_optimizer(walk: Walk, path: Path, leaf: Optimizer | DescribedOptimizer) -> Rebuild:
    """Describe an optimizer; loading changes it in place and returns the same leaf."""
    if _is_zero_redundancy(leaf):
        return _describe_zero_redundancy(walk, path, leaf)
    optimizer = leaf.optimizer if isinstance(leaf, DescribedOptimizer) else leaf
    packed = optimizer.state_dict()
    if not packed.keys() >= {"state", "param_groups"}:
        raise StateError(
            f"{name_of(path)}: the state dict of {type(optimizer).__name__} has no entries 'state' "
            "and 'param_groups'\nIt is not known which parameter its state belongs to\n"
            "Keep it outside of the state and save its state_dict() as a value of each rank "
            "(remesh.sharding.ShardedObject), or use an optimizer that has them."
        )
    parameters = _parameters_of(walk, path, leaf, packed["state"])
    stored = walk.stored
    if stored is not None:
        base = (*path, "state")
        parameters = [with_first_state(optimizer, p, stored, base) for p in parameters]
    else:
        if is_of_torchao(optimizer):
            parameters = [without_empty_shards(parameter) for parameter in parameters]
        _tell_of_missing_state(parameters, name_of(path))
    extras = {key: value for key, value in packed.items() if key not in {"state", "param_groups"}}
    other_state = {
        key: value
        for key, value in packed["state"].items()
        if not (isinstance(key, int) and key < len(parameters))
    }
    rebuild_extras = {key: describe_copy(walk, (*path, key), extras[key]) for key in extras}
    rebuild_other = {
        key: describe_copy(walk, (*path, "state", key), value) for key, value in other_state.items()
    }
    rebuild_states = describe_states(walk, (*path, "state"), parameters)
    rebuild_groups = _describe_groups(walk, path, optimizer, parameters)
    packs = _packs_states(optimizer, parameters)

    def rebuild(loaded: Loaded) -> Optimizer | DescribedOptimizer:
        packed_states: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, make in rebuild_states:
            entries: dict[str, Any] = make(loaded)
            if parameter.own_key is not None:
                del entries[parameter.own_key]  # the tensor itself, which is filled in place
            if packs:
                packed_states[parameter.tensor] = entries
            else:
                optimizer.state[parameter.tensor].update(entries)
        for key, make in rebuild_other.items():
            optimizer.state[key] = make(loaded)
        for group, make in rebuild_groups:
            _set_options(group, make(loaded))
        if rebuild_extras or packed_states:
            extras = {key: make(loaded) for key, make in rebuild_extras.items()}
            _load_by_itself(optimizer, packed_states, extras)
        # The step with which torch ends a load: it brings state of older versions up to date.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        return leaf

    return rebuild


# ---------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------


def _parameters_of(
    walk: Walk,
    path: Path,
    leaf: Optimizer | DescribedOptimizer,
    packed_state: Mapping[Any, Any],
) -> list[OptimizedTensor]:
    if not isinstance(leaf, DescribedOptimizer):
        leaf = DescribedOptimizer(leaf, {})
    optimizer, stands_for = leaf.optimizer, leaf.stands_for
    tensors = [(tensor, group) for group in optimizer.param_groups for tensor in group["params"]]
    meant = [stands_for.get(tensor, tensor) for tensor, _ in tensors]
    found = _find_places(walk.root, [one for one in meant if isinstance(one, torch.Tensor)])
    result = []
    for number, (tensor, group) in enumerate(tensors):
        target = meant[number]
        if not isinstance(target, torch.Tensor):
            places = tuple(Placed(shards.name, role_of(shards), shards) for shards in target)
        elif id(target) in found:
            places = tuple(_copy_of(place, target, tensor) for place in found[id(target)])
        else:
            raise StateError(
                f"{name_of(path)}: parameter {number} of the optimizer is in no module of the "
                "state\n"
                f"It has shape {tuple(tensor.shape)} and no name. Put its module into the state, "
                "wrapped in remesh.sharding.LocalNonpersistentObject if it is not to be stored; "
                "if the tensor stands for a parameter, say so with "
                "remesh.sharding.DescribedOptimizer."
            )
        own = leaf.own_key if tensor in stands_for else None
        state = packed_state.get(number, {})
        result.append(OptimizedTensor(tensor, places, group, state, own))
        check_not_a_bare_shard(result[-1], (*path, "state"))
    return result


def _tell_of_missing_state(parameters: list[OptimizedTensor], where: str) -> None:
    """Log if some parameters have state and others do not.

    That may be right, for those that had no gradient yet. It is also how state is lost that an
    offloading optimizer keeps elsewhere.
    """
    trained = [p for p in parameters if p.tensor.requires_grad and p.held]
    without = [place.name for p in trained if not p.packed_state for place in p.places]
    if without and any(p.packed_state for p in trained):
        _log.warning(
            "%s: %d parameters have no state in the optimizer, others do\n"
            "None is stored for them: %s%s",
            where,
            len(without),
            ", ".join(without[:_MAX_LISTED]),
            ", ..." if len(without) > _MAX_LISTED else "",
        )


def _copy_of(place: Placed, parameter: torch.Tensor, tensor: torch.Tensor) -> Placed:
    """The place of a tensor that is a parameter or a copy of it."""
    alike = isinstance(tensor, DTensor) == isinstance(parameter, DTensor)
    if tensor is parameter or (place.shards is None and alike and tensor.shape == parameter.shape):
        return place
    where = f"the copy of {place.name}"
    shards = place.shards
    if shards is None:  # such as a plain copy of this rank's part of a DTensor
        parts = parts_of(parameter, where)
        shards = ShardedTensor(place.name, tuple(parameter.shape), parts, None)
    copied = parts_like(shards, parameter, tensor, where)
    return dataclasses.replace(place, shards=dataclasses.replace(shards, parts=copied))


def _find_places(root: object, tensors: Iterable[torch.Tensor]) -> dict[int, tuple[Placed, ...]]:
    """The places of parameters, by identity, from the modules in a state.

    The first name of a parameter counts. If several modules give one name to parameters, the names
    of all parameters begin with the path of their module. Within a module, parameters of one name
    are shards of one tensor.
    """
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, tuple[Path, tuple[Placed, ...]]] = {}
    for path, leaf in _modules_in(root, ()):
        _reshard(module_of(leaf))
        own = placed_parameters(
            leaf, lambda tensor: id(tensor) in wanted and id(tensor) not in found, name_of(path)
        )
        found.update({id(tensor): (path, _with_full_names(path, places)) for tensor, places in own})
    homes = {(place.name, path) for path, places in found.values() for place in places}
    if len({name for name, _ in homes}) == len(homes):
        return {key: places for key, (_, places) in found.items()}
    return {
        key: tuple(
            dataclasses.replace(place, name=name_of((*path, place.name))) for place in places
        )
        for key, (path, places) in found.items()
    }


def _with_full_names(path: Path, places: tuple[Placed, ...]) -> tuple[Placed, ...]:
    return tuple(
        dataclasses.replace(place, full_name=name_of((*path, place.name))) for place in places
    )


def _modules_in(node: object, path: Path) -> Iterator[tuple[Path, nn.Module | NamedModule]]:
    if isinstance(node, nn.Module | NamedModule):
        yield path, node
    elif isinstance(node, LocalNonpersistentObject):
        yield from _modules_in(node.obj, path)
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _modules_in(child, (*path, key))
    elif isinstance(node, list | tuple):
        for number, child in enumerate(node):
            yield from _modules_in(child, (*path, number))


def _reshard(module: nn.Module) -> None:
    """Let FSDP2 modules have their sharded parameters, the ones that optimizers know.

    After a forward pass they may still have the gathered ones. `state_dict` does the same.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


# ---------------------------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------------------------


def _describe_groups(
    walk: Walk, path: Path, optimizer: Optimizer, parameters: list[OptimizedTensor]
) -> list[tuple[dict[str, Any], Rebuild]]:
    """Describe the groups; for loading, each with how to get its stored options."""
    base = (*path, "param_groups")
    names = {id(p.tensor): [place.name for place in p.places] for p in parameters}
    stored_groups = _stored_groups(walk.stored, base)
    members: dict[int, list[str]] = {}
    places = []
    for number, group in enumerate(optimizer.param_groups):
        own = list(dict.fromkeys(n for tensor in group["params"] for n in names[id(tensor)]))
        places.append(_stored_number(stored_groups, number, own, name_of(path)))
        members.setdefault(places[-1], []).extend(own)
    for place, own in members.items():
        walk.add_merged_list((*base, place, "params"), own)
    walk.description.sequences[base] = "list"
    options: dict[int, Rebuild] = {}
    for place, group in zip(places, optimizer.param_groups, strict=True):
        if place not in options:
            options[place] = _describe_options(walk, (*base, place), group)
    return [
        (group, options[place]) for place, group in zip(places, optimizer.param_groups, strict=True)
    ]


def _describe_options(walk: Walk, path: Path, group: Mapping[str, Any]) -> Rebuild:
    live = {option: value for option, value in group.items() if option not in NO_OPTIONS}
    if walk.stored is None:
        return walk.visit(path, live)
    # An option that the checkpoint does not know is no loss: it is newer than the checkpoint.
    walk.description.optional.update(name_of(leaf_path) for leaf_path, _ in leaves_of(live, path))
    return describe_copy(walk, path, live)


def _stored_groups(stored: Stored | None, base: Path) -> list[list[str]]:
    groups: list[list[str]] = []
    while stored is not None:
        names = stored.merged_list(name_of((*base, len(groups), "params")))
        if names is None:
            break
        groups.append(names)
    return groups


def _stored_number(stored_groups: list[list[str]], number: int, own: list[str], where: str) -> int:
    """The number of the stored group that a live group is, by the names of its parameters.

    A group of which nothing is stored gets a number that no stored group has, and so its options
    stay as they are.
    """
    if not own or not stored_groups:
        return number
    known = set(own)
    homes = [place for place, names in enumerate(stored_groups) if not known.isdisjoint(names)]
    if len(homes) > 1:
        listed = "; ".join(
            f"{', '.join(sorted(known.intersection(stored_groups[place]))[:3])} in stored group "
            f"{place}"
            for place in homes
        )
        raise StateError(
            f"{where}: the parameters of group {number} are in different groups\n"
            f"Those of the checkpoint are ({listed}), whose options may differ. Split the "
            "group in the same way."
        )
    return homes[0] if homes else len(stored_groups) + number


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group its stored options; tensors among them keep their identity."""
    for option, value in options.items():
        live = group.get(option)
        if option in _OF_THIS_MACHINE:
            continue
        if isinstance(live, torch.Tensor):
            with torch.no_grad():
                live.copy_(torch.as_tensor(value))
        elif isinstance(value, torch.Tensor) and not isinstance(group.get("lr"), torch.Tensor):
            # Saved by an optimizer with a tensor as learning rate; this one computes with numbers.
            group[option] = value.item() if value.numel() == 1 else value
        else:
            group[option] = copy.deepcopy(value)


def _packs_states(optimizer: Optimizer, parameters: Sequence[OptimizedTensor]) -> bool:
    """True if the states in its `state_dict` may have another form than those it steps with.

    That of bitsandbytes puts quantised state into a dict of its own. Without a state to look at, a
    class that overrides both methods may do so.
    """
    kind = type(optimizer)
    is_torchs = (
        kind.state_dict is Optimizer.state_dict or kind.load_state_dict is Optimizer.load_state_dict
    )
    known = [one for one in parameters if optimizer.state.get(one.tensor)]
    is_same = all(one.packed_state.keys() == optimizer.state[one.tensor].keys() for one in known)
    return not is_torchs and not (known and is_same)


def _load_by_itself(
    optimizer: Optimizer,
    packed_states: Mapping[torch.Tensor, Mapping[str, Any]],
    extras: Mapping[str, Any],
) -> None:
    """Hand an optimizer packed states, and what its `state_dict` has beyond torch's two entries.

    Only its own `load_state_dict` knows what to do with them, but torch's part of that method
    makes new groups and casts the state to the dtype of the parameters, which is undone here.
    """
    groups, members = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]
    state = {tensor: dict(entries) for tensor, entries in optimizer.state.items()}
    tensors = [tensor for group in groups for tensor in group["params"]]
    packed = optimizer.state_dict()
    states = {
        number: dict(packed_states[tensor])
        for number, tensor in enumerate(tensors)
        if tensor in packed_states
    }
    optimizer.load_state_dict({**packed, "state": packed["state"] | states, **extras})
    for group, options in zip(groups, members, strict=True):
        group.update(options)
    optimizer.param_groups = groups
    for tensor, entries in state.items():
        if tensor not in packed_states:
            optimizer.state[tensor] = entries
    for tensor, loaded in packed_states.items():
        entries = optimizer.state[tensor]
        entries.update({key: loaded[key] for key in entries.keys() & loaded.keys()})


# ---------------------------------------------------------------------------------------------
# ZeroRedundancyOptimizer
# ---------------------------------------------------------------------------------------------


def _is_zero_redundancy(optimizer: object) -> bool:
    """True if this is torch's ZeroRedundancyOptimizer.

    The class is asked for by name, because importing its module compiles code and takes seconds.
    """
    return any(kind.__module__ == _ZERO_REDUNDANCY for kind in type(optimizer).__mro__)


def _describe_zero_redundancy(walk: Walk, path: Path, optimizer: Any) -> Rebuild:
    """Describe this rank's part of a ZeroRedundancyOptimizer.

    Parameters are given to ranks whole, so there is nothing to cut: each rank holds an ordinary
    optimizer over its own, which is described as it is. The names in its groups are merged over the
    ranks, and loading takes the state of whichever parameters a rank has now. The groups that the
    trainer sees belong to the wrapper, which copies their options into the local ones at every
    step.
    """
    local: Optimizer = optimizer.optim
    _copy_options(optimizer.param_groups, local.param_groups)
    rebuild_local = describe_optimizer(walk, path, local)

    def rebuild(loaded: Loaded) -> Any:
        rebuild_local(loaded)
        _copy_options(local.param_groups, optimizer.param_groups)
        return optimizer

    return rebuild


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Give groups the options of others, keeping their parameters."""
    for options, group in zip(source, target, strict=True):
        group.update({option: value for option, value in options.items() if option != "params"})
