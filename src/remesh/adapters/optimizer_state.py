"""State that an optimizer keeps for its tensors, named by the parameters that these stand for.

Usually a tensor of an optimizer is a parameter, and state of the parameter's shape is cut like the
parameter. That is known for whole tensors and DTensors, whose state says itself what it is. For
all others it follows from the parameter's description: the state is viewed as the parameter is
(`parts_like`). A tensor may stand for parts of several parameters, as the flat buffers of ZeRO and
FSDP1 do; then so does each of its moments, and what has no such shape (the step) belongs to each
of these parameters.

State that a fresh optimizer does not have yet is allocated as the optimizer would allocate it. If
a parameter is stored in another size than it has, its state is allocated in the size that it has.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from remesh.adapters.declared import Placed, add_shards, has_form_of, local_of, parts_like
from remesh.adapters.dtensor import local_tensor
from remesh.adapters.memory import alias_key, torch_dtype
from remesh.adapters.nested import (
    describe_stored,
    leaves_of,
    sequences_of,
    visit_with_role,
)
from remesh.adapters.tensor import amend
from remesh.core.geometry import Box
from remesh.core.state import (
    TENSOR_RECORD,
    Path,
    Rebuild,
    Role,
    Stored,
    Walk,
    assemble,
    name_of,
)
from remesh.errors import StateError

NO_OPTIONS = frozenset({"params", "param_names"})
"""Entries of a group that say what is in it."""


@dataclass(frozen=True, slots=True, eq=False)
class OptimizedTensor:
    """A tensor in the groups of an optimizer."""

    tensor: torch.Tensor  # the tensor itself
    places: tuple[Placed, ...]
    """The parameters that it is, or consists of; one, unless all have shards."""
    group: Mapping[str, Any]  # the live group that it is in
    packed_state: Mapping[str, Any]  # what the optimizer keeps for it at present; empty if nothing
    own_key: str | None = None
    """Under which key of the state the tensor itself is stored; None if it is not."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The state that would be stored for it at present."""
        if self.own_key is None:
            return self.packed_state
        return {**self.packed_state, self.own_key: self.tensor.detach()}

    @property
    def holds_elements(self) -> bool:
        return not self.has_shards or any(p.shards and p.shards.parts for p in self.places)

    @property
    def has_shards(self) -> bool:
        """True if its places are described by views of it."""
        return all(place.shards is not None for place in self.places)


def describe_states(
    walk: Walk, base: Path, tensors: Iterable[OptimizedTensor]
) -> list[tuple[OptimizedTensor, Rebuild]]:
    """Describe the state of each tensor that has any, live or stored."""
    rebuilds = []
    known: dict[str, object] = {}
    for tensor in tensors:
        if tensor.has_shards:
            if walk.stored is None:
                _visit_shards(walk, base, tensor, known)
            elif (make := _describe_shards(walk, walk.stored, base, tensor)) is not None:
                rebuilds.append((tensor, make))
            continue
        place = (*base, tensor.places[0].name)
        if walk.stored is None:
            if tensor.state:
                visit_with_role(walk, place, tensor.state, tensor.places[0].role)
        elif tensor.state or walk.stored.under(place):
            rebuilds.append((tensor, _describe_state(walk, walk.stored, place, tensor)))
    return rebuilds


# ---------------------------------------------------------------------------------------------
# Whole tensors and DTensors
# ---------------------------------------------------------------------------------------------


def _describe_state(walk: Walk, stored: Stored, path: Path, tensor: OptimizedTensor) -> Rebuild:
    """Describe the state of one parameter for loading."""

    def allocate(leaf_path: Path, dtype: str, shape: tuple[int, ...], live: object) -> torch.Tensor:
        shape = _resized(stored, tensor.places[0], tuple(tensor.tensor.shape), shape)
        wanted = (shape, torch_dtype(dtype))
        if isinstance(live, torch.Tensor) and (
            leaf_path[-1] == tensor.own_key or (tuple(live.shape), live.dtype) == wanted
        ):
            return live
        return _new_state(tensor, leaf_path[-1], torch_dtype(dtype), shape)

    live = {path for path, leaf in leaves_of(tensor.state, path) if isinstance(leaf, torch.Tensor)}
    for leaf_path, _ in stored.under(path):
        if leaf_path[-1] == TENSOR_RECORD and leaf_path[:-1] not in live:
            raise StateError(
                f"{name_of(leaf_path[:-1])}: a tensor that is made of others is stored, and the "
                "optimizer keeps none\n"
                "Construct it as the one that was saved"
            )
    first = len(walk.description.tensors)
    rebuild = describe_stored(
        walk,
        stored,
        path,
        tensor.state,
        allocate=allocate,
        renew=lambda live_leaf: live_leaf,
        role=tensor.places[0].role,
    )
    amend(walk, first, follows=tensor.places[0].full_name)
    return rebuild


def _resized(
    stored: Stored, place: Placed, wanted: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape that stored state takes on if its parameter is stored in another size.

    State follows in those dims in which it is as long as the parameter was; in the others it has
    one element, as a factor of a moment does. State of any other form does not follow.
    """
    found = None if place.full_name is None else stored.tensor(place.full_name)
    if found is None or not len(found[1]) == len(wanted) == len(shape):
        return shape
    if any(extent not in {1, old} for extent, old in zip(shape, found[1], strict=True)):
        return shape
    return tuple(
        new if extent == old else extent
        for extent, old, new in zip(shape, found[1], wanted, strict=True)
    )


def without_empty_shards(tensor: OptimizedTensor) -> OptimizedTensor:
    """A tensor without state of which this rank holds no element.

    Other ranks hold it, and may have it quantised, which an optimizer does not do with nothing.
    """
    state = {
        key: leaf
        for key, leaf in tensor.packed_state.items()
        if not isinstance(leaf, DTensor) or local_tensor(leaf).numel() or not leaf.numel()
    }
    return dataclasses.replace(tensor, packed_state=state)


def with_first_state(
    optimizer: Optimizer, tensor: OptimizedTensor, stored: Stored, base: Path
) -> OptimizedTensor:
    """A tensor without state with that of a first step, if its stored state needs it.

    Stored state that consists of tensors made of others fills state of the same class only, and
    only the optimizer knows how to make that.
    """
    if tensor.packed_state or tensor.has_shards:
        return tensor
    place = (*base, tensor.places[0].name)
    if not any(path[-1] == TENSOR_RECORD for path, _ in stored.under(place)):
        return tensor
    try:
        state = _state_of_first_step(optimizer, tensor.tensor)
    except Exception as error:
        raise StateError(
            f"{name_of(place)}: {type(optimizer).__name__} could not make its state\n"
            f"It tried a step with zero gradients ({type(error).__name__}: {error}); take one "
            "step before loading"
        ) from error
    return dataclasses.replace(tensor, packed_state=state)


def _state_of_first_step(optimizer: Optimizer, tensor: torch.Tensor) -> Mapping[str, Any]:
    """The state that an optimizer keeps for a tensor after a first step.

    The step is that of an optimizer that shares nothing with the live one which a step changes:
    it has a group with a tensor of zeros, whose gradient is zero, and no hooks.
    """
    like = torch.zeros_like(tensor.detach())
    parameter = nn.Parameter(like, requires_grad=like.is_floating_point())
    parameter.grad = torch.zeros_like(like)
    group = next(g for g in optimizer.param_groups if any(p is tensor for p in g["params"]))
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in NO_OPTIONS}
    stepped: Any = object.__new__(type(optimizer))
    stepped.__dict__ = {
        **optimizer.__dict__,
        "state": defaultdict(dict),
        "param_groups": [{**options, "params": [parameter]}],
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    # A learning rate scheduler puts a `step` of its own into the optimizer, which steps that one.
    stepped.__dict__.pop("step", None)
    with torch.compiler.set_stance("force_eager"):
        stepped.step()
    made: Mapping[str, Any] = stepped.state[parameter]
    return made


def _new_state(
    parameter: OptimizedTensor, key: str | int, dtype: torch.dtype, shape: tuple[int, ...]
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


def check_not_a_bare_shard(parameter: OptimizedTensor, base: Path) -> None:
    """Refuse state that is sharded like its parameter but does not say so."""
    tensor = parameter.tensor
    if not isinstance(tensor, DTensor) or parameter.has_shards or not parameter.state:
        return
    local_shape = local_tensor(tensor).shape
    for leaf_path, leaf in leaves_of(parameter.state, (*base, parameter.places[0].name)):
        if (
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, DTensor)
            and leaf.shape == local_shape != tensor.shape
        ):
            raise StateError(
                f"{name_of(leaf_path)}: the parameter is a DTensor, this state of it a plain "
                f"tensor\nThe parameter has shape {tuple(tensor.shape)}, the state that of its "
                f"local shard, {tuple(local_shape)}. Let the optimizer keep a DTensor "
                "(torch.zeros_like(parameter)), so that its place is known."
            )


# ---------------------------------------------------------------------------------------------
# Tensors that are described by views
# ---------------------------------------------------------------------------------------------


def _visit_shards(
    walk: Walk, base: Path, tensor: OptimizedTensor, known: dict[str, object]
) -> None:
    """Describe the state of a tensor for saving."""
    leaves = leaves_of(tensor.state, ()) if tensor.state else []
    for place in _held(tensor):
        walk.description.sequences.update(sequences_of(tensor.state, (*base, place.name)))
        for suffix, leaf in leaves:
            path = (*base, place.name, *suffix)
            if _is_shard(leaf, suffix, tensor):
                _add_like(walk, path, leaf, tensor, place)
            elif name_of(path) in known:
                _check_same(leaf, known[name_of(path)], name_of(path))
            else:
                known[name_of(path)] = leaf
                _visit_whole(walk, path, leaf, place)


def _describe_shards(
    walk: Walk, stored: Stored, base: Path, tensor: OptimizedTensor
) -> Rebuild | None:
    """Describe the state of a tensor for loading; None if there is none, live or stored."""
    held = _held(tensor)
    live = dict(leaves_of(tensor.state, ())) if tensor.state else {}
    suffixes = dict.fromkeys(live)
    sequences: dict[Path, str] = {}
    for place in held:
        under = (*base, place.name)
        suffixes.update(dict.fromkeys(path[len(under) :] for path, _ in stored.under(under)))
        for path, kind in stored.sequences.items():
            if path[: len(under)] == under:
                sequences[path[len(under) :]] = kind
    if not held or not suffixes:
        return None
    rebuilds = {
        suffix: _describe_leaf(walk, stored, base, tensor, suffix=suffix, live=live.get(suffix))
        for suffix in suffixes
    }
    return lambda loaded: assemble(
        {suffix: make(loaded) for suffix, make in rebuilds.items()}, sequences
    )


def _describe_leaf(
    walk: Walk, stored: Stored, base: Path, tensor: OptimizedTensor, *, suffix: Path, live: object
) -> Rebuild:
    """Describe a leaf of the state of a tensor for loading."""
    held = [(place, (*base, place.name, *suffix)) for place in _held(tensor)]
    if any(stored.has_value(name_of(path)) for _, path in held):
        makes = [walk.add_value(path, None) for _, path in held]
        return lambda loaded: _one_of([make(loaded) for make in makes], name_of(held[0][1]))
    known = [(place, stored.tensor(name_of(path))) for place, path in held]
    found = [
        (place, tensors[0], _resized(stored, place, place.shards.global_shape, tensors[1]))
        for place, tensors in known
        if tensors is not None and place.shards is not None
    ]
    target = _target(tensor, suffix, found, live) if found else live
    for place, path in held:
        first = len(walk.description.tensors)
        if _is_shard(target, suffix, tensor):
            _add_like(walk, path, target, tensor, place)
        elif isinstance(target, torch.Tensor):
            # One tensor for all parameters: the alias key has them compared.
            walk.add_array(path, target, Role.ASSUMED, alias_key=alias_key(target))
        else:
            walk.add_value(path, target)
        amend(walk, first, follows=place.full_name)
    return lambda _loaded: target


def _one_of(values: list[object], where: str) -> object:
    """The value that all parameters of a tensor have in common."""
    if any(value != values[0] for value in values):
        raise StateError(
            f"{where}: one tensor of the optimizer stands for {len(values)} parameters\n"
            f"Different values are stored for them, such as {values[0]!r}; it can keep only "
            "one"
        )
    return values[0]


def _target(
    tensor: OptimizedTensor,
    suffix: Path,
    found: list[tuple[Placed, str, tuple[int, ...]]],
    live: object,
) -> torch.Tensor:
    """Where stored tensors of the state are read to."""
    if suffix == (tensor.own_key,):
        return tensor.tensor.detach()
    dtype, shape = torch_dtype(found[0][1]), found[0][2]
    is_shard = suffix[-1:] != ("step",) and all(
        place.shards is not None and place.shards.global_shape == stored_shape
        for place, _, stored_shape in found
    )
    if isinstance(live, torch.Tensor) and live.dtype == dtype:
        if _is_shard(live, suffix, tensor) and is_shard:
            return live
        if not is_shard and tuple(live.shape) == shape:
            return live
    if is_shard:
        return torch.zeros_like(tensor.tensor.detach(), dtype=dtype)
    return _new_state(tensor, suffix[-1], dtype, shape)


def _held(tensor: OptimizedTensor) -> list[Placed]:
    """The places of which this rank has something."""
    return [place for place in tensor.places if place.shards is not None and place.shards.parts]


def _is_shard(leaf: object, suffix: Path, tensor: OptimizedTensor) -> bool:
    """True if state is laid out like its tensor."""
    return (
        isinstance(leaf, torch.Tensor)
        and suffix[-1:] != ("step",)
        and has_form_of(leaf, tensor.tensor)
    )


def _add_like(walk: Walk, path: Path, leaf: Any, tensor: OptimizedTensor, place: Placed) -> None:
    assert place.shards is not None
    parts = parts_like(place.shards, tensor.tensor, leaf, name_of(path))
    add_shards(walk, path, leaf, place, parts)


def _visit_whole(walk: Walk, path: Path, leaf: object, place: Placed) -> None:
    """Describe state that is not laid out like its tensor, for saving."""
    assert place.shards is not None
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
        walk.visit(path, leaf)
        return
    is_whole = [part.box for part in place.shards.parts] == [Box.whole(place.shards.global_shape)]
    if leaf.numel() > 1 and not is_whole:
        raise StateError(
            f"{name_of(path)}: has shape {tuple(leaf.shape)}, its parameter another\n"
            f"That is a shard of shape {tuple(local_of(leaf).shape)} of a tensor of shape "
            f"{place.shards.global_shape}, so it is not known what part of which state this "
            "is. State of a shard must have its shape or be a single number."
        )
    # Without an alias key: which parameters share a tensor depends on the layout.
    role = place.role if place.role is Role.EQUAL else Role.ASSUMED
    walk.add_array(path, leaf.detach(), role)


def _check_same(leaf: object, other: object, where: str) -> None:
    """Refuse shards of one parameter that disagree about state that is no shard."""
    same = torch.equal(leaf, other) if _both_tensors(leaf, other) else leaf == other  # type: ignore[arg-type]
    if not same:
        raise StateError(
            f"{where}: two shards of this parameter on this rank have different values for "
            "it\n"
            f"They are {other!r} and {leaf!r} but it must be one value"
        )


def _both_tensors(leaf: object, other: object) -> bool:
    return isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor)
