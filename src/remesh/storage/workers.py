"""A few threads that share work, and requests to a storage that is far away."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from remesh.storage.base import Buffer, Storage, aligned_buffer


def run_threads(
    num_threads: int,
    work: Callable[[], object],
    stop: Callable[[], None],
) -> None:
    """Do the same work in a few threads; the first error is raised when all have ended.

    If the system gives fewer threads, fewer do the work: they share it, so all of it is done. A
    single thread is the caller's own. `stop` tells all of them to end soon: when one fails, and on
    Ctrl-C, which arrives in the thread that waits and not in those that work.
    """
    errors: list[BaseException] = []
    all_ended: list[threading.Event] = []
    beginning = threading.Lock()

    def attempt() -> None:
        ended = threading.Event()
        with beginning:
            if errors:
                return
            all_ended.append(ended)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)
            stop()
        finally:
            ended.set()

    threads: list[threading.Thread] = []
    try:
        for _ in range(num_threads if num_threads > 1 else 0):
            # Threads inherit whether the interpreter waits for them at its exit.
            thread = threading.Thread(target=attempt)
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                break
            threads.append(thread)
        if not threads:
            work()
        for thread in threads:
            thread.join()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C, or its own work; raised below
        with beginning:  # A thread that has not begun by now does nothing.
            errors.append(error)
        stop()
        # What the caller does next must not meet threads that still work. Before Python 3.13 a
        # `join` that Ctrl-C has ended takes the thread for ended; so does each later one.
        for ended in all_ended:
            ended.wait()
    if errors:
        raise errors[0]


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


NUM_TOGETHER = 16
"""Requests at a time: each waits for the network and takes hardly any processor."""

LINK_RATE = 2.5e9
"""Bytes a second that the requests of a process shall be able to move, whatever the latency."""

BYTES_UNDER_WAY = 256 << 20
"""Bytes that the requests of a process ask for, or send, at a time; the most of any latency."""

_Answer = TypeVar("_Answer")


def flow_for(
    num_bytes: int, latency: float, *, sizes: tuple[int, int], min_number: int
) -> tuple[int, int]:
    """The requests that move some bytes at the rate of the link: bytes of each, how many at a time.

    A few bytes go in as many requests as are under way at a time, so that they take one round trip.
    Many go in the largest requests, which cost least. The farther a storage is (latency, in
    seconds), the more requests are under way. Sizes are bytes of the smallest and the largest
    request, powers of two.
    """
    smallest, largest = sizes
    size = smallest
    while size < largest and 2 * size * min_number <= num_bytes:
        size *= 2
    number = math.ceil(latency * LINK_RATE / size)
    return size, min(max(number, min_number), BYTES_UNDER_WAY // size)


def ask_together(storage: Storage, questions: Sequence[Callable[[], _Answer]]) -> list[_Answer]:
    """Ask a storage several things: at the same time if each takes a round trip of a network.

    Returns the answers, in order, or raises the first failure in that order; all others are asked,
    too, if they are asked at the same time.
    """
    if len(questions) < 2 or not storage.is_remote:
        return [question() for question in questions]
    answers: list[Future[_Answer]] = [Future() for _ in questions]
    run_workers(
        NUM_TOGETHER, len(questions), 0, lambda number, _: _ask(questions[number], answers[number])
    )
    return [answer.result() for answer in answers]


def ask_meanwhile(question: Callable[[], _Answer]) -> Callable[[], _Answer]:
    """Ask something in a thread of its own, if the system gives one; the result waits for it."""
    answer: Future[_Answer] = Future()
    try:
        # Threads inherit whether the interpreter waits for them at its exit. A pool of threads
        # takes nothing once the interpreter ends, when saves may still be under way.
        threading.Thread(target=_ask, args=(question, answer), name="remesh-ask").start()
    except (RuntimeError, MemoryError):
        _ask(question, answer)
    return answer.result


def _ask(question: Callable[[], _Answer], answer: Future[_Answer]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
        answer.set_exception(error)
