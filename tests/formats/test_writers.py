"""What every format that can be written has in common: one way to save, in the background too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh.errors import StateError
from remesh.exchange import Exchange
from remesh.formats.table import WRITERS
from remesh.pipeline.write import CHUNK_SIZE
from tests.support import run_ranks

ROWS = 3 * CHUNK_SIZE // 8  # so that chunks of a stream begin and end inside of files
FORMATS = sorted(WRITERS)


def state_of(rank: int, fill: float) -> dict[str, Any]:
    """A tensor by rows, one by columns, and one that rank 0 has alone."""
    rows, columns = np.full((ROWS, 2), fill + rank, np.float32), np.full((5, 3), rank, np.float64)
    state: dict[str, Any] = {
        "rows": remesh.ShardedTensor.at_offset("rows", rows, (2 * ROWS, 2), (rank * ROWS, 0)),
        "columns": remesh.ShardedTensor.at_offset("columns", columns, (5, 6), (0, 3 * rank)),
    }
    return {**state, "whole": np.arange(7.0)} if rank == 0 else state


def check(path: Path, fill: float) -> None:
    stored = remesh.Checkpoint(path)
    assert stored["rows"].numpy()[::ROWS, 0].tolist() == [fill, fill + 1]
    assert stored["columns"].numpy()[4].tolist() == [0.0] * 3 + [1.0] * 3
    assert stored["whole"].tolist() == list(range(7))


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_save_in_the_background_is_a_save(format_name: str, tmp_path: Path) -> None:
    """Same files, staged in an arena that is smaller than the state, and nothing left over."""

    def one(exchange: Exchange) -> None:
        remesh.save(
            state_of(exchange.rank, 1.0), tmp_path / "a", format=format_name, group=exchange
        )
        with remesh.Saver(group=exchange, format=format_name, arena_bytes=CHUNK_SIZE) as saver:
            saver.save_async(state_of(exchange.rank, 1.0), tmp_path / "b").result()

    run_ranks(2, one)
    check(tmp_path / "a", 1.0)
    check(tmp_path / "b", 1.0)
    sizes = [
        sorted(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in "ab"
    ]
    assert len(sizes[0]) == len(sizes[1])
    folders = [sorted(p.name for p in (tmp_path / name).iterdir() if p.is_dir()) for name in "ab"]
    assert len(folders[0]) == len(folders[1])


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_process_writes_and_replaces_it(format_name: str, tmp_path: Path) -> None:
    with remesh.Saver(format=format_name, writer="process") as saver:
        for fill in (1.0, 2.0):
            state = {"w": np.full(10, fill)}
            saver.save_async(state, tmp_path / "c", overwrite=fill > 1).result()
    assert remesh.Checkpoint(tmp_path / "c")["w"].tolist() == [2.0] * 10
    assert len(list((tmp_path / "c").glob("*.distcp"))) <= 1


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_save_that_fails_leaves_nothing(format_name: str, tmp_path: Path) -> None:
    def fail(event: remesh.events.Event) -> None:
        if event.point == "save.before_commit":
            raise RuntimeError("no")

    def one(exchange: Exchange) -> list[str]:
        state, errors = state_of(exchange.rank, 1.0), []
        try:
            remesh.save(state, tmp_path / "a", format=format_name, group=exchange, on_event=fail)
        except (RuntimeError, remesh.RemeshError) as error:
            errors.append(str(error))
        with remesh.Saver(group=exchange, format=format_name, on_event=fail) as saver:
            handle = saver.save_async(state, tmp_path / "b")
            errors.append(str(handle.exception()))
            saver._in_flight = None
        return errors

    for errors in run_ranks(2, one):
        assert ["no" in error for error in errors] == [True, True]
    for name in "ab":
        with pytest.raises(remesh.CheckpointNotFoundError):
            remesh.Checkpoint(tmp_path / name)
        left = [file.name for file in (tmp_path / name).rglob("*") if file.is_file()]
        assert left == ([] if name == "a" else ["failed.msgpack"])


WEIGHTS = {"w": np.ones(2)}
PAIRS, BITS = {"w": np.ones(2, complex)}, {"w": torch.ones(2, dtype=torch.uint8).view(torch.bits8)}


@pytest.mark.parametrize(
    ("format_name", "state", "options", "says"),
    [
        ("huggingface", {"step": 3}, {}, r"(?s)tensors alone\nThe state has 1 other .*: step"),
        ("safetensors", PAIRS, {}, "w: a safetensors file has no form for .* complex128"),
        ("huggingface", BITS, {}, "w: a safetensors file has no form for .* bits8"),
        ("safetensors", {"__metadata__": np.ones(2)}, {}, "no form for a tensor called so"),
        ("huggingface", WEIGHTS, {"dtype": 1}, "has no option 'dtype'; it has max_shard_bytes"),
        ("huggingface", WEIGHTS, {"max_shard_bytes": 0}, "must be a number of bytes"),
        ("torch_file", {"a": {1, 2}}, {}, "store plain values"),
        ("torch_dcp", WEIGHTS, {"separation_hint": "a/b"}, "is a text without '/'"),
        ("torch_dcp", {"a": {(1,): 2, "(1,)": 3}}, {}, r"'a\.\(1,\)' is the name of two entries"),
        ("torch_dcp", {"a": [{"b.c": 2, "b": {"c": 3}}]}, {}, r"'a\.0\.b\.c' is .* in 'a'"),
        ("torch_dcp", {"a": [{"b": 2}], "a.0": {"b": np.ones(2)}}, {}, r"'a\.0\.b' is the name of"),
        ("nonsense", WEIGHTS, {}, "is not known; formats to write: remesh"),
        ("exported pth", WEIGHTS, {}, "is not known; formats to write: remesh"),
        (["remesh"], WEIGHTS, {}, "is not known; formats to write: remesh"),
        ("flat_param", WEIGHTS, {}, "'flat_param' is only read"),
        ("zarr", WEIGHTS, {}, "'zarr' is only read"),
    ],
)
def test_what_cannot_be_written(
    format_name: str, state: dict[str, Any], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(StateError, match=says):
        remesh.save(state, tmp_path, format=format_name, format_options=options)
    assert list(tmp_path.iterdir()) == []


def test_metadata_needs_a_place(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no place for metadata"):
        remesh.save(WEIGHTS, tmp_path, format="torch_dcp", metadata={"a": 1})
