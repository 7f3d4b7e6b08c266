"""Objects with `state_dict` and `load_state_dict`: schedulers, scalers, data loaders, one's own.

Saving stores what `state_dict()` gives, under the path of the object. Loading builds a state dict
from what is stored there (see `remesh.adapters.nested`) and hands it to `load_state_dict`; the
object stays the same object. `torch.Generator` has other names for the same two methods, and its
state is a single tensor of bytes.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch

from remesh.adapters.nested import describe_copy
from remesh.core.state import (
    Loaded,
    Path,
    Rebuild,
    Role,
    Walk,
)


class Stateful(Protocol):
    """What an object needs to be saved and loaded."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists and tuples of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state."""
        ...


def is_stateful(node: object) -> TypeGuard[Stateful]:
    """Whether an object, not a class, has the two methods."""
    methods = (getattr(node, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not isinstance(node, type)


def describe_stateful(walk: Walk, path: Path, node: Stateful) -> Rebuild:
    """Describe an object with a state dict; rebuilding loads it and returns the same object."""
    rebuild_state = describe_copy(walk, path, node.state_dict())

    def rebuild(loaded: Loaded) -> Stateful:
        node.load_state_dict(rebuild_state(loaded))
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
