"""A `.pth` file of tensors, byte by byte: what `torch.save` would write for a dict of them.

The file is a zip archive with stored, not compressed, entries: `data.pkl` says which tensors there
are, `data/0`, `data/1`, ... are their bytes. All of it but checksums follows from names, dtypes
and shapes, so positions are known before the first byte is written, and the tensors can be written
one after the other, in parts, without ever having one whole. A checksum follows its entry in a data
descriptor (APPNOTE.TXT of the zip format, 4.3.9); every entry uses the zip64 form, which has no
limits on sizes (4.5.3).

`data.pkl` is a pickle because `torch.load` wants one. Who writes the archive makes it
(`remesh.formats.pickle_writer`); nothing here ever reads one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from remesh.formats.whole_tensors import FileTensor

ALIGNMENT = 64
"""Tensors begin at multiples of this, as torch wants it to map a file into memory."""

_ROOT = "archive"
_VERSION = 45
_FLAGS = 0x0808  # a data descriptor follows; names are UTF-8
_DATE = 0x21  # 1 January 1980, so that equal weights are equal files
_LOCAL = struct.Struct("<4s5HIIIHH")
_DESCRIPTOR = struct.Struct("<4sIQQ")
_CENTRAL = struct.Struct("<4s6H3I5HII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4HIIH")
_ZIP64 = struct.Struct("<HHQQ")
_ZIP64_CENTRAL = struct.Struct("<HHQQQ")
_EXTRA = struct.Struct("<HH")
_CRC_IN_DESCRIPTOR, _CRC_IN_LINE = 4, 16
"""Where the checksum stands in a data descriptor, and in a line of the directory."""

_PADDING_ID = 0x4246
_SEE_ZIP64 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file of the archive: where its header begins, and how long its data is."""

    name: bytes
    position: int
    num_bytes: int

    @property
    def header(self) -> bytes:
        """The bytes before the data, padded so that the data begins aligned."""
        fixed = _LOCAL.size + len(self.name) + _ZIP64.size + _EXTRA.size
        padding = -(self.position + fixed) % ALIGNMENT
        extra = _ZIP64.pack(1, 16, 0, 0) + _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
        sizes = (0, _SEE_ZIP64, _SEE_ZIP64, len(self.name), len(extra))
        return _LOCAL.pack(b"PK\x03\x04", _VERSION, _FLAGS, 0, 0, _DATE, *sizes) + self.name + extra

    @property
    def end(self) -> int:
        """Where the next entry begins."""
        return self.position + len(self.header) + self.num_bytes + _DESCRIPTOR.size

    def descriptor(self, checksum: int) -> bytes:
        """The bytes after the data."""
        return _DESCRIPTOR.pack(b"PK\x07\x08", checksum, self.num_bytes, self.num_bytes)

    def central(self, checksum: int) -> bytes:
        """The line of the archive's directory."""
        extra = _ZIP64_CENTRAL.pack(1, 24, self.num_bytes, self.num_bytes, self.position)
        numbers = (checksum, _SEE_ZIP64, _SEE_ZIP64, len(self.name), len(extra), 0, 0, 0, 0)
        versions = (_VERSION, _VERSION, _FLAGS, 0, 0, _DATE)
        return _CENTRAL.pack(b"PK\x01\x02", *versions, *numbers, _SEE_ZIP64) + self.name + extra


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
            entry = _Entry(f"{_ROOT}/{name}".encode(), position, len(content))
            self._first.append((entry, content))
            position = entry.end
        for number, tensor in enumerate(self.tensors):
            entry = _Entry(f"{_ROOT}/data/{number}".encode(), position, tensor.num_bytes)
            self._data.append(entry)
            position = entry.end
        version = b"3\n"
        self._last = _Entry(f"{_ROOT}/version".encode(), position, len(version)), version
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
        end = _END.pack(b"PK\x05\x06", 0, 0, many, many, _SEE_ZIP64, _SEE_ZIP64, 0)
        return [*lines, end64 + locator + end]


def _whole(entry: _Entry, content: bytes) -> bytes:
    return entry.header + content + entry.descriptor(zlib.crc32(content))
