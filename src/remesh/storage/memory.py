"""A storage in the memory of one process, for tests and for ranks that are threads.

All ranks share one object. Files are read-only arrays in a dict that a lock guards; a file that is
being written has its own array outside the dict and enters it when its writer finishes, so no
reader sees a part of it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from remesh.errors import CheckpointNotFoundError, StorageError
from remesh.storage.base import Buffer, Storage, check_path, prefix_directory, taken


class MemoryStorage(Storage):
    """Files in a dict, safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, Buffer] = {}
        self._unfinished: dict[str, Buffer] = {}

    @property
    def url(self) -> str:
        """See `Storage.url`; no other process can open it."""
        return f"memory://{id(self):x}"

    @property
    def latency(self) -> float | None:
        return None

    def list(self, prefix: str = "") -> list[str]:
        prefix_directory(prefix)
        with self._lock:
            return sorted(path for path in self._files if path.startswith(prefix))

    def size(self, path: str) -> int:
        return self._content(path).size

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        assert start >= 0
        assert stop is None or stop >= 0
        return self._content(path)[start:stop].tobytes()

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        assert start >= 0
        found = self._content(path)[start : start + buffer.size]
        buffer[: found.size] = found
        return found.size

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        check_path(path)
        with self._lock:
            if path in self._unfinished or (path in self._files and not overwrite):
                raise taken(f"{self.url}/{path}")
            self._files[path] = np.frombuffer(data, np.uint8)

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> MemoryWriter:
        check_path(path)
        with self._lock:
            if (path in self._files and not overwrite) or path in self._unfinished:
                raise StorageError(f"{self.url}/{path} exists already; choose another place")
            content = self._unfinished[path] = np.zeros(num_bytes, np.uint8)
        return MemoryWriter(self, path, content)

    def delete(self, path: str) -> None:
        check_path(path)
        with self._lock:
            self._files.pop(path, None)

    def sync(self) -> None:
        """See `Storage.sync`; there is nothing to do."""

    def _end(self, path: str, content: Buffer | None) -> None:
        """A file is written, or given up."""
        with self._lock:
            del self._unfinished[path]
            if content is not None:
                content.flags.writeable = False
                self._files[path] = content

    def _content(self, path: str) -> Buffer:
        check_path(path)
        with self._lock:
            try:
                return self._files[path]
            except KeyError:
                raise CheckpointNotFoundError(f"there is no file {self.url}/{path}") from None


@dataclass(slots=True, eq=False)
class MemoryWriter:
    """A file of a `MemoryStorage` that is being written."""

    _storage: MemoryStorage
    _path: str
    _content: Buffer
    _open: bool = True

    def write(self, position: int, data: Buffer) -> None:
        assert self._open, f"{self._path} is closed"
        assert 0 <= position <= position + data.size <= self._content.size
        self._content[position : position + data.size] = data

    def finish(self, num_bytes: int | None = None) -> None:
        assert self._open, f"{self._path} is closed"
        # Memory that was never written takes no room.
        self._close(self._content[:num_bytes])

    def abort(self) -> None:
        if self._open:
            self._close(None)

    def _close(self, content: Buffer | None) -> None:
        self._open = False
        self._storage._end(self._path, content)  # noqa: SLF001 - two halves of one thing
