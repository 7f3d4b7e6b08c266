"""Every storage does what `remesh.storage` promises, on each path that its bytes may take."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from obstore.store import MemoryStore

from remesh.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from remesh.storage import (
    ALIGNMENT,
    LocalStorage,
    MemoryStorage,
    Storage,
    aligned_buffer,
    open_storage,
)
from remesh.storage.object_store import ObjectStorage
from tests.storage.object_servers import BUCKET
from tests.storage.scenes import aligned, pattern, winners_of, write
from tests.support import FaultyStorage


def refuse(number: int, path: str = "") -> NoReturn:
    raise OSError(number, os.strerror(number), path)


def refuse_to_open_directly(patch: pytest.MonkeyPatch) -> None:
    """As file systems that do not know `O_DIRECT`."""
    real_open = os.open

    def opened(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            refuse(errno.EINVAL, path)
        return real_open(path, flags, mode)

    patch.setattr(os, "open", opened)


def refuse_to_move_directly(patch: pytest.MonkeyPatch) -> None:
    """As file systems that accept `O_DIRECT` and then want more than aligned ranges."""

    def buffered(call: Callable[..., int]) -> Callable[..., int]:
        def moved(descriptor: int, *arguments: object) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                refuse(errno.EINVAL)
            return call(descriptor, *arguments)

        return moved

    for name in ("pwrite", "preadv"):
        patch.setattr(os, name, buffered(getattr(os, name)))


def refuse_hard_links(patch: pytest.MonkeyPatch) -> None:
    """As FAT and some user-space file systems."""
    patch.setattr(os, "link", lambda source, _target: refuse(errno.EPERM, source))


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


_numbers = itertools.count()

STORAGES: dict[str, Callable[[Path], Storage]] = {
    "local": lambda place: LocalStorage(place / "run" / "checkpoints"),
    "buffered": lambda place: LocalStorage(place, direct_io=False),
    "tmpfs": LocalStorage,
    "no direct files": LocalStorage,
    "no direct ranges": LocalStorage,
    "no hard links": LocalStorage,
    "memory": lambda _: MemoryStorage(),
    "without faults": lambda _: FaultyStorage(MemoryStorage(), []),
    "S3": lambda _: open_storage(f"s3://{BUCKET}/run {next(_numbers)}/50%#x"),
    "S3 in parts": lambda _: ObjectStorage("memory://x", MemoryStore(), part_bytes=100_000),
}


@pytest.fixture(params=STORAGES)
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    match request.param:
        case "tmpfs":
            tmp_path = request.getfixturevalue("tmpfs")
        case "S3":
            request.getfixturevalue("server")
        case "no direct files":
            refuse_to_open_directly(monkeypatch)
        case "no direct ranges":
            refuse_to_move_directly(monkeypatch)
        case "no hard links":
            refuse_hard_links(monkeypatch)
    return STORAGES[request.param](tmp_path)


class TestStorage:
    # ----- whole small files -----

    @pytest.mark.parametrize("size", [0, 1, ALIGNMENT, 100_001])
    def test_put_then_read(self, storage: Storage, size: int) -> None:
        data = pattern(size).tobytes()
        storage.put("step_1/values", data, overwrite=False)
        assert storage.read("step_1/values") == data
        assert storage.exists("step_1/values")
        assert not storage.exists("step_1/value")
        assert storage.size("step_1/values") == size

    def test_put_does_not_replace(self, storage: Storage) -> None:
        storage.put("a/b", b"old", overwrite=False)
        with pytest.raises(CheckpointExistsError, match="a/b"):
            storage.put("a/b", b"new", overwrite=False)
        assert storage.read("a/b") == b"old"
        assert storage.list() == ["a/b"]

    @pytest.mark.parametrize("content", [b"", b"longer than before"])
    def test_put_replaces_on_request(self, storage: Storage, content: bytes) -> None:
        storage.put("a/b", b"old", overwrite=True)
        storage.put("a/b", content, overwrite=True)
        assert storage.read("a/b") == content

    def test_one_of_many_puts_wins(self, storage: Storage) -> None:
        (winner,) = winners_of([storage] * 8, "race", 1000)
        assert storage.read("race") == b"%d" % winner * 1000
        assert storage.list() == ["race"]

    def test_readers_see_whole_puts(self, storage: Storage) -> None:
        def content(number: int) -> bytes:
            return b"%d" % (number % 10) * (5000 + 1000 * (number % 2))

        storage.put("hint", content(0), overwrite=True)
        stop = threading.Event()

        def replace() -> None:
            for number in range(50):
                storage.put("hint", content(number), overwrite=True)
            stop.set()

        seen = set()
        buffer = aligned_buffer(2 * ALIGNMENT)
        with ThreadPoolExecutor(1) as pool:
            replacing = pool.submit(replace)
            while not stop.is_set() and not replacing.done():
                seen.add(storage.read("hint"))
                seen.add(buffer[: storage.read_into("hint", 0, buffer)].tobytes())
                assert storage.list() == ["hint"]
            replacing.result()
        assert seen <= {content(number) for number in range(10)}

    # ----- reading -----

    def test_ranges(self, storage: Storage) -> None:
        storage.put("file", b"0123456789", overwrite=False)
        assert storage.read("file", 3) == b"3456789"
        assert storage.read("file", 3, 6) == b"345"
        assert storage.read("file", 8, 100) == b"89"
        assert storage.read("file", 10, 12) == b""
        assert storage.read("file", 50) == b""
        assert storage.read("file", 6, 3) == b""

    @pytest.mark.parametrize("size", [0, 5, ALIGNMENT, 3 * ALIGNMENT + 7])
    def test_read_into(self, storage: Storage, size: int) -> None:
        content = pattern(size)
        write(storage, "data/0", content)
        starts = (0, 1, ALIGNMENT, 2 * ALIGNMENT)
        lengths = (0, 1, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT + 1)
        for start, length, shift in itertools.product(starts, lengths, (0, 1)):
            buffer = aligned_buffer(length + shift)[shift:]
            buffer[:] = 255
            expected = content[start : start + length]
            assert storage.read_into("data/0", start, buffer) == expected.size
            np.testing.assert_array_equal(buffer[: expected.size], expected)
            found = storage.read_range("data/0", start, length, buffer[:length])
            np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("path", ["gone", "no/such/directory", "here/below"])
    def test_missing_files(self, storage: Storage, path: str) -> None:
        storage.put("here", b"x", overwrite=False)
        buffer = aligned_buffer(ALIGNMENT)
        calls: list[Callable[[], object]] = [
            lambda: storage.read(path),
            lambda: storage.size(path),
            lambda: storage.read_into(path, 0, buffer),
            lambda: storage.read_range(path, 0, ALIGNMENT, buffer),
        ]
        for call in calls:
            with pytest.raises(CheckpointNotFoundError, match=path) as caught:
                call()
            assert storage.url in str(caught.value)

    # ----- files written by ranges -----

    def test_ranges_in_any_order_and_from_threads(self, storage: Storage) -> None:
        content = pattern(64 * ALIGNMENT + 123)
        # Lengths that are no multiples of the alignment, so that direct and buffered writes meet.
        edges = sorted({0, content.size, *range(0, content.size, 3 * ALIGNMENT + 512)})
        ranges = list(itertools.pairwise(edges))
        writer = storage.create("file", content.size)
        buffer = aligned_buffer(content.size)
        buffer[:] = content

        def write(span: tuple[int, int]) -> None:
            writer.write(span[0], buffer[span[0] : span[1]])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, ranges[::-1]))
        writer.finish()
        assert storage.read("file") == content.tobytes()

    def test_unwritten_ranges_are_counted(self, storage: Storage) -> None:
        writer = storage.create("file", 3 * ALIGNMENT)
        writer.write(ALIGNMENT, aligned(pattern(ALIGNMENT)))
        writer.finish()
        assert storage.size("file") == 3 * ALIGNMENT
        assert storage.read("file", ALIGNMENT, 2 * ALIGNMENT) == pattern(ALIGNMENT).tobytes()

    @pytest.mark.parametrize("num_bytes", [0, 1, ALIGNMENT, 2 * ALIGNMENT + 7])
    def test_a_file_may_be_shorter_than_was_said(self, storage: Storage, num_bytes: int) -> None:
        writer = storage.create("file", 3 * ALIGNMENT)
        writer.write(0, aligned(pattern(num_bytes)))
        writer.finish(num_bytes)
        assert storage.size("file") == num_bytes
        assert storage.read("file") == pattern(num_bytes).tobytes()

    def test_create_does_not_replace(self, storage: Storage) -> None:
        write(storage, "file", pattern(10))
        with pytest.raises(StorageError, match=r"file.*exists"):
            # A network away it may be found out when the file is written.
            write(storage, "file", pattern(11)) if storage.is_remote else storage.create("file", 11)
        assert storage.read("file") == pattern(10).tobytes()

    def test_a_file_is_replaced_when_the_new_one_is_whole(self, storage: Storage) -> None:
        if storage.shares_files:
            return  # there a file is renamed
        write(storage, "file", pattern(10))
        for num_bytes in (11, 3 * ALIGNMENT):
            old = storage.read("file")
            for ends in (False, True):
                writer = storage.create("file", num_bytes, overwrite=True)
                writer.write(0, aligned(pattern(num_bytes)))
                assert storage.read("file") == old
                writer.finish() if ends else writer.abort()
                assert storage.read("file") == (pattern(num_bytes).tobytes() if ends else old)

    def test_one_writer_at_a_time(self, storage: Storage) -> None:
        writer = storage.create("file", 10)
        with pytest.raises(StorageError, match="exists"):
            storage.create("file", 10)
        writer.abort()
        write(storage, "file", pattern(5))
        assert storage.size("file") == 5

    def test_abort_removes(self, storage: Storage) -> None:
        writer = storage.create("a/file", 2 * ALIGNMENT)
        writer.write(0, aligned(pattern(ALIGNMENT)))
        writer.abort()
        writer.abort()
        assert storage.list() == []
        with pytest.raises(CheckpointNotFoundError):
            storage.read("a/file")

    def test_abort_after_finish_does_nothing(self, storage: Storage) -> None:
        writer, data = storage.create("file", 3), pattern(3)
        writer.write(0, data)
        data[:] = 9  # the writer has no more need of it
        writer.finish()
        writer.abort()
        assert storage.read("file") == pattern(3).tobytes()

    # ----- names -----

    def test_list_is_sorted_and_filtered(self, storage: Storage) -> None:
        paths = ["step_2/a", "step_10/data/0", "step_1/b", "step_1/data/1", "step_1/data/0", "top"]
        for path in paths:
            storage.put(path, b"", overwrite=False)
        assert storage.list() == sorted(paths)
        assert storage.list("step_1/") == ["step_1/b", "step_1/data/0", "step_1/data/1"]
        assert storage.list("step_1") == sorted(p for p in paths if p.startswith("step_1"))
        assert storage.list("step_1/data/1") == ["step_1/data/1"]
        assert storage.list("step_1/data/0/") == []
        assert storage.list("no/such/") == []

    def test_sizes_of_all_files(self, storage: Storage) -> None:
        assert storage.list_sizes() == {}
        storage.put("a/b", b"12", overwrite=False)
        storage.put("top", b"", overwrite=False)
        write(storage, "a/data", pattern(ALIGNMENT + 1))
        sizes = {"a/b": 2, "a/data": ALIGNMENT + 1, "top": 0}
        assert storage.list_sizes() == sizes
        assert storage.list_sizes("a/d") == {"a/data": ALIGNMENT + 1}
        assert sorted(storage.list_sizes()) == storage.list()

    def test_entries_of_a_directory(self, storage: Storage) -> None:
        assert storage.list_directory().files == {}
        for path in ("a/b/c", "a/d", "aa/e", "top"):
            storage.put(path, b"12", overwrite=False)
        root, inside = storage.list_directory(), storage.list_directory("a")
        assert (root.directories, set(root.files)) == (("a", "aa"), {"top"})
        assert (inside.directories, set(inside.files)) == (("b",), {"d"})
        assert inside.files["d"].num_bytes == 2
        assert storage.list_directory("nothing").files == {}

    def test_delete_many(self, storage: Storage) -> None:
        for path in ("a/b", "a/c", "top"):
            storage.put(path, b"1", overwrite=False)
        storage.delete_many([])
        storage.delete_many(["a/b", "a/c", "never/was"])
        assert storage.list() == ["top"]

    def test_delete(self, storage: Storage) -> None:
        storage.put("a/b/c", b"1", overwrite=False)
        storage.put("a/d", b"2", overwrite=False)
        storage.delete("a/b/c")
        storage.delete("a/b/c")
        storage.delete("never/was")
        assert storage.list() == ["a/d"]
        with pytest.raises(CheckpointNotFoundError):
            storage.read("a/b/c")
        storage.put("a/b/c", b"3", overwrite=False)
        assert storage.read("a/b/c") == b"3"

    def test_a_link_stays_if_the_first_one_goes(self, storage: Storage) -> None:
        data = pattern(100_001).tobytes()
        storage.put("a/first", data, overwrite=False)
        assert not storage.link_from(storage, "a/absent", "b/absent", 1)
        assert not storage.link_from(storage, "a/first", "b/cut", len(data) - 1)
        is_linked = storage.link_from(storage, "a/first", "b/second", len(data))
        storage.sync()
        storage.delete("a/first")
        assert storage.list() == ["b/second"] * is_linked
        if is_linked:
            assert storage.read("b/second") == data

    @pytest.mark.parametrize(
        "path", ["", "..", "../out", "a/../../out", "/etc/passwd", "a//b", "a/", "./a", "a\0b"]
    )
    def test_paths_stay_inside(self, storage: Storage, path: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: storage.read(path),
            lambda: storage.size(path),
            lambda: storage.read_into(path, 0, aligned_buffer(1)),
            lambda: storage.put(path, b"", overwrite=True),
            lambda: storage.create(path, 1),
            lambda: storage.delete(path),
        ]
        for call in calls:
            with pytest.raises(StorageError, match="not a path inside"):
                call()

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../../", "/etc/"])
    def test_prefixes_stay_inside(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(StorageError, match="not a path inside"):
            storage.list(prefix)

    # ----- the rest -----

    def test_sync_and_space(self, storage: Storage) -> None:
        first = storage.space()
        write(storage, "a/b/file", pattern(10))
        storage.sync()
        storage.sync()
        second = storage.space()
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first.identity == second.identity
            assert first.free_bytes >= 0
