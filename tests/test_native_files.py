"""remesh's own format: data files that other programs can open, and finding what is damaged."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from remesh.core.dtypes import BY_NAME, DTYPES
from remesh.core.geometry import Box
from remesh.core.index import Index, StoredFile
from remesh.core.integrity import WrittenFile, block_digests, hex_digest
from remesh.core.safetensors_file import decode_header
from remesh.core.tables import BoxTable, Cuts, TensorTable
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError
from remesh.formats import native, native_writer
from remesh.formats.native import CommitRecord, FileRecord, ValuesDocument
from remesh.formats.writer import Part, part_of
from remesh.storage import MemoryStorage
from tests.test_native import example_document, plain, record_of

# ---------------------------------------------------------------------------------------------
# Data files
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Written:
    """A checkpoint's data files, made by hand from its parts."""

    files: list[bytes]
    index: Index


def pattern(dtype: str, box: Box, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The bytes of a box, (*box shape, itemsize), of a tensor whose bytes count up."""
    itemsize = BY_NAME[dtype].itemsize
    whole = np.arange(int(np.prod(shape, dtype=int)) * itemsize) % 61
    return whole.astype(np.uint8).reshape(*shape, itemsize)[box.slices]


def write(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], ranks: list[list[tuple[int, Box]]]
) -> Written:
    table = TensorTable.of(tensors)
    rows = sorted(row for held in ranks for row in held)
    boxes = BoxTable.of(table, rows)
    files, assignments = [], []
    parts: list[list[Part]] = []
    for rank, held in enumerate(ranks):
        numbers = np.array([rows.index(row) for row in held], dtype=np.int64)
        order = np.argsort(-table.itemsizes[boxes.tensor[numbers]], kind="stable")
        numbers = numbers[order]
        header, positions, num_bytes = native_writer.data_header(boxes, numbers)
        content = bytearray(header)
        for number, position in zip(numbers.tolist(), positions.tolist(), strict=True):
            _, dtype, shape = tensors[boxes.tensor[number]]
            assert len(content) == position
            content += pattern(dtype, boxes.box(number), shape).tobytes()
        assert len(content) == num_bytes
        assignments.append(numbers)
        if not held:
            parts.append([])
            continue
        files.append(bytes(content))
        written = WrittenFile(block_digests(np.frombuffer(content, np.uint8)))
        path = native.data_path("id", rank)
        parts.append([part_of(path, num_bytes, positions, written)])
    return Written(files, native_writer.build_index(Cuts.of(boxes), assignments, parts, {}))


def written_by_three_ranks() -> Written:
    tensors = [
        ("layers.0.w", "bfloat16", (4, 6)),
        ("scale", "float64", ()),
        ("z", "complex128", (3, 2)),
        ("fp8", "float8_e4m3fn", (8,)),
        ("mask", "bool", (5,)),
        ("nothing", "int64", (0, 4)),
    ]
    return write(
        tensors,
        [
            [(0, Box((0, 0), (4, 2))), (3, Box((0,), (8,))), (2, Box((0, 0), (1, 2)))],
            [],
            [
                (0, Box((0, 2), (4, 4))),
                (1, Box((), ())),
                (2, Box((1, 0), (2, 2))),
                (4, Box((0,), (5,))),
            ],
        ],
    )


def test_pieces_are_named_by_tensor_and_offset(tmp_path: Path) -> None:
    written = written_by_three_ranks()
    names = []
    for number, content in enumerate(written.files):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with safetensors.safe_open(path, "pt") as file:
            names.append(set(file.keys()))
            assert file.metadata()["format"] == "remesh"
    assert names == [
        {"layers.0.w@0,0", "fp8", "z@0,0"},
        {"layers.0.w@0,2", "scale", "z@1,0", "mask"},
    ]


def test_the_safetensors_library_reads_every_piece(tmp_path: Path) -> None:
    written = written_by_three_ranks()
    found: dict[str, torch.Tensor] = {}
    for number, content in enumerate(written.files):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with safetensors.safe_open(path, "pt") as file:
            found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    kinds = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in found.items()}
    assert kinds == {
        "layers.0.w@0,0": (torch.bfloat16, (4, 2)),
        "layers.0.w@0,2": (torch.bfloat16, (4, 4)),
        "fp8": (torch.float8_e4m3fn, (8,)),
        "scale": (torch.float64, ()),
        "mask": (torch.bool, (5,)),
        # complex128 has no code; a pair of real numbers has the same bytes.
        "z@0,0": (torch.float64, (1, 2, 2)),
        "z@1,0": (torch.float64, (2, 2, 2)),
    }
    joined = torch.cat([found["layers.0.w@0,0"], found["layers.0.w@0,2"]], dim=1)
    expected = pattern("bfloat16", Box.whole((4, 6)), (4, 6))
    assert joined.view(torch.uint8).numpy().tobytes() == expected.tobytes()
    pairs = torch.view_as_complex(torch.cat([found["z@0,0"], found["z@1,0"]]))
    expected = pattern("complex128", Box.whole((3, 2)), (3, 2))
    assert pairs.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_every_dtype_can_be_opened(dtype: str, tmp_path: Path) -> None:
    shape = (3, 4)
    [content] = write([("t", dtype, shape)], [[(0, Box.whole(shape))]]).files
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    with safetensors.safe_open(path, "pt") as file:
        tensor = file.get_tensor("t")
    expected = pattern(dtype, Box.whole(shape), shape)
    assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == expected.tobytes()
    if not BY_NAME[dtype].pairs:
        called = BY_NAME[dtype].carrier.name if BY_NAME[dtype].is_opaque else dtype
        assert str(tensor.dtype) == f"torch.{called}"
        assert tuple(tensor.shape) == shape


def test_names_that_meet_are_told_apart() -> None:
    tensors = [("a", "int8", (4,)), ("a@2", "int8", (1,)), ("a@2'", "int8", (1,))]
    pieces = [
        (0, Box((0,), (2,))),
        (0, Box((2,), (2,))),
        (1, Box((0,), (1,))),
        (2, Box((0,), (1,))),
    ]
    [content] = write(tensors, [pieces]).files
    header = decode_header(content, "f")
    assert set(header.entries) == {"a@0", "a@2", "a@2'", "a@2''"}
    assert json.loads(header.metadata["pieces"])["a@2"] == ["a", "int8", [4], [2]]
    assert json.loads(header.metadata["pieces"])["a@2'"] == ["a@2", "int8", [1], [0]]


def test_a_tensor_may_be_called_like_the_metadata(tmp_path: Path) -> None:
    [content] = write([("__metadata__", "int8", (4,))], [[(0, Box((0,), (4,)))]]).files
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    with safetensors.safe_open(path, "pt") as file:
        assert file.keys() == ["__metadata__'"]
        assert json.loads(file.metadata()["pieces"]) == {
            "__metadata__'": ["__metadata__", "int8", [4], [0]]
        }


def test_the_index_says_where_every_piece_is() -> None:
    written = written_by_three_ranks()
    index = written.index
    assert [file.path for file in index.files] == [
        "data-id/00000.safetensors",
        "data-id/00002.safetensors",
    ]
    contents = dict(zip([file.path for file in index.files], written.files, strict=True))
    for name, stored in index.items():
        for piece in index.pieces(name):
            data = contents[piece.path][piece.position : piece.position + piece.num_bytes]
            assert data == pattern(stored.dtype, piece.box, stored.shape).tobytes()
            assert piece.position % BY_NAME[stored.dtype].itemsize == 0
    assert index.pieces("nothing") == []


def test_the_index_can_be_made_again_from_the_headers() -> None:
    written = written_by_three_ranks()
    found: dict[str, set[tuple[str, tuple[int, ...], Box, str, int, int]]] = {}
    for file, content in zip(written.index.files, written.files, strict=True):
        header = decode_header(content, file.path)
        for key, (name, dtype, shape, offset) in json.loads(header.metadata["pieces"]).items():
            entry = header.entries[key]
            extents = entry.shape[: len(shape)]
            start, stop = entry.data_offsets
            found.setdefault(name, set()).add(
                (
                    dtype,
                    tuple(shape),
                    Box(tuple(offset), tuple(extents)),
                    file.path,
                    header.data_start + start,
                    stop - start,
                )
            )
    index = written.index
    assert found == {
        name: {
            (stored.dtype, stored.shape, piece.box, piece.path, piece.position, piece.num_bytes)
            for piece in index.pieces(name)
        }
        for name, stored in index.items()
        if stored.num_pieces
    }


def test_file_digests_are_digests_of_block_digests() -> None:
    index = written_by_three_ranks().index
    bounds = index.first_block.tolist()
    assert [file.digest for file in native.records_of_files(index)] == [
        hex_digest(b"".join(struct.pack("<QQ", *pair) for pair in index.digests[a:b].tolist()))
        for a, b in pairwise(bounds)
    ]


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def committed() -> tuple[MemoryStorage, CommitRecord, Index]:
    """A checkpoint in memory, with its record and index."""
    written, storage = written_by_three_ranks(), MemoryStorage()
    small = {"data-id/index.safetensors": written.index.encode()}
    small["data-id/values.msgpack"] = example_document().encode()
    paths = [file.path for file in written.index.files]
    for path, content in (*small.items(), *zip(paths, written.files, strict=True)):
        storage.put(path, content, overwrite=False)
    index_file, values_file = (
        FileRecord(path=path, num_bytes=len(content), digest=hex_digest(content))
        for path, content in small.items()
    )
    record = record_of(
        save_id="id",
        index=index_file,
        values=values_file,
        files=native.records_of_files(written.index),
    )
    storage.put(native.RECORD_NAME, native.encode_record(record), overwrite=False)
    return storage, record, written.index


def test_the_small_files_are_read_and_checked() -> None:
    storage, record, index = committed()
    files = native.read_small_files(storage)
    assert files.record == record
    assert dict(Index.decode(files.index_bytes, "f")) == dict(index)
    assert plain(ValuesDocument.decode(files.values_bytes, "f")) == plain(example_document())
    assert native.check_files(storage, record, index) == []


@pytest.mark.parametrize("name", ["index.safetensors", "values.msgpack"])
@pytest.mark.parametrize("damage", ["flip", "cut", "extend", "delete"])
def test_damaged_small_files_are_found(name: str, damage: str) -> None:
    storage, _, _ = committed()
    path = f"data-id/{name}"
    data = bytearray(storage.read(path))
    if damage == "flip":
        data[len(data) // 2] ^= 0x10
    elif damage == "cut":
        del data[-1]
    else:
        data += b"\0"
    storage.delete(path)
    if damage != "delete":
        storage.put(path, bytes(data), overwrite=False)
    with pytest.raises(CorruptCheckpointError, match=f"{path}: (not what was written|missing)"):
        native.read_small_files(storage)


def test_without_a_record_there_is_no_checkpoint() -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint there \(no remesh\.json\)"):
        native.read_record(MemoryStorage())


def test_missing_and_short_data_files_are_found() -> None:
    storage, record, index = committed()
    first, second = record.files
    short = storage.read(first.path)[:-4]
    storage.put(first.path, short, overwrite=True)
    storage.delete(second.path)
    damages = native.check_files(storage, record, index)
    assert [(d.file, d.start, d.stop) for d in damages] == [
        (first.path, first.num_bytes - 4, first.num_bytes),
        (second.path, 0, second.num_bytes),
    ]
    assert damages[0].tensors == ("fp8",)
    assert set(damages[1].tensors) == {"layers.0.w", "scale", "z", "mask"}


def test_an_index_of_another_save_is_found() -> None:
    storage, record, index = committed()
    other = dataclasses.replace(index, digests=index.digests + np.uint64(1))
    with pytest.raises(CorruptCheckpointError, match="disagree about the data files"):
        native.check_files(storage, record, other)
    other = dataclasses.replace(
        index,
        files=(StoredFile("data-x/00000.safetensors", index.files[0].num_bytes), index.files[1]),
    )
    with pytest.raises(CorruptCheckpointError, match="belong to different saves"):
        native.check_files(storage, record, other)


def test_paths_of_a_save() -> None:
    assert native.data_folder("ab12") == "data-ab12"
    assert native.data_path("ab12", 7) == "data-ab12/00007.safetensors"
    assert native.data_path("ab12", 123456) == "data-ab12/123456.safetensors"
