"""Checkpoints of `torch.distributed.checkpoint`, and of Megatron's `torch_dist`, read as they lie.

::

    .metadata            a pickle: names, shapes, chunks, and where each chunk lies; written last
    __3_0.distcp         archives of `torch.save`, one for each chunk or value, back to back
    common.pt            Megatron: values that are equal on all ranks, as one archive
    metadata.json        Megatron: which backend wrote this

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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from remesh import safetensors_file
from remesh.dtypes import BY_NAME, DTYPES
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    PickleRefusedError,
)
from remesh.formats import restricted_pickle
from remesh.formats.archive import (
    Archive,
    RangeFile,
    check_extent,
    read_archive,
    scan_head,
    tensor_value,
)
from remesh.formats.building import IndexBuilder, Range, exists, read_ranges, refused
from remesh.formats.contents import Contents
from remesh.formats.restricted_pickle import ArchivedTensor, Function, Record, record_type
from remesh.geometry import Box, boxes_of_flat_range
from remesh.state import Path
from remesh.storage import Storage

NAME = "torch_dcp"
METADATA_NAME = ".metadata"
COMMON_NAME = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
LOOKS_FOR = f"{METADATA_NAME} (torch.distributed.checkpoint, Megatron torch_dist)"
HEAD_BYTES = 1024
"""Bytes of an archive that show where its only storage begins, whatever torch wrote it."""

_OBJECT = re.compile(r"(.*)/shard_([0-9]+(?:\.[0-9]+)*)_([0-9]+(?:\.[0-9]+)*)", re.DOTALL)
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


@dataclass(frozen=True, slots=True)
class _DTypeName:
    name: str


def _metadata_stand_ins() -> Mapping[str, object]:
    """What the pickle of `.metadata` may name, besides what any pickle may."""
    table: dict[str, object] = {name: record_type(name) for name in METADATA_CLASSES}
    table["torch.Size"] = Function(tuple)
    table["torch.serialization._get_layout"] = Function(str)
    table |= {f"torch.{dtype.name}": _DTypeName(dtype.name) for dtype in DTYPES}
    return MappingProxyType(table)


def recognise(storage: Storage) -> bool:
    """Whether a place holds such a checkpoint."""
    return exists(storage, METADATA_NAME)


def read(storage: Storage, *, allow: Collection[str] = ()) -> Contents:
    """Read what such a checkpoint holds; its tensors stay where they are.

    Raises:
        CheckpointNotFoundError: If there is none.
        CorruptCheckpointError: If it is damaged.
        FormatVersionError: If something in it is of a kind that cannot be read in place.
        PickleRefusedError: If `.metadata` names a class that no such checkpoint has.
    """
    reader = _Reader(storage, allow, _read_metadata(storage))
    reader.read_tensors()
    reader.read_values()
    reader.read_common()
    return Contents(NAME, reader.builder.build(), reader.builder.document)


def _read_metadata(storage: Storage) -> Record:
    where = f"{storage.url}/{METADATA_NAME}"
    data = storage.read(METADATA_NAME)
    metadata = restricted_pickle.loads(data, where, also=_STAND_INS)
    if not isinstance(metadata, Record) or not isinstance(metadata.field("storage_data"), dict):
        raise _damaged(where, "not the metadata of a checkpoint")
    return metadata


def _damaged(where: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{where}: {what}. Load another checkpoint, or restore this file from a copy."
    )


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

    storage: Storage
    allow: Collection[str]
    metadata: Record
    builder: IndexBuilder = field(init=False)
    places: dict[tuple[str, tuple[int, ...] | None], _Place] = field(init=False)
    flat_shapes: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.builder = IndexBuilder(self.storage)
        self.places = self._places()
        self.flat_shapes = self.metadata.field("mcore_data") or {}

    @property
    def entries(self) -> Mapping[str, Record]:
        """What is stored, by name."""
        entries = self.metadata.field("state_dict_metadata")
        if not isinstance(entries, dict):
            raise self._malformed()
        return entries

    @property
    def paths(self) -> Mapping[str, Path]:
        """The place of each name in the nested state that was saved, as far as it is known."""
        found = self.metadata.field("planner_data")
        return found if isinstance(found, dict) else {}

    def _malformed(self) -> CorruptCheckpointError:
        return _damaged(f"{self.storage.url}/{METADATA_NAME}", "not the metadata of a checkpoint")

    def _places(self) -> dict[tuple[str, tuple[int, ...] | None], _Place]:
        places = {}
        for key, info in self.metadata.field("storage_data").items():
            if not isinstance(key, Record) or not isinstance(info, Record):
                raise self._malformed()
            name, path = key.field("fqn"), info.field("relative_path")
            start, num_bytes = info.field("offset"), info.field("length")
            if info.field("transform_descriptors"):
                raise FormatVersionError(
                    f"{self.storage.url}: {name} was written through the extensions "
                    f"{info.field('transform_descriptors')} (compression, say), so it has no bytes "
                    "that can be read in place; load it with torch and save it without them"
                )
            if not (
                isinstance(path, str) and isinstance(start, int) and isinstance(num_bytes, int)
            ):
                raise self._malformed()
            place = _Place(path, start, num_bytes)
            size = self.builder.size_of(path)
            if not 0 <= start <= start + num_bytes <= size:
                raise _damaged(
                    f"{self.storage.url}/{path}",
                    f"has {size} bytes, but {name} lies at {start}:{start + num_bytes}: the file "
                    "was cut short",
                )
            places[name, key.field("offset")] = place
        return places

    def _place(self, name: str, offset: tuple[int, ...] | None) -> _Place:
        place = self.places.get((name, offset))
        if place is None:
            at = "" if offset is None else f" at {offset}"
            raise _damaged(
                f"{self.storage.url}/{METADATA_NAME}", f"does not say where {name}{at} lies"
            )
        return place

    # -- tensors ----------------------------------------------------------------------------

    def read_tensors(self) -> None:
        """Add all tensors and their pieces."""
        chunks = []
        for name, entry in self.entries.items():
            if _kind(entry) != "TensorStorageMetadata":
                continue
            dtype, size = _dtype_of(entry), entry.field("size")
            if dtype is None or not _is_shape(size):
                raise self._malformed()
            row = self.builder.add_tensor(name, dtype, self._true_shape(name, size))
            self._set_path(name)
            for chunk in entry.field("chunks"):
                offset, shape = chunk.field("offsets"), chunk.field("sizes")
                if not (_is_shape(offset) and _is_shape(shape)) or len(offset) != len(shape):
                    raise self._malformed()
                if 0 not in shape:
                    place = self._place(name, offset)
                    chunks.append(_Chunk(name, row, dtype, Box(offset, shape), place))
        heads = read_ranges(self.storage, [self._head(chunk.place) for chunk in chunks])
        embedded: dict[tuple[str, int], safetensors_file.Header] = {}
        for chunk, head in zip(chunks, heads, strict=True):
            if head.startswith(b"PK"):
                self._add_chunk(chunk, head)
            else:
                self._add_embedded(chunk, embedded)

    def _head(self, place: _Place) -> Range:
        return place.path, place.start, place.start + HEAD_BYTES

    def _set_path(self, name: str) -> None:
        path = tuple(self.paths.get(name, (name,)))
        self.builder.set_path(name, path)
        self._set_lists(path)

    def _set_lists(self, path: Path) -> None:
        """Containers whose keys are numbers were lists."""
        numbered = (path[:at] for at, key in enumerate(path) if isinstance(key, int))
        self.builder.set_sequences(dict.fromkeys(numbered, "list"))

    def _true_shape(self, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor, which for flattened ones is not what the metadata calls its size.

        Raises:
            CorruptCheckpointError: If a flattened tensor's numbers do not fit each other.
        """
        if name not in self.flat_shapes:
            return size
        data = self.flat_shapes[name]
        shape = data.get("nd_reformulated_orig_global_shape") if isinstance(data, dict) else None
        if shape is None:
            return size
        shape = tuple(shape)
        grid = size[:-1]
        if (
            len(grid) != len(shape)
            or any(not n or whole % n for whole, n in zip(shape, grid, strict=True))
            or math.prod(shape) != math.prod(size)
        ):
            raise _damaged(
                f"{self.storage.url}/{METADATA_NAME}",
                f"{name} is stored flattened as {size}, which does not fit its shape {shape}",
            )
        return shape

    def _add_chunk(self, chunk: _Chunk, head: bytes) -> None:
        """Add the pieces of a chunk that has an archive of its own."""
        where = f"{self.storage.url}/{chunk.place.path}: {chunk.name}"
        start, num_bytes = chunk.place.start, chunk.place.num_bytes
        found = scan_head(head)
        if found is None:
            archive = self._archive(chunk.place, where)
            tensor = archive.root
            position = archive.position(tensor) if isinstance(tensor, ArchivedTensor) else 0
        else:
            tensor = restricted_pickle.loads(found[0], where)
            position = start + found[1]
            if isinstance(tensor, ArchivedTensor):
                position += check_extent(tensor, num_bytes - found[1], where)
        if not isinstance(tensor, ArchivedTensor):
            raise _damaged(where, "no plain tensor is stored there")
        if (tensor.shape, tensor.dtype) != (chunk.box.shape, chunk.dtype):
            raise _damaged(
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

    def _is_flat(self, chunk: _Chunk) -> bool:
        size: tuple[int, ...] = self.entries[chunk.name].field("size")
        return self._true_shape(chunk.name, size) != size

    def _add_flat(self, chunk: _Chunk, tensor: ArchivedTensor, position: int, where: str) -> None:
        """Add the boxes of a range of a flattened chunk: each lies row by row in the range."""
        size = self.entries[chunk.name].field("size")
        shape = self._true_shape(chunk.name, size)
        local = tuple(whole // n for whole, n in zip(shape, size[:-1], strict=True))
        *numbers, start = chunk.box.offset
        if math.prod(chunk.box.shape[:-1]) != 1 or tensor.strides[-1:] != (1,):
            raise _damaged(where, "a flattened chunk that is not one range")
        corner = [number * extent for number, extent in zip(numbers, local, strict=True)]
        itemsize = BY_NAME[chunk.dtype].itemsize
        for box in boxes_of_flat_range(local, start, start + chunk.box.shape[-1]):
            self.builder.add_piece(chunk.row, box.shift(corner), chunk.place.path, position)
            position += box.size * itemsize

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
            data = self.storage.read(path, start, start + 8 + length)
            header = headers[path, start] = safetensors_file.decode_header(data, where)
        entry = header.entries.get(chunk.name)
        dtype = BY_NAME[chunk.dtype]
        if entry is None or tuple(entry.shape) != chunk.box.shape:
            raise _damaged(where, f"it does not hold the chunk {chunk.box} of {chunk.name}")
        if entry.dtype != dtype.safetensors or dtype.pairs:
            raise _damaged(where, f"{chunk.name} has elements {entry.dtype}, not {chunk.dtype}")
        position = start + header.data_start + entry.data_offsets[0]
        self.builder.add_piece(chunk.row, chunk.box, path, position)

    # -- values -----------------------------------------------------------------------------

    def read_values(self) -> None:
        """Add what is not a tensor."""
        names = [n for n, entry in self.entries.items() if _kind(entry) == "BytesStorageMetadata"]
        places = [self._place(name, None) for name in names]
        ranges = [(place.path, place.start, place.start + place.num_bytes) for place in places]
        for name, place, data in zip(names, places, read_ranges(self.storage, ranges), strict=True):
            self._add_value(name, place, data)

    def _add_value(self, name: str, place: _Place, data: bytes) -> None:
        where = f"{self.storage.url}/{place.path}: {name}"

        archive = read_archive(io.BytesIO(data), where, base=place.start, allow=self.allow)
        element = _OBJECT.fullmatch(name)
        if name == COMMON_KEY:
            # A list of one item, as every object of Megatron's.
            (common,) = archive.root
            self.builder.add_nested((), Archive(where, common, archive.storages), place.path)
        elif element is not None:
            key, offset, shape = element.groups()
            value = opaque(archive, data, place.start)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            self.builder.add_object(key, _numbers(shape), _numbers(offset), value)
        else:
            path = tuple(self.paths.get(name, (name,)))
            self._set_lists(path)
            self.builder.add_nested(path, archive, place.path)

    def read_common(self) -> None:
        """Add Megatron's common values, if there are any."""
        try:
            size = self.storage.size(COMMON_NAME)
        except CheckpointNotFoundError:
            return
        place = _Place(COMMON_NAME, 0, size)
        archive = self._archive(place, f"{self.storage.url}/{COMMON_NAME}")
        self.builder.add_nested((), archive, COMMON_NAME)

    def _archive(self, place: _Place, where: str) -> Archive:
        stop = place.start + place.num_bytes
        raw = RangeFile(self.storage, place.path, place.start, stop)
        return read_archive(
            io.BufferedReader(raw, 1 << 16), where, base=place.start, allow=self.allow
        )


def opaque(archive: Archive, data: bytes, base: int) -> object:
    """What an archive holds, as one value with its tensors in it.

    Args:
        archive: What was read of it.
        data: Its bytes.
        base: Byte of the file at which they begin.
    """

    def tensor_of(tensor: ArchivedTensor) -> object:
        return tensor_value(tensor, data, archive.position(tensor) - base)

    try:
        return restricted_pickle.resolved(archive.root, archive.where, tensor_of)
    except PickleRefusedError as error:
        return refused(error.type_name, str(error))


def _kind(entry: object) -> str:
    return type(entry).__name__ if isinstance(entry, Record) else ""


def _dtype_of(entry: Record) -> str | None:
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state.get("dtype") if isinstance(state, dict) else (state or (None,))[0]
    return dtype.name if isinstance(dtype, _DTypeName) else None


def _is_shape(numbers: object) -> bool:
    return isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))


_STAND_INS = _metadata_stand_ins()
