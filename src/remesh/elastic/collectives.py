"""Wake a process that waits in a collective whose partners are gone.

In gloo only the neighbours of a dead rank get an error; the others wait for the group's timeout.
`abort` of the gloo backend does not wake them, and `destroy_process_group` leaves the connections
open while modules hold the group. What wakes a thread in a collective is that its connections are
shut down, which another thread of the process can do: the collective raises at once, on the other
end of the connection as well.

Connections of gloo are those that its event loops watch. Such a loop is an epoll instance that
keeps a pointer for each descriptor, where libuv and Python keep the descriptor's number. Other
libraries keep pointers too (gRPC does), and their connections are left alone: gloo's pointer is to
an object of a C++ class, which begins with the address of the class's table in torch's library.
The connections of the store of the round go as well: a process may wait there for a rank that has
died.

NCCL's communicators are aborted at the same time, each in a thread: one frees memory of the device,
which waits for what another one still has running there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_EVENTS = re.compile(r"^tfd:\s*(\d+) .*?data:\s*([0-9a-f]+)", re.MULTILINE)
_LARGEST_DESCRIPTOR = 1 << 32
"""What an event loop keeps above this is a pointer."""
_LIBRARY = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*/lib(?:torch|gloo)[^/]*\.so", re.MULTILINE)
"""Where the library with gloo is in memory, in `/proc/self/maps`."""


def break_collectives(store_port: int) -> int:
    """Let all collectives of gloo in this process raise; how many connections were shut down."""
    connections = _gloo_descriptors() | _descriptors_at(store_port)
    for descriptor in connections:
        _shut_down(descriptor)
    return len(connections)


def abort_nccl() -> None:
    """Abort the communicators of NCCL, if any group of this process has one.

    What waits for a device goes on then, as if their collectives were done.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_nccl_available():
        return
    torch: Any = sys.modules["torch"]
    groups = c10d._world.pg_names  # noqa: SLF001 - there is no public list
    backends = []
    for group in list(groups):
        with contextlib.suppress(RuntimeError):  # a group without a backend for GPUs
            backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
            if isinstance(backend, c10d.ProcessGroupNCCL):
                backends.append(backend)
    threads = [threading.Thread(target=backend.abort, daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def leave_groups() -> None:
    """Destroy the process groups of this process, if there are any."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    if not dist.is_initialized():
        # A group whose making was interrupted has taken a number. The next one would be called by
        # another number than that of new processes, and all would wait for each other.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - the counter of all groups
        return
    try:
        dist.destroy_process_group()
    except Exception:  # a group whose partners are gone; the next one does not depend on it
        log.warning("a process group was not destroyed", exc_info=True)
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - forgets all groups


def _gloo_descriptors() -> set[int]:
    """The connected sockets that gloo's event loops watch."""
    watched = _watched()
    if not watched:
        return set()
    found = _LIBRARY.findall(Path("/proc/self/maps").read_text())
    libraries = [(int(begin, 16), int(end, 16)) for begin, end in found]
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return {
            descriptor
            for descriptor, pointer in watched.items()
            if _is_of_class_in(libraries, memory, pointer) and _ports_of(descriptor) is not None
        }
    finally:
        os.close(memory)


def _watched() -> dict[int, int]:
    """The descriptors for which an event loop keeps a pointer, and the pointers."""
    found = {}
    for name, target in _open_files():
        if target != "anon_inode:[eventpoll]":
            continue
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/fdinfo/{name}").read_text()
            for descriptor, data in _EVENTS.findall(text):
                if int(data, 16) > _LARGEST_DESCRIPTOR:
                    found[int(descriptor)] = int(data, 16)
    return found


def _is_of_class_in(libraries: list[tuple[int, int]], memory: int, pointer: int) -> bool:
    """True if a pointer is to an object of a class of some libraries.

    The memory is read through the kernel: the object may be gone, or the pointer be none.
    """
    try:
        table = int.from_bytes(os.pread(memory, 8, pointer), sys.byteorder)
    except (OSError, OverflowError):
        return False
    return any(begin <= table < end for begin, end in libraries)


def _descriptors_at(port: int) -> set[int]:
    """The connected sockets with this port at either end."""
    sockets = [int(name) for name, target in _open_files() if target.startswith("socket:")]
    return {descriptor for descriptor in sockets if port in (_ports_of(descriptor) or ())}


def _open_files() -> list[tuple[str, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def _ports_of(descriptor: int) -> tuple[int, int] | None:
    """The ports of a connected internet socket; None if it is something else."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return one.getsockname()[1], one.getpeername()[1]
    except OSError:
        return None  # not a socket, not connected, or closed meanwhile


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        one.shutdown(socket.SHUT_RDWR)
