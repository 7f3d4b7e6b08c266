"""The index: comes back from its stored form, and refuses what cannot be one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from remesh.core.dtypes import DTYPES
from remesh.core.geometry import Box
from remesh.core.index import LISTS, MIN_ROWS, Index, Piece, StoredFile, StoredTensor
from remesh.core.packing import pack, unpack
from remesh.core.tables import BoxTable, TensorTable, decode_columns, encode_columns
from remesh.errors import CorruptCheckpointError
from tests.stored_index import Columns, packed_columns, plain_columns
from tests.test_planner import worlds


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """Tensors in pieces, in a few files, with aliases and digests."""
    index = draw(worlds()).index
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    names = index.tensors.names
    aliases = draw(
        st.dictionaries(text.filter(lambda name: name not in names), st.sampled_from(names))
    )
    columns = (index.boxes, index.file, index.position, index.files, aliases)
    if not index.block_size:
        return Index.of(*columns)
    first = np.cumsum([0, *(-(-file.num_bytes // index.block_size) for file in index.files)])
    numbers = np.arange(2 * first[-1], dtype=np.uint64).reshape(-1, 2)
    digests = numbers * np.uint64(0x9E3779B97F4A7C15)
    return Index.of(*columns, index.block_size, digests, first)


@given(indexes())
def test_an_index_comes_back(index: Index) -> None:
    back = Index.decode(index.encode(), "f")
    assert dict(back) == dict(index)
    assert back.boxes.tensors.names == index.tensors.names
    assert {name: back.pieces(name) for name in back} == {n: index.pieces(n) for n in index}
    assert (back.files, back.aliases, back.block_size) == (
        index.files,
        index.aliases,
        index.block_size,
    )
    assert (back.digests == index.digests).all()
    assert back.digests.dtype == np.uint64
    assert back.first_block.tolist() == index.first_block.tolist()
    assert back.encode() == index.encode()


@given(indexes())
def test_the_safetensors_library_reads_the_stored_form(index: Index) -> None:
    found = safetensors.numpy.load(index.encode())
    files = index.pieces_of_tensors.files.values
    assert unpack(found["piece.file"], len(files)).tolist() == files.tolist()
    assert found["block.digest"].dtype == np.uint64


def example_index() -> Index:
    table = TensorTable.of(
        [
            ("model.w", "bfloat16", (4, 6)),
            ("model.b", "float32", (6,)),
            ("scale", "float64", ()),
            ("nothing", "int8", (0, 3)),
        ]
    )
    boxes = BoxTable.of(
        table,
        [
            (0, Box((0, 0), (4, 2))),
            (0, Box((0, 2), (4, 4))),
            (1, Box((0,), (6,))),
            (2, Box((), ())),
        ],
    )
    return Index.of(
        boxes,
        np.array([0, 1, 1, 0]),
        np.array([108, 32, 8, 100]),
        (StoredFile("a", 124), StoredFile("b", 64)),
        {"head.w": "model.w"},
        64,
        np.arange(6, dtype=np.uint64).reshape(3, 2),
        np.array([0, 2, 3]),
    )


def test_what_an_index_says() -> None:
    index = example_index()
    assert list(index) == ["model.w", "model.b", "scale", "nothing", "head.w"]
    assert len(index) == 5
    assert "scale" in index
    assert "model" not in index
    assert index["model.w"] == StoredTensor("model.w", "bfloat16", (4, 6), 2, 48)
    assert index["head.w"] == StoredTensor("head.w", "bfloat16", (4, 6), 2, 48)
    assert index["scale"] == StoredTensor("scale", "float64", (), 1, 8)
    assert index["nothing"] == StoredTensor("nothing", "int8", (0, 3), 0, 0)
    assert index.pieces("head.w") == [
        Piece(Box((0, 0), (4, 2)), "a", 108, 16),
        Piece(Box((0, 2), (4, 4)), "b", 32, 32),
    ]
    assert index.pieces("scale") == [Piece(Box((), ()), "a", 100, 8)]
    assert index.pieces("nothing") == []
    assert index.row("head.w") == index.row("model.w") == 0
    with pytest.raises(KeyError):
        index["model"]
    columns, _ = decode_columns(index.encode(), "f")
    assert unpack(columns["file.position"], 2).tolist() == [100, 8], "of the first piece of each"


# ---------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------


def damaged(change: Callable[[Columns, dict[str, str]], object]) -> bytes:
    columns, metadata = plain_columns(example_index().encode())
    change(columns, metadata)
    return packed_columns(columns, metadata)


def put(name: str, place: Any, value: int) -> Callable[[Columns, dict[str, str]], object]:
    def change(columns: Columns, _metadata: dict[str, str]) -> None:
        columns[name][place] = value

    return change


def replace(name: str, column: object, dtype: Any = np.int64) -> Callable[..., object]:
    return lambda columns, _metadata: columns.update({name: np.array(column, dtype)})


def say(key: str, text: str) -> Callable[..., object]:
    return lambda _columns, metadata: metadata.update({key: text})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda columns, _: columns.pop("piece.file"), "piece.file"),
        (lambda _, metadata: metadata.pop("remesh.aliases"), "remesh.aliases"),
        (replace("tensor.dtype", [3, 1, 0]), "tensor.dtype has 3 rows"),
        (replace("piece.file", [0, 1, 1, 0], np.uint64), "piece.file is not packed"),
        (replace("block.digest", [[0, 1]] * 3), "block.digest is int64"),
        (replace("block.digest", [[0, 1, 2]] * 2, np.uint64), "a digest is not two numbers"),
        (replace("piece.file", [0, 1, 1]), "piece.file is cut"),
        (put("tensor.name_ends", 1, 3), "names overlap"),
        (put("tensor.name_ends", 3, 27), "names are cut"),
        (put("tensor.name_ends", 3, 25), "names are cut"),
        (put("tensor.name_bytes", 3, 0xFF), "invalid start byte"),
        (put("tensor.name_bytes", 13, ord("w")), "a name is used twice"),
        (put("tensor.dtype", 0, len(DTYPES)), "unknown dtype"),
        (put("tensor.dtype", 0, -1), "unknown dtype"),
        (put("tensor.ndim", 0, 3), "impossible ndim"),
        (put("tensor.ndim", 0, -1), "impossible ndim"),
        (put("tensor.ndim", 0, 1), "bad shape"),
        (put("tensor.shape", (3, 0), -1), "bad shape"),
        (put("piece.file.list", 0, 4), "piece.file lacks a list"),
        (put("piece.file.list", 0, -1), "piece.file lacks a list"),
        (put("piece.file.list", 0, 1), "piece.file has other lengths"),
        (put("piece.offset", (0, 0), -1), "impossible offset"),
        (put("piece.offset", (0, 0), 2**63 - 1), "impossible offset"),
        (put("piece.offset", (0, 0), 1), "leaves its tensor"),
        (put("piece.shape", (0, 0), 0), "a piece is empty"),
        (put("piece.shape", (0, 0), 5), "leaves its tensor"),
        (put("piece.file", 0, 2), "pieces of no file"),
        (put("piece.file", 0, -1), "pieces of no file"),
        (put("piece.step", 0, -109), "leaves its file"),
        (put("piece.step", 0, 1), "leaves its file"),
        *(
            (put(part, 0, wrong), "leaves its file")
            for part in ("tensor.position", "file.position", "piece.step")
            for wrong in (-120, 200, 2**63 - 1, -(2**63))
        ),
        (put("piece.step.ends", 0, 4), "piece.step overlaps"),
        (put("piece.step.ends", 2, 4), "piece.step is cut"),
        (put("piece.shape", (0, 0), 2**62), "leaves its tensor"),
        (put("block.first", 1, 1), "files and blocks differ"),
        (replace("block.first", [0, 2]), "files and blocks differ"),
        (replace("block.digest", [[0, 1]] * 4, np.uint64), "files and digests differ"),
        (say("remesh.files", "[]"), "file.position: 2 numbers"),
        (say("remesh.files", '[["a",124]]'), "file.position: 2 numbers"),
        (say("remesh.files", '[["a",124],["b",-1]]'), "impossible size"),
        (say("remesh.files", f'[["a",{2**70}],["b",64]]'), "impossible size"),
        (say("remesh.files", '{"a":1}'), "Expected"),
        (say("remesh.aliases", '{"head.w":"gone"}'), "gone"),
        (say("remesh.aliases", '{"scale":"model.w"}'), "a name is used twice"),
        (say("remesh.aliases", "[]"), "Expected"),
        (say("remesh.block_size", "-64"), "impossible size of blocks"),
        (say("remesh.block_size", "9" * 30), "impossible size of blocks"),
        (say("remesh.block_size", "32"), "files and blocks differ"),
        (say("remesh.block_size", "many"), "invalid literal"),
    ],
)
def test_what_does_not_fit_is_corruption(change: Any, complaint: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^some/file: not an index") as caught:
        Index.decode(damaged(change), "some/file")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words", "complaint"),
    [
        ("piece.file", [], "words are missing"),
        ("piece.file", [0, 5, 1], "words are missing"),
        ("piece.file", [0, 1, 1, 1], "1 words too many"),
        ("piece.file", [0, -1], "-1 numbers"),
        ("piece.file", [2, 0], "packed as 2"),
        ("piece.file", [1, 4, 0, 1, 0, 0, 1, 0, 0, 1, 5], "runs that are not 4 numbers"),
        ("piece.file", [1, 4, 0, 1, 0, 0, 1, 0, 0, 2, 3, 1], "runs that are not 4 numbers"),
        ("piece.file", [1, 2] * 5, "packed as 1, 4 deep"),
        ("tensor.position", [0, 3, 0, 0, 0], "has 3 rows"),
        ("file.position", [0, 1, 8], "positions of other files"),
        ("tensor.shape", [0, 7, 6, 1, 0, 6, 1, 1, 3], "tensor.shape has 7 numbers"),
        ("piece.offset", [0, 5, 0, 0, 0, 2, 0], "piece.offset has 5 numbers"),
    ],
)
def test_words_that_are_no_column_are_corruption(
    name: str, words: list[int], complaint: str
) -> None:
    columns, metadata = decode_columns(example_index().encode(), "f")
    changed = columns | {name: np.array(words, dtype=np.int64)}
    with pytest.raises(CorruptCheckpointError, match=r"^f: not an index") as caught:
        Index.decode(encode_columns(changed, metadata), "f")
    assert complaint in str(caught.value)


def test_a_few_words_do_not_stand_for_more_pieces_than_an_index_may_have() -> None:
    def refused(index: Index, change: Columns) -> None:
        columns, metadata = decode_columns(index.encode(), "f")
        with pytest.raises(CorruptCheckpointError, match=r"numbers in|pieces"):
            Index.decode(encode_columns(columns | change, metadata), "f")

    refused(
        regular_index(1, 1), {"piece.file": np.array([1, 2**40, 0, 1, 0, 0, 1, 0, 0, 1, 2**40])}
    )
    # More tensors than there are bytes of names, or positions than files.
    run = np.array([1, MIN_ROWS, 0, 1, 0, 0, 1, 0, 0, 1, MIN_ROWS])
    of_tensors = ("name_ends", "dtype", "ndim", "position", "shape")
    names = [f"tensor.{what}" for what in of_tensors] + [f"{name}.list" for name in LISTS]
    empty = {"tensor.name_bytes": np.zeros(0, np.uint8)}
    refused(regular_index(1, 1), dict.fromkeys(names, run) | empty)
    for name in ("file.position", "block.first"):
        refused(regular_index(1, 1), {name: run})
    # Many tensors share one long list.
    index = regular_index(64, 1, MIN_ROWS // 16)
    columns, metadata = decode_columns(index.encode(), "f")
    assert len(columns["padding"]) > 0
    assert Index.decode(encode_columns(columns, metadata), "f").num_pieces == 4 * MIN_ROWS
    refused(index, {"padding": np.zeros(0, np.uint8)})


def regular_index(num_tensors: int, num_files: int, num_rows: int = 1) -> Index:
    """Tensors of rows, a piece each, some of each tensor in each file."""
    table = TensorTable.of(
        [(f"{n}", "int8", (num_files * num_rows, 2)) for n in range(num_tensors)]
    )
    row = np.tile(np.arange(num_files * num_rows), num_tensors)
    tensor = np.repeat(np.arange(num_tensors), num_files * num_rows)
    offsets = np.stack([row, np.zeros_like(row)], axis=1)
    boxes = BoxTable(table, tensor, offsets, np.tile(np.array([1, 2]), (len(row), 1)))
    files = tuple(StoredFile("f", 100 + 2 * num_tensors * num_rows) for _ in range(num_files))
    position = 100 + 2 * (tensor * num_rows + row % num_rows)
    return Index.of(boxes, row // num_rows, position, files)


def test_tensors_that_are_cut_alike_share_their_lists() -> None:
    index = regular_index(50, 64)
    assert [len(lists.ends) for lists in index.pieces_of_tensors.lists] == [1] * 4
    back = Index.decode(index.encode(), "f")
    assert back.position.tolist() == (100 + 2 * np.repeat(np.arange(50), 64)).tolist()
    assert back.num_bytes == 50 * 64 * 2
    alike = regular_index(1000, 64)
    tracemalloc.start()
    try:
        assert alike.num_bytes == 1000 * 64 * 2
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * alike.num_pieces  # no row for each piece
    kept = back.without(lambda name: name != "7")
    assert kept.pieces("7") == index.pieces("7")
    sizes = [len(regular_index(1000, num_files).encode()) for num_files in (64, 1024)]
    # Beside the names there are the files, which are some bytes each.
    assert sizes[1] - sizes[0] < 20 * 1024


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(-2, 2), st.integers(1, 30)), max_size=12),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.integers(1, 9),
)
def test_columns_come_back_from_their_words(
    runs: list[tuple[int, int, int]], plain: list[int], times: int
) -> None:
    parts = [first + step * np.arange(count) for first, step, count in runs]
    column = np.tile(np.concatenate([*parts, np.array(plain, dtype=np.int64)]), times)
    column = column.astype(np.int64)
    words = pack(column)
    assert unpack(words, len(column)).tolist() == column.tolist()
    assert len(words) <= len(column) + 2


def test_grids_take_a_few_words() -> None:
    rows, columns = np.divmod(np.arange(64 * 256), 256)
    for column in (rows * 8, columns * 3, columns * 64 + rows, np.tile(columns, 3)):
        assert len(pack(column)) < 50


def test_a_size_beyond_integers_does_not_look_small() -> None:
    def huge(columns: Columns, _metadata: dict[str, str]) -> None:
        columns["tensor.shape"][0] = columns["piece.shape"][0] = (2**32, 2**32)

    with pytest.raises(CorruptCheckpointError, match="too large"):
        Index.decode(damaged(huge), "f")


@given(indexes(), st.data())
def test_damaged_bytes_are_corruption_or_an_index(index: Index, data: st.DataObject) -> None:
    stored = bytearray(index.encode())
    # Most of the header is padding, which is not worth damaging.
    text_end = stored.index(b"  ") if b"  " in stored else len(stored)
    data_start = 8 + int.from_bytes(stored[:8], "little")
    places = [*range(text_end), *range(data_start, len(stored))]
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        stored[place] = data.draw(st.integers(0, 255))
    try:
        found = Index.decode(bytes(stored), "f")
    except CorruptCheckpointError:
        return
    for name in found:
        for piece in found.pieces(name):
            size = next(file.num_bytes for file in found.files if file.path == piece.path)
            assert 0 <= piece.position <= piece.position + piece.num_bytes <= size
            assert Box.whole(found[name].shape).contains(piece.box)


@given(indexes(), st.floats(0, 1, exclude_max=True))
def test_cut_bytes_are_corruption(index: Index, part: float) -> None:
    stored = index.encode()
    with pytest.raises(CorruptCheckpointError):
        Index.decode(stored[: int(part * len(stored))], "f")


# ---------------------------------------------------------------------------------------------
# Tables and columns
# ---------------------------------------------------------------------------------------------


def test_a_column_of_another_type_is_corruption() -> None:
    data = safetensors.numpy.save({"a": np.zeros(2, np.float32)})
    with pytest.raises(CorruptCheckpointError, match=r"^f: column 'a'"):
        decode_columns(data, "f")
