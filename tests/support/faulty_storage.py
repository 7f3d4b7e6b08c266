"""A storage that fails on order.

`FaultyStorage` passes every call on to another storage, after looking at its faults. A fault
names the operations and, by a pattern, the paths that it is about. Operations are named like the
methods of `Storage` and `Writer`: `list`, `size`, `read`, `read_into`, `put`, `create`, `write`,
`finish`, `abort`, `delete`, `sync`, `space`; those without a path match every pattern.

Nothing is random: `Fail` counts the calls that match it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from remesh.errors import NoSpaceError, StorageError
from remesh.storage import Buffer, Storage, StorageView, Writer

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class Fail:
    """Matching calls raise."""

    operation: str
    path: str = "*"  # pattern of paths, as in a shell
    number: int = errno.EIO  # ENOSPC and EDQUOT make a `NoSpaceError`, others a `StorageError`
    skip: int = 0  # how many matching calls go well first
    times: int | None = None  # how many fail after that; None for all


class FaultyStorage(StorageView):
    """A storage with faults, over one without.

    Attributes:
        calls: Operation and path ("" where there is none) of each call, in order.
    """

    def __init__(self, inner: Storage, faults: Sequence[Fail]) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self._inner = inner
        self._faults = tuple(faults)
        self._lock = threading.Lock()
        self._num_matches = dict.fromkeys(faults, 0)

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> FaultyWriter:
        self.meet("create", path)
        return FaultyWriter(self, path, super().create(path, num_bytes, overwrite=overwrite))

    def meet(self, operation: str, path: str = "") -> None:
        """Note a call, and let the faults that it matches happen."""
        self.calls.append((operation, path))
        for fault in self._faults:
            if fault.operation != operation:
                continue
            if path and not fnmatchcase(path, fault.path):
                continue
            if self._is_due(fault):
                kind = NoSpaceError if fault.number in _NO_ROOM else StorageError
                raise kind(f"injected: cannot {operation} {path}: {os.strerror(fault.number)}")

    def _is_due(self, fault: Fail) -> bool:
        with self._lock:
            number = self._num_matches[fault]
            self._num_matches[fault] += 1
        return number >= fault.skip and (fault.times is None or number < fault.skip + fault.times)


class FaultyWriter:
    """A file of a `FaultyStorage` that is being written."""

    def __init__(self, storage: FaultyStorage, path: str, inner: Writer) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    def write(self, position: int, data: Buffer) -> None:
        self._storage.meet("write", self._path)
        self._inner.write(position, data)

    def finish(self, num_bytes: int | None = None) -> None:
        self._storage.meet("finish", self._path)
        self._inner.finish(num_bytes)

    def abort(self) -> None:
        self._storage.meet("abort", self._path)
        self._inner.abort()


def _met(operation: str) -> Callable[..., Any]:
    """The operation of the storage that has no faults, after those of this one."""
    real = getattr(StorageView, operation)

    def call(self: FaultyStorage, *args: Any, **options: Any) -> Any:
        self.meet(operation, "" if operation == "list" or not args else args[0])
        return real(self, *args, **options)

    return call


for _operation in ("list", "size", "read", "read_into", "put", "delete", "sync", "space"):
    setattr(FaultyStorage, _operation, _met(_operation))
