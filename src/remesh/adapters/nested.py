"""Nested state that a checkpoint decides about: state dicts of objects, states of optimizers.

A tensor of a module is there before loading and is filled in place. Other state comes and goes: a
fresh optimizer has none, a data loader may have kept one buffer or three when it was saved. For
such state the checkpoint decides which leaves there are. The live state is only a template: it
says of which type containers are and where tensors should lie, and its leaves are asked for, too,
where the checkpoint says nothing about their place, so that they are found missing.

The result is built anew from what was read, and given to its owner. Live memory is written only
where the caller's `allocate` hands it out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from remesh.adapters.memory import torch_dtype
from remesh.adapters.tensor import is_in_parts
from remesh.adapters.tensor_subclass import new_like
from remesh.core import values
from remesh.core.dtypes import BY_NAME
from remesh.core.state import (
    TENSOR_RECORD,
    Loaded,
    Path,
    Rebuild,
    Role,
    Stored,
    Walk,
    assemble,
    name_of,
    numbered_like,
)

Target = Callable[[Path, tuple[str, tuple[int, ...]] | None, Any], Any]
"""Gives the array that a stored tensor is read into: called with its path, its dtype name and
global shape, and the live leaf there (None if there is none). For a live tensor that is made of
others dtype and shape are None."""


def describe_copy(walk: Walk, path: Path, live: object) -> Rebuild:
    """Describe nested state that is loaded into a copy, which rebuilding returns."""
    if walk.stored is None:
        return walk.visit(path, live)
    return describe_stored(walk, walk.stored, path, live, target=_like_live, visit=walk.visit)


def describe_stored(
    walk: Walk,
    stored: Stored,
    path: Path,
    live: object,
    *,
    target: Target,
    visit: Callable[[Path, Any], Rebuild],
) -> Rebuild:
    """Describe the state that is stored under a path, for loading.

    `visit` describes the arrays that are read into, and live state of which nothing is stored.
    """
    leaves = dict(leaves_of(live, path))
    rebuilds: dict[Path, Rebuild] = {}
    found_leaves = stored.under(path)
    recorded = {leaf_path[:-1] for leaf_path, _ in found_leaves if leaf_path[-1] == TENSOR_RECORD}
    # Live tensors that are made of others, in the state or where it is stored.
    in_parts = {
        leaf_path: leaf
        for leaf_path, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor) and (leaf_path in recorded or is_in_parts(leaf))
    }
    for leaf_path, name in found_leaves:
        beginnings = (leaf_path[:end] for end in range(len(leaf_path) + 1) if in_parts)
        whole = next((one for one in beginnings if one in in_parts), None)
        if whole is not None:
            if whole not in rebuilds:
                rebuilds[whole] = visit(whole, target(whole, None, in_parts[whole]))
            continue
        found = stored.tensor(name)
        if found is not None:
            rebuilds[leaf_path] = visit(leaf_path, target(leaf_path, found, leaves.get(leaf_path)))
        elif stored.has_value(name) and name not in walk.description.merged_lists:
            rebuilds[leaf_path] = walk.add_value(leaf_path, None)
    containers = {leaf[:end] for leaf in rebuilds for end in range(len(path), len(leaf))}
    decided = {*rebuilds, *stored.sequences}
    for node_path, node in _undecided(live, path, containers=containers, decided=decided):
        rebuilds[node_path] = visit(node_path, node)

    def rebuild(loaded: Loaded) -> object:
        filled = {leaf_path: make(loaded) for leaf_path, make in rebuilds.items()}
        if path in filled:
            return filled[path]
        return _in_containers_of(live, assemble(filled, stored.sequences, path))

    return rebuild


def leaves_of(node: object, path: Path) -> list[tuple[Path, object]]:
    """Paths and content of the leaves of a state, taken apart as `Walk.visit` does."""
    children = children_of(node)
    if not children:
        return [(path, node)]
    return [leaf for key, child in children for leaf in leaves_of(child, (*path, key))]


def children_of(node: object) -> list[tuple[str | int, object]]:
    """The entries of a container of a state; none for a leaf."""
    if isinstance(node, Mapping) and all(isinstance(key, str | int) for key in node):
        return list(node.items())
    if isinstance(node, list | tuple) and not values.is_plain(node):
        return list(enumerate(node))
    return []


def _undecided(
    live: object, path: Path, *, containers: set[Path], decided: set[Path]
) -> Iterator[tuple[Path, object]]:
    """The parts of the live state about whose places the checkpoint says nothing.

    It decides about the places of its leaves, about its sequences, whose length it knows, and
    where it has a container the live state cannot have a leaf. Numbers as keys (of a `Counter` of
    milestones, say) are content and not the names of entries, so it decides about them, too.
    """
    if path not in containers:
        if path not in decided:
            yield path, live
    elif isinstance(live, Mapping) and path not in decided:
        for key, child in live.items():
            if isinstance(key, int):
                continue
            yield from _undecided(child, (*path, key), containers=containers, decided=decided)


def _in_containers_of(live: object, built: Any) -> Any:
    """The built state with the container types of the live one, such as `Counter`."""
    if isinstance(live, Mapping) and isinstance(built, dict):
        children = {
            key: _in_containers_of(live.get(key), new)
            for key, new in numbered_like(live, built).items()
        }
        if type(live) is dict or not isinstance(live, MutableMapping):
            return children
        container = copy.copy(live)
        container.clear()
        container.update(children)
        return container
    if isinstance(live, list | tuple) and isinstance(built, list | tuple):
        padded = [*live, *[None] * len(built)]
        children_of_sequence = [
            _in_containers_of(old, new) for old, new in zip(padded, built, strict=False)
        ]
        if hasattr(live, "_fields") and len(live) == len(built):
            return type(live)(*children_of_sequence)
        return type(built)(children_of_sequence)
    return built


def _like_live(
    _path: Path, found: tuple[str, tuple[int, ...]] | None, live: Any
) -> torch.Tensor | npt.NDArray[Any]:
    """A new array with the layout of the live one; on the CPU and whole where there is none."""
    if found is None:
        return new_like(live)
    dtype, shape = found
    if isinstance(live, np.ndarray) and BY_NAME[dtype].is_native:
        return np.empty(shape, dtype=BY_NAME[dtype].carrier)
    if isinstance(live, torch.Tensor) and tuple(live.shape) == shape:
        return torch.empty_like(live.detach(), dtype=torch_dtype(dtype))
    return torch.empty(shape, dtype=torch_dtype(dtype))


# ---------------------------------------------------------------------------------------------
# Objects with a state dict: schedulers, scalers, data loaders, one's own
# ---------------------------------------------------------------------------------------------


def is_stateful(node: object) -> bool:
    """True if an object, not a class, has `state_dict` and `load_state_dict`."""
    methods = (getattr(node, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not isinstance(node, type)


def describe_stateful(walk: Walk, path: Path, node: Any) -> Rebuild:
    """Describe an object with a state dict; rebuilding loads it and returns the same object."""
    rebuild_state = describe_copy(walk, path, node.state_dict())

    def rebuild(loaded: Loaded) -> Any:
        state = rebuild_state(loaded)
        try:
            node.load_state_dict(state)
        except Exception as error:
            error.add_note(f"{name_of(path)}: {type(node).__name__} refuses what is stored for it")
            raise
        return node

    return rebuild


def describe_generator(walk: Walk, path: Path, generator: torch.Generator) -> Rebuild:
    """Describe a random number generator; rebuilding sets its state and returns it."""
    state = generator.get_state()
    walk.add_array(path, state, Role.ASSUMED)

    def rebuild(_loaded: Loaded) -> torch.Generator:
        generator.set_state(state)
        return generator

    return rebuild
