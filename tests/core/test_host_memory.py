"""Available memory is judged within the limits of containers, in trees as kernels show them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from remesh.core.host_memory import available_memory
from remesh.storage import LocalStorage, local

GB = 1 << 30

VERSION_2_MOUNT = (
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    "31 23 0:27 / /dev/shm rw - tmpfs tmpfs rw"
)
NO_LIMIT_1 = "9223372036854771712"


def tree(root: Path, files: Mapping[str, str | int], meminfo: int | None = 64 * GB) -> Path:
    """A directory with the files that the kernel shows."""
    if meminfo is not None:
        files = {
            "proc/meminfo": f"MemTotal: {1 << 40} kB\nMemAvailable:   {meminfo >> 10} kB\n",
            **files,
        }
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def version_2(group: str, **files: str | int) -> dict[str, str | int]:
    """The files of a group of version 2; underscores stand for dots."""
    return {f"sys/fs/cgroup{group}/{name.replace('_', '.')}": text for name, text in files.items()}


def version_1(top: str, group: str, limits: Mapping[str, str | int]) -> dict[str, str | int]:
    """A tree of version 1 beside an empty one of version 2, as systemd mounts both."""
    files: dict[str, str | int] = {
        "proc/self/cgroup": f"9:cpu,cpuacct:/x\n4:memory:{group}\n1:name=systemd:/y\n0::/z",
        "proc/self/mountinfo": (
            "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
        ),
    }
    for directory, limit in limits.items():
        at = f"sys/fs/cgroup/memory{directory}"
        files[f"{at}/memory.limit_in_bytes"] = limit
        files[f"{at}/memory.usage_in_bytes"] = 6 * GB
        files[f"{at}/memory.stat"] = f"inactive_file 1\ntotal_inactive_file {2 * GB}"
    return files


def in_pod(group: str, **files: str | int) -> dict[str, str | int]:
    """The files of version 2 for a process of a group."""
    known = {"proc/self/cgroup": f"0::{group}", "proc/self/mountinfo": VERSION_2_MOUNT}
    return {**known, **version_2(group.partition("/..")[0].rstrip("/"), **files)}


def nested(tightest: str) -> dict[str, str | int]:
    """Groups in groups, of which one has the least left."""
    groups = ("/kubepods", "/kubepods/pod1", "/kubepods/pod1/main")
    found = in_pod(groups[-1])
    for group in groups:
        limit = 10 * GB if group == tightest else 40 * GB
        found |= version_2(group, memory_max=limit, memory_current=3 * GB, memory_stat="anon 1")
    return found


USED: dict[str, str | int] = {
    "memory_current": 5 * GB,
    "memory_stat": f"anon {2 * GB}\ninactive_file {1 * GB}\nactive_file {2 * GB}",
}
CASES: dict[str, tuple[dict[str, str | int], int]] = {
    "a machine without groups": ({}, 64 * GB),
    # A pod of Kubernetes: the process sees its own group as the root.
    "a container": (in_pod("/", memory_max=8 * GB, memory_high="max", **USED), 4 * GB),
    "a soft limit": (in_pod("/", memory_max="max", memory_high=8 * GB, **USED), 4 * GB),
    "the outer group is the tightest": (nested("/kubepods"), 7 * GB),
    "the middle group is": (nested("/kubepods/pod1"), 7 * GB),
    "the inner group is": (nested("/kubepods/pod1/main"), 7 * GB),
    "no limit": (
        in_pod("/user", memory_max="max", memory_high="max", memory_current=3 * GB),
        64 * GB,
    ),
    "over its limit": (in_pod("/", memory_high=2 * GB, memory_current=3 * GB), 0),
    "outside of the group that is mounted": (
        in_pod("/../other", memory_max=4 * GB, memory_current=1 * GB),
        3 * GB,
    ),
    "version 1, nested": (
        version_1("/", "/docker/abc", {"": NO_LIMIT_1, "/docker": 16 * GB, "/docker/abc": 32 * GB}),
        12 * GB,
    ),
    # Docker mounts the container's own group; the process's group has its name on the host.
    "version 1, a container": (version_1("/docker/abc", "/docker/abc", {"": 8 * GB}), 4 * GB),
    "version 1, no limit": (version_1("/", "/", {"": NO_LIMIT_1}), 64 * GB),
}
"""What the kernel shows, and what is available."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_available(case: str, tmp_path: Path) -> None:
    files, available = CASES[case]
    assert available_memory(tree(tmp_path, files)) == available


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path, {}, meminfo=None)) is None


def test_this_machine_says_something() -> None:
    assert 0 < (available_memory() or 0) < 1 << 50


@pytest.mark.parametrize("in_memory", [False, True])
def test_files_in_memory_count_as_memory(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "tmpfs" if in_memory else "ext4"
    monkeypatch.setattr(local, "mount_of", lambda _device: (kind, "none"))
    monkeypatch.setattr(local, "available_memory", lambda: 12345)
    space = LocalStorage(tmp_path).space()
    assert space is not None
    assert (space.free_bytes == 12345) == in_memory
