"""How far away a storage is, and how to ask one that is far away."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from remesh.storage.local import LocalStorage
from remesh.storage.memory import MemoryStorage
from remesh.storage.protocol import Storage
from remesh.storage.room import is_network_device
from remesh.storage.view import StorageView

NUM_TOGETHER = 16
"""Requests at a time: each waits for the network and takes hardly any processor."""

_Answer = TypeVar("_Answer")


def is_local(storage: Storage) -> bool:
    """Whether the files lie in directories of this machine: then the storage's `url` is a path."""
    return isinstance(storage, LocalStorage)


def is_remote(storage: Storage) -> bool:
    """Whether every byte that is read crosses a network: object stores, network file systems.

    A directory that cannot be looked at counts as local; reading it will say what is wrong.
    """
    while isinstance(storage, StorageView):
        storage = storage.behind
    if is_local(storage):
        try:
            return is_network_device(os.stat(storage.url).st_dev)
        except OSError:
            return False
    return not isinstance(storage, MemoryStorage)


def ask_together(storage: Storage, questions: Sequence[Callable[[], _Answer]]) -> list[_Answer]:
    """Ask a storage several things: at the same time if each takes a round trip of a network.

    Args:
        storage: What is asked.
        questions: Each asks one thing.

    Returns:
        The answers, in order.

    Raises:
        RemeshError: The first failure, in the order of the questions; all others are asked, too,
            if they are asked at the same time.
    """
    if len(questions) < 2 or not is_remote(storage):
        return [question() for question in questions]
    with ThreadPoolExecutor(min(len(questions), NUM_TOGETHER)) as threads:
        asked = [threads.submit(question) for question in questions]
    return [answer.result() for answer in asked]
