"""Digests: every stored byte can be checked against what was written.

A data file is cut into blocks of `BLOCK_SIZE` bytes, the last one shorter, and each block has an
xxh3-128 digest, taken while the bytes were on their way to storage. The digests are in the index,
the index's own digest is in the commit record, and the record carries a digest of itself, so one
chain leads from the record to every byte. xxh3 finds damage, not forgery.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from remesh._repr import listed
from remesh.core.geometry import IntArray
from remesh.core.index import Index

BLOCK_SIZE = 1 << 20

NUM_READINGS = 3
"""How often a small file is read before its bytes count as damaged: they may be right where they
lie, and wrong on the way."""

Digests = npt.NDArray[np.uint64]
"""(blocks, 2): the high and low 64 bits of each digest."""


@dataclass(frozen=True, slots=True, eq=False)
class WrittenFile:
    """Digests of a data file that was written."""

    digests: Digests  # those of its blocks; none if it is not digested
    stored_begin: IntArray | None = None
    """If it may be compressed, the byte of the stored file at which each block begins."""
    stored_bytes: int | None = None  # if it may be compressed, the size of the stored file


def hex_digest(data: bytes) -> str:
    """The xxh3-128 digest of a small file, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def raw_digest(data: bytes | memoryview) -> bytes:
    """The xxh3-128 digest of bytes, as 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def block_digests(data: npt.NDArray[np.uint8], block_size: int = BLOCK_SIZE) -> Digests:
    """Digests of the blocks of bytes that begin at a block's beginning."""
    digests = np.empty((-(-len(data) // block_size), 2), dtype=np.uint64)
    for number in range(len(digests)):
        block = data[number * block_size : (number + 1) * block_size]
        value = xxhash.xxh3_128_intdigest(block.data)
        digests[number] = (value >> 64, value & 0xFFFFFFFFFFFFFFFF)
    return digests


def digest_of_digests(digests: Digests) -> str:
    """One digest for a whole file, made of those of its blocks."""
    return hex_digest(digests.astype("<u8").tobytes())


def find_damage(index: Index, file: int, start: int, data: npt.NDArray[np.uint8]) -> list[Finding]:
    """Damaged blocks of bytes of a file, from a block's beginning on, by the index's digests."""
    if not index.block_size:
        return []
    first = int(index.first_block[file]) + start // index.block_size
    found = block_digests(data, index.block_size)
    wrong = (found != index.digests[first : first + len(found)]).any(axis=1)
    findings = []
    for number in np.flatnonzero(wrong).tolist():
        begin = start + number * index.block_size
        end = min(begin + index.block_size, index.files[file].num_bytes)
        names = tuple(names_in_range(index, file, begin, end))
        findings.append(Finding(index.files[file].path, "content", begin, end, names))
    return findings


def names_in_range(index: Index, file: int, start: int, stop: int) -> Iterator[str]:
    """Names of the tensors with a byte in [start, stop) of a file."""
    begins: IntArray = index.position
    ends = begins + index.boxes.num_bytes
    inside = (index.file == file) & (begins < stop) & (ends > start)
    for row in np.unique(index.boxes.tensor[inside]).tolist():
        yield index.tensors.names[row]


def names_in_stored_range(index: Index, file: int, start: int, stop: int) -> list[str]:
    """Names of the tensors with a byte in [start, stop) of a file as it is stored."""
    table = index.block_table(file) if index.is_compressed else None
    if table is None:
        return list(names_in_range(index, file, start, stop))
    hit = np.flatnonzero((table.begin < stop) & (table.begin + table.length > start))
    together = np.split(hit, np.flatnonzero(np.diff(hit) > 1) + 1) if len(hit) else []
    step = index.block_size
    spans = [(int(blocks[0]) * step, int(blocks[-1] + 1) * step) for blocks in together]
    names = (name for span in spans for name in names_in_range(index, file, *span))
    return list(dict.fromkeys(names))


Problem = Literal["missing", "size", "content"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A stretch of a file that is not as it was written.

    Of a compressed file, damaged blocks are told by their bytes of the content; bytes that the
    stored file lacks or has too many, by those of the stored file.
    """

    file: str  # the file, relative to the checkpoint
    problem: Problem  # the file is `missing`, has another `size`, or other `content`
    start: int  # first byte that is wrong, missing or too much
    stop: int  # one past the last; the file may end before
    tensors: tuple[str, ...] = ()
    """Names of the tensors that lie there, as far as they are known; empty for headers and other
    files."""
    num_bytes: int | None = None  # size of the file, if it has another than was written
    num_written: int | None = None  # the size that was written, likewise

    def __str__(self) -> str:
        names = listed(self.tensors)
        what = f"tensors {names}" if names else "no tensor, only the file's header"
        return f"{self.file}: bytes {self.start}:{self.stop} are not what was written ({what})"


def compare_sizes(
    files: Iterable[tuple[str, int]], size_of: Callable[[str], int | None]
) -> list[Finding]:
    """The files, given with the sizes that were written, that have another one or are missing."""
    findings = []
    for path, written in files:
        size = size_of(path)
        if size is None:
            findings.append(Finding(path, "missing", 0, written))
        elif size != written:
            start, stop = sorted((size, written))
            found = Finding(path, "size", start, stop, num_bytes=size, num_written=written)
            findings.append(found)
    return findings


def repair_advice(place: str) -> str:
    """The command that shows what can be saved of a damaged checkpoint, as a sentence."""
    return f"To see what can be saved: remesh repair {shlex.quote(place)} --dry-run"
