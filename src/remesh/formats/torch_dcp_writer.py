"""Writing what `torch.distributed.checkpoint` and Megatron's `torch_dist` read.

Every rank writes one file of archives back to back (see `ArchiveLayout`), and another one for the
tensors that the option `separation_hint` sets apart. Rank 0 writes one more with the values, each
an archive of its own, and then `.metadata`. File names carry the id of the save, so that a save
never meets the files of another; `.metadata` says which ones count.

For Megatron, values that are equal on all ranks go to `common.pt`, nested as they were, and
`metadata.json` comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from remesh.core import values
from remesh.core.dtypes import DType
from remesh.core.geometry import Box, IntArray, row_products
from remesh.core.state import Path, assemble, name_of
from remesh.core.tables import BoxTable, Cuts
from remesh.errors import CheckpointError, StateError
from remesh.formats.archive import ArchiveLayout, archive_of, tensor_record
from remesh.formats.building import IndexBuilder
from remesh.formats.framing import (
    Existing,
    Frame,
    Grid,
    Saved,
    SmallFile,
    Writer,
)
from remesh.formats.native import ValuesDocument
from remesh.formats.pickle_records import Name, Record
from remesh.formats.pickle_writer import dumps
from remesh.formats.place import Place
from remesh.formats.torch_dcp import (
    COMMON_NAME,
    FLAT_SHAPE,
    FLAT_SHAPES,
    METADATA_NAME,
    is_flattened,
    read,
)
from remesh.storage import Storage

CONFIG_NAME = "metadata.json"
_METADATA = "torch.distributed.checkpoint.metadata"
_Place = tuple[str, int, int]
"""File, first byte and length of an archive."""


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
    fillers: list[tuple[int, bytes]] = []
    pickles: dict[tuple[str, tuple[int, ...]], bytes] = {}
    at = 0
    for row in rows.tolist():
        box, dtype = boxes.box(row), boxes.tensors.dtype(int(boxes.tensor[row]))
        pickled = pickles.get((dtype.name, box.shape))
        if pickled is None:
            pickled = dumps(tensor_record(dtype, box.shape, "0"))
            pickles[dtype.name, box.shape] = pickled
        archive = ArchiveLayout(pickled, [box.size * dtype.itemsize], at)
        fillers += archive.fillers
        positions += archive.positions
        at += archive.num_bytes
    return Frame(path, at, rows, np.array(positions), fillers=tuple(fillers))


def _dcp_leaves(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """A plain value as torch takes it apart: dicts, and lists that hold any, at any depth."""
    if isinstance(value, Mapping):
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


def common_file(document: ValuesDocument) -> SmallFile:
    """Megatron's file of the values that are equal on all ranks, nested as they were."""
    common: dict[Path, object] = {
        document.path_of(name): values.decode(bytes(raw)) for name, raw in document.values.items()
    }
    common |= {document.path_of(name): list(items) for name, items in document.lists.items()}
    sequences = {tuple(path): kind for path, kind in document.sequences}
    return COMMON_NAME, archive_of(assemble(common, sequences), COMMON_NAME)


def config_file(backend: str) -> SmallFile:
    """Megatron's file that says which backends wrote a checkpoint; its last one."""
    config = {
        "sharded_backend": backend,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    return CONFIG_NAME, msgspec.json.encode(config)


def _objects(saved: Saved) -> dict[str, object]:
    """The elements of grids of values; Megatron keeps each in a list."""
    return {
        name: [values.decode(bytes(element.value))]
        for name, element in saved.document.objects.items()
    }


def _tensor_names(saved: Saved) -> list[str]:
    return [*saved.cuts.tensors.names, *saved.document.aliases]


def _dcp_path(saved: Saved, name: str) -> tuple[str | int, ...]:
    """The place of a name as torch writes it: numbers are places in lists, all else is text."""
    path = saved.document.path_of(name)
    lists = {tuple(at) for at, _ in saved.document.sequences}
    return tuple(
        key if isinstance(key, int) and path[:number] in lists else str(key)
        for number, key in enumerate(path)
    )


def _value_file_and_metadata(
    saved: Saved, objects: Mapping[str, object], paths: Mapping[str, Path] | None
) -> list[SmallFile]:
    """The file of archives of values, if there are any, and the metadata of everything."""
    path, data = _file_name(0, 1, saved.save_id), bytearray()
    entries: dict[str, Record] = {}
    storage: dict[Record, Record] = {}
    sizes = _Sizes()
    for name, value in objects.items():
        archive = archive_of(value, name)
        entries[name] = Record(f"{_METADATA}.BytesStorageMetadata", is_new=True)
        storage[_key(name, None, None)] = _info((path, len(data), len(archive)))
        data += archive
    places = _places(saved)
    chunks: dict[int, list[tuple[Box, _Place]]] = {}
    for row in range(len(saved.boxes)):
        box = saved.boxes.box(row)
        chunks.setdefault(int(saved.boxes.tensor[row]), []).append((box, places[row]))
    tensors = saved.cuts.tensors
    numbers = {name: number for number, name in enumerate(tensors.names)}
    numbers |= {alias: numbers[name] for alias, name in saved.document.aliases.items()}
    for name, number in numbers.items():
        found = chunks.get(number, [])
        boxes = [box for box, _ in found]
        entries[name] = _tensor_entry(tensors.dtype(number), tensors.shape(number), boxes, sizes)
        for hint, (box, place) in enumerate(found):
            storage[_key(name, sizes[box.offset], hint)] = _info(place)
    flat = _flat_shapes(saved.options)
    save: dict[str, object] = {
        "checkpoint_id": None,
        "save_id": saved.save_id,
        "load_id": None,
        "modules": [],
    }
    state: dict[str, Any] = {
        "state_dict_metadata": entries,
        "planner_data": paths,
        "storage_data": storage,
        "storage_meta": _made("StorageMeta", save),
        "version": "1.0.0",
    }
    if flat:
        state[FLAT_SHAPES] = {
            name: {FLAT_SHAPE: sizes[flat[name]]} if name in flat else {} for name in numbers
        }
    files = [(path, bytes(data))] if data else []
    return [*files, (METADATA_NAME, dumps(_made("Metadata", state)))]


def _places(saved: Saved) -> dict[int, _Place]:
    """Where the archive of each box lies, from the same plan by which its rank wrote it."""
    places = {}
    for rank, rows in enumerate(saved.assignments):
        for file in DcpWriter().frames(saved.boxes, rows, rank, saved.save_id, saved.grid):
            # Heads and tails alternate, so each archive begins at every other filler.
            begins = [position for position, _ in file.fillers[::2]]
            ends = [*begins[1:], file.num_bytes]
            for row, begin, end in zip(file.rows.tolist(), begins, ends, strict=True):
                places[row] = (file.path, begin, end - begin)
    return places


class _Sizes(dict[tuple[int, ...], Record]):
    """`torch.Size` of each shape and offset; a pickle holds what is used again once."""

    def __missing__(self, numbers: tuple[int, ...]) -> Record:
        found = self[numbers] = Record("torch.Size", (numbers,))
        return found


def _made(kind: str, state: object) -> Record:
    return Record(f"{_METADATA}.{kind}", is_new=True, state=state)


def _tensor_entry(dtype: DType, shape: tuple[int, ...], boxes: list[Box], sizes: _Sizes) -> Record:
    layout = Record("torch.serialization._get_layout", ("torch.strided",))
    memory_format = Record(f"{_METADATA}._MEM_FORMAT_ENCODING", (0,))
    properties = (Name(f"torch.{dtype.name}"), layout, False, memory_format, False)
    chunks = [
        _made("ChunkStorageMetadata", {"offsets": sizes[box.offset], "sizes": sizes[box.shape]})
        for box in boxes
    ]
    state = {"properties": _made("TensorProperties", properties), "size": sizes[shape]}
    return _made("TensorStorageMetadata", {**state, "chunks": chunks})


def _key(name: str, offset: Record | None, hint: int | None) -> Record:
    place = {} if offset is None else {"offset": offset}
    return _made("MetadataIndex", {"fqn": name, "index": hint, **place})


def _info(place: _Place) -> Record:
    path, offset, length = place
    state = {"relative_path": path, "offset": offset, "length": length}
    return Record("torch.distributed.checkpoint.filesystem._StorageInfo", is_new=True, state=state)


class DcpWriter(Writer):
    """Writes checkpoints of `torch.distributed.checkpoint`."""

    name = "torch_dcp"
    options = ("separation_hint", "flat_shapes")

    def grid(self, cuts: Cuts, _document: ValuesDocument, options: Mapping[str, object]) -> Grid:
        """The option `separation_hint`: what the names of tensors begin with that lie apart."""
        _check_flat_shapes(cuts, options)
        hint = options.get("separation_hint", "")
        if not isinstance(hint, str) or "/" in hint:
            raise StateError(
                f"separation_hint={hint!r}: names of files begin with it, so it is a text without "
                "'/'"
            )
        return hint.encode()

    def frames(
        self, boxes: BoxTable, rows: IntArray, rank: int, save_id: str, grid: Grid
    ) -> list[Frame]:
        """The data file of a rank, and another one for the tensors that `separation_hint` names."""
        hint, names, name = grid.decode(), boxes.tensors.names, _file_name(rank, 0, save_id)
        apart = np.array(
            [
                bool(hint) and names[tensor].startswith(hint)
                for tensor in boxes.tensor[rows].tolist()
            ],
            dtype=bool,
        )
        files = [(name, rows[~apart]), (hint + name, rows[apart])]
        return [_frame(boxes, rows, path) for path, rows in files if len(rows)]

    def small_files(self, saved: Saved) -> list[SmallFile]:
        document = saved.document
        objects: dict[str, object] = {}
        paths = {name: _dcp_path(saved, name) for name in _tensor_names(saved)}
        for name, raw in document.values.items():
            for path, leaf in _dcp_leaves(_dcp_path(saved, name), values.decode(bytes(raw))):
                paths[name_of(path)], objects[name_of(path)] = path, leaf
        for name, items in document.lists.items():
            paths[name], objects[name] = _dcp_path(saved, name), list(items)
        paths |= {name: (name,) for name in document.objects}
        return _value_file_and_metadata(saved, {**objects, **_objects(saved)}, paths)

    def existing(self, storage: Storage, _options: Mapping[str, object]) -> Existing | None:
        """The checkpoint that is there, of torch or of Megatron."""
        if not storage.exists(METADATA_NAME):
            return None
        place = Place(storage)
        builder = IndexBuilder(storage, place.listing)
        try:
            read(place, builder)
            files = [file.path for file in builder.build().files]
        except CheckpointError:
            return Existing(METADATA_NAME)  # what it refers to is unknown, and stays
        beside = (path for path in (COMMON_NAME, CONFIG_NAME) if storage.exists(path))
        return Existing(METADATA_NAME, paths=tuple(dict.fromkeys((METADATA_NAME, *beside, *files))))


class TorchDistWriter(DcpWriter):
    """Writes Megatron's `torch_dist`."""

    name = "torch_dist"

    def small_files(self, saved: Saved) -> list[SmallFile]:
        """The objects, `common.pt`, `.metadata` and `metadata.json`."""
        return [
            common_file(saved.document),
            *_value_file_and_metadata(saved, _objects(saved), None),
            config_file("torch_dist"),
        ]


WRITERS = (DcpWriter(), TorchDistWriter())
