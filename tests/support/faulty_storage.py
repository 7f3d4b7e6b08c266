"""A storage that fails, corrupts or truncates on order.

`FaultyStorage` passes every call on to another storage, after looking at its faults. A fault
names the operations and, by a pattern, the paths that it is about. Operations are named like the
methods of `Storage` and `Writer`: `list`, `size`, `read`, `read_into`, `put`, `create`, `write`,
`finish`, `abort`, `delete`, `sync`, `space`; those without a path match every pattern.

Nothing is random: `Fail` counts the calls that match it, and corruption is bound to a position in
the file, so it is the same whatever ranges the file is written or read in.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import numpy as np

from remesh.errors import NoSpaceError, StorageError
from remesh.storage import Buffer, FileSystemSpace, Storage, StorageView, Writer

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Fail:
    """Matching calls raise."""

    operation: str
    path: str = "*"  # pattern of paths, as in a shell
    number: int = errno.EIO  # ENOSPC and EDQUOT make a `NoSpaceError`, others a `StorageError`
    skip: int = 0  # how many matching calls go well first
    times: int | None = None  # how many fail after that; None for all


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit of each matching file is wrong."""

    path: str  # pattern of paths
    position: int  # byte of the file
    bit: int = 0  # of the byte, 0 the lowest
    when: Literal["written", "read"] = "read"
    """`"written"`: the wrong bit is stored. `"read"`: it is stored right and read wrong."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Readers find the end of each matching file too early."""

    path: str  # pattern of paths
    num_bytes: int  # where it ends


StorageFault: TypeAlias = Fail | FlipBit | Truncate


class FaultyStorage(StorageView):
    """A storage with faults, over one without.

    Attributes:
        calls: Operation and path ("" where there is none) of each call, in order.
    """

    def __init__(self, inner: Storage, faults: Sequence[StorageFault]) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self._inner = inner
        self._faults = tuple(faults)
        self._lock = threading.Lock()
        self._num_matches = dict.fromkeys((f for f in faults if isinstance(f, Fail)), 0)

    def list(self, prefix: str = "") -> list[str]:
        self.meet("list")
        return super().list(prefix)

    def size(self, path: str) -> int:
        self.meet("size", path)
        return min(super().size(path), self._end(path))

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        self.meet("read", path)
        end = self._end(path)
        data = super().read(path, min(start, end), end if stop is None else min(stop, end))
        return self.flip(path, start, data, when="read")

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        self.meet("read_into", path)
        room = buffer[: max(self._end(path) - start, 0)]
        num_bytes = super().read_into(path, start, room)
        flipped = self.flip(path, start, room[:num_bytes].tobytes(), when="read")
        room[:num_bytes] = np.frombuffer(flipped, np.uint8)
        return num_bytes

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        self.meet("put", path)
        super().put(path, self.flip(path, 0, data, when="written"), overwrite=overwrite)

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> FaultyWriter:
        self.meet("create", path)
        return FaultyWriter(self, path, super().create(path, num_bytes, overwrite=overwrite))

    def delete(self, path: str) -> None:
        self.meet("delete", path)
        super().delete(path)

    def sync(self) -> None:
        self.meet("sync")
        super().sync()

    def space(self) -> FileSystemSpace | None:
        self.meet("space")
        return super().space()

    def meet(self, operation: str, path: str = "") -> None:
        """Note a call, and let the faults that it matches happen."""
        self.calls.append((operation, path))
        for fault in self._faults:
            if not isinstance(fault, Fail) or fault.operation != operation:
                continue
            if path and not fnmatchcase(path, fault.path):
                continue
            if self._is_due(fault):
                kind = NoSpaceError if fault.number in _NO_ROOM else StorageError
                raise kind(f"injected: cannot {operation} {path}: {os.strerror(fault.number)}")

    def flip(
        self, path: str, start: int, data: bytes, *, when: Literal["written", "read"]
    ) -> bytes:
        """The bytes of a range of a file, with the wrong bits in it."""
        for fault in self._faults:
            if (
                isinstance(fault, FlipBit)
                and fault.when == when
                and fnmatchcase(path, fault.path)
                and 0 <= fault.position - start < len(data)
            ):
                wrong = bytearray(data)
                wrong[fault.position - start] ^= 1 << fault.bit
                data = bytes(wrong)
        return data

    def _is_due(self, fault: Fail) -> bool:
        with self._lock:
            number = self._num_matches[fault]
            self._num_matches[fault] += 1
        return number >= fault.skip and (fault.times is None or number < fault.skip + fault.times)

    def _end(self, path: str) -> int:
        """The largest size that a file appears to have."""
        ends = [
            fault.num_bytes
            for fault in self._faults
            if isinstance(fault, Truncate) and fnmatchcase(path, fault.path)
        ]
        return min(ends, default=_NEVER)


class FaultyWriter:
    """A file of a `FaultyStorage` that is being written."""

    def __init__(self, storage: FaultyStorage, path: str, inner: Writer) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    def write(self, position: int, data: Buffer) -> None:
        self._storage.meet("write", self._path)
        right = data.tobytes()
        wrong = self._storage.flip(self._path, position, right, when="written")
        self._inner.write(position, data if wrong == right else np.frombuffer(wrong, np.uint8))

    def finish(self, num_bytes: int | None = None) -> None:
        self._storage.meet("finish", self._path)
        self._inner.finish(num_bytes)

    def abort(self) -> None:
        self._storage.meet("abort", self._path)
        self._inner.abort()
