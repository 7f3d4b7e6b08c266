"""State that an optimizer keeps for its tensors, named by the parameters that these stand for.

Usually a tensor of an optimizer is a parameter, and state of the parameter's shape is cut like the
parameter. That is known for whole tensors and DTensors, whose state says itself what it is. For
all others it follows from the parameter's description: the state is viewed as the parameter is
(`parts_like`). A tensor may stand for parts of several parameters, as the flat buffers of ZeRO and
FSDP1 do; then so does each of its moments, and what has no such shape (the step) belongs to each
of these parameters. So state is described once for each parameter of which a tensor has something.

State that a fresh optimizer does not have yet is allocated as the optimizer would allocate it. If
a parameter is stored in another size than it has, its state is allocated in the size that it has.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
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
from remesh.adapters.memory import torch_dtype
from remesh.adapters.nested import (
    describe_stored,
    leaves_of,
    sequences_of,
    visit_with_role,
)
from remesh.adapters.tensor import amend
from remesh.core.geometry import Box
from remesh.core.sharded import ShardedTensor
from remesh.core.state import (
    TENSOR_RECORD,
    Loaded,
    Path,
    Rebuild,
    Role,
    Stored,
    Walk,
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
    def held(self) -> list[Placed]:
        """The places of which this rank has something."""
        return [one for one in self.places if one.shards is None or one.shards.parts]

    @property
    def has_shards(self) -> bool:
        """True if its places are described by views of it."""
        return all(place.shards is not None for place in self.places)


def describe_states(
    walk: Walk, base: Path, tensors: Iterable[OptimizedTensor]
) -> list[tuple[OptimizedTensor, Rebuild]]:
    """Describe the state of each tensor that has any, live or stored."""
    rebuilds: list[tuple[OptimizedTensor, Rebuild]] = []
    known: dict[str, object] = {}
    for tensor in tensors:
        if walk.stored is not None:
            makes = _describe_stored(walk, walk.stored, base, tensor)
            if makes:
                path = (*base, tensor.held[0].name)
                rebuilds.append((tensor, makes[0] if len(makes) == 1 else _in_common(makes, path)))
        elif tensor.state:
            for place in tensor.held:
                _visit(walk, tensor, place, known, (*base, place.name), tensor.state)
    return rebuilds


def _describe_stored(
    walk: Walk, stored: Stored, base: Path, tensor: OptimizedTensor
) -> list[Rebuild]:
    """Describe the state of a tensor for loading, for each of its parameters."""
    live = dict(leaves_of(tensor.state, ())) if tensor.state else {}
    targets = _targets(stored, base, tensor, live)
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
                    allocate=lambda leaf, *_: targets[leaf[len(base) + 1 :]],
                    renew=lambda live_leaf: live_leaf,
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


def _targets(
    stored: Stored, base: Path, tensor: OptimizedTensor, live: Mapping[Path, object]
) -> dict[Path, Any]:
    """What stored state is read into, by its path within the state of a parameter; None for values.

    A tensor that stands for several parameters has one tensor for all of them.
    """
    found: dict[Path, list[tuple[Placed, str, tuple[int, ...]]]] = {}
    for place in tensor.held:
        path = (*base, place.name)
        leaves = [(leaf_path[len(path) :], name) for leaf_path, name in stored.under(path)]
        recorded = [suffix[:-1] for suffix, _ in leaves if suffix[-1] == TENSOR_RECORD]
        for suffix in recorded:
            if not isinstance(live.get(suffix), torch.Tensor):
                raise StateError(
                    f"{name_of((*path, *suffix))}: a tensor that is made of others is stored, and "
                    "the optimizer keeps none\n"
                    "Construct it as the one that was saved"
                )
        for suffix, name in leaves:
            if suffix[:-1] in recorded:
                continue
            known = stored.tensor(name)
            ones = found.setdefault(suffix, [])
            if known is not None:
                ones.append((place, known[0], _resized(stored, place, tensor, known[1])))
    return {
        suffix: _target(tensor, suffix, ones, live.get(suffix)) if ones else None
        for suffix, ones in found.items()
    }


def _target(
    tensor: OptimizedTensor,
    suffix: Path,
    found: list[tuple[Placed, str, tuple[int, ...]]],
    live: object,
) -> torch.Tensor:
    """What tensors that are stored for the parameters of a tensor are read into."""
    dtype, shape = torch_dtype(found[0][1]), found[0][2]
    is_shard = suffix[-1] != "step" and all(
        place.shards is not None and place.shards.global_shape == of_place
        for place, _, of_place in found
    )
    if isinstance(live, torch.Tensor):
        fits = has_form_of(live, tensor.tensor) if is_shard else tuple(live.shape) == shape
        if suffix[-1] == tensor.own_key or (fits and live.dtype == dtype):
            return live
    if is_shard:
        return torch.zeros_like(tensor.tensor.detach(), dtype=dtype)
    return _new_state(tensor, suffix[-1], dtype, shape)


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
    tensor: OptimizedTensor,
    place: Placed,
    known: dict[str, object],
    path: Path,
    node: Any,
) -> Rebuild:
    """Describe state of a tensor, or some of it, as that of one parameter.

    `known` has what is no shard, by its name: several shards of a parameter must agree about it.
    """
    if place.shards is None:
        return visit_with_role(walk, path, node, place.role)
    walk.description.sequences.update(sequences_of(node, path))
    for leaf_path, leaf in leaves_of(node, path):
        where = name_of(leaf_path)
        if (
            isinstance(leaf, torch.Tensor)
            and leaf_path[-1] != "step"
            and has_form_of(leaf, tensor.tensor)
        ):
            parts = parts_like(place.shards, tensor.tensor, leaf, where)
            add_shards(walk, leaf_path, leaf, place, parts)
        elif walk.stored is not None:
            walk.visit(leaf_path, leaf)
        elif where in known:
            _check_same(leaf, known[where], where)
        else:
            known[where] = leaf
            _visit_whole(walk, leaf_path, leaf, place, place.shards)
    return lambda _loaded: node


def _visit_whole(
    walk: Walk, path: Path, leaf: object, place: Placed, shards: ShardedTensor
) -> None:
    """Describe state that is not laid out like its tensor, for saving."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
        walk.visit(path, leaf)
        return
    is_whole = [part.box for part in shards.parts] == [Box.whole(shards.global_shape)]
    if leaf.numel() > 1 and not is_whole:
        raise StateError(
            f"{name_of(path)}: has shape {tuple(leaf.shape)}, its parameter another\n"
            f"That is a shard of shape {tuple(local_of(leaf).shape)} of a tensor of shape "
            f"{shards.global_shape}, so it is not known what part of which state this "
            "is. State of a shard must have its shape or be a single number."
        )
    # Without an alias key: which parameters share a tensor depends on the layout.
    role = place.role if place.role is Role.EQUAL else Role.ASSUMED
    walk.add_array(path, leaf.detach(), role)


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


def _resized(
    stored: Stored, place: Placed, tensor: OptimizedTensor, shape: tuple[int, ...]
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
