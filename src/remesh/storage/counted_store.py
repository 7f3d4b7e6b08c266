"""The requests to a bucket that `ObjectStorage` makes, each of them counted and timed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError

from remesh.storage.protocol import Buffer
from remesh.storage.request_counts import Requests

if TYPE_CHECKING:
    from obstore import Bytes, ListResult, ObjectMeta
    from obstore.store import ObjectStore

NEAR_SECONDS = 0.005
"""A store that answers sooner is near: connections to it need not be opened in advance."""

CONNECT_SECONDS = 5.0
"""How long answers are waited for that only open connections."""

PAGE = 1000
"""Entries that a request lists, or files that it removes."""


class CountedStore:
    """An obstore store; safe to use from several threads.

    Args:
        store: The store.

    Attributes:
        latency: Seconds of the fastest request that read, a small one mostly; 0 before the first.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._requests = Requests()
        self.latency = 0.0

    @property
    def requests(self) -> Requests:
        """The requests so far."""
        with self._lock:
            return self._requests

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
        obstore.put(self._store, path, data, mode=mode, attributes=attributes, use_multipart=False)

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
            path,
            counted(),
            use_multipart=True,
            chunk_size=part_bytes,
            max_concurrency=num_uploads,
        )

    def copy(self, bucket: ObjectStore, source: str, target: str) -> None:
        """Copy an object within a bucket; the paths are those in the bucket."""
        self._count(Requests(puts=1))
        obstore.copy(bucket, source, target)

    def list(self, directory: str | None) -> Sequence[ObjectMeta]:
        """All objects below a directory."""
        found = obstore.list(self._store, directory).collect()
        self._count(Requests(puts=len(found) // PAGE + 1))
        return found

    def list_directory(self, directory: str | None) -> ListResult[Sequence[ObjectMeta]]:
        """The objects and prefixes that lie directly in a directory."""
        found = obstore.list_with_delimiter(self._store, directory)
        num_found = len(found["objects"]) + len(found["common_prefixes"])
        self._count(Requests(puts=num_found // PAGE + 1))
        return found

    def head(self, path: str) -> ObjectMeta:
        """Facts of an object."""
        self._count(Requests(gets=1))
        started = time.monotonic()
        found = obstore.head(self._store, path)
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
                await obstore.head_async(self._store, path)
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
        return obstore.get(self._store, path, options={"head": True}).attributes

    async def read(self, path: str, start: int, stop: int) -> tuple[ObjectMeta, Bytes]:
        """The bytes [start, stop) of an object."""
        self._count(Requests(gets=1))
        started = time.monotonic()
        found = await obstore.get_async(self._store, path, options={"range": (start, stop)})
        data = await found.bytes_async()
        self._note(time.monotonic() - started)
        self._count(Requests(bytes_received=len(data)))
        return found.meta, data

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects."""
        self._count(Requests(deletes=-(-len(paths) // PAGE)))
        obstore.delete(self._store, paths if len(paths) > 1 else paths[0])

    def _count(self, more: Requests) -> None:
        with self._lock:
            self._requests += more

    def _note(self, seconds: float) -> None:
        with self._lock:
            self.latency = min(self.latency or seconds, seconds)
