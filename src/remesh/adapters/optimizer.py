"""Optimizers: state by the names of parameters, so that it can be loaded into any other layout.

An optimizer numbers its parameters, in an order that depends on the layout. What is stored says
their names instead, which are looked up by identity in the modules of the same state and are the
names that torch's own `get_optimizer_state_dict` gives:

* `state.<parameter>.<key>`: tensors and values of the optimizer's state. A parameter without state
  (frozen, or not stepped yet) has none here either.
* `param_groups.<number>.<option>`: the options of each group.
* `param_groups.<number>.params`: the names of its parameters. With pipeline parallelism a rank
  knows only its own; the union is stored.

Usually a tensor of an optimizer is a parameter, and state of the parameter's shape is cut like the
parameter. Whole tensors and DTensors, and their state, say themselves what they are. For all others
it follows from the parameter's description: the state is viewed as the parameter is (`parts_like`).
A tensor may stand for parts of several parameters, as the flat buffers of ZeRO and FSDP1 do; then
so does each of its moments, and what has no such shape (the step) belongs to each of them. So state
is described once for each parameter of which a tensor has something.

Loading goes by what is stored. Parameters are matched by name, whatever their order. State that a
fresh optimizer does not have yet is allocated as the optimizer would allocate it: like the
parameter if it has the parameter's shape, so that the moments of a DTensor are DTensors. Nothing
changes in the optimizer until all has been read. Then its groups are updated, never replaced,
because schedulers hold on to them. Options that say how to compute on this machine rather than
what (`fused`, `foreach`, ...) stay what they are: they decide where `step` has to be.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from remesh._repr import listed, short_repr
from remesh.adapters.declared import (
    NamedModule,
    Placed,
    add_shards,
    has_form_of,
    local_of,
    module_of,
    parts_like,
    parts_of,
)
from remesh.adapters.dtensor import local_tensor
from remesh.adapters.memory import torch_dtype
from remesh.adapters.module import placed_parameters
from remesh.adapters.nested import (
    children_of,
    describe_copy,
    describe_stored,
    leaves_of,
)
from remesh.adapters.tensor import amend, describe_tensor
from remesh.adapters.tensor_subclass import is_of_torchao
from remesh.core.geometry import Box
from remesh.core.sharded import LocalNonpersistentObject, ShardedTensor
from remesh.core.state import (
    TENSOR_RECORD,
    Loaded,
    Path,
    Rebuild,
    Role,
    Stored,
    Walk,
    name_of,
    role_of,
)
from remesh.errors import StateError

_log = logging.getLogger("remesh")
_ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer"
_OF_THIS_MACHINE = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NO_OPTIONS = frozenset({"params", "param_names"})
"""Entries of a group that say what is in it."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Optimized:
    """A tensor in the groups of an optimizer."""

    tensor: torch.Tensor  # the tensor itself
    places: tuple[Placed, ...]
    """The parameters that it is, or consists of; one, unless all have shards."""
    group: Mapping[str, Any]  # the live group that it is in
    packed_state: Mapping[str, Any]  # what the optimizer keeps for it at present; empty if nothing
    own_key: str | None = None
    """Under which key of the state the tensor itself is stored; None if it is not."""
    is_of_torch: bool = False  # is what makes its state, which takes the parameter's dtype then

    @property
    def state(self) -> Mapping[str, Any]:
        """The state that would be stored for it at present."""
        if self.own_key is None:
            return self.packed_state
        return {**self.packed_state, self.own_key: self.tensor.detach()}

    @property
    def held(self) -> list[Placed]:
        """The places of which this rank has something."""
        return [one for one in self.places if one.shards is None or one.shards.parts]


def describe_optimizer(walk: Walk, path: Path, leaf: Optimizer | DescribedOptimizer) -> Rebuild:
    """Describe an optimizer; loading changes it in place and returns the same leaf."""
    # The class is asked for by name: importing its module compiles code and takes seconds.
    if any(kind.__module__ == _ZERO_REDUNDANCY for kind in type(leaf).__mro__):
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
    stored, base = walk.stored, (*path, "state")
    packs = _packs_states(optimizer)
    stored_groups = _stored_groups(stored, (*path, "param_groups"))
    known = {name for names in stored_groups for name in names}
    parameters = _parameters_of(walk, path, leaf, packed["state"], known)
    if stored is not None:
        parameters = [_with_first_state(optimizer, p, stored, base) for p in parameters]
        if any(parameter.is_of_torch for parameter in parameters) and not packs:
            parameters = _with_needed_states(optimizer, parameters, stored, path, stored_groups)
    else:
        if is_of_torchao(optimizer):
            parameters = [_without_empty_shards(parameter) for parameter in parameters]
        _tell_of_missing_state(parameters, name_of(path))
    rebuild_extras = {
        key: describe_copy(walk, (*path, key), value)
        for key, value in packed.items()
        if key not in {"state", "param_groups"}
    }
    rebuild_other = _describe_others(walk, base, packed["state"], parameters, known)
    rebuild_states = _describe_states(walk, base, parameters)
    rebuild_groups = _describe_groups(walk, path, optimizer, parameters, stored_groups)

    def rebuild(loaded: Loaded) -> Optimizer | DescribedOptimizer:
        packed_states: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, make in rebuild_states:
            entries: dict[str, Any] = make(loaded)
            if parameter.own_key is not None:
                del entries[parameter.own_key]  # the tensor itself, which is filled in place
            if packs:
                packed_states[parameter.tensor] = entries
            else:
                own = optimizer.state[parameter.tensor]
                own.update({key: _as_counted(new, own.get(key)) for key, new in entries.items()})
        for key, make in rebuild_other.items():
            optimizer.state[key] = make(loaded)
        filled: set[int] = set()
        for group, make in rebuild_groups:
            _set_options(group, make(loaded), filled)
        if rebuild_extras or packed_states:
            extras = {key: make(loaded) for key, make in rebuild_extras.items()}
            _load_by_itself(optimizer, packed_states, extras)
        # The step with which torch ends a load: it brings state of older versions up to date.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        return leaf

    return rebuild


def _as_counted(loaded: Any, own: Any) -> Any:
    """What was loaded; if an optimizer counts its steps in numbers, as a number."""
    if isinstance(own, int | float) and isinstance(loaded, torch.Tensor) and not loaded.ndim:
        return type(own)(loaded.item())
    return loaded


def _describe_others(
    walk: Walk,
    base: Path,
    packed_state: Mapping[Any, Any],
    parameters: list[_Optimized],
    known: set[str],
) -> dict[Any, Rebuild]:
    """Describe state that is of no parameter, live or stored, by its key."""
    others = {
        key: value
        for key, value in packed_state.items()
        if not (isinstance(key, int) and key < len(parameters))
    }
    if walk.stored is not None and known:
        names = known.union(place.name for parameter in parameters for place in parameter.places)
        beginnings = tuple(f"{name_of((*base, name))}." for name in names)
        for leaf, name in walk.stored.under(base):
            if not name.startswith(beginnings):
                others.setdefault(leaf[len(base)], None)
    return {key: describe_copy(walk, (*base, key), value) for key, value in others.items()}


# ---------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------


def _parameters_of(
    walk: Walk,
    path: Path,
    leaf: Optimizer | DescribedOptimizer,
    packed_state: Mapping[Any, Any],
    known: set[str],
) -> list[_Optimized]:
    if not isinstance(leaf, DescribedOptimizer):
        leaf = DescribedOptimizer(leaf, {})
    optimizer, stands_for = leaf.optimizer, leaf.stands_for
    tensors = [(tensor, group) for group in optimizer.param_groups for tensor in group["params"]]
    meant = [stands_for.get(tensor, tensor) for tensor, _ in tensors]
    found = _find_places(walk.root, [one for one in meant if isinstance(one, torch.Tensor)], known)
    is_of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
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
        result.append(_Optimized(tensor, places, group, state, own, is_of_torch))
    return result


def _tell_of_missing_state(parameters: list[_Optimized], where: str) -> None:
    """Log if some parameters have state and others do not.

    That may be right, for those that had no gradient yet. It is also how state is lost that an
    offloading optimizer keeps elsewhere.
    """
    trained = [p for p in parameters if p.tensor.requires_grad and p.held]
    without = [place.name for p in trained if not p.packed_state for place in p.places]
    if without and any(p.packed_state for p in trained):
        _log.warning(
            "%s: %d parameters have no state in the optimizer, others do\n"
            "None is stored for them: %s",
            where,
            len(without),
            listed(without, 3),
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


def _find_places(
    root: object, tensors: Iterable[torch.Tensor], known: set[str]
) -> dict[int, tuple[Placed, ...]]:
    """The places of parameters, by identity, from the modules in a state.

    The first name of a parameter counts. If several modules give one name to parameters, the names
    of all parameters begin with the path of their module. Within a module, parameters of one name
    are shards of one tensor. Ranks with other modules may have stored the other form of a name: one
    of the `known` names counts first, if it means one parameter.
    """
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, tuple[Placed, ...]] = {}
    for path, leaf in _modules_in(root, ()):
        for module in module_of(leaf).modules():
            if isinstance(module, FSDPModule):
                # After a forward pass it may have gathered parameters, which no optimizer knows.
                module.reshard()
        own = placed_parameters(
            leaf, lambda tensor: id(tensor) in wanted and id(tensor) not in found, name_of(path)
        )
        for tensor, places in own:
            found[id(tensor)] = tuple(
                dataclasses.replace(one, full_name=name_of((*path, one.name))) for one in places
            )
    homes = {(place.name, place.full_name) for places in found.values() for place in places}
    num_homes = Counter(name for name, _ in homes)

    def named(place: Placed) -> Placed:
        full_name = place.full_name or place.name
        forms = [place.name, full_name] if num_homes[place.name] == 1 else [full_name]
        if len(num_homes) < len(homes):
            forms.reverse()
        name = next((form for form in forms if form in known), forms[0])
        return dataclasses.replace(place, name=name)

    return {key: tuple(map(named, places)) for key, places in found.items()}


def _modules_in(node: object, path: Path) -> Iterator[tuple[Path, nn.Module | NamedModule]]:
    if isinstance(node, nn.Module | NamedModule):
        yield path, node
    elif isinstance(node, LocalNonpersistentObject):
        yield from _modules_in(node.obj, path)
    else:
        for key, child in children_of(node):
            yield from _modules_in(child, (*path, key))


# ---------------------------------------------------------------------------------------------
# States
# ---------------------------------------------------------------------------------------------


def _describe_states(
    walk: Walk, base: Path, tensors: Iterable[_Optimized]
) -> list[tuple[_Optimized, Rebuild]]:
    """Describe the state of each tensor that has any, live or stored."""
    rebuilds: list[tuple[_Optimized, Rebuild]] = []
    known: dict[str, object] = {}
    for tensor in tensors:
        if any(place.shards is None for place in tensor.held):
            _check_not_a_bare_shard(tensor, base)
        if walk.stored is not None:
            makes = _describe_stored(walk, walk.stored, base, tensor)
            if makes:
                rebuilds.append((tensor, _in_common(makes, (*base, tensor.held[0].name))))
        elif tensor.state:
            for place in tensor.held:
                _visit(walk, tensor, place, known, (*base, place.name), tensor.state)
    return rebuilds


def _describe_stored(walk: Walk, stored: Stored, base: Path, tensor: _Optimized) -> list[Rebuild]:
    """Describe the state of a tensor for loading, for each of its parameters."""
    live = dict(leaves_of(tensor.state, ()))
    suffixes = {
        path[len(base) + 1 :]: None
        for place in tensor.held
        for path, _ in stored.under((*base, place.name))
    }
    recorded = [suffix[:-1] for suffix in suffixes if suffix[-1:] == (TENSOR_RECORD,)]
    for suffix in recorded:
        if not isinstance(live.get(suffix), torch.Tensor):
            raise StateError(
                f"{name_of((*base, tensor.held[0].name, *suffix))}: a tensor that is made of "
                "others is stored, and the optimizer keeps none\n"
                "Construct it as the one that was saved"
            )
    targets: dict[Path, Any] = {
        suffix: _target(stored, base, tensor, suffix, live.get(suffix))
        for suffix in suffixes
        if suffix[:-1] not in recorded
    }
    makes = []
    for place in tensor.held:
        path = (*base, place.name)
        visit = functools.partial(_visit, walk, tensor, place, {})
        first = len(walk.description.tensors)
        if tensor.state or stored.under(path):
            makes.append(
                describe_stored(
                    walk,
                    stored,
                    path,
                    tensor.state,
                    target=lambda leaf, found, old: (
                        old if found is None else targets[leaf[len(base) + 1 :]]
                    ),
                    visit=visit,
                )
            )
        for suffix, target in targets.items():
            # State that is stored for other parameters of the tensor is found missing for this one.
            name = name_of((*path, *suffix))
            if suffix not in live and stored.tensor(name) is None and not stored.has_value(name):
                visit((*path, *suffix), target)
        amend(walk, first, follows=place.full_name)
    return makes


def _target(
    stored: Stored, base: Path, tensor: _Optimized, suffix: Path, live: object
) -> torch.Tensor | None:
    """What is read into of the state that is stored under a path for each parameter of a tensor.

    A tensor that stands for several parameters has one for all of them. None for values.
    """
    names = [(place, name_of((*base, place.name, *suffix))) for place in tensor.held]
    found = [(place, known) for place, name in names if (known := stored.tensor(name)) is not None]
    if not found:
        return None
    dtype = torch_dtype(found[0][1][0])
    if suffix[-1] != "step" and _follows_dtype(stored, *found[0], tensor):
        dtype = live.dtype if isinstance(live, torch.Tensor) else tensor.tensor.dtype
    shapes = [_resized(stored, place, tensor, shape) for place, (_, shape) in found]
    is_shard = suffix[-1] != "step" and all(
        place.shards is not None and place.shards.global_shape == shape
        for (place, _), shape in zip(found, shapes, strict=True)
    )
    if isinstance(live, torch.Tensor):
        fits = has_form_of(live, tensor.tensor) if is_shard else tuple(live.shape) == shapes[0]
        if suffix[-1] == tensor.own_key or (fits and live.dtype == dtype):
            return live
    if is_shard:
        return torch.zeros_like(tensor.tensor.detach(), dtype=dtype)
    return _new_state(tensor, suffix[-1], dtype, shapes[0])


def _in_common(makes: list[Rebuild], path: Path) -> Rebuild:
    """The state of a tensor that stands for several parameters, from that of each of them."""

    def rebuild(loaded: Loaded) -> object:
        state: dict[str, object] = {}
        known: dict[Path, object] = {}
        for entries in [make(loaded) for make in makes]:
            state |= entries
            for suffix, value in leaves_of(entries, ()):
                other = known.setdefault(suffix, value)
                if other is not value and other != value:
                    where = name_of((*path, *suffix))
                    raise StateError(
                        f"{where}: one tensor of the optimizer stands for {len(makes)} parameters\n"
                        f"Different values are stored for them, such as {other!r}; it can keep "
                        "only one"
                    )
        return state

    return rebuild


def _visit(
    walk: Walk,
    tensor: _Optimized,
    place: Placed,
    known: dict[str, object],
    path: Path,
    node: Any,
) -> Rebuild:
    """Describe state of a tensor, or some of it, as that of one parameter.

    `known` has what is no shard, by its name: several shards of a parameter must agree about it.
    """
    shards = place.shards
    role = Role.EQUAL if place.role is Role.EQUAL else Role.ASSUMED

    def describe(_inner: Walk, path: Path, leaf: Any) -> Rebuild | None:
        where, is_saved = name_of(path), shards is not None and walk.stored is None
        if children_of(leaf):
            return None
        if is_saved and where in known:
            _check_same(leaf, known[where], where)
            return lambda _loaded: leaf
        if not isinstance(leaf, torch.Tensor):
            make = walk.visit(path, leaf)
        elif shards is not None and path[-1] != "step" and has_form_of(leaf, tensor.tensor):
            parts = parts_like(shards, tensor.tensor, leaf, where)
            add_shards(walk, path, leaf, place, parts)
            return lambda _loaded: leaf
        else:
            first = len(walk.description.tensors)
            make = describe_tensor(walk, path, leaf, role)
            if shards is not None and is_saved:
                _check_whole(leaf, shards, where)
                # Which parameters share a tensor depends on the layout.
                amend(walk, first, alias_key=None)
        if is_saved:
            known[where] = leaf
        return make

    inner = Walk(walk.root, describe, walk.stored)
    inner.description = walk.description
    return inner.visit(path, node)


def _check_not_a_bare_shard(tensor: _Optimized, base: Path) -> None:
    """Refuse state that is sharded like its parameter but does not say so."""
    parameter = tensor.tensor
    if not isinstance(parameter, DTensor):
        return
    local_shape = local_tensor(parameter).shape
    for leaf_path, leaf in leaves_of(tensor.state, (*base, tensor.held[0].name)):
        if (
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, DTensor)
            and leaf.shape == local_shape != parameter.shape
        ):
            raise StateError(
                f"{name_of(leaf_path)}: the parameter is a DTensor, this state of it a plain "
                f"tensor\nThe parameter has shape {tuple(parameter.shape)}, the state that of its "
                f"local shard, {tuple(local_shape)}. Let the optimizer keep a DTensor "
                "(torch.zeros_like(parameter)), so that its place is known."
            )


def _check_whole(leaf: torch.Tensor, shards: ShardedTensor, where: str) -> None:
    """Refuse state that is not laid out like its tensor, if that is a part of a parameter."""
    if leaf.numel() > 1 and not _is_whole(shards) and not isinstance(leaf, DTensor):
        raise StateError(
            f"{where}: has shape {tuple(leaf.shape)}, its parameter another\n"
            f"That is a shard of shape {tuple(local_of(leaf).shape)} of a tensor of shape "
            f"{shards.global_shape}, so it is not known what part of which state this "
            "is. State of a shard must have its shape or be a single number."
        )


def _is_whole(shards: ShardedTensor) -> bool:
    return [part.box for part in shards.parts] == [Box.whole(shards.global_shape)]


def _check_same(leaf: object, other: object, where: str) -> None:
    """Refuse shards of one parameter that disagree about state that is no shard."""
    both_tensors = isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor)
    same = torch.equal(leaf, other) if both_tensors else leaf == other  # type: ignore[arg-type]
    if not same:
        raise StateError(
            f"{where}: two shards of this parameter on this rank have different values for "
            "it\n"
            f"They are {other!r} and {leaf!r} but it must be one value"
        )


def _follows_dtype(
    stored: Stored, place: Placed, found: tuple[str, tuple[int, ...]], tensor: _Optimized
) -> bool:
    """True if stored state takes on another dtype, as its parameter does, whose dtype it has.

    An optimizer steps only with state of the form that it makes. A number is none of that kind.
    Other optimizers than torch's may make state in float32 always: it gets no narrower dtype.
    """
    known = None if place.full_name is None else stored.tensor(place.full_name)
    if known is None or known[0] != found[0] or (known[1] and not found[1]):
        return False
    old, new = torch_dtype(found[0]), tensor.tensor.dtype
    fits = tensor.is_of_torch or new.itemsize > old.itemsize
    return new.is_floating_point and old != new and fits


def _resized(
    stored: Stored, place: Placed, tensor: _Optimized, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape that stored state takes on if its parameter is stored in another size.

    State follows in those dims in which it is as long as the parameter was; in the others it has
    one element, as a factor of a moment does. State of any other form does not follow.
    """
    wanted = tuple(tensor.tensor.shape) if place.shards is None else place.shards.global_shape
    found = None if place.full_name is None else stored.tensor(place.full_name)
    if found is None or not len(found[1]) == len(wanted) == len(shape):
        return shape
    if any(extent not in {1, old} for extent, old in zip(shape, found[1], strict=True)):
        return shape
    return tuple(
        new if extent == old else extent
        for extent, old, new in zip(shape, found[1], wanted, strict=True)
    )


def _without_empty_shards(tensor: _Optimized) -> _Optimized:
    """A tensor without state of which this rank holds no element.

    Other ranks hold it, and may have it quantised, which an optimizer does not do with nothing.
    """
    state = {
        key: leaf
        for key, leaf in tensor.packed_state.items()
        if not isinstance(leaf, DTensor) or local_tensor(leaf).numel() or not leaf.numel()
    }
    return dataclasses.replace(tensor, packed_state=state)


def _with_first_state(
    optimizer: Optimizer, tensor: _Optimized, stored: Stored, base: Path
) -> _Optimized:
    """A tensor without state with that of a first step, if its stored state needs it.

    Stored state that consists of tensors made of others fills state of the same class only, and
    only the optimizer knows how to make that.
    """
    if tensor.packed_state or all(place.shards is not None for place in tensor.places):
        return tensor
    place = (*base, tensor.places[0].name)
    if not any(path[-1] == TENSOR_RECORD for path, _ in stored.under(place)):
        return tensor
    try:
        stepped, parameter = _stand_in(optimizer, torch.zeros_like(tensor.tensor), tensor.group)
        # A learning rate scheduler puts a `step` of its own into the optimizer, which steps that.
        stepped.__dict__.pop("step", None)
        with torch.compiler.set_stance("force_eager"):
            stepped.step()
    except Exception as error:
        raise StateError(
            f"{name_of(place)}: {type(optimizer).__name__} could not make its state\n"
            f"It tried a step with zero gradients ({type(error).__name__}: {error}); take one "
            "step before loading"
        ) from error
    return dataclasses.replace(tensor, packed_state=stepped.state[parameter])


def _with_needed_states(
    optimizer: Optimizer,
    tensors: list[_Optimized],
    stored: Stored,
    path: Path,
    stored_groups: list[list[str]],
) -> list[_Optimized]:
    """Tensors without state; with new state, if what is stored lacks some that a step needs.

    A step makes state for a tensor that has none. For one that has some, of another optimizer or
    with other options, it takes for granted that all is there. What lacks is found missing then.
    """
    base, result = (*path, "state"), []
    options: dict[tuple[int, int], dict[str, Any]] = {}
    needed: dict[tuple[int, int], frozenset[str]] = {}
    for tensor in tensors:
        state = tensor.packed_state
        leaves = [leaf for one in tensor.held for leaf, _ in stored.under((*base, one.name))]
        keys = {leaf[len(base) + 1] for leaf in leaves} - {tensor.own_key}
        if keys and not state:
            kind = id(tensor.group), tensor.tensor.ndim
            if kind not in needed:
                options[kind] = _options_to_load(stored, path, stored_groups, tensor)
                # Which entries there are depends on neither the size nor the machine.
                small = torch.zeros((1,) * tensor.tensor.ndim, dtype=tensor.tensor.dtype)
                anywhere = options[kind] | dict.fromkeys(_OF_THIS_MACHINE, False)
                needed[kind] = frozenset(_state_before_step(optimizer, small, anywhere))
            if not needed[kind] <= keys:
                state = _state_before_step(optimizer, tensor.tensor, options[kind])
        result.append(dataclasses.replace(tensor, packed_state=state))
    return result


def _options_to_load(
    stored: Stored, path: Path, stored_groups: list[list[str]], tensor: _Optimized
) -> dict[str, Any]:
    """The options that the group of a tensor has once it is loaded."""
    name, options = tensor.held[0].name, dict(tensor.group)
    number = next((place for place, names in enumerate(stored_groups) if name in names), None)
    if number is None:
        return options
    for option in options.keys() - _OF_THIS_MACHINE - _NO_OPTIONS:
        stored_name = name_of((*path, "param_groups", number, option))
        if stored.has_value(stored_name):
            options[option] = stored.value(stored_name)
    return options


def _state_before_step(
    optimizer: Optimizer, tensor: torch.Tensor, group: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The state that a step of torch's optimizers makes for a tensor before it computes.

    Empty for those that make it somewhere else (LBFGS, SparseAdam, Adagrad).
    """
    stand_in, parameter = _stand_in(optimizer, tensor, group)
    # Torch's own: that of a subclass may take its arguments in another way.
    own = (one for one in type(optimizer).__mro__ if one.__module__.startswith("torch.optim"))
    begin = next((vars(one)["_init_group"] for one in own if "_init_group" in vars(one)), None)
    if begin is not None:
        num_lists = len(inspect.signature(begin).parameters) - 2
        begin(stand_in, stand_in.param_groups[0], *([] for _ in range(num_lists)))
    made: Mapping[str, Any] = stand_in.state[parameter]
    return made


def _stand_in(
    optimizer: Optimizer, tensor: torch.Tensor, group: Mapping[str, Any]
) -> tuple[Any, nn.Parameter]:
    """An optimizer, and its one parameter, whose gradient is zero.

    It shares nothing with the live one which a step changes, and has no hooks.
    """
    parameter = nn.Parameter(tensor.detach(), requires_grad=tensor.is_floating_point())
    parameter.grad = torch.zeros_like(parameter.detach())
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in _NO_OPTIONS}
    stand_in: Any = object.__new__(type(optimizer))
    stand_in.__dict__ = {
        **optimizer.__dict__,
        "state": defaultdict(dict),
        "param_groups": [{**options, "params": [parameter]}],
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    return stand_in, parameter


def _new_state(
    parameter: _Optimized, key: str | int, dtype: torch.dtype, shape: tuple[int, ...]
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


# ---------------------------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------------------------


def _describe_groups(
    walk: Walk,
    path: Path,
    optimizer: Optimizer,
    parameters: list[_Optimized],
    stored_groups: list[list[str]],
) -> list[tuple[dict[str, Any], Rebuild]]:
    """Describe the groups; for loading, each with how to get its stored options."""
    base = (*path, "param_groups")
    names = {id(p.tensor): [place.name for place in p.places] for p in parameters}
    members: dict[int, list[str]] = {}
    options: dict[int, Rebuild] = {}
    result = []
    for number, group in enumerate(optimizer.param_groups):
        own = list(dict.fromkeys(n for tensor in group["params"] for n in names[id(tensor)]))
        place = _stored_number(stored_groups, number, own, name_of(path))
        if place not in options:
            walk.add_merged_list((*base, place, "params"), members.setdefault(place, []))
            options[place] = _describe_options(walk, (*base, place), group)
        members[place] += own
        result.append((group, options[place]))
    walk.description.sequences[base] = "list"
    if isinstance(optimizer, torch.optim.LBFGS):
        _check_state_of_all(name_of(path), parameters, [*members.values()], stored_groups)
    return result


def _check_state_of_all(
    where: str, parameters: list[_Optimized], live: list[list[str]], stored: list[list[str]]
) -> None:
    """Refuse another order, and parts, of parameters whose state is one vector of all of them."""
    if stored and stored != live:
        raise StateError(
            f"{where}: other parameters are stored for this LBFGS, or in another order\n"
            "Its state is that of all of them, one after the other. Construct it with "
            f"{', '.join(stored[0])}."
        )
    places = (place for parameter in parameters for place in parameter.places)
    cut = next((one.name for one in places if one.shards and not _is_whole(one.shards)), None)
    if cut is not None:
        raise StateError(
            f"{where}: LBFGS over parts of parameters, as of {cut}, has state of its own on each "
            "rank\nIt fits no other layout. Use DistributedDataParallel, or another optimizer."
        )


def _describe_options(walk: Walk, path: Path, group: Mapping[str, Any]) -> Rebuild:
    live = {option: value for option, value in group.items() if option not in _NO_OPTIONS}
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


def _set_options(group: dict[str, Any], options: Mapping[str, Any], filled: set[int]) -> None:
    """Give a group its stored options; tensors of the same form keep their identity.

    `filled` has the ids of the tensors that groups before have been given.
    """
    for option, value in options.items():
        live = group.get(option)
        # What a scheduler adds to a group is of the kind of its learning rate.
        like = group.get("lr") if live is None and option.endswith("lr") else live
        if option in _OF_THIS_MACHINE:
            continue
        new = copy.deepcopy(value)
        if isinstance(value, torch.Tensor):
            if isinstance(like, int | float) and value.numel() == 1:
                new = value.item()
            elif isinstance(like, torch.Tensor):
                new = new.to(like.device)
        elif isinstance(like, torch.Tensor) and isinstance(value, int | float):
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            is_number = is_whole and like.dtype != torch.bool
            new = torch.full_like(like, value) if like.is_floating_point() or is_number else value
        if (
            isinstance(live, torch.Tensor)
            and isinstance(new, torch.Tensor)
            and (new.shape, new.dtype) == (live.shape, live.dtype)
            # Groups may have a default in common where those that were saved differ.
            and (id(live) not in filled or torch.equal(live, new))
        ):
            filled.add(id(live))
            with torch.no_grad():
                new = live.copy_(new)
        group[option] = new


def _packs_states(optimizer: Optimizer) -> bool:
    """True if the states in its `state_dict` may have another form than those it steps with.

    That of bitsandbytes puts quantised state into a dict of its own; others have hooks for it.
    """
    own, of_torch = type(optimizer), Optimizer
    hooks = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return any(getattr(optimizer, f"_optimizer_{one}_hooks", ()) for one in hooks) or not (
        own.state_dict is of_torch.state_dict or own.load_state_dict is of_torch.load_state_dict
    )


def _load_by_itself(
    optimizer: Optimizer,
    packed_states: Mapping[torch.Tensor, Mapping[str, Any]],
    extras: Mapping[str, Any],
) -> None:
    """Hand an optimizer packed states, and what its `state_dict` has beyond torch's two entries.

    Only its own `load_state_dict` knows what to do with them, but torch's part of that method
    makes new groups and casts the state to the dtype of the parameters, which is undone here:
    between hooks that were registered for before a load, and those for after it.
    """
    groups, members = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]
    state, packed = dict(optimizer.state), optimizer.state_dict()
    tensors = [tensor for group in groups for tensor in group["params"]]
    states = {
        number: dict(packed_states[tensor])
        for number, tensor in enumerate(tensors)
        if tensor in packed_states
    }
    unpacked: dict[str, Any] = {"state": states}  # as the hooks before a load leave it
    undone = []

    def undo(_optimizer: Optimizer) -> None:
        undone.append(True)
        for group, options in zip(groups, members, strict=True):
            group.update(options)
        optimizer.param_groups = groups
        optimizer.state.update({key: one for key, one in state.items() if key not in packed_states})
        for number in states:
            entries, loaded = optimizer.state[tensors[number]], unpacked["state"].get(number, {})
            entries.update({key: loaded[key] for key in entries.keys() & loaded.keys()})

    with contextlib.ExitStack() as hooks:
        # Wrappers, such as that of accelerate, have no hooks.
        if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
            after = optimizer.register_load_state_dict_post_hook(undo, prepend=True)
            before = optimizer.register_load_state_dict_pre_hook(lambda _, o: unpacked.update(o))
            hooks.enter_context(after)
            hooks.enter_context(before)
        optimizer.load_state_dict({**packed, "state": packed["state"] | states, **extras})
    if not undone:  # it is a method of its own, which calls no hooks
        undo(optimizer)


# ---------------------------------------------------------------------------------------------
# ZeroRedundancyOptimizer
# ---------------------------------------------------------------------------------------------


def _describe_zero_redundancy(walk: Walk, path: Path, optimizer: Any) -> Rebuild:
    """Describe this rank's part of a ZeroRedundancyOptimizer, an optimizer over whole parameters.

    The groups that the trainer sees belong to the wrapper, which copies their options into the
    local ones at every step.
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
