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
* `create` is a multipart upload that is fed while the file is written (see `remesh.storage.parts`);
  a file of one part is a conditional put. Whether the name is free is asked while the upload
  begins. Nothing is visible before the upload is completed, and giving up removes its parts. A
  process that is killed leaves invisible parts behind: let a lifecycle rule of the bucket remove
  incomplete uploads.
* `copy_from` is a copy on the server, within a bucket of S3 or Google Cloud. A store may refuse it,
  as S3 does above 5 GiB.
* Once a store has acknowledged a request it is durable and visible to all, so `sync` has nothing
  to do.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from obstore.exceptions import AlreadyExistsError

from remesh.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from remesh.storage.base import (
    HIDDEN,
    Buffer,
    Directory,
    FileFacts,
    Storage,
    check_path,
    prefix_directory,
)
from remesh.storage.buckets import FAILURES, Bucket, Objects
from remesh.storage.distance import Flow, ask_meanwhile, ask_together, flow_for
from remesh.storage.parts import StreamWriter
from remesh.storage.shown import RANGES_ADVICE, explain, shown_url

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

PART_BYTES = (8 << 20, 16 << 20)
"""Bytes of the smallest and the largest parts of an upload, unless the file needs larger ones."""

MAX_PARTS = 10_000
"""Parts that an upload may have; a limit of S3."""

NUM_UPLOADS = 8
"""Parts of a file that are on their way at a time, at least."""

READ_BYTES = 16 << 20
"""Bytes asked for at a time, so that the timeout of a request holds for any file."""

_TOKEN = "remeshput"  # noqa: S105 - the name of a token, of letters alone as Azure wants it
_LOGGER = logging.getLogger("remesh")

NUM_BEGINNINGS = 10
"""How often reading an object begins if another one takes its name each time meanwhile."""

_Result = TypeVar("_Result")


class _ChangedError(Exception):
    """An object was replaced between two requests; it is not raised outside."""


def _identity(meta: ObjectMeta) -> tuple[str | None, int]:
    """Tag and size, which tell an object from another one of its name."""
    return meta["e_tag"], meta["size"]


class ObjectStorage(Storage):
    """Objects below a prefix of a bucket; safe to use from several threads.

    Storages of this process share a `Bucket`; an obstore store is for this one alone. A prefix is
    empty or ends with a slash. Without `part_bytes` the size of a file decides how large the parts
    of its upload are.
    """

    lists_sizes = True
    reads_own_memory = True
    copying = "slow"

    def __init__(
        self,
        url: str,
        bucket: Bucket | ObjectStore,
        prefix: str = "",
        *,
        part_bytes: int | None = None,
    ) -> None:
        self._url = shown_url(url).rstrip("/")
        self._bucket = bucket if isinstance(bucket, Bucket) else Bucket(bucket)
        self._objects = Objects(self._url, self._bucket, prefix)
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._unfinished: set[str] = set()
        _keep_freed_memory()

    def __repr__(self) -> str:
        return f"ObjectStorage({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def latency(self) -> float:
        return self._bucket.latency

    def list(self, prefix: str = "") -> list[str]:
        return sorted(self.list_sizes(prefix))

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        """Relative path → bytes of all files that begin with `prefix`; one request per 1000."""
        directory = prefix_directory(prefix)
        try:
            found = self._objects.list(directory)
        except FAILURES as error:
            raise explain("list", self._name(prefix), error) from None
        return {
            entry["path"]: entry["size"]
            for entry in found
            if entry["path"].startswith(prefix) and not _is_hidden(entry["path"])
        }

    def list_directory(self, path: str = "") -> Directory:
        """See `Storage.list_directory`; one request per 1000 entries."""
        try:
            objects, names = self._objects.list_directory(path)
        except FAILURES as error:
            raise explain("list", self._name(path), error) from None
        files = {
            entry["path"].rpartition("/")[2]: FileFacts(
                entry["size"], entry["last_modified"].timestamp()
            )
            for entry in objects
        }
        # Consoles make empty objects for folders; those have no name of their own.
        return Directory(
            tuple(sorted(name for name in names if name)),
            {name: facts for name, facts in files.items() if name},
        )

    def size(self, path: str) -> int:
        check_path(path)
        try:
            return self._objects.head(path)["size"]
        except FAILURES as error:
            raise explain("read", self._name(path), error) from None

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        assert start >= 0
        assert stop is None or stop >= 0
        check_path(path)

        def read_once() -> bytes:
            wanted = READ_BYTES if stop is None else stop - start
            if wanted <= 0:
                self.size(path)
                return b""
            # What one request gives is of one object, however often its name changes hands.
            first, meta = self._get(path, start, start + min(wanted, READ_BYTES))
            end = start + first.size
            if meta is not None:
                end = meta["size"] if stop is None else min(stop, meta["size"])
            if end == start + first.size:
                return first.tobytes()
            buffer = np.empty(end - start, np.uint8)
            buffer[: first.size] = first
            num_read = self._read_object(path, start, buffer, num_read=first.size, meta=meta)
            return buffer[:num_read].tobytes()

        return self._read_unchanged(path, read_once)

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        assert start >= 0
        check_path(path)
        return self._read_unchanged(path, lambda: self._read_object(path, start, buffer))

    def read_range(self, path: str, start: int, num_bytes: int, buffer: Buffer) -> Buffer:  # noqa: ARG002
        """See `Storage.read_range`; the response itself, if one request is enough."""
        assert start >= 0
        check_path(path)
        if 0 < num_bytes <= READ_BYTES:
            stop = start + num_bytes
            found = self._ask(path, start, lambda: self._objects.read_range(path, start, stop))
            return np.frombuffer(memoryview(found or b""), np.uint8)
        target = np.empty(num_bytes, np.uint8)
        return target[: self.read_into(path, start, target)]

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        check_path(path)
        try:
            if overwrite:
                self._objects.put(path, data)
            elif path in self._unfinished or not self._put_exclusively(path, data):
                raise CheckpointExistsError(
                    f"{self._name(path)} exists already; choose another place, or overwrite it"
                )
        except CheckpointExistsError:
            raise
        except FAILURES as error:
            raise explain("write", self._name(path), error) from None

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> StreamWriter:
        check_path(path)
        name = self._name(path)
        with self._lock:
            if path in self._unfinished:
                raise StorageError(f"{name} exists already: it is being written")
            self._unfinished.add(path)
        flow = flow_for(num_bytes, self.latency, sizes=PART_BYTES, min_number=NUM_UPLOADS)
        part_bytes = self._part_bytes or flow.size
        if num_bytes > part_bytes * MAX_PARTS:
            part_bytes = _rounded_up(-(-num_bytes // MAX_PARTS))

        def upload(parts: Iterator[Buffer]) -> None:
            if overwrite:
                self._upload(path, parts, num_bytes, Flow(part_bytes, flow.number), self._put)
                return
            is_taken = ask_meanwhile(self, partial(self.exists, path))

            def if_free() -> Iterator[Buffer]:
                if is_taken():
                    raise StorageError(f"{name} exists already; choose another place")
                yield from parts

            flow_of_parts = Flow(part_bytes, flow.number)
            self._upload(path, if_free(), num_bytes, flow_of_parts, self._put_first)

        return StreamWriter(
            name, num_bytes, part_bytes, upload=upload, on_close=lambda: self._forget(path)
        )

    def copy_from(self, source: Storage, path: str, new: str, num_bytes: int) -> bool:
        """See `Storage.copy_from`; the server copies the object."""
        check_path(path)
        check_path(new)
        if not isinstance(source, ObjectStorage):
            return False
        if source._bucket is not self._bucket:  # noqa: SLF001 - of the same class
            return False
        try:
            self._objects.copy(source._objects.key(path), new)  # noqa: SLF001 - of the same class
        except FAILURES as error:
            problem = explain("copy", f"{source.url}/{path}", error)
            _LOGGER.debug("%s is not a copy: %s", self._name(new), problem)
            return False
        is_whole = self.size(new) == num_bytes
        if not is_whole:
            self.delete(new)
        return is_whole

    def delete(self, path: str) -> None:
        check_path(path)
        try:
            self._objects.delete([path])
        except FileNotFoundError:
            return
        except FAILURES as error:
            raise explain("remove", self._name(path), error) from None

    def delete_many(self, paths: Sequence[str]) -> None:
        """See `Storage.delete_many`; one request of S3 and Azure removes up to 1000."""
        for path in paths:
            check_path(path)
        if len(paths) > 1:
            # A store that cannot do this, or has not all of the objects, is asked for each alone.
            with suppress(*FAILURES):
                self._objects.delete(list(paths))
                return
        ask_together(self, [partial(self.delete, path) for path in paths])

    def sync(self) -> None:
        """See `Storage.sync`; there is nothing to do."""

    def _name(self, path: str) -> str:
        return f"{self._url}/{path}"

    def _forget(self, path: str) -> None:
        with self._lock:
            self._unfinished.discard(path)

    def _read_unchanged(self, path: str, read: Callable[[], _Result]) -> _Result:
        """Read one object by several requests; begin anew if another one took its name."""
        for _ in range(NUM_BEGINNINGS):
            with suppress(_ChangedError):
                return read()
        raise StorageError(
            f"cannot read {self._name(path)}: it was replaced {NUM_BEGINNINGS} times while it was "
            "being read\nSee who writes it"
        )

    def _read_object(
        self,
        path: str,
        start: int,
        buffer: Buffer,
        *,
        num_read: int = 0,
        meta: ObjectMeta | None = None,
    ) -> int:
        """Fill a buffer from one object; returns how many bytes there were."""
        while num_read < buffer.size:
            target = buffer[num_read : num_read + READ_BYTES]
            begin = start + num_read
            found, of_object = self._get(path, begin, begin + target.size)
            if of_object is None:
                if meta is not None and begin < meta["size"]:
                    raise _ChangedError
                break
            if meta is not None and _identity(meta) != _identity(of_object):
                raise _ChangedError
            meta = of_object
            target[: found.size] = found
            num_read += found.size
            if found.size < target.size:
                break
        return num_read

    def _get(self, path: str, start: int, stop: int) -> tuple[Buffer, ObjectMeta | None]:
        """The bytes [start, stop), at least one, by one request."""
        answer = self._ask(path, start, lambda: self._objects.read(path, start, stop))
        if answer is None:
            return np.empty(0, np.uint8), None
        meta, found = answer
        return np.frombuffer(memoryview(found), np.uint8), meta

    def _ask(self, path: str, start: int, request: Callable[[], _Result]) -> _Result | None:
        """The answer to a request for bytes from `start` on; None if that is behind the end."""
        try:
            return request()
        except FAILURES as error:
            # A range that begins behind the end is an error of no class of its own.
            problem = explain("read", self._name(path), error)
            if isinstance(problem, CheckpointNotFoundError) or start < self.size(path):
                raise problem from None
            return None

    def _put_exclusively(self, path: str, data: bytes) -> bool:
        """Put an object unless there is one, whatever the store does about conditions."""
        if self._bucket.honours_conditions is None:
            self._find_conditions()
        if self._bucket.honours_conditions:
            return self._put_first(path, data)
        folder, _, name = path.rpartition("/")
        claims = f"{folder}/{HIDDEN}{name}-" if folder else f"{HIDDEN}{name}-"
        mine = claims + secrets.token_hex(8)
        self._objects.put(mine, b"")
        try:
            found = self._objects.list(folder)
            others = {entry["path"] for entry in found if entry["path"].startswith(claims)} - {mine}
            if others:
                raise CheckpointExistsError(
                    f"{self._name(path)} is being written by another process; if no such process "
                    f"lives, remove {self._name(min(others))}"
                )
            return not self.exists(path) and self._put_first(path, data)
        finally:
            self.delete(mine)

    def _find_conditions(self) -> None:
        """Find out whether a put of an object that exists is refused."""
        probe = f"{HIDDEN}probe-{secrets.token_hex(8)}"

        def is_refused() -> bool:
            try:
                self._objects.put(probe, b"12", only_new=True)
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
            self._objects.read(path, 1, 2)
        except FAILURES as error:
            if RANGES_ADVICE in str(explain("read", self._name(path), error)):
                _LOGGER.warning("%s: %s", self._url, RANGES_ADVICE)

    def _put_first(self, path: str, data: bytes | memoryview) -> bool:
        """Put an object unless there is one; returns whether it is ours that is there now."""
        token = secrets.token_hex(16)
        try:
            self._objects.put(path, data, only_new=True, attributes={_TOKEN: token})
        except AlreadyExistsError:
            return bool(self._objects.attributes(path).get(_TOKEN) == token)
        return True

    def _put(self, path: str, data: bytes | memoryview) -> bool:
        """Put an object, in the place of one that is there; returns true."""
        self._objects.put(path, data)
        return True

    def _upload(
        self,
        path: str,
        parts: Iterator[Buffer],
        num_bytes: int,
        flow: Flow,
        put: Callable[[str, memoryview], bool],
    ) -> None:
        """Make a file of parts; if taking them raises, there is nothing left of it."""
        name = self._name(path)
        try:
            if num_bytes > flow.size:
                self._objects.upload(path, parts, part_bytes=flow.size, num_uploads=flow.number)
                return
            # Taking all parts waits until the writer finishes.
            whole = [*parts, np.empty(0, np.uint8)][0]
            if not put(path, whole.data):
                raise StorageError(f"{name} exists already: another writer was first")
        except StorageError:
            raise
        except FAILURES as error:
            raise explain("write", name, error) from None


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep the memory of responses for those that come next.

    Until a block as large has been freed once, glibc returns freed memory to the system, which then
    clears the pages of the next response. That takes longer than to receive it.
    """
    np.empty(READ_BYTES, np.uint8)


def _is_hidden(path: str) -> bool:
    """True if a path is not that of a file: of a writer's mark, or of a folder that a console made.

    Consoles make empty objects for folders; that of the root itself has no relative path.
    """
    return not path or path.rpartition("/")[2].startswith(HIDDEN)


def _rounded_up(num_bytes: int) -> int:
    """To the next mebibyte."""
    return -(-num_bytes >> 20) << 20
