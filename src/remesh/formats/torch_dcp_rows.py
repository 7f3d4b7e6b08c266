"""The chunks in the metadata of DCP as columns: boxes of tensors, and where their archives lie.

A large checkpoint has millions of chunks, and three objects in its `.metadata` for each. Those that
follow each other are read as `Rows`; single ones are records, which are taken apart here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from remesh._repr import shown
from remesh.core.dtypes import BY_NAME
from remesh.errors import FormatVersionError
from remesh.formats.archive import is_row_major
from remesh.formats.checks import check_name, damaged, integers
from remesh.formats.pickle_records import Record, Rows
from remesh.formats.pickle_rows import RowForm
from remesh.formats.pickle_values import ArchivedTensor

_DCP = "torch.distributed.checkpoint"
_CHUNKS = RowForm(
    ((f"{_DCP}.metadata.ChunkStorageMetadata", (("offsets", "size"), ("sizes", "size"))),)
)
_PLACES = RowForm(
    (
        (
            f"{_DCP}.metadata.MetadataIndex",
            (("fqn", "text"), ("index", "ignored"), ("offset", "size")),
        ),
        (
            f"{_DCP}.filesystem._StorageInfo",
            (("relative_path", "text"), ("offset", "number"), ("length", "number")),
        ),
    )
)
ROWS = (_CHUNKS, _PLACES)
"""What comes as columns where many of it follow each other."""

Numbers = tuple[int, ...]


@dataclass(slots=True)
class Places:
    """Where the archives of chunks and values lie, a row each."""

    rows: dict[str, dict[Numbers | None, int]] = field(default_factory=dict)
    """The row of each chunk, by name and offset; the offset of a value is None."""
    path: list[str] = field(default_factory=list)  # files, as the metadata names them
    start: list[int] = field(default_factory=list)  # first bytes
    num_bytes: list[int] = field(default_factory=list)  # lengths


@dataclass(slots=True)
class Chunks:
    """Boxes of tensors, a row each."""

    tensor: list[int] = field(default_factory=list)
    """Rows of the tensors in the index that is built."""
    offset: list[Numbers] = field(default_factory=list)  # where the boxes begin
    shape: list[Numbers] = field(default_factory=list)
    place: list[int] = field(default_factory=list)  # rows of their places


@dataclass(frozen=True, slots=True)
class Head:
    """The description of the tensor in an archive, which lies row by row, from its head."""

    shape: Numbers  # the tensor's shape
    dtype: str  # the name of its element type
    start: int  # the byte of the archive at which it begins
    stop: int  # one past its last byte


@dataclass(slots=True)
class Heads:
    """The heads that were met. Archives of like tensors have one and the same."""

    known: dict[bytes, Head] = field(default_factory=dict)
    lengths: dict[int, None] = field(default_factory=dict)

    def find(self, data: bytes, at: int) -> Head | None:
        """The head that lies at a byte, if it is known."""
        for length in self.lengths:
            found = self.known.get(data[at : at + length])
            if found is not None:
                return found
        return None

    def add(self, head: bytes, tensor: ArchivedTensor, start: int) -> None:
        """Add a head, up to the first byte of the storage, and where the tensor begins."""
        if is_row_major(tensor.shape, tensor.strides):
            if len(self.known) > _MAX_HEADS:
                self.known.clear()
            self.lengths[len(head)] = None
            num_bytes = math.prod(tensor.shape) * BY_NAME[tensor.dtype].itemsize
            self.known[head] = Head(tensor.shape, tensor.dtype, start, start + num_bytes)


_MAX_HEADS = 1 << 12


def boxes_of(value: object, num_dims: int, where: str) -> Iterator[tuple[Numbers, Numbers]]:
    """Offsets and shapes of the chunks of a tensor."""
    if not isinstance(value, list | tuple):
        raise damaged(where, f"{shown(value)} are not the chunks of a tensor")
    for item in value:
        if isinstance(item, Rows) and item.form is _CHUNKS:
            offsets, shapes = item.columns
        elif isinstance(item, Record):
            offsets = [integers(size_of(item.field("offsets")), where, "the offset of a chunk")]
            shapes = [integers(size_of(item.field("sizes")), where, "the shape of a chunk")]
        else:
            raise damaged(where, f"{shown(value)} are not the chunks of a tensor")
        for offset, shape in zip(offsets, shapes, strict=True):
            if not len(offset) == len(shape) == num_dims:
                raise damaged(where, f"a chunk at {offset} of shape {shape} in {num_dims} dims")
            yield offset, shape


PlaceRow = tuple[str, Numbers | None, str, int, int]
"""Name and offset of a chunk, file, first byte and length."""


def places_of(key: object, info: object, where: str) -> Sequence[PlaceRow] | Iterator[PlaceRow]:
    """The rows of a key and a value of `storage_data`."""
    if isinstance(key, Rows) and key is info and key.form is _PLACES:
        names, offsets, paths, starts, lengths = key.columns
        return zip(names, offsets, paths, starts, lengths, strict=True)
    if not isinstance(key, Record) or not isinstance(info, Record):
        raise damaged(where, "not the metadata of a checkpoint")
    name, path = check_name(key.field("fqn"), where), check_name(info.field("relative_path"), where)
    extensions = info.field("transform_descriptors")
    if extensions:
        raise FormatVersionError(
            f"{where.removesuffix('/.metadata')}: {name} was written through the extensions "
            f"{shown(extensions)} (compression, say)\nIt has no bytes that can be read in place; "
            "load it with torch and save it without them"
        )
    start, num_bytes = integers(
        (info.field("offset"), info.field("length")), f"{where}: {name}", "where an archive lies"
    )
    offset = key.field("offset")
    if offset is not None:
        offset = integers(size_of(offset), f"{where}: {name}", "the offset of a chunk")
    return [(name, offset, path, start, num_bytes)]


def size_of(value: object) -> object:
    """The numbers of a `torch.Size`; anything else as it is."""
    is_size = isinstance(value, Record) and value.name == "torch.Size" and len(value.args) == 1
    return value.args[0] if is_size else value  # type: ignore[attr-defined]
