from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remesh.errors import StorageError
from remesh.storage import LocalStorage, MemoryStorage, open_storage
from remesh.testing import FaultyStorage


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


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "memory://1", "https://h/x"])
def test_unknown_schemes_are_named(url: str) -> None:
    scheme = url.partition(":")[0]
    with pytest.raises(StorageError, match=f"scheme '{scheme}' is not supported"):
        open_storage(url)


@pytest.mark.parametrize("url", ["file://server/data", "file://data", "file://"])
def test_file_urls_without_a_local_path(url: str) -> None:
    with pytest.raises(StorageError, match="three slashes"):
        open_storage(url)


@pytest.mark.parametrize("place", [None, 3, b"/data", object()])
def test_other_objects(place: object) -> None:
    with pytest.raises(StorageError, match=type(place).__name__):
        open_storage(place)  # type: ignore[arg-type]


def test_storage_and_exchange_import_no_torch() -> None:
    code = (
        "import sys, remesh.storage, remesh.exchange, remesh.testing\n"
        "sys.exit('torch' in sys.modules or 'pytest' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
