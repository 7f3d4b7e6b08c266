"""Lossless compression of data files, block by block.

Weights and moments of a trained model look random as bytes, but their signs and exponents do not:
few of them occur often. So the bytes of a block are sorted into *planes* first, all first bytes of
its elements, then all second bytes, and so on, and then compressed with zstd (RFC 8878), which
leaves planes of random mantissas as they are. The same idea is called byte shuffle in HDF5 and
Blosc, and byte grouping in ZipNN (Hershcovitch et al., 2024).

A block is a digest block (`remesh.core.integrity`). Each is encoded alone, so that a reader who
wants a range decodes no more than it has to check anyway. A block that does not get smaller is
stored as it is, and an encoded block is always smaller than its content, which tells the two apart.

An encoded block is one byte, the number of planes, and one frame of zstd.

The blocks of a file lie in it in any order, and after them a table says where. The index of a
checkpoint has the same numbers; the table is there for what is left when the index is lost.
"""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from remesh.core.geometry import IntArray
from remesh.errors import FormatVersionError, OptionError

LEVEL = 1
"""The fastest of zstd's levels: higher ones cost a multiple for a percent, for what can be made
smaller is entropy, and not repetition."""

HASH_LOG = 8
"""zstd remembers so few places to look for repetitions at: those that it would find in weights are
short, by chance, and cost twice the time and a percent more bytes. Repeated rows it still finds."""

MAX_PLANES = 16
"""The largest element has so many bytes."""

_WORDS = frozenset({2, 4, 8})
"""Numbers of planes of which shifts are faster than copies byte by byte."""

MAX_BLOCK_BYTES = 16 << 20
"""Bytes of a block of compressed files: it is decoded in memory, whatever its file takes."""

MAX_RATIO = 32 << 10
"""Bytes that come out of a byte of a zstd frame: a block of it takes 4 and stands for 128 KiB."""

TABLE_END_BYTES = 40
"""Of a table, what does not grow with the number of blocks."""

_TABLE_MARK = b"REMESHBT"

Bytes = npt.NDArray[np.uint8]
Count = TypeVar("Count", int, IntArray)

_local = threading.local()


def check_library() -> None:
    """Check that blocks can be encoded."""
    try:
        importlib.import_module("zstandard")
    except ImportError as error:
        raise OptionError(
            f"a save with compress= needs the library zstandard ({error})\nInstall it with: pip "
            "install 'remesh[compress]'"
        ) from error


def encode_block(block: Bytes, num_planes: int) -> Bytes:
    """A block of elements of `num_planes` bytes in its stored form; as it is if not smaller."""
    if not hasattr(_local, "compressor"):
        library = importlib.import_module("zstandard")
        parameters = library.ZstdCompressionParameters.from_level(
            LEVEL, hash_log=HASH_LOG, write_content_size=True
        )
        _local.compressor = library.ZstdCompressor(compression_params=parameters)
    frame = _local.compressor.compress(_planes(block, num_planes).data)
    if len(frame) + 1 >= len(block):
        return block
    encoded = np.empty(len(frame) + 1, np.uint8)
    encoded[0] = num_planes
    encoded[1:] = np.frombuffer(frame, np.uint8)
    return encoded


def decode_block(stored: Bytes, into: Bytes, where: str) -> bool:
    """Decode a block; true if that was possible. That it is right, its digest says."""
    if len(stored) == len(into):
        into[:] = stored
        return True
    library = _library(where)
    if not hasattr(_local, "decompressor"):
        _local.decompressor = library.ZstdDecompressor()
    num_planes = int(stored[0]) if len(stored) else 0
    try:
        # What a frame says of its size is believed only if it is what is expected.
        if library.frame_content_size(stored[1:].data) != len(into):
            return False
        found = np.frombuffer(_local.decompressor.decompress(stored[1:].data), np.uint8)
    except library.ZstdError:
        return False
    if len(found) != len(into) or not 0 < num_planes <= MAX_PLANES:
        return False
    size = len(into) // num_planes
    whole = size * num_planes
    elements = into[:whole].reshape(size, num_planes)
    for number, plane in enumerate(found[:whole].reshape(num_planes, size)):
        elements[:, number] = plane
    into[whole:] = found[whole:]
    return True


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Where the blocks of a compressed file lie."""

    begin: IntArray  # the byte of the file at which each block begins
    length: IntArray  # bytes of its stored form
    num_bytes: int  # bytes of the content of the file
    block_size: int  # bytes of the content in each block; the last may have fewer

    @classmethod
    def of(cls, begin: IntArray, num_bytes: int, block_size: int, stored_bytes: int) -> BlockTable:
        """The table of a file of `stored_bytes`: blocks lie without gaps, the table behind them."""
        end = np.array([stored_bytes - table_size(len(begin))])
        return cls(begin, stored_lengths(begin, np.zeros_like(begin), end), num_bytes, block_size)


def stored_lengths(begin: IntArray, file: IntArray, end: IntArray) -> IntArray:
    """Bytes of stored blocks: each ends where the next one of its file begins, or at `end`."""
    order = np.lexsort((begin, file))
    following = np.append(begin[order][1:], 0)
    is_last = np.diff(file, append=-1) != 0
    following[is_last] = end[file[is_last]]
    length = np.empty_like(begin)
    length[order] = following - begin[order]
    return length


def table_size(num_blocks: Count) -> Count:
    """Bytes of a table, or of several."""
    return 8 * num_blocks + TABLE_END_BYTES


def encode_table(begin: IntArray, num_bytes: int, block_size: int) -> Bytes:
    """The stored form of a table; see `BlockTable`."""
    numbers = np.append(begin, [num_bytes, block_size]).astype("<i8").tobytes()
    digest = xxhash.xxh3_128_digest(numbers)
    return np.frombuffer(numbers + digest + _TABLE_MARK, np.uint8)


def size_of_stored_table(end: bytes) -> int | None:
    """Bytes of a file's table, given its end; None without one, ValueError if damaged."""
    if len(end) < TABLE_END_BYTES or not end.endswith(_TABLE_MARK):
        return None
    num_bytes, block_size = np.frombuffer(end[:16], "<i8").tolist()
    if num_bytes < 0 or not 0 < block_size <= MAX_BLOCK_BYTES:
        raise ValueError("its table of blocks is damaged")
    return table_size(int(-(-num_bytes // block_size)))


def decode_table(data: bytes, stored_bytes: int) -> BlockTable:
    """The table of its stored form; ValueError if it is damaged or impossible."""
    numbers = data[:-24]
    if xxhash.xxh3_128_digest(numbers) != data[-24:-8]:
        raise ValueError("its table of blocks is damaged")
    *begin, num_bytes, block_size = np.frombuffer(numbers, "<i8").tolist()
    table = BlockTable.of(np.array(begin, np.int64), num_bytes, block_size, stored_bytes)
    full = np.full(len(begin), block_size)
    full[-1:] = num_bytes - (len(begin) - 1) * block_size
    is_whole = not begin or min(begin) == 0
    if not is_whole or not are_possible(table.begin, table.length, full):
        raise ValueError("its table of blocks is impossible")
    return table


def are_possible(begin: IntArray, length: IntArray, full: IntArray) -> bool:
    """True if blocks of `full` bytes may lie there in their stored form."""
    is_possible = (begin >= 0) & (length <= full) & (length * MAX_RATIO >= full)
    return bool(is_possible.all())


def _planes(block: Bytes, num_planes: int) -> Bytes:
    """The bytes of a block, plane by plane; what is no whole element comes last."""
    if num_planes == 1:
        return np.ascontiguousarray(block)
    size = len(block) // num_planes
    whole = size * num_planes
    sorted_ = np.empty_like(block)
    planes = sorted_[:whole].reshape(num_planes, size)
    if num_planes in _WORDS:
        words = block[:whole].view(f"<u{num_planes}")
        for number, plane in enumerate(planes):
            np.right_shift(words, 8 * number, out=plane, casting="unsafe")
    else:
        planes[...] = block[:whole].reshape(size, num_planes).T
    sorted_[whole:] = block[whole:]
    return sorted_


def _library(where: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise FormatVersionError(
            f"{where}: is compressed, and the library zstandard cannot be imported ({error})\n"
            "Install it with: pip install 'remesh[compress]'"
        ) from error
