"""Our storages pass the suite, each on every path that its bytes may take."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.storage import LocalStorage, MemoryStorage, Storage
from tests.support import FaultyStorage
from tests.support.conformance import StorageConformance


class TestLocalStorage(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run" / "checkpoints")


class TestLocalStorageBuffered(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path, direct_io=False)


class TestLocalStorageOnTmpfs(StorageConformance):
    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no /dev/shm to write to")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield Path(directory)

    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path)


class TestLocalStorageWhereOpeningDirectlyFails(StorageConformance):
    """As on file systems that do not know `O_DIRECT`."""

    @pytest.fixture(autouse=True)
    def _refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_open = os.open

        def refuse(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return real_open(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse)

    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path)


class TestLocalStorageWhereUsingDirectlyFails(StorageConformance):
    """As on file systems that accept `O_DIRECT` and then want more than aligned ranges."""

    @pytest.fixture(autouse=True)
    def _refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_pwrite, real_preadv = os.pwrite, os.preadv

        def refuse_direct(descriptor: int) -> None:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        def pwrite(descriptor: int, data: memoryview, position: int) -> int:
            refuse_direct(descriptor)
            return real_pwrite(descriptor, data, position)

        def preadv(descriptor: int, buffers: list[memoryview], position: int) -> int:
            refuse_direct(descriptor)
            return real_preadv(descriptor, buffers, position)

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "preadv", preadv)

    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path)


class TestLocalStorageWithoutHardLinks(StorageConformance):
    """As on FAT and some user-space file systems."""

    @pytest.fixture(autouse=True)
    def _refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(source: str, target: str) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), source)

        monkeypatch.setattr(os, "link", refuse)

    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path)


class TestMemoryStorage(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        return MemoryStorage()


class TestFaultyStorageWithoutFaults(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        return FaultyStorage(MemoryStorage(), [])
