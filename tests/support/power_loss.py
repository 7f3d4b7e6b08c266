"""What a disk may hold after the power failed: POSIX as a model, replayed from a log.

A log of calls (`tests.support.system_calls`) is applied to a model of a file system that knows of
everything whether it is durable. `fsync` of a file makes its content durable; `fsync` of a
directory its entries, and not those of the directory above. The rest may be there or not:

* of the content of a file any blocks, those that were written last included; and its size;
* of the entries of a directory any changes, each for itself; a rename within a directory replaces
  what had the name in one step, so that either the old or the new file has it.

`PowerLoss.state` draws one such outcome. It is strict: real file systems lose less.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.support.system_calls import Call

BLOCK = 512
"""Bytes that a disk writes in one step."""


@dataclass(slots=True, eq=False)
class _File:
    """Content that is durable, and writes that are not; None is a new size without content."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Directory:
    """Entries that are durable, and changes that are not: names that got or lost an entry."""

    durable: dict[str, _Node] = field(default_factory=dict)
    pending: list[dict[str, _Node | None]] = field(default_factory=list)

    def entries(self) -> dict[str, _Node]:
        """The entries that a program sees."""
        return _changed(self.durable, self.pending)


_Node: TypeAlias = _File | _Directory
State: TypeAlias = dict[str, bytes | None]
"""Path → content of each file that is there; None for directories."""


def _changed(
    entries: dict[str, _Node], changes: Sequence[dict[str, _Node | None]]
) -> dict[str, _Node]:
    merged: dict[str, _Node | None] = dict(entries)
    for change in changes:
        merged.update(change)
    return {name: node for name, node in merged.items() if node is not None}


class PowerLoss:
    """A file system whose power may fail; it begins as one empty, durable directory."""

    def __init__(self) -> None:
        self._root = _Directory()

    def apply(self, call: Call) -> None:
        """Let a call take effect."""
        match call.name:
            case "open" if self._find(call.path) is None:
                self._change(call.path, _File())
            case "mkdir":
                self._change(call.path, _Directory())
            case "pwrite":
                self._file(call.path).pending.append((call.position, call.data))
            case "ftruncate" | "fallocate":
                self._file(call.path).pending.append((call.position, None))
            case "fsync":
                self._sync(self._find(call.path))
            case "link":
                self._change(call.target, self._find(call.path))
            case "rename" | "replace":
                self._rename(call.path, call.target)
            case "unlink" | "rmdir":
                self._change(call.path, None)
            case _:
                pass

    def state(self, chance: random.Random, *, kept: float) -> State:
        """What may be there after the power fails now.

        Args:
            chance: Draws what is lost.
            kept: Probability that something that is not durable is kept.
        """
        found: State = {}

        def look(directory: _Directory, path: str) -> None:
            changes = [change for change in directory.pending if chance.random() < kept]
            for name, node in _changed(directory.durable, changes).items():
                full = f"{path}{name}"
                if isinstance(node, _Directory):
                    found[full] = None
                    look(node, f"{full}/")
                else:
                    found[full] = _content(node, chance, kept)

        look(self._root, "")
        return found

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for name in path.split("/") if path else ():
            node = node.entries().get(name) if isinstance(node, _Directory) else None
        return node

    def _file(self, path: str) -> _File:
        found = self._find(path)
        assert isinstance(found, _File), path
        return found

    def _parent(self, path: str) -> tuple[_Directory, str]:
        folder, _, name = path.rpartition("/")
        parent = self._find(folder)
        assert isinstance(parent, _Directory), path
        return parent, name

    def _change(self, path: str, node: _Node | None) -> None:
        parent, name = self._parent(path)
        parent.pending.append({name: node})

    def _rename(self, source: str, target: str) -> None:
        old, old_name = self._parent(source)
        new, new_name = self._parent(target)
        assert old is new, "a storage renames within a directory"
        old.pending.append({old_name: None, new_name: self._find(source)})

    def _sync(self, node: _Node | None) -> None:
        if isinstance(node, _Directory):
            node.durable, node.pending = node.entries(), []
        elif node is not None:
            for position, data in node.pending:
                _write(node.durable, position, data)
            node.pending.clear()


def _content(file: _File, chance: random.Random, kept: float) -> bytes:
    content = bytearray(file.durable)
    for position, data in file.pending:
        if data is None:
            if chance.random() < kept:
                _write(content, position, None)
            continue
        for start in range(0, len(data), BLOCK):
            if chance.random() < kept:
                _write(content, position + start, data[start : start + BLOCK])
    return bytes(content)


def _write(content: bytearray, position: int, data: bytes | None) -> None:
    """Write bytes, or give the content a size."""
    end = position + len(data or b"")
    content.extend(bytes(max(0, end - len(content))))
    if data is None:
        del content[position:]
    else:
        content[position:end] = data


def write_state(state: State, root: Path) -> None:
    """Make a directory hold what a state says."""
    root.mkdir()
    for path, content in state.items():
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
