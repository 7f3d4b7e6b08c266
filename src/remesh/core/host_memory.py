"""How much memory this process may still take: what the machine has, within the container's limits.

The kernel counts the memory of a container in a control group, and kills a process of the group
when its limit is reached, however much the machine has free. Groups are nested, and each has limits
of its own. So what is available is the least of what the machine and each group, from that of the
process up to the root, have left. Page cache that the kernel drops first (the inactive files) does
not count as used. What lies in a file system in memory (`/dev/shm`) does.

Version 2 of control groups has one tree; version 1 has a tree for memory among others. Both may be
mounted at once, and in a container the top of what is mounted is the container's own group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Version:
    """The files in which a version of control groups says what a group uses and may use."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_VERSION_1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take; None if unknown. `root` has `proc` and `sys`."""
    left = [*_left_on_machine(root), *_left_in_groups(root)]
    if not left and root == Path("/"):
        left = [*_half_of_machine()]
    return max(min(left), 0) if left else None


def _half_of_machine() -> Iterator[int]:
    """Half of the machine's memory, where the system does not say how much is free (macOS)."""
    with suppress(AttributeError, OSError, ValueError):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _left_on_machine(root: Path) -> Iterator[int]:
    """Memory that is free on the machine or holds a cache that can be dropped, if it says so."""
    for line in kernel_lines(root / "proc/meminfo"):
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            yield int(amount.split()[0]) << 10


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each group of this process has left, if it has limits."""
    for line in kernel_lines(root / "proc/self/cgroup"):
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            version, kind = _VERSION_2, "cgroup2"
        elif "memory" in controllers.split(","):
            version, kind = _VERSION_1, "cgroup"
        else:
            continue
        for mount, top in _mounts(root, kind):
            for directory in _nested(mount, top, group):
                yield from _left_in_group(root / directory.relative_to("/"), version)


def _mounts(root: Path, kind: str) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Where trees of memory groups are mounted, and which group is the top of each."""
    for line in kernel_lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        found, _, options = file_system.split(" ", 2)
        if found == kind and (kind == "cgroup2" or "memory" in options.split(",")):
            top, point = mount.split()[3:5]
            yield PurePosixPath(point), PurePosixPath(top)


def _nested(mount: PurePosixPath, top: PurePosixPath, group: str) -> Iterator[PurePosixPath]:
    """The directories of a group and of all groups around it, as far as they are mounted."""
    path = PurePosixPath(group)
    # With a view of its own, the process sees a group outside of what is mounted for it as `/..`,
    # and without one, the name of its group begins with the top.
    inside = path.relative_to(top) if path.is_relative_to(top) else path.relative_to("/")
    if ".." in inside.parts:
        inside = PurePosixPath()
    directory = mount / inside
    while directory != mount:
        yield directory
        directory = directory.parent
    yield mount


def _left_in_group(directory: Path, version: _Version) -> Iterator[int]:
    """Bytes that a group has left until each of its limits."""
    used = _number(directory / version.usage)
    if used is None:
        return  # the root of version 2 has no such file
    for line in kernel_lines(directory / "memory.stat"):
        name, _, amount = line.partition(" ")
        if name == version.reclaimable:
            used -= int(amount)
    for name in version.limits:
        limit = _number(directory / name)
        if limit is not None:
            yield limit - used


def _number(path: Path) -> int | None:
    """The number in a file; None if it says `max` or is not there."""
    text = "".join(kernel_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def kernel_lines(path: Path) -> list[str]:
    """The lines of a file that the kernel may not offer, as in some sandboxes; none then."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
