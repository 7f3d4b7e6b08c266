"""A few threads that share work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from remesh.storage.base import Buffer
from remesh.storage.buffers import aligned_buffer


def run_threads(
    num_threads: int,
    work: Callable[[], None],
    stop: Callable[[], None],
) -> None:
    """Do the same work in a few threads; the first error is raised when all have ended.

    If the system gives fewer threads, fewer do the work: they share it, so all of it is done. A
    single thread is the caller's own. `stop` tells all of them to end soon: when one fails, and on
    Ctrl-C, which arrives in the thread that waits and not in those that work.
    """
    errors: list[BaseException] = []

    def attempt(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)
            stop()

    if num_threads <= 1:
        attempt(work)
    else:
        threads: list[threading.Thread] = []
        try:
            _start(threads, num_threads, lambda: attempt(work))
            if not threads:
                attempt(work)
        except BaseException as error:  # noqa: BLE001 - Ctrl-C; raised below
            errors.append(error)
            stop()
        # Also after Ctrl-C: what the caller does next must not meet threads that still work.
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _start(threads: list[threading.Thread], num_threads: int, work: Callable[[], None]) -> None:
    """Start threads, as many as the system gives, and put each that runs into the list."""
    for _ in range(num_threads):
        # Threads inherit whether the interpreter waits for them at its exit.
        thread = threading.Thread(target=work)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            return
        threads.append(thread)


def run_workers(
    num_threads: int,
    num_tasks: int,
    buffer_bytes: int,
    work: Callable[[int, Buffer], None],
) -> None:
    """Do tasks 0, 1, 2, ... with a few threads; the first error stops all of them and is raised.

    `work` gets the number of a task and the thread's aligned buffer.
    """
    tasks = deque(range(num_tasks))

    def take_tasks() -> None:
        buffer = aligned_buffer(buffer_bytes)
        while True:
            try:
                task = tasks.popleft()
            except IndexError:
                return
            work(task, buffer)

    run_threads(min(num_threads, num_tasks), take_tasks, tasks.clear)
