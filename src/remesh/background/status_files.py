"""Status files of a background save, in the folder of its data files.

Each has a digest of its content (`seal`). A file whose bytes are not what was
written is read again; if they stay wrong, the save fails.

In the background there are no collectives: the ranks of a save learn of each other through the
storage that they write to, which every rank reaches, even when the process group is gone.

* `part-<rank>`: this rank's file is durable, or it is done without one.
* `failed-<rank>`: this rank has failed. `failed`, put by rank 0: the whole save has.
* `progress-<rank>`: how far this rank is, in a save that takes long.

Rank 0 needs one listing to see them all. It commits, or puts `failed`. Every rank sees a commit by
the commit record, which has the save's id. The marks of other formats do not tell which save they
are of. There rank 0 puts one more file:

* `committed`: the checkpoint exists. A rank that has seen it removes its own part, and the last of
  them the file itself, so that nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from remesh.core.integrity import NUM_READINGS, raw_digest
from remesh.errors import CheckpointError, CheckpointNotFoundError, RemeshError, StorageError
from remesh.exchange import decode_failure, encode_failure
from remesh.formats.framing import Part
from remesh.formats.native import data_folder
from remesh.formats.table import writer_of
from remesh.storage import Storage


class StatusFiles:
    """The status files of one save, as one rank uses them."""

    def __init__(self, storage: Storage, file_format: str, save_id: str, rank: int) -> None:
        self._storage = storage
        self._shows_commit = writer_of(file_format).is_committed
        self._save_id = save_id
        self._rank = rank
        self._folder = data_folder(save_id)
        self._parts: dict[int, list[Part]] = {}

    @property
    def end_path(self) -> str:
        """The file that says that the whole save has failed."""
        return self._path("failed", 0)

    def put_parts(self, parts: Sequence[Part]) -> None:
        """Say that this rank's files are durable, or that it is done without any."""
        self._put("part", msgspec.msgpack.encode(list(parts)))

    def put_progress(self, written_bytes: int, num_bytes: int) -> None:
        """Say how far this rank is, in a save that takes long."""
        self._put("progress", msgspec.msgpack.encode((written_bytes, num_bytes)))

    def put_failure(self, error: BaseException) -> None:
        """Say that this rank has failed; a failure of rank 0 is that of the whole save."""
        self._put("failed", encode_failure(self._rank, error))

    def report(self, error: BaseException) -> BaseException:
        """`put_failure`; the error, with a note if the storage refuses."""
        try:
            self.put_failure(error)
        except StorageError as also:
            error.add_note(f"The other ranks could not be told: {also}")
        return error

    def is_committed(self) -> bool:
        """True if the save is seen to be committed."""
        try:
            if self._shows_commit is not None:
                return self._shows_commit(self._storage, self._save_id)
            return self._storage.exists(self._path("committed", 0))
        except CheckpointError:
            return False

    def failure_of_save(self) -> RemeshError | None:
        """Why rank 0 gave the save up, if it did."""
        try:
            return decode_failure(read_sealed(self._storage, self.end_path))
        except CheckpointNotFoundError:
            return None

    def missing_parts(self, ranks: Sequence[int]) -> list[int]:
        """Rank 0: the ranks whose parts are not there yet.

        Raises what a rank says it failed with, also after it had put its part.
        """
        found = set(self._storage.list(f"{self._folder}/"))
        failures = [path for path in found if path.startswith(f"{self._folder}/failed-")]
        if failures:
            raise decode_failure(read_sealed(self._storage, min(failures)))
        missing = []
        for rank in ranks:
            if self._path("part", rank) in found:
                data = read_sealed(self._storage, self._path("part", rank))
                self._parts[rank] = msgspec.msgpack.decode(data, type=list[Part])
            else:
                missing.append(rank)
        return missing

    def parts(self, num_ranks: int) -> list[list[Part]]:
        """Rank 0, when no part is missing: what each rank says of its files."""
        return [self._parts[rank] for rank in range(num_ranks)]

    def describe_progress(self, ranks: Sequence[int]) -> str:
        """How far some ranks are that have not finished: who is slowest."""
        found = set(self._storage.list(f"{self._folder}/progress-"))
        told, silent = [], []
        for rank in ranks:
            data = b""
            if self._path("progress", rank) in found:
                with suppress(StorageError):  # it is for messages alone
                    data = read_sealed(self._storage, self._path("progress", rank))
            if data:
                told.append((rank, *msgspec.msgpack.decode(data, type=tuple[int, int])))
            else:
                silent.append(rank)
        texts = []
        if told:
            rank, done, size = min(told, key=lambda one: one[1] / one[2])
            texts.append(
                f"slowest is rank {rank} with {done / 1e6:.1f} of {size / 1e6:.1f} MB written"
            )
        if silent:
            texts.append(f"ranks {silent} have not said how far they are")
        return "; ".join(texts)

    def clear(self, num_ranks: int) -> None:
        """After the commit: remove status files that no rank needs any more."""
        if self._shows_commit is None and num_ranks > 1:
            self._leave()
        elif self._rank == 0:
            parts = [self._path("part", rank) for rank in self._parts]
            progress = self._storage.list(f"{self._folder}/progress-")
            self._storage.delete_many([*parts, *progress])

    def _leave(self) -> None:
        """Remove this rank's part; who finds no other one removes what is left."""
        if self._rank == 0:
            self._storage.put(self._path("committed", 0), b"", overwrite=True)
        self._storage.delete(self._path("part", self._rank))
        found = self._storage.list(f"{self._folder}/")
        if not any(path.startswith(f"{self._folder}/part-") for path in found):
            self._storage.delete_many(found)

    def _put(self, kind: str, data: bytes) -> None:
        self._storage.put(self._path(kind, self._rank), seal(data), overwrite=True)

    def _path(self, kind: str, rank: int) -> str:
        of_save = kind == "committed" or (kind == "failed" and rank == 0)
        return f"{self._folder}/{kind if of_save else f'{kind}-{rank:05d}'}.msgpack"


def seal(data: bytes) -> bytes:
    """The content of a small file that `read_sealed` reads."""
    return raw_digest(data) + data


def read_sealed(storage: Storage, path: str) -> bytes:
    """The content that `seal` sealed; StorageError if its bytes are not what was written."""
    for _ in range(NUM_READINGS):
        found = storage.read(path)
        if found[:16] == raw_digest(found[16:]):
            return found[16:]
    raise StorageError(
        f"{path}: its bytes are not what was written, in each of {NUM_READINGS} readings\n"
        f"It was read from {storage.url}. Look for errors of the disk, the network or the memory "
        "there, and save again; the previous checkpoint is untouched."
    )
