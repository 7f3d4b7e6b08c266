"""Writing the weights of Hugging Face models: safetensors files of whole tensors, and their index.

Rank 0 decides which tensor lies where in which file (`weight_files`), and all ranks write their
boxes there (`whole_tensors`). When all files are durable they get their names, and the index, which
says that they belong together, comes last; a single file exists when it has its name.

In an object store a file has one writer. There each rank writes files of its own with the tensors
that it is to write, if it has them whole, and the index says which these are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from remesh.errors import CheckpointNotFoundError, StateError
from remesh.formats import whole_tensors
from remesh.formats.building import exists
from remesh.formats.framing import Existing, Frame, Grid, Rename, Saved, SmallFile, Writer
from remesh.formats.native import ValuesDocument
from remesh.formats.weight_files import (
    FileTensor,
    SafetensorsContent,
    file_names,
    split_into_files,
)
from remesh.formats.whole_tensors import WholeFile, WholeFiles, decode_files, renames
from remesh.geometry import IntArray
from remesh.storage import Storage
from remesh.tables import BoxTable

MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors that a file has at most, if nothing is said."""

_STEM, _SUFFIX = "model", ".safetensors"
FILE_NAME = f"{_STEM}{_SUFFIX}"
INDEX_NAME = f"{FILE_NAME}.index.json"
CONFIG_NAME = "config.json"


def _plan(tables: BoxTable, document: ValuesDocument, max_shard_bytes: int | None) -> Grid:
    tensors = tables.tensors
    check_is_weights(document)
    weights = [
        FileTensor((name,), name, tensors.dtype(number).name, tensors.shape(number))
        for number, name in enumerate(tensors.names)
    ]
    shards = split_into_files(weights, max_shard_bytes)
    contents = [SafetensorsContent(shard) for shard in shards]
    names = file_names(_STEM, _SUFFIX, len(shards))
    files = [
        WholeFile(name, content.num_bytes, [(0, content.head())])
        for name, content in zip(names, contents, strict=True)
    ]
    places = {
        weight.source: (number, position)
        for number, (shard, content) in enumerate(zip(shards, contents, strict=True))
        for weight, position in zip(shard, content.positions, strict=True)
    }
    return WholeFiles(files, places).encode()


def check_is_weights(document: ValuesDocument) -> None:
    """Check that there is nothing but tensors.

    Raises:
        StateError: If there are values.
    """
    others = sorted([*document.values, *document.lists, *document.objects])
    if others:
        raise StateError(
            "safetensors files hold tensors alone\n"
            f"The state has {len(others)} other entries: "
            f"{', '.join(others[:5])}{', ...' if len(others) > 5 else ''}. Save the weights "
            "by themselves: remesh.save(model, path, format=...); in a conversion, delete "
            "the others with its transformation"
        )


def huggingface_files(
    boxes: BoxTable, document: ValuesDocument, options: Mapping[str, object]
) -> Grid:
    """Where the tensors lie: in several files, if there is much.

    Raises:
        StateError: If the state is not weights alone, or the limit is no number.
        UnsupportedValueError: If the files have no name for an element type.
    """
    return _plan(boxes, document, _limit_of(options))


def _limit_of(options: Mapping[str, object]) -> int:
    limit = options.get("max_shard_bytes", MAX_SHARD_BYTES)
    if not isinstance(limit, int) or limit < 1:
        raise StateError(f"max_shard_bytes must be a number of bytes, not {limit!r}")
    return limit


class OwnFiles(msgspec.Struct, frozen=True):
    """What all ranks know where each writes files of its own.

    Attributes:
        max_shard_bytes: Bytes of tensors that a file has at most.
        empty: Name, dtype and shape of the tensors without elements, which rank 0 writes.
    """

    max_shard_bytes: int
    empty: list[tuple[str, str, tuple[int, ...]]]


def own_files(boxes: BoxTable, document: ValuesDocument, options: Mapping[str, object]) -> Grid:
    """Let each rank write files of its own.

    Raises:
        StateError: If the state is not weights alone, or a tensor is cut.
        UnsupportedValueError: If the files have no name for an element type.
    """
    huggingface_files(boxes, document, options)  # refuses what it cannot write
    for row in range(len(boxes)):
        number = int(boxes.tensor[row])
        if boxes.box(row).shape != boxes.tensors.shape(number):
            raise StateError(
                f"{boxes.tensors.names[number]}: is cut over ranks, and in an object store a file "
                "has one writer\nUse remesh.training.export_weights(state, place, dtype=None): it "
                "brings each file together on one rank, a few megabytes at a time. Or save in "
                "format 'remesh' and run: remesh convert SAVED PLACE --format huggingface"
            )
    tensors, held = boxes.tensors, {*boxes.tensor.tolist()}
    empty = [
        (name, tensors.dtype(number).name, tensors.shape(number))
        for number, name in enumerate(tensors.names)
        if number not in held
    ]
    return msgspec.msgpack.encode(OwnFiles(_limit_of(options), empty))


def _is_own(grid: Grid) -> bool:
    return "max_shard_bytes" in msgspec.msgpack.decode(grid)


def _own_shards(
    boxes: BoxTable, rows: IntArray, rank: int, save_id: str, grid: Grid
) -> list[tuple[str, list[int], SafetensorsContent]]:
    """Name, rows of the tensors and content of each file of a rank."""
    table = boxes.tensors
    row_of = {table.names[int(boxes.tensor[row])]: row for row in rows.tolist()}
    numbers = {name: int(boxes.tensor[row]) for name, row in row_of.items()}
    tensors = [
        FileTensor((name,), name, table.dtype(number).name, table.shape(number))
        for name, number in numbers.items()
    ]
    plan = msgspec.msgpack.decode(grid, type=OwnFiles)
    if rank == 0:
        tensors += [FileTensor((name,), name, dtype, shape) for name, dtype, shape in plan.empty]
    return [
        (
            f"{_STEM}-{save_id}-{rank:05d}-{number:05d}{_SUFFIX}",
            [row_of[tensor.source] for tensor in shard if tensor.source in row_of],
            SafetensorsContent(shard),
        )
        for number, shard in enumerate(split_into_files(tensors, plan.max_shard_bytes))
    ]


def frames(boxes: BoxTable, rows: IntArray, rank: int, save_id: str, grid: Grid) -> list[Frame]:
    """The files of which a rank writes something."""
    if not _is_own(grid):
        return whole_tensors.frames(boxes, rows, rank, save_id, grid)
    return [
        Frame(
            name,
            content.num_bytes,
            np.array(own, np.int64),
            np.array(
                [
                    position
                    for tensor, position in zip(content.tensors, content.positions, strict=True)
                    if tensor.num_elements
                ],
                np.int64,
            ),
            fillers=((0, content.head()),),
        )
        for name, own, content in _own_shards(boxes, rows, rank, save_id, grid)
    ]


def single_file(boxes: BoxTable, document: ValuesDocument, _options: Mapping[str, object]) -> Grid:
    """Where the tensors lie in a single file.

    Raises:
        StateError: If the state is not weights alone.
        UnsupportedValueError: If the file has no name for an element type.
    """
    return _plan(boxes, document, None)


def small_files(saved: Saved) -> Sequence[SmallFile | Rename]:
    """The configuration, the files under their final names, and the index of several files."""
    steps: list[SmallFile | Rename] = []
    if saved.metadata:
        text = json.dumps(dict(saved.metadata), indent=2, sort_keys=True) + "\n"
        steps.append((CONFIG_NAME, text.encode()))
    if _is_own(saved.grid):
        return [*steps, _index_file(saved, _own_places(saved))]
    plan, named = decode_files(saved.grid), renames(saved)
    if len(named) == 1:
        return [*steps, *named]
    places = {name: plan.files[number].name for name, (number, _) in plan.places.items()}
    return [*steps, *named, _index_file(saved, places)]


def _own_places(saved: Saved) -> dict[str, str]:
    """Tensor → file, where each rank has written files of its own."""
    return {
        tensor.source: name
        for rank, rows in enumerate(saved.assignments)
        for name, _, content in _own_shards(saved.boxes, rows, rank, saved.save_id, saved.grid)
        for tensor in content.tensors
    }


def _index_file(saved: Saved, places: Mapping[str, str]) -> SmallFile:
    """The file that says which tensor lies in which file."""
    tensors = saved.boxes.tensors
    sizes = [tensors.shape(number) for number in range(len(tensors.names))]
    num_elements = [int(np.prod(shape, dtype=np.int64)) for shape in sizes]
    total = {
        "total_size": int(np.dot(num_elements, tensors.itemsizes)),
        "total_parameters": sum(num_elements),
    }
    index = json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=2)
    return INDEX_NAME, index.encode()


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


def existing(storage: Storage) -> Existing | None:
    """The weights that are there."""
    if exists(storage, FILE_NAME):
        return Existing(FILE_NAME, paths=(FILE_NAME,))
    try:
        text = storage.read(INDEX_NAME)
    except CheckpointNotFoundError:
        return None
    try:
        names = sorted(set(msgspec.json.decode(text, type=_Index).weight_map.values()))
    except msgspec.MsgspecError:
        names = []  # which files belong to it is unknown, and they stay
    own = [name for name in names if name.startswith(_STEM) and name.endswith(_SUFFIX)]
    return Existing(INDEX_NAME, paths=(INDEX_NAME, *own))


HUGGINGFACE = Writer(
    "huggingface",
    huggingface_files,
    frames,
    small_files,
    existing,
    has_metadata=True,
    has_shared_files=True,
    own_grid=own_files,
    options=("max_shard_bytes",),
)
SAFETENSORS = Writer(
    "safetensors", single_file, frames, small_files, existing, has_shared_files=True
)
