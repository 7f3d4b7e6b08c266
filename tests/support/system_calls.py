"""Watching and disturbing the calls by which files are changed and read.

Python code reaches the file system through functions of `os`. `SystemCalls` stands in for those
that matter to a storage, for as long as its `with` block lasts, and asks a handler before each:
the handler may raise, let the call go through, or let it do only a part of its work, as the system
may for any read or write. Room is reserved by `fallocate`, which `remesh.storage.local` calls in
the C library; that is watched as well.

Only calls on paths below one directory are shown to the handler. What a descriptor was opened for
is remembered, so that calls on descriptors are known by path, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

from remesh.storage import local

NAMES = (
    "open",
    "close",
    "pwrite",
    "preadv",
    "fsync",
    "ftruncate",
    "link",
    "rename",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
    "stat",
    "fstat",
    "statvfs",
    "scandir",
)
"""The functions of `os` that are watched; and `fallocate` besides."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is about to be made, or was made."""

    name: str  # of the function
    path: str  # the file, relative to the directory that is watched; "" for that directory
    target: str = ""  # the second path of `link`, `rename` and `replace`
    flags: int = 0  # of `open`
    position: int = 0  # where `pwrite` begins; the size for `ftruncate` and `fallocate`
    data: bytes = b""  # the bytes that `pwrite` writes


Handler = Callable[[Call], int | None]
"""Called before a call. May raise an `OSError`, which the caller of the function then gets. Returns
how many bytes a read or write is to move at most, or None for all."""


class SystemCalls:
    """Shows the calls on files below a directory to a handler.

    Args:
        root: The directory.
        before: Called before each call.
        after: Called after each call that has succeeded, in the order in which they took effect.
            Calls that change something are made one at a time if it is given.
    """

    def __init__(
        self, root: Path, *, before: Handler = lambda _call: None, after: Callable[[Call], None]
    ) -> None:
        self._root = os.path.abspath(root)
        self._before = before
        self._after = after
        self._lock = threading.RLock()
        self._open: dict[int, str] = {}
        self._patches: list[Any] = []

    def __enter__(self) -> Self:
        for name in NAMES:
            patch = mock.patch.object(os, name, self._watched(name, getattr(os, name)))
            self._patches.append(patch)
        reserve = mock.patch.object(local, "_reserve", self._watched_reserve(local._reserve))
        self._patches.append(reserve)
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for patch in reversed(self._patches):
            patch.stop()
        self._patches.clear()

    def _relative(self, path: object) -> str | None:
        """A path below the root, or None if it is not."""
        if not isinstance(path, str | os.PathLike):
            return None
        full = os.path.abspath(os.fspath(path))
        if full == self._root:
            return ""
        inside = full.startswith(self._root + "/")
        return full[len(self._root) + 1 :] if inside else None

    def _described(self, name: str, args: tuple[Any, ...]) -> Call | None:
        """The call, or None if it is not about the files that are watched."""
        if isinstance(args[0] if args else None, int):
            path = self._open.get(args[0])
        else:
            path = self._relative(args[0]) if args else None
        if path is None:
            return None
        if name in {"link", "rename", "replace"}:
            return Call(name, path, target=self._relative(args[1]) or "")
        if name == "open":
            return Call(name, path, flags=args[1])
        if name == "pwrite":
            return Call(name, path, position=args[2], data=bytes(args[1]))
        if name == "ftruncate":
            return Call(name, path, position=args[1])
        return Call(name, path)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            described = self._described(name, args)
            if described is None:
                return real(*args, **options)
            with self._lock:
                limit = self._before(described)
                if limit is not None and name == "pwrite":
                    args = (args[0], memoryview(args[1])[:limit], *args[2:])
                    described = self._described(name, args) or described
                if limit is not None and name == "preadv":
                    args = (args[0], [memoryview(args[1][0])[:limit]], *args[2:])
                result = real(*args, **options)
                if name == "open":
                    self._open[result] = described.path
                elif name == "close":
                    self._open.pop(args[0], None)
                elif name == "pwrite":
                    described = Call(
                        name, described.path, position=args[2], data=bytes(args[1])[:result]
                    )
                self._after(described)
                return result

        return call

    def _watched_reserve(self, real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def call(descriptor: int, num_bytes: int) -> None:
            path = self._open.get(descriptor)
            with self._lock:
                if path is not None:
                    self._before(Call("fallocate", path, position=num_bytes))
                real(descriptor, num_bytes)
                if path is not None:
                    self._after(Call("fallocate", path, position=num_bytes))

        return call
