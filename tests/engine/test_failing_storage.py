"""Storage that fails or is full: all ranks fail, none hangs, and what was there is left alone."""

from __future__ import annotations

import errno
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import remesh
from remesh.exchange import Exchange
from remesh.pipeline import Compress
from remesh.storage import FileSystemSpace, LocalStorage, MemoryStorage, Storage
from tests.engine.scenes import all_are, errors_of, share_of
from tests.engine.small_checkpoint import (
    NUM_RANKS,
    arrays,
    is_right,
    loading_error,
    save_part,
    whole_state,
)
from tests.support import Fail, FaultyStorage, run_ranks

# ---------------------------------------------------------------------------------------------
# Storage that fails while it is written
# ---------------------------------------------------------------------------------------------

WRITE_FAULTS = {
    "create": Fail("create", number=errno.ENOSPC),
    "create second": Fail("create", "*/00001*", number=errno.ENOSPC),
    "write": Fail("write", number=errno.ENOSPC),
    "write second": Fail("write", "*/00001*", number=errno.EIO),
    "finish": Fail("finish", number=errno.EIO),
    "finish first": Fail("finish", "*/00000*", number=errno.EDQUOT),
    "sync": Fail("sync", number=errno.EIO),
    "last sync": Fail("sync", number=errno.EIO, skip=NUM_RANKS),
    "values": Fail("put", "*/values.msgpack", number=errno.ENOSPC),
    "index": Fail("put", "*/index.safetensors", number=errno.EIO),
    "record": Fail("put", "remesh.json", number=errno.EIO),
    "record without room": Fail("put", "remesh.json", number=errno.ENOSPC),
    "space": Fail("space", number=errno.EIO),
    "read": Fail("read", number=errno.EIO),
}


@pytest.mark.parametrize("fault", WRITE_FAULTS)
@pytest.mark.parametrize(
    ("again", "compress"),
    [(False, None), (True, None), (False, "zstd")],
    ids=["first save", "over an old one", "compressed"],
)
def test_a_failing_save_fails_on_all_ranks_and_leaves_what_was(
    fault: str, again: bool, compress: Compress | None
) -> None:
    inner = MemoryStorage()
    if again:
        run_ranks(NUM_RANKS, save_part, inner)
    before = inner.list()
    storage = FaultyStorage(inner, [WRITE_FAULTS[fault]])
    errors = errors_of(NUM_RANKS, save_part, storage, compress)
    full = WRITE_FAULTS[fault].number != errno.EIO
    for error in errors:
        assert type(error) is (remesh.errors.NoSpaceError if full else remesh.StorageError)
        assert "injected" in str(error)
    if fault != "record":
        assert inner.list() == before
    else:
        # Whether a failed put of the record has made it visible, nobody can tell.
        assert set(inner.list()) > set(before)
    if again:
        state = whole_state()
        remesh.load(state, inner)
        assert is_right(state)
        assert remesh.Checkpoint(inner).verify().ok
    else:
        with pytest.raises(remesh.CheckpointNotFoundError):
            remesh.Checkpoint(inner)
    run_ranks(NUM_RANKS, save_part, inner)
    state = whole_state()
    remesh.load(state, inner)
    assert is_right(state)


def test_what_cannot_be_removed_does_not_hide_why_the_save_failed() -> None:
    faults = [Fail("put", "*/index.safetensors", number=errno.ENOSPC), Fail("delete")]
    storage = FaultyStorage(MemoryStorage(), faults)
    all_are(errors_of(NUM_RANKS, save_part, storage), remesh.errors.NoSpaceError, "put")


def test_a_disk_that_fails_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """After the first of several chunks, and after the first of several reads."""
    whole = np.arange(5 << 20, dtype=np.uint32)
    failing = FaultyStorage(
        LocalStorage(tmp_path), [Fail("write", skip=1), Fail("read_into", skip=1)]
    )

    def save(exchange: Exchange) -> None:
        state = {"w": share_of("w", whole, exchange.rank, 2)}
        remesh.save(state, failing if exchange.rank else tmp_path, group=exchange)

    all_are(errors_of(NUM_RANKS, save), remesh.StorageError, "cannot write")
    assert sum(operation == "write" for operation, _ in failing.calls) > 1
    assert list(tmp_path.iterdir()) == []
    remesh.save({"w": whole}, tmp_path)
    target = np.zeros_like(whole)
    with pytest.raises(remesh.StorageError, match="cannot read_into") as caught:
        remesh.load({"w": target}, failing)
    assert any("partly loaded" in note for note in caught.value.__notes__)
    assert ((target == whole) | (target == 0)).all()
    assert (target == 0).sum() > 1
    remesh.load({"w": target}, tmp_path)
    np.testing.assert_array_equal(target, whole)


# ---------------------------------------------------------------------------------------------
# No room
# ---------------------------------------------------------------------------------------------


class Crowded(FaultyStorage):
    """Writes down its calls, and says what room there is."""

    def __init__(self, inner: Storage, space: FileSystemSpace | None) -> None:
        super().__init__(inner, ())
        self._space = space

    def space(self) -> FileSystemSpace | None:
        return self._space


def needed_bytes() -> int:
    return sum(array.nbytes for array in arrays(fill=True).values())


def test_a_full_disk_is_found_before_anything_is_written() -> None:
    """What ranks need on one disk is added up; each alone would fit."""
    space = FileSystemSpace("disk", needed_bytes() - 1)
    storage = Crowded(MemoryStorage(), space)
    errors = errors_of(NUM_RANKS, save_part, storage)
    all_are(errors, remesh.errors.NoSpaceError, "Nothing was written", storage.url)
    assert {operation for operation, _ in storage.calls} == {"read", "list", "size"}


def test_a_disk_that_is_full_because_another_one_is_not_mounted(tmp_path: Path) -> None:
    storage = Crowded(
        LocalStorage(tmp_path / "mount/run"), FileSystemSpace("disk", 0, "", str(tmp_path))
    )
    with pytest.raises(remesh.errors.NoSpaceError) as caught:
        remesh.save(arrays(fill=True), storage)
    assert str(caught.value).endswith(
        f"Nothing was written. Free some space in {tmp_path}, or save elsewhere. If "
        f"{tmp_path}/mount, which does not exist, should be a mount point, mount it."
    )


def test_room_is_needed_for_what_compression_might_not_spare() -> None:
    storage = Crowded(MemoryStorage(), FileSystemSpace("disk", needed_bytes() - 1))
    with pytest.raises(remesh.errors.NoSpaceError, match=r"needs \S+ \S+, "):
        remesh.save(arrays(fill=True), storage)
    with pytest.raises(remesh.errors.NoSpaceError, match=" before compression, "):
        remesh.save(arrays(fill=True), storage, compress="zstd")


@pytest.mark.parametrize(
    "identities", [("same", "same"), ("one", "other")], ids=["one disk", "two disks"]
)
def test_room_is_counted_by_disk(identities: tuple[str, str]) -> None:
    inner = MemoryStorage()
    free = needed_bytes() * 2 // 3

    def save(exchange: Exchange) -> None:
        save_part(exchange, Crowded(inner, FileSystemSpace(identities[exchange.rank], free)))

    if identities[0] == identities[1]:
        all_are(errors_of(NUM_RANKS, save), remesh.errors.NoSpaceError)
        assert inner.list() == []
    else:
        run_ranks(NUM_RANKS, save)
        assert remesh.Checkpoint(inner).verify().ok


def big_part(exchange: Exchange, place: Storage | Path) -> None:
    rows = share_of("w", np.ones((2, 1 << 19), np.uint8), exchange.rank, exchange.world_size)
    remesh.save({"w": rows, "blob": bytes(1 << 18)}, place, overwrite=True, group=exchange)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [1 << 12, (1 << 18) + 100])
def test_files_that_may_not_be_so_large(num_bytes: int, tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, save_part, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with file_size_limit(num_bytes):
        errors = errors_of(NUM_RANKS, big_part, tmp_path)
    all_are(errors, remesh.errors.NoSpaceError, "ulimit -f")
    assert sorted(tmp_path.rglob("*")) == before
    assert loading_error(tmp_path) is None


@contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of a certain size, where this user may mount one."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


# Room for the old checkpoint and nothing else, for one of two data files, and for both of them but
# not for the values.
@pytest.mark.parametrize("num_bytes", [1 << 16, 3 << 18, (1 << 20) + (1 << 16)])
@pytest.mark.parametrize("honest", [True, False], ids=["known room", "unknown room"])
def test_a_disk_that_becomes_full(num_bytes: int, honest: bool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_bytes) as disk:
        path, space = disk / "step", LocalStorage(disk).space()
        assert space is not None
        assert space.free_bytes == num_bytes
        run_ranks(NUM_RANKS, save_part, path)
        before = sorted(path.rglob("*"))

        def save(exchange: Exchange) -> None:
            storage = LocalStorage(path)
            big_part(exchange, storage if honest else Crowded(storage, None))

        all_are(errors_of(NUM_RANKS, save), remesh.errors.NoSpaceError)
        assert sorted(path.rglob("*")) == before
        assert loading_error(path) is None
