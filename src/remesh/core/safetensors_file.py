"""The safetensors container: a header of names, dtypes, shapes and byte ranges, then the bytes.

A file is an 8-byte little-endian length, that many bytes of JSON, and the data, to which the byte
ranges in the JSON are relative. Ranges must follow each other without holes. The JSON may be
padded with spaces at its end; remesh pads it so that the data begins at a multiple of `ALIGNMENT`,
which direct I/O wants. The key `__metadata__` maps strings to strings.

Only headers are handled here. The data is written by the pipeline or, for columns of integers,
by `remesh.core.index`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from remesh.errors import CorruptCheckpointError

ALIGNMENT = 4096
MAX_HEADER_BYTES = 1 << 30
_LENGTH = struct.Struct("<Q")

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class HeaderEntry(msgspec.Struct, frozen=True):
    """One tensor of a header: dtype code, shape, and [start, stop) relative to the data."""

    dtype: str
    shape: list[_Number]
    data_offsets: tuple[_Number, _Number]


_ENTRY = msgspec.json.Decoder(HeaderEntry)


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header."""

    entries: dict[str, HeaderEntry]  # tensors by name
    metadata: dict[str, str]  # the content of `__metadata__`
    data_start: int  # byte at which the data begins


def encode_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """A header of (name, code, shape, bytes) rows, and the byte at which each begins."""
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position, positions = 0, []
    for name, dtype, shape, num_bytes in tensors:
        end = position + num_bytes
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        positions.append(position)
        position = end
    text = msgspec.json.encode(document)
    data_start = -(-(len(text) + _LENGTH.size) // ALIGNMENT) * ALIGNMENT
    text = text.ljust(data_start - _LENGTH.size)
    return _LENGTH.pack(len(text)) + text, [data_start + start for start in positions]


def header_length(prefix: bytes, where: str) -> int:
    """Length of the JSON text, from the first 8 bytes of a file."""
    if len(prefix) < _LENGTH.size:
        raise CorruptCheckpointError(f"{where}: too short for a safetensors file")
    (length,) = _LENGTH.unpack_from(prefix)
    if length > MAX_HEADER_BYTES:
        raise CorruptCheckpointError(f"{where}: header of {length} bytes; not a safetensors file")
    return int(length)


def decode_header(data: bytes | memoryview, where: str) -> Header:
    """Decode the beginning of a file, at least its whole header."""
    length = header_length(bytes(data[: _LENGTH.size]), where)
    text = bytes(data[_LENGTH.size : _LENGTH.size + length])
    if len(text) < length:
        raise CorruptCheckpointError(f"{where}: ends in its safetensors header")
    try:
        document = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw_metadata = document.pop("__metadata__", None)
        metadata = msgspec.json.decode(raw_metadata, type=dict[str, str]) if raw_metadata else {}
        entries = {name: _ENTRY.decode(raw) for name, raw in document.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where}: not a safetensors header: {error}") from error
    return Header(entries, metadata, _LENGTH.size + length)
