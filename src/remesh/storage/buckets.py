"""The buckets that a process uses, and the requests to them that `ObjectStorage` makes.

A bucket is opened once, for all storages in it. To open one takes the client library milliseconds.
The first request then waits for the name service, for TCP and for TLS, and the first conditional
put for what the store does about conditions. A job saves to one bucket again and again, so what is
open stays open (`open_bucket`): storages in one bucket share the connections and what was found out
about the store.

A bucket is opened again if anything has changed that it was opened with: the environment, a file
with credentials, or the process, because connections do not outlive a fork.

Credentials, region and endpoint come from the environment, as `obstore` reads it:
`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
`AWS_ENDPOINT_URL`; `GOOGLE_APPLICATION_CREDENTIALS`; `AZURE_STORAGE_ACCOUNT_NAME`,
`AZURE_STORAGE_ACCOUNT_KEY`; or the identity that the machine or pod has. None of them is ever put
into a message.

Requests are counted in the debug log, and reads are timed. A listing of many pages and a removal of
many files count once. What the client library repeats after a failure is not counted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import obstore
from obstore import store as stores
from obstore.exceptions import BaseError

from remesh.errors import StorageError
from remesh.storage.base import Buffer
from remesh.storage.shown import explain, shown_url

if TYPE_CHECKING:
    from obstore import Bytes, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

FAILURES = (BaseError, OSError, ValueError)
"""What the client library raises."""

RETRIES: RetryConfig = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=180),
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=8),
        "base": 2,
    },
}
"""A failed request is repeated, with growing pauses, for three minutes at most: also one that was
not answered before its timeout."""

CLIENT: ClientConfig = {
    # Endpoints are https:// unless the user has written something else.
    "allow_http": True,
    "connect_timeout": timedelta(seconds=10),
    "timeout": timedelta(seconds=120),
}
"""The timeout is that of a whole request, which moves one part or less."""

MAX_OPEN = 16
"""Buckets that stay open at a time."""

_LOGGER = logging.getLogger("remesh")
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_GOOGLE_DEFAULT = "~/.config/gcloud/application_default_credentials.json"
_KINDS = {
    "s3": stores.S3Store,
    "s3a": stores.S3Store,
    "gs": stores.GCSStore,
    "gcs": stores.GCSStore,
}


@dataclass(slots=True, eq=False)
class Bucket:
    """State that the storages of a process in one bucket share."""

    store: ObjectStore  # the obstore store with its connections
    latency: float = 0.0
    """Seconds of the fastest request that read, a small one mostly; 0 before the first."""
    honours_conditions: bool | None = None
    """Whether the store refuses a put under the condition that there is no such object, if there is
    one; None before that is known."""


def open_bucket(url: str, scheme: str, rest: str) -> tuple[Bucket, str]:
    """The bucket of a URL, and how the paths of objects below the URL begin in it.

    The scheme is in small letters. The rest follows `://`; keys of S3 and Google Cloud are taken as
    they are written, and not percent-decoded.
    """
    name, _, key = rest.partition("/")
    prefix = key.strip("/")
    kind = _KINDS.get(scheme)
    if not name:
        raise StorageError(f"{shown_url(url)!r} names no bucket; write {scheme}://bucket/path")
    if kind is not None and "***@" in shown_url(url):
        raise StorageError(
            f"{shown_url(url)!r}: user information in the URL of a bucket is not used\nWrite "
            f"{scheme}://bucket/path and set the credentials in the environment"
        )
    try:
        if kind is None:
            return _azure(url, _surroundings()), ""
        if prefix and {"", ".", ".."} & {*prefix.split("/")}:
            raise ValueError("a path has names joined by single slashes, without '.' or '..'")
        return _bucket(kind, name, _surroundings()), f"{prefix}/" if prefix else ""
    except FAILURES as error:
        raise explain("open", url, error) from None


@lru_cache(MAX_OPEN)
def _bucket(kind: type[stores.S3Store | stores.GCSStore], name: str, _made_in: Hashable) -> Bucket:
    options: Any = _signing(os.environ) if kind is stores.S3Store else {}
    return Bucket(kind(name, client_options=CLIENT, retry_config=RETRIES, **options))


@lru_cache(MAX_OPEN)
def _azure(url: str, _made_in: Hashable) -> Bucket:
    """The storage of a URL alone, which may name the account and the container in several ways."""
    store = stores.AzureStore.from_url(url, client_options=CLIENT, retry_config=RETRIES)
    return Bucket(store)


def _surroundings() -> Hashable:
    """The surroundings that a store is made from, equal as long as it may be used."""
    environment = tuple(sorted(os.environ.items()))
    # Those of other stores are read again when they are needed, or not from files.
    named = [value for name, value in environment if name.startswith("GOOGLE_")]
    files = (*named, os.path.expanduser(_GOOGLE_DEFAULT))
    return os.getpid(), environment, tuple(map(_version, files))


def _version(path: str) -> Hashable:
    """The version of a file, which changes with its content; None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _signing(environment: Mapping[str, str]) -> dict[str, bool]:
    """True if the signature of a request covers its content, unless the user has chosen.

    TLS protects the content already, and SHA-256 takes most of the processor time of an upload.
    """
    is_chosen = "AWS_UNSIGNED_PAYLOAD" in environment
    is_plain = any(environment.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return {} if is_chosen or is_plain else {"unsigned_payload": True}


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
