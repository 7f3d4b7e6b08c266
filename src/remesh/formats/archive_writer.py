"""Archives of `torch.save` around bytes that another function writes.

All bytes of an archive of one tensor but the elements follow from its type and shape: a head before
them, a tail behind. So a data file of such archives is planned completely before a byte of a tensor
moves, like remesh's own files. The entry with the elements comes last, so that only its size can
pass what a plain zip file holds. Its checksum is 0: it would have to be known before the elements
are, and torch does not look at it (`torch.serialization.set_crc32_options` turns it off in torch's
own files).

`TorchArchive` is a `.pth` file of many tensors: what `torch.save` would write for a dict of them.
Names, dtypes and shapes give all of it but checksums, so tensors can be written one after the
other, in parts, without ever having one whole. A checksum follows its entry in a data descriptor
(APPNOTE.TXT of the zip format, 4.3.9); every entry uses the zip64 form, which has no limits on
sizes (4.5.3). `data.pkl` is a pickle because `torch.load` wants one; nothing here ever reads one.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from remesh.core import values
from remesh.core.dtypes import DType
from remesh.core.geometry import strides_of
from remesh.errors import UnsupportedValueError
from remesh.formats.archive import DESCRIPTOR_MAGIC, LOCAL_HEADER, LOCAL_MAGIC
from remesh.formats.pickle_values import LEGACY_STORAGES
from remesh.formats.pickle_writer import Call, Global, PersistentId, dumps
from remesh.formats.whole_tensors import FileTensor

ALIGNMENT = 64
"""Elements begin at a multiple of this in the file, as torch wants it to map it into memory."""
ROOT = "archive"
_MAX_32 = 0xFFFFFFFF
"""Of what is larger, the zip64 form says the size or place; this number stands in its stead."""
_UTF8 = 0x800
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_STORAGE_OF = {dtype: name for name, dtype in LEGACY_STORAGES.items()}


def tensor_pickle(dtype: DType, shape: Sequence[int]) -> bytes:
    """The pickle of a tensor whose elements are the storage `0`, row by row."""
    return dumps(tensor_value(dtype, shape, "0"))


def tensor_value(dtype: DType, shape: Sequence[int], key: str) -> Call:
    """The description of a tensor in a pickle; its elements are a storage, row by row."""
    size, legacy = math.prod(shape), _STORAGE_OF.get(dtype.name)
    storage = Global("torch", legacy) if legacy else Global("torch.storage", "UntypedStorage")
    num_items = size if legacy else size * dtype.itemsize
    hooks = Call(Global("collections", "OrderedDict"), ())
    args = (
        PersistentId(("storage", storage, key, "cpu", num_items)),
        0,
        tuple(shape),
        tuple(strides_of(shape)),
        False,
        hooks,
    )
    if legacy:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
    rebuild = Global("torch._utils", "_rebuild_tensor_v3")
    return Call(rebuild, (*args, Global("torch", dtype.name)))


def frame(pickled: bytes, num_bytes: int, at: int) -> tuple[bytes, bytes]:
    """Head and tail of an archive, which begins at byte `at`; between them lies storage `0`."""
    head, directory = _small_entries([("data.pkl", pickled)])
    name = f"{ROOT}/data/0".encode()
    is_large = num_bytes >= _MAX_32
    sizes = struct.pack("<2H2Q", 1, 16, num_bytes, num_bytes) if is_large else b""
    shown = _MAX_32 if is_large else num_bytes
    start = at + len(head) + LOCAL_HEADER.size + len(name) + len(sizes) + 4
    padding = -start % ALIGNMENT
    # The extra field with the padding has the tag that torch gives it.
    extra = sizes + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    local = _local_header(name, 0, shown, extra)
    directory += _central_header(name, 0, shown, len(head), sizes)
    head += local
    return head, directory_end(directory, 4, len(head) + num_bytes)


def _small_entries(entries: Sequence[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Entries whose bytes are known, with what torch wants in every archive: bytes, directory."""
    data, directory = b"", b""
    for short, content in (*entries, ("byteorder", b"little"), ("version", b"3\n")):
        name, checksum = f"{ROOT}/{short}".encode(), zlib.crc32(content)
        directory += _central_header(name, checksum, len(content), len(data), b"")
        data += _local_header(name, checksum, len(content), b"") + content
    return data, directory


def _local_header(name: bytes, checksum: int, size: int, extra: bytes) -> bytes:
    fields = (0, _UTF8, 0, 0, 0, checksum, size, size, len(name), len(extra))
    return LOCAL_HEADER.pack(LOCAL_MAGIC, *fields) + name + extra


def _central_header(name: bytes, checksum: int, size: int, at: int, extra: bytes) -> bytes:
    fields = (0, 0, _UTF8, 0, 0, 0, checksum, size, size, len(name), len(extra), 0, 0, 0, 0, at)
    return _CENTRAL.pack(b"PK\x01\x02", *fields) + name + extra


def directory_end(directory: bytes, num_entries: int, at: int) -> bytes:
    """The directory, which begins at a byte of the archive, and what closes the archive."""
    size, closing = len(directory), b""
    if at >= _MAX_32:
        closing = struct.pack(
            "<4sQ2H2I4Q", b"PK\x06\x06", 44, 0, 45, 0, 0, num_entries, num_entries, size, at
        )
        closing += struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    shown = min(at, _MAX_32)
    closing += struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, num_entries, num_entries, size, shown, 0
    )
    return directory + closing


def archive_of(value: object, name: str) -> bytes:
    """A whole archive of a plain value, as `torch.save` writes it."""
    unknown = next(values.unresolved(value), None)
    if unknown is not None:
        raise UnsupportedValueError(
            f"{name}: a {unknown.type_name}, which this program does not know, so it cannot be "
            "pickled\nImport the module that defines it first"
        )
    torch = sys.modules.get("torch")
    if torch is not None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()
    # What needs torch is unresolved without it, so this is plain.
    data, directory = _small_entries([("data.pkl", pickle.dumps(value, protocol=2))])
    return data + directory_end(directory, 3, len(data))


# ---------------------------------------------------------------------------------------------
# Files of many tensors
# ---------------------------------------------------------------------------------------------


_VERSION = 45
_FLAGS = 0x0808  # a data descriptor follows; names are UTF-8
_DATE = 0x21  # 1 January 1980, so that equal weights are equal files
_DESCRIPTOR = struct.Struct("<4sIQQ")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4HIIH")
_ZIP64 = struct.Struct("<HHQQ")
_ZIP64_CENTRAL = struct.Struct("<HHQQQ")
_EXTRA = struct.Struct("<HH")
_CRC_IN_DESCRIPTOR, _CRC_IN_LINE = 4, 16
"""Where the checksum stands in a data descriptor, and in a line of the directory."""

_PADDING_ID = 0x4246


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file of the archive: where its header begins, and how long its data is."""

    name: bytes
    position: int
    num_bytes: int

    @property
    def header(self) -> bytes:
        """The bytes before the data, padded so that the data begins aligned."""
        fixed = LOCAL_HEADER.size + len(self.name) + _ZIP64.size + _EXTRA.size
        padding = -(self.position + fixed) % ALIGNMENT
        extra = _ZIP64.pack(1, 16, 0, 0) + _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
        sizes = (0, _MAX_32, _MAX_32, len(self.name), len(extra))
        return (
            LOCAL_HEADER.pack(LOCAL_MAGIC, _VERSION, _FLAGS, 0, 0, _DATE, *sizes)
            + self.name
            + extra
        )

    @property
    def end(self) -> int:
        """Where the next entry begins."""
        return self.position + len(self.header) + self.num_bytes + _DESCRIPTOR.size

    def descriptor(self, checksum: int) -> bytes:
        """The bytes after the data."""
        return _DESCRIPTOR.pack(DESCRIPTOR_MAGIC, checksum, self.num_bytes, self.num_bytes)

    def central(self, checksum: int) -> bytes:
        """The line of the archive's directory."""
        extra = _ZIP64_CENTRAL.pack(1, 24, self.num_bytes, self.num_bytes, self.position)
        numbers = (checksum, _MAX_32, _MAX_32, len(self.name), len(extra), 0, 0, 0, 0)
        versions = (_VERSION, _VERSION, _FLAGS, 0, 0, _DATE)
        return _CENTRAL.pack(b"PK\x01\x02", *versions, *numbers, _MAX_32) + self.name + extra


@dataclass(slots=True)
class TorchArchive:
    """The bytes of a `.pth` file around its tensors; checksums of tensors are zeros in them."""

    tensors: Sequence[FileTensor]  # the tensors, in order
    pickled: bytes  # what `data.pkl` holds
    num_bytes: int = field(init=False)  # size of the file
    _first: list[tuple[_Entry, bytes]] = field(init=False)
    _data: list[_Entry] = field(init=False)
    _last: tuple[_Entry, bytes] = field(init=False)

    def __post_init__(self) -> None:
        position = 0
        self._first, self._data = [], []
        for name, content in (("data.pkl", self.pickled), ("byteorder", b"little")):
            entry = _Entry(f"{ROOT}/{name}".encode(), position, len(content))
            self._first.append((entry, content))
            position = entry.end
        for number, tensor in enumerate(self.tensors):
            entry = _Entry(f"{ROOT}/data/{number}".encode(), position, tensor.num_bytes)
            self._data.append(entry)
            position = entry.end
        version = b"3\n"
        self._last = _Entry(f"{ROOT}/version".encode(), position, len(version)), version
        self.num_bytes = self._last[0].end + sum(map(len, self._directory()))

    @property
    def positions(self) -> list[int]:
        """Byte at which each tensor begins."""
        return [entry.position + len(entry.header) for entry in self._data]

    def fillers(self) -> list[tuple[int, bytes]]:
        """Position and content of all bytes that are not of tensors."""
        fillers = [(0, b"".join(_whole(*entry) for entry in self._first))]
        for entry in self._data:
            fillers.append((entry.position, entry.header))
            fillers.append((entry.end - _DESCRIPTOR.size, entry.descriptor(0)))
        last = _whole(*self._last) + b"".join(self._directory())
        return [*fillers, (self._last[0].position, last)]

    def checksums(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """First byte and end of each tensor, and where its CRC-32 stands: twice, behind it."""
        directory = self._directory()
        line = self._last[0].end + sum(map(len, directory[: len(self._first)]))
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for entry, text in zip(self._data, directory[len(self._first) :], strict=False):
            stop = entry.end - _DESCRIPTOR.size
            places = (stop + _CRC_IN_DESCRIPTOR, line + _CRC_IN_LINE)
            found.append((stop - entry.num_bytes, stop, places))
            line += len(text)
        return found

    def _directory(self) -> list[bytes]:
        """The lines of the directory, and what closes the archive."""
        start = self._last[0].end
        lines = [
            *(entry.central(zlib.crc32(content)) for entry, content in self._first),
            *(entry.central(0) for entry in self._data),
            self._last[0].central(zlib.crc32(self._last[1])),
        ]
        count, size = len(lines), sum(map(len, lines))
        end64 = _END64.pack(
            b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, start
        )
        locator = _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
        many = 0xFFFF
        end = _END.pack(b"PK\x05\x06", 0, 0, many, many, _MAX_32, _MAX_32, 0)
        return [*lines, end64 + locator + end]


def _whole(entry: _Entry, content: bytes) -> bytes:
    return entry.header + content + entry.descriptor(zlib.crc32(content))
