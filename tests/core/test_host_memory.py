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


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path, {})) == 64 * GB


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path, {}, meminfo=None)) is None


def test_this_machine_says_something() -> None:
    available = available_memory()
    assert available is not None
    assert 0 < available < 1 << 50


@pytest.mark.parametrize("name", ["memory_max", "memory_high"])
def test_a_container_of_version_2(name: str, tmp_path: Path) -> None:
    """A pod of Kubernetes: the process sees its own group as the root."""
    limits: dict[str, str | int] = {"memory_max": "max", "memory_high": "max", name: 8 * GB}
    files = version_2(
        "",
        **limits,
        memory_current=5 * GB,
        memory_stat=f"anon {2 * GB}\ninactive_file {1 * GB}\nactive_file {2 * GB}",
    )
    files |= {"proc/self/cgroup": "0::/", "proc/self/mountinfo": VERSION_2_MOUNT}
    assert available_memory(tree(tmp_path, files)) == 4 * GB


@pytest.mark.parametrize("tightest", ["/kubepods", "/kubepods/pod1", "/kubepods/pod1/main"])
def test_the_least_of_nested_groups(tightest: str, tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "proc/self/cgroup": "0::/kubepods/pod1/main",
        "proc/self/mountinfo": VERSION_2_MOUNT,
    }
    for group in ("/kubepods", "/kubepods/pod1", "/kubepods/pod1/main"):
        limit = 10 * GB if group == tightest else 40 * GB
        files |= version_2(group, memory_max=limit, memory_current=3 * GB, memory_stat="anon 1")
    assert available_memory(tree(tmp_path, files)) == 7 * GB


def test_no_limit_of_version_2(tmp_path: Path) -> None:
    files = version_2("/user", memory_max="max", memory_high="max", memory_current=3 * GB)
    files |= {"proc/self/cgroup": "0::/user", "proc/self/mountinfo": VERSION_2_MOUNT}
    assert available_memory(tree(tmp_path, files)) == 64 * GB


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = version_2("", memory_high=2 * GB, memory_current=3 * GB)
    files |= {"proc/self/cgroup": "0::/", "proc/self/mountinfo": VERSION_2_MOUNT}
    assert available_memory(tree(tmp_path, files)) == 0


def test_a_process_outside_of_the_group_that_is_mounted(tmp_path: Path) -> None:
    files = version_2("", memory_max=4 * GB, memory_current=1 * GB)
    files |= {"proc/self/cgroup": "0::/../other", "proc/self/mountinfo": VERSION_2_MOUNT}
    assert available_memory(tree(tmp_path, files)) == 3 * GB


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


def test_nested_groups_of_version_1(tmp_path: Path) -> None:
    limits: dict[str, str | int] = {"": NO_LIMIT_1, "/docker": 16 * GB, "/docker/abc": 32 * GB}
    files = version_1("/", "/docker/abc", limits)
    assert available_memory(tree(tmp_path, files)) == 12 * GB


def test_a_container_of_version_1(tmp_path: Path) -> None:
    """Docker mounts the container's own group; the process's group has its name on the host."""
    files = version_1("/docker/abc", "/docker/abc", {"": 8 * GB})
    assert available_memory(tree(tmp_path, files)) == 4 * GB


def test_no_limit_of_version_1(tmp_path: Path) -> None:
    files = version_1("/", "/", {"": NO_LIMIT_1})
    assert available_memory(tree(tmp_path, files)) == 64 * GB


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
