"""A few threads that share a list of chunks, each with a buffer of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from remesh.storage import Buffer, aligned_buffer


def run_workers(
    num_threads: int, num_tasks: int, buffer_bytes: int, work: Callable[[int, Buffer], None]
) -> None:
    """Do tasks 0, 1, 2, ... with a few threads; the first error stops all of them and is raised.

    Args:
        num_threads: Threads at most; a single one is the caller's own.
        num_tasks: Number of tasks.
        buffer_bytes: Size of the aligned buffer that each thread has.
        work: Does a task, given its number and the thread's buffer.
    """
    tasks = iter(range(num_tasks))
    lock = threading.Lock()
    failed = threading.Event()

    def take_tasks() -> None:
        buffer = aligned_buffer(buffer_bytes)
        while not failed.is_set():
            with lock:
                task = next(tasks, None)
            if task is None:
                return
            try:
                work(task, buffer)
            except BaseException:
                failed.set()
                raise

    num_threads = min(num_threads, num_tasks)
    if num_threads <= 1:
        take_tasks()
        return
    with ThreadPoolExecutor(num_threads, "remesh") as pool:
        try:
            for done in [pool.submit(take_tasks) for _ in range(num_threads)]:
                done.result()
        except BaseException:
            # Ctrl-C arrives here and not in the threads, which would go on to the last task.
            failed.set()
            raise
