"""The requests to a bucket that `ObjectStorage` makes: counted in the debug log, reads timed.

A listing of many pages and a removal of many files count once. What the client library repeats
after a failure is not counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import obstore

from remesh.storage.base import Buffer
from remesh.storage.buckets import Bucket

if TYPE_CHECKING:
    from obstore import Bytes, ObjectMeta

_LOGGER = logging.getLogger("remesh")


class Objects:
    """The objects below a prefix of a bucket; safe to use from several threads.

    Methods take and give paths without the prefix; messages have the URL.
    """

    def __init__(self, url: str, bucket: Bucket, prefix: str) -> None:
        self._url = url
        self._bucket = bucket
        self._store = bucket.store
        self._prefix = prefix
        self._numbers = count(1)

    def key(self, path: str) -> str:
        """The path of an object in the bucket."""
        return self._prefix + path

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        only_new: bool = False,
        attributes: dict[str, str] | None = None,
    ) -> None:
        """Make an object by one request; raises if only a new one may be made and there is one."""
        self._count("PUT", path)
        obstore.put(
            self._store,
            self.key(path),
            data,
            mode="create" if only_new else "overwrite",
            attributes=attributes,
            use_multipart=False,
        )

    def upload(
        self, path: str, parts: Iterator[Buffer], *, part_bytes: int, num_uploads: int
    ) -> None:
        """Make an object of parts, some of which are on their way at a time."""

        def counted() -> Iterator[memoryview]:
            self._count("POST begin", path)
            for part in parts:
                self._count("PUT part", path)
                yield part.data
            self._count("POST end", path)

        obstore.put(
            self._store,
            self.key(path),
            counted(),
            use_multipart=True,
            chunk_size=part_bytes,
            max_concurrency=num_uploads,
        )

    def copy(self, source: str, target: str) -> None:
        """Copy an object of the bucket, given its path there, to one below the prefix."""
        self._count("COPY", target)
        obstore.copy(self._store, source, self.key(target))

    def list(self, directory: str) -> Sequence[ObjectMeta]:
        """All objects below a directory, "" for the prefix."""
        self._count("LIST", directory)
        return self._relative(obstore.list(self._store, self._directory(directory)).collect())

    def list_directory(self, directory: str) -> tuple[Sequence[ObjectMeta], Sequence[str]]:
        """The objects that lie directly in a directory, "" for the prefix, and names of others."""
        self._count("LIST", directory)
        found = obstore.list_with_delimiter(self._store, self._directory(directory))
        names = [one.rstrip("/").rpartition("/")[2] for one in found["common_prefixes"]]
        return self._relative(found["objects"]), names

    def head(self, path: str) -> ObjectMeta:
        """Facts of an object."""
        with self._timed("HEAD", path):
            return obstore.head(self._store, self.key(path))

    def attributes(self, path: str) -> Any:
        """The attributes that an object was put with."""
        with self._timed("HEAD", path):
            return obstore.get(self._store, self.key(path), options={"head": True}).attributes

    def read(self, path: str, start: int, stop: int) -> tuple[ObjectMeta, Bytes]:
        """The bytes [start, stop) of an object, and which object it is."""
        with self._timed("GET", path):
            found = obstore.get(self._store, self.key(path), options={"range": (start, stop)})
            return found.meta, found.bytes()

    def read_range(self, path: str, start: int, stop: int) -> Bytes:
        """The bytes [start, stop) of an object; it costs less processor time than `read`."""
        with self._timed("GET", path):
            return obstore.get_range(self._store, self.key(path), start=start, end=stop)

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects."""
        self._count("DELETE", paths[0])
        keys = [self.key(path) for path in paths]
        obstore.delete(self._store, keys if len(keys) > 1 else keys[0])

    def _directory(self, path: str) -> str | None:
        return self.key(path).rstrip("/") or None

    def _relative(self, found: Sequence[ObjectMeta]) -> Sequence[ObjectMeta]:
        """Objects of the bucket with their paths below the prefix."""
        if not self._prefix:
            return found
        # An empty object that stands for the prefix itself has its path without the slash.
        start = len(self._prefix)
        return [{**one, "path": one["path"][start:]} for one in found]

    def _count(self, method: str, path: str) -> None:
        _LOGGER.debug("%s: request %d, %s %s", self._url, next(self._numbers), method, path)

    @contextmanager
    def _timed(self, method: str, path: str) -> Iterator[None]:
        """Count a request that reads, and note how long the answer took, a refusal included."""
        self._count(method, path)
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self._bucket.latency = min(self._bucket.latency or seconds, seconds)
