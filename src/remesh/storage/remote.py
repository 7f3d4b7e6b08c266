"""The common part of storages that are reached through a client library.

What the library raises becomes an error of remesh, without secrets (`remesh.storage.messages`). A
file has one writer of a storage at a time, and is a stream of parts: object stores take a large
file as a sequence of parts of one size, several megabytes each, while writers bring smaller chunks
from several threads, nearly in order. Between them is a window of a few parts: a chunk is copied
into the parts that it touches, and a part leaves as soon as all parts before it have left and it is
full. A thread that writes beyond the window waits until it moves, which bounds the memory. So a
thread has to write the beginning: if the window does not move for a long time, those who wait give
up with an error.

The upload runs in a thread of its own, which takes the parts and ends when the writer says that all
is written. Ranges that were not written are zeros. When the writer gives up, taking the next part
raises, and the upload undoes what it has done.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from remesh.errors import RemeshError, StorageError
from remesh.storage.base import Buffer, Storage, check_path, is_hidden, prefix_directory
from remesh.storage.messages import explain, shown_url

WINDOW = 3
"""Parts that are filled at a time."""

STALL_SECONDS = 600.0
"""How long the window may stand still; longer than any upload of a part with its retries."""


class GivenUpError(Exception):
    """Raised to the upload when its writer was aborted; it is not raised elsewhere."""


class StreamWriter:
    """A file that is uploaded while it is written; see `remesh.storage.Writer`.

    The upload takes the parts and makes the file exist when they end; if they raise instead, it
    undoes what it has done and raises.
    """

    def __init__(
        self, name: str, num_bytes: int, part_bytes: int, upload: Callable[[Iterator[Buffer]], None]
    ) -> None:
        self._name = name
        self._num_bytes = num_bytes
        self._part_bytes = part_bytes
        self._upload = upload
        self._first = 0  # the part that leaves next
        self._parts: dict[int, Buffer] = {}  # those of the window
        self._missing: dict[int, int] = {}  # bytes of each that were not written yet
        self._failure: BaseException | None = None
        self._is_finished = False
        self._is_open = True
        self._changed = threading.Condition()
        # Threads inherit whether the interpreter waits for them at its exit.
        self._thread = threading.Thread(target=self._run, name="remesh-upload")
        self._thread.start()

    def write(self, position: int, data: Buffer) -> None:
        """See `Writer.write`; waits if it is too far ahead of the upload."""
        assert self._is_open, f"{self._name} is closed"
        assert 0 <= position <= position + data.size <= self._num_bytes
        while data.size:
            number, start = divmod(position, self._part_bytes)
            taken = data[: self._part_bytes - start]
            self._part(number)[start : start + taken.size] = taken
            with self._changed:
                self._check()
                self._missing[number] -= taken.size
                if not self._missing[number]:  # nothing less is waited for
                    self._changed.notify_all()
            position += taken.size
            data = data[taken.size :]

    def finish(self, num_bytes: int | None = None) -> None:
        assert self._is_open, f"{self._name} is closed"
        with self._changed:
            if num_bytes is not None:
                self._num_bytes = num_bytes
            self._is_finished = True
            self._changed.notify_all()
        self._close()
        self._check()

    def abort(self) -> None:
        if self._is_open:
            self._fail(GivenUpError())
            self._close()

    def _close(self) -> None:
        self._thread.join()
        self._is_open = False

    def _run(self) -> None:
        try:
            self._upload(self._take_all())
        except BaseException as error:  # noqa: BLE001 - raised by `write` or `finish`
            self._fail(error)

    def _take_all(self) -> Iterator[Buffer]:
        """The parts in order until the file is finished; raises if it was aborted."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._is_finished
                        or self._failure is not None
                        or self._missing.get(self._first) == 0
                    )
                )
                self._check()
                if self._first * self._part_bytes >= self._num_bytes:
                    return
                size = self._size_of(self._first)  # of the last part only now
                part = self._open(self._first)[:size]
                del self._parts[self._first], self._missing[self._first]
                self._first += 1
                self._changed.notify_all()
            yield part

    def _part(self, number: int) -> Buffer:
        """The memory of a part; waits until the window reaches it."""
        with self._changed:
            while self._failure is None and number >= self._first + WINDOW:
                first = self._first
                if not self._changed.wait(STALL_SECONDS) and self._first == first:
                    raise StorageError(
                        f"cannot write {self._name}: part {number} has waited "
                        f"{STALL_SECONDS:.0f} s for part {first}\nObject stores take a file "
                        "nearly in order; write its beginning first"
                    )
            self._check()
            return self._open(number)

    def _open(self, number: int) -> Buffer:
        if number not in self._parts:
            self._missing[number] = self._size_of(number)
            self._parts[number] = np.zeros(self._missing[number], np.uint8)
        return self._parts[number]

    def _size_of(self, number: int) -> int:
        return min(self._part_bytes, self._num_bytes - number * self._part_bytes)

    def _fail(self, error: BaseException) -> None:
        """Let every thread that waits, or that comes later, fail."""
        with self._changed:
            self._failure = self._failure or error
            self._parts.clear()
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


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

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        return {
            path: size
            for path, size in self._list(prefix_directory(prefix), prefix).items()
            if path.startswith(prefix) and not is_hidden(path)
        }

    @abstractmethod
    def _list(self, directory: str, shown: str) -> dict[str, int]:
        """Relative path → bytes of all files below a directory, hidden ones too."""

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(self._read_some(path, start, stop))

    def read_range(self, path: str, start: int, num_bytes: int, buffer: Buffer) -> Buffer:  # noqa: ARG002
        return np.frombuffer(self._read_some(path, start, start + num_bytes), np.uint8)

    def _read_some(self, path: str, start: int, stop: int | None) -> memoryview:
        assert start >= 0
        assert stop is None or stop >= 0
        if stop is not None and stop <= start:
            self.size(path)  # raises if there is no such file
            return memoryview(b"")
        return self._read(path, start, stop)

    @abstractmethod
    def _read(self, path: str, start: int, stop: int | None) -> memoryview:
        """The bytes [start, stop) of a file, at least one; fewer if it ends before."""

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
            try:
                with self._explained("write", path):
                    upload(parts)
            finally:
                with self._lock:
                    self._unfinished.discard(path)

        return StreamWriter(self._name(path), num_bytes, part_bytes, run)
