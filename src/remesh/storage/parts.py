"""Ranges in any order become parts in order, for storages that take a file as a stream.

Object stores take a large file as a sequence of parts of one size, several megabytes each, while
writers bring smaller chunks from several threads, nearly in order. Between them is a window of a
few parts: a chunk is copied into the parts that it touches, and a part leaves as soon as all parts
before it have left and it is full. A thread that writes beyond the window waits until it moves,
which bounds the memory. So a thread has to write the beginning: if the window does not move for a
long time, those who wait give up with an error.

The upload runs in a thread of its own, which takes the parts and ends when the writer says that all
is written. Ranges that were not written are zeros. When the writer gives up, taking the next part
raises, and the upload undoes what it has done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from remesh.errors import StorageError
from remesh.storage.base import Buffer

WINDOW = 3
"""Parts that are filled at a time."""

STALL_SECONDS = 600.0
"""How long the window may stand still; longer than any upload of a part with its retries."""


class GivenUpError(Exception):
    """Raised to the upload when its writer was aborted; it is not raised elsewhere."""


class Parts:
    """The window between writers and an upload; the file may turn out to be smaller."""

    def __init__(
        self, name: str, num_bytes: int, part_bytes: int, *, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._name = name
        self._num_bytes = num_bytes
        self._part_bytes = part_bytes
        self._stall_seconds = stall_seconds
        self._num_parts = -(-num_bytes // part_bytes)
        self._first = 0  # the part that leaves next
        self._buffers: dict[int, Buffer] = {}
        self._missing: dict[int, int] = {}
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._finished = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def write(self, position: int, data: Buffer) -> None:
        """Copy a range into its parts; thread-safe for disjoint ranges.

        StorageError if the upload has failed, or the window does not move.
        """
        assert 0 <= position <= position + data.size <= self._num_bytes
        while data.size:
            number, start = divmod(position, self._part_bytes)
            taken = data[: self._part_bytes - start]
            stop = start + taken.size
            self._buffer(number)[start:stop] = taken
            with self._changed:
                if self._failure is None:
                    self._missing[number] -= taken.size
                    self._ranges[number].append((start, stop))
                    if not self._missing[number]:  # nothing less is waited for
                        self._changed.notify_all()
            position += taken.size
            data = data[taken.size :]

    def finish(self, num_bytes: int | None = None) -> None:
        """Let all parts leave, full or not; what lies after `num_bytes` has not been written."""
        with self._changed:
            if num_bytes is not None:
                self._num_bytes = num_bytes
                self._num_parts = -(-num_bytes // self._part_bytes)
            self._finished = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let every thread that waits, or that comes later, fail."""
        with self._changed:
            self._failure = self._failure or error
            self._buffers.clear()
            self._changed.notify_all()

    def take(self) -> Iterator[Buffer]:
        """The parts in order until the file is finished; GivenUpError if it was aborted."""
        number = 0
        while (part := self._take(number)) is not None:
            yield part
            number += 1

    def _take(self, number: int) -> Buffer | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished or self._failure is not None or self._is_full(number)
            )
            self._check()
            if number >= self._num_parts:
                return None
            size = self._size_of(number)  # of the last part only now
            part = self._open(number)[:size]
            if self._missing[number]:
                _clear_gaps(part, self._ranges[number])
            del self._buffers[number], self._missing[number], self._ranges[number]
            self._first = number + 1
            self._changed.notify_all()
            return part

    def _is_full(self, number: int) -> bool:
        return self._missing.get(number) == 0

    def _buffer(self, number: int) -> Buffer:
        """The buffer of a part; waits until the window reaches it."""
        with self._changed:
            while self._failure is None and number >= self._first + WINDOW:
                first = self._first
                if not self._changed.wait_for(
                    lambda first=first: self._first != first or self._failure is not None,  # type: ignore[misc]
                    self._stall_seconds,
                ):
                    raise StorageError(
                        f"cannot write {self._name}: part {number} has waited "
                        f"{self._stall_seconds:.0f} s for part {first}\nObject stores take a file "
                        "nearly in order; write its beginning first"
                    )
            self._check()
            return self._open(number)

    def _open(self, number: int) -> Buffer:
        if number not in self._buffers:
            size = self._size_of(number)
            self._buffers[number] = np.empty(size, np.uint8)
            self._missing[number] = size
            self._ranges[number] = []
        return self._buffers[number]

    def _size_of(self, number: int) -> int:
        return min(self._part_bytes, self._num_bytes - number * self._part_bytes)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _clear_gaps(part: Buffer, ranges: list[tuple[int, int]]) -> None:
    """Set to zero what lies in no range of a part."""
    end = 0
    for start, stop in sorted(ranges):
        part[end:start] = 0
        end = stop
    part[end:] = 0


class StreamWriter:
    """A file that is uploaded while it is written; see `remesh.storage.Writer`.

    The upload takes the parts and makes the file exist when they end; if they raise instead, it
    undoes what it has done and raises. `on_close` is called once when the file is finished or given
    up.
    """

    def __init__(
        self,
        name: str,
        num_bytes: int,
        part_bytes: int,
        *,
        upload: Callable[[Iterator[Buffer]], None],
        on_close: Callable[[], None],
    ) -> None:
        self._name = name
        self._parts = Parts(name, num_bytes, part_bytes)
        self._upload = upload
        self._on_close = on_close
        self._error: BaseException | None = None
        self._open = True
        # Threads inherit whether the interpreter waits for them at its exit.
        self._thread = threading.Thread(target=self._run, name="remesh-upload")
        self._thread.start()

    def write(self, position: int, data: Buffer) -> None:
        """See `Writer.write`; waits if it is too far ahead of the upload."""
        assert self._open, f"{self._name} is closed"
        self._parts.write(position, data)

    def finish(self, num_bytes: int | None = None) -> None:
        assert self._open, f"{self._name} is closed"
        self._parts.finish(num_bytes)
        self._thread.join()
        self._close()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        if self._open:
            self._parts.fail(GivenUpError())
            self._thread.join()
            self._close()

    def _close(self) -> None:
        self._open = False
        self._on_close()

    def _run(self) -> None:
        try:
            self._upload(self._parts.take())
        except BaseException as error:  # noqa: BLE001 - raised by `write` or `finish`
            self._error = error
            self._parts.fail(error)
