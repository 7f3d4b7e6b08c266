"""Writing checkpoints of Paddle's Flex Checkpoint, with safetensors files (`paddle_safetensors`).

::

    0.metadata       a pickle of Paddle's classes: the boxes of each tensor, and which file has each
    3_0.distcp       a safetensors file with the boxes that rank 3 writes, under the tensors' names
    3_1_0.distcp     a second box of one of these tensors, and so on

This is what `paddle.distributed.save_state_dict(..., safetensors=True)` leaves, so every rank
writes the bytes that it holds. A file holds one box of a name, as in Paddle. All names end with the
number of the checkpoint, by which Paddle looks for files; it is always 0 here. The metadata is
written last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from remesh.core.dtypes import DType
from remesh.core.geometry import Box, IntArray
from remesh.core.safetensors_file import encode_header
from remesh.core.tables import BoxTable, Cuts
from remesh.errors import UnsupportedValueError
from remesh.formats.framing import Existing, Frame, Grid, Saved, SmallFile, Writer
from remesh.formats.huggingface_writer import check_is_weights
from remesh.formats.native import ValuesDocument
from remesh.formats.paddle import METADATA_NAME, checkpoint_numbers, metadata_name
from remesh.formats.pickle_writer import Global, New, dumps
from remesh.storage import Storage, list_directory

NAME = "paddle_safetensors"
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
    numbers = checkpoint_numbers(filter(METADATA_NAME.fullmatch, list_directory(storage).files))
    return Existing(metadata_name(numbers[-1]), is_fixed=True) if numbers else None


PADDLE_SAFETENSORS = Writer(NAME, no_values, frames, small_files, existing)
