"""Stores that zarr-python writes in version 3, read in place and chunk by chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import remesh
from remesh.errors import CorruptCheckpointError, FormatVersionError
from remesh.exchange import Exchange
from remesh.storage import LocalStorage, MemoryStorage
from remesh.testing import run_ranks

FULL = np.arange(70.0, dtype=np.float32).reshape(7, 10)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"compressors": None},
    "zstd": {},
    "gzip": {"compressors": GzipCodec()},
    "blosc": {"compressors": BloscCodec(cname="lz4")},
    "checked": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "sharded": {"shards": (4, 6), "compressors": None},
    "sharded zstd": {"shards": (4, 6)},
    "index first": {"shards": {"shape": (4, 6), "index_location": "start"}},
    "dots": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
}


def write(place: Path | str, array: np.ndarray[Any, Any], **options: Any) -> None:
    made = zarr.create_array(
        store=str(place), shape=array.shape, dtype=array.dtype, zarr_format=3,
        **{"chunks": tuple(min(n, 2 + d) for d, n in enumerate(array.shape)), **options},
    )  # fmt: skip
    made[...] = array


@pytest.mark.parametrize("kind", KINDS)
def test_arrays(kind: str, tmp_path: Path) -> None:
    zarr.create_group(str(tmp_path), attributes={"step": 7})
    write(tmp_path / "layers/0/weight", FULL, **KINDS[kind])
    found = remesh.Checkpoint(tmp_path, framework="numpy")
    assert found.format == "zarr3"
    np.testing.assert_array_equal(found["layers.0.weight"], FULL)
    np.testing.assert_array_equal(found.get_slice("layers.0.weight")[3:6, 4:9], FULL[3:6, 4:9])
    assert found.values == {"attributes": {"step": 7}}
    assert found.verify().ok


@pytest.mark.parametrize(
    ("array", "fill"),
    [
        (np.array(3.5), 0.0),
        (np.full((5, 4), np.nan), np.nan),
        (np.full((5, 4), -np.inf, np.float32), -np.inf),
        (np.full((5, 4), 7, np.int16), 7),
        (np.zeros((5, 4), bool), False),
        (np.full((5, 4), 1 + 2j), 1 + 2j),
        (np.zeros((0, 4)), 0.0),
        (np.full((5, 4), -0.0), -0.0),
        (np.full((5, 4), 2**63 + 1, np.uint64), 2**63 + 1),
        (np.full((5, 4), 0.1, np.float32), 0.1),
    ],
)
def test_chunks_that_are_not_stored_have_the_fill_value(
    array: np.ndarray[Any, Any], fill: Any, tmp_path: Path
) -> None:
    write(tmp_path, array, fill_value=fill)
    found = remesh.Checkpoint(tmp_path, framework="numpy")
    np.testing.assert_array_equal(found["value"], array)
    assert found["value"].tobytes() == array.tobytes()  # -0.0 equals 0.0


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("float32", []), ("float32", [1.0, 2.0]), ("float32", 1e300), ("float32", "x"),
        ("float32", {}), ("int32", 0.5), ("int32", "NaN"), ("uint8", -1), ("uint8", 300),
        ("int64", 10**30), ("bool", 2), ("bool", "0x2"), ("complex64", [1.0]),
    ],
)  # fmt: skip
def test_a_fill_value_that_the_type_has_not_is_refused(
    dtype: str, fill: Any, tmp_path: Path
) -> None:
    write(tmp_path, np.ones((4, 5), dtype))
    node = tmp_path / "zarr.json"
    node.write_text(json.dumps(json.loads(node.read_text()) | {"fill_value": fill}))
    with pytest.raises(CorruptCheckpointError, match=r"the fill value .* of"):
        remesh.Checkpoint(tmp_path)


def test_ranks_load_what_they_need(tmp_path: Path) -> None:
    write(tmp_path / "w", FULL)
    zarr.create_group(str(tmp_path))

    def load(exchange: Exchange) -> None:
        rank = exchange.rank
        part = np.zeros((7, 5), np.float32)
        state = {"w": remesh.ShardedTensor.at_offset("w", part, (7, 10), (0, 5 * rank))}
        remesh.load(state, tmp_path, group=exchange)
        np.testing.assert_array_equal(part, FULL[:, 5 * rank : 5 * rank + 5])

    run_ranks(2, load)


def test_a_part_takes_the_chunks_that_it_lies_in(tmp_path: Path) -> None:
    zarr.create_group(str(tmp_path))
    write(tmp_path / "w", FULL, chunks=(1, 10))
    read: list[str] = []

    class Watched(MemoryStorage):
        def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
            read.append(path)
            return super().read(path, start, stop)

    source, storage = LocalStorage(tmp_path), Watched()
    for path in source.list():
        storage.put(path, source.read(path), overwrite=False)
    found = remesh.Checkpoint(storage, framework="numpy")
    assert {path.rpartition("/")[2] for path in read} == {"zarr.json"}
    read.clear()
    np.testing.assert_array_equal(found.get_slice("w")[2:4], FULL[2:4])
    assert sorted(read) == ["w/c/2/0", "w/c/3/0"]


def test_a_conversion_decodes(tmp_path: Path) -> None:
    from remesh.checkpoint import convert

    write(tmp_path / "w", FULL)
    zarr.create_group(str(tmp_path))
    convert(tmp_path, tmp_path / "native", format="remesh")
    np.testing.assert_array_equal(remesh.Checkpoint(tmp_path / "native").read_array("w"), FULL)


def cut(folder: Path) -> None:
    chunk = folder / "c" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-3])


def larger(folder: Path) -> None:
    """A chunk that says to hold more than it may."""
    write(folder / "other", np.zeros((900, 900)) + 1, chunks=(900, 900))
    (folder / "c" / "0" / "0").write_bytes((folder / "other" / "c" / "0" / "0").read_bytes())


@pytest.mark.parametrize("kind", ["plain", "zstd", "gzip", "blosc", "checked", "sharded zstd"])
@pytest.mark.parametrize("damage", [cut, larger])
def test_damage(damage: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
    write(tmp_path / "w", FULL, **KINDS[kind])
    damage(tmp_path / "w")
    with pytest.raises(CorruptCheckpointError):
        remesh.Checkpoint(tmp_path / "w").read_array("value")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}}]}, "row-major"),
        ({"codecs": ["bytes", "lzma"]}, "stored by|lzma"),
        ({"data_type": "r24"}, "r24"),
        ({"chunk_grid": {"name": "rectangular"}}, "regular"),
    ],
)
def test_what_is_not_read_says_so(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, FULL)
    node = json.loads((tmp_path / "zarr.json").read_text())
    (tmp_path / "zarr.json").write_text(json.dumps(node | change))
    with pytest.raises(FormatVersionError, match=words):
        remesh.Checkpoint(tmp_path)
