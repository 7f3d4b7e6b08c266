"""Directories of an agent: for snapshots, and for sockets and the token of a master inside it.

The agent makes them, tells its processes where they are, and removes them when it ends, so that no
memory stays taken. It holds a lock on each, which the kernel releases however the agent ends. So a
directory that can be locked belongs to no living agent: the next agent on the machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

MEMORY = "/dev/shm"  # noqa: S108 - memory, and the directory is made for this user alone
SNAPSHOTS = "remesh-snapshots-"
"""Beginning of the names of directories for snapshots."""
SOCKETS = "remesh-agent-"
"""Beginning of the names of directories for sockets, and the token of a master inside the agent."""


def snapshot_directory(parent: str) -> AbstractContextManager[str]:
    """A directory for snapshots, which is gone in the end; "" if there is nowhere to make one.

    The parent is a directory in memory (tmpfs).
    """
    exists = bool(parent) and os.path.isdir(parent)
    return agent_directory(parent, SNAPSHOTS) if exists else contextlib.nullcontext("")


def socket_directory() -> AbstractContextManager[str]:
    """A directory for sockets, which is gone in the end."""
    return agent_directory(tempfile.gettempdir(), SOCKETS)


@contextmanager
def agent_directory(parent: str, prefix: str) -> Iterator[str]:
    """A locked directory, which is removed in the end; those of dead agents are removed before."""
    remove_abandoned(parent, prefix)
    path, descriptor = _make(parent, prefix)
    try:
        yield path
    finally:
        _remove(path)
        os.close(descriptor)


def write_token(directory: str, port: int, token: str) -> str:
    """Write the token of a master of this process where `token_of` finds it; the path."""
    path = Path(directory, f"{port}.token")
    path.touch(0o600)
    path.write_text(token, encoding="utf-8")
    return str(path)


def token_of(port: int) -> str:
    """The token of a master in an agent of this user, on this machine; empty if there is none."""
    try:
        parent = tempfile.gettempdir()
        mark = directory_mark(parent)
    except OSError:
        return ""  # no process of this machine can have made one
    for directory in Path(parent).glob(f"{SOCKETS}{mark}-*"):
        with contextlib.suppress(OSError):  # another user's, or it has just been removed
            if directory.lstat().st_uid == os.geteuid():
                return (directory / f"{port}.token").read_text(encoding="utf-8")
    return ""


def remove_abandoned(parent: str, prefix: str) -> list[str]:
    """Remove the directories whose agents are dead; returns their paths."""
    removed = []
    for path in sorted(map(str, Path(parent).glob(f"{prefix}*"))):
        descriptor = _lock(path)
        if descriptor is not None:
            _remove(path)
            os.close(descriptor)
            removed.append(path)
    if removed:
        log.warning("removed what agents that are dead have left: %s", ", ".join(removed))
    return removed


def directory_mark(parent: str) -> str:
    """A part of the name of an agent's directory: it says in which directory it was made.

    It is the same for all processes that see that directory, in containers too, and another for any
    other directory, also that of the same path on another machine.
    """
    status = os.stat(parent)
    boot = b""
    with contextlib.suppress(FileNotFoundError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    identity = f"{boot!r}:{status.st_dev}:{status.st_ino}"
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def _make(parent: str, prefix: str) -> tuple[str, int]:
    prefix = f"{prefix}{directory_mark(parent)}-"
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        descriptor = _lock(path)
        if descriptor is not None:
            return path, descriptor
        # Another agent found it before it was locked, and is removing it.


def _lock(path: str) -> int | None:
    """Take the lock of a directory; None if it is taken, another user's, or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        # The last holder of the lock may have removed the directory meanwhile.
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
