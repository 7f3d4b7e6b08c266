"""The common part of storages that are reached through a client library.

What the library raises becomes an error of remesh, without secrets (`remesh.storage.messages`). A
file is a stream of parts (`remesh.storage.parts`), and has one writer of a storage at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from remesh.errors import RemeshError, StorageError
from remesh.storage.base import Buffer, Storage, check_path
from remesh.storage.messages import explain, shown_url
from remesh.storage.parts import StreamWriter

_Answer = TypeVar("_Answer")


class RemoteStorage(Storage):
    """Files behind a library; safe to use from several threads."""

    lists_sizes = True
    reads_own_memory = True
    failures: tuple[type[Exception], ...] = (Exception,)
    """Exceptions of the library that become errors of remesh."""
    results: tuple[type[Exception], ...] = (RemeshError,)
    """Exceptions that are raised unchanged, because callers handle them."""

    def __init__(self, url: str) -> None:
        self._url = shown_url(url).rstrip("/")
        self._lock = threading.RLock()
        self._unfinished: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    def list(self, prefix: str = "") -> list[str]:
        return sorted(self.list_sizes(prefix))

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        data = self.read_range(path, start, buffer.size, buffer)
        buffer[: data.size] = data
        return data.size

    def sync(self) -> None:
        """See `Storage.sync`; a library has no such operation."""

    def _name(self, path: str) -> str:
        return f"{self._url}/{path}"

    @contextmanager
    def _explained(self, action: str, path: str) -> Iterator[None]:
        """Raise what the library raises as an error of remesh; the action is a verb ("write")."""
        try:
            yield
        except self.results:
            raise
        except self.failures as error:
            raise explain(action, self._name(path), error) from None

    def _answer(self, path: str, start: int, request: Callable[[], _Answer]) -> _Answer | None:
        """The answer to a request for bytes from `start` on; None if the file ends before.

        Such a range is an error of no class of its own.
        """
        try:
            with self._explained("read", path):
                return request()
        except StorageError:
            if start < self.size(path):
                raise
            return None

    def _stream(
        self,
        path: str,
        num_bytes: int,
        part_bytes: int,
        upload: Callable[[Iterator[Buffer]], None],
    ) -> StreamWriter:
        """A file that is uploaded while it is written."""
        check_path(path)
        with self._lock:
            if path in self._unfinished:
                raise StorageError(f"{self._name(path)} exists already: it is being written")
            self._unfinished.add(path)

        def run(parts: Iterator[Buffer]) -> None:
            with self._explained("write", path):
                upload(parts)

        def forget() -> None:
            with self._lock:
                self._unfinished.discard(path)

        return StreamWriter(self._name(path), num_bytes, part_bytes, upload=run, on_close=forget)
