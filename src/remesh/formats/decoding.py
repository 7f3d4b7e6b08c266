"""Files that hold encoded bytes, shown as the decoded ones.

`decoded` gives a storage in which all files of an index can be read as its positions say.

In remesh's own format, files may be compressed block by block (`remesh.compression`); the index
says where each block lies. A read decodes the blocks that its range meets. A block that cannot be
decoded reads as bytes that do not have its digest, so that it is found like any other damage.

Other systems compress chunks of tensors. An index says of each piece which bytes of which file it
is; bytes that are compressed are none of a file, so a reader names a file that is not there: the
stored file, the range that is encoded, the codecs, and how many bytes come out. It is decoded when
a byte of it is asked for, and the few that were decoded last are kept.

Nothing is decoded that says of itself to be larger than the reader expects. A file of one repeated
value, which is stored nowhere, has the codec `fill`.
"""

from __future__ import annotations

import importlib
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from remesh.compression import (
    TABLE_END_BYTES,
    BlockTable,
    decode_block,
    decode_table,
    size_of_stored_table,
)
from remesh.errors import FormatVersionError
from remesh.formats.checks import damaged
from remesh.index import Index
from remesh.integrity import Digests, block_digests
from remesh.storage import Buffer, Storage, StorageView, buffer_bytes_for, read_range

KEPT_BYTES = 256 << 20
"""Decoded bytes that are kept, at most; the last file is kept even if it is larger."""
FILL = "fill"

_NAME = re.compile(
    r"(?P<path>.*)#(?P<start>[0-9]{1,18})\+(?P<length>[0-9]{1,18})=(?P<size>[0-9]{1,18}):"
    r"(?P<codecs>[a-z0-9]+(?:[-,][a-z0-9]+)*)",
    re.DOTALL,
)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """A file that is not there, but can be decoded.

    Attributes:
        path: The stored file.
        start: First byte that is encoded.
        length: How many there are.
        num_bytes: How many come out.
        codecs: What encoded them, in this order.
    """

    path: str
    start: int
    length: int
    num_bytes: int
    codecs: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name under which it can be read."""
        codecs = ",".join(self.codecs)
        return f"{self.path}#{self.start}+{self.length}={self.num_bytes}:{codecs}"


def encoded_file(name: str) -> EncodedFile | None:
    """What a name says; None if it is that of a stored file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    start, length, size = (int(found[key]) for key in ("start", "length", "size"))
    return EncodedFile(found["path"], start, length, size, tuple(found["codecs"].split(",")))


def decoded(storage: Storage, index: Index) -> Storage:
    """A storage in which all files of an index can be read; most often the same."""
    if index.is_compressed:
        rows = {file.path: row for row, file in enumerate(index.files)}

        def table_of(path: str) -> BlockTable | None:
            return index.block_table(rows[path]) if path in rows else None

        def digest_of(path: str, number: int) -> Digests:
            row = int(index.first_block[rows[path]]) + number
            return index.digests[row : row + 1]

        return DecompressedFiles(storage, table_of, digest_of)
    if any("#" in file.path and encoded_file(file.path) for file in index.files):
        return DecodedFiles(storage)
    return storage


class DecompressedFiles(StorageView):
    """Compressed files, which are read as what they hold; others are read as they are.

    Sizes are those of the stored files.

    Args:
        storage: Where the files are.
        table_of: Says where the blocks of a file lie; None for one that is not compressed. By
            default the file itself says it.
        digest_of: The digest of a block of a file, given its number, as one row. If none is known,
            a block that cannot be decoded is a `CorruptCheckpointError`.
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
        """See `Storage.read`."""
        table = self.table(path)
        if table is None:
            return self._storage.read(path, start, stop)
        end = table.num_bytes if stop is None else min(stop, table.num_bytes)
        data = np.empty(max(end - start, 0), np.uint8)
        self.read_into(path, start, data)
        return data.tobytes()

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        """See `Storage.read_into`."""
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
            room = np.empty(buffer_bytes_for(self._storage, end - begin), np.uint8)
            data = read_range(self._storage, path, begin, end - begin, room)
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
    """Where the blocks of a file lie, as it says itself; None if it is not compressed.

    Raises:
        CorruptCheckpointError: If its table is damaged.
    """
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


class DecodedFiles(StorageView):
    """A storage that is read through codecs; see `remesh.storage.Storage`.

    Args:
        storage: Where the encoded files are.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        file = encoded_file(path)
        if file is None:
            return self._storage.size(path)
        if file.path:
            self._storage.size(file.path)  # a missing one is an error
        return file.num_bytes

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `Storage.read`."""
        file = encoded_file(path)
        if file is None:
            return self._storage.read(path, start, stop)
        end = file.num_bytes if stop is None else min(stop, file.num_bytes)
        if file.codecs[0].startswith(FILL):
            return _filled(file.codecs[0], start, max(end, start))
        return self._decoded(path, file)[start : max(end, start)]

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        """See `Storage.read_into`."""
        if encoded_file(path) is None:
            return self._storage.read_into(path, start, buffer)
        data = self.read(path, start, start + buffer.size)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def _decoded(self, name: str, file: EncodedFile) -> bytes:
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
                return found
        where = f"{self._storage.url}/{file.path}"
        data = self._storage.read(file.path, file.start, file.start + file.length)
        if len(data) < file.length:
            raise damaged(where, f"ends before byte {file.start + file.length}")
        found = decode(data, file.codecs, file.num_bytes, where)
        with self._lock:
            self._kept[name] = found
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return found


def fill_codec(element: bytes) -> str:
    """The codec of a file that repeats an element."""
    return f"{FILL}-{element.hex()}"


def _filled(codec: str, start: int, stop: int) -> bytes:
    element = bytes.fromhex(codec.partition("-")[2])
    first, last = start // len(element), -(-stop // len(element))
    begin = start - first * len(element)
    return (element * (last - first))[begin : begin + stop - start]


def decode(data: bytes, codecs: tuple[str, ...], num_bytes: int, where: str) -> bytes:
    """Undo codecs, the last first.

    Raises:
        CorruptCheckpointError: If the bytes are not what the codecs make, or too many come out.
        FormatVersionError: If a library for a codec is missing.
    """
    for codec in reversed(codecs):
        try:
            data = _DECODERS[codec](data, num_bytes, where)
        except (ValueError, RuntimeError, zlib.error) as error:
            raise damaged(where, f"cannot be decoded by {codec} ({error!s:.80})") from error
    if len(data) != num_bytes:
        raise damaged(where, f"{len(data)} bytes were encoded there, and {num_bytes} expected")
    return data


def _gunzip(data: bytes, num_bytes: int, _where: str) -> bytes:
    unpacking = zlib.decompressobj(wbits=31)
    found = unpacking.decompress(data, num_bytes + 1)
    if not unpacking.eof:
        raise ValueError("cut short, or more than expected")
    return found


def _unzstd(data: bytes, num_bytes: int, where: str) -> bytes:
    size = _zstd_size(data)
    if size != num_bytes:
        raise damaged(where, f"a zstd frame of {size} bytes, and {num_bytes} were expected")
    return bytes(_library("zstd", where).Zstd().decode(data))


def _zstd_size(data: bytes) -> int:
    """The size that the header of a frame says.

    Raises:
        ValueError: If it says none, or is no such header.
    """
    if len(data) < 6 or not data.startswith(_ZSTD_MAGIC):
        raise ValueError("no zstd frame")
    flags = data[4]
    is_single = bool(flags & 0x20)
    length = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
    at = 5 + (0 if is_single else 1) + (0, 1, 2, 4)[flags & 3]
    if not length or len(data) < at + length:
        raise ValueError("a frame that does not say its size")
    return int.from_bytes(data[at : at + length], "little") + (256 if length == 2 else 0)


def _unblosc(data: bytes, num_bytes: int, where: str) -> bytes:
    sizes = [int.from_bytes(data[at : at + 4], "little") for at in (4, 12)]
    if len(data) < 16 or sizes != [num_bytes, len(data)]:
        raise damaged(where, f"a blosc buffer that says {sizes}, not {[num_bytes, len(data)]}")
    return bytes(_library("blosc", where).Blosc().decode(data))


def _uncrc32c(data: bytes, _num_bytes: int, where: str) -> bytes:
    if len(data) < 4:
        raise ValueError("no checksum")
    return bytes(_library("checksum32", where).CRC32C(location="end").decode(data))


def _library(module: str, where: str) -> Any:
    try:
        return importlib.import_module(f"numcodecs.{module}")
    except ImportError as error:
        raise FormatVersionError(
            f"{where}: is encoded by {module}, and numcodecs cannot be imported ({error})\nInstall "
            "it with: pip install 'remesh[zarr]'"
        ) from error


_DECODERS = {"gzip": _gunzip, "zstd": _unzstd, "blosc": _unblosc, "crc32c": _uncrc32c}
CODECS = frozenset(_DECODERS)
"""Names of the codecs of bytes that are undone."""
