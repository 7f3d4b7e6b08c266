"""Notes that ranks of a background save leave for each other, in the storage that they save to.

In the background there are no collectives. Every rank puts its part when its file is durable, or
when it has staged its state if it writes no file; a rank that failed puts its failure. Rank 0 waits
for the notes of all ranks and either commits, which everybody sees as a commit record with the
save's id, or gives up and puts the failure of the whole save. Storage is what every rank can reach
for certain, even when the process group is gone; notes are small, and listing one folder tells
rank 0 all it needs. In a save that takes long, ranks also note how far they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from remesh.errors import CheckpointError, CheckpointNotFoundError, RemeshError
from remesh.exchange import decode_failure, encode_failure
from remesh.formats import native
from remesh.storage import Storage

_FAILURE = "failed-"
"""How the names of notes begin that say that a rank has failed."""


class _Progress(msgspec.Struct, frozen=True):
    """How far a rank is with its file, in bytes."""

    written_bytes: int
    num_bytes: int


class Board:
    """The notes of one save.

    Args:
        storage: Where the save goes.
        save_id: Names the save.
    """

    def __init__(self, storage: Storage, save_id: str) -> None:
        self._storage = storage
        self._save_id = save_id
        self._folder = native.data_folder(save_id)
        self._seen: dict[int, native.Part] = {}

    def put_part(self, rank: int, part: native.Part) -> None:
        """Say that a rank's file is durable, or that it is done without one."""
        self._storage.put(self._part(rank), msgspec.msgpack.encode(part), overwrite=True)

    def put_failure(self, rank: int, error: BaseException) -> None:
        """Say that a rank has failed."""
        self._storage.put(self._failure(rank), encode_failure(rank, error), overwrite=True)

    def put_end(self, rank: int, error: BaseException) -> None:
        """Rank 0: say that the whole save has failed."""
        self._storage.put(self.end_path, encode_failure(rank, error), overwrite=True)

    def put_progress(self, rank: int, written_bytes: int, num_bytes: int) -> None:
        """Say how far a rank is, in a save that takes long."""
        data = msgspec.msgpack.encode(_Progress(written_bytes, num_bytes))
        self._storage.put(self._progress(rank), data, overwrite=True)

    def describe_progress(self, ranks: Sequence[int]) -> str:
        """Rank 0: who of the given ranks has said how far it is, the slowest first."""
        found = set(self._storage.list(f"{self._folder}/progress-"))
        notes, silent = [], []
        for rank in ranks:
            if self._progress(rank) in found:
                data = self._storage.read(self._progress(rank))
                notes.append((rank, msgspec.msgpack.decode(data, type=_Progress)))
            else:
                silent.append(rank)
        texts = []
        if notes:
            rank, note = min(notes, key=lambda item: item[1].written_bytes / item[1].num_bytes)
            done, size = note.written_bytes / 1e6, note.num_bytes / 1e6
            texts.append(f"slowest is rank {rank} with {done:.1f} of {size:.1f} MB written")
        if silent:
            texts.append(f"ranks {silent} have not said how far they are")
        return "; ".join(texts)

    def missing_parts(self, ranks: Sequence[int]) -> list[int]:
        """Rank 0: the ranks whose parts are not there yet.

        Raises:
            RemeshError: What a rank says it failed with, also after it had put its part.
        """
        found = set(self._storage.list(f"{self._folder}/"))
        failures = [path for path in found if path.startswith(f"{self._folder}/{_FAILURE}")]
        if failures:
            raise decode_failure(self._storage.read(min(failures)))
        missing = []
        for rank in ranks:
            if self._part(rank) in found:
                data = self._storage.read(self._part(rank))
                self._seen[rank] = msgspec.msgpack.decode(data, type=native.Part)
            else:
                missing.append(rank)
        return missing

    def parts(self, num_ranks: int) -> list[native.Part]:
        """Rank 0, when no part is missing: what each rank says of its file."""
        return [self._seen[rank] for rank in range(num_ranks)]

    def clear(self) -> None:
        """Rank 0: remove parts, of which the index has what they said, and other notes."""
        for rank in self._seen:
            self._storage.delete(self._part(rank))
        for path in self._storage.list(f"{self._folder}/progress-"):
            self._storage.delete(path)

    def is_committed(self) -> bool:
        """Whether the save is seen to be committed."""
        try:
            return native.read_record(self._storage).save_id == self._save_id
        except CheckpointError:
            return False

    def end(self) -> RemeshError | None:
        """Why rank 0 gave the save up, if it did."""
        try:
            return decode_failure(self._storage.read(self.end_path))
        except CheckpointNotFoundError:
            return None

    @property
    def end_path(self) -> str:
        """Where the note is that says that the whole save has failed."""
        return f"{self._folder}/failed.msgpack"

    def _part(self, rank: int) -> str:
        return f"{self._folder}/part-{rank:05d}.msgpack"

    def _progress(self, rank: int) -> str:
        return f"{self._folder}/progress-{rank:05d}.msgpack"

    def _failure(self, rank: int) -> str:
        return f"{self._folder}/{_FAILURE}{rank:05d}.msgpack"
