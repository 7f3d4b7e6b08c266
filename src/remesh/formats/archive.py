"""The archives of `torch.save`: zip files, read and written without torch.

An archive is a zip file whose entries are stored, not compressed: `<root>/data.pkl`, a pickle that
describes everything and names storages, and `<root>/data/<key>`, the bytes of each storage. So the
elements of a tensor are a range of the file. Each entry begins with a header of its own, whose
length differs because torch aligns the bytes behind it; therefore headers are read, not guessed.

Checksums in archives are not looked at: torch itself does not look at them and can be told not to
write them (`torch.serialization.set_crc32_options`).

A tensor need not lie row by row: torch keeps the strides. `row_major_pieces` cuts such a tensor
into boxes that do lie row by row, which is what an index holds.

All bytes of an archive but those of the storages follow from the pickle and the sizes of the
storages (`ArchiveLayout`). So data files are planned completely before a byte of a tensor moves,
and tensors can be written one after the other, in parts, without ever having one whole. The
checksum of a storage follows it in a data descriptor (APPNOTE.TXT of the zip format, 4.3.9); it is
0 where no one sees all bytes. Storages use the zip64 form, which has no limits on sizes (4.5.3).
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from remesh.core import values
from remesh.core.dtypes import BY_NAME, DType
from remesh.core.geometry import IntArray, strides_of
from remesh.core.values import UnresolvedValue
from remesh.errors import (
    FormatVersionError,
    RemeshError,
    UnsupportedValueError,
)
from remesh.formats import pickle_reader, restricted_pickle
from remesh.formats.checks import damaged
from remesh.formats.pickle_records import Name, PersistentId, Pickled, Record
from remesh.formats.pickle_writer import described, dumps
from remesh.formats.restricted_pickle import LEGACY_STORAGES, ArchivedTensor
from remesh.storage import Storage

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x8
_READ_AT_ONCE = 1 << 16
MAX_PIECES = 1 << 20
"""Row-major pieces of one strided tensor."""


class _RangeFile(io.RawIOBase):
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


def open_range(storage: Storage, path: str, start: int, stop: int) -> io.BufferedReader:
    """Bytes [start, stop) of a file in a storage, read in blocks as they are asked for."""
    return io.BufferedReader(_RangeFile(storage, path, start, stop), _READ_AT_ONCE)


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive whose storages stay where they are."""

    where: str  # what to call it in messages
    pickled: Pickled  # what was saved, as data
    storages: Mapping[str, tuple[int, int]]
    """Position in the file and size in bytes of each storage."""
    allow: Collection[str] = ()  # names that the user allows its pickle
    path: str = ""  # the file of the checkpoint that it lies in

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
    file: IO[bytes], where: str, *, path: str = "", base: int = 0, allow: Collection[str] = ()
) -> Archive:
    """Read what an archive describes, which begins at byte `base` of the file at `path`."""
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

    def start_of(entry: zipfile.ZipInfo) -> int:
        """Where the bytes of an entry begin."""
        header, what = b"", "is damaged"
        if 0 <= entry.header_offset < size:
            file.seek(entry.header_offset)
            header = file.read(_LOCAL_HEADER.size)
        if len(header) == _LOCAL_HEADER.size and header.startswith(_LOCAL_MAGIC):
            *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if start <= start + entry.file_size <= size:
                return int(start)
            what = "leaves it; the file was cut short or is damaged"
        raise damaged(where, f"the archive's entry {entry.filename!r:.200} {what}")

    def content(entry: zipfile.ZipInfo) -> bytes:
        file.seek(start_of(entry))
        return file.read(entry.file_size)

    names = {entry.filename: entry for entry in entries}
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise damaged(where, "a zip file, but not one of torch.save (no data.pkl)")
    root = pickles[0].removesuffix("data.pkl")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise FormatVersionError(f"{where}: compressed (TorchScript?); torch.save its state_dict()")
    if f"{root}byteorder" in names and content(names[f"{root}byteorder"]) != b"little":
        raise FormatVersionError(f"{where}: written on a big-endian machine; convert it there")
    storages = {
        name.removeprefix(f"{root}data/"): (base + start_of(entry), entry.file_size)
        for name, entry in names.items()
        if name.startswith(f"{root}data/")
    }
    pickled = pickle_reader.parse(content(names[pickles[0]]), where)
    return Archive(where, pickled, storages, allow, path)


def scan_head(head: bytes) -> tuple[bytes, int] | None:
    """The pickle of an archive of one tensor, and where its only storage begins, from its head.

    Reading the first kilobyte of an archive instead of its directory at the end saves a request
    for each of many tensors. None if the head does not show both: `read_archive` must look then.
    """
    at, found = 0, None
    while at + _LOCAL_HEADER.size <= len(head) and head.startswith(_LOCAL_MAGIC, at):
        _, _, flags, method, _, _, _, _, size, name_length, extra_length = (
            _LOCAL_HEADER.unpack_from(head, at)
        )
        start = at + _LOCAL_HEADER.size + name_length + extra_length
        name = head[at + _LOCAL_HEADER.size :][:name_length]
        if method or start > len(head):
            return None
        if name.endswith(b"/data/0"):
            return None if found is None else (found, start)
        if flags & _HAS_DESCRIPTOR:
            stop = head.find(_DESCRIPTOR_MAGIC, start)
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
    shape: Sequence[int], strides: Sequence[int], where: str, num_pieces: int = MAX_PIECES
) -> tuple[IntArray, tuple[int, ...], IntArray]:
    """Boxes of a strided tensor that lie row by row: offsets, common shape, first elements.

    There are at most `num_pieces`.
    """
    inside: list[int] = []
    step = 1
    for dim in sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: strides[d]):
        if strides[dim] != step or (inside and dim > min(inside)):
            break
        inside.append(dim)
        step *= shape[dim]
    outside = [d for d in range(len(shape)) if shape[d] > 1 and d not in inside]
    counts = [shape[d] for d in outside]
    if math.prod(counts) > min(num_pieces, MAX_PIECES):
        # A tensor that was expanded has many pieces in few bytes, and does not grow with the file.
        raise FormatVersionError(
            f"{where}: its {math.prod(shape)} elements lie with strides {tuple(strides)!r:.80}\n"
            f"These are more than {MAX_PIECES} pieces, or, with those of other tensors, more "
            "pieces than its files have bytes; save it again after contiguous()"
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
    return values.decode(values.encode(UnresolvedValue("torch.Tensor", "torch.Tensor", payload)))


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


ALIGNMENT = 64
"""Elements begin at a multiple of this in the file, as torch wants it to map it into memory."""
_ROOT = "archive"
_UTF8 = 0x800
_VERSION = 45
_DATE = 0x21  # 1 January 1980, so that equal weights are equal files
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
"""Of what is larger, the zip64 form says the size or place; these numbers stand in its stead."""
_DESCRIPTOR = struct.Struct("<4sIQQ")
_DIRECTORY_LINE = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4HIIH")
_CHECKSUM_IN_DESCRIPTOR, _CHECKSUM_IN_LINE = 4, 16
"""Where the checksum stands in a data descriptor, and in a line of the directory."""
_STORAGE_OF = {dtype: name for name, dtype in LEGACY_STORAGES.items()}
_NO_HOOKS = Record("collections.OrderedDict")


@dataclass(slots=True)
class ArchiveLayout:
    """The bytes of an archive around its storages; all positions are those of the file."""

    pickled: bytes  # what `data.pkl` holds
    sizes: Sequence[int]  # bytes of the storages `0`, `1` and so on
    at: int = 0  # byte of the file at which the archive begins
    num_bytes: int = field(init=False)  # size of the archive
    positions: list[int] = field(init=False, default_factory=list)
    """Byte at which each storage begins."""
    literals: list[tuple[int, bytes]] = field(init=False, default_factory=list)
    """Position and content of the bytes before, between and behind the storages."""
    checksums: list[tuple[int, int, tuple[int, ...]]] = field(init=False)
    """First byte and end of each storage, and where its CRC-32 stands: twice, behind it."""

    def __post_init__(self) -> None:
        filler, directory = _small_entries(self.pickled)
        begin, lines = self.at, []
        for number, size in enumerate(self.sizes):
            name = f"{_ROOT}/data/{number}".encode()
            position = begin + len(filler)
            lines.append(len(directory))
            directory += _storage_line(name, size, position - self.at)
            filler += _storage_header(name, position)
            self.literals.append((begin, filler))
            self.positions.append(begin + len(filler))
            begin += len(filler) + size
            filler = _DESCRIPTOR.pack(_DESCRIPTOR_MAGIC, 0, size, size)
        start = begin + len(filler)
        end = _directory_end(len(lines) + 1 + len(_ALWAYS), len(directory), start - self.at)
        self.literals.append((begin, filler + directory + end))
        self.num_bytes = start + len(directory) + len(end) - self.at
        self.checksums = [
            (
                first,
                first + size,
                (first + size + _CHECKSUM_IN_DESCRIPTOR, start + line + _CHECKSUM_IN_LINE),
            )
            for first, size, line in zip(self.positions, self.sizes, lines, strict=True)
        ]

    def filled(self, storages: Sequence[bytes]) -> bytes:
        """The whole archive."""
        parts = [self.literals[0][1]]
        for storage, (_, filler) in zip(storages, self.literals[1:], strict=True):
            parts += [storage, filler]
        data = bytearray(b"".join(parts))
        for storage, (_, _, places) in zip(storages, self.checksums, strict=True):
            for place in places:
                struct.pack_into("<I", data, place - self.at, zlib.crc32(storage))
        return bytes(data)


_ALWAYS = {"byteorder": b"little", "version": b"3\n"}
"""Small entries of every archive, besides `data.pkl`."""


def _small_entries(pickled: bytes) -> tuple[bytes, bytearray]:
    """The entries that are no storages, and their lines in the directory."""
    data, directory = b"", bytearray()
    for short, content in {"data.pkl": pickled, **_ALWAYS}.items():
        name, size = f"{_ROOT}/{short}".encode(), len(content)
        numbers = (0, _UTF8, 0, 0, _DATE, zlib.crc32(content), size, size, len(name), 0)
        directory += _DIRECTORY_LINE.pack(b"PK\1\2", 0, *numbers, 0, 0, 0, 0, len(data)) + name
        data += _LOCAL_HEADER.pack(_LOCAL_MAGIC, *numbers) + name + content
    return data, directory


def _storage_header(name: bytes, position: int) -> bytes:
    """The header of a storage, padded so that its bytes begin aligned."""
    sizes = struct.pack("<HHQQ", 1, 16, 0, 0)
    fixed = _LOCAL_HEADER.size + len(name) + len(sizes) + 4
    padding = -(position + fixed) % ALIGNMENT
    # The extra field with the padding has the tag that torch gives it.
    extra = sizes + b"FB" + struct.pack("<H", padding) + bytes(padding)
    numbers = (_VERSION, _UTF8 | _HAS_DESCRIPTOR, 0, 0, _DATE, 0, _MAX_32, _MAX_32)
    return _LOCAL_HEADER.pack(_LOCAL_MAGIC, *numbers, len(name), len(extra)) + name + extra


def _storage_line(name: bytes, size: int, position: int) -> bytes:
    """The line of a storage in the directory."""
    extra = struct.pack("<HHQQQ", 1, 24, size, size, position)
    numbers = (_VERSION, _VERSION, _UTF8 | _HAS_DESCRIPTOR, 0, 0, _DATE, 0, _MAX_32, _MAX_32)
    lengths = (len(name), len(extra), 0, 0, 0, 0, _MAX_32)
    return _DIRECTORY_LINE.pack(b"PK\1\2", *numbers, *lengths) + name + extra


def _directory_end(count: int, size: int, start: int) -> bytes:
    """What closes an archive, behind its directory."""
    numbers = count, count, size, start
    end64 = b""
    if count >= _MAX_16 or max(size, start) >= _MAX_32:
        end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, *numbers)
        end64 += _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    counts, places = min(count, _MAX_16), (min(size, _MAX_32), min(start, _MAX_32))
    return end64 + _END.pack(b"PK\5\6", 0, 0, counts, counts, *places, 0)


def tensor_record(dtype: DType, shape: Sequence[int], key: str) -> Record:
    """The description of a tensor in a pickle; its elements are a storage, row by row."""
    size, legacy = math.prod(shape), _STORAGE_OF.get(dtype.name)
    storage = Name(f"torch.{legacy}" if legacy else "torch.storage.UntypedStorage")
    num_items = size if legacy else size * dtype.itemsize
    pid = PersistentId(("storage", storage, key, "cpu", num_items))
    args = (pid, 0, tuple(shape), tuple(strides_of(shape)), False, _NO_HOOKS)
    if legacy:
        return Record("torch._utils._rebuild_tensor_v2", args)
    return Record("torch._utils._rebuild_tensor_v3", (*args, Name(f"torch.{dtype.name}")))


def archive_of(value: object, name: str) -> bytes:
    """A whole archive of a plain value, in which tensors may stand, as `torch.save` writes it."""
    unknown = next(values.unresolved(value), None)
    if unknown is not None:
        raise UnsupportedValueError(
            f"{name}: a {unknown.type_name}, which this program does not know, so it cannot be "
            "pickled\nImport the module that defines it first"
        )
    storages: list[bytes] = []

    def tensor_of(tensor: object) -> Record:
        found = values.with_arrays(tensor)
        assert isinstance(found, UnresolvedValue)
        assert isinstance(found.payload, list)
        dtype, shape, data = found.payload
        storages.append(data)
        return tensor_record(BY_NAME[dtype], shape, str(len(storages) - 1))

    try:
        pickled = dumps(described(value, tensor_of))
    except TypeError as error:
        raise UnsupportedValueError(f"{name}: {error}\nStore plain values") from error
    return ArchiveLayout(pickled, list(map(len, storages))).filled(storages)
