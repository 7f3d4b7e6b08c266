"""Megatron's `zarr` checkpoints: a folder of plain chunk files for each tensor.

::

    decoder.weight/.zarray         zarr version 2: shape, chunk shape, dtype, compressor, order
    decoder.weight/0.1             a chunk, row by row, of full size even at the end of a dim
    rng/shard_0.1_1.2.pt           one element of a grid of values, an archive of torch.save
    common.pt                      values that are equal on all ranks, an archive of torch.save
    metadata.json                  says that the backend is zarr; written last

A chunk that is neither compressed nor filtered is a box of the tensor as it lies, so these
checkpoints are read in place, like all others; nothing of zarr's own code is needed. Megatron
never compressed. What is compressed, or has chunks that were left out because they hold nothing but
the fill value, is refused.

Writing cuts each tensor into the largest regular chunks that every stored box is made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from remesh.core import values
from remesh.core.dtypes import DTYPES, DType
from remesh.core.geometry import MAX_ELEMENTS, Box, IntArray, strides_of
from remesh.core.tables import BoxTable, Cuts
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    StateError,
)
from remesh.formats.archive import archive_of
from remesh.formats.building import IndexBuilder
from remesh.formats.checks import MALFORMED, decode_json
from remesh.formats.native import ValuesDocument
from remesh.formats.place import Place
from remesh.formats.torch_dcp import (
    COMMON_NAME,
    CONFIG_NAME,
    common_file,
    config_file,
    element_of,
    opaque,
)
from remesh.formats.writer import Existing, Frame, Saved, SmallFile, Writer
from remesh.storage import Storage

NAME = "zarr"
ARRAY_NAME = ".zarray"
NEEDS_LISTING = False
MARKER = f"{CONFIG_NAME} with sharded_backend zarr (Megatron)"
MAX_CHUNKS = 1 << 16
"""Chunk files of one tensor that are written at most."""

_Extent = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]


class _Config(msgspec.Struct):
    sharded_backend: str = ""


class _Array(msgspec.Struct):
    """The content of `.zarray`."""

    zarr_format: int
    shape: list[_Extent]
    chunks: list[Annotated[int, msgspec.Meta(ge=1, le=MAX_ELEMENTS)]]
    dtype: str
    compressor: object = None
    filters: object = None
    order: str = "C"
    fill_value: object = None
    dimension_separator: Literal[".", "/"] = "."


def is_at(place: Place) -> bool:
    """True if a place holds such a checkpoint."""
    if not place.storage.exists(CONFIG_NAME):
        return False
    try:
        config = msgspec.json.decode(place.storage.read(CONFIG_NAME), type=_Config)
    except MALFORMED:
        return False
    return config.sharded_backend == NAME


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what such a checkpoint holds; its tensors stay where they are."""
    files = place.listing
    if CONFIG_NAME not in files:
        raise CheckpointNotFoundError(f"{place.url}: no {MARKER}")
    for path in files:
        folder, _, name = path.rpartition("/")
        if name == ARRAY_NAME and folder:
            _add_array(builder, folder)
        element = element_of(path.removesuffix(".pt")) if path.endswith(".pt") else None
        if element is not None:
            key, offset, shape = element
            value = opaque(builder.archive(path), place.storage.read(path), 0)
            builder.add_object(key, shape, offset, value)
    if COMMON_NAME in files:
        builder.add_nested((), builder.archive(COMMON_NAME))


def _add_array(builder: IndexBuilder, name: str) -> None:
    """Add a tensor and its chunks."""
    storage, files = builder.storage, builder.listing
    where = builder.where(f"{name}/{ARRAY_NAME}")
    array = decode_json(storage.read(f"{name}/{ARRAY_NAME}"), where, _Array)
    dtype = _dtype_of(array.dtype, where)
    if array.zarr_format != 2 or len(array.chunks) != len(array.shape):
        raise FormatVersionError(f"{where}: not an array of zarr version 2; write it as version 2")
    if array.compressor is not None or array.filters or array.order != "C":
        raise FormatVersionError(
            f"{where}: its chunks are compressed, filtered or in column order\nThey have no "
            "bytes that can be read in place; copy it with zarr, with compressor=None and order='C'"
        )
    row = builder.add_tensor(name, dtype.name, array.shape)
    builder.set_path(name, (name,))
    if 0 in array.shape:
        return
    whole, chunk_bytes = Box.whole(tuple(array.shape)), math.prod(array.chunks) * dtype.itemsize
    counts = [-(-n // step) for n, step in zip(array.shape, array.chunks, strict=True)]
    if math.prod(counts) > len(files):
        raise _missing(storage, name, f"{math.prod(counts)} chunks, more than there are files")
    strides = strides_of(array.chunks)
    for number in np.ndindex(*counts):
        path = f"{name}/{_chunk_name(number, array.dimension_separator)}"
        if path not in files:
            raise _missing(storage, path, "missing")
        size = builder.size_of(path)
        if size != chunk_bytes:
            raise _missing(storage, path, f"{size} bytes long, where {chunk_bytes} were expected")
        offset = tuple(i * step for i, step in zip(number, array.chunks, strict=True))
        box = Box(offset, tuple(array.chunks)).intersect(whole)
        assert box is not None
        builder.add_strided(row, box, path, 0, strides)


def _missing(storage: Storage, path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{storage.url}/{path}: {what}. Load another checkpoint, or restore this file from a copy; "
        "chunks of zeros must be written too (write_empty_chunks=True)."
    )


def _chunk_name(number: Sequence[int], separator: str = ".") -> str:
    return separator.join(map(str, number)) or "0"


def _dtype_of(text: str, where: str) -> DType:
    # Types that numpy lacks are written by their names, as Megatron wrote bfloat16.
    for dtype in DTYPES:
        if text in {_dtype_text(dtype), dtype.name}:
            return dtype
    raise FormatVersionError(f"{where}: elements of type {text!r} are not read")


def _dtype_text(dtype: DType) -> str:
    return dtype.carrier.str if dtype.is_native else dtype.name


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def chunk_shapes(boxes: BoxTable) -> dict[str, tuple[int, ...]]:
    """The chunk shape of each tensor: the largest regular one that all its boxes are made of."""
    found: dict[str, list[Box]] = {name: [] for name in boxes.tensors.names}
    for row in range(len(boxes)):
        found[boxes.tensors.names[boxes.tensor[row]]].append(boxes.box(row))
    chunks = {}
    for number, (name, held) in enumerate(found.items()):
        shape = boxes.tensors.shape(number)
        chunk = tuple(
            _step(extent, [(box.offset[dim], box.end[dim]) for box in held])
            for dim, extent in enumerate(shape)
        )
        num_chunks = math.prod(-(-n // step) for n, step in zip(shape, chunk, strict=True))
        if num_chunks > MAX_CHUNKS:
            raise StateError(
                f"{name}: its shards lie too irregularly for zarr\n"
                f"Its chunks would be {num_chunks} files of shape {chunk}; save it in the format "
                "torch_dist instead"
            )
        chunks[name] = chunk
    return chunks


def _step(extent: int, bounds: Sequence[tuple[int, int]]) -> int:
    """The longest step at whose multiples all bounds lie, the end of the dim excepted."""
    if not bounds:
        return max(extent, 1)
    inner = {bound for pair in bounds for bound in pair} - {extent}
    longest = max(stop - start for start, stop in bounds)
    return longest if not any(bound % longest for bound in inner) else math.gcd(*inner)


def _chunks_in(plan: bytes) -> dict[str, tuple[int, ...]]:
    return msgspec.msgpack.decode(plan, type=dict[str, tuple[int, ...]])


class ZarrWriter(Writer):
    """Writes Megatron's `zarr`."""

    name = NAME

    def plan(self, cuts: Cuts, _document: ValuesDocument, _options: Mapping[str, object]) -> bytes:
        """The chunk shapes, encoded."""
        return msgspec.msgpack.encode(chunk_shapes(cuts.boxes))

    def frames(
        self, boxes: BoxTable, rows: IntArray, _rank: int, _save_id: str, plan: bytes
    ) -> list[Frame]:
        """The chunk files of a rank, under zarr's names."""
        found, chunks = [], _chunks_in(plan)
        for row in rows.tolist():
            box, number = boxes.box(row), int(boxes.tensor[row])
            name, itemsize = boxes.tensors.names[number], boxes.tensors.dtype(number).itemsize
            chunk = chunks[name]
            first = [start // step for start, step in zip(box.offset, chunk, strict=True)]
            counts = [
                -(-stop // step) - begin
                for stop, step, begin in zip(box.end, chunk, first, strict=True)
            ]
            for at in np.ndindex(*counts):
                place = tuple(begin + i for begin, i in zip(first, at, strict=True))
                part = Box(tuple(i * step for i, step in zip(place, chunk, strict=True)), chunk)
                path, num_bytes = f"{name}/{_chunk_name(place)}", part.size * itemsize
                found.append(Frame(path, num_bytes, np.array([row]), np.array([0]), (part,)))
        return found

    def small_files(self, saved: Saved) -> list[SmallFile]:
        """The descriptions of the arrays, the objects, `common.pt` and `metadata.json`."""
        tensors, chunks = saved.cuts.tensors, _chunks_in(saved.plan)
        if saved.document.aliases:
            alias = min(saved.document.aliases)
            raise StateError(
                f"{alias}: tied to {saved.document.aliases[alias]}\nZarr has one array for each "
                "name, so untie it, leave it out, or save in the format torch_dist"
            )
        arrays = [
            (
                f"{name}/{ARRAY_NAME}",
                msgspec.json.encode(
                    {
                        "zarr_format": 2,
                        "shape": tensors.shape(number),
                        "chunks": chunks[name],
                        "dtype": _dtype_text(tensors.dtype(number)),
                        "compressor": None,
                        "fill_value": None,
                        "order": "C",
                        "filters": None,
                    }
                ),
            )
            for number, name in enumerate(tensors.names)
        ]
        objects = [
            (f"{name}.pt", archive_of(values.decode(bytes(element.value)), name))
            for name, element in saved.document.objects.items()
        ]
        return [*arrays, *objects, common_file(saved.document), config_file(NAME)]

    def existing(self, storage: Storage, _options: Mapping[str, object]) -> Existing | None:
        return Existing(CONFIG_NAME, is_fixed=True) if storage.exists(CONFIG_NAME) else None


WRITERS = (ZarrWriter(),)
