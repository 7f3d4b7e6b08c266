"""A checkpoint in memory, just enough of one to test what adapters describe.

Every rank turns its description into full tensors with a mask of the elements that it holds
(`capture`); `FakeCheckpoint` merges those of all ranks and checks that copies agree. `restore`
does what a load does, without files, plans or casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from remesh.adapters import describe_leaf, memory_of
from remesh.core import values
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.state import (
    Description,
    Path,
    Role,
    describe,
    name_of,
)


@dataclass
class Captured:
    """One tensor as one rank knows it."""

    dtype: str
    data: npt.NDArray[Any]
    held: npt.NDArray[np.bool_]
    role: Role


@dataclass
class Capture:
    """A rank's description without its functions, so that it can be sent to another process."""

    tensors: dict[str, Captured] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    sequences: dict[Path, str] = field(default_factory=dict)


def capture(state: Any) -> Capture:
    """Describe a state for saving and copy what it holds."""
    return capture_description(describe(state, describe_leaf))


def capture_description(description: Description) -> Capture:
    result = Capture(
        values={name: values.decode(values.encode(v)) for name, v in description.values.items()},
        lists=dict(description.merged_lists),
        paths=dict(description.paths),
        sequences=dict(description.sequences),
    )
    for entry in description.tensors:
        shape = entry.global_shape
        tensor = Captured(
            entry.dtype,
            np.zeros(shape, BY_NAME[entry.dtype].carrier),
            np.zeros(shape, np.bool_),
            entry.role,
        )
        for part in entry.parts:
            piece = np.empty(part.box.shape, tensor.data.dtype)
            memory_of(part.data, entry.name).copy_out(Box.whole(part.box.shape), piece)
            tensor.data[part.box.slices] = piece
            tensor.held[part.box.slices] = True
        result.tensors[entry.name] = tensor
    return result


class FakeCheckpoint:
    """What the ranks captured, merged: it is both `Stored` and `Loaded`."""

    def __init__(self, captures: Sequence[Capture]) -> None:
        self.tensors: dict[str, Captured] = {}
        self.values: dict[str, object] = {}
        self.lists: dict[str, list[str]] = {}
        self.paths: dict[str, Path] = {}
        self._sequences: dict[Path, str] = {}
        self.live: Mapping[str, object] = {}
        for one in captures:
            for name, tensor in one.tensors.items():
                self._merge_tensor(name, tensor)
            self.values.update(one.values)
            for name, names in one.lists.items():
                known = self.lists.setdefault(name, [])
                known += [new for new in names if new not in known]
            self.paths.update(one.paths)
            self._sequences.update(one.sequences)
        for name, tensor in self.tensors.items():
            assert tensor.held.all(), f"no rank holds all of {name}"

    def _merge_tensor(self, name: str, new: Captured) -> None:
        old = self.tensors.get(name)
        if old is None:
            self.tensors[name] = Captured(new.dtype, new.data.copy(), new.held.copy(), new.role)
            return
        assert (old.dtype, old.data.shape, old.role) == (new.dtype, new.data.shape, new.role), name
        both = old.held & new.held
        assert old.data[both].tobytes() == new.data[both].tobytes(), f"copies of {name} differ"
        old.data[new.held] = new.data[new.held]
        old.held |= new.held

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        found = self.tensors.get(name)
        return None if found is None else (found.dtype, found.data.shape)

    def has_value(self, name: str) -> bool:
        return name in self.values

    def merged_list(self, name: str) -> list[str] | None:
        return self.lists.get(name)

    def under(self, path: Path) -> list[tuple[Path, str]]:
        return [(p, name) for name, p in self.paths.items() if p[: len(path)] == path]

    @property
    def sequences(self) -> Mapping[Path, str]:
        return self._sequences

    def value(self, name: str) -> object:
        return self.values[name] if name in self.values else self.live[name]

    def object(self, unique_name: str) -> object:
        raise NotImplementedError(unique_name)

    def names(self) -> set[str]:
        return {*self.tensors, *self.values, *self.lists}


@dataclass
class Restored:
    """What `restore` found.

    Attributes:
        state: The rebuilt state.
        description: The description of the target.
        missing: Names that the target asked for in vain.
        unexpected: Names that it did not ask for.
    """

    state: Any
    description: Description
    missing: set[str]
    unexpected: set[str]


def restore(state: Any, checkpoint: FakeCheckpoint) -> Restored:
    """Load a checkpoint into a state, keeping what the checkpoint lacks."""
    description = describe(state, describe_leaf, checkpoint)
    asked = {*description.values, *description.merged_lists}
    missing = {name for name in asked if name not in {*checkpoint.values, *checkpoint.lists}}
    for entry in description.tensors:
        asked.add(entry.name)
        stored = checkpoint.tensors.get(entry.name)
        if stored is None:
            missing.add(entry.name)
            continue
        wanted = (entry.dtype, entry.global_shape)
        assert wanted == (stored.dtype, stored.data.shape), f"{entry.name}: {wanted}"
        for part in entry.parts:
            memory = memory_of(part.data, entry.name, writable=True)
            memory.copy_in(Box.whole(part.box.shape), stored.data[part.box.slices])
    checkpoint.live = description.values
    assert all(name_of(path) == name for name, path in description.paths.items())
    return Restored(
        description.rebuild(checkpoint),
        description,
        missing - description.optional,
        checkpoint.names() - asked,
    )
