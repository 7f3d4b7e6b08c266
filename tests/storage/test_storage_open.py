from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remesh.errors import StorageError
from remesh.storage import LocalStorage, MemoryStorage, is_local, open_storage
from remesh.storage.object_store import Bucket, ObjectStorage, open_bucket
from tests.support import FaultyStorage


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("/data/run", "/data/run"),
        ("/data/run/../other/", "/data/other"),
        ("file:///data/run", "/data/run"),
        ("FILE:///data/my%20run", "/data/my run"),
        ("file://localhost/data/run", "/data/run"),
        ("file:///data/100%25#1?x", "/data/100%#1?x"),
        (Path("/data/run"), "/data/run"),
    ],
)
def test_local_places(place: str | Path, path: str) -> None:
    storage = open_storage(place)
    assert isinstance(storage, LocalStorage)
    assert storage.url == path


def test_relative_paths_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("run").url == str(tmp_path / "run")
    assert open_storage("odd:name").url == str(tmp_path / "odd:name")


def test_storages_stay_what_they_are() -> None:
    for storage in (MemoryStorage(), LocalStorage("/data"), FaultyStorage(MemoryStorage(), [])):
        assert open_storage(storage) is storage


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("s3://bucket/run/", "s3://bucket/run"),
        ("S3A://bucket", "S3A://bucket"),
        ("s3://bucket/a b/50%#x?y", "s3://bucket/a b/50%#x?y"),
        ("abfss://container@account.dfs.core.windows.net/run", None),
        ("abfs://container@account.dfs.core.windows.net/run", None),
    ],
)
def test_buckets(url: str, kept: str | None) -> None:
    storage = open_storage(url)
    assert isinstance(storage, ObjectStorage)
    assert storage.url == (kept or url)
    assert storage.space() is None


@pytest.mark.parametrize("url", ["az://container/run", "azure://container/run", "adl://container"])
def test_azure_accounts_come_from_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StorageError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_storage(url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert isinstance(open_storage(url), ObjectStorage)


def test_google_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert isinstance(open_storage("gs://bucket/run"), ObjectStorage)


def test_a_bucket_stays_open_until_what_it_was_opened_with_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.json"
    key.write_text("{}")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_OF_OTHERS", str(key))

    def opened() -> Bucket:
        bucket, prefix = open_bucket("s3://bucket/run/1", "s3", "bucket/run/1")
        assert prefix == "run/1/"
        return bucket

    first = opened()
    assert open_bucket("s3a://bucket", "s3a", "bucket") == (first, "")
    found = [first]
    for change in (
        lambda: monkeypatch.setenv("AWS_SESSION_TOKEN", "another"),
        lambda: key.write_text('{"rotated": true}'),
        lambda: monkeypatch.setattr("os.getpid", lambda: -1),  # as in a forked child
    ):
        change()
        assert opened() is opened()
        assert opened() not in found
        found.append(opened())


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nosuch://bucket/run", "scheme 'nosuch' is not supported"),
        ("c+d-e.f://x", r"scheme 'c\+d-e\.f' is not supported"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("gs://", "names no bucket"),
        ("az:///x", "names no bucket"),
        ("s3://bucket/a/../b", "cannot open"),
        ("s3://bucket/a//b", "cannot open"),
        ("file://server/data", "three slashes"),
        ("file://data", "three slashes"),
        ("file://", "three slashes"),
        ("", "'' is no path"),
        ("/data/\0", "is no path"),
        ("/data/\udcff", "is no path"),
        ("file:///data/%00", "is no path"),
        (None, "NoneType"),
        (b"/data", "bytes"),
        (object(), "object"),
    ],
)
def test_places_that_cannot_be_opened(place: Any, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        open_storage(place)


@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket"])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "remesh.storage.object_store", raising=False)
    with pytest.raises(StorageError, match=r"(?s)library obstore\n.*remesh\[s3\]"):
        open_storage(url)


def test_libraries_are_imported_when_they_are_needed() -> None:
    code = (
        "import sys, remesh.storage, remesh.exchange, tests.support\n"
        "remesh.storage.open_storage('/data')\n"
        "sys.exit(not {'obstore', 'torch', 'pytest'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_what_is_local_is_asked_of_the_storage(tmp_path: Path) -> None:
    assert is_local(open_storage(tmp_path))
    assert is_local(open_storage(f"file://{tmp_path}"))
    assert not is_local(MemoryStorage())
