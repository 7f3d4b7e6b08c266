"""Writing the weights of Hugging Face models: safetensors files of whole tensors, and their index.

Rank 0 decides which tensor lies where in which file (`weight_files`), and all ranks write their
boxes there (`whole_tensors`). When all files are durable they get their names, and the index, which
says that they belong together, comes last; a single file exists when it has its name.

In an object store a file has one writer, which collects its tensors. The id of the save is a part
of the names of files there, and an index names them, also if it is one file. Where a single file is
asked for, it exists when its upload is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from remesh.core.tables import Cuts, TensorTable
from remesh.errors import CheckpointNotFoundError, StateError
from remesh.formats import whole_tensors
from remesh.formats.building import exists
from remesh.formats.checks import MALFORMED
from remesh.formats.framing import Existing, Grid, Rename, Saved, SmallFile, Writer
from remesh.formats.native import ValuesDocument
from remesh.formats.weight_files import (
    FileTensor,
    SafetensorsContent,
    file_names,
    split_into_files,
)
from remesh.formats.whole_tensors import (
    WholeFile,
    WholeFiles,
    decode_files,
    renames,
    written_name,
)
from remesh.storage import Storage

MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors that a file has at most, if nothing is said."""

_STEM, SUFFIX = "model", ".safetensors"
FILE_NAME = f"{_STEM}{SUFFIX}"
INDEX_NAME = f"{FILE_NAME}.index.json"
CONFIG_NAME = "config.json"


def index_name(stem: str) -> str:
    """Name of the index of files whose names begin so."""
    return f"{stem}{SUFFIX}.index.json"


def plan_files(
    tensors: TensorTable, document: ValuesDocument, max_shard_bytes: int | None, stem: str = _STEM
) -> Grid:
    """The files, and where the tensors lie in them. `stem` begins their names."""
    check_is_weights(document)
    weights = [
        FileTensor(name, tensors.dtype(number).name, tensors.shape(number))
        for number, name in enumerate(tensors.names)
    ]
    shards = split_into_files(weights, max_shard_bytes)
    contents = [SafetensorsContent(shard) for shard in shards]
    names = file_names(stem, SUFFIX, len(shards))
    files = [
        WholeFile(name, content.num_bytes, [(0, content.header)])
        for name, content in zip(names, contents, strict=True)
    ]
    places = {
        weight.name: (number, position)
        for number, (shard, content) in enumerate(zip(shards, contents, strict=True))
        for weight, position in zip(shard, content.positions, strict=True)
    }
    return WholeFiles(files, places, index_name(stem)).encode()


def check_is_weights(document: ValuesDocument) -> None:
    """Check that there is nothing but tensors."""
    others = sorted([*document.values, *document.lists, *document.objects])
    if others:
        raise StateError(
            "safetensors files hold tensors alone\n"
            f"The state has {len(others)} other entries: "
            f"{', '.join(others[:5])}{', ...' if len(others) > 5 else ''}. Save the weights "
            "by themselves: remesh.save(model, path, format=...); in a conversion, delete "
            "the others with its transformation"
        )


def huggingface_files(cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> Grid:
    """Where the tensors lie: in several files, if there is much."""
    return plan_files(cuts.tensors, document, limit_of(options))


def limit_of(options: Mapping[str, object]) -> int:
    """Bytes of tensors that a file has at most."""
    limit = options.get("max_shard_bytes", MAX_SHARD_BYTES)
    if not isinstance(limit, int) or limit < 1:
        raise StateError(f"max_shard_bytes must be a number of bytes, not {limit!r}")
    return limit


def single_file(cuts: Cuts, document: ValuesDocument, _options: Mapping[str, object]) -> Grid:
    """Where the tensors lie in a single file."""
    return plan_files(cuts.tensors, document, None)


def config_and_renames(saved: Saved) -> list[SmallFile | Rename]:
    """The configuration, and the files under their final names."""
    steps: list[SmallFile | Rename] = []
    if saved.metadata:
        text = json.dumps(dict(saved.metadata), indent=2, sort_keys=True) + "\n"
        steps.append((CONFIG_NAME, text.encode()))
    return [*steps, *renames(saved)]


def small_files(saved: Saved) -> Sequence[SmallFile | Rename]:
    """The configuration, the files under their final names, and the index of several files."""
    plan, steps = decode_files(saved.grid), config_and_renames(saved)
    if len(plan.files) == 1 and plan.names != "by_save":
        return steps
    names = [
        written_name(plan, number, saved.save_id) if plan.names == "by_save" else file.name
        for number, file in enumerate(plan.files)
    ]
    places = {name: names[number] for name, (number, _) in plan.places.items()}
    return [*steps, _index_file(saved, plan.index, places)]


def _index_file(saved: Saved, name: str, places: Mapping[str, str]) -> SmallFile:
    """The file that says which tensor lies in which file."""
    tensors = saved.cuts.tensors
    sizes = [tensors.shape(number) for number in range(len(tensors.names))]
    num_elements = [int(np.prod(shape, dtype=np.int64)) for shape in sizes]
    total = {
        "total_size": int(np.dot(num_elements, tensors.itemsizes)),
        "total_parameters": sum(num_elements),
    }
    index = json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=2)
    return name, index.encode()


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


def existing(storage: Storage, _options: Mapping[str, object]) -> Existing | None:
    """The weights that are there."""
    if exists(storage, FILE_NAME):
        return Existing(FILE_NAME, paths=(FILE_NAME,))
    try:
        names = indexed_files(storage, INDEX_NAME)
    except CheckpointNotFoundError:
        return None
    own = [name for name in names if name.startswith(_STEM) and name.endswith(SUFFIX)]
    return Existing(INDEX_NAME, paths=(INDEX_NAME, *own))


def indexed_files(storage: Storage, index: str) -> list[str]:
    """The files that an index names; none if it is damaged, so that they stay."""
    text = storage.read(index)
    try:
        return sorted(set(msgspec.json.decode(text, type=_Index).weight_map.values()))
    except MALFORMED:
        return []


HUGGINGFACE = Writer(
    "huggingface",
    huggingface_files,
    whole_tensors.frames,
    small_files,
    existing,
    has_metadata=True,
    object_names="by_save",
    options=("max_shard_bytes",),
)
SAFETENSORS = Writer(
    "safetensors", single_file, whole_tensors.frames, small_files, existing, object_names="final"
)
