"""The archives of `torch.save`: where in the file each storage lies, without torch.

An archive is a zip file whose entries are stored, not compressed: `<root>/data.pkl`, a pickle that
describes everything and names storages, and `<root>/data/<key>`, the bytes of each storage. So the
elements of a tensor are a range of the file. Each entry begins with a header of its own, whose
length differs because torch aligns the bytes behind it; therefore headers are read, not guessed.

Checksums in archives are not looked at: torch itself does not look at them and can be told not to
write them.

A tensor need not lie row by row: torch keeps the strides. `row_major_pieces` cuts such a tensor
into boxes that do lie row by row, which is what an index holds.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import IntArray, strides_of
from remesh.core.values import UnresolvedValue, decode, encode
from remesh.errors import CorruptCheckpointError, FormatVersionError, RemeshError
from remesh.formats import pickle_reader, restricted_pickle
from remesh.formats.checks import damaged
from remesh.formats.pickle_records import Pickled
from remesh.formats.pickle_values import ArchivedTensor
from remesh.storage import Storage

LOCAL_HEADER = struct.Struct("<4s5H3I2H")
LOCAL_MAGIC = b"PK\x03\x04"
DESCRIPTOR_MAGIC = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x8
MAX_PIECES = 1 << 20
"""Row-major pieces of one strided tensor; with more, its elements lie almost singly."""


class RangeFile(io.RawIOBase):
    """Bytes [start, stop) of a file in a storage, as a file that can be read and sought."""

    def __init__(self, storage: Storage, path: str, start: int, stop: int) -> None:
        super().__init__()
        self._storage = storage
        self._path = path
        self._start = start
        self._size = stop - start
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        data = self._storage.read(self._path, self._start + self._at, self._start + stop)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive whose storages stay where they are."""

    where: str  # what to call it in messages
    pickled: Pickled  # what was saved, as data
    storages: Mapping[str, tuple[int, int]]
    """Position in the file and size in bytes of each storage."""
    allow: Collection[str] = ()  # names that the user allows its pickle

    def value(self, tensor_of: Callable[[ArchivedTensor], object] | None = None) -> Any:
        """The saved value; see `restricted_pickle.resolved`."""
        return restricted_pickle.resolved(
            self.pickled, self.where, allow=self.allow, tensor_of=tensor_of
        )

    def position(self, tensor: ArchivedTensor) -> int:
        """The byte of the file at which a tensor begins."""
        position, size = self.storages.get(tensor.key, (0, -1))
        return position + check_extent(tensor, size, self.where)


def check_extent(tensor: ArchivedTensor, num_bytes: int, where: str) -> int:
    """The byte of its storage at which a tensor begins, if it lies in so many bytes."""
    itemsize = BY_NAME[tensor.dtype].itemsize
    is_sound = (
        len(tensor.shape) == len(tensor.strides)
        and min((*tensor.shape, *tensor.strides, tensor.offset, num_bytes), default=0) >= 0
    )
    if is_sound and 0 not in tensor.shape:
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((extent - 1) * stride for extent, stride in steps)
        is_sound = (last + 1) * itemsize <= num_bytes
    if not is_sound:
        raise damaged(
            where, f"a tensor of shape {tensor.shape} leaves its storage of {num_bytes} bytes"
        )
    return tensor.offset * itemsize


def read_archive(
    file: IO[bytes],
    where: str,
    *,
    base: int = 0,
    allow: Collection[str] = (),
) -> Archive:
    """Read what an archive describes; `base` is the byte of the outer file at which it begins."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except RemeshError:
        raise
    except Exception as error:  # zipfile raises whatever comes of damaged numbers
        file.seek(0)
        if file.read(2) in {b"\x80\x02", b"\x80\x03", b"\x80\x04"}:
            raise FormatVersionError(
                f"{where}: a pickle without an archive around it, as torch wrote before 1.6\nLoad "
                "and save it again with a later torch"
            ) from error
        raise damaged(
            where, f"not an archive of torch.save, or cut short ({error!s:.80})"
        ) from error
    size = file.seek(0, io.SEEK_END)
    names = {entry.filename: _Entry(file, entry, size, where) for entry in entries}
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise damaged(where, "a zip file, but not one of torch.save (no data.pkl)")
    root = pickles[0].removesuffix("data.pkl")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise FormatVersionError(f"{where}: compressed; save it again without compression")
    if f"{root}byteorder" in names and names[f"{root}byteorder"].content() != b"little":
        raise FormatVersionError(f"{where}: written on a big-endian machine; convert it there")
    storages = {
        name.removeprefix(f"{root}data/"): (base + entry.start(), entry.size)
        for name, entry in names.items()
        if name.startswith(f"{root}data/")
    }
    pickled = pickle_reader.parse(names[pickles[0]].content(), where)
    return Archive(where, pickled, storages, allow)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of an archive of so many bytes, as the archive's directory has it."""

    file: IO[bytes]
    info: zipfile.ZipInfo
    num_bytes: int
    where: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.info.file_size

    def start(self) -> int:
        """Where its bytes begin."""
        header = b""
        if 0 <= self.info.header_offset < self.num_bytes:
            self.file.seek(self.info.header_offset)
            header = self.file.read(LOCAL_HEADER.size)
        if len(header) < LOCAL_HEADER.size or not header.startswith(LOCAL_MAGIC):
            raise self._damaged("is damaged")
        *_, name_length, extra_length = LOCAL_HEADER.unpack(header)
        start = self.info.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if not start <= start + self.size <= self.num_bytes:
            raise self._damaged("leaves it; the file was cut short or is damaged")
        return int(start)

    def content(self) -> bytes:
        """Its bytes."""
        start = self.start()
        self.file.seek(start)
        data = self.file.read(self.size)
        if len(data) < self.size:
            raise self._damaged("was cut short")
        return data

    def _damaged(self, what: str) -> CorruptCheckpointError:
        return damaged(self.where, f"the archive's entry {self.info.filename!r:.200} {what}")


def scan_head(head: bytes) -> tuple[bytes, int] | None:
    """The pickle of an archive of one tensor, and where its only storage begins, from its head.

    Reading the first kilobyte of an archive instead of its directory at the end saves a request
    for each of many tensors. None if the head does not show both: `read_archive` must look then.
    """
    at, found = 0, None
    while at + LOCAL_HEADER.size <= len(head) and head.startswith(LOCAL_MAGIC, at):
        _, _, flags, method, _, _, _, _, size, name_length, extra_length = LOCAL_HEADER.unpack_from(
            head, at
        )
        start = at + LOCAL_HEADER.size + name_length + extra_length
        name = head[at + LOCAL_HEADER.size :][:name_length]
        if method or start > len(head):
            return None
        if name.endswith(b"/data/0"):
            return None if found is None else (found, start)
        if flags & _HAS_DESCRIPTOR:
            stop = head.find(DESCRIPTOR_MAGIC, start)
            if stop < 0 or head[stop + 8 : stop + 12] != struct.pack("<I", stop - start):
                return None
            at = stop + 16
        else:
            stop = at = start + size
        if name.endswith(b"/data.pkl"):
            found = head[start:stop]
        if name.endswith(b"/byteorder") and head[start:stop] != b"little":
            return None
    return None


def row_major_pieces(
    shape: Sequence[int], strides: Sequence[int], where: str
) -> tuple[IntArray, tuple[int, ...], IntArray]:
    """Boxes of a strided tensor that lie row by row: offsets, common shape, first elements."""
    inside: list[int] = []
    step = 1
    for dim in sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: strides[d]):
        if strides[dim] != step or (inside and dim > min(inside)):
            break
        inside.append(dim)
        step *= shape[dim]
    outside = [d for d in range(len(shape)) if shape[d] > 1 and d not in inside]
    counts = [shape[d] for d in outside]
    if math.prod(counts) > MAX_PIECES:
        raise FormatVersionError(
            f"{where}: its {math.prod(shape)} elements lie with strides {tuple(strides)}, almost "
            "singly\nSave it again after contiguous()"
        )
    places = np.indices(counts, dtype=np.int64).reshape(len(counts), math.prod(counts))
    offsets = np.zeros((places.shape[1], len(shape)), dtype=np.int64)
    offsets[:, outside] = places.T
    box = tuple(shape[d] if d in inside else 1 for d in range(len(shape)))
    return offsets, box, offsets @ np.array(strides, dtype=np.int64)


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements lie row by row, without gaps."""
    expected = strides_of(shape)
    return all(
        extent == 1 or stride == wanted
        for extent, stride, wanted in zip(shape, strides, expected, strict=True)
    )


def tensor_value(tensor: ArchivedTensor, data: bytes, position: int) -> object:
    """A tensor of an opaque object, from byte `position` of `data` on; torch's own if loaded."""
    dtype = BY_NAME[tensor.dtype]
    view = np.ndarray(
        tensor.shape,
        dtype.carrier,
        data,
        position if 0 not in tensor.shape else 0,
        tuple(stride * dtype.itemsize for stride in tensor.strides),
    )
    payload = [tensor.dtype, [*tensor.shape], view.tobytes()]
    return decode(encode(UnresolvedValue("torch.Tensor", "torch.Tensor", payload)))
