"""Taking what another system nested apart: leaves with the keys on the way to each of them.

It is done as `remesh.core.state` takes a state apart, so that a foreign checkpoint has the names
that the same state would have in one of remesh: dicts always, lists and tuples where they hold more
than plain values. A key that is neither text nor a 64-bit integer cannot be part of a path. A dict
with such keys is one plain value if it can be; if there are tensors in it, each odd key stands in
the path as Python shows it.

What is shared is looked at once. Names repeat the keys above them, so their length is bounded, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remesh.core import values
from remesh.core.state import Path, name_of
from remesh.core.values import INT64, MAX_NESTING
from remesh.errors import CorruptCheckpointError, NameCollisionError
from remesh.formats.checks import is_unicode
from remesh.formats.pickle_values import ArchivedTensor

MIN_NAME_CHARS = 1 << 24
NAME_CHARS_PER_BYTE = 16


@dataclass(slots=True)
class Nested:
    """Leaves by stored name."""

    where: str  # the file, for error messages
    max_chars: int  # how many characters the names may have, together
    tensors: dict[str, ArchivedTensor] = field(default_factory=dict)
    leaves: dict[str, object] = field(default_factory=dict)  # all other leaves
    paths: dict[str, Path] = field(default_factory=dict)  # the path of each name
    sequences: dict[Path, str] = field(default_factory=dict)  # which containers are lists or tuples
    _plain: dict[int, bool] = field(default_factory=dict)

    def visit(self, path: Path, node: Any) -> None:
        """Take a node apart."""
        if len(path) > MAX_NESTING:
            raise CorruptCheckpointError(f"{self.where}: nested more than {MAX_NESTING} deep")
        if isinstance(node, ArchivedTensor):
            self.tensors[self._claim(path)] = node
        elif isinstance(node, Mapping) and self.is_taken_apart(path, node):
            keys = [path_key(key) for key in node]
            if len(set(keys)) < len(keys):
                raise self._collision(name_of(path), "several of its keys")
            for key, child in zip(keys, node.values(), strict=True):
                self.visit((*path, key), child)
        elif isinstance(node, list | tuple) and node and path and not self._is_plain(node):
            self.sequences[path] = "list" if isinstance(node, list) else "tuple"
            for number, child in enumerate(node):
                self.visit((*path, number), child)
        else:
            self.leaves[self._claim(path)] = node

    def is_taken_apart(self, path: Path, node: Mapping[Any, Any]) -> bool:
        """True if the items of a dict get paths of their own."""
        if all(path_key(key) is key for key in node):
            return bool(node or not path)
        return not self._is_plain(node)

    def _is_plain(self, node: Any) -> bool:
        """True if `remesh.core.values` can store the node with all that is in it."""
        found = self._plain.get(id(node))
        if found is None:
            if isinstance(node, Mapping):
                found = all(map(self._is_plain, (*node, *node.values())))
            elif isinstance(node, list | tuple | set | frozenset):
                found = all(map(self._is_plain, node))
            else:
                return values.is_plain(node)
            self._plain[id(node)] = found
        return found

    def _claim(self, path: Path) -> str:
        """Take the stored name of a path."""
        name = name_of(path)
        self.max_chars -= len(name)
        if self.max_chars < 0:
            raise CorruptCheckpointError(f"{self.where}: its names are longer than its file")
        if name in self.paths:
            raise self._collision(name, f"{self.paths[name]!s:.200} and {path!s:.200}")
        self.paths[name] = path
        return name

    def _collision(self, name: str, places: str) -> NameCollisionError:
        return NameCollisionError(
            f"{self.where}: two entries have one name: {name!r:.200}, at {places}. Load it with "
            "the system that wrote it, and rename one of them."
        )


def take_apart(root: Any, path: Path, where: str, num_bytes: int) -> Nested:
    """Take a nested value of a pickle of `num_bytes` apart; at the top, no dict is `value`."""
    found = Nested(where, MIN_NAME_CHARS + NAME_CHARS_PER_BYTE * num_bytes)
    is_whole = not path and isinstance(root, Mapping) and found.is_taken_apart(path, root)
    found.visit(path if path or is_whole else ("value",), root)
    return found


def path_key(key: Any) -> str | int:
    """A key as part of a path: itself, or as Python shows it."""
    if type(key) is str:
        return key if key.isascii() or is_unicode(key) else repr(key)
    return key if type(key) is int and key in INT64 else repr(key)
