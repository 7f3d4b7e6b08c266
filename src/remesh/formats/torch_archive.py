"""A `.pth` file of tensors, byte by byte: what `torch.save` would write for a dict of them.

The file is a zip archive with stored, not compressed, entries: `data.pkl` says which tensors there
are, `data/0`, `data/1`, ... are their bytes. All of it but checksums follows from names, dtypes
and shapes, so positions are known before the first byte is written, and the tensors can be written
one after the other, in parts, without ever having one whole. A checksum follows its entry in a data
descriptor (APPNOTE.TXT of the zip format, 4.3.9); every entry uses the zip64 form, which has no
limits on sizes (4.5.3).

`data.pkl` is a pickle because `torch.load` wants one. It is put together from opcodes here and
consists of strings, numbers and the few names of torch that `torch.load(weights_only=True)`
accepts; nothing is pickled, and nothing here ever reads one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from remesh.errors import UnsupportedValueError
from remesh.formats.weight_files import FileTensor
from remesh.geometry import strides_of

ALIGNMENT = 64
"""Tensors begin at multiples of this, as torch wants it to map a file into memory."""

_ROOT = "archive"
_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
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
    """The bytes of a `.pth` file around its tensors; see `remesh.formats.weight_files.Content`.

    Args:
        tensors: The tensors, in order.
        pickled: What `data.pkl` holds; by default a dict of the tensors by name.

    Raises:
        UnsupportedValueError: If one is of a type that such a file has no name for.
    """

    tensors: Sequence[FileTensor]
    pickled: bytes | None = None
    num_bytes: int = field(init=False)
    _first: list[tuple[_Entry, bytes]] = field(init=False)
    _data: list[_Entry] = field(init=False)
    _last: tuple[_Entry, bytes] = field(init=False)

    def __post_init__(self) -> None:
        position = 0
        self._first, self._data = [], []
        pickled = _pickle(self.tensors) if self.pickled is None else self.pickled
        for name, content in (("data.pkl", pickled), ("byteorder", b"little")):
            entry = _Entry(f"{_ROOT}/{name}".encode(), position, len(content))
            self._first.append((entry, content))
            position = entry.end
        for number, tensor in enumerate(self.tensors):
            entry = _Entry(f"{_ROOT}/data/{number}".encode(), position, tensor.num_bytes)
            self._data.append(entry)
            position = entry.end
        version = b"3\n"
        self._last = _Entry(f"{_ROOT}/version".encode(), position, len(version)), version
        self.num_bytes = self._last[0].end + len(self._directory([0] * len(self.tensors)))

    def head(self) -> bytes:
        """See `Content.head`."""
        return b"".join(_whole(*entry) for entry in self._first)

    def before(self, number: int) -> bytes:
        """See `Content.before`."""
        return self._data[number].header

    def after(self, number: int, checksum: int) -> bytes:
        """See `Content.after`."""
        return self._data[number].descriptor(checksum)

    def tail(self, checksums: Sequence[int]) -> bytes:
        """See `Content.tail`."""
        return _whole(*self._last) + self._directory(checksums)

    def _directory(self, checksums: Sequence[int]) -> bytes:
        start = self._last[0].end
        lines = [
            *(entry.central(zlib.crc32(content)) for entry, content in self._first),
            *(
                entry.central(checksum)
                for entry, checksum in zip(self._data, checksums, strict=True)
            ),
            self._last[0].central(zlib.crc32(self._last[1])),
        ]
        directory = b"".join(lines)
        count, size = len(lines), len(directory)
        end64 = _END64.pack(
            b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, start
        )
        locator = _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
        many = 0xFFFF
        end = _END.pack(b"PK\x05\x06", 0, 0, many, many, _SEE_ZIP64, _SEE_ZIP64, 0)
        return directory + end64 + locator + end


def _whole(entry: _Entry, content: bytes) -> bytes:
    return entry.header + content + entry.descriptor(zlib.crc32(content))


# ---------------------------------------------------------------------------------------------
# data.pkl
# ---------------------------------------------------------------------------------------------


def _pickle(tensors: Sequence[FileTensor]) -> bytes:
    """A pickle, protocol 2, of a dict of tensors; tied tensors share their storage."""
    items = [
        _text(name) + _tensor(str(number), tensor)
        for number, tensor in enumerate(tensors)
        for name in tensor.names
    ]
    return b"\x80\x02}(" + b"".join(items) + b"u."


def _tensor(key: str, tensor: FileTensor) -> bytes:
    """A call of torch's function that makes a tensor of a storage, which is named by its key."""
    storage_type = _STORAGES.get(tensor.dtype)
    if storage_type is None:
        raise UnsupportedValueError(
            f"{tensor.names[0]}: a .pth file has no name for elements of type {tensor.dtype}\n"
            "Export with format='safetensors', or with another dtype"
        )
    storage = b"(" + _text("storage") + _name_of("torch", storage_type) + _text(key)
    storage += _text("cpu") + _number(tensor.num_elements) + b"tQ"
    shape, strides = _numbers(tensor.shape), _numbers(strides_of(tensor.shape))
    no_hooks = _name_of("collections", "OrderedDict") + b")R"
    arguments = b"(" + storage + _number(0) + shape + strides + b"\x89" + no_hooks + b"t"
    return _name_of("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def _name_of(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
