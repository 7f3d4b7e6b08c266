"""The requests to a bucket that `ObjectStorage` makes, each of them counted and timed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import BaseError

from remesh.storage.protocol import Buffer
from remesh.storage.request_counts import Requests

if TYPE_CHECKING:
    from obstore import Bytes, ObjectMeta

    from remesh.storage.buckets import Bucket

NEAR_SECONDS = 0.005
"""A store that answers sooner is near: connections to it need not be opened in advance."""

CONNECT_SECONDS = 5.0
"""How long answers are waited for that only open connections."""

PAGE = 1000
"""Entries that a request lists, or files that it removes."""

_Answer = TypeVar("_Answer")


class CountedStore:
    """The objects below a prefix of a bucket; safe to use from several threads.

    Args:
        bucket: The bucket.
        prefix: How the paths of the objects begin in it; the methods take and give the rest.

    Attributes:
        bucket: The bucket.
    """

    def __init__(self, bucket: Bucket, prefix: str = "") -> None:
        self.bucket = bucket
        self._store = bucket.store
        self._prefix = prefix
        self._lock = threading.Lock()
        self._requests = Requests()
        self._latency = 0.0

    @property
    def requests(self) -> Requests:
        """The requests so far."""
        with self._lock:
            return self._requests

    @property
    def latency(self) -> float:
        """Seconds of the fastest request that read, a small one mostly; 0 before the first.

        Until this storage has asked, it is that of another one in the bucket.
        """
        return self._latency or self.bucket.latency

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
        self._count(Requests(puts=1, bytes_sent=len(data)))
        mode: Any = "create" if only_new else "overwrite"
        obstore.put(
            self._store,
            self.key(path),
            data,
            mode=mode,
            attributes=attributes,
            use_multipart=False,
        )

    def upload(
        self, path: str, parts: Iterator[Buffer], *, part_bytes: int, num_uploads: int
    ) -> None:
        """Make an object of parts, some of which are on their way at a time."""

        def counted() -> Iterator[memoryview]:
            for part in parts:
                self._count(Requests(puts=1, bytes_sent=part.size))
                yield part.data

        self._count(Requests(puts=2))
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
        self._count(Requests(puts=1))
        obstore.copy(self._store, source, self.key(target))

    def list(self, directory: str) -> Sequence[ObjectMeta]:
        """All objects below a directory, "" for the prefix."""
        found = obstore.list(self._store, self._directory(directory)).collect()
        self._count(Requests(puts=len(found) // PAGE + 1))
        return self._relative(found)

    def list_directory(self, directory: str) -> tuple[Sequence[ObjectMeta], Sequence[str]]:
        """The objects that lie directly in a directory, "" for the prefix, and names of others."""
        found = obstore.list_with_delimiter(self._store, self._directory(directory))
        num_found = len(found["objects"]) + len(found["common_prefixes"])
        self._count(Requests(puts=num_found // PAGE + 1))
        names = [one.rstrip("/").rpartition("/")[2] for one in found["common_prefixes"]]
        return self._relative(found["objects"]), names

    def head(self, path: str) -> ObjectMeta:
        """Facts of an object."""
        self._count(Requests(gets=1))
        started = time.monotonic()
        found = obstore.head(self._store, self.key(path))
        self._note(time.monotonic() - started)
        return found

    async def open_connections(self, path: str, number: int) -> None:
        """Ask for an object a few times at once; the answers do not matter.

        A store that is near is asked once.
        """

        async def ask() -> None:
            self._count(Requests(gets=1))
            started = time.monotonic()
            with suppress(BaseError, OSError):
                await obstore.head_async(self._store, self.key(path))
            self._note(time.monotonic() - started)

        asked = {asyncio.ensure_future(ask())}
        if (await asyncio.wait(asked, timeout=NEAR_SECONDS))[1]:
            asked.update(asyncio.ensure_future(ask()) for _ in range(number - 1))
        _, late = await asyncio.wait(asked, timeout=CONNECT_SECONDS)
        for one in late:
            one.cancel()

    def attributes(self, path: str) -> Any:
        """The attributes that an object was put with."""
        self._count(Requests(gets=1))
        return obstore.get(self._store, self.key(path), options={"head": True}).attributes

    async def read(self, path: str, start: int, stop: int) -> tuple[ObjectMeta, Bytes]:
        """The bytes [start, stop) of an object, and which object it is."""

        async def ask() -> tuple[ObjectMeta, Bytes]:
            options: Any = {"range": (start, stop)}
            found = await obstore.get_async(self._store, self.key(path), options=options)
            return found.meta, await found.bytes_async()

        return await self._timed(ask(), lambda answer: len(answer[1]))

    async def read_range(self, path: str, start: int, stop: int) -> Bytes:
        """The bytes [start, stop) of an object; it costs less processor time than `read`."""
        asked = obstore.get_range_async(self._store, self.key(path), start=start, end=stop)
        return await self._timed(asked, len)

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects."""
        self._count(Requests(deletes=-(-len(paths) // PAGE)))
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

    async def _timed(self, asked: Awaitable[_Answer], size: Callable[[_Answer], int]) -> _Answer:
        """Wait for the answer to a request that reads; counts it and the bytes of the answer."""
        self._count(Requests(gets=1))
        started = time.monotonic()
        answer = await asked
        self._note(time.monotonic() - started)
        self._count(Requests(bytes_received=size(answer)))
        return answer

    def _count(self, more: Requests) -> None:
        with self._lock:
            self._requests += more

    def _note(self, seconds: float) -> None:
        with self._lock:
            self._latency = min(self._latency or seconds, seconds)
            self.bucket.latency = self._latency
