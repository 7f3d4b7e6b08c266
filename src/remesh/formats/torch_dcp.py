"""Checkpoints of `torch.distributed.checkpoint`, and of Megatron's `torch_dist`, read as they lie.

::

    .metadata            a pickle: names, shapes, chunks, and where each chunk lies; written last
    __3_0.distcp         archives of `torch.save`, one for each chunk or value, back to back
    common.pt            Megatron: values that are equal on all ranks, as one archive
    metadata.json        Megatron: which backend wrote this
    meta.pt              Lightning: what is neither model nor optimizer, as one archive

A chunk is a box of a tensor, so an index needs two things of each: where its archive begins, which
`.metadata` says, and where in the archive its elements lie, which the archive's head says. The
heads are read in bulk. What is not a tensor is unpickled by the restricted unpickler.

Megatron adds three things. Values that differ between ranks have the name `key/shard_0.1_1.2`
(offset and shape in a grid) and lie in a list of one item. Older versions store flattened tensors
with one dim more: the chunk number in each dim of a grid, then the range in the flattened chunk; an
attribute of the metadata has the true shape. Newer versions keep the common values in an object of
their own instead of `common.pt`.

With torch's safetensors variant all tensors of a file lie in one safetensors file behind the
values; the metadata says only where that begins.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remesh._repr import shown
from remesh.core import safetensors_file
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.state import Path
from remesh.errors import (
    FormatVersionError,
)
from remesh.formats import restricted_pickle
from remesh.formats.archive import (
    Archive,
    RangeFile,
    check_extent,
    is_row_major,
    read_archive,
    scan_head,
    tensor_value,
)
from remesh.formats.building import IndexBuilder, read_groups, read_ranges, refused
from remesh.formats.checks import check_name, check_path, damaged, integers
from remesh.formats.pickle_records import Name, Record, Rows
from remesh.formats.pickle_rows import RowForm
from remesh.formats.place import Place, file_size
from remesh.formats.restricted_pickle import ArchivedTensor
from remesh.storage import Storage

NAME = "torch_dcp"
METADATA_NAME = ".metadata"
COMMON_NAME = "common.pt"
LIGHTNING_NAME = "meta.pt"
COMMON_KEY = "common_state/shard_0_1"
NEEDS_LISTING = False
MARKER = f"{METADATA_NAME} (torch.distributed.checkpoint, Megatron torch_dist)"
FLAT_SHAPES, FLAT_SHAPE = "mcore_data", "nd_reformulated_orig_global_shape"
"""The attribute of `.metadata` with the true shapes of flattened tensors; the key of each shape."""

HEAD_BYTES = 1024
"""Bytes of an archive that show where its only storage begins, whatever torch wrote it."""

MIN_OPAQUE_BYTES = 1 << 20
"""Bytes of tensors inside of opaque values, besides two for each byte that is stored."""
_OBJECT = re.compile(
    r"(.*)/shard_([0-9]{1,18}(?:\.[0-9]{1,18})*)_([0-9]{1,18}(?:\.[0-9]{1,18})*)", re.DOTALL
)
_DCP = "torch.distributed.checkpoint"
_MCORE = "megatron.core.dist_checkpointing.strategies"


METADATA_CLASSES: tuple[str, ...] = (
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "MetadataIndex",
            "StorageMeta",
        )
    ),
    *(f"{_DCP}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(
        f"{_DCP}.planner.{name}"
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
    *(f"{_MCORE}.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
)
"""The classes that `.metadata` is made of. They only hold what they are given."""


def is_at(place: Place) -> bool:
    """True if a place holds such a checkpoint."""
    return place.storage.exists(METADATA_NAME)


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what such a checkpoint holds; its tensors stay where they are."""
    add_folder(builder, "", place.allow)


def add_folder(builder: IndexBuilder, base: str, allow: Collection[str]) -> None:
    """Add a checkpoint in the folder `base`, which ends with a slash or is empty."""
    reader = _Reader(builder, allow, read_metadata(builder.storage, base, ROWS), base)
    reader.read_tensors()
    reader.read_values()
    for name in (COMMON_NAME, LIGHTNING_NAME):
        reader.read_archive(name)


def is_flattened(size: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if a tensor of a shape may be stored flattened as `size`: a grid, and a part's size."""
    return (
        len(size) == len(shape) + 1
        and all(n and whole % n == 0 for whole, n in zip(shape, size, strict=False))
        and math.prod(shape) == math.prod(size)
    )


def read_metadata(storage: Storage, base: str = "", rows: Sequence[RowForm] = ()) -> Record:
    """The record of `.metadata`; `rows` are what comes as columns where many follow each other."""
    where = f"{storage.url}/{base}{METADATA_NAME}"
    data = storage.read(base + METADATA_NAME)
    metadata = restricted_pickle.loads(data, where, also=METADATA_CLASSES, rows=rows).root
    parts = ("storage_data", "state_dict_metadata")
    if isinstance(metadata, Record) and all(type(metadata.field(part)) is dict for part in parts):
        return metadata
    raise damaged(where, "not the metadata of a checkpoint")


# -- chunks as columns -----------------------------------------------------------------------------
#
# A large checkpoint has millions of chunks, and three objects in its metadata for each. Those that
# follow each other are read as `Rows`; single ones are records, which are taken apart here.


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
            offsets = [integers(item.field("offsets"), where, "the offset of a chunk")]
            shapes = [integers(item.field("sizes"), where, "the shape of a chunk")]
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
        offset = integers(offset, f"{where}: {name}", "the offset of a chunk")
    return [(name, offset, path, start, num_bytes)]


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the archive of a chunk or a value lies."""

    path: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box as the metadata has it, with its archive."""

    name: str
    row: int
    dtype: str
    box: Box
    place: _Place


@dataclass(slots=True)
class _Reader:
    """One checkpoint while it is read."""

    builder: IndexBuilder
    allow: Collection[str]
    metadata: Record
    base: str
    storage: Storage = field(init=False)
    places: Places = field(default_factory=Places)
    entries: Mapping[str, Any] = field(init=False)  # what is stored, by name
    flat_shapes: Mapping[str, Any] = field(init=False)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tensors: dict[bytes, object] = field(default_factory=dict)
    heads: Heads = field(default_factory=Heads)
    file_sizes: dict[str, int] = field(default_factory=dict)
    num_bytes_read: int = 0

    def __post_init__(self) -> None:
        self.storage = self.builder.storage
        self.entries = self.metadata.field("state_dict_metadata")
        for key, info in self.metadata.field("storage_data").items():
            self._add_places(places_of(key, info, self.where))
        flat_shapes = self.metadata.field(FLAT_SHAPES)
        self.flat_shapes = flat_shapes if isinstance(flat_shapes, dict) else {}

    @property
    def paths(self) -> Mapping[str, Path]:
        """The place of each name in the nested state that was saved, as far as it is known."""
        found = self.metadata.field("planner_data")
        return found if isinstance(found, dict) else {}

    @property
    def where(self) -> str:
        """The metadata file, for error messages."""
        return f"{self.storage.url}/{self.base}{METADATA_NAME}"

    def _path_of(self, name: str) -> Path:
        return check_path(self.paths.get(name, (name,)), f"{self.where}: {name}")

    def _add_places(self, places: Iterable[PlaceRow]) -> None:
        rows, known, sizes = self.places.rows, self.places, self.file_sizes
        for name, offset, path, start, num_bytes in places:
            of_name = rows.get(name)
            if of_name is None:
                of_name = rows[check_name(name, self.where)] = {}
            size = sizes.get(path)
            if size is None:
                full = self.base + check_name(path, self.where)
                size = sizes[path] = self.builder.size_of(full)
            if not 0 <= start <= start + num_bytes <= size:
                raise damaged(
                    f"{self.storage.url}/{self.base}{path}",
                    f"has {size} bytes, but {name} lies at {start}:{start + num_bytes}: the file "
                    "was cut short",
                )
            of_name[offset] = len(known.path)
            known.path.append(path)
            known.start.append(start)
            known.num_bytes.append(num_bytes)

    def _place(self, row: int) -> _Place:
        known = self.places
        return _Place(self.base + known.path[row], known.start[row], known.num_bytes[row])

    def _row_of(self, name: str, offset: tuple[int, ...] | None) -> int:
        """The row of a place."""
        row = self.places.rows.get(name, {}).get(offset)
        if row is None:
            at = "" if offset is None else f" at {offset}"
            raise damaged(self.where, f"does not say where {name}{at} lies")
        return row

    # -- tensors ----------------------------------------------------------------------------

    def read_tensors(self) -> None:
        """Add all tensors and their pieces."""
        chunks = Chunks()
        names: dict[int, tuple[str, str]] = {}
        for name, entry in self.entries.items():
            if kind_of(entry) != "TensorStorageMetadata":
                continue
            where = f"{self.where}: {check_name(name, self.where)}"
            dtype, size = dtype_of(entry), integers(entry.field("size"), where, "a shape")
            if dtype is None:
                raise damaged(where, "its dtype is not known")
            row = self.builder.add_tensor(name, dtype, self._true_shape(name, size))
            names[row] = name, dtype
            self.sizes[name] = size
            self._set_path(name)
            for offset, shape in boxes_of(entry.field("chunks"), len(size), where):
                if 0 not in shape:
                    chunks.tensor.append(row)
                    chunks.offset.append(offset)
                    chunks.shape.append(shape)
                    chunks.place.append(self._row_of(name, offset))
        self._add_chunks(chunks, names)

    def _add_chunks(self, chunks: Chunks, names: Mapping[int, tuple[str, str]]) -> None:
        """Add the pieces of chunks, given the names and dtypes of tensors by their rows."""
        places, base = self.places, self.base
        ranges = [
            (base + places.path[row], places.start[row], places.start[row] + HEAD_BYTES)
            for row in chunks.place
        ]
        embedded: dict[tuple[str, int], safetensors_file.Header] = {}
        positions = [-1] * len(ranges)
        for group, first, data in read_groups(self.storage, ranges):
            for number in group:
                start = ranges[number][1]
                name, dtype = names[chunks.tensor[number]]
                shape, head = chunks.shape[number], self.heads.find(data, start - first)
                if (
                    head is not None
                    and (head.shape, head.dtype) == (shape, dtype)
                    and head.stop <= places.num_bytes[chunks.place[number]]
                    and name not in self.flat_shapes
                ):
                    positions[number] = start + head.start
                    continue
                box, place = Box(chunks.offset[number], shape), self._place(chunks.place[number])
                chunk = _Chunk(name, chunks.tensor[number], dtype, box, place)
                found = data[start - first : start - first + HEAD_BYTES]
                if found.startswith(b"PK"):
                    self._add_chunk(chunk, found)
                else:
                    self._add_embedded(chunk, embedded)
        plain = [number for number, position in enumerate(positions) if position >= 0]
        self.builder.add_boxes(
            [chunks.tensor[number] for number in plain],
            (
                [chunks.offset[number] for number in plain],
                [chunks.shape[number] for number in plain],
            ),
            [ranges[number][0] for number in plain],
            [positions[number] for number in plain],
        )

    def _set_path(self, name: str) -> None:
        path = self._path_of(name)
        self.builder.set_path(name, path)
        self._set_lists(path)

    def _set_lists(self, path: Path) -> None:
        """Containers whose keys are numbers were lists."""
        numbered = (path[:at] for at, key in enumerate(path) if isinstance(key, int))
        self.builder.set_sequences(dict.fromkeys(numbered, "list"))

    def _true_shape(self, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor: of a flattened one it is not what the metadata calls its size."""
        if name not in self.flat_shapes:
            return size
        data = self.flat_shapes[name]
        shape = data.get(FLAT_SHAPE) if isinstance(data, dict) else None
        if shape is None:
            return size
        shape = integers(shape, f"{self.where}: {name}", "a shape")
        if not is_flattened(size, shape):
            raise damaged(
                self.where,
                f"{name} is stored flattened as {size}, which does not fit its shape {shape}",
            )
        return shape

    def _add_chunk(self, chunk: _Chunk, head: bytes) -> None:
        """Add the pieces of a chunk that has an archive of its own."""
        where = f"{self.storage.url}/{chunk.place.path}: {chunk.name}"
        start, num_bytes = chunk.place.start, chunk.place.num_bytes
        found = scan_head(head)
        if found is None:
            self._count(num_bytes, where)
            archive = self._archive(chunk.place, where)
            tensor = archive.value()
            position = archive.position(tensor) if isinstance(tensor, ArchivedTensor) else 0
        else:
            tensor = self._tensor_of(found[0], where)
            position = start + found[1]
            if isinstance(tensor, ArchivedTensor):
                position += check_extent(tensor, num_bytes - found[1], where)
                self.heads.add(head[: found[1]], tensor, position - start)
        if not isinstance(tensor, ArchivedTensor):
            raise damaged(where, "no plain tensor is stored there")
        if (tensor.shape, tensor.dtype) != (chunk.box.shape, chunk.dtype):
            raise damaged(
                where,
                f"{tensor.dtype} {tensor.shape} is stored there, and {chunk.dtype} "
                f"{chunk.box.shape} was expected",
            )
        if chunk.name in self.flat_shapes and self._is_flat(chunk):
            self._add_flat(chunk, tensor, position, where)
        else:
            self.builder.add_strided(
                chunk.row, chunk.box, chunk.place.path, position, tensor.strides
            )

    def _tensor_of(self, pickled: bytes, where: str) -> object:
        """The tensor that the pickle of a chunk describes; most chunks have one of a few shapes."""
        if pickled not in self.tensors:
            self.tensors[pickled] = restricted_pickle.resolved(
                restricted_pickle.loads(pickled, where), where
            )
        return self.tensors[pickled]

    def _count(self, num_bytes: int, where: str) -> None:
        """Count bytes that are read whole; each of them is read once in a real checkpoint."""
        self.num_bytes_read += num_bytes
        if self.num_bytes_read > self.builder.num_bytes:
            raise damaged(where, "its metadata say that several values lie in the same bytes")

    def _is_flat(self, chunk: _Chunk) -> bool:
        size = self.sizes[chunk.name]
        return self._true_shape(chunk.name, size) != size

    def _add_flat(self, chunk: _Chunk, tensor: ArchivedTensor, position: int, where: str) -> None:
        """Add the boxes of a range of a flattened chunk: each lies row by row in the range."""
        size = self.sizes[chunk.name]
        shape = self._true_shape(chunk.name, size)
        local = tuple(whole // n for whole, n in zip(shape, size[:-1], strict=True))
        *numbers, start = chunk.box.offset
        stop = start + chunk.box.shape[-1]
        is_range = math.prod(chunk.box.shape[:-1]) == 1 and tensor.strides[-1:] == (1,)
        if not is_range or stop > math.prod(local):
            raise damaged(where, f"{chunk.box} is not a range of a chunk of shape {local}")
        corner = tuple(number * extent for number, extent in zip(numbers, local, strict=True))
        bounds, path = (start, stop), chunk.place.path
        self.builder.add_range(chunk.row, Box(corner, local), bounds, path, position)

    def _add_embedded(
        self, chunk: _Chunk, headers: dict[tuple[str, int], safetensors_file.Header]
    ) -> None:
        """Add a chunk of a file whose tensors lie in one safetensors file."""
        path, start = chunk.place.path, chunk.place.start
        where = f"{self.storage.url}/{path}"
        header = headers.get((path, start))
        if header is None:
            prefix = self.storage.read(path, start, start + 8)
            length = safetensors_file.header_length(prefix, where)
            self._count(8 + length, where)
            data = self.storage.read(path, start, start + 8 + length)
            header = headers[path, start] = safetensors_file.decode_header(data, where)
        entry = header.entries.get(chunk.name)
        dtype = BY_NAME[chunk.dtype]
        if entry is None or tuple(entry.shape) != chunk.box.shape:
            raise damaged(where, f"it does not hold the chunk {chunk.box} of {chunk.name}")
        if entry.dtype != dtype.safetensors or dtype.pairs:
            raise damaged(where, f"{chunk.name} has elements {entry.dtype}, not {chunk.dtype}")
        begin, end = entry.data_offsets
        if end - begin != chunk.box.size * dtype.itemsize:
            raise damaged(where, f"{end - begin} bytes are stored for {chunk.box} of {chunk.name}")
        position = start + header.data_start + begin
        self.builder.add_piece(chunk.row, chunk.box, path, position)

    # -- values -----------------------------------------------------------------------------

    def read_values(self) -> None:
        """Add what is not a tensor."""
        names = [n for n, entry in self.entries.items() if kind_of(entry) == "BytesStorageMetadata"]
        places = [self._place(self._row_of(check_name(name, self.where), None)) for name in names]
        for place in places:
            self._count(place.num_bytes, f"{self.storage.url}/{place.path}")
        ranges = [(place.path, place.start, place.start + place.num_bytes) for place in places]
        for name, place, data in zip(names, places, read_ranges(self.storage, ranges), strict=True):
            self._add_value(name, place, data)

    def _add_value(self, name: str, place: _Place, data: bytes) -> None:
        where = f"{self.storage.url}/{place.path}: {name}"

        archive = read_archive(io.BytesIO(data), where, base=place.start, allow=self.allow)
        element = element_of(name)
        if name == COMMON_KEY:
            # A list of one item, as every object of Megatron's.
            found = archive.pickled.root
            if not isinstance(found, list) or len(found) != 1:
                raise damaged(where, "not a list of one item, as Megatron's objects are")
            common = replace(archive, pickled=replace(archive.pickled, root=found[0]))
            self.builder.add_nested((), common, place.path)
        elif element is not None:
            key, offset, shape = element
            value = opaque(archive, data, place.start)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            self.builder.add_object(key, shape, offset, value)
        else:
            path = self._path_of(name)
            self._set_lists(path)
            self.builder.add_nested(path, archive, place.path)

    def read_archive(self, name: str) -> None:
        """Add values that lie in an archive of their own, if there is one of this name."""
        path = self.base + name
        if path not in self.builder.listing:
            return
        size = file_size(self.storage, self.builder.listing, path)
        archive = self._archive(_Place(path, 0, size), f"{self.storage.url}/{path}")
        self.builder.add_nested((), archive, path)

    def _archive(self, place: _Place, where: str) -> Archive:
        stop = place.start + place.num_bytes
        raw = RangeFile(self.storage, place.path, place.start, stop)
        return read_archive(
            io.BufferedReader(raw, 1 << 16), where, base=place.start, allow=self.allow
        )


def opaque(archive: Archive, data: bytes, base: int) -> object:
    """The content of an archive, as one value with its tensors; `data` begins at byte `base`."""
    num_bytes = 0

    def tensor_of(tensor: ArchivedTensor) -> object:
        nonlocal num_bytes
        position = archive.position(tensor) - base
        num_bytes += math.prod(tensor.shape) * BY_NAME[tensor.dtype].itemsize
        if num_bytes > MIN_OPAQUE_BYTES + 2 * len(data):
            return refused("torch.Tensor", f"{archive.where}: its tensors repeat their elements")
        return tensor_value(tensor, data, position)

    return archive.value(tensor_of)


def kind_of(entry: object) -> str:
    """Which class of DCP a record is of; empty if it is none."""
    return entry.name.rpartition(".")[2] if isinstance(entry, Record) else ""


def dtype_of(entry: Record) -> str | None:
    """Name of the element type of a tensor's metadata; None if it is not known."""
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, Record) else None
    items = state if isinstance(state, tuple) and state else (None,)
    dtype = state.get("dtype") if isinstance(state, dict) else items[0]
    name = dtype.full.removeprefix("torch.") if isinstance(dtype, Name) else ""
    return name if name in BY_NAME else None


def element_of(name: str) -> tuple[str, Numbers, Numbers] | None:
    """Key, offset and shape of the grid of an element of a grid of values, by its name."""
    found = _OBJECT.fullmatch(name)
    if found is None:
        return None
    offset, shape = (tuple(map(int, text.split("."))) for text in found.groups()[1:])
    return found[1], offset, shape
