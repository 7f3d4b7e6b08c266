from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remesh.errors import CheckpointExistsError, NoSpaceError, StorageError
from remesh.storage import ALIGNMENT, Buffer, LocalStorage, aligned_buffer, local
from remesh.storage.local import open_direct
from tests.descriptors import open_below
from tests.storage.scenes import aligned, pattern

MIB = 1 << 20


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def failing(number: int) -> Callable[..., int]:
    """Stands in for a system call that fails."""

    def fail(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


# ----- direct I/O -----


class Recorder:
    """Counts the bytes that go each way, and passes everything on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = {"direct": 0, "buffered": 0}
        real_pwrite, real_preadv = os.pwrite, os.preadv

        def pwrite(descriptor: int, data: memoryview, position: int) -> int:
            return self._count(descriptor, real_pwrite(descriptor, data, position))

        def preadv(descriptor: int, buffers: list[memoryview], *rest: int) -> int:
            return self._count(descriptor, real_preadv(descriptor, buffers, *rest))

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "preadv", preadv)

    def _count(self, descriptor: int, num_bytes: int) -> int:
        self.num_bytes["direct" if is_direct(descriptor) else "buffered"] += num_bytes
        return num_bytes


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    probe = tmp_path / "probe"
    probe.touch()
    descriptor = open_direct(probe, os.O_WRONLY)
    if descriptor is None:
        pytest.skip("the file system of the temporary directory has no direct I/O")
    os.close(descriptor)
    return Recorder(monkeypatch)


@pytest.mark.parametrize(
    ("direct_io", "position", "shift", "is_direct"),
    [
        pytest.param(True, 0, 0, True, id="aligned"),
        pytest.param(True, 1, 0, False, id="odd position"),
        pytest.param(True, 0, 1, False, id="odd address"),
        pytest.param(True, ALIGNMENT, 512, False, id="address of a sector"),
        pytest.param(False, 0, 0, False, id="turned off"),
    ],
)
def test_whole_units_go_directly(
    tmp_path: Path,
    recorder: Recorder,
    *,
    direct_io: bool,
    position: int,
    shift: int,
    is_direct: bool,
) -> None:
    storage, content = LocalStorage(tmp_path, direct_io=direct_io), pattern(MIB + 10)
    buffer = aligned_buffer(shift + content.size)[shift:]
    buffer[:] = content
    writer = storage.create("file", position + content.size)
    writer.write(position, buffer)
    writer.finish()
    num_direct = MIB if is_direct else 0
    num_buffered = content.size - num_direct
    assert recorder.num_bytes == {"direct": num_direct, "buffered": num_buffered}
    buffer[:] = 0
    assert storage.read_into("file", position, buffer) == content.size
    np.testing.assert_array_equal(buffer, content)
    assert recorder.num_bytes == {"direct": 2 * num_direct, "buffered": 2 * num_buffered}


def test_ranges_in_the_page_cache_are_read_there(storage: LocalStorage, recorder: Recorder) -> None:
    content = pattern(MIB)
    storage.put("cached", content.tobytes(), overwrite=False)
    recorder.num_bytes["buffered"] = 0
    again = aligned_buffer(content.size)
    assert storage.read_into("cached", 0, again) == content.size
    np.testing.assert_array_equal(again, content)
    assert recorder.num_bytes == {"direct": 0, "buffered": MIB}


@pytest.mark.parametrize("shift", [0, 1], ids=["direct", "buffered"])
def test_a_read_is_of_one_file(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """Another file takes the name before every system call that reads."""
    sizes = [ALIGNMENT + 904, 2 * ALIGNMENT, 100, 2 * ALIGNMENT + 5, 0, 3 * ALIGNMENT]
    contents = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    num_calls = 0

    def replacing(call: Callable[..., object]) -> Callable[..., object]:
        def replace_and_call(*args: object, **options: object) -> object:
            nonlocal num_calls
            if not isinstance(args[0], int) and Path(str(args[0])).name != "hint":
                return call(*args, **options)
            num_calls += 1
            other = storage.url + "/other"
            Path(other).write_bytes(contents[num_calls % len(contents)])
            os.replace(other, storage.url + "/hint")
            return call(*args, **options)

        return replace_and_call

    storage.put("hint", contents[0], overwrite=True)
    for name in ("open", "stat", "fstat", "preadv"):
        monkeypatch.setattr(os, name, replacing(getattr(os, name)))
    buffer = aligned_buffer(4 * ALIGNMENT)
    for _ in range(20):
        assert storage.read("hint") in contents
        found = buffer[shift:]
        assert found[: storage.read_into("hint", 0, found)].tobytes() in contents


def test_short_writes_and_reads_are_continued(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_pwrite, real_preadv = os.pwrite, os.preadv

    # The system moves a little and admits to less, an odd number of bytes, so that direct I/O
    # loses its alignment on the way and must be left to the buffered descriptor.
    def pwrite(descriptor: int, data: memoryview, position: int) -> int:
        assert position % ALIGNMENT == 0 or not is_direct(descriptor)
        return min(real_pwrite(descriptor, data[:ALIGNMENT], position), 1001)

    def preadv(descriptor: int, buffers: list[memoryview], position: int, *flags: int) -> int:
        assert position % ALIGNMENT == 0 or not is_direct(descriptor)
        return min(real_preadv(descriptor, [buffers[0][:ALIGNMENT]], position, *flags), 1001)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "preadv", preadv)
    content = aligned(pattern(5 * ALIGNMENT + 77))
    writer = storage.create("file", content.size)
    writer.write(0, content)
    writer.finish()
    storage.put("small", content.tobytes(), overwrite=False)
    again = aligned_buffer(content.size)
    assert storage.read_into("file", 0, again) == content.size
    np.testing.assert_array_equal(again, content)
    assert storage.read("small") == content.tobytes()


# ----- reserving room -----


def test_room_is_reserved_before_writing(storage: LocalStorage) -> None:
    writer = storage.create("file", 8 * MIB)
    status = Path(storage.url, "file").stat()
    assert status.st_size == 8 * MIB
    if status.st_blocks == 0:
        pytest.skip("the file system of the temporary directory reserves no room")
    assert status.st_blocks * 512 >= 8 * MIB
    writer.abort()


@pytest.fixture
def refuse_room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the next calls of `fallocate` fail, each with a number."""

    def refuse(*numbers: int) -> None:
        left = list(numbers)

        def fallocate(*_: int) -> int:
            ctypes.set_errno(left.pop(0) if left else 0)
            return -1 if ctypes.get_errno() else 0

        monkeypatch.setattr(local, "_function_of_c", lambda *_: fallocate)

    return refuse


def test_files_get_their_size_where_no_room_can_be_reserved(
    storage: LocalStorage, refuse_room: Callable[..., None]
) -> None:
    refuse_room(errno.EINTR, errno.EOPNOTSUPP)
    storage.create("file", 10).finish()
    assert storage.read("file") == bytes(10)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_found_before_writing(
    storage: LocalStorage, refuse_room: Callable[..., None], number: int
) -> None:
    refuse_room(number)
    with pytest.raises(NoSpaceError, match="a/file"):
        storage.create("a/file", 10)
    assert storage.list() == []


# ----- directories that others remove -----


MAKING: dict[str, Callable[[LocalStorage], object]] = {
    "put": lambda storage: storage.put("a/file", b"1", overwrite=False),
    "create": lambda storage: storage.create("a/file", 1).finish(),
    "open_shared": lambda storage: storage.open_shared("a/file", 1).finish(),
}


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("making", MAKING)
def test_a_directory_that_goes_before_its_first_file_is_made_again(
    making: str, always: bool, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a rank that fails leaves the directory empty."""
    removed: list[Path] = []
    call = os.open

    def open_late(path: Any, *args: Any, **options: Any) -> int:
        if not removed or always:
            removed.append(Path(path).parent)
            removed[-1].rmdir()
        return call(path, *args, **options)

    monkeypatch.setattr(os, "open", open_late)
    if always:
        with pytest.raises(StorageError, match="its directory is gone"):
            MAKING[making](storage)
    else:
        MAKING[making](storage)
        assert storage.list() == ["a/file"]
    assert set(removed) == {Path(storage.url) / "a"}


def test_a_link_to_nothing_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "scratch").symlink_to(tmp_path / "not mounted")
    for path in ("file", "a/file"):
        with pytest.raises(StorageError, match="not a directory"):
            LocalStorage(tmp_path / "scratch").put(path, b"1", overwrite=False)


def test_a_file_that_is_leased_is_waited_for(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a file server for one of its clients; the system gives it back to those who wait."""
    storage.put("file", content := pattern(2 * ALIGNMENT).tobytes(), overwrite=False)
    call = os.open

    def open_leased(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_NONBLOCK:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return call(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_leased)
    assert storage.read("file") == content
    buffer = aligned_buffer(len(content))
    assert storage.read_into("file", 0, buffer) == len(content)
    assert buffer.tobytes() == content


# ----- errors -----


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.EIO, StorageError, "kernel's log"),
        (errno.EROFS, StorageError, "read-only"),
        (errno.ENOSPC, NoSpaceError, "free some room"),
        (errno.EDQUOT, NoSpaceError, "quota"),
        (errno.EACCES, StorageError, "right"),
        (errno.ELOOP, StorageError, "check the file system"),
    ],
)
def test_errors_name_file_and_remedy(
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[StorageError],
    remedy: str,
) -> None:
    writer = storage.create("file", 10)
    for name in ("pwrite", "preadv"):
        monkeypatch.setattr(os, name, failing(number))
    calls: list[Callable[[], object]] = [
        lambda: writer.write(0, pattern(10)),
        lambda: storage.put("file", b"0123456789", overwrite=True),
        lambda: storage.read_into("file", 0, aligned_buffer(10)),
        lambda: storage.read_into("file", 0, aligned_buffer(ALIGNMENT)),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=remedy) as caught:
            call()
        assert type(caught.value) is kind
        assert f"{storage.url}/file" in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == number
    writer.abort()
    assert os.listdir(storage.url) == []


def test_failing_fsync(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = storage.create("file", 10)
    assert open_below(storage.url)
    writer.write(0, pattern(10))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(StorageError, match="cannot finish"):
            writer.finish()
        with pytest.raises(StorageError, match="cannot write"):
            storage.put("small", b"x", overwrite=False)
    # A second fsync might succeed although the bytes are lost.
    with pytest.raises(AssertionError, match="closed"):
        writer.finish()
    writer.abort()
    assert storage.list() == []
    assert open_below(storage.url) == []


def test_places_that_cannot_hold_a_file(storage: LocalStorage) -> None:
    storage.put("file", b"x", overwrite=False)
    storage.put("directory/file", b"x", overwrite=False)
    with pytest.raises(StorageError, match="not a directory"):
        storage.put("file/below", b"x", overwrite=True)
    with pytest.raises(StorageError, match=r"(?s)file/below.*not a directory|Not a directory"):
        storage.create("file/below/further", 1)
    with pytest.raises(StorageError, match="is a directory"):
        storage.put("directory", b"x", overwrite=True)
    with pytest.raises(StorageError, match="not a file"):
        storage.size("directory")
    with pytest.raises(StorageError, match="is a directory"):
        storage.delete("directory")
    assert storage.list() == ["directory/file", "file"]
    os.mkfifo(f"{storage.url}/pipe")
    for buffer in (aligned_buffer(1), aligned_buffer(ALIGNMENT)):
        with pytest.raises(StorageError, match=r"cannot read .*pipe"):
            storage.read_into("pipe", 0, buffer)
    with pytest.raises(StorageError, match="not a file"):
        storage.read("pipe")
    inside = LocalStorage(f"{storage.url}/file")
    assert inside.list() == []
    with pytest.raises(StorageError, match="not a directory"):
        inside.put("below", b"", overwrite=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(storage: LocalStorage) -> None:
    root = Path(storage.url)
    root.mkdir()
    root.chmod(0o500)
    with pytest.raises(StorageError, match="give the user"):
        storage.create("file", 1)
    root.chmod(0o700)


# ----- exclusive puts -----


def test_link_whose_answer_got_lost(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    real_link = os.link

    def link(source: Path, target: Path) -> None:
        real_link(source, target)
        real_link(source, target)

    monkeypatch.setattr(os, "link", link)
    storage.put("file", b"ours", overwrite=False)
    assert storage.read("file") == b"ours"
    with pytest.raises(CheckpointExistsError):
        storage.put("file", b"theirs", overwrite=False)
    assert storage.read("file") == b"ours"


def test_marker_of_a_dead_writer(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EOPNOTSUPP))
    marker = Path(storage.url, ".remesh-put-file")
    marker.parent.mkdir()
    marker.touch()
    with pytest.raises(CheckpointExistsError, match=f"remove {marker}"):
        storage.put("file", b"x", overwrite=False)
    assert storage.list() == []
    marker.unlink()
    storage.put("file", b"x", overwrite=False)
    assert storage.read("file") == b"x"
    assert os.listdir(storage.url) == ["file"]


# ----- durability -----


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were made durable, in order."""
    paths: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_sync_covers_every_new_entry(tmp_path: Path, synced: list[str]) -> None:
    storage = LocalStorage(tmp_path / "new" / "place")
    for name in ("a/b/file", "a/other"):
        storage.create(name, 0).finish()
    assert sorted(synced) == [f"{tmp_path}/new/place/a/b/file", f"{tmp_path}/new/place/a/other"]
    synced.clear()
    storage.sync()
    expected = ["", "/new", "/new/place", "/new/place/a", "/new/place/a/b"]
    assert sorted(synced) == sorted([f"{tmp_path}{path}" for path in expected] + above(tmp_path))
    synced.clear()
    storage.sync()
    assert synced == []
    storage.delete("a/b/file")
    storage.create("a/b/file", 0).finish()
    synced.clear()
    storage.sync()
    assert sorted(synced) == [f"{tmp_path}/new/place/a", f"{tmp_path}/new/place/a/b"]


def above(path: Path) -> list[str]:
    """The directories above one, up to the root of its mount or the first that is not ours."""
    found: list[str] = []
    while not path.is_mount() and os.access(path.parent, os.W_OK):
        path = path.parent
        found.append(str(path))
    return found


def test_sync_covers_what_a_killed_save_made(tmp_path: Path, synced: list[str]) -> None:
    """Nothing tells whether directories that exist are durable, so all above are made so."""
    (tmp_path / "run" / "step_1" / "data").mkdir(parents=True)
    storage = LocalStorage(tmp_path / "run" / "step_1")
    storage.put("data/file", b"", overwrite=False)
    content, *directories = synced
    assert content.startswith(f"{tmp_path}/run/step_1/data/.remesh-put-")
    expected = [f"{tmp_path}{path}" for path in ("", "/run", "/run/step_1", "/run/step_1/data")]
    assert sorted(directories) == sorted(expected + above(tmp_path))
    synced.clear()
    storage.put("data/other", b"", overwrite=False)
    assert synced[1:] == [f"{tmp_path}/run/step_1/data"]


def test_directories_of_others_are_not_synced(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_access = os.access

    def access(path: Path, mode: int, *, effective_ids: bool) -> bool:
        return path != tmp_path and real_access(path, mode, effective_ids=effective_ids)

    monkeypatch.setattr(os, "access", access)
    LocalStorage(tmp_path / "run").put("file", b"", overwrite=False)
    assert str(tmp_path) in synced  # it got an entry
    synced.clear()
    LocalStorage(tmp_path / "run").put("file", b"", overwrite=True)
    assert synced[1:] == [f"{tmp_path}/run"]


def test_failed_sync_is_tried_again(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    storage.create("file", 0).finish()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(StorageError, match="cannot sync"):
            storage.sync()
    storage.sync()
    assert storage.url in synced


def test_sync_of_directories_that_are_gone(storage: LocalStorage) -> None:
    storage.create("a/b/file", 0).finish()
    storage.delete("a/b/file")
    storage.sync()


def test_file_systems_that_cannot_sync_directories(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            failing(errno.EINVAL)()
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    storage.put("file", b"x", overwrite=False)
    assert storage.read("file") == b"x"


# ----- names and places -----


def test_delete_prunes_empty_directories(storage: LocalStorage) -> None:
    storage.put("a/b/c/file", b"", overwrite=False)
    storage.put("a/other", b"", overwrite=False)
    storage.delete("a/b/c/file")
    assert os.listdir(Path(storage.url, "a")) == ["other"]
    storage.delete("a/other")
    assert os.listdir(storage.url) == []


def test_links_to_files_are_followed(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"content")
    snapshot = Path(storage.url, "snapshot")
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(tmp_path / "blob")
    (snapshot / "loop").symlink_to(snapshot, target_is_directory=True)
    assert storage.list() == ["snapshot/model.safetensors"]
    assert storage.read("snapshot/model.safetensors") == b"content"
    with pytest.raises(StorageError, match="exists"):
        storage.create("snapshot/model.safetensors", 1)
    assert (tmp_path / "blob").read_bytes() == b"content"


def test_hidden_files_of_others_are_listed(storage: LocalStorage) -> None:
    storage.put(".gitattributes", b"", overwrite=False)
    Path(storage.url, ".remesh-put-0123456789abcdef").touch()
    assert storage.list() == [".gitattributes"]


# ----- room -----


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:52 / /shared rw,relatime shared:9 - nfs4 server:/export rw,vers=4.2
41 22 0:53 /sub /scratch rw - lustre 10.0.0.1@tcp:/scratch rw
42 22 0:54 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("device", "kind", "source"),
    [
        (os.makedev(0, 52), "nfs4", "server:/export"),
        (os.makedev(0, 53), "lustre", "10.0.0.1@tcp:/scratch"),
        (os.makedev(254, 0), "ext4", "/dev/vda"),
        (os.makedev(9, 9), "", ""),
    ],
)
def test_mounts_are_found_by_device(
    device: int, kind: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "kernel_lines", lambda _path: MOUNTS.splitlines())
    assert local.mount_of(device) == (kind, source)


@pytest.mark.parametrize(
    ("kind", "source", "boot_id", "identity"),
    [
        ("nfs4", "server:/export", "b7", "nfs4:server:/export"),
        ("ext4", "/dev/vda", "b7", "b7:"),
        ("ext4", "/dev/vda", "", f"{socket.gethostname()}:"),
    ],
)
def test_room_has_a_name_that_all_ranks_in_it_give_it(
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    source: str,
    boot_id: str,
    identity: str,
) -> None:
    storage.put("file", b"", overwrite=False)
    monkeypatch.setattr(local, "mount_of", lambda _device: (kind, source))
    monkeypatch.setattr(local, "kernel_lines", lambda _path: boot_id.splitlines())
    space = storage.space()
    assert space is not None
    assert space.identity.startswith(identity)
    assert storage.is_remote == (kind == "nfs4")


def test_a_place_that_takes_no_files_is_not_called_full(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="a part of the path is a file"):
        LocalStorage(tmp_path / "file" / "step_1").space()
    monkeypatch.setattr(os, "access", lambda *_args, **_options: False)
    with pytest.raises(StorageError, match="Permission denied; give the user") as caught:
        storage.space()
    assert not isinstance(caught.value, NoSpaceError)


@pytest.mark.parametrize(("kind", "num_reads"), [("ext4", local.MAX_AT_DISK), ("nfs4", 4)])
def test_reads_under_way_at_a_time(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, kind: str, num_reads: int
) -> None:
    monkeypatch.setattr(local, "mount_of", lambda _device: (kind, "somewhere"))
    storage.put("a", bytes(4 * ALIGNMENT), overwrite=False)
    together = threading.Barrier(num_reads, timeout=60)
    under_way, seen, lock = 0, [], threading.Lock()

    def read(_descriptor: int, _start: int, buffer: Buffer, **_options: bool) -> int:
        nonlocal under_way
        with lock:
            under_way += 1
            seen.append(under_way)
        together.wait()
        with lock:
            under_way -= 1
        return buffer.size

    monkeypatch.setattr(local, "_read", read)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(storage.read_into, "a", 0, aligned_buffer(ALIGNMENT))
    assert max(seen) == num_reads
