"""Directories of Paddle's Flex Checkpoint.

A checkpoint with number `<id>` is one file `<id>.metadata` and data files `<rank>_<id>.distcp`. All
of them are pickles:

* The metadata says for each tensor which boxes it is cut into (`LocalTensorMetadata`) and in which
  data file each of them lies (`LocalTensorIndex` → file). A box may be flattened: then only a range
  of its elements, in row-major order, is stored, in one dim.
* A data file is a dict of numpy arrays by name. Which rank wrote it says nothing: copies of a
  tensor are stored once, in any of the files. With `safetensors=True` Paddle writes a safetensors
  file instead, under the same name; the beginning of a file tells which it is.

Reading a data file only to find out where its arrays begin would read everything. So its pickle is
walked opcode by opcode, skipping over the bytes of arrays, and copied on the way with each byte
string replaced by its position (`_skeleton`). What is left is small, and is read by the restricted
unpickler like any pickle. Tensors are then read by ranges, as from remesh's own files.

bfloat16 is stored as uint16; the metadata says what it is.

Checkpoints are written with safetensors files (`paddle_safetensors`)::

    0.metadata       a pickle of Paddle's classes: the boxes of each tensor, and which file has each
    3_0.distcp       a safetensors file with the boxes that rank 3 writes, under the tensors' names
    3_1_0.distcp     a second box of one of these tensors, and so on

This is what `paddle.distributed.save_state_dict(..., safetensors=True)` leaves, so every rank
writes the bytes that it holds. A file holds one box of a name, as in Paddle. All names end with the
number of the checkpoint, by which Paddle looks for files; it is always 0 here. The metadata is
written last.
"""

from __future__ import annotations

import codecs
import math
import pickletools
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remesh._repr import shown
from remesh.core.coverage import faulty_tensors
from remesh.core.dtypes import BY_NAME, DType
from remesh.core.geometry import Box, IntArray, boxes_of_flat_range
from remesh.core.safetensors_file import encode_header
from remesh.core.tables import BoxTable, Cuts
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PickleRefusedError,
    RemeshError,
    UnsupportedValueError,
)
from remesh.formats import restricted_pickle, safetensors
from remesh.formats.building import IndexBuilder, Listing, file_size
from remesh.formats.checks import check_name, check_path, damaged, integers
from remesh.formats.contents import Contents, Place
from remesh.formats.framing import Existing, Frame, Grid, Saved, SmallFile, Writer
from remesh.formats.huggingface import check_is_weights
from remesh.formats.native import ValuesDocument
from remesh.formats.pickle_records import Record
from remesh.formats.pickle_values import numbers, numpy_dtype
from remesh.formats.pickle_writer import Global, New, dumps
from remesh.formats.safetensors import read_arrays
from remesh.storage import Storage

NAME = "paddle"
LOOKS_FOR = "a file <number>.metadata (Paddle's Flex Checkpoint)"

METADATA_NAME = re.compile(r"(\d+)\.metadata")
"""Name of a metadata file; the group is the checkpoint's number."""

_DATA_NAME = re.compile(r"\d+(?:_\d+)?_(\d+)\.(?:distcp|safetensors)")
"""Name of a data file; the group is the checkpoint's number."""

_HOMES = (
    "paddle.distributed.flex_checkpoint.dcp.metadata",
    "paddle.distributed.checkpoint.metadata",
)
_NOT_TENSORS = frozenset({"StructuredToParameterName@@"})
_SPAN = struct.Struct("<QQ")
_BYTES_OPCODES = {b"B", b"C", b"\x8e"}
_READ_AT_ONCE = 1 << 16
# pickletools imports this codec when a file first has such a text; no file causes an import.
codecs.lookup("raw_unicode_escape")


@dataclass(frozen=True, slots=True)
class LocalTensorMetadata:
    """A box into which a tensor is cut."""

    global_offset: tuple[int, ...]  # its offset in the tensor, in elements
    local_shape: tuple[int, ...]
    dtype: str  # name of the element type
    global_shape: tuple[int, ...] | None = None
    """Shape of the tensor; None in checkpoints of early versions."""
    is_flattened: bool = False  # whether only a range of the flattened box is stored
    flattened_range: tuple[int, int] | None = None  # that range, in elements


@dataclass(frozen=True, slots=True)
class LocalTensorIndex:
    """Names a stored box."""

    tensor_key: str  # name of the tensor
    global_offset: tuple[int, ...]  # see `LocalTensorMetadata`
    is_flattened: bool = False  # see `LocalTensorMetadata`
    flattened_range: tuple[int, int] | None = None  # see `LocalTensorMetadata`
    replica_id: int | None = None
    """Number of the copy if copies are stored, counted from 0; else None."""
    local_shape: tuple[int, ...] | None = None
    """See `LocalTensorMetadata`; None in checkpoints of early versions."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of a metadata file."""

    state_dict_metadata: Mapping[str, list[LocalTensorMetadata]]  # the boxes of each tensor
    storage_metadata: Mapping[LocalTensorIndex, str]  # the data file of each stored box
    flat_mapping: Mapping[str, tuple[str, ...]] | None = None
    """The keys that lead to each tensor in the nested state that was saved."""


# ---------------------------------------------------------------------------------------------
# Metadata
# ---------------------------------------------------------------------------------------------


def read_metadata(storage: Storage, path: str, *, allow: Collection[str] = ()) -> Metadata:
    """Read a metadata file."""
    where = f"{storage.url}/{path}"
    kinds = ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
    also = {f"{home}.{kind}" for home in _HOMES for kind in kinds}
    found = restricted_pickle.loads(storage.read(path), where, allow=allow, also=also).root
    try:
        return Metadata(
            {
                check_name(key, where): [_box_of(record, where) for record in records]
                for key, records in found.field("state_dict_metadata").items()
            },
            {
                _index_of(record, where): check_name(file, where)
                for record, file in found.field("storage_metadata").items()
            },
            {
                check_name(name, where): tuple(map(str, check_path(keys, where)))
                for name, keys in (found.field("flat_mapping") or {}).items()
            },
        )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise damaged(where, f"not metadata of Paddle: {error}") from error


def _box_of(record: Record, where: str) -> LocalTensorMetadata:
    offset, shape = record.field("global_offset"), record.field("local_shape")
    box = LocalTensorMetadata(
        integers(offset, where, "the offset of a box"),
        integers(shape, where, "the shape of a box"),
        check_name(record.field("dtype"), where).rpartition(".")[2],
        _numbers(record.field("global_shape"), where),
        bool(record.field("is_flattened")),
        _range(record.field("flattened_range"), where),
    )
    if len(box.global_offset) != len(box.local_shape):
        raise damaged(where, f"a box at {shown(offset)} of shape {shown(shape)}")
    return box


def _index_of(record: Record, where: str) -> LocalTensorIndex:
    replica = record.field("replica_id")
    offset, shape = record.field("global_offset"), _numbers(record.field("local_shape"), where)
    index = LocalTensorIndex(
        check_name(record.field("tensor_key"), where),
        integers(offset, where, "the offset of a box"),
        bool(record.field("is_flattened")),
        _range(record.field("flattened_range"), where),
        None if replica is None else integers((replica,), where, "the number of a copy")[0],
        shape,
    )
    if shape is not None and len(shape) != len(index.global_offset):
        raise damaged(where, f"a box at {shown(offset)} of shape {shown(shape)}")
    return index


def _numbers(value: Any, where: str) -> tuple[int, ...] | None:
    return None if value is None else integers(value, where, "a shape")


def _range(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    is_slice = type(value) is Record and value.name == "builtins.slice"
    bounds = integers(value.args[:2] if is_slice else value, where, "a range")
    if len(bounds) != 2:
        raise damaged(where, f"{shown(bounds)} is not a range")
    return bounds[0], bounds[1]


# ---------------------------------------------------------------------------------------------
# Data files
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Where the elements of an array lie in a data file."""

    position: int  # first byte
    num_bytes: int
    itemsize: int  # bytes of an element


def find_arrays(
    storage: Storage, files: Listing, path: str, *, allow: Collection[str] = ()
) -> dict[str, StoredArray]:
    """Where the arrays of a data file lie; what is between them is all that is read."""
    where = f"{storage.url}/{path}"
    if storage.read(path, 8, 9) == b"{":  # behind the length of a header
        arrays = read_arrays(storage, [path], files)[path]
        return {name: _of_safetensors(array) for name, array in arrays.items()}
    found = restricted_pickle.loads(_skeleton(storage, files, path), where, allow=allow).root
    if not isinstance(found, dict) or not all(type(name) is str for name in found):
        raise damaged(where, "not a data file of Paddle: it holds no dict of names")
    return {
        check_name(name, where): _stored_array(array, f"{where}: {name:.200}")
        for name, array in found.items()
        if name not in _NOT_TENSORS
    }


def _of_safetensors(array: safetensors.StoredArray) -> StoredArray:
    itemsize = BY_NAME[array.dtype].itemsize
    return StoredArray(array.position, math.prod(array.shape) * itemsize, itemsize)


def _stored_array(array: Any, where: str) -> StoredArray:
    try:
        _, shape, dtype, is_fortran, span = array.state
        position, num_bytes = _SPAN.unpack(span)
        extents, element = numbers(shape), numpy_dtype(dtype)
    except PickleRefusedError as error:
        raise restricted_pickle.refusal(error.type_name, where) from error
    except (AttributeError, TypeError, ValueError, struct.error) as error:
        raise CorruptCheckpointError(f"{where}: not an array: {error!s:.80}") from error
    if is_fortran or element.byteorder == ">":
        raise CorruptCheckpointError(
            f"{where}: an array of shape {extents} is not row-major and little-endian"
        )
    return StoredArray(position, num_bytes, element.itemsize)


def _skeleton(storage: Storage, files: Listing, path: str) -> bytes:
    """The pickle of a file with every byte string replaced by its position and length.

    Frames are left out, as their lengths no longer hold; they only help a reader to read ahead.
    """
    reader = _Reader(storage, path, file_size(storage, files, path))
    copied = []
    try:
        for opcode, argument, _ in pickletools.genops(reader):  # type: ignore[arg-type]
            raw = reader.take()
            if raw[:1] in _BYTES_OPCODES:
                length = len(argument)  # type: ignore[arg-type]
                copied.append(
                    b"C" + bytes([_SPAN.size]) + _SPAN.pack(reader.tell() - length, length)
                )
            elif opcode.name != "FRAME":
                copied.append(raw)
    except RemeshError:
        raise
    except Exception as error:  # damaged numbers and texts raise whatever comes of them
        raise damaged(f"{storage.url}/{path}", f"not a pickle: {error!s:.80}") from error
    return b"".join(copied)


class _Gap:
    """Bytes that were not read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class _Reader:
    """A file as `pickletools.genops` reads it, skipping over long byte strings."""

    def __init__(self, storage: Storage, path: str, size: int) -> None:
        self._storage = storage
        self._path = path
        self._size = size
        self._position = 0
        self._start = 0
        self._block = b""
        self._taken = b""

    def tell(self) -> int:
        """How far the file is read."""
        return self._position

    def take(self) -> bytes:
        """The opcode that was read since the last call, skipped bytes left out."""
        taken, self._taken = self._taken, b""
        return taken

    def read(self, length: int) -> bytes | _Gap:
        """The next bytes; fewer at the end of the file."""
        if length > _READ_AT_ONCE and self._taken[:1] in _BYTES_OPCODES:
            length = min(length, self._size - self._position)
            self._position += length
            return _Gap(length)
        data = self._peek(length)
        self._advance(data)
        return data

    def readline(self) -> bytes:
        """The next line; names in old pickles are lines."""
        known = self._block[self._position - self._start :]
        block = known if b"\n" in known else self._peek(_READ_AT_ONCE)
        line, newline, _ = block.partition(b"\n")
        self._advance(line + newline)
        return line + newline

    def _advance(self, data: bytes) -> None:
        self._position += len(data)
        self._taken += data

    def _peek(self, length: int) -> bytes:
        begin = self._position - self._start
        if not 0 <= begin <= begin + length <= len(self._block):
            stop = self._position + max(length, _READ_AT_ONCE)
            self._start, begin = self._position, 0
            self._block = self._storage.read(self._path, self._position, min(stop, self._size))
        return self._block[begin : begin + length]


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def checkpoint_numbers(files: Iterable[str]) -> list[int]:
    """The numbers of the checkpoints in a directory, in order."""
    names = map(METADATA_NAME.fullmatch, files)
    return sorted(int(name[1]) for name in names if name is not None)


def metadata_name(number: int) -> str:
    """Name of the metadata file of a checkpoint."""
    return f"{number}.metadata"


def recognise(place: Place) -> bool:
    """True if a directory with these files holds checkpoints of Paddle."""
    return bool(checkpoint_numbers(place.listing))


def other_files(paths: Collection[str]) -> list[str]:
    """The files of a directory without the data files of Paddle's checkpoints, `<rank>_<id>.*`."""
    numbers = set(checkpoint_numbers(paths))
    names = {path: _DATA_NAME.fullmatch(path) for path in paths}
    return [path for path, name in names.items() if name is None or int(name[1]) not in numbers]


def read(place: Place) -> Contents:
    """Read what a checkpoint holds; its tensors stay where they are."""
    storage, files, path, allow = place.storage, place.listing_beside, place.file, place.allow
    if not path:
        numbers = checkpoint_numbers(files)
        if not numbers:
            raise CheckpointNotFoundError(f"{storage.url}: {LOOKS_FOR} is not there")
        path = metadata_name(numbers[-1])
    metadata = read_metadata(storage, path, allow=allow)
    builder = IndexBuilder(storage, files)
    rows = {}
    for name, boxes in metadata.state_dict_metadata.items():
        dtype, shape = _tensor_of(f"{storage.url}/{path}: {name}", boxes)
        rows[name] = (builder.add_tensor(name, dtype, shape), BY_NAME[dtype].itemsize)
        keys = (metadata.flat_mapping or {}).get(name)
        builder.set_path(name, keys or (name,))
    arrays = _Arrays(storage, files, allow)
    for index, file in metadata.storage_metadata.items():
        where = f"{storage.url}/{file}: {index.tensor_key}"
        if index.tensor_key not in rows:
            raise CorruptCheckpointError(f"{where}: stored, but {path} does not describe it")
        if index.replica_id not in {None, 0}:
            continue
        row, itemsize = rows[index.tensor_key]
        boxes_of_array = _boxes_of(metadata, index, where)
        array = arrays.find(file, index.tensor_key)
        _check_array(array, itemsize, sum(box.size for box in boxes_of_array), where)
        position = array.position
        for box in boxes_of_array:
            builder.add_piece(row, box, file, position)
            position += box.size * itemsize
    index_of_all = builder.build()
    faulty = [index_of_all.boxes.tensors.names[row] for row in faulty_tensors(index_of_all.boxes)]
    if faulty:
        raise CorruptCheckpointError(
            f"{storage.url}/{path}: the stored boxes do not cover each element once of "
            f"{', '.join(faulty[:10])}"
        )
    return Contents(NAME, index_of_all, builder.document)


@dataclass(slots=True)
class _Arrays:
    """The arrays of data files; each file is looked into once."""

    storage: Storage
    files: Listing
    allow: Collection[str]
    known: dict[str, dict[str, StoredArray]] = field(default_factory=dict)

    def find(self, path: str, name: str) -> StoredArray:
        """Where an array lies."""
        if path not in self.known:
            try:
                self.known[path] = find_arrays(self.storage, self.files, path, allow=self.allow)
            except CheckpointNotFoundError:
                raise CorruptCheckpointError(
                    f"{self.storage.url}/{path}: missing, though the metadata name it"
                ) from None
        if name not in self.known[path]:
            raise CorruptCheckpointError(
                f"{self.storage.url}/{path}: {name} is missing, though the metadata name it"
            )
        return self.known[path][name]


def _tensor_of(where: str, boxes: list[LocalTensorMetadata]) -> tuple[str, tuple[int, ...]]:
    """Dtype and global shape of a tensor."""
    found = {(box.dtype, _global_shape(boxes, box)) for box in boxes}
    dtype, shape = min(found, default=("", ()))
    if len(found) != 1 or dtype not in BY_NAME:
        raise CorruptCheckpointError(
            f"{where}: not one shape and known dtype, but {sorted(found) or 'none'}"
        )
    return dtype, shape


def _global_shape(boxes: list[LocalTensorMetadata], box: LocalTensorMetadata) -> tuple[int, ...]:
    """The shape of a tensor; early metadata do not say it, so it is as far as its boxes reach."""
    if box.global_shape is not None:
        return box.global_shape
    ends = [Box(other.global_offset, other.local_shape).end for other in boxes]
    return tuple(map(max, zip(*ends, strict=True)))


def _boxes_of(metadata: Metadata, index: LocalTensorIndex, where: str) -> list[Box]:
    """The boxes of a tensor whose elements a stored array has, in order."""
    shape = index.local_shape
    if shape is None:
        at_offset = [
            box.local_shape
            for box in metadata.state_dict_metadata[index.tensor_key]
            if box.global_offset == index.global_offset
        ]
        if len(set(at_offset)) != 1:
            raise CorruptCheckpointError(f"{where}: no single box at {index.global_offset}")
        shape = at_offset[0]
    if not index.is_flattened:
        return [Box(index.global_offset, shape)]
    if index.flattened_range is None:
        raise CorruptCheckpointError(f"{where}: flattened, but no range is given")
    try:
        flat = boxes_of_flat_range(shape, *index.flattened_range)
    except ValueError as error:
        raise CorruptCheckpointError(f"{where}: {error}") from error
    return [box.shift(index.global_offset) for box in flat]


def _check_array(array: StoredArray, itemsize: int, num_elements: int, where: str) -> None:
    if (array.itemsize, array.num_bytes) != (itemsize, itemsize * num_elements):
        raise CorruptCheckpointError(
            f"{where}: {array.num_bytes} bytes in elements of {array.itemsize} are stored\n"
            f"The metadata say {num_elements} elements of {itemsize}"
        )


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


NUMBER = 0
_HOME = "paddle.distributed.flex_checkpoint.dcp.metadata"


def _file_name(rank: int, turn: int) -> str:
    return f"{rank}_{NUMBER}.distcp" if turn == 0 else f"{rank}_{turn}_{NUMBER}.distcp"


def _turns(boxes: BoxTable, rows: IntArray) -> list[list[int]]:
    """The rows of each file of a rank: a tensor's first box, its second, and so on."""
    seen: Counter[int] = Counter()
    files: list[list[int]] = []
    for row in rows.tolist():
        tensor = int(boxes.tensor[row])
        if seen[tensor] == len(files):
            files.append([])
        files[seen[tensor]].append(row)
        seen[tensor] += 1
    # Wide elements first, so that each begins at a multiple of its size.
    return [
        sorted(file, key=lambda row: -boxes.tensors.dtype(int(boxes.tensor[row])).itemsize)
        for file in files
    ]


def _header(entries: list[tuple[str, DType, Box]]) -> tuple[bytes, list[int]]:
    tensors = [
        (name, dtype.safetensors, box.shape, box.size * dtype.itemsize)
        for name, dtype, box in entries
    ]
    return encode_header(tensors, {})


def no_values(cuts: Cuts, document: ValuesDocument, _options: Mapping[str, object]) -> Grid:
    """Check that the format has a form for everything."""
    check_is_weights(document)
    for number, name in enumerate(cuts.tensors.names):
        dtype = cuts.tensors.dtype(number)
        if dtype.pairs or dtype.is_opaque:
            raise UnsupportedValueError(
                f"{name}: a safetensors file has no name for elements of type {dtype.name}\nLeave "
                "it out, or save in remesh's own format"
            )
    return b""


def frames(boxes: BoxTable, rows: IntArray, rank: int, _save_id: str, _grid: Grid) -> list[Frame]:
    """The files of a rank."""
    found = []
    for turn, own in enumerate(_turns(boxes, rows)):
        entries = []
        for row in own:
            tensor = int(boxes.tensor[row])
            entry = boxes.tensors.names[tensor], boxes.tensors.dtype(tensor), boxes.box(row)
            entries.append(entry)
        head, positions = _header(entries)
        num_bytes = len(head) + sum(dtype.itemsize * box.size for _, dtype, box in entries)
        found.append(
            Frame(
                _file_name(rank, turn),
                num_bytes,
                np.array(own, np.int64),
                np.array(positions, np.int64),
                fillers=((0, head),),
            )
        )
    return found


def small_files(saved: Saved) -> list[SmallFile]:
    """A file of the tensors without elements, if there are any, and the metadata."""
    boxes, document = saved.boxes, saved.document
    names, files = boxes.tensors.names, []
    places: dict[str, list[tuple[Box, str]]] = {name: [] for name in names}
    for rank, rows in enumerate(saved.assignments):
        for turn, own in enumerate(_turns(boxes, rows)):
            for row in own:
                place = boxes.box(row), _file_name(rank, turn)
                places[names[boxes.tensor[row]]].append(place)
    empty = [number for number, name in enumerate(names) if not places[name]]
    if empty:
        path = _file_name(len(saved.assignments), 0)
        wholes = {number: Box.whole(boxes.tensors.shape(number)) for number in empty}
        entries = [(names[n], boxes.tensors.dtype(n), box) for n, box in wholes.items()]
        files.append((path, _header(entries)[0]))
        places |= {names[number]: [(box, path)] for number, box in wholes.items()}
    numbers = {name: number for number, name in enumerate(names)}
    metadata = New(
        Global(_HOME, "Metadata"),
        {
            "state_dict_metadata": {
                name: [_box(boxes, numbers[name], box) for box, _ in held]
                for name, held in places.items()
            },
            "storage_metadata": {
                _index(name, box): path for name, held in places.items() for box, path in held
            },
            "flat_mapping": {name: tuple(map(str, document.path_of(name))) for name in names},
        },
    )
    return [*files, (metadata_name(NUMBER), dumps(metadata))]


def _box(boxes: BoxTable, number: int, box: Box) -> New:
    tensors = boxes.tensors
    state = {
        "global_offset": tuple(box.offset),
        "local_shape": tuple(box.shape),
        "dtype": tensors.dtype(number).name,
        "global_shape": tuple(tensors.shape(number)),
        "is_flattened": False,
        "flattened_range": None,
    }
    return New(Global(_HOME, "LocalTensorMetadata"), state)


def _index(name: str, box: Box) -> New:
    state = {
        "tensor_key": name,
        "global_offset": tuple(box.offset),
        "is_flattened": False,
        "flattened_range": None,
        "replica_id": None,
        "local_shape": tuple(box.shape),
    }
    return New(Global(_HOME, "LocalTensorIndex"), state)


def existing(storage: Storage, _options: Mapping[str, object]) -> Existing | None:
    """The checkpoint that is there; its files have fixed names."""
    numbers = checkpoint_numbers(filter(METADATA_NAME.fullmatch, storage.list_directory().files))
    return Existing(metadata_name(numbers[-1]), is_fixed=True) if numbers else None


PADDLE_SAFETENSORS = Writer("paddle_safetensors", no_values, frames, small_files, existing)
