"""What commands show of a checkpoint and of elements of its tensors, with numpy alone.

A tensor may be larger than memory, so it is read in chunks. numpy has neither bfloat16 nor float8.
A bfloat16 is the upper half of a float32; the float8 types have 256 values each, which are computed
once from the widths of their fields.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box, boxes_of_flat_range
from remesh.core.index import Index
from remesh.core.memory import CarrierArray

Array = npt.NDArray[Any]

CHUNK_BYTES = 32 << 20
"""Read at a time. Digest blocks at the ends of a chunk are read again, so chunks are large."""
_MAX_BATCH = 4096
"""Boxes that are read together at most."""


def batches_of(index: Index, boxes: Iterable[tuple[str, Box]]) -> Iterator[list[tuple[str, Box]]]:
    """Boxes of tensors, cut into chunks, as many at a time as are read together."""
    batch: list[tuple[str, Box]] = []
    room = CHUNK_BYTES
    for name, box in boxes:
        itemsize = BY_NAME[index[name].dtype].itemsize
        for chunk in chunks_of(box, CHUNK_BYTES // itemsize) if box.size else ():
            num_bytes = chunk.size * itemsize
            if batch and (num_bytes > room or len(batch) == _MAX_BATCH):
                yield batch
                batch, room = [], CHUNK_BYTES
            batch.append((name, chunk))
            room -= num_bytes
    if batch:
        yield batch


def chunks_of(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a non-empty box into boxes of so many elements at most, in row-major order."""
    if box.size <= max_elements:
        yield box
        return
    dim = next(number for number, extent in enumerate(box.shape) if extent > 1)
    step = max(1, max_elements // (box.size // box.shape[dim]))
    for start in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(step, box.shape[dim] - start)
        yield from chunks_of(Box(tuple(offset), tuple(shape)), max_elements)


def first_elements(checkpoint: Checkpoint, name: str, count: int) -> Array:
    """The first elements of a tensor in row-major order, as true values in one dim."""
    dtype, shape = checkpoint.index[name].dtype, checkpoint.index[name].shape
    parts = [
        checkpoint.read_array(name, part).reshape(-1)
        for part in boxes_of_flat_range(shape, 0, min(count, math.prod(shape)))
    ]
    joined = np.concatenate(parts) if parts else np.empty(0, BY_NAME[dtype].carrier)
    return true_values(joined, dtype)


# ---------------------------------------------------------------------------------------------
# Element types
# ---------------------------------------------------------------------------------------------


def true_values(elements: CarrierArray, dtype: str) -> Array:
    """Carried elements as elements of a type that numpy has, without rounding.

    Elements of opaque types are the unsigned integers of their bits.
    """
    if BY_NAME[dtype].is_native or BY_NAME[dtype].is_opaque:
        return elements
    if dtype == "bfloat16":
        widened: Array = (elements.astype(np.uint32) << 16).view(np.float32)
        return widened
    if dtype == "complex32":
        pairs = elements.view("<f2").astype(np.float32)
        return pairs.view(np.complex64)
    return _FLOAT8[dtype][elements]


def _float8(exponent_bits: int, bias: int) -> npt.NDArray[np.float32]:
    """The values of the 256 codes of sign, exponent, mantissa, as if all of them were finite."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1.0 + fraction) * 2.0 ** (exponent - bias)
    subnormal = fraction * 2.0 ** (1 - bias)
    return (sign * np.where(exponent == 0, subnormal, normal)).astype(np.float32)


def _float8_tables() -> dict[str, npt.NDArray[np.float32]]:
    """The values of all codes of each float8 type."""
    # The last code would be 2 ** 128, which float32 lacks; it is the NaN of this type.
    powers = np.append(2.0 ** (np.arange(255) - 127.0), np.nan)
    tables = {
        "float8_e4m3fn": _float8(4, 7),
        "float8_e5m2": _float8(5, 15),
        "float8_e4m3fnuz": _float8(4, 8),
        "float8_e5m2fnuz": _float8(5, 16),
        "float8_e8m0fnu": powers.astype(np.float32),
    }
    tables["float8_e4m3fn"][[0x7F, 0xFF]] = np.nan
    tables["float8_e5m2"][[0x7C, 0xFC]] = np.inf, -np.inf
    tables["float8_e5m2"][[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    # The `uz` types have no negative zero; its code is their only NaN.
    tables["float8_e4m3fnuz"][0x80] = np.nan
    tables["float8_e5m2fnuz"][0x80] = np.nan
    return tables


_FLOAT8 = _float8_tables()


def facts_of(checkpoint: Checkpoint, hint: str = "") -> list[tuple[str, str]]:
    """Names of facts about a checkpoint, and what they are; `hint` follows the number of values."""
    index, record = checkpoint.index, places.record_of(checkpoint)
    ties = f", {output.plural(len(index.aliases), 'tie')}" if index.aliases else ""
    tensors, pieces = len(index.tensors), output.plural(index.num_pieces, "piece")
    num_values = len(checkpoint.values) + len(checkpoint.lists)
    num_objects = len(checkpoint.objects)
    values = f"{output.plural(num_values, 'value')}, {output.plural(num_objects, 'object')}"
    files = output.plural(len(index.files), "file")
    in_files = format_bytes(places.num_file_bytes(checkpoint))
    compressed = places.shown_compression(index)
    origin = ("format", f"{checkpoint.format}, without digests")
    if record is not None:
        ranks, created = (
            output.plural(record.world_size, "rank"),
            output.format_time(record.created),
        )
        version = f"remesh {record.remesh_version}, format {record.version}"
        origin = ("saved", f"{created} by {ranks}, {version}")
    size = format_bytes(index.num_bytes)
    facts = [
        origin,
        ("tensors", f"{output.plural(tensors, 'tensor')} in {pieces}, {size}{ties}"),
        ("elements", _elements(index)),
        ("values", values + (hint if num_values + num_objects else "")),
        ("files", f"{files} with tensors, {in_files} in all{compressed}"),
    ]
    if checkpoint.metadata:
        facts.append(("metadata", output.cut(repr(dict(checkpoint.metadata)), 200)))
    return facts


def _elements(index: Index) -> str:
    """The number of elements, and the parts of the state that have the most."""
    tensors, parts = index.tensors, Counter[str]()
    for name, size in zip(tensors.names, tensors.shapes.prod(axis=1).tolist(), strict=True):
        parts[name.split(".")[0]] += size
    text = output.format_count(parts.total())
    if len(parts) < 2:
        return text
    shown = [f"{part} {output.format_count(size)}" for part, size in parts.most_common(4)]
    if others := parts.total() - sum(size for _, size in parts.most_common(4)):
        shown.append(f"others {output.format_count(others)}")
    return f"{text}: {', '.join(shown)}"
