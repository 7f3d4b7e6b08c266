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

Writing, every rank makes one file of archives back to back (see `ArchiveLayout`), and another one
for the tensors that the option `separation_hint` sets apart. Rank 0 writes one more with the
values, each an archive of its own, and then `.metadata`. File names carry the id of the save, so
that a save never meets the files of another; `.metadata` says which ones count. For Megatron,
values that are equal on all ranks go to `common.pt`, nested as they were, and `metadata.json` comes
last.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from remesh._repr import shown
from remesh.core import safetensors_file, values
from remesh.core.dtypes import BY_NAME, DType
from remesh.core.geometry import Box, IntArray, row_products
from remesh.core.state import Path, assemble, name_of
from remesh.core.tables import BoxTable, Cuts
from remesh.core.values import UnresolvedValue
from remesh.errors import (
    CheckpointError,
    FormatVersionError,
    NameCollisionError,
    StateError,
)
from remesh.formats import restricted_pickle
from remesh.formats.archive import (
    Archive,
    ArchiveLayout,
    archive_of,
    check_extent,
    read_archive,
    scan_head,
    tensor_record,
    tensor_value,
)
from remesh.formats.building import IndexBuilder, read_groups, read_ranges, refused
from remesh.formats.checks import budget, check_name, check_path, damaged, integers
from remesh.formats.native import ValuesDocument
from remesh.formats.pickle_reader import RowForm
from remesh.formats.pickle_records import Name, Record, Rows
from remesh.formats.pickle_writer import dumps
from remesh.formats.place import Place
from remesh.formats.restricted_pickle import ArchivedTensor
from remesh.formats.writer import Existing, Frame, Saved, SmallFile, Writer
from remesh.storage import Storage

NAME = "torch_dcp"
METADATA_NAME = ".metadata"
COMMON_NAME = "common.pt"
CONFIG_NAME = "metadata.json"
LIGHTNING_NAME = "meta.pt"
COMMON_KEY = "common_state/shard_0_1"
NEEDS_LISTING = False
MARKER = f"{METADATA_NAME} (torch.distributed.checkpoint, Megatron torch_dist)"
FLAT_SHAPES, FLAT_SHAPE = "mcore_data", "nd_reformulated_orig_global_shape"
"""The attribute of `.metadata` with the true shapes of flattened tensors; the key of each shape."""

HEAD_BYTES = 1024
"""Bytes of an archive that show where its only storage begins, whatever torch wrote it."""
_OBJECT = re.compile(
    r"(.*)/shard_([0-9]{1,18}(?:\.[0-9]{1,18})*)_([0-9]{1,18}(?:\.[0-9]{1,18})*)", re.DOTALL
)
_DCP = "torch.distributed.checkpoint"

METADATA_MODULES = (
    *(f"{_DCP}.{module}." for module in ("metadata", "filesystem", "planner")),
    "megatron.core.dist_checkpointing.strategies.torch.",
)
"""The modules of the classes that `.metadata` is made of. They only hold what they are given."""


def is_at(place: Place) -> bool:
    """True if a place holds such a checkpoint."""
    return place.storage.exists(METADATA_NAME)


def read(_place: Place, builder: IndexBuilder) -> None:
    """Read what such a checkpoint holds; its tensors stay where they are."""
    add_folder(builder, "")


def add_folder(builder: IndexBuilder, base: str) -> None:
    """Add a checkpoint in the folder `base`, which ends with a slash or is empty."""
    reader = _Reader(builder, read_metadata(builder.storage, base, ROWS), base)
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
    metadata = restricted_pickle.loads(data, where, also=METADATA_MODULES, rows=rows).root
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


_Archived = tuple[str, int, int]
"""Where the archive of a chunk or a value lies: file, first byte and length."""


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
"""Name and offset of a chunk (None for a value), file, first byte and length."""


def places_of(key: object, info: object, where: str) -> Iterable[PlaceRow]:
    """The rows of a key and a value of `storage_data`."""
    if isinstance(key, Rows) and key is info and key.form is _PLACES:
        return zip(*key.columns, strict=True)
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


class _Chunk(NamedTuple):
    """A box of a tensor as the metadata has it, with its archive."""

    row: int  # of the tensor in the index that is built
    offset: Numbers
    shape: Numbers
    place: _Archived


@dataclass(slots=True)
class _Reader:
    """One checkpoint while it is read."""

    builder: IndexBuilder
    metadata: Record
    base: str
    places: dict[str, dict[Numbers | None, _Archived]] = field(default_factory=dict)
    """Where the archive of each chunk lies, by name and offset; the offset of a value is None."""
    flat: dict[str, tuple[Numbers, Numbers]] = field(default_factory=dict)
    """The stored size and the true shape of each tensor that is stored flattened."""
    tensors: dict[bytes, object] = field(default_factory=dict)
    embedded: dict[tuple[str, int], safetensors_file.Header] = field(default_factory=dict)
    """The headers of safetensors files inside of files."""
    num_bytes_read: int = 0

    def __post_init__(self) -> None:
        files: dict[str, tuple[str, int]] = {}  # the full path and the size
        for key, info in self.metadata.field("storage_data").items():
            for name, offset, path, start, num_bytes in places_of(key, info, self.where):
                if path not in files:
                    full = self.base + check_name(path, self.where)
                    files[path] = full, self.builder.size_of(full)
                full, size = files[path]
                if not 0 <= start <= start + num_bytes <= size:
                    raise damaged(
                        self.builder.where(full),
                        f"has {size} bytes, but {name} lies at {start}:{start + num_bytes}: the "
                        "file was cut short",
                    )
                if name not in self.places:
                    self.places[check_name(name, self.where)] = {}
                self.places[name][offset] = full, start, num_bytes

    @property
    def where(self) -> str:
        """The metadata file, for error messages."""
        return self.builder.where(self.base + METADATA_NAME)

    def _entries(self, kind: str) -> Iterator[tuple[str, Record]]:
        """What is stored, of one class of DCP, by name."""
        for name, entry in self.metadata.field("state_dict_metadata").items():
            if isinstance(entry, Record) and entry.name.rpartition(".")[2] == kind:
                yield check_name(name, self.where), entry

    def _path_of(self, name: str) -> Path:
        """The place of a name in the nested state that was saved, as far as it is known."""
        found = self.metadata.field("planner_data")
        path = found.get(name, (name,)) if isinstance(found, dict) else (name,)
        return check_path(path, f"{self.where}: {name}")

    def _place(self, name: str, offset: Numbers | None) -> _Archived:
        place = self.places.get(name, {}).get(offset)
        if place is None:
            at = "" if offset is None else f" at {offset}"
            raise damaged(self.where, f"does not say where {name}{at} lies")
        return place

    # -- tensors ----------------------------------------------------------------------------

    def read_tensors(self) -> None:
        """Add all tensors and their pieces."""
        chunks: list[_Chunk] = []
        names: dict[int, tuple[str, str]] = {}
        for name, entry in self._entries("TensorStorageMetadata"):
            where = f"{self.where}: {name}"
            dtype, size = dtype_of(entry), integers(entry.field("size"), where, "a shape")
            if dtype is None:
                raise damaged(where, "its dtype is not known")
            row = self.builder.add_tensor(name, dtype, self._true_shape(name, size))
            names[row] = name, dtype
            path = self._path_of(name)
            self.builder.set_path(name, path)
            self._set_lists(path)
            chunks += [
                _Chunk(row, offset, shape, self._place(name, offset))
                for offset, shape in boxes_of(entry.field("chunks"), len(size), where)
                if 0 not in shape
            ]
        self._add_chunks(chunks, names)

    def _add_chunks(self, chunks: Sequence[_Chunk], names: Mapping[int, tuple[str, str]]) -> None:
        """Add the pieces of chunks, given the names and dtypes of tensors by their rows."""
        ranges = [(path, start, start + HEAD_BYTES) for *_, (path, start, _) in chunks]
        for group, first, data in read_groups(self.builder.storage, ranges):
            for number in group:
                chunk, begin = chunks[number], ranges[number][1] - first
                if data.startswith(b"PK", begin):
                    self._add_chunk(chunk, *names[chunk.row], data[begin : begin + HEAD_BYTES])
                else:
                    self._add_embedded(chunk, *names[chunk.row])

    def _set_lists(self, path: Path) -> None:
        """Containers whose keys are numbers were lists."""
        numbered = (path[:at] for at, key in enumerate(path) if isinstance(key, int))
        self.builder.set_sequences(dict.fromkeys(numbered, "list"))

    def _true_shape(self, name: str, size: Numbers) -> Numbers:
        """The shape of a tensor: of a flattened one it is not what the metadata calls its size."""
        shapes = self.metadata.field(FLAT_SHAPES)
        data = shapes.get(name) if isinstance(shapes, dict) else None
        shape = data.get(FLAT_SHAPE) if isinstance(data, dict) else None
        if shape is None:
            return size
        shape = integers(shape, f"{self.where}: {name}", "a shape")
        if not is_flattened(size, shape):
            raise damaged(
                self.where,
                f"{name} is stored flattened as {size}, which does not fit its shape {shape}",
            )
        self.flat[name] = size, shape
        return shape

    def _add_chunk(self, chunk: _Chunk, name: str, dtype: str, head: bytes) -> None:
        """Add the pieces of a chunk that has an archive of its own."""
        path, start, num_bytes = chunk.place
        where = f"{self.builder.where(path)}: {name}"
        found = scan_head(head)
        if found is None:
            self._count(num_bytes, where)
            archive = self.builder.archive(*chunk.place)
            tensor = archive.value()
            position = archive.position(tensor) if isinstance(tensor, ArchivedTensor) else 0
        else:
            tensor = self._tensor_of(found[0], where)
            position = start + found[1]
            if isinstance(tensor, ArchivedTensor):
                position += check_extent(tensor, num_bytes - found[1], where)
        if isinstance(tensor, UnresolvedValue):
            raise FormatVersionError(f"{where}: {tensor.payload}")
        if not isinstance(tensor, ArchivedTensor):
            raise damaged(where, "no plain tensor is stored there")
        if (tensor.shape, tensor.dtype) != (chunk.shape, dtype):
            raise damaged(
                where,
                f"{tensor.dtype} {tensor.shape} is stored there, and {dtype} {chunk.shape} was "
                "expected",
            )
        box = Box(chunk.offset, chunk.shape)
        if name in self.flat:
            self._add_flat(chunk, name, tensor, position, where)
        else:
            self.builder.add_strided(chunk.row, box, path, position, tensor.strides)

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

    def _add_flat(
        self, chunk: _Chunk, name: str, tensor: ArchivedTensor, position: int, where: str
    ) -> None:
        """Add the boxes of a range of a flattened chunk: each lies row by row in the range."""
        size, shape = self.flat[name]
        local = tuple(whole // n for whole, n in zip(shape, size[:-1], strict=True))
        *numbers, start = chunk.offset
        stop = start + chunk.shape[-1]
        is_range = math.prod(chunk.shape[:-1]) == 1 and tensor.strides[-1:] == (1,)
        if not is_range or stop > math.prod(local):
            box = Box(chunk.offset, chunk.shape)
            raise damaged(where, f"{box} is not a range of a chunk of shape {local}")
        corner = tuple(number * extent for number, extent in zip(numbers, local, strict=True))
        bounds = start, stop
        self.builder.add_range(chunk.row, Box(corner, local), bounds, chunk.place[0], position)

    def _add_embedded(self, chunk: _Chunk, name: str, dtype_name: str) -> None:
        """Add a chunk of a file whose tensors lie in one safetensors file."""
        path, start, _ = chunk.place
        where, read = self.builder.where(path), self.builder.storage.read
        header = self.embedded.get((path, start))
        if header is None:
            length = 8 + safetensors_file.header_length(read(path, start, start + 8), where)
            self._count(length, where)
            data = read(path, start, start + length)
            header = self.embedded[path, start] = safetensors_file.decode_header(data, where)
        entry, dtype = header.entries.get(name), BY_NAME[dtype_name]
        box = Box(chunk.offset, chunk.shape)
        if entry is None or tuple(entry.shape) != box.shape:
            raise damaged(where, f"it does not hold the chunk {box} of {name}")
        if entry.dtype != dtype.safetensors or dtype.pairs:
            raise damaged(where, f"{name} has elements {entry.dtype}, not {dtype_name}")
        begin, end = entry.data_offsets
        if end - begin != box.size * dtype.itemsize:
            raise damaged(where, f"{end - begin} bytes are stored for {box} of {name}")
        self.builder.add_piece(chunk.row, box, path, start + header.data_start + begin)

    # -- values -----------------------------------------------------------------------------

    def read_values(self) -> None:
        """Add what is not a tensor."""
        places = {
            name: self._place(name, None) for name, _ in self._entries("BytesStorageMetadata")
        }
        for path, _, num_bytes in places.values():
            self._count(num_bytes, self.builder.where(path))
        ranges = [(path, start, start + length) for path, start, length in places.values()]
        for name, data in zip(places, read_ranges(self.builder.storage, ranges), strict=True):
            self._add_value(name, places[name], data)

    def _add_value(self, name: str, place: _Archived, data: bytes) -> None:
        path, start, _ = place
        where, allow = f"{self.builder.where(path)}: {name}", self.builder.place.allow
        archive = read_archive(io.BytesIO(data), where, path=path, base=start, allow=allow)
        element = element_of(name)
        if element is not None:
            key, offset, shape = element
            value = opaque(archive, data, start)
            if isinstance(value, list) and len(value) == 1:  # as every object of Megatron's
                value = value[0]
            if name == COMMON_KEY:
                if not isinstance(value, dict):
                    raise damaged(where, "no dict, as Megatron's common state is")
                self.builder.add_tree((), value, archive)
            else:
                self.builder.add_object(key, shape, offset, value)
        else:
            at = self._path_of(name)
            self._set_lists(at)
            self.builder.add_nested(at, archive)

    def read_archive(self, name: str) -> None:
        """Add values that lie in an archive of their own, if there is one of this name."""
        if self.base + name in self.builder.listing:
            self.builder.add_nested((), self.builder.archive(self.base + name))


def opaque(archive: Archive, data: bytes, base: int) -> object:
    """The content of an archive, as one value with its tensors; `data` begins at byte `base`."""
    num_bytes = 0

    def tensor_of(tensor: ArchivedTensor) -> object:
        nonlocal num_bytes
        position = archive.position(tensor) - base
        num_bytes += math.prod(tensor.shape) * BY_NAME[tensor.dtype].itemsize
        if num_bytes > budget("decoded bytes", len(data)):
            return refused("torch.Tensor", f"{archive.where}: its tensors repeat their elements")
        return tensor_value(tensor, data, position)

    return archive.value(tensor_of)


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


# -- writing ---------------------------------------------------------------------------------------


def _file_name(rank: int, number: int, save_id: str) -> str:
    return f"__{rank}_{number}_{save_id}.distcp"


def _check_flat_shapes(cuts: Cuts, options: Mapping[str, object]) -> None:
    shapes = _flat_shapes(options)
    if not shapes:
        return
    boxes, rows = cuts.boxes, {name: row for row, name in enumerate(cuts.tensors.names)}
    lengths = boxes.extents[np.arange(len(boxes)), cuts.tensors.ndims[boxes.tensor] - 1]
    cut_otherwise = set(boxes.tensor[row_products(boxes.extents) != lengths].tolist())
    for name, shape in shapes.items():
        row = rows.get(name)
        size = None if row is None else cuts.tensors.shape(row)
        if size is None or not is_flattened(size, shape) or row in cut_otherwise:
            raise StateError(
                f"flat_shapes: {name!r} is no flattened form of a tensor of shape {shape}\n"
                f"The state holds {'nothing' if size is None else f'shape {size}'} of that name. A "
                "flattened form has the number of parts in each dim, and the size of a part; a box "
                "of it is a range of one part."
            )


def _flat_shapes(options: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The option `flat_shapes`: the true shapes of tensors that are stored as flattened ranges."""
    shapes: Any = options.get("flat_shapes", {})
    return {name: tuple(shape) for name, shape in shapes.items()}


def _frame(boxes: BoxTable, rows: IntArray, path: str) -> Frame:
    """A data file: an archive for each box."""
    positions: list[int] = []
    literals: list[tuple[int, bytes]] = []
    pickles: dict[tuple[str, tuple[int, ...]], bytes] = {}
    at = 0
    for row in rows.tolist():
        box, dtype = boxes.box(row), boxes.tensors.dtype(int(boxes.tensor[row]))
        pickled = pickles.get((dtype.name, box.shape))
        if pickled is None:
            pickled = dumps(tensor_record(dtype, box.shape, "0"))
            pickles[dtype.name, box.shape] = pickled
        archive = ArchiveLayout(pickled, [box.size * dtype.itemsize], at)
        literals += archive.literals
        positions += archive.positions
        at += archive.num_bytes
    return Frame(path, at, rows, np.array(positions), literals=tuple(literals))


def _dcp_leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """A plain value as torch takes it apart: dicts, and lists that hold any, at any depth."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _dcp_leaves((*path, str(key)), item)
    elif isinstance(value, list) and _holds_mapping(value):
        for number, item in enumerate(value):
            yield from _dcp_leaves((*path, number), item)
    else:
        yield path, value


def _holds_mapping(items: list[object]) -> bool:
    return any(
        isinstance(item, Mapping) or (isinstance(item, list) and _holds_mapping(item))
        for item in items
    )


def _common_file(saved: Saved) -> SmallFile:
    """Megatron's file of the values that are equal on all ranks, nested as they were."""
    document = saved.document
    common: dict[Path, object] = {
        document.path_of(name): values.decode(bytes(raw)) for name, raw in document.values.items()
    }
    common |= {document.path_of(name): list(items) for name, items in document.lists.items()}
    tensors = [document.path_of(n) for n in (*saved.cuts.tensors.names, *document.aliases)]
    mixed = {path[:length] for path in tensors for length in range(len(path))}
    # Of a list that holds tensors, Megatron stores a dict, so that the rest keep their places.
    sequences = {tuple(at): kind for at, kind in document.sequences if tuple(at) not in mixed}
    return COMMON_NAME, archive_of(assemble(common, sequences), COMMON_NAME)


_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What Megatron's last file says: which backends wrote a checkpoint."""


def _value_file_and_metadata(
    saved: Saved, objects: dict[str, object], paths: Mapping[str, Path] | None
) -> list[SmallFile]:
    """The file of archives of values, if there are any, and the metadata of everything."""
    # Megatron keeps each element of a grid of values in a list.
    for name, element in saved.document.objects.items():
        objects[name] = [values.decode(bytes(element.value))]
    path, data = _file_name(0, 1, saved.save_id), bytearray()
    entries: dict[str, Record] = {}
    storage: dict[Record, Record] = {}
    for name, value in objects.items():
        archive = archive_of(value, name)
        entries[name] = Record(f"{_DCP}.metadata.BytesStorageMetadata", is_new=True)
        storage[_key(name, None, None)] = _info((path, len(data), len(archive)))
        data += archive
    places, chunks = _places(saved), dict[int, list[tuple[Box, _Archived]]]()
    for row, tensor in enumerate(saved.boxes.tensor.tolist()):
        chunks.setdefault(tensor, []).append((saved.boxes.box(row), places[row]))
    tensors = saved.cuts.tensors
    numbers = {name: number for number, name in enumerate(tensors.names)}
    numbers |= {alias: numbers[name] for alias, name in saved.document.aliases.items()}
    for name, number in numbers.items():
        found = chunks.get(number, [])
        boxes = [box for box, _ in found]
        entries[name] = _tensor_entry(tensors.dtype(number), tensors.shape(number), boxes)
        for hint, (box, place) in enumerate(found):
            storage[_key(name, _size(box.offset), hint)] = _info(place)
    save: dict[str, object] = {"checkpoint_id": None, "save_id": saved.save_id}
    save |= {"load_id": None, "modules": []}
    state: dict[str, Any] = {
        "state_dict_metadata": entries,
        "planner_data": paths,
        "storage_data": storage,
        "storage_meta": _made("StorageMeta", save),
        "version": "1.0.0",
    }
    flat = _flat_shapes(saved.options)
    if flat:
        state[FLAT_SHAPES] = {
            name: {FLAT_SHAPE: _size(flat[name])} if name in flat else {} for name in numbers
        }
    files = [(path, bytes(data))] if data else []
    return [*files, (METADATA_NAME, dumps(_made("Metadata", state), 4))]


def _places(saved: Saved) -> dict[int, _Archived]:
    """Where the archive of each box lies, from the same plan by which its rank wrote it."""
    places = {}
    for rank, rows in enumerate(saved.assignments):
        for file in DcpWriter().frames(saved.boxes, rows, rank, saved.save_id, saved.plan):
            # Heads and tails alternate, so each archive begins at every other filler.
            begins = [position for position, _ in file.literals[::2]]
            ends = [*begins[1:], file.num_bytes]
            for row, begin, end in zip(file.rows.tolist(), begins, ends, strict=True):
                places[row] = (file.path, begin, end - begin)
    return places


def _size(numbers: tuple[int, ...]) -> Record:
    return Record("torch.Size", (numbers,))


def _made(kind: str, state: object) -> Record:
    return Record(f"{_DCP}.metadata.{kind}", is_new=True, state=state)


def _tensor_entry(dtype: DType, shape: tuple[int, ...], boxes: list[Box]) -> Record:
    layout = Record("torch.serialization._get_layout", ("torch.strided",))
    memory_format = Record(f"{_DCP}.metadata._MEM_FORMAT_ENCODING", (0,))
    properties = (Name(f"torch.{dtype.name}"), layout, False, memory_format, False)
    chunks = [
        _made("ChunkStorageMetadata", {"offsets": _size(box.offset), "sizes": _size(box.shape)})
        for box in boxes
    ]
    state = {"properties": _made("TensorProperties", properties), "size": _size(shape)}
    return _made("TensorStorageMetadata", {**state, "chunks": chunks})


def _key(name: str, offset: Record | None, hint: int | None) -> Record:
    place = {} if offset is None else {"offset": offset}
    return _made("MetadataIndex", {"fqn": name, "index": hint, **place})


def _info(place: _Archived) -> Record:
    path, offset, length = place
    state = {"relative_path": path, "offset": offset, "length": length}
    return Record(f"{_DCP}.filesystem._StorageInfo", is_new=True, state=state)


class DcpWriter(Writer):
    """Writes checkpoints of `torch.distributed.checkpoint`."""

    name = "torch_dcp"
    options = ("separation_hint", "flat_shapes")

    def plan(self, cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> bytes:
        """The option `separation_hint`: what the names of tensors begin with that lie apart."""
        _check_flat_shapes(cuts, options)
        self._entries(cuts, document)  # an error comes before anything is written
        hint = options.get("separation_hint", "")
        if not isinstance(hint, str) or "/" in hint:
            raise StateError(
                f"separation_hint={hint!r}: names of files begin with it, so it is a text without "
                "'/'"
            )
        return hint.encode()

    def frames(
        self, boxes: BoxTable, rows: IntArray, rank: int, save_id: str, plan: bytes
    ) -> list[Frame]:
        """The data file of a rank, and another one for the tensors that `separation_hint` names."""
        hint, names, name = plan.decode(), boxes.tensors.names, _file_name(rank, 0, save_id)
        tensors = [names[tensor] for tensor in boxes.tensor[rows].tolist()]
        apart = np.array([bool(hint) and name.startswith(hint) for name in tensors], dtype=bool)
        files = [(name, rows[~apart]), (hint + name, rows[apart])]
        return [_frame(boxes, rows, path) for path, rows in files if len(rows)]

    def _entries(
        self, cuts: Cuts, document: ValuesDocument
    ) -> tuple[dict[str, object], dict[str, Path] | None]:
        """The values by name, and the place of each name in the state, as torch takes it apart."""
        lists = {tuple(at) for at, _ in document.sequences}

        def path_of(name: str) -> Path:
            # As torch writes it: numbers are places in lists, all else is text.
            path = document.path_of(name)
            return tuple(
                key if isinstance(key, int) and path[:number] in lists else str(key)
                for number, key in enumerate(path)
            )

        objects: dict[str, object] = {name: list(items) for name, items in document.lists.items()}
        names = (*cuts.tensors.names, *document.aliases, *objects)
        paths = {name: path_of(name) for name in names} | {one: (one,) for one in document.objects}
        for name, raw in document.values.items():
            for path, leaf in _dcp_leaves(path_of(name), values.decode(bytes(raw))):
                full = name_of(path)
                if full in paths:
                    raise NameCollisionError(
                        f"{full!r} is the name of two entries, one of them in {name!r}\n"
                        f"Keys are texts in {self.name}; rename one, or save in another format"
                    )
                paths[full], objects[full] = path, leaf
        return objects, paths

    def small_files(self, saved: Saved) -> list[SmallFile]:
        return _value_file_and_metadata(saved, *self._entries(saved.cuts, saved.document))

    def existing(self, storage: Storage, _options: Mapping[str, object]) -> Existing | None:
        """The checkpoint that is there, of torch or of Megatron."""
        if not storage.exists(METADATA_NAME):
            return None
        builder = IndexBuilder(Place(storage))
        try:
            read(builder.place, builder)
            files = [file.path for file in builder.build().files]
        except CheckpointError:
            return Existing(METADATA_NAME)  # what it refers to is unknown, and stays
        beside = (path for path in (COMMON_NAME, CONFIG_NAME) if storage.exists(path))
        return Existing(METADATA_NAME, paths=tuple(dict.fromkeys((METADATA_NAME, *beside, *files))))


class TorchDistWriter(DcpWriter):
    """Writes Megatron's `torch_dist`."""

    name = "torch_dist"

    def _entries(self, _cuts: Cuts, _document: ValuesDocument) -> tuple[dict[str, object], None]:
        return {}, None  # values lie nested in `common.pt`, and places are not stored

    def small_files(self, saved: Saved) -> list[SmallFile]:
        """The objects, `common.pt`, `.metadata` and `metadata.json`."""
        config = CONFIG_NAME, msgspec.json.encode(_CONFIG)
        return [_common_file(saved), *super().small_files(saved), config]


WRITERS = (DcpWriter(), TorchDistWriter())
