"""Buckets of S3, Google Cloud and Azure, and stores with the same interfaces, through `obstore`.

How it keeps the promises of `remesh.storage`:

* `put` is one request, which stores are atomic about. `overwrite=False` makes it conditional
  (`If-None-Match: *`), so that the store itself lets one writer win. A request whose answer got
  lost may be repeated and then meets its own object; a token among the object's metadata tells
  that from that of another writer.
* Some stores ignore the condition and let every writer succeed. So a hidden object is put twice
  before the first conditional `put` of a process to a bucket. Where the second succeeds, a writer
  announces itself by a hidden object of its own, and gives up if it then finds another writer's, or
  the file. Of two writers the one that looks later finds the other, if listings are consistent.
* `create` is a multipart upload that is fed while the file is written (`remesh.storage.remote`);
  a file of one part is a conditional put. Whether the name is free is asked while the upload
  begins. Nothing is visible before the upload is completed, and giving up removes its parts. A
  process that is killed leaves invisible parts behind: let a lifecycle rule of the bucket remove
  incomplete uploads.
* Once a store has acknowledged a request it is durable and visible to all, so `sync` has nothing
  to do.

Requests are counted in the debug log, and reads are timed. A listing of many pages and a removal of
many files count once. What the client library repeats after a failure is not counted.

A bucket is opened once, for all storages of the process in it (`open_bucket`): they share the
connections and what was found out about the store. To open one takes the client library
milliseconds. The first request then waits for the name service, for TCP and for TLS, and the first
conditional put for what the store does about conditions. A job saves to one bucket again and again,
so what is open stays open. It is opened again if anything has changed that it was opened with: the
environment, a file with credentials, or the process, because connections do not outlive a fork.

Credentials, region and endpoint come from the environment, as `obstore` reads it:
`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
`AWS_ENDPOINT_URL`; `GOOGLE_APPLICATION_CREDENTIALS`; `AZURE_STORAGE_ACCOUNT_NAME`,
`AZURE_STORAGE_ACCOUNT_KEY`; or the identity that the machine or pod has. None of them is ever put
into a message.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
from obstore import store as stores
from obstore.exceptions import AlreadyExistsError, BaseError

from remesh.errors import RemeshError, StorageError
from remesh.storage.base import (
    HIDDEN,
    Buffer,
    Directory,
    FileFacts,
    Storage,
    check_path,
    is_hidden,
    prefix_directory,
    taken,
)
from remesh.storage.messages import RANGES_ADVICE, explain, shown_url
from remesh.storage.remote import StreamWriter
from remesh.storage.workers import ask_meanwhile, ask_together, flow_for

if TYPE_CHECKING:
    from obstore import ObjectMeta
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
"""A failed request is repeated ten times, with growing pauses, for three minutes at most: also one
that was not answered before its timeout. Refused connections are given up after seconds, and so is
a wrong host."""

CLIENT: ClientConfig = {
    # Endpoints are https:// unless the user has written something else.
    "allow_http": True,
    "connect_timeout": timedelta(seconds=10),
    # A file of any size may be read by one request, as long as bytes arrive.
    "read_timeout": timedelta(seconds=120),
    "timeout": timedelta(hours=1),
}

MAX_OPEN = 16
"""Buckets that stay open at a time."""

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
        if kind is None:  # it may name the account and the container in several ways
            return _bucket(None, url, _surroundings()), ""
        if prefix and {"", ".", ".."} & {*prefix.split("/")}:
            raise ValueError("a path has names joined by single slashes, without '.' or '..'")
        return _bucket(kind, name, _surroundings()), f"{prefix}/" if prefix else ""
    except FAILURES as error:
        raise explain("open", url, error) from None


@lru_cache(MAX_OPEN)
def _bucket(
    kind: type[stores.S3Store | stores.GCSStore] | None, name: str, _made_in: Hashable
) -> Bucket:
    options: Any = {"client_options": CLIENT, "retry_config": RETRIES}
    if kind is None:
        return Bucket(stores.AzureStore.from_url(name, **options))
    if kind is stores.S3Store:
        options |= _signing(os.environ)
    return Bucket(kind(name, **options))


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
    """Leave the content out of the signature of requests, unless the user has chosen.

    TLS protects the content already, and SHA-256 takes most of the processor time of an upload.
    """
    is_chosen = "AWS_UNSIGNED_PAYLOAD" in environment
    is_plain = any(environment.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return {} if is_chosen or is_plain else {"unsigned_payload": True}


PART_BYTES = (8 << 20, 16 << 20)
"""Bytes of the smallest and the largest parts of an upload, unless the file needs larger ones."""

MAX_PARTS = 10_000
"""Parts that an upload may have; a limit of S3."""

NUM_UPLOADS = 8
"""Parts of a file that are on their way at a time, at least."""

_TOKEN = "remeshput"  # noqa: S105 - the name of a token, of letters alone as Azure wants it
_LOGGER = logging.getLogger("remesh")


class ObjectStorage(Storage):
    """Objects below a prefix of a bucket; safe to use from several threads.

    Storages of this process share a `Bucket`; an obstore store is for this one alone. A prefix is
    empty or ends with a slash. Without `part_bytes` the size of a file decides how large the parts
    of its upload are.
    """

    lists_sizes = True
    reads_own_memory = True

    def __init__(
        self,
        url: str,
        bucket: Bucket | ObjectStore,
        prefix: str = "",
        *,
        part_bytes: int | None = None,
    ) -> None:
        self._url = shown_url(url).rstrip("/")
        self._lock = threading.Lock()
        self._unfinished: set[str] = set()
        self._bucket = bucket if isinstance(bucket, Bucket) else Bucket(bucket)
        self._store = self._bucket.store
        self._prefix = prefix
        self._part_bytes = part_bytes
        self._numbers = count(1)
        self._own_latency = 0.0
        _keep_freed_memory()

    def __repr__(self) -> str:
        return f"ObjectStorage({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def latency(self) -> float:
        # Its own, once it has asked: how far a bucket is may change while a process lives.
        return self._own_latency or self._bucket.latency

    def list(self, prefix: str = "") -> list[str]:
        return sorted(self.list_sizes(prefix))

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        found = self._list(prefix_directory(prefix), prefix)
        return {
            path: size
            for path, size in found.items()
            if path.startswith(prefix) and not is_hidden(path)
        }

    def _list(self, directory: str, shown: str) -> dict[str, int]:
        """Relative path → bytes of all files below a directory, hidden ones too."""
        # One request per 1000 objects.
        with self._request("list", "LIST", shown):
            found = obstore.list(self._store, self._directory(directory)).collect()
        return {self._path(entry): entry["size"] for entry in found}

    def list_directory(self, path: str = "") -> Directory:
        """See `Storage.list_directory`; one request per 1000 entries."""
        with self._request("list", "LIST", path):
            found = obstore.list_with_delimiter(self._store, self._directory(path))
        names = {one.rstrip("/").rpartition("/")[2] for one in found["common_prefixes"]}
        files = {}
        for entry in found["objects"]:
            # Consoles make empty objects for folders; those have no name of their own.
            if name := self._path(entry).rpartition("/")[2]:
                files[name] = FileFacts(entry["size"], entry["last_modified"].timestamp())
        return Directory(tuple(sorted(names - {""})), files)

    def size(self, path: str) -> int:
        key = self._key(path)
        with self._request("read", "HEAD", path):
            return obstore.head(self._store, key)["size"]

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(self._read(path, start, stop))

    def read_range(self, path: str, start: int, num_bytes: int, buffer: Buffer) -> Buffer:  # noqa: ARG002
        return np.frombuffer(self._read(path, start, start + num_bytes), np.uint8)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        data = self.read_range(path, start, buffer.size, buffer)
        buffer[: data.size] = data
        return data.size

    def _read(self, path: str, start: int, stop: int | None) -> memoryview:
        """The bytes [start, stop) of a file; fewer if it ends before."""
        assert start >= 0
        assert stop is None or stop >= 0
        key = self._key(path)
        if stop is not None and stop <= start:
            self.size(path)  # raises if there is no such file
            return memoryview(b"")
        try:
            with self._request("read", "GET", path):
                if stop is not None:  # it costs less processor time than `obstore.get`
                    return memoryview(obstore.get_range(self._store, key, start=start, end=stop))
                how: Any = {"range": {"offset": start}}
                return memoryview(obstore.get(self._store, key, options=how).bytes())
        except StorageError:
            # That a file ends before `start` is an error of no class of its own.
            if start < self.size(path):
                raise
            return memoryview(b"")

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        check_path(path)
        if overwrite:
            self._put(path, data)
        elif path in self._unfinished or not self._put_exclusively(path, data):
            raise taken(self._name(path))

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> StreamWriter:
        size, number = flow_for(num_bytes, self.latency, sizes=PART_BYTES, min_number=NUM_UPLOADS)
        part_bytes = self._part_bytes or size
        if num_bytes > part_bytes * MAX_PARTS:
            least = -(-num_bytes // MAX_PARTS)
            part_bytes = -(-least >> 20) << 20  # whole mebibytes

        check_path(path)
        with self._lock:
            if path in self._unfinished:
                raise StorageError(f"{self._name(path)} exists already: it is being written")
            self._unfinished.add(path)

        def upload(parts: Iterator[Buffer]) -> None:
            try:
                with self._explained("write", path):
                    parts = parts if overwrite else self._if_free(path, parts)
                    if num_bytes > part_bytes:
                        self._put_parts(path, parts, part_bytes, number)
                        return
                    # Taking all parts waits until the writer finishes.
                    whole = [*parts, np.empty(0, np.uint8)][0]
                    if overwrite:
                        self._put(path, whole.data)
                    elif not self._put_first(path, whole.data):
                        name = self._name(path)
                        raise StorageError(f"{name} exists already: another writer was first")
            finally:
                with self._lock:
                    self._unfinished.discard(path)

        return StreamWriter(self._name(path), num_bytes, part_bytes, upload)

    def delete(self, path: str) -> None:
        key = self._key(path)
        with self._request("remove", "DELETE", path), suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def delete_many(self, paths: Sequence[str]) -> None:
        """See `Storage.delete_many`; one request of S3 and Azure removes up to 1000."""
        keys = [self._key(path) for path in paths]
        if len(paths) > 1:
            # A store that cannot do this, or has not all of the objects, is asked for each alone.
            with suppress(RemeshError), self._request("remove", "DELETE", paths[0]):
                obstore.delete(self._store, keys)
                return
        ask_together(self, [partial(self.delete, path) for path in paths])

    def sync(self) -> None:
        """See `Storage.sync`; what a store has acknowledged is durable."""

    def _name(self, path: str) -> str:
        return f"{self._url}/{path}"

    def _key(self, path: str) -> str:
        """The path of an object in the bucket."""
        return self._prefix + check_path(path)

    def _path(self, entry: ObjectMeta) -> str:
        """The path of an object below the prefix; empty if it stands for the prefix itself."""
        return entry["path"][len(self._prefix) :]

    def _directory(self, path: str) -> str | None:
        return (self._prefix + path).rstrip("/") or None

    @contextmanager
    def _explained(self, action: str, path: str) -> Iterator[None]:
        """Raise what the client library raises as an error of remesh; the action is a verb."""
        try:
            yield
        except (RemeshError, AlreadyExistsError):
            raise
        except FAILURES as error:
            raise explain(action, self._name(path), error) from None

    @contextmanager
    def _request(self, action: str, method: str, path: str) -> Iterator[None]:
        """A request that is counted, and timed if it reads; a failure is an error of remesh."""
        self._count(method, path)
        started = time.monotonic()
        try:
            with self._explained(action, path):
                yield
        finally:
            if action == "read":
                seconds = time.monotonic() - started
                self._own_latency = min(self._own_latency or seconds, seconds)
                self._bucket.latency = self._own_latency

    def _count(self, method: str, path: str) -> None:
        _LOGGER.debug("%s: request %d, %s %s", self._url, next(self._numbers), method, path)

    def _put_exclusively(self, path: str, data: bytes) -> bool:
        """Put an object unless there is one, whatever the store does about conditions."""
        if self._bucket.honours_conditions is None:
            self._find_conditions(path)
        if self._bucket.honours_conditions:
            return self._put_first(path, data)
        folder, _, name = path.rpartition("/")
        claims = f"{folder}/{HIDDEN}{name}-" if folder else f"{HIDDEN}{name}-"
        mine = claims + secrets.token_hex(8)
        self._put(mine, b"", shown=path)
        try:
            found = self._list(folder, path)
            others = {other for other in found if other.startswith(claims)} - {mine}
            if others:
                raise taken(self._name(path), self._name(min(others)))
            return not self.exists(path) and self._put_first(path, data)
        finally:
            self.delete(mine)

    def _find_conditions(self, shown: str) -> None:
        """Find out whether a put of an object that exists is refused; errors name another one."""
        probe = f"{HIDDEN}probe-{secrets.token_hex(8)}"

        def is_refused() -> bool:
            try:
                self._put(probe, b"12", shown=shown, mode="create")
            except AlreadyExistsError:
                return True
            return False

        try:
            # A first put that is refused was repeated after its answer got lost.
            is_honoured = is_refused() or is_refused()
            self._check_ranges(probe)
        finally:
            # Without the right to remove objects a save works all the same.
            with suppress(StorageError):
                self.delete(probe)
        if not is_honoured:
            text = "%s: the store ignores If-None-Match; writers announce themselves instead"
            _LOGGER.warning(text, self._url)
        self._bucket.honours_conditions = is_honoured

    def _check_ranges(self, path: str) -> None:
        """Warn if the store gives whole objects where a part is asked for.

        What is saved is not refused: the objects can be copied, and read elsewhere.
        """
        try:
            self.read(path, 1, 2)
        except RemeshError as error:
            if RANGES_ADVICE in str(error):
                _LOGGER.warning("%s: %s", self._url, RANGES_ADVICE)

    def _put(self, path: str, data: bytes | memoryview, *, shown: str = "", **options: Any) -> None:
        """Put an object by one request; errors name it, or what it is put for."""
        with self._request("write", "PUT", shown or path):
            obstore.put(self._store, self._key(path), data, use_multipart=False, **options)

    def _put_first(self, path: str, data: bytes | memoryview) -> bool:
        """Put an object unless there is one; returns whether it is ours that is there now."""
        token = secrets.token_hex(16)
        try:
            self._put(path, data, mode="create", attributes={_TOKEN: token})
        except AlreadyExistsError:
            with self._request("read", "HEAD", path):
                found = obstore.get(self._store, self._key(path), options={"head": True})
            return bool(found.attributes.get(_TOKEN) == token)
        return True

    def _if_free(self, path: str, parts: Iterator[Buffer]) -> Iterator[Buffer]:
        """The parts of a file, unless there is one of its name; it is asked for meanwhile."""
        is_taken = ask_meanwhile(partial(self.exists, path))

        def taken() -> Iterator[Buffer]:
            if is_taken():
                raise StorageError(f"{self._name(path)} exists already; choose another place")
            yield from parts

        return taken()

    def _put_parts(self, path: str, parts: Iterator[Buffer], part_bytes: int, number: int) -> None:
        """Put an object of parts; if taking them raises, there is nothing left of it."""

        def counted() -> Iterator[memoryview]:
            self._count("POST begin", path)
            for part in parts:
                self._count("PUT part", path)
                yield part.data
            self._count("POST end", path)

        obstore.put(
            self._store,
            self._key(path),
            counted(),
            use_multipart=True,
            chunk_size=part_bytes,
            max_concurrency=number,
        )


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep the memory of responses for those that come next.

    Until a block as large has been freed once, glibc returns freed memory to the system, which then
    clears the pages of the next response. That takes longer than to receive it.
    """
    np.empty(16 << 20, np.uint8)
