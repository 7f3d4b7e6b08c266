"""The page on the native format: its programs run, and its tables are what the code does."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import zstandard

import remesh
from remesh.core import values
from remesh.core.dtypes import DTYPES
from remesh.core.geometry import Box
from remesh.core.integrity import BLOCK_SIZE
from remesh.core.packing import unpack
from remesh.core.safetensors_file import ALIGNMENT, decode_header
from remesh.core.tables import decode_columns
from remesh.exchange import Exchange
from remesh.formats import native
from tests.data.native import states
from tests.data.native.make import save_shards
from tests.engine.bits import bits_of, random_tensor
from tests.support import run_ranks

PAGE = (Path(__file__).parent.parent / "docs" / "format.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

Arrays = dict[str, npt.NDArray[Any]]


def run_programs(*programs: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, "docs/format.md", "exec"), names)
    return names


READER = run_programs(PROGRAMS[0])
CHECKER = run_programs(*PROGRAMS[:2])


def read_checkpoint(folder: Path) -> Arrays:
    """By the page's first program, which needs only numpy."""
    found: Arrays = READER["read_checkpoint"](folder)
    return found


def check(folder: Path) -> None:
    """By the page's second program."""
    CHECKER["check"](folder)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bits_of(tensor)[2]


# ---------------------------------------------------------------------------------------------
# The programs
# ---------------------------------------------------------------------------------------------


def test_the_reader_is_short_and_needs_only_numpy() -> None:
    assert len(PROGRAMS) == 3
    reader, checker, _ = PROGRAMS
    assert len(reader.splitlines()) <= 75
    imported = set(re.findall(r"^(?:import|from) (\w+)", reader, re.MULTILINE))
    assert imported == {"json", "pathlib", "numpy"}
    assert "remesh" not in checker.replace("remesh.json", "").replace('"remesh.', "")


PAIRS = random_tensor(torch.complex128, (3, 2))


def save_pairs(exchange: Exchange, place: Path) -> None:
    """Tensors whose elements are pairs in the file, a row on each rank; a name of each rank."""
    rank = exchange.rank
    row = remesh.ShardedTensor.from_rank_offsets("pairs", PAIRS[rank : rank + 1], (0, rank, 3))
    state = {"pairs": row, "only": {str(rank): torch.full((rank + 1,), rank)}}
    remesh.save(state, place, group=exchange)


METADATA = {"ü": '\x7f \n"\\', "lr": 1e-08, "big": 1e300}
SAVES: dict[str, Callable[[Path], object]] = {
    "types, ties, no elements": lambda place: remesh.save(states.dtypes(), place),
    "strides, other names": lambda place: remesh.save(
        {"T": torch.arange(12).reshape(3, 4).T, "naïve 名": np.arange(3)}, place, metadata=METADATA
    ),
    "parts of four ranks": lambda place: run_ranks(4, save_shards, place),
    "pairs of three ranks": lambda place: run_ranks(3, save_pairs, place),
    "no tensors": lambda place: remesh.save({"step": 1}, place),
}


@pytest.mark.parametrize("name", SAVES)
def test_it_reads_what_is_saved(name: str, tmp_path: Path) -> None:
    SAVES[name](tmp_path)
    check(tmp_path)
    checkpoint, found = remesh.Checkpoint(tmp_path), read_checkpoint(tmp_path)
    assert set(found) == set(checkpoint.index)
    for key, array in found.items():
        expected = checkpoint.read(key)
        assert (array.shape, array.tobytes()) == (tuple(expected.shape), bytes_of(expected)), key
        is_same = array.dtype.name == str(expected.dtype).removeprefix("torch.")
        assert is_same or array.dtype.kind == "u", "unsigned where numpy has no such type"


def test_it_reads_compressed_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {
        "w": torch.from_numpy(rng.standard_normal((1000, 1500)).astype(np.float32) * 0.02),
        "b": random_tensor(torch.bfloat16, (700, 5)),
        "moment": torch.zeros(700_000, dtype=torch.float64),
        "z": torch.full((3,), 2.5 + 1j, dtype=torch.complex128),
    }

    def save(exchange: Exchange) -> None:
        rank = exchange.rank
        mine = {name: tensor for at, (name, tensor) in enumerate(state.items()) if at % 2 == rank}
        remesh.save({"mine": mine, "n": 1}, tmp_path, compress="zstd", group=exchange)

    run_ranks(2, save)
    files = json.loads((tmp_path / "remesh.json").read_text())["record"]["files"]
    assert [file["compressed"] for file in files] == [True, True]
    with pytest.raises(ValueError, match="section 12"):
        CHECKER["read_checkpoint"](tmp_path)
    programs = run_programs(*PROGRAMS)
    programs["check"](tmp_path)
    found = programs["read_checkpoint"](tmp_path)
    assert {name: array.tobytes() for name, array in found.items()} == {
        f"mine.{name}": bytes_of(tensor) for name, tensor in state.items()
    }
    path = next(tmp_path.glob("data-*/00000.safetensors"))
    sound = path.read_bytes()
    for place in (3, len(sound) // 3, len(sound) // 2):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises((AssertionError, ValueError, zstandard.ZstdError)):
            programs["check"](tmp_path)


@pytest.mark.parametrize(
    ("version", "path", "message"),
    [
        (2, "index", "newer"),
        (1, "../outside/index", "leaves the checkpoint"),
        (1, "/etc/index", "leaves the checkpoint"),
        (1, "data//index", "leaves the checkpoint"),
        (1, "", "leaves the checkpoint"),
    ],
)
def test_it_refuses_records(version: int, path: str, message: str, tmp_path: Path) -> None:
    record = {"format": "remesh", "version": version, "index": {"path": path}}
    (tmp_path / "remesh.json").write_text(json.dumps({"record": record}))
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path)


def test_the_checker_finds_a_flipped_bit_in_every_file(tmp_path: Path) -> None:
    # More than two blocks, so that there is a short one.
    remesh.save({"w": random_tensor(torch.float32, (2 * BLOCK_SIZE // 4 + 5,)), "n": 1}, tmp_path)
    check(tmp_path)
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) == 4
    for path in paths:
        sound = path.read_bytes()
        # In the first block, in the last one, and in the middle of the file.
        for place in (3, len(sound) // 2, len(sound) - 6):
            damaged = bytearray(sound)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(AssertionError, match=path.name):
                check(tmp_path)
        path.write_bytes(sound)
    check(tmp_path)


# ---------------------------------------------------------------------------------------------
# The tables
# ---------------------------------------------------------------------------------------------


def rows_below(heading: str) -> list[list[str]]:
    """The rows of the first table below a text of the page, without its head."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def quoted(rows: list[list[str]]) -> list[str]:
    """What stands in backquotes in the first column."""
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


def test_the_table_of_dtypes() -> None:
    stated = {}
    twice = " \N{MULTIPLICATION SIGN} 2"
    for row in rows_below("3.5. "):
        for number, name, num_bytes, code in (row[:4], row[5:]):
            if number:
                stated[int(number)] = (name, int(num_bytes), code)
    assert stated == {
        number: (dtype.name, dtype.itemsize, dtype.safetensors + (twice if dtype.pairs else ""))
        for number, dtype in enumerate(DTYPES)
    }


def test_the_members_of_the_record() -> None:
    assert quoted(rows_below("2.4. ")) == [
        f.name for f in msgspec.structs.fields(native.CommitRecord)
    ]
    stated = re.search(r"2\.5\. A file object has (.*?)\. ", PAGE, re.DOTALL)
    assert stated
    assert re.findall(r"`(\w+)`", stated[1]) == [
        f.name for f in msgspec.structs.fields(native.FileRecord)
    ]
    assert f"| `version` | `{native.FORMAT_VERSION}` |" in PAGE
    assert PAGE.startswith(f"# The native format, version {native.FORMAT_VERSION}\n")


def test_the_columns_and_metadata_of_the_index(tmp_path: Path) -> None:
    remesh.save({"w": np.zeros((2, 3)), "b": np.zeros(3, np.int8)}, tmp_path, compress="zstd")
    [path] = tmp_path.glob("data-*/index.safetensors")
    columns, metadata = decode_columns(path.read_bytes(), "index")
    rows = rows_below("3.1. ")
    assert quoted(rows) == list(columns)
    codes = {"I64": np.int64, "U64": np.uint64, "U8": np.uint8}
    counts = {"bytes": 2, "t": 2, "d": 2, "blocks": 1, "2": 2, "f": 1, "f + 1": 2}
    for (_, code, numbers, _), (name, column) in zip(rows, columns.items(), strict=True):
        assert column.dtype == codes[code]
        rows_of = len(columns.get(f"{name}.ends", ())) and unpack(columns[f"{name}.ends"], 9)[-1]
        lists = unpack(columns[name], 9).size if name.endswith(".ends") else 0
        here = counts | {"rows": rows_of, "lists": lists}
        extents = [here[extent] for extent in numbers.split(" \N{MULTIPLICATION SIGN} ")]
        if code == "I64":
            assert len(unpack(column, 9)) == math.prod(extents)
        else:
            assert list(column.shape) == extents
    assert quoted(rows_below("3.4. ")) == list(metadata)


def test_the_kinds_of_values() -> None:
    stated = quoted(rows_below("5.5. "))
    kinds = [name for name in stated if not re.search(r"[\[\]<]", name)]
    torch_kinds = {f"torch.{name}" for name in (*values._TORCH_KINDS, "Tensor")}
    assert set(kinds) == set(values._DECODERS) | torch_kinds
    assert quoted(rows_below("5.1. ")) == [
        f.name for f in msgspec.structs.fields(native.ValuesDocument)
    ]


def test_the_values_file(tmp_path: Path) -> None:
    state = {
        "layers": [{"w": np.zeros(2)}, (np.zeros(1), {"k": 2**70})],
        "a.b": 5,
        "rng": remesh.sharding.ShardedObject("rng", (1, 2), (4, 2), (3, 0)),
    }
    remesh.save(state, tmp_path)
    [path] = tmp_path.glob("data-*/values.msgpack")
    document = msgspec.msgpack.decode(path.read_bytes())
    tagged = {"$": "tuple", "v": [1, 2]}
    name = "rng/shard_3.0_4.2"
    assert document == {
        "values": {"layers.1.1.k": {"$": "int", "v": hex(2**70)}, "a.b": 5},
        "lists": {},
        "objects": {name: {"name": "rng", "shape": [4, 2], "offset": [3, 0], "value": tagged}},
        "paths": {
            "layers.0.w": ["layers", 0, "w"],
            "layers.1.0": ["layers", 1, 0],
            "layers.1.1.k": ["layers", 1, 1, "k"],
            "a.b": ["a.b"],
            name: [name],
        },
        "sequences": [[["layers"], "list"], [["layers", 1], "tuple"]],
        "aliases": {},
    }


def test_what_the_page_says_of_data_files(tmp_path: Path) -> None:
    assert f"multiple of {ALIGNMENT} bytes" in PAGE
    assert f"blocks of {BLOCK_SIZE:_} bytes".replace("_", " ") in PAGE
    data = np.arange(2048.0).reshape(1, 2048)
    left, right = (
        remesh.sharding.Part(Box((0, begin), (1, 1024)), data[:, begin : begin + 1024])
        for begin in (0, 1024)
    )
    remesh.save(
        {
            "w": remesh.ShardedTensor("layers.0.weight", (1, 2048), (left, right)),
            "b": np.zeros(3, np.int8),
        },
        tmp_path,
    )
    [path] = tmp_path.glob("data-*/00000.safetensors")
    header = decode_header(path.read_bytes(), "f")
    assert "`layers.0.weight@0,1024`" in PAGE
    assert list(header.entries) == ["layers.0.weight@0,0", "layers.0.weight@0,1024", "b"]
    assert header.metadata["format"] == "remesh"
    assert json.loads(header.metadata["pieces"])["layers.0.weight@0,1024"] == [
        "layers.0.weight",
        "float64",
        [1, 2048],
        [0, 1024],
    ]
