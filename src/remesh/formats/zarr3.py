"""zarr version 3: groups and arrays in folders.

::

    zarr.json                   a group, with its attributes
    layers/0/weight/zarr.json   an array: shape, type, chunks, codecs
    layers/0/weight/c/0/1       a chunk, of full size even at the end of a dim
    .../c/0/0                   with sharding: inner chunks, and an index of them

An array is a tensor, whose name is the way to it, joined by dots; attributes of groups and arrays
are values. A chunk without compression is a box that lies in its file as it is. One that is
compressed is a file that is decoded when it is read (`decoding`), and one that was left out is a
file of the fill value. So tensors are read chunk by chunk, and only those that a rank needs.

Read are regular chunks in row-major order, the codecs `bytes` (little-endian), `gzip`, `zstd`,
`blosc`, `crc32c` and `sharding_indexed` with an index that is not compressed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from remesh._repr import shown
from remesh.dtypes import BY_NAME, DType
from remesh.errors import CheckpointNotFoundError, FormatVersionError
from remesh.formats.building import MIN_PIECES, IndexBuilder, Listing, read_ranges
from remesh.formats.checks import check_shape, damaged, decode_json
from remesh.formats.contents import Contents
from remesh.formats.decoding import CODECS, EncodedFile, fill_codec
from remesh.geometry import Box, strides_of
from remesh.state import Path, name_of
from remesh.storage import Storage

NAME = "zarr3"
NODE_NAME = "zarr.json"
LOOKS_FOR = f"{NODE_NAME} (zarr version 3)"
MAX_NODE_BYTES = 64 << 20

_ABSENT = 2**64 - 1
_Extent = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Named(msgspec.Struct):
    """What the format gives as a name and options."""

    name: str
    configuration: dict[str, Any] = {}


class _Node(msgspec.Struct):
    """What `zarr.json` says."""

    zarr_format: int
    node_type: str
    shape: list[_Extent] = []
    data_type: Any = None
    chunk_grid: _Named | None = None
    chunk_key_encoding: _Named | None = None
    fill_value: Any = None
    codecs: list[_Named | str] = []
    storage_transformers: list[Any] = []
    attributes: dict[str, Any] = {}


def recognise(paths: Listing) -> bool:
    """Whether a place with these files is such a store."""
    return NODE_NAME in paths


def read(storage: Storage, files: Listing) -> Contents:
    """Read what a store holds; its tensors stay where they are.

    Args:
        storage: Where it is.
        files: Its files.

    Raises:
        CheckpointNotFoundError: If there is none.
        CorruptCheckpointError: If it is damaged.
        FormatVersionError: If an array has a type, a chunk grid or a codec that is not read.
    """
    if NODE_NAME not in files:
        raise CheckpointNotFoundError(f"{storage.url}: no {LOOKS_FOR}")
    reader = _Reader(IndexBuilder(storage, files))
    nodes = [path for path in files if path.rpartition("/")[2] == NODE_NAME]
    texts = read_ranges(storage, [(path, 0, MAX_NODE_BYTES) for path in nodes])
    for path, text in zip(nodes, texts, strict=True):
        node = decode_json(text, f"{storage.url}/{path}", _Node)
        reader.add_node(path.removesuffix(NODE_NAME), node)
    reader.add_shards()
    return Contents(NAME, reader.builder.build(), reader.builder.document)


@dataclass(frozen=True, slots=True)
class _Array:
    """An array, with what turns elements into bytes and these into stored ones.

    Attributes:
        base: Its folder, with a slash at its end.
        name: What it is called.
        row: Its row in the index.
        dtype: Its element type.
        shape: Its shape.
        chunk: Shape of a chunk; with sharding, of an inner one.
        codecs: Codecs of the bytes of a chunk.
        fill: Bytes of an element of a chunk that is not stored.
        shard: With sharding, the shape of a file's chunk; empty otherwise.
        index_codecs: Codecs of the index of a shard.
        is_index_first: Whether the index comes before the inner chunks.
    """

    base: str
    name: str
    row: int
    dtype: DType
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    codecs: tuple[str, ...]
    fill: bytes
    shard: tuple[int, ...] = ()
    index_codecs: tuple[str, ...] = ()
    is_index_first: bool = False

    @property
    def inner_counts(self) -> tuple[int, ...]:
        """Inner chunks of a shard, dim by dim."""
        return tuple(whole // step for whole, step in zip(self.shard, self.chunk, strict=True))

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of a shard."""
        return 16 * math.prod(self.inner_counts) + 4 * len(self.index_codecs)


@dataclass(slots=True)
class _Reader:
    """One store while it is read.

    Attributes:
        builder: What is built.
        shards: Files with inner chunks, and the corner of each.
        num_chunks: How many chunks were looked for.
    """

    builder: IndexBuilder
    shards: list[tuple[_Array, str, tuple[int, ...]]] = field(default_factory=list)
    num_chunks: int = 0

    def add_node(self, base: str, node: _Node) -> None:
        """Add a group or an array."""
        where = f"{self.builder.storage.url}/{base}{NODE_NAME}"
        path: Path = tuple(base.split("/")[:-1])
        if node.zarr_format != 3 or node.node_type not in {"group", "array"}:
            raise damaged(where, "no group and no array of zarr version 3")
        if node.attributes:
            place = (*path, "attributes")
            self.builder.add_value(name_of(place), node.attributes)
            self.builder.set_path(name_of(place), place)
        if node.node_type == "array":
            place = path or ("value",)
            array = _array_of(base, name_of(place), node, self.builder, where)
            self.builder.set_path(array.name, place)
            self._add_chunks(array, _separator(node, where), where)

    def _add_chunks(self, array: _Array, key: tuple[str, str], where: str) -> None:
        """Add the chunks of an array, or note its shards."""
        if 0 in array.shape:
            return
        step = array.shard or array.chunk
        counts = [-(-n // extent) for n, extent in zip(array.shape, step, strict=True)]
        self._count(math.prod(counts), where)
        prefix, separator = key
        for number in np.ndindex(*counts):
            numbers = separator.join(map(str, number))
            name = (
                f"{prefix}{separator}{numbers}" if prefix and numbers else prefix or numbers or "0"
            )
            path = array.base + name
            corner = tuple(i * extent for i, extent in zip(number, step, strict=True))
            if array.shard and path in self.builder.listing:
                self.shards.append((array, path, corner))
            elif path in self.builder.listing:
                length = self.builder.listing[path]
                if length is None:
                    length = self.builder.storage.size(path)
                self._add_chunk(array, corner, step, path, 0, length)
            else:
                self._add_chunk(array, corner, step, "", 0, 0)

    def _count(self, num_chunks: int, where: str) -> None:
        self.num_chunks += num_chunks
        known = sum(size or 0 for size in self.builder.listing.values())
        if self.num_chunks > MIN_PIECES + known:
            raise FormatVersionError(
                f"{where}: the arrays have {self.num_chunks} chunks, more than the store has "
                "bytes\nCopy it with larger chunks"
            )

    def add_shards(self) -> None:
        """Add the inner chunks of all shards, whose indexes are read together."""
        builder, ranges = self.builder, []
        for array, path, _ in self.shards:
            size = builder.listing[path]
            size = builder.storage.size(path) if size is None else size
            if size < array.index_bytes:
                raise damaged(f"{builder.storage.url}/{path}", "ends in the index of its chunks")
            start = 0 if array.is_index_first else size - array.index_bytes
            ranges.append((path, start, start + array.index_bytes))
            self._count(math.prod(array.inner_counts), f"{builder.storage.url}/{path}")
        indexes = read_ranges(builder.storage, ranges)
        for (array, path, corner), (_, start, stop), data in zip(
            self.shards, ranges, indexes, strict=True
        ):
            if len(data) != stop - start:
                raise damaged(f"{builder.storage.url}/{path}", "ends in the index of its chunks")
            entries = np.frombuffer(data, "<u8", 2 * math.prod(array.inner_counts)).reshape(-1, 2)
            for at, (offset, length) in zip(
                np.ndindex(*array.inner_counts), entries.tolist(), strict=True
            ):
                inner = tuple(
                    begin + i * step for begin, i, step in zip(corner, at, array.chunk, strict=True)
                )
                if any(i >= n for i, n in zip(inner, array.shape, strict=True)):
                    continue
                if (offset, length) == (_ABSENT, _ABSENT):
                    self._add_chunk(array, inner, array.chunk, "", 0, 0)
                elif offset + length > 2**62:
                    raise damaged(f"{builder.storage.url}/{path}", "has a chunk that leaves it")
                else:
                    self._add_chunk(array, inner, array.chunk, path, offset, length)

    def _add_chunk(
        self,
        array: _Array,
        corner: tuple[int, ...],
        shape: tuple[int, ...],
        path: str,
        start: int,
        length: int,
    ) -> None:
        """Add the box of a chunk; without a path it has the fill value."""
        box = Box(corner, shape).intersect(Box.whole(array.shape))
        num_bytes = math.prod(shape) * array.dtype.itemsize
        if box is None:
            return
        if path and not array.codecs:
            if length != num_bytes:
                where = f"{self.builder.storage.url}/{path}"
                raise damaged(where, f"a chunk of {length} bytes, and {num_bytes} were expected")
        else:
            codecs = array.codecs if path else (fill_codec(array.fill),)
            file = EncodedFile(path, start, length, num_bytes, codecs)
            path, start = self.builder.add_encoded(file), 0
        self.builder.add_strided(array.row, box, path, start, strides_of(shape))


# ---------------------------------------------------------------------------------------------
# Metadata of arrays
# ---------------------------------------------------------------------------------------------


def _array_of(base: str, name: str, node: _Node, builder: IndexBuilder, where: str) -> _Array:
    """An array, added to what is built.

    Raises:
        CorruptCheckpointError: If its metadata contradict each other.
        FormatVersionError: If it has a type, a chunk grid or a codec that is not read.
    """
    dtype = BY_NAME.get(node.data_type) if isinstance(node.data_type, str) else None
    if dtype is None or dtype.is_opaque:
        raise FormatVersionError(f"{where}: elements of type {shown(node.data_type)} are not read")
    if node.chunk_grid is None or node.chunk_grid.name != "regular" or node.storage_transformers:
        raise FormatVersionError(f"{where}: only regular chunks are read; copy it with zarr")
    shape = tuple(node.shape)
    check_shape(shape, dtype.itemsize, where)
    chunk = _steps(node.chunk_grid.configuration.get("chunk_shape"), shape, where)
    check_shape(chunk, dtype.itemsize, where)
    row = builder.add_tensor(name, dtype.name, shape)
    fill = _fill(node.fill_value, dtype, where)
    codecs = _named(node.codecs, where)
    if codecs and codecs[0].name == "sharding_indexed":
        if len(codecs) > 1:
            raise FormatVersionError(f"{where}: shards that are compressed as a whole are not read")
        options = codecs[0].configuration
        inner = _steps(options.get("chunk_shape"), shape, where)
        if any(whole % step for whole, step in zip(chunk, inner, strict=True)):
            raise damaged(where, f"chunks {inner} do not fill a shard {chunk}")
        index_codecs = _codecs_of(_named(options.get("index_codecs"), where), 8, where)
        if not {*index_codecs} <= {"crc32c"}:
            raise FormatVersionError(f"{where}: an index of chunks that is compressed is not read")
        location = options.get("index_location", "end")
        if location not in ("start", "end"):
            raise damaged(where, f"an index of chunks at {shown(location)}")
        return _Array(
            base, name, row, dtype, shape, inner,
            _codecs_of(_named(options.get("codecs"), where), dtype.itemsize, where),
            fill, chunk, index_codecs, location == "start",
        )  # fmt: skip
    return _Array(
        base, name, row, dtype, shape, chunk, _codecs_of(codecs, dtype.itemsize, where), fill
    )


def _steps(value: object, shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    try:
        steps = msgspec.convert(value, list[_Extent])
    except msgspec.ValidationError as error:
        raise damaged(where, f"{shown(value)} is not the shape of a chunk") from error
    if len(steps) != len(shape) or (0 in steps and 0 not in shape):
        raise damaged(where, f"chunks of shape {shown(steps)} in an array of {shape}")
    return tuple(max(step, 1) for step in steps)


def _named(value: object, where: str) -> list[_Named]:
    """Codecs, which may be given by their names alone."""
    try:
        found = msgspec.convert(value, list[_Named | str])
    except msgspec.ValidationError as error:
        raise damaged(where, f"{shown(value)} are not codecs") from error
    return [_Named(one) if isinstance(one, str) else one for one in found]


def _codecs_of(codecs: Sequence[_Named], itemsize: int, where: str) -> tuple[str, ...]:
    """The codecs of bytes, behind the one that makes them.

    Raises:
        FormatVersionError: If one is not read.
    """
    first = codecs[0] if codecs else _Named("")
    endian = first.configuration.get("endian", "little" if itemsize == 1 else None)
    others = tuple(codec.name for codec in codecs[1:])
    if first.name != "bytes" or (endian != "little" and itemsize > 1):
        raise FormatVersionError(
            f"{where}: elements are stored by {shown(first.name)} ({shown(endian)})\n"
            "Only little-endian bytes in row-major order are read; copy it with zarr"
        )
    odd = next((name for name in others if name not in CODECS), None)
    if odd is not None:
        raise FormatVersionError(
            f"{where}: the codec {shown(odd)} is not read; copy it with zarr, with one of "
            f"{', '.join(sorted(CODECS))}"
        )
    return others


def _separator(node: _Node, where: str) -> tuple[str, str]:
    """What keys of chunks begin with, and what is between their numbers."""
    encoding = node.chunk_key_encoding or _Named("default")
    separator = encoding.configuration.get("separator", "." if encoding.name == "v2" else "/")
    # Compared, not looked up: the separator is any JSON, and may have no hash.
    if encoding.name not in {"default", "v2"} or separator not in (".", "/"):
        raise FormatVersionError(
            f"{where}: keys of chunks by {shown(encoding.name)} are not read\n"
            f"Their separator is {shown(separator)}; copy it with zarr"
        )
    return ("c" if encoding.name == "default" else ""), separator


def _fill(value: object, dtype: DType, where: str) -> bytes:
    """The bytes of an element of a chunk that is not stored.

    Raises:
        CorruptCheckpointError: If the type has no such value; floats are rounded, as zarr does.
        FormatVersionError: If it is written in a way that is not read.
    """
    carrier = dtype.carrier
    if value is None:
        return bytes(dtype.itemsize)
    try:
        if isinstance(value, str) and value.startswith("0x") and carrier.kind != "b":
            return int(value, 16).to_bytes(dtype.itemsize, "little")
        made = _number(value)
        if not dtype.is_native:
            if made == 0 and str(made) in {"0", "0.0", "False"}:  # not -0.0
                return bytes(dtype.itemsize)
            raise FormatVersionError(f"{where}: the fill value {shown(value)} of {dtype.name}")
        if type(made) is complex and carrier.kind != "c":
            raise TypeError("a complex number")
        with np.errstate(all="raise", under="ignore"):
            element = np.array(made).astype(carrier)
        if carrier.kind in "biu" and element != made:
            raise ValueError("not in the type")
    except (ValueError, TypeError, ArithmeticError) as error:
        raise damaged(where, f"the fill value {shown(value)} of {dtype.name}") from error
    return element.tobytes()


def _number(value: object) -> complex:
    """A number in zarr's JSON, where some are texts, and complex ones are pairs."""
    if isinstance(value, list):
        real, imaginary = value
        return complex(float(real), float(imaginary))
    if isinstance(value, str):
        return float(value)
    if isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{shown(value)} is no number")
