"""Directories of Paddle's Flex Checkpoint.

A checkpoint with number `<id>` is one file `<id>.metadata` and data files `<rank>_<id>.distcp`:

* The metadata, a pickle, says for each tensor which boxes it is cut into (`LocalTensorMetadata`)
  and in which data file each of them lies (`LocalTensorIndex` → file). A box may be flattened: then
  only a range of its elements, in row-major order, is stored, in one dim.
* A data file is a pickled dict of numpy arrays by name or, with `safetensors=True`, a safetensors
  file under the same name; its beginning tells which. Copies of a tensor are stored once, in the
  file of any rank.

Reading a pickled data file only to find out where its arrays begin would read everything. So the
bytes of arrays are skipped over when its pickle is read, and stand in it as `Span`s. Tensors are
then read by ranges, as from remesh's own files. bfloat16 is stored as uint16; the metadata says
what it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from remesh._repr import shown
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import MAX_DIMS, MAX_ELEMENTS, Box
from remesh.errors import CheckpointNotFoundError, PickleRefusedError
from remesh.formats import restricted_pickle
from remesh.formats.archive import open_range
from remesh.formats.building import IndexBuilder
from remesh.formats.checks import MALFORMED, check_name, check_path, damaged
from remesh.formats.pickle_reader import parse_file
from remesh.formats.pickle_records import Record, Span
from remesh.formats.place import Place
from remesh.formats.restricted_pickle import numbers, numpy_dtype
from remesh.formats.safetensors_files import read_arrays
from remesh.storage import Storage

NAME = "paddle"
MARKER = "a file <number>.metadata (Paddle's Flex Checkpoint)"

FILES = re.compile(r"(\d+)\.metadata")
"""Name of a metadata file; the group is the checkpoint's number."""

_DATA_NAME = re.compile(r"\d+(?:_\d+)?_(\d+)\.(?:distcp|safetensors)")
"""Name of a data file; the group is the checkpoint's number."""

_HOMES = (
    "paddle.distributed.flex_checkpoint.dcp.metadata.",
    "paddle.distributed.checkpoint.metadata.",
)
_NOT_TENSORS = frozenset({"StructuredToParameterName@@"})


_Extents = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)], ...],
    msgspec.Meta(max_length=MAX_DIMS),
]


class LocalTensorMetadata(msgspec.Struct, frozen=True):
    """A box into which a tensor is cut."""

    global_offset: _Extents  # its offset in the tensor, in elements
    local_shape: _Extents
    dtype: str  # the element type, as Paddle names it
    global_shape: _Extents | None = None
    """Shape of the tensor; None in checkpoints of early versions."""
    is_flattened: bool = False  # whether only a range of the flattened box is stored
    flattened_range: _Extents | None = None  # first element of that range, and one past the last


class LocalTensorIndex(msgspec.Struct, frozen=True):
    """Names a stored box."""

    tensor_key: str  # name of the tensor
    global_offset: _Extents  # see `LocalTensorMetadata`
    is_flattened: bool = False  # see `LocalTensorMetadata`
    flattened_range: _Extents | None = None  # see `LocalTensorMetadata`
    replica_id: int | None = None
    """Number of the copy if copies are stored, counted from 0; else None."""
    local_shape: _Extents | None = None
    """See `LocalTensorMetadata`; None in checkpoints of early versions."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of a metadata file."""

    state_dict_metadata: Mapping[str, list[LocalTensorMetadata]]  # the boxes of each tensor
    storage_metadata: Mapping[LocalTensorIndex, str]  # the data file of each stored box
    flat_mapping: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The keys that lead to each tensor in the nested state that was saved."""


# ---------------------------------------------------------------------------------------------
# Metadata
# ---------------------------------------------------------------------------------------------


def read_metadata(storage: Storage, path: str, *, allow: Collection[str] = ()) -> Metadata:
    """Read a metadata file."""
    where = f"{storage.url}/{path}"
    found = restricted_pickle.loads(storage.read(path), where, allow=allow, also=_HOMES).root
    try:
        return Metadata(
            {
                check_name(key, where): [
                    _fields(LocalTensorMetadata, one, where) for one in records
                ]
                for key, records in found.field("state_dict_metadata").items()
            },
            {
                _fields(LocalTensorIndex, record, where): check_name(file, where)
                for record, file in found.field("storage_metadata").items()
            },
            {
                check_name(name, where): tuple(map(str, check_path(keys, where)))
                for name, keys in (found.field("flat_mapping") or {}).items()
            },
        )
    except (*MALFORMED, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise damaged(where, f"not metadata of Paddle: {error!s:.80}") from error


_Box = TypeVar("_Box", bound=LocalTensorMetadata | LocalTensorIndex)


def _fields(kind: type[_Box], record: Record, where: str) -> _Box:
    """The fields of an object of Paddle's."""
    fields = dict(record.state)
    part = fields.get("flattened_range")
    if type(part) is Record and part.name == "builtins.slice":
        fields["flattened_range"] = part.args[:2]
    box = msgspec.convert(fields, kind)
    bounds, shape = box.flattened_range, box.local_shape
    if bounds is not None and len(bounds) != 2:
        raise damaged(where, f"{shown(bounds)} is not a range")
    if shape is not None and len(shape) != len(box.global_offset):
        raise damaged(where, f"a box at {shown(box.global_offset)} of shape {shown(shape)}")
    return box


# ---------------------------------------------------------------------------------------------
# Data files
# ---------------------------------------------------------------------------------------------


_Stored = tuple[int, int, str]
"""Where the elements of an array lie in a data file: first byte, bytes, element type."""


def find_arrays(builder: IndexBuilder, path: str) -> dict[str, _Stored]:
    """The arrays of a data file; what is between them is all that is read."""
    storage, where, num_bytes = builder.storage, builder.where(path), builder.size_of(path)
    if storage.read(path, 8, 9) == b"{":  # behind the length of a header
        return {
            name: (one.position, math.prod(one.shape) * BY_NAME[one.dtype].itemsize, one.dtype)
            for name, one in read_arrays(builder, [path])[path].items()
        }
    pickled = parse_file(open_range(storage, path, 0, num_bytes), where)
    found = restricted_pickle.check_names(pickled, where, allow=builder.place.allow).root
    if not isinstance(found, dict) or not all(type(name) is str for name in found):
        raise damaged(where, "not a data file of Paddle: it holds no dict of names")
    return {
        check_name(name, where): _pickled_array(array, f"{where}: {name:.200}")
        for name, array in found.items()
        if name not in _NOT_TENSORS
    }


def _pickled_array(array: Any, where: str) -> _Stored:
    try:
        _, shape, dtype, is_fortran, span = array.state
        extents, element = numbers(shape), numpy_dtype(dtype)
        if type(span) is not Span:
            raise TypeError(f"elements that are {type(span).__name__}")
    except PickleRefusedError as error:
        raise restricted_pickle.refusal(error.type_name, where) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise damaged(where, f"not an array: {error!s:.80}") from error
    if is_fortran or element.byteorder == ">":
        raise damaged(where, f"an array of shape {extents} is not row-major and little-endian")
    return span.position, span.num_bytes, element.name


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def checkpoint_numbers(files: Iterable[str]) -> list[int]:
    """The numbers of the checkpoints in a directory, in order."""
    names = map(FILES.fullmatch, files)
    return sorted(int(name[1]) for name in names if name is not None)


def metadata_name(number: int) -> str:
    """Name of the metadata file of a checkpoint."""
    return f"{number}.metadata"


def is_at(place: Place) -> bool:
    """True if a directory with these files holds checkpoints of Paddle."""
    return bool(checkpoint_numbers(place.listing))


def other_files(paths: Collection[str]) -> list[str]:
    """The files of a directory without the data files of Paddle's checkpoints, `<rank>_<id>.*`."""
    numbers = set(checkpoint_numbers(paths))
    names = {path: _DATA_NAME.fullmatch(path) for path in paths}
    return [path for path, name in names.items() if name is None or int(name[1]) not in numbers]


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what a checkpoint holds; its tensors stay where they are."""
    path = place.file
    if not path:
        numbers = checkpoint_numbers(place.listing)
        if not numbers:
            raise CheckpointNotFoundError(f"{place.url}: {MARKER} is not there")
        path = metadata_name(numbers[-1])
    metadata = read_metadata(place.storage, path, allow=place.allow)
    rows = {}
    for name, boxes in metadata.state_dict_metadata.items():
        dtype, shape = _tensor_of(f"{builder.where(path)}: {name}", boxes)
        rows[name] = builder.add_tensor(name, dtype, shape), BY_NAME[dtype]
        builder.set_path(name, metadata.flat_mapping.get(name) or (name,))
    arrays: dict[str, dict[str, _Stored]] = {}
    for index, file in metadata.storage_metadata.items():
        name, where = index.tensor_key, f"{builder.where(file)}: {index.tensor_key}"
        if name not in rows:
            raise damaged(where, f"stored, but {path} does not describe it")
        if index.replica_id not in {None, 0}:
            continue
        row, wanted = rows[name]
        box, start, stop = _part_of(metadata, index, where)
        if file not in arrays:
            arrays[file] = find_arrays(builder, file)
        if name not in arrays[file]:
            raise damaged(where, "missing, though the metadata name it")
        position, num_bytes, stored = arrays[file][name]
        # What numpy has no type for is stored as integers of that size, which may have a sign.
        carrier = wanted.carrier.name
        kinds = {wanted.name, *(() if wanted.is_native else (carrier, carrier.removeprefix("u")))}
        if stored not in kinds or num_bytes != wanted.itemsize * (stop - start):
            raise damaged(
                where,
                f"{num_bytes} bytes of {stored} are stored\n"
                f"The metadata say {stop - start} elements of {wanted.name}.",
            )
        builder.add_range(row, box, (start, stop), file, position)
    builder.described_by = builder.where(path)


def _tensor_of(where: str, boxes: list[LocalTensorMetadata]) -> tuple[str, tuple[int, ...]]:
    """Dtype and global shape of a tensor."""
    found = {(box.dtype.rpartition(".")[2], _global_shape(boxes, box)) for box in boxes}
    dtype, shape = min(found, default=("", ()))
    if len(found) != 1 or dtype not in BY_NAME:
        raise damaged(where, f"not one shape and known dtype, but {sorted(found) or 'none'}")
    return dtype, shape


def _global_shape(boxes: list[LocalTensorMetadata], box: LocalTensorMetadata) -> tuple[int, ...]:
    """The shape of a tensor; early metadata do not say it, so it is as far as its boxes reach."""
    if box.global_shape is not None:
        return box.global_shape
    ends = [Box(other.global_offset, other.local_shape).end for other in boxes]
    return tuple(map(max, zip(*ends, strict=True)))


def _part_of(metadata: Metadata, index: LocalTensorIndex, where: str) -> tuple[Box, int, int]:
    """The box of which a stored array has elements, and the range of them that it has."""
    shape = index.local_shape
    if shape is None:
        at_offset = {
            box.local_shape
            for box in metadata.state_dict_metadata[index.tensor_key]
            if box.global_offset == index.global_offset
        }
        if len(at_offset) != 1:
            raise damaged(where, f"no single box at {index.global_offset}")
        (shape,) = at_offset
    box = Box(index.global_offset, shape)
    if not index.is_flattened:
        return box, 0, box.size
    if index.flattened_range is None:
        raise damaged(where, "flattened, but no range is given")
    start, stop = index.flattened_range
    if not start <= stop <= box.size:
        raise damaged(where, f"the range {start}:{stop} is not of {box}")
    return box, start, stop
