"""Files that are uploaded while they are written, as streams of parts.

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
