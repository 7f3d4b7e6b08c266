"""What only compressed checkpoints have: smaller blocks, in any order, decoded where they are read.

That they load in any layout, keep frozen files and leave nothing when a save fails is tested where
that of plain ones is.
"""

from __future__ import annotations

import importlib
import json
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import remesh
from remesh.checkpoint import convert
from remesh.cli import cli
from remesh.core.compression import encode_table
from remesh.core.integrity import BLOCK_SIZE
from remesh.errors import FormatVersionError, OptionError, StateError
from remesh.exchange import Exchange
from remesh.formats.decoding import DecompressedFiles, decoded
from remesh.formats.table import WRITERS
from remesh.maintenance import orphans
from remesh.pipeline.arena import Chunk
from remesh.pipeline.write import CHUNK_SIZE, ChunkWriter, Filled, whole_files
from remesh.storage import Buffer, LocalStorage, MemoryStorage, StorageView
from tests.engine.bits import bits_of
from tests.engine.compressed import (
    COLUMNS,
    ROWS,
    part_of_state,
    places_of,
    replace_index,
    save_rows,
    small_tensors,
    stored_bytes,
    truth,
)
from tests.support import FaultInjector, InjectedError, run_ranks

NUM_RANKS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compressed") / "step_1"
    run_ranks(NUM_RANKS, save_rows, path)
    return path


def check_state(state: dict[str, Any]) -> None:
    whole = truth()
    for name, tensor in state.items():
        if name in whole:
            [part] = tensor.parts
            np.testing.assert_array_equal(part.data, whole[name][part.box.slices], name)
        else:
            assert bits_of(tensor) == bits_of(small_tensors()[name]), name


def check_stored(place: Any) -> None:
    checkpoint = remesh.Checkpoint(place)
    assert checkpoint.verify().ok
    for name, array in truth().items():
        assert checkpoint.read_array(name).tobytes() == array.tobytes(), name
    for name, tensor in small_tensors().items():
        assert bits_of(checkpoint.read(name)) == bits_of(tensor), name


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def test_files_take_less_and_everything_is_there(saved: Path) -> None:
    check_stored(saved)
    index = remesh.Checkpoint(saved).index
    assert all(file.compressed for file in remesh.Checkpoint(saved).record.files)
    content = sum(file.num_bytes for file in index.files)
    assert stored_bytes(saved) < 0.8 * content
    # Noise is stored as it is, among blocks that are smaller.
    lengths = np.concatenate([places_of(index, row)[1] for row in range(NUM_RANKS)])
    assert (lengths == BLOCK_SIZE).any()
    assert (lengths < BLOCK_SIZE // 100).any()
    listed = CliRunner().invoke(cli, ["ls", str(saved.parent), "--json"])
    [entry] = json.loads(listed.stdout)["checkpoints"]
    assert entry["status"] == "committed"
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert entry["num_bytes"] == sum(file.stat().st_size for file in files if "data-" in str(file))
    assert not orphans.find_orphans(saved.parent, now=1e12, older_than=0)


class Reads(StorageView):
    """A storage that notes which bytes are read into buffers."""

    def __init__(self, storage: LocalStorage) -> None:
        super().__init__(storage)
        self.num_bytes: list[int] = []

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        self.num_bytes.append(buffer.size)
        return super().read_into(path, start, buffer)


def test_a_range_decodes_the_blocks_that_it_meets(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, reads = remesh.Checkpoint(saved).index, Reads(LocalStorage(saved))
    files, path = decoded(reads, index), index.files[0].path
    _, lengths = places_of(index, 0)
    buffer = np.empty(10, np.uint8)
    assert files.read_into(path, BLOCK_SIZE - 5, buffer) == 10
    assert sum(reads.num_bytes) == lengths[:2].sum()
    whole, size = files.read(path), index.files[0].num_bytes
    assert buffer.tobytes() == whole[BLOCK_SIZE - 5 :][:10]
    assert files.read(path, BLOCK_SIZE - 5, BLOCK_SIZE + 5) == buffer.tobytes()
    assert files.read_into(path, size - 3, buffer) == 3
    assert buffer[:3].tobytes() == whole[-3:]
    assert files.read_into(path, size + 3, buffer) == 0
    assert files.read(path, size) == files.read(path, 9, 5) == b""
    # Ranks that take columns of the rows that others saved decode each block once, together.
    seen: list[int] = []
    decode = DecompressedFiles._decode
    rows = {file.path: row for row, file in enumerate(index.files)}

    def counted(self: Any, path: str, number: int, *rest: Any) -> None:
        seen.append(int(index.first_block[rows[path]]) + number)
        decode(self, path, number, *rest)

    monkeypatch.setattr(DecompressedFiles, "_decode", counted)

    def load(exchange: Exchange) -> None:
        state = part_of_state(exchange.rank, 4, 1, fill=False)
        remesh.load(state, saved, group=exchange, share_reads=True)
        check_state(state)

    run_ranks(4, load)
    assert sorted(seen) == list(range(len(index.digests)))


def test_windows_are_decoded_at_the_same_time(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=120)
    module = importlib.import_module("remesh.formats.decoding")
    decode, seen = module.decode_block, threading.local()

    def meet(*args: Any) -> bool:
        if not hasattr(seen, "met"):
            seen.met = True
            together.wait()
        return bool(decode(*args))

    monkeypatch.setattr(module, "decode_block", meet)
    index = remesh.Checkpoint(saved).index
    files = decoded(LocalStorage(saved), index)
    found: dict[int, bytes] = {}

    def read(row: int) -> None:
        found[row] = files.read(index.files[row].path, 0, 2 * BLOCK_SIZE)

    threads = [threading.Thread(target=read, args=(row,)) for row in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(data) == 2 * BLOCK_SIZE for data in found.values())
    assert len(found) == 2


# ---------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------


@given(numbers=st.permutations(range(12)))
def test_chunks_are_stored_as_they_come(numbers: list[int]) -> None:
    storage, size = MemoryStorage(), 12 * CHUNK_SIZE - 5
    whole = np.repeat(np.arange(12, dtype=np.uint8), CHUNK_SIZE)[:size]
    whole[: size // 2] = np.random.default_rng(0).integers(0, 256, size // 2, np.uint8)
    chunk = Chunk(0, np.empty(CHUNK_SIZE, np.uint8))  # that of a thread, which is used again
    files = replace(whole_files(["file"], [size], [0]), compress="zstd")
    writer = ChunkWriter(storage, files, size, lambda _: None, lambda _: None)
    for number in numbers:
        part = whole[number * CHUNK_SIZE :][:CHUNK_SIZE]
        chunk.buffer[: len(part)] = part
        writer.write([Filled(number, len(part), chunk)])
    writer.finish()
    decompressed = DecompressedFiles(storage)
    assert decompressed.read("file") == whole.tobytes()


def test_blocks_may_lie_in_any_order(saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "copy")
    storage = LocalStorage(path)
    index = remesh.Checkpoint(path).index
    begins = []
    for row, file in enumerate(index.files):
        begin, length = (column.tolist() for column in places_of(index, row))
        right = (path / file.path).read_bytes()
        places = np.zeros(len(begin), np.int64)
        content = b""
        for number in reversed(range(len(begin))):
            places[number] = len(content)
            content += right[begin[number] :][: length[number]]
        table = encode_table(places, file.num_bytes, BLOCK_SIZE)
        (path / file.path).write_bytes(content + table.tobytes())
        begins.append(places)
    replace_index(storage, replace(index, stored_begin=np.concatenate(begins)))
    check_stored(path)


# ---------------------------------------------------------------------------------------------
# Other formats, and what is missing
# ---------------------------------------------------------------------------------------------


def test_conversions(saved: Path, tmp_path: Path) -> None:
    plain, again = tmp_path / "plain", tmp_path / "again"
    convert(saved, plain, format="remesh")
    assert not any(file.compressed for file in remesh.Checkpoint(plain).record.files)
    same = CliRunner().invoke(cli, ["diff", str(saved), str(plain)])
    assert same.exit_code == 0, same.output
    compressed = partial(convert, plain, again, format="remesh", compress="zstd")
    with pytest.raises(InjectedError):
        compressed(on_event=FaultInjector().fail_at(0, "save.chunk_written"))
    run_ranks(2, lambda exchange: compressed(group=exchange))
    assert remesh.Checkpoint(again).index.is_compressed
    for path in (plain, again):
        check_stored(path)
    large = truth()
    convert(saved, tmp_path / "hf", format="huggingface", only=["weight", "bias"])
    read: dict[str, Any] = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        read |= load_file(file)
    assert {name: array.tobytes() for name, array in read.items()} == {
        name: large[name].tobytes() for name in ("weight", "bias")
    }


@pytest.mark.parametrize("format", [*WRITERS][1:])
def test_other_formats_are_never_compressed(format: str, saved: Path, tmp_path: Path) -> None:  # noqa: A002
    told = rf"compress='zstd': files of format '{format}' are never compressed\n.*leave compress"
    with pytest.raises(StateError, match=told):
        remesh.save({"w": np.zeros(2)}, tmp_path / "c", format=format, compress="zstd")
    with pytest.raises(StateError, match=told):
        convert(saved, tmp_path / "c", format=format, compress="zstd")
    assert not (tmp_path / "c").exists()


def test_without_the_library(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def absent(name: str, *rest: Any) -> Any:
        if name == "zstandard":
            raise ImportError("No module named 'zstandard'")
        return import_module(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(OptionError, match=r"zstandard[^\n]*\n.*pip install 'remesh\[compress\]'"):
        remesh.save({"w": np.zeros(2)}, tmp_path / "c", compress="zstd")
    checkpoint = remesh.Checkpoint(saved)  # names, shapes and values need no library
    assert checkpoint.tensor("weight").shape == (ROWS, COLUMNS)
    told = r"\d\.safetensors: is compressed.*\n.*pip install 'remesh\[compress\]'"
    with pytest.raises(FormatVersionError, match=told):
        checkpoint.read_array("bias")
    with pytest.raises(FormatVersionError, match=told):
        remesh.load(part_of_state(0, 1, 0, fill=False), saved)
    with pytest.raises(FormatVersionError, match="is compressed"):
        checkpoint.verify()
