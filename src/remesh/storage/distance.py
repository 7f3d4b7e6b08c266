"""How far away a storage is."""

from __future__ import annotations

import os

from remesh.storage.local import LocalStorage
from remesh.storage.memory import MemoryStorage
from remesh.storage.protocol import Storage
from remesh.storage.room import is_network_device


def is_remote(storage: Storage) -> bool:
    """Whether every byte that is read crosses a network: object stores, network file systems.

    A directory that cannot be looked at counts as local; reading it will say what is wrong.
    """
    if isinstance(storage, LocalStorage):
        try:
            return is_network_device(os.stat(storage.url).st_dev)
        except OSError:
            return False
    return not isinstance(storage, MemoryStorage)
