"""Damage that only compressed files can have; what all files can have is in `test_damage`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import remesh
from remesh.core.compression import (
    MAX_BLOCK_BYTES,
    TABLE_END_BYTES,
    encode_table,
    table_size,
)
from remesh.core.geometry import IntArray
from remesh.core.index import Index
from remesh.core.integrity import BLOCK_SIZE
from remesh.errors import CorruptCheckpointError
from remesh.formats import native
from remesh.formats.decoding import read_table
from remesh.maintenance.repair import plan_repair, repair
from remesh.storage import MemoryStorage
from tests.engine.compressed import places_of, replace_index, save_rows, truth
from tests.engine.scenes import saved_by
from tests.engine.small_checkpoint import flip
from tests.fuzz.files import Files, in_memory
from tests.fuzz.trial import attempt, import_late_modules
from tests.support import run_ranks


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compressed") / "step_1"
    run_ranks(3, save_rows, path)
    return path


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def data_file(path: Path, row: int) -> Path:
    return path / remesh.Checkpoint(path).index.files[row].path


def test_zeros_that_cannot_be_decoded_are_damaged(tmp_path: Path) -> None:
    remesh.save({"moment": np.zeros(BLOCK_SIZE)}, tmp_path, compress="zstd")
    index = remesh.Checkpoint(tmp_path).index
    begin, _ = places_of(index, 0)
    flip(data_file(tmp_path, 0), int(begin[4]) + 1)  # the frame's mark
    [damage] = remesh.Checkpoint(tmp_path).verify().damages
    assert (damage.start, damage.stop) == (4 * BLOCK_SIZE, 5 * BLOCK_SIZE)
    assert damage.tensors == ("moment",)
    with pytest.raises(CorruptCheckpointError, match="tensors moment"):
        remesh.Checkpoint(tmp_path).read("moment")


# ---------------------------------------------------------------------------------------------
# Columns of the index that lie
# ---------------------------------------------------------------------------------------------


def changed(column: IntArray, row: int, number: int) -> IntArray:
    found = column.copy()
    found[row] = number
    return found


def first_two_alike(index: Index) -> Index:
    return replace(index, stored_begin=changed(index.stored_begin, 1, int(index.stored_begin[0])))


def begin_of(number: int, row: int = 1) -> Callable[[Index], Index]:
    return lambda index: replace(index, stored_begin=changed(index.stored_begin, row, number))


def size_of(number: int) -> Callable[[Index], Index]:
    return lambda index: replace(index, stored_bytes=changed(index.stored_bytes, 0, number))


def first_is_not_at_0(index: Index) -> Index:
    return replace(index, stored_begin=index.stored_begin + 1)


def one_block(size: int, block_size: int) -> Callable[[Index], Index]:
    """Files of one huge block each, of which a few bytes are said to be stored."""

    def change(index: Index) -> Index:
        files = tuple(replace(file, num_bytes=size) for file in index.files)
        num_files, num_blocks = len(files), -(-size // block_size)
        first = np.arange(num_files + 1) * num_blocks
        begin = np.tile(np.arange(num_blocks) * 60, num_files)
        return replace(
            index,
            files=files,
            block_size=block_size,
            digests=np.zeros((num_files * num_blocks, 2), np.uint64),
            first_block=first,
            stored_begin=begin,
            stored_bytes=np.full(num_files, 60 * num_blocks + table_size(num_blocks)),
        )

    return change


LIES: dict[str, Callable[[Index], Index]] = {
    "two blocks begin at one byte": first_two_alike,
    "the first bytes are no block": first_is_not_at_0,
    "a block begins behind the end": begin_of(1 << 40),
    "a block begins at the largest number": begin_of((1 << 63) - 1),
    "a block begins before the file": begin_of(-1),
    "a block begins at the smallest number": begin_of(-(1 << 63)),
    "a file is larger than its content": size_of(1 << 40),
    "a file has the largest size": size_of((1 << 63) - 1),
    "a file has no bytes": size_of(0),
    "a file has a negative size": size_of(-5),
    "huge blocks": one_block(1 << 40, 1 << 40),
    "blocks that are a little too large": one_block(1 << 25, MAX_BLOCK_BYTES + 1),
    "more than comes out of a frame": one_block(MAX_BLOCK_BYTES, MAX_BLOCK_BYTES),
}


@pytest.fixture(scope="module")
def small() -> tuple[Files, Any]:
    """The files of a small compressed checkpoint, and a target for it."""
    import_late_modules()
    state = {"w": np.zeros(400_000), "b": np.arange(7.0)}
    storage = saved_by(2, lambda rank: {"wb"[rank]: state["wb"[rank]]}, compress="zstd")
    files = {path: storage.read(path) for path in storage.list()}
    return files, {name: np.ones_like(array) for name, array in state.items()}


def forged(files: Files, change: Callable[[Index], Index]) -> Files:
    """The checkpoint with another index, and a record that says it is right."""
    storage = in_memory(files)
    record = native.read_record(storage)
    replace_index(storage, change(Index.decode(files[record.index.path], "index")))
    return {path: storage.read(path) for path in storage.list()}


@pytest.mark.parametrize("lie", LIES)
def test_what_an_index_cannot_say(lie: str, small: tuple[Files, Any]) -> None:
    files, state = small
    assert attempt(forged(files, lambda index: index), state, by_command=False) == "read"
    wrong = forged(files, LIES[lie])
    assert attempt(wrong, state, by_command=False) == "CorruptCheckpointError"
    with pytest.raises(CorruptCheckpointError, match=r"index.*compressed"):
        remesh.Checkpoint(in_memory(wrong))


def test_blocks_that_lie_elsewhere_are_damaged(small: tuple[Files, Any]) -> None:
    files, state = small

    def swap(index: Index) -> Index:
        order = np.array([1, 0, *range(2, len(index.stored_begin))])
        return replace(index, stored_begin=index.stored_begin[order])

    wrong = forged(files, swap)
    assert attempt(wrong, state, by_command=False) == "CorruptCheckpointError"
    assert not remesh.Checkpoint(in_memory(wrong)).verify().ok


# ---------------------------------------------------------------------------------------------
# Without the index
# ---------------------------------------------------------------------------------------------


def test_what_cannot_be_decoded_is_known_to_be_wrong_without_any_digest(saved: Path) -> None:
    index = remesh.Checkpoint(saved).index
    begin, _ = places_of(index, 0)
    flip(data_file(saved, 0), int(begin[0]) + 1)  # the frame's mark
    (saved / native.RECORD_NAME).unlink()
    next(saved.glob("data-*/index.safetensors")).unlink()
    report = plan_repair(saved, keep_unchecked=True).report
    assert [file.state for file in report.files] == ["unreadable", "readable", "readable"]
    assert "cannot be decoded" in report.files[0].problem


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_file_that_is_cut_short_keeps_the_blocks_before(saved: Path, blocks: int) -> None:
    file, index = data_file(saved, 1), remesh.Checkpoint(saved).index
    begin, length = places_of(index, 1)
    kept = int(np.sort(begin)[blocks]) + 7
    os.truncate(file, kept)
    lost = names_of_blocks(index, 1, np.flatnonzero(begin + length > kept).tolist())
    report = repair(saved, saved.with_name("repaired"))
    assert report.files[1].state == "truncated"
    assert {one.name for one in report.lost} == lost
    for name in set(truth()) - lost:
        found = remesh.Checkpoint(saved.with_name("repaired")).read_array(name)
        assert found.tobytes() == truth()[name].tobytes()


def names_of_blocks(index: Index, row: int, blocks: list[int]) -> set[str]:
    """Names of the tensors in some blocks of the content of a file."""
    ends = index.position + index.boxes.num_bytes
    found = set()
    for block in blocks:
        start, stop = block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE
        hit = (index.file == row) & (index.position < stop) & (ends > start)
        found |= {index.tensors.names[t] for t in index.boxes.tensor[hit].tolist()}
    return found


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_without_the_index_a_damaged_table_costs_its_file(damage: str, saved: Path) -> None:
    file = data_file(saved, 0)
    next(saved.glob("data-*/index.safetensors")).unlink()
    size = file.stat().st_size
    if damage == "flipped":
        flip(file, size - TABLE_END_BYTES - 3)
    else:
        os.truncate(file, size - 1)
    report = plan_repair(saved).report
    assert [one.state for one in report.files] == ["unreadable", "sound", "sound"]
    assert ("table of blocks is damaged" if damage == "flipped" else "own table are lost") in (
        report.files[0].problem
    )


@given(at=st.integers(0, 63), value=st.integers(0, 255))
def test_a_changed_table_is_refused(at: int, value: int) -> None:
    begin, content = np.array([900_000, 0, 1_800_000]), 2 * BLOCK_SIZE + 7
    stored = encode_table(begin, content, BLOCK_SIZE).tobytes()
    wrong = stored[:at] + bytes([value]) + stored[at + 1 :]
    storage = MemoryStorage()
    storage.put("file", bytes(1_800_005) + wrong, overwrite=False)
    if wrong == stored:
        table = read_table(storage, "file")
        assert table is not None
        assert table.begin.tolist() == begin.tolist()
        assert table.length.tolist() == [900_000, 900_000, 5]
    elif at < len(stored) - 8:
        with pytest.raises(CorruptCheckpointError, match="file: its table of blocks is"):
            read_table(storage, "file")
    else:
        assert read_table(storage, "file") is None
