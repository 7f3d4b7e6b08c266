"""What a killed conversion has written, so that the next attempt need not write it again.

A journal is a file in a folder beside the files that are written, with a slot for each chunk of the
stream: its digest, once it is written. The next attempt that wants the same bytes at the same
places reads such a chunk back and compares it; what is not what the journal says is written again.
So a journal is only a hint: nothing that was damaged, or lost with the power, gets into the
checkpoint by it.

Which bytes an attempt wants follows from its key (the source, the transformation, the format, the
number of ranks) and from the layout of the stream. If either differs, the journal is begun anew.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field

from remesh.errors import CheckpointNotFoundError
from remesh.integrity import raw_digest
from remesh.storage import SharedFiles, Storage, Writer, aligned_buffer

JOURNALS = "conversion"
"""The folder of the journals, beside the files that are written."""

_MAGIC = b"remesh\x001"
_DIGEST = 16
_ID_BYTES = 12
_HEADER = len(_MAGIC) + _ID_BYTES + 2 * _DIGEST
_UNKNOWN = bytes(_DIGEST)


@dataclass(slots=True)
class Journal:
    """The chunks that one rank has written."""

    storage: Storage  # where the files are
    rank: int
    key: bytes  # the digest of all that says which bytes are wanted
    save_id: str = field(init=False)
    """Names the save; that of the earlier attempt, if there was one."""
    is_resumed: bool = field(init=False, default=False)
    """Whether files of an earlier attempt may be there."""
    num_reused: int = field(init=False, default=0)  # bytes that need not be written again
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _found: bytes = field(init=False, default=b"")
    _slots: bytes = field(init=False, default=b"")
    _writer: Writer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.save_id = secrets.token_hex(_ID_BYTES // 2)
        try:
            self._found = self.storage.read(self.path)
        except CheckpointNotFoundError:
            return
        before = len(_MAGIC) + _ID_BYTES
        if self._found[: len(_MAGIC)] == _MAGIC and self._found[before:][:_DIGEST] == self.key:
            name = self._found[len(_MAGIC) : before].decode("ascii", "replace")
            if name.isalnum():
                self.save_id, self.is_resumed = name, True

    @property
    def path(self) -> str:
        """The file."""
        return f"{JOURNALS}/{self.rank}.journal"

    def begin(self, save_id: str, layout: bytes, num_chunks: int) -> None:
        """Learn which bytes of which files the chunks are.

        Args:
            save_id: Names the save, for all ranks.
            layout: What says where in which files the stream lies.
            num_chunks: Chunks of the stream.

        Raises:
            StorageError: If the storage fails.
        """
        assert isinstance(self.storage, SharedFiles)
        header = _MAGIC + save_id.encode() + self.key + raw_digest(layout)
        num_bytes = _HEADER + num_chunks * _DIGEST
        same = self._found[:_HEADER] == header and len(self._found) == num_bytes
        self.is_resumed = self.is_resumed and same
        if not same:
            self.storage.delete(self.path)
        self._slots = self._found[_HEADER:] if same else bytes(num_chunks * _DIGEST)
        self._writer = self.storage.open_shared(self.path, num_bytes)
        self._write(0, header)
        self.storage.sync()

    def find(self, number: int) -> bytes | None:
        """The digest of a chunk that was written; None if it was not."""
        found = self._slots[number * _DIGEST :][:_DIGEST]
        return found if self.is_resumed and found != _UNKNOWN else None

    def add(self, number: int, digest: bytes) -> None:
        """Note that a chunk has been written; from any thread."""
        self._write(_HEADER + number * _DIGEST, digest)

    def count(self, num_bytes: int) -> None:
        """Note that bytes need not be written again; from any thread."""
        with self._lock:
            self.num_reused += num_bytes

    def close(self) -> None:
        """End the journal: the checkpoint exists, or its files are gone."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        self.storage.delete(self.path)

    def _write(self, position: int, data: bytes) -> None:
        assert self._writer is not None
        buffer = aligned_buffer(len(data))
        buffer[:] = memoryview(data)
        self._writer.write(position, buffer)
