"""What a training state is made of, and the walk that finds it.

`save` and `load` take a nested state: dicts, lists and tuples whose leaves are tensors, modules,
optimizers, objects with a state dict, plain values, or descriptions (`remesh.core.sharded`).
Walking it gives a `Description`: flat lists of tensors (as boxes of named global tensors), values
and sharded objects, plus one function that puts loaded things back where they were found.

The walk knows containers, plain values, numpy arrays and the descriptions. Leaves that belong to a
framework are described by a function that is passed in (`remesh.adapters` has the one for torch),
which keeps this module free of torch.

Names. Every leaf has a path, the keys on the way to it, and a stored name, the path joined by
dots; that is also how torch joins parameter names. Two paths that join to one name are refused.
A sharded description carries its own global name and is stored under that.

Loading walks the target state with `stored` set to what the checkpoint holds. Tensor leaves are
then destinations: their memory is filled in place. What cannot be changed in place (values,
tuples, a whole optimizer state) is replaced by the description's `rebuild` once all is read.

A plain value is replaced whole, also one that is a dict: afterwards it is what was stored, with no
key more or less, though its keys are stored one by one. (A dict that holds tensors or objects is no
value but a part of the state, and its entries are matched one by one.) A placeholder, which is None
or an empty container, takes all that is stored in its place, tensors included.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from remesh.core import values
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.sharded import (
    ArrayLike,
    LocalNonpersistentObject,
    Part,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    dtype_name,
)
from remesh.core.values import INT64, MAX_NESTING
from remesh.errors import CorruptCheckpointError, NameCollisionError, UnsupportedValueError

Path = tuple[str | int, ...]


# ---------------------------------------------------------------------------------------------
# The flat form of a state
# ---------------------------------------------------------------------------------------------


class Role(enum.IntEnum):
    """A rank's word on its copy of a box."""

    REPLICA = 0
    """An identical copy; another rank has the main replica."""
    MAIN = 1
    """The main replica; there must be no second one."""
    EQUAL = 2
    """One of several equal copies; the framework that holds them keeps them equal, on the ranks
    that its meshes join (see `remesh.planner.saving.joined_by_meshes`)."""
    ASSUMED = 3
    """Like EQUAL, but without a promise: a plain tensor that each rank has under one name."""
    FIRST = 4
    """One of several copies that may differ; that of the lowest rank is stored."""


def role_of(tensor: ShardedTensor) -> Role:
    """The role that a description by hand gives this rank's copy."""
    if tensor.replica_id is None:
        return Role.ASSUMED
    return Role.MAIN if tensor.is_main_replica else Role.REPLICA


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """A tensor leaf: this rank's boxes of a global tensor."""

    name: str  # stored name
    dtype: str  # name of the element type
    global_shape: tuple[int, ...]  # shape of the global tensor
    parts: tuple[Part, ...]  # this rank's boxes with their arrays
    role: Role  # what this rank says of its copy
    may_resize: bool = False
    """Whether another global shape may be stored; new elements become zeros then."""
    alias_key: object = None
    """Equal for leaves that are the same memory (tied weights); None if it has none."""
    is_buffer: bool = False
    """Whether it is a buffer of a module, such as a running statistic, that no description or
    placement divides among ranks."""
    is_frozen: bool = False
    """Whether it is a parameter that training does not change. That is a guess at what a save will
    find unchanged, and nothing depends on it but where it is written."""
    follows: str | None = None
    """Name of the parameter that this is optimizer state of; None if it is none, or the parameter
    has no name in the state."""


class Stored(Protocol):
    """The content of a checkpoint, as the walk of a target state asks for it."""

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Dtype name and global shape of a stored tensor, or None."""

    def has_value(self, name: str) -> bool:
        """True if a plain value of this name is stored."""

    def value(self, name: str) -> object:
        """A stored plain value."""

    def merged_list(self, name: str) -> list[str] | None:
        """A stored list of names (see `Walk.add_merged_list`), or None."""

    def under(self, path: Path) -> list[tuple[Path, str]]:
        """Path and name of every stored leaf whose path begins with `path`."""

    @property
    def sequences(self) -> Mapping[Path, str]:
        """Paths of stored containers that were a `list` or a `tuple`."""


class Loaded(Protocol):
    """The content that has been read, as `rebuild` functions ask for it."""

    def value(self, name: str) -> object:
        """A loaded plain value; KeyError if none was loaded under this name."""

    def object(self, unique_name: str) -> object:
        """A loaded element of a sharded object."""


Rebuild = Callable[[Loaded], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A state with entries beside it, which are stored as if they were entries of it."""

    state: Any  # the state, of any kind; optimizers have their modules there
    beside: dict[str, Any] = field(default_factory=dict)
    """Further entries, by names that the state does not have."""


@dataclass(slots=True)
class Description:
    """A state in flat form."""

    tensors: list[TensorEntry] = field(default_factory=list)  # tensor leaves of this rank
    values: dict[str, object] = field(default_factory=dict)  # plain values by stored name
    merged_lists: dict[str, list[str]] = field(default_factory=dict)
    """Lists of names of which each rank may know a part; the union is stored."""
    objects: list[ShardedObject] = field(default_factory=list)  # sharded objects of this rank
    paths: dict[str, Path] = field(default_factory=dict)
    """Path of each stored name that belongs to a place in the state."""
    sequences: dict[Path, str] = field(default_factory=dict)
    """Paths of lists and tuples on the way to leaves."""
    optional: set[str] = field(default_factory=set)
    """Names that may be absent from the checkpoint without being missed."""
    fixed: set[str] = field(default_factory=set)
    """Names of values that must be stored as they are; a load does not replace them."""
    meshes: dict[int, int] = field(default_factory=dict)
    """Of meshes, and process groups of wrappers, that say that copies are equal, by their ids, for
    nothing may keep a group alive: the lowest rank in each."""
    unchecked: list[str] = field(default_factory=list)
    """Names whose values no digest proves, where the state is a repaired checkpoint."""
    dropped: list[str] = field(default_factory=list)
    """Entries of plain dicts that the checkpoint lacks, and that go with the old content."""
    rebuild: Rebuild = field(default=lambda _loaded: None)
    """Puts loaded values back; set by `describe`."""


TENSOR_RECORD = "__tensor_flatten__"
"""Below a tensor that is made of others: what they make. No inner tensor has this name."""
MAX_PATH = 400
"""Keys on the way to a leaf that a stored state may have: more than `MAX_NESTING`, because a leaf
that is an optimizer or a tensor made of others puts keys of its own below its path."""


def _is_path_key(key: object) -> bool:
    if isinstance(key, int) and not isinstance(key, bool):
        return int(key) in INT64  # a range compares a subclass of int with each of its numbers
    return isinstance(key, str)


def name_of(path: Path) -> str:
    """The stored name of a path."""
    return ".".join([key if type(key) is str else _text_of(key) for key in path])


def _text_of(key: object) -> str:
    """A key as text; that of an enum is its value, whatever it prints."""
    if isinstance(key, str):
        return str.__str__(key)
    return int.__repr__(key) if isinstance(key, int) and type(key) is not bool else str(key)


def cut_name(name: str) -> Path:
    """A name cut at its dots; not at all of them if it has more than a path has keys."""
    return tuple(name.split(".", MAX_PATH - 1))


class Walk:
    """One walk over a state; adapters tell it by its methods what they find in a leaf."""

    def __init__(self, root: object, describe_leaf: LeafDescriber, stored: Stored | None) -> None:
        # Leaves may look at others: an optimizer takes its names from the modules beside it.
        self.root = root
        self.stored = stored  # None for saving
        self.description = Description()
        self._describe_leaf = describe_leaf

    def visit(self, path: Path, node: Any) -> Rebuild:
        """Describe a node and everything below it; returns how to rebuild it after loading."""
        if len(path) > MAX_NESTING:
            raise UnsupportedValueError(
                f"{name_of(path[:8])}...: nested more than {MAX_NESTING} deep, or it holds itself\n"
                "Flatten it, or wrap it in remesh.sharding.LocalNonpersistentObject"
            )
        # Framework leaves come first: a module or a tensor subclass may also be a container.
        rebuild = self._describe_leaf(self, path, node)
        if rebuild is not None:
            return rebuild
        if isinstance(node, LocalNonpersistentObject):
            return lambda _loaded: node
        if isinstance(node, ShardedTensor):
            return self._visit_sharded_tensor(node)
        if isinstance(node, ShardedObject):
            return self._visit_sharded_object(path, node)
        if isinstance(node, ShardedTensorFactory):
            return self._visit_factory(path, node)
        if values.is_array(node) and node.dtype.kind in "biufc":
            array = np.asarray(node)  # boxes of a matrix always have two dims
            self.add_array(path, array, Role.ASSUMED, alias_key=_numpy_alias_key(array))
            return lambda _loaded: node
        if self.stored is not None and path and values.is_plain(node):
            unit = self._visit_unit(self.stored, path, node)
            if unit is not None:
                return unit
        # An empty state is that of a rank which holds nothing; further down it is a value.
        if isinstance(node, Mapping) and (node or not path) and all(map(_is_path_key, node)):
            return self._visit_mapping(path, node)
        if isinstance(node, list | tuple) and node and not values.is_plain(node):
            return self._visit_sequence(path, node)
        return self.add_value(path, node)

    def add_value(self, path: Path, value: object) -> Rebuild:
        """Record a plain value; returns how to get it after loading."""
        if not path:
            raise UnsupportedValueError(
                f"the state is a bare {type(value).__qualname__}\n"
                "Pass a dict, a module, an optimizer or an object with state_dict() and "
                "load_state_dict()"
            )
        name = self.claim(path)
        values.encode(value, name)
        self.description.values[name] = value
        return lambda loaded: loaded.value(name)

    def add_fixed(self, path: Path, value: object) -> None:
        """Record a plain value that must be stored as it is."""
        self.add_value(path, value)
        self.description.fixed.add(name_of(path))

    def add_array(
        self, path: Path, array: ArrayLike, role: Role, *, alias_key: object = None
    ) -> None:
        """Record an unsharded tensor leaf."""
        shape = tuple(map(int, array.shape))
        self.add_tensor(path, shape, (Part(Box.whole(shape), array),), array, role, alias_key)

    def add_tensor(
        self,
        path: Path,
        global_shape: tuple[int, ...],
        parts: tuple[Part, ...],
        like: ArrayLike,
        role: Role,
        alias_key: object = None,
    ) -> None:
        """Record a tensor leaf; `like` is any array of its dtype."""
        if not path:
            raise UnsupportedValueError("the state must be a dict or a module, not a bare tensor")
        name = self.claim(path)
        dtype = dtype_name(like, name)
        self.description.tensors.append(
            TensorEntry(name, dtype, global_shape, parts, role, alias_key=alias_key)
        )

    def add_merged_list(self, path: Path, names: list[str]) -> None:
        """Record a list of names of which other ranks may know other parts."""
        self.description.merged_lists[self.claim(path)] = names

    def claim(self, path: Path) -> str:
        """Take the stored name of a path."""
        name = name_of(path)
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedValueError(f"{path}: not a name in Unicode: {error}") from error
        taken = self.description.paths.setdefault(name, path)
        if taken != path:
            raise NameCollisionError(
                f"{name!r} is the stored name of two entries of the state, at {taken} and at "
                f"{path}\nRename one of them"
            )
        return name

    def _visit_mapping(self, path: Path, node: Mapping[str | int, Any]) -> Rebuild:
        rebuilds = {key: self.visit((*path, key), child) for key, child in node.items()}

        def rebuild(loaded: Loaded) -> object:
            changed = {
                key: new for key, make in rebuilds.items() if (new := make(loaded)) is not node[key]
            }
            if not changed:
                return node
            if isinstance(node, MutableMapping):
                # Not update(): that of a Counter adds.
                for key, new in changed.items():
                    node[key] = new
                return node
            return type(node)({**node, **changed})  # type: ignore[call-arg]

        return rebuild

    def _visit_sequence(self, path: Path, node: list[Any] | tuple[Any, ...]) -> Rebuild:
        self.description.sequences[path] = "list" if isinstance(node, list) else "tuple"
        rebuilds = [self.visit((*path, number), child) for number, child in enumerate(node)]

        def rebuild(loaded: Loaded) -> object:
            items = [make(loaded) for make in rebuilds]
            if isinstance(node, list):
                node[:] = items
                return node
            if all(new is old for new, old in zip(items, node, strict=True)):
                return node
            return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)

        return rebuild

    def holds_tensors(self, path: Path) -> bool:
        """True if the checkpoint, if there is one, has tensors in the place of a node."""
        stored = self.stored
        return stored is not None and any(
            stored.tensor(name) is not None for _, name in stored.under(path)
        )

    def _visit_unit(self, stored: Stored, path: Path, node: Any) -> Rebuild | None:
        """Describe a plain value that is replaced by all that is stored in its place."""
        leaves = dict(stored.under(path))
        tensors = [name for name in leaves.values() if stored.tensor(name) is not None]
        is_known = all(name in tensors or stored.has_value(name) for name in leaves.values())
        if not leaves or not is_known or (tensors and not is_placeholder(node)):
            return None
        rebuilds = {
            leaf: self.visit(leaf, _new_array(name, *found))
            if (found := stored.tensor(name)) is not None
            else self.add_value(leaf, None)
            for leaf, name in leaves.items()
        }
        self.description.dropped += _dropped(node, path, set(leaves))

        def rebuild(loaded: Loaded) -> object:
            content = {leaf: make(loaded) for leaf, make in rebuilds.items()}
            built = content[path] if path in content else assemble(content, stored.sequences, path)
            return _in_place(node, built)

        return rebuild

    def _visit_sharded_tensor(self, node: ShardedTensor) -> Rebuild:
        if node.parts:
            self.description.tensors.append(
                TensorEntry(
                    node.name,
                    dtype_name(node.parts[0].data, node.name),
                    node.global_shape,
                    node.parts,
                    role_of(node),
                    node.allow_shape_mismatch,
                )
            )
        return lambda _loaded: node

    def _visit_sharded_object(self, path: Path, node: ShardedObject) -> Rebuild:
        values.encode_object(node.data, name_of(path))
        self.description.objects.append(node)

        def rebuild(loaded: Loaded) -> ShardedObject:
            return ShardedObject(
                node.name,
                loaded.object(node.unique_name),
                node.global_shape,
                node.global_offset,
                node.replica_id,
            )

        return rebuild

    def _visit_factory(self, path: Path, node: ShardedTensorFactory) -> Rebuild:
        built = node.build(node.name, node.data)
        rebuild_built = self.visit(path, built)

        def rebuild(loaded: Loaded) -> ShardedTensorFactory:
            merged = node.merge(rebuild_built(loaded))
            if hasattr(node.data, "copy_") and hasattr(merged, "dtype"):
                node.data.detach().copy_(merged)
                merged = node.data
            return ShardedTensorFactory(node.name, merged, node.build, node.merge)

        return rebuild


LeafDescriber = Callable[[Walk, Path, Any], Rebuild | None]
"""Describes a leaf of a framework into a walk; None if the node is not one of its leaves."""


def describe_nothing(_walk: Walk, _path: Path, _node: Any) -> Rebuild | None:
    """The leaf describer for states without framework objects."""
    return None


def describe(
    state: Any, describe_leaf: LeafDescriber = describe_nothing, stored: Stored | None = None
) -> Description:
    """Walk a state; `stored` is the content of the checkpoint that is loaded into it."""
    parts = (state.state, state.beside) if isinstance(state, Joined) else (state,)
    walk = Walk(parts[0], describe_leaf, stored)
    first, *others = [walk.visit((), part) for part in parts]

    def rebuild(loaded: Loaded) -> Any:
        for make in others:
            make(loaded)
        return first(loaded)

    walk.description.rebuild = rebuild
    return walk.description


def is_placeholder(node: object) -> bool:
    """True if a node holds nothing: None or an empty dict, list or tuple."""
    return node is None or (isinstance(node, Mapping | list | tuple) and not node)


def _new_array(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array that a stored tensor can be read into, where there is no torch."""
    if not BY_NAME[dtype].is_native:
        raise UnsupportedValueError(
            f"{name}: numpy has no element type {dtype}; import torch before loading it"
        )
    return np.empty(shape, BY_NAME[dtype].carrier)


def _dropped(node: object, path: Path, leaves: set[Path]) -> list[str]:
    """The names of entries of plain dicts that are not stored, where the dict is."""
    stored = {name_of(leaf[:length]) for leaf in leaves for length in range(len(leaf) + 1)}

    def entries(node: object, path: Path) -> Iterator[str]:
        # A dict with other keys is stored whole.
        if isinstance(node, Mapping) and all(map(_is_path_key, node)):
            for key, child in node.items():
                if (name := name_of((*path, key))) not in stored:
                    yield name
                else:
                    yield from entries(child, (*path, key))

    return list(entries(node, path))


def _in_place(live: object, new: object) -> object:
    """New content in the dicts of the live one, which stay the same objects."""
    if not (isinstance(live, Mapping) and isinstance(new, Mapping)):
        return new
    new = numbered_like(live, new)
    content = {key: _in_place(live.get(key), child) for key, child in new.items()}
    if not isinstance(live, MutableMapping):
        return type(live)(content)  # type: ignore[call-arg]
    live.clear()
    # Not update(): that of a Counter adds.
    for key, child in content.items():
        live[key] = child
    return live


def numbered_like(live: Mapping[Any, Any], new: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """New content by the keys of the live one, of which DCP stores the texts.

    Texts of other numbers become numbers, too, if all keys of the live one are numbers.
    """
    known = {str(key): key for key in live if not isinstance(key, str)}
    are_numbers = bool(live) and all(type(key) is int for key in live)

    def like(key: Any) -> Any:
        if not isinstance(key, str) or key in live:
            return key
        return known.get(key, int(key) if are_numbers and _is_number(key) else key)

    return {like(key): child for key, child in new.items()}


def _is_number(key: object) -> bool:
    return isinstance(key, str) and re.fullmatch("0|-?[1-9][0-9]{0,17}", key) is not None


def _numpy_alias_key(array: np.ndarray[Any, Any]) -> object:
    address = array.__array_interface__["data"][0]
    return (address, array.shape, array.strides, array.dtype.str) if array.size else None


def assemble(leaves: Mapping[Path, object], sequences: Mapping[Path, str], root: Path = ()) -> Any:
    """Build nested containers of leaves from their paths, all of which begin with `root`."""
    inner = {path[:length] for path in leaves for length in range(len(root) + 1, len(path))}
    for path in leaves:
        if path in inner:
            raise NameCollisionError(
                f"{name_of(path)!r} is both an entry and a container of others, so they do not "
                "nest in one state\nRead them by name"
            )
    tree: dict[str | int, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[len(root) : -1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return _as_sequences(tree, sequences, root)


def whole_sequences(
    sequences: Mapping[Path, str], there: Iterable[Path], gone: Iterable[Path]
) -> dict[Path, str]:
    """Lists and tuples all of whose items are there; in others, later items would move up."""
    nodes = {path[:length] for path in there for length in range(len(path) + 1)}
    broken = {
        path[: length - 1]
        for path in gone
        for length in range(1, len(path) + 1)
        if path[:length] not in nodes
    }
    return {path: kind for path, kind in sequences.items() if path not in broken}


def _as_sequences(node: dict[str | int, Any], sequences: Mapping[Path, str], path: Path) -> Any:
    for key, child in node.items():
        if isinstance(child, dict) and child:
            node[key] = _as_sequences(child, sequences, (*path, key))
    kind = sequences.get(path)
    if kind is None or not node:
        return node
    numbers = {key: key if isinstance(key, int) else _item_number(key) for key in node}
    if None in numbers.values():
        odd = next(key for key, number in numbers.items() if number is None)
        raise CorruptCheckpointError(
            f"{name_of(path)}: stored as a {kind}, but an item of it is called {odd!r}\nRead the "
            "items by name"
        )
    items = [node[key] for key in sorted(node, key=lambda key: numbers[key] or 0)]
    return items if kind == "list" else tuple(items)


def _item_number(key: str) -> int | None:
    """The number of an item of a list by its name, or None if it is called something else."""
    return int(key) if len(key) < 19 and key.isascii() and key.isdecimal() else None
