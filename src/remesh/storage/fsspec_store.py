"""Any file system that `fsspec` knows, for places that no storage of our own can open.

File systems behind fsspec differ in what they promise, so only what nearly all of them have is
used: files are written as streams (`remesh.storage.remote`) under a hidden name beside the final
one, and then moved to it. `put(overwrite=False)` makes a marker, which only one can make; the
writer that has it may look and move. So its promise is as strong as the file system's opening with
mode `x`: strict for files, and for buckets behind fsspec often merely a look before the write. A
crash may leave hidden files and markers behind; they are never listed, and the error that a marker
causes names it.

Buckets of S3, Google Cloud and Azure have a storage with stronger promises
(`remesh.storage.object_store`).
"""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import fsspec
import numpy as np

from remesh.errors import StorageError
from remesh.storage.base import HIDDEN, Buffer, Directory, FileFacts, check_path, taken
from remesh.storage.messages import RANGES_ADVICE, explain, hide_secrets, shown_url
from remesh.storage.remote import RemoteStorage, StreamWriter

PART_BYTES = 16 << 20
"""Bytes given to the file system at a time."""

_ABSENT = (FileNotFoundError, NotADirectoryError)


class FsspecStorage(RemoteStorage):
    """Files below a path of an fsspec file system."""

    def __init__(self, url: str, file_system: Any, root: str) -> None:
        super().__init__(url)
        self._files = file_system
        self._root = root.rstrip("/")

    def _list(self, directory: str, shown: str) -> dict[str, int]:
        place = self._path(directory) if directory else self._root
        found: dict[str, Any] = {}
        with self._explained("list", shown), suppress(*_ABSENT):
            self._files.invalidate_cache()
            found = self._files.find(place, detail=True)
        root = len(self._root)
        return {path[root:].lstrip("/"): int(entry["size"]) for path, entry in found.items()}

    def list_directory(self, path: str = "") -> Directory:
        place = self._path(path) if path else self._root
        found: list[Any] = []
        with self._explained("list", path), suppress(*_ABSENT):
            self._files.invalidate_cache()
            found = self._files.ls(place, detail=True)
        directories, files = [], {}
        for entry in found:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if entry["type"] == "directory":
                directories.append(name)
            else:
                files[name] = FileFacts(int(entry["size"] or 0), _time_of(entry))
        return Directory(tuple(sorted(directories)), files)

    def size(self, path: str) -> int:
        place = self._path(path)
        with self._explained("read", path):
            self._files.invalidate_cache()
            found = self._files.info(place)
        if found["type"] != "file":
            raise StorageError(f"cannot read {self._name(path)}: it is not a file; check the path")
        return int(found["size"])

    def _read(self, path: str, start: int, stop: int | None) -> memoryview:
        place = self._path(path)
        self._files.invalidate_cache()
        found = self._answer(
            path, start, lambda: self._files.cat_file(place, start=start, end=stop)
        )
        if found and stop is not None and len(found) > stop - start:
            raise StorageError(f"cannot read {self._name(path)}: {RANGES_ADVICE}")
        return memoryview(found or b"")

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        # Some file systems in memory do not lock themselves.
        with self._lock, self._explained("write", path):
            parts = iter([np.frombuffer(data, np.uint8)])
            self._write(path, parts, self._files.mv if overwrite else self._move_exclusively)

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> StreamWriter:
        """See `Storage.create`; room is not reserved."""
        with self._lock:
            if not overwrite and self.exists(path):
                raise StorageError(f"{self._name(path)} exists already; choose another place")

            def upload(parts: Iterator[Buffer]) -> None:
                self._write(path, parts, self._files.mv)

            return self._stream(path, num_bytes, PART_BYTES, upload)

    def delete(self, path: str) -> None:
        place = self._path(path)
        with self._explained("remove", path):
            self._remove(place)

    def _path(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _write(
        self, path: str, parts: Iterator[Buffer], move: Callable[[str, str], object]
    ) -> None:
        """Write a file under a hidden name, and give it its final one."""
        place = self._path(path)
        hidden = _beside(place, secrets.token_hex(8))
        try:
            self._files.makedirs(hidden.rpartition("/")[0], exist_ok=True)
            with self._files.open(hidden, "wb") as file:
                for part in parts:
                    file.write(part.data)
            move(hidden, place)
        finally:
            self._remove(hidden)

    def _remove(self, place: str) -> None:
        with suppress(*_ABSENT):
            self._files.rm_file(place)

    def _move_exclusively(self, hidden: str, place: str) -> None:
        """Give a file its final name unless the name is taken."""
        name = self._name(place[len(self._root) + 1 :])
        marker = _beside(place, place.rpartition("/")[2])
        try:
            self._files.open(marker, "xb").close()
        except FileExistsError:
            raise taken(name, marker) from None
        try:
            self._files.invalidate_cache()
            if self._files.exists(place):
                raise taken(name)
            self._files.mv(hidden, place)
        finally:
            self._remove(marker)


def open_fsspec_storage(url: str, scheme: str) -> FsspecStorage:
    """The storage of a URL whose scheme, in small letters, fsspec knows."""
    if scheme not in fsspec.available_protocols():
        raise StorageError(
            f"{shown_url(url)!r}: the scheme {scheme!r} is not supported\nGive a local path, a "
            "file:// URL, s3://, gs:// or az://, the URL of anything else that fsspec knows, or an "
            "object of a subclass of remesh.storage.Storage"
        )
    try:
        file_system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise StorageError(
            f"{shown_url(url)!r}: fsspec lacks a library for the scheme {scheme!r} "
            f"({hide_secrets(str(error), url)}); install it"
        ) from None
    except Exception as error:  # noqa: BLE001 - file systems raise what they like
        raise explain("open", url, error) from None
    return FsspecStorage(url, file_system, root)


def _time_of(entry: Mapping[str, object]) -> float | None:
    """When a file was last changed, if its file system says so in a way that we know."""
    for key in ("mtime", "LastModified", "last_modified", "modified", "updated", "created"):
        match entry.get(key):
            case int() | float() as seconds:
                return float(seconds)
            case dt.datetime() as time:
                return time.timestamp()
    return None


def _beside(place: str, name: str) -> str:
    return f"{place.rpartition('/')[0]}/{HIDDEN}{name}"
