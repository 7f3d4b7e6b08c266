"""Files that are not stored as they are read.

remesh's own may be compressed block by block; the index says where each block lies
(`remesh.core.compression`). A read decodes the blocks that its range meets. A block that cannot be
decoded reads as bytes that do not have its digest, so that it is found like any other damage.

A tensor of another system may be stored as a number in a pickle. An index says of each piece which
bytes of which file it is, so such a piece is of a file that is not there, whose name spells its
bytes: they go wherever the index goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from remesh.core.compression import (
    TABLE_END_BYTES,
    BlockTable,
    decode_block,
    decode_table,
    size_of_stored_table,
)
from remesh.core.index import Index
from remesh.core.integrity import Digests, block_digests
from remesh.formats.checks import damaged
from remesh.storage import Buffer, Storage, StorageView

_CONSTANT = "#bytes-"


def constant_file(content: bytes) -> str:
    """The name of a file that is stored nowhere and holds these bytes."""
    return f"{_CONSTANT}{content.hex()}"


def decoded(storage: Storage, index: Index) -> Storage:
    """A storage in which all files of an index can be read; most often the same."""
    if any(file.path.startswith(_CONSTANT) for file in index.files):
        return _ConstantFiles(storage)
    if not index.is_compressed:
        return storage
    rows = {file.path: row for row, file in enumerate(index.files)}

    def table_of(path: str) -> BlockTable | None:
        return index.block_table(rows[path]) if path in rows else None

    def digest_of(path: str, number: int) -> Digests:
        row = int(index.first_block[rows[path]]) + number
        return index.digests[row : row + 1]

    return DecompressedFiles(storage, table_of, digest_of)


class _ConstantFiles(StorageView):
    """Files whose names spell their bytes; others are read as they are."""

    def size(self, path: str) -> int:
        return len(self.read(path)) if path.startswith(_CONSTANT) else super().size(path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if not path.startswith(_CONSTANT):
            return super().read(path, start, stop)
        try:
            return bytes.fromhex(path.removeprefix(_CONSTANT))[start:stop]
        except ValueError as error:
            raise damaged(f"{self.url}/{path}", "a name that spells no bytes") from error

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        if not path.startswith(_CONSTANT):
            return super().read_into(path, start, buffer)
        content = self.read(path, start, start + buffer.size)
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
        return len(content)


class DecompressedFiles(StorageView):
    """Compressed files, which are read as what they hold; others are read as they are.

    Sizes are those of the stored files. `table_of` says where the blocks of a file lie, None for
    one that is not compressed; by default the file itself says it. `digest_of` gives the digest of
    a block of a file, by its number, as one row. If none is known, a block that cannot be decoded
    is a `CorruptCheckpointError`.
    """

    def __init__(
        self,
        storage: Storage,
        table_of: Callable[[str], BlockTable | None] | None = None,
        digest_of: Callable[[str, int], Digests] | None = None,
    ) -> None:
        super().__init__(storage)
        self._table_of = table_of or partial(read_table, storage)
        self._digest_of = digest_of
        self._tables: dict[str, BlockTable | None] = {}

    def table(self, path: str) -> BlockTable | None:
        """Where the blocks of a file lie; None if it is not compressed."""
        if path not in self._tables:
            self._tables[path] = self._table_of(path)
        return self._tables[path]

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        table = self.table(path)
        if table is None:
            return self._storage.read(path, start, stop)
        end = table.num_bytes if stop is None else min(stop, table.num_bytes)
        data = np.empty(max(end - start, 0), np.uint8)
        self.read_into(path, start, data)
        return data.tobytes()

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        table = self.table(path)
        if table is None:
            return self._storage.read_into(path, start, buffer)
        size, step = table.num_bytes, table.block_size
        stop = min(start + buffer.size, size)
        if stop <= start:
            return 0
        first, last = start // step, -(-stop // step)
        for number, stored in self._stored(path, table, first, last):
            begin, end = number * step, min((number + 1) * step, size)
            if start <= begin and end <= stop:
                self._decode(path, number, stored, buffer[begin - start : end - start])
            else:
                block = np.empty(end - begin, np.uint8)
                self._decode(path, number, stored, block)
                low, high = max(begin, start), min(end, stop)
                buffer[low - start : high - start] = block[low - begin : high - begin]
        return stop - start

    def _stored(
        self, path: str, table: BlockTable, first: int, last: int
    ) -> Iterator[tuple[int, Buffer]]:
        """Some blocks of a file as they are stored; those that lie together are read together."""
        begins, lengths = table.begin[first:last], table.length[first:last]
        order = np.argsort(begins)
        ends = begins + lengths
        is_gap = begins[order][1:] != ends[order][:-1]
        for together in np.split(order, np.flatnonzero(is_gap) + 1):
            begin, end = int(begins[together[0]]), int(ends[together[-1]])
            room = np.empty(0 if self._storage.reads_own_memory else end - begin, np.uint8)
            data = self._storage.read_range(path, begin, end - begin, room)
            for number in together.tolist():
                at = int(begins[number]) - begin
                yield first + number, data[at : at + int(lengths[number])]

    def _decode(self, path: str, number: int, stored: Buffer, block: Buffer) -> None:
        where = f"{self.url}/{path}"
        if decode_block(stored, block, where):
            return
        if self._digest_of is None:
            raise damaged(where, f"block {number} cannot be decoded")
        block[:] = 0
        if np.array_equal(block_digests(block, len(block)), self._digest_of(path, number)):
            block[:] = 0xFF


def read_table(storage: Storage, path: str) -> BlockTable | None:
    """Where the blocks of a file lie, as it says itself; None if it is not compressed."""
    stored_bytes = storage.size(path)
    end = storage.read(path, max(stored_bytes - TABLE_END_BYTES, 0), stored_bytes)
    try:
        size = size_of_stored_table(end)
        if size is None:
            return None
        if size > stored_bytes:
            raise ValueError("its table of blocks is larger than the file")
        return decode_table(storage.read(path, stored_bytes - size, stored_bytes), stored_bytes)
    except ValueError as error:
        raise damaged(f"{storage.url}/{path}", str(error)) from error
