"""A committed checkpoint as names: what is stored under which name and path."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from remesh.core import values
from remesh.core.index import Index
from remesh.core.state import Path, assemble, name_of
from remesh.formats import native
from remesh.planner import ReadLimits

LIVE = "the source state"
"""The place of a state that is not stored, but resharded."""


@dataclass(slots=True, eq=False)
class StoredState:
    """Index and values of a checkpoint; what `remesh.core.state.Stored` asks for."""

    url: str  # where it is stored, for messages
    index: Index  # the tensors
    document: native.ValuesDocument  # everything else
    identity: str = ""  # the commit record that refers to them (`native.identity_of`), if any does
    rank: int | None = None
    """The rank that loads, which gets its own buffers where they are stored for each rank."""
    limits: ReadLimits = field(default_factory=ReadLimits)  # for its files; the same on all ranks
    sequences: Mapping[Path, str] = field(init=False)
    _children: dict[Path, list[tuple[Path, str]]] | None = field(default=None, init=False)
    _containers: dict[str, Path] | None = field(default=None, init=False)
    _items: dict[str, tuple[str, object]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.sequences = {tuple(path): kind for path, kind in self.document.sequences}

    def __iter__(self) -> Iterator[str]:
        """Every stored name: tensors and their aliases, values, lists, elements of objects."""
        yield from self.index
        yield from self.document.values
        yield from self.document.lists
        yield from self.document.objects

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Dtype name and global shape of a stored tensor, or None."""
        if name not in self.index:
            return None
        stored = self.index[name]
        return stored.dtype, stored.shape

    def not_stored(self, name: str, problem: str) -> str:
        """The error about a name that is not stored: the problem, and the nearest names."""
        near = difflib.get_close_matches(name, list(self), n=3)
        hint = f"; near are {', '.join(near)}" if near else ""
        return f"{name}: {problem}{hint}"

    def has_value(self, name: str) -> bool:
        """True if a plain value is stored under a name: whole, taken apart, or a list of names."""
        return self._is_value(name) or self._parts_of(name) is not None

    def _is_value(self, name: str) -> bool:
        known = (self.document.values, self.document.lists, self._items)
        return any(name in names for names in known)

    def value(self, name: str) -> object:
        """A plain value."""
        raw = self.document.values.get(name)
        if raw is not None:
            return values.decode(bytes(raw))
        if name in self.document.lists:
            return list(self.document.lists[name])
        if name in self._items:
            return self._items[name][1]
        parts = self._parts_of(name)
        if parts is None:
            raise KeyError(name)
        root, leaves = parts
        return assemble({path: self.value(leaf) for path, leaf in leaves}, self.sequences, root)

    def object(self, unique_name: str) -> object:
        """An element of a sharded object."""
        return values.decode(bytes(self.document.objects[unique_name].value))

    def _parts_of(self, name: str) -> tuple[Path, list[tuple[Path, str]]] | None:
        """A list or tuple that is stored item by item, as other systems do, and its items.

        None if there is none of this name, or not all of it is plain values.
        """
        if self._containers is None:
            self._containers = {name_of(path): path for path in self.sequences}
        root = self._containers.get(name)
        leaves = [] if root is None else self.under(root)
        is_plain = bool(leaves) and all(self._is_value(leaf) for _, leaf in leaves)
        return (root, leaves) if root is not None and is_plain else None

    def merged_list(self, name: str) -> list[str] | None:
        """A stored list of names, or None."""
        return self.document.lists.get(name)

    def under(self, path: Path) -> list[tuple[Path, str]]:
        """Path and name of every stored tensor, value and list whose path begins with `path`.

        A list of plain values is stored whole, but a state may have objects in it, such as
        schedulers: below one of its items are the leaves of that item.
        """
        if self._children is None:
            self._children = {}
            for name in (*self.index, *self.document.values, *self.document.lists):
                full = self.document.path_of(name)
                for length in range(len(full) + 1):
                    self._children.setdefault(full[:length], []).append((full, name))
        return self._children.get(path) or self._under_item(path, self._children)

    def _under_item(
        self, path: Path, children: Mapping[Path, list[tuple[Path, str]]]
    ) -> list[tuple[Path, str]]:
        for end in range(1, len(path)):
            root = path[:end]
            leaf = children.get(root, [])
            if len(leaf) != 1 or leaf[0][0] != root or leaf[0][1] not in self.document.values:
                continue
            node = self.value(leaf[0][1])
            if not isinstance(node, list | tuple):
                return []
            for key in path[end:]:
                node = dict(_children_of(node)).get(key)
            found = [] if node is None else list(_leaves_of(node, path))
            self._items.update({name_of(at): (leaf[0][1], item) for at, item in found})
            return [(at, name_of(at)) for at, _ in found]
        return []

    def holder_of(self, name: str) -> str:
        """The name under which a value is stored: its own, or that of a list that it is in."""
        return self._items[name][0] if name in self._items else name

    def holders(self, names: Collection[str]) -> list[str]:
        """The lists that are stored whole and of which some names are all that is in them."""
        roots = {holder for holder, _ in self._items.values()}
        return [
            root
            for root in roots
            if _is_covered(self.value(root), self.document.path_of(root), names)
        ]


def _children_of(node: object) -> list[tuple[str | int, object]]:
    """Items of a list, a tuple or a dict; none if its keys are no names."""
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    if isinstance(node, dict) and all(isinstance(key, str | int) for key in node):
        return list(node.items())
    return []


def _leaves_of(node: object, path: Path) -> Iterator[tuple[Path, object]]:
    """The leaves of a plain value, of which dicts alone are taken apart."""
    children = _children_of(node) if isinstance(node, dict) else []
    for key, child in children:
        yield from _leaves_of(child, (*path, key))
    if not children:
        yield path, node


def _is_covered(node: object, path: Path, names: Collection[str]) -> bool:
    """True if some names are those of a plain value, or of all that is in it."""
    children = _children_of(node)
    inner = (_is_covered(child, (*path, key), names) for key, child in children)
    return name_of(path) in names or (bool(children) and all(inner))
