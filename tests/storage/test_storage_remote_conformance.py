"""Storages behind obstore and fsspec pass the suite."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from obstore.store import MemoryStore

from remesh.storage import Storage, open_storage
from remesh.storage.fsspec_store import FsspecStorage
from remesh.storage.object_store import ObjectStorage
from tests.storage.object_servers import BUCKET, S3Server, s3_server
from tests.support.conformance import StorageConformance

_prefixes = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.mark.usefixtures("server")
class TestObjectStorageOnS3(StorageConformance):
    finds_files_late = True

    def make_storage(self, tmp_path: Path) -> Storage:
        return open_storage(f"s3://{BUCKET}/run {next(_prefixes)}/50%#x")


class TestObjectStorageInSmallParts(StorageConformance):
    """Larger files are uploads of several parts."""

    finds_files_late = True

    def make_storage(self, tmp_path: Path) -> Storage:
        return ObjectStorage("memory://parts", MemoryStore(), part_bytes=100_000)


class TestFsspecInMemory(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        return open_storage(f"memory://run-{next(_prefixes)}/x")


class TestFsspecOnFiles(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        return FsspecStorage(f"local://{tmp_path}", fsspec.filesystem("file"), str(tmp_path / "x"))


class TestFsspecInSmallParts(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        root = f"/parts-{next(_prefixes)}"
        return FsspecStorage(
            "memory://" + root, fsspec.filesystem("memory"), root, part_bytes=100_000
        )
