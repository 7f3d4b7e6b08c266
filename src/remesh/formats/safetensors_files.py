"""The tensors of safetensors files, from their headers alone.

A header says of each tensor which bytes of the file it is. A name that two files hold is an error,
unless the files say which part of it each of them holds, as those of
`torch.distributed.checkpoint`'s Hugging Face writer do: their metadata have the offset of each
tensor in the whole one, whose shape follows from the parts.

What else headers hold (`format`, comments of converters) describes the file, not the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from remesh._repr import shown
from remesh.core import safetensors_file
from remesh.core.dtypes import BY_NAME, DTYPES
from remesh.core.geometry import Box, uncovered
from remesh.core.safetensors_file import HeaderEntry
from remesh.core.state import Path, name_of
from remesh.errors import CorruptCheckpointError, FormatVersionError, StateError
from remesh.formats.building import FlatPart, IndexBuilder, read_ranges
from remesh.formats.checks import MALFORMED, check_shape, damaged, integers

HEAD_BYTES = 1 << 16
"""Bytes of a file that are read at first; most headers are shorter."""

_DTYPE_OF_CODE = {
    dtype.safetensors: dtype.name for dtype in DTYPES if not (dtype.pairs or dtype.is_opaque)
}
_PACKED_PAIRS, _PACKED_DTYPE = "F4", "float4_e2m1fn_x2"
_PARTS_KEY = "DCP_SHARDING_INFO"


class StoredArray(NamedTuple):
    """A tensor of a file, or a part of one."""

    path: str  # the file
    position: int  # byte of the file at which its elements begin
    shape: tuple[int, ...]
    dtype: str  # name of its element type
    offset: tuple[int, ...] | None = None
    """Where it lies in the tensor that it is a part of; None if it is whole."""

    def flat(self) -> FlatPart:
        """Its elements."""
        return FlatPart(self.path, self.position, math.prod(self.shape), self.dtype)


# ---------------------------------------------------------------------------------------------
# Headers
# ---------------------------------------------------------------------------------------------


def read_arrays(builder: IndexBuilder, paths: Sequence[str]) -> dict[str, dict[str, StoredArray]]:
    """The tensors of files, by file and name, from their headers alone."""
    storage = builder.storage
    sizes = {path: builder.place.size_of(path) for path in paths}
    ranges = [(path, 0, min(size, HEAD_BYTES)) for path, size in sizes.items()]
    heads = dict(zip(sizes, read_ranges(storage, ranges), strict=True))
    lengths = {}
    for path, head in heads.items():
        where = builder.where(path)
        lengths[path] = 8 + safetensors_file.header_length(head, where)
        if lengths[path] > sizes[path]:
            raise damaged(where, "ends in its safetensors header: the file was cut short")
    longer = [(path, 0, length) for path, length in lengths.items() if length > HEAD_BYTES]
    heads.update(zip((path for path, *_ in longer), read_ranges(storage, longer), strict=True))
    return {path: _arrays_in(heads[path], path, sizes[path], builder.where(path)) for path in sizes}


def _arrays_in(head: bytes, path: str, size: int, where: str) -> dict[str, StoredArray]:
    """The tensors of a file, from its beginning."""
    header = safetensors_file.decode_header(head, where)
    ranges = sorted(entry.data_offsets for entry in header.entries.values())
    ends = [0, *(stop for _, stop in ranges)]
    if [start for start, _ in ranges] != ends[:-1]:
        raise damaged(where, "its tensors overlap, or some bytes between them belong to none")
    num_bytes = ends[-1]
    if header.data_start + num_bytes != size:
        raise damaged(
            where, f"has {size} bytes, but its header says {header.data_start + num_bytes}"
        )
    offsets = _offsets_in(header.metadata, where)
    arrays = {}
    known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    for name, entry in header.entries.items():
        kind = entry.dtype, tuple(entry.shape)
        if kind not in known:  # there are few kinds, and maybe a million tensors
            dtype, shape = _type_of(entry, f"{where}: {name}")
            known[kind] = dtype, shape, math.prod(shape) * BY_NAME[dtype].itemsize
        dtype, shape, num_bytes = known[kind]
        start, stop = entry.data_offsets
        if stop - start != num_bytes:
            raise damaged(f"{where}: {name}", f"{stop - start} bytes for shape {shape} of {dtype}")
        offset = offsets.get(name)
        if offset is not None and len(offset) != len(shape):
            raise damaged(f"{where}: {name}", f"a part of shape {shape} at {shown(offset)}")
        arrays[name] = StoredArray(path, header.data_start + start, shape, dtype, offset)
    return arrays


def _type_of(entry: HeaderEntry, where: str) -> tuple[str, tuple[int, ...]]:
    """Element type and shape, as torch has them."""
    shape = tuple(entry.shape)
    if entry.dtype == _PACKED_PAIRS and shape and shape[-1] % 2 == 0:
        # The header counts numbers of 4 bits, torch counts bytes with two of them.
        return _PACKED_DTYPE, (*shape[:-1], shape[-1] // 2)
    if entry.dtype not in _DTYPE_OF_CODE:
        raise FormatVersionError(
            f"{where}: elements of type {shown(entry.dtype)}, which remesh does not know\nConvert "
            "the tensor with the program that wrote it"
        )
    dtype = _DTYPE_OF_CODE[entry.dtype]
    check_shape(shape, BY_NAME[dtype].itemsize, where)
    return dtype, shape


class _Part(msgspec.Struct):
    saved_offsets: list[int]


def _offsets_in(metadata: Mapping[str, str], where: str) -> dict[str, tuple[int, ...]]:
    """Where each tensor of a file lies in the one that it is a part of."""
    text = metadata.get(_PARTS_KEY)
    if text is None:
        return {}
    try:
        parts = msgspec.json.decode(text, type=dict[str, _Part])
    except MALFORMED as error:
        raise damaged(where, f"its {_PARTS_KEY} cannot be read ({error})") from error
    return {
        name: integers(part.saved_offsets, f"{where}: {name}", "the offset of a part")
        for name, part in parts.items()
    }


# ---------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------


def add_arrays(
    builder: IndexBuilder, arrays: Iterable[tuple[str, StoredArray]], prefix: Path = ()
) -> None:
    """Add tensors of files, with the keys of `prefix` before their names."""
    found: dict[str, list[StoredArray]] = {}
    for name, array in arrays:
        found.setdefault(name, []).append(array)
    for name, parts in found.items():
        first, *others = parts
        if others and any(part.offset is None for part in parts):
            raise StateError(
                f"{builder.storage.url}: {first.path} and {others[0].path} both hold {name}\nName "
                f"one file, such as {builder.where(first.path)}"
            )
        if any((p.dtype, len(p.shape)) != (first.dtype, len(first.shape)) for p in others):
            where = f"{builder.where(first.path)}: {name}"
            raise damaged(where, "its parts in several files differ in dtype or number of dims")
        boxes = [Box(part.offset or (0,) * len(part.shape), part.shape) for part in parts]
        whole = tuple(map(max, zip(*(box.end for box in boxes), strict=True)))
        num_elements = sum(box.size for box in boxes)
        if others and (num_elements, uncovered(Box.whole(whole), boxes)) != (math.prod(whole), []):
            raise CorruptCheckpointError(
                f"{builder.storage.url}: {name}: its parts in {len(parts)} files do not cover it "
                "once\nA file is missing, or one is of another save; load another checkpoint, or "
                "move the files of the other save away"
            )
        path = (*prefix, name)
        full = name_of(path)
        row = builder.add_tensor(full, first.dtype, whole)
        builder.set_path(full, path)
        for part, box in zip(parts, boxes, strict=True):
            builder.add_piece(row, box, part.path, part.position)
