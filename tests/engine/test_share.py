"""Reading together: every block is read once, and nobody waits for a rank that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remesh
from remesh.exchange import Exchange
from remesh.geometry import Box
from remesh.pipeline.share import MAX_SHARERS, ROUND_WINDOWS, deal
from remesh.storage import LocalStorage, MemoryStorage, Storage
from remesh.testing import (
    FaultyStorage,
    FlipBit,
    Raised,
    run_processes,
    run_ranks,
    run_ranks_outcomes,
)

SHAPE = (3000, 4000)
"""96 MB of float64: a dozen windows."""


def truth() -> np.ndarray[Any, Any]:
    return np.arange(SHAPE[0] * SHAPE[1], dtype=np.float64).reshape(SHAPE)


def stored_by_rows() -> MemoryStorage:
    storage = MemoryStorage()
    whole = truth()

    def save(exchange: Exchange) -> None:
        rows = SHAPE[0] // 3
        part = whole[exchange.rank * rows :][:rows]
        tensor = remesh.ShardedTensor.at_offset("w", part, SHAPE, (exchange.rank * rows, 0))
        remesh.save({"w": tensor}, storage, group=exchange)

    run_ranks(3, save)
    return storage


@pytest.fixture(scope="module")
def storage() -> MemoryStorage:
    return stored_by_rows()


def load_box(exchange: Exchange, storage: Storage, box: Box) -> remesh.RestoreReport:
    part = np.full(box.shape, -1.0)
    tensor = remesh.ShardedTensor.at_offset("w", part, SHAPE, box.offset)
    reports: list[remesh.RestoreReport] = []
    remesh.load({"w": tensor}, storage, group=exchange, share_reads=True, on_report=reports.append)
    np.testing.assert_array_equal(part, truth()[box.slices])
    return reports[0]


def column(rank: int, world_size: int) -> Box:
    columns = SHAPE[1] // world_size
    return Box((0, rank * columns), (SHAPE[0], columns))


@pytest.mark.parametrize("world_size", [2, 4])
def test_columns_of_rows_are_read_once(storage: MemoryStorage, world_size: int) -> None:
    def load(exchange: Exchange) -> remesh.RestoreReport:
        return load_box(exchange, storage, column(exchange.rank, world_size))

    reports = run_ranks(world_size, load)
    stored = sum(file.num_bytes for file in remesh.Checkpoint(storage).index.files)
    read = [report.bytes_read for report in reports]
    assert truth().nbytes <= sum(read) <= stored
    assert max(read) <= 2 * stored / world_size


def test_replicas_are_read_once(storage: MemoryStorage) -> None:
    reports = run_ranks(3, lambda exchange: load_box(exchange, storage, Box.whole(SHAPE)))
    assert sum(report.bytes_read for report in reports) <= truth().nbytes + (1 << 20)
    assert all(report.bytes_needed == truth().nbytes for report in reports)


def test_what_nobody_shares_is_read_by_whoever_needs_it(storage: MemoryStorage) -> None:
    def load(exchange: Exchange) -> remesh.RestoreReport:
        rows = SHAPE[0] // 3
        return load_box(exchange, storage, Box((exchange.rank * rows, 0), (rows, SHAPE[1])))

    reports = run_ranks(3, load)
    for report in reports:
        assert report.bytes_needed <= report.bytes_read <= report.bytes_needed + (2 << 20)


def test_a_rank_that_reads_damage_fails_all_and_stops_none() -> None:
    storage = stored_by_rows()
    (path,) = [p for p in storage.list() if p.endswith("00001.safetensors")]
    bad = FaultyStorage(storage, [FlipBit(path, position=20_000_000, when="read")])
    outcomes = run_ranks_outcomes(2, lambda exchange: load_box(exchange, bad, Box.whole(SHAPE)))
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, remesh.CorruptCheckpointError)
        assert "00001.safetensors" in str(outcome.error)


def save_and_load_over_gloo(exchange: Exchange, path: str) -> int:
    place = LocalStorage(path)
    rows = SHAPE[0] // exchange.world_size
    part = truth()[exchange.rank * rows :][:rows]
    tensor = remesh.ShardedTensor.at_offset("w", part, SHAPE, (exchange.rank * rows, 0))
    remesh.save({"w": tensor}, place, group=exchange)
    return load_box(exchange, place, column(exchange.rank, exchange.world_size)).bytes_read


def test_processes_swap_over_gloo(tmp_path: Path) -> None:
    read = run_processes(2, save_and_load_over_gloo, str(tmp_path))
    assert truth().nbytes <= sum(read) <= truth().nbytes + (2 << 20)


@given(st.lists(st.lists(st.integers(0, 40), unique=True), min_size=1, max_size=40))
@settings(deadline=None)
def test_the_deal(touched: list[list[int]]) -> None:
    windows = [np.array(sorted(of_rank), dtype=np.int64) for of_rank in touched]
    dealt = deal(windows)
    groups: dict[int, list[set[int]]] = {}
    for row, window in enumerate(dealt.windows.tolist()):
        sharers = set(np.flatnonzero(dealt.sharers[row]).tolist())
        assert 2 <= len(sharers) <= MAX_SHARERS
        assert int(dealt.reader[row]) in sharers
        assert all(window in touched[rank] for rank in sharers)
        groups.setdefault(window, []).append(sharers)
    for rank, of_rank in enumerate(windows):
        rows = dealt.rows_of(rank, of_rank)
        for window, row in zip(of_rank.tolist(), rows.tolist(), strict=True):
            holders = [other for other in range(len(touched)) if window in touched[other]]
            assert (row >= 0) == (len(holders) > 1)
            if row >= 0:
                assert dealt.windows[row] == window
                assert dealt.sharers[row, rank]
    for window, parts in groups.items():
        everybody = {rank for rank in range(len(touched)) if window in touched[rank]}
        assert set[int]().union(*parts) == everybody
        assert sum(map(len, parts)) == len(everybody)
    for reader in range(len(touched)):
        rounds = dealt.round[dealt.reader == reader]
        assert (np.bincount(rounds) <= ROUND_WINDOWS).all() if len(rounds) else True
