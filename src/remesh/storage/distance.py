"""How far away a storage is."""

from __future__ import annotations

import os

from remesh.storage.local import LocalStorage
from remesh.storage.memory import MemoryStorage
from remesh.storage.protocol import Storage
from remesh.storage.room import is_network_device


def is_local(storage: Storage) -> bool:
    """Whether the files lie in directories of this machine: then the storage's `url` is a path."""
    return isinstance(storage, LocalStorage)


def is_remote(storage: Storage) -> bool:
    """Whether every byte that is read crosses a network: object stores, network file systems.

    A directory that cannot be looked at counts as local; reading it will say what is wrong.
    """
    if is_local(storage):
        try:
            return is_network_device(os.stat(storage.url).st_dev)
        except OSError:
            return False
    return not isinstance(storage, MemoryStorage)
