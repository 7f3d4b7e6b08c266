"""A directory in memory for the snapshots of a node's ranks, from the agent's start to its end.

The ranks keep what is in it (`remesh.checkpoint.scattered`); the agent makes it, tells its
processes where it is, and removes it when it ends, so that no memory stays taken.

An agent that is killed cannot do that, so the next one on the machine does. Each agent holds a lock
on its directory, which the kernel releases however the agent ends: a directory that can be locked
has nobody any more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

MEMORY = "/dev/shm"  # noqa: S108 - memory, and the directory is made for this user alone
PREFIX = "remesh-snapshots-"


@contextmanager
def snapshot_directory(parent: str) -> Iterator[str]:
    """A directory for snapshots, which is gone in the end; "" if there is nowhere to make one.

    Args:
        parent: A directory in memory (tmpfs); empty for no snapshots.
    """
    if not parent or not os.path.isdir(parent):
        yield ""
        return
    remove_abandoned(parent)
    path, descriptor = _make(parent)
    try:
        yield path
    finally:
        _remove(path)
        os.close(descriptor)


def remove_abandoned(parent: str) -> list[str]:
    """Remove the directories whose agents are dead; returns their paths.

    Args:
        parent: Where they are; those of other users are left alone.
    """
    removed = []
    for path in sorted(map(str, Path(parent).glob(f"{PREFIX}*"))):
        descriptor = _lock(path)
        if descriptor is not None:
            log.warning("%s is of an agent that is dead: removed", path)
            _remove(path)
            os.close(descriptor)
            removed.append(path)
    return removed


def _make(parent: str) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        descriptor = _lock(path)
        if descriptor is not None:
            return path, descriptor
        # Another agent took it for abandoned before it was locked, and is removing it.


def _lock(path: str) -> int | None:
    """Take the lock of a directory; None if somebody has it, or it is not ours, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        # Who had the lock before may have removed the directory meanwhile.
        if status.st_uid == os.geteuid() and os.path.samestat(status, os.lstat(path)):
            return descriptor
    except OSError:
        pass  # it is locked, or gone
    os.close(descriptor)
    return None


def _remove(path: str) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("%s is not removed and takes memory: %s", path, error)
