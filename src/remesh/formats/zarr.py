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
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
import numpy as np

from remesh.core.dtypes import DTYPES, DType
from remesh.core.geometry import MAX_ELEMENTS, Box, strides_of
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from remesh.formats.building import IndexBuilder
from remesh.formats.checks import MALFORMED, decode_json
from remesh.formats.place import Place
from remesh.formats.torch_dcp import COMMON_NAME, CONFIG_NAME, element_of, opaque
from remesh.storage import Storage

NAME = "zarr"
ARRAY_NAME = ".zarray"
NEEDS_LISTING = False
MARKER = f"{CONFIG_NAME} with sharded_backend zarr (Megatron)"

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
    return place.storage.exists(CONFIG_NAME) and _is_of_zarr(place)


def _is_of_zarr(place: Place) -> bool:
    """True if Megatron's file says that the tensors were written by zarr."""
    try:
        config = msgspec.json.decode(place.storage.read(CONFIG_NAME), type=_Config)
    except MALFORMED:
        return False
    return config.sharded_backend == NAME


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what such a checkpoint holds; its tensors stay where they are."""
    files = place.listing
    if CONFIG_NAME not in files or not _is_of_zarr(place):
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
        path = f"{name}/{array.dimension_separator.join(map(str, number)) or '0'}"
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


def _dtype_of(text: str, where: str) -> DType:
    # Types that numpy lacks are written by their names, as Megatron wrote bfloat16.
    for dtype in DTYPES:
        if text in {dtype.name, dtype.carrier.str if dtype.is_native else ""}:
            return dtype
    raise FormatVersionError(f"{where}: elements of type {text!r} are not read")
