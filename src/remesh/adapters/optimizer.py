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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from remesh.adapters.dtensor import local_tensor
from remesh.adapters.memory import alias_key, torch_dtype
from remesh.adapters.module import entry_names, ignored_by_ddp, refuse_fsdp1
from remesh.adapters.nested import describe_copy, describe_stored, leaves_of, visit_with_role
from remesh.errors import StateError
from remesh.sharded import LocalNonpersistentObject
from remesh.state import (
    Loaded,
    Path,
    Rebuild,
    Role,
    Stored,
    Walk,
    name_of,
)

_NAMES = frozenset({"params", "param_names"})
_OF_THIS_MACHINE = frozenset({"foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True, slots=True, eq=False)
class _Parameter:
    """A parameter of an optimizer.

    Attributes:
        tensor: The parameter itself.
        name: Its stored name.
        group: The live group that it is in.
        state: What the optimizer keeps for it at present; empty if nothing.
        role: What is known of copies on other ranks of plain tensors of its state.
    """

    tensor: torch.Tensor
    name: str
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    role: Role


def describe_optimizer(walk: Walk, path: Path, optimizer: Optimizer) -> Rebuild:
    """Describe an optimizer; loading changes it in place and returns the same optimizer.

    Raises:
        StateError: If one of its parameters is in no module of the state, a group of it has
            parameters from several stored groups, or its state cannot be stored.
    """
    packed = optimizer.state_dict()
    parameters = _parameters_of(walk, path, optimizer, packed["state"])
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
    rebuild_states = _describe_states(walk, path, parameters)
    rebuild_groups = _describe_groups(walk, path, optimizer, parameters)

    def rebuild(loaded: Loaded) -> Optimizer:
        for parameter, make in rebuild_states:
            optimizer.state[parameter.tensor].update(make(loaded))
        for key, make in rebuild_other.items():
            optimizer.state[key] = make(loaded)
        for group, make in rebuild_groups:
            _set_options(group, make(loaded))
        if rebuild_extras:
            _load_extras(optimizer, {key: make(loaded) for key, make in rebuild_extras.items()})
        # The step with which torch ends a load: it brings state of older versions up to date.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        return optimizer

    return rebuild


# ---------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------


def _parameters_of(
    walk: Walk, path: Path, optimizer: Optimizer, packed_state: Mapping[Any, Any]
) -> list[_Parameter]:
    """The parameters of an optimizer in its own order."""
    tensors = [(tensor, group) for group in optimizer.param_groups for tensor in group["params"]]
    found = _find_names(walk.root, [tensor for tensor, _ in tensors])
    parameters = []
    for number, (tensor, group) in enumerate(tensors):
        if id(tensor) not in found:
            raise StateError(
                f"{name_of(path)}: parameter {number} of the optimizer, of shape "
                f"{tuple(tensor.shape)}, belongs to no module of the state, so it has no name. "
                "Put its module into the state, wrapped in remesh.LocalNonpersistentObject if it "
                "is not to be stored."
            )
        name, role = found[id(tensor)]
        state = packed_state.get(number, {})
        parameters.append(_Parameter(tensor, name, group, state, role))
        _check_not_a_bare_shard(parameters[-1], (*path, "state", name))
    return parameters


def _find_names(root: object, tensors: Iterable[torch.Tensor]) -> dict[int, tuple[str, Role]]:
    """Name and role of parameters, by identity, from the modules in a state.

    The first name of a parameter counts. If modules give one name to different parameters, the
    names of all parameters begin with the path of their module.
    """
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, tuple[Path, str, Role]] = {}
    for path, module in _modules_in(root, ()):
        _reshard(module)
        refuse_fsdp1(module, name_of(path))
        own = {
            raw: parameter
            for raw, parameter in module.named_parameters()
            if id(parameter) in wanted and id(parameter) not in found
        }
        unsynchronised = ignored_by_ddp(module)
        for raw, entry in entry_names(module, own).items():
            equal = isinstance(own[raw], DTensor) or (
                entry.in_ddp and alias_key(own[raw]) not in unsynchronised
            )
            role = Role.EQUAL if equal else Role.ASSUMED
            found[id(own[raw])] = (path, entry.name, role)
    if len({name for _, name, _ in found.values()}) == len(found):
        return {key: (name, role) for key, (_, name, role) in found.items()}
    return {key: (name_of((*path, name)), role) for key, (path, name, role) in found.items()}


def _modules_in(node: object, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    """The modules of a nested state with their paths."""
    if isinstance(node, nn.Module):
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
# State
# ---------------------------------------------------------------------------------------------


def _describe_states(
    walk: Walk, path: Path, parameters: Iterable[_Parameter]
) -> list[tuple[_Parameter, Rebuild]]:
    """Describe the state of each parameter that has any, live or stored."""
    rebuilds = []
    for parameter in parameters:
        place = (*path, "state", parameter.name)
        if walk.stored is None:
            if parameter.state:
                visit_with_role(walk, place, parameter.state, parameter.role)
        elif parameter.state or walk.stored.under(place):
            rebuilds.append((parameter, _describe_state(walk, walk.stored, place, parameter)))
    return rebuilds


def _describe_state(walk: Walk, stored: Stored, path: Path, parameter: _Parameter) -> Rebuild:
    """Describe the state of one parameter for loading."""

    def allocate(leaf_path: Path, dtype: str, shape: tuple[int, ...], live: object) -> torch.Tensor:
        wanted = (shape, torch_dtype(dtype))
        if isinstance(live, torch.Tensor) and (tuple(live.shape), live.dtype) == wanted:
            return live
        return _new_state(parameter, leaf_path[-1], torch_dtype(dtype), shape)

    return describe_stored(
        walk, stored, path, parameter.state, allocate=allocate, role=parameter.role
    )


def _new_state(
    parameter: _Parameter, key: str | int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor of an optimizer's state where and how torch's optimizers make it."""
    tensor = parameter.tensor.detach()
    device = tensor.device
    if key == "step":
        on_device = parameter.group.get("capturable") or parameter.group.get("fused")
        return torch.zeros(shape, dtype=dtype, device=device if on_device else "cpu")
    if shape == tuple(tensor.shape):
        return torch.zeros_like(tensor, dtype=dtype)
    state = torch.zeros(shape, dtype=dtype, device=device)
    if isinstance(tensor, DTensor) and shape:
        mesh = tensor.device_mesh
        return DTensor.from_local(state, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return state


def _check_not_a_bare_shard(parameter: _Parameter, path: Path) -> None:
    """Refuse state that is sharded like its parameter but does not say so."""
    tensor = parameter.tensor
    if not isinstance(tensor, DTensor) or not parameter.state:
        return
    local_shape = local_tensor(tensor).shape
    for leaf_path, leaf in leaves_of(parameter.state, path):
        if (
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, DTensor)
            and leaf.shape == local_shape != tensor.shape
        ):
            raise StateError(
                f"{name_of(leaf_path)}: the parameter is a DTensor of shape "
                f"{tuple(tensor.shape)}, but this state of it is a plain tensor of the shape of "
                f"its local shard, {tuple(local_shape)}. Let the optimizer keep a DTensor "
                "(torch.zeros_like(parameter)), so that its place is known."
            )


# ---------------------------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------------------------


def _describe_groups(
    walk: Walk, path: Path, optimizer: Optimizer, parameters: list[_Parameter]
) -> list[tuple[dict[str, Any], Rebuild]]:
    """Describe the groups; for loading, each with how to get its stored options."""
    base = (*path, "param_groups")
    names = {id(parameter.tensor): parameter.name for parameter in parameters}
    stored_groups = _stored_groups(walk.stored, base)
    members: dict[int, list[str]] = {}
    options: dict[int, Rebuild] = {}
    rebuilds = []
    for number, group in enumerate(optimizer.param_groups):
        own = [names[id(tensor)] for tensor in group["params"]]
        place = _stored_number(stored_groups, number, own, name_of(path))
        if place not in options:
            options[place] = _describe_options(walk, (*base, place), group)
        members.setdefault(place, []).extend(own)
        rebuilds.append((group, options[place]))
    for place, own in members.items():
        walk.add_merged_list((*base, place, "params"), own)
    walk.description.sequences[base] = "list"
    return rebuilds


def _describe_options(walk: Walk, path: Path, group: Mapping[str, Any]) -> Rebuild:
    """Describe the options of one group."""
    live = {option: value for option, value in group.items() if option not in _NAMES}
    if walk.stored is None:
        return walk.visit(path, live)
    # An option that the checkpoint does not know is no loss: it is newer than the checkpoint.
    walk.description.optional.update(name_of(leaf_path) for leaf_path, _ in leaves_of(live, path))
    return describe_copy(walk, path, live)


def _stored_groups(stored: Stored | None, base: Path) -> list[list[str]]:
    """Names of the parameters of each stored group."""
    groups: list[list[str]] = []
    while stored is not None:
        names = stored.merged_list(name_of((*base, len(groups), "params")))
        if names is None:
            break
        groups.append(names)
    return groups


def _stored_number(stored_groups: list[list[str]], number: int, own: list[str], where: str) -> int:
    """Which stored group a live group is, by the names of its parameters.

    A group of which nothing is stored gets a number that no stored group has, and so its options
    stay as they are.

    Raises:
        StateError: If its parameters come from several stored groups.
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
            f"{where}: the parameters of group {number} are in different groups of the checkpoint "
            f"({listed}), whose options may differ. Split the group in the same way."
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


def _load_extras(optimizer: Optimizer, extras: Mapping[str, Any]) -> None:
    """Hand an optimizer what its `state_dict` has beyond torch's two entries.

    Only its own `load_state_dict` knows what to do with that, but torch's part of that method
    makes new groups and casts the state to the dtype of the parameters, which is undone here.
    """
    groups, members = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]
    state = {tensor: dict(entries) for tensor, entries in optimizer.state.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), **extras})
    for group, options in zip(groups, members, strict=True):
        group.update(options)
    optimizer.param_groups = groups
    for tensor, entries in state.items():
        optimizer.state[tensor] = entries
