"""Which file systems share their room.

Several ranks may write into one file system, so the room they need must be added up per file
system, which needs a name that all of them give it. A network file system is named by what was
mounted, the same on every node. Any other is named by the kernel that runs (its boot id, the same
in all containers of a machine and different between machines, which host names are not) and the
device's number.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_NETWORK = frozenset({"beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3"})

_IN_MEMORY = frozenset({"ramfs", "tmpfs"})


def room_identity(device: int) -> str:
    """The name of the room of a device (`os.stat_result.st_dev`)."""
    mounts = _read("/proc/self/mountinfo")
    machine = _read("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
    return network_mount(mounts, device) or f"{machine}:{device}"


def network_mount(mountinfo: str, device: int) -> str | None:
    """The source of a device's mount in `/proc/self/mountinfo`, if it is a network file system."""
    kind, source = _kind_and_source(mountinfo, device)
    return f"{kind}:{source}" if kind in _NETWORK else None


def _kind_and_source(mountinfo: str, device: int) -> tuple[str, str]:
    """The kind of a device's file system and what was mounted; empty if it is not mounted."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            kind, source = file_system.split()[:2]
            return kind, source
    return "", ""


def is_in_memory(device: int) -> bool:
    """True if what lies on a device, as in `os.stat_result.st_dev`, takes memory."""
    return _kind_and_source(_read("/proc/self/mountinfo"), device)[0] in _IN_MEMORY


def is_network_device(device: int) -> bool:
    """True if a device, as in `os.stat_result.st_dev`, is a network file system."""
    return network_mount(_read("/proc/self/mountinfo"), device) is not None


def _read(path: str) -> str:
    """A file that the kernel may not offer, as in some sandboxes; empty then."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
