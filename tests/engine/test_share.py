"""Reading together: every block is read once, and nobody waits for a rank that fails."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import remesh
from remesh.core.geometry import Box, IntArray
from remesh.exchange import Exchange
from remesh.pipeline import transfer
from remesh.pipeline.transfer import map_buffers
from remesh.planner import ReadLimits
from remesh.planner.assignment import (
    LOCAL_EXCHANGE_COST,
    MAX_SHARERS,
    REMOTE_EXCHANGE_COST,
    SHARING_BYTES,
    TURN_BYTES,
    ReadAssignment,
    assign_readers,
    assign_readers_if_cheaper,
    assign_to_owners,
)
from remesh.storage import LocalStorage, MemoryStorage, Storage
from tests.engine.scenes import all_are, errors_of, saved_by, share_of
from tests.support import run_processes, run_ranks

SHAPE = (3000, 4000)
"""96 MB of float64: a dozen windows."""


FAR = ReadLimits(2 << 20, num_reads=16)


def truth() -> np.ndarray[Any, Any]:
    return np.arange(SHAPE[0] * SHAPE[1], dtype=np.float64).reshape(SHAPE)


def stored_by_rows() -> MemoryStorage:
    whole = truth()
    storage: MemoryStorage = saved_by(3, lambda rank: {"w": share_of("w", whole, rank, 3)})
    return storage


@pytest.fixture(scope="module")
def storage() -> MemoryStorage:
    return stored_by_rows()


def load_box(
    exchange: Exchange, storage: Storage, box: Box, *, share_reads: bool | None = True
) -> remesh.checkpoint.RestoreReport:
    part = np.full(box.shape, -1.0)
    tensor = remesh.ShardedTensor.at_offset("w", part, SHAPE, box.offset)
    report = remesh.load(
        {"w": tensor},
        storage,
        group=exchange,
        share_reads=share_reads,
    )
    np.testing.assert_array_equal(part, truth()[box.slices])
    return report


def column(rank: int, world_size: int) -> Box:
    columns = SHAPE[1] // world_size
    return Box((0, rank * columns), (SHAPE[0], columns))


@pytest.mark.parametrize(
    ("world_size", "unseen"),
    [(2, 0), (4, 0), (4, 1), (4, 2)],
    ids=["2", "4", "apart", "some apart"],
)
def test_columns_of_rows_are_read_once(
    storage: MemoryStorage, world_size: int, unseen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if none or only some ranks see what others pack for them."""
    numbers = itertools.count(1)

    def look(*which: Any) -> Any:
        return None if unseen and next(numbers) % unseen == 0 else map_buffers(*which)

    monkeypatch.setattr(transfer, "map_buffers", look)

    def load(exchange: Exchange) -> remesh.checkpoint.RestoreReport:
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


def test_the_default_shares_columns_and_says_so(storage: MemoryStorage) -> None:
    def load(exchange: Exchange, share_reads: bool | None) -> remesh.checkpoint.RestoreReport:
        box = column(exchange.rank, exchange.world_size)
        return load_box(exchange, storage, box, share_reads=share_reads)

    stored = sum(file.num_bytes for file in remesh.Checkpoint(storage).index.files)
    for report in run_ranks(4, load, None):
        assert report.reads_shared
        assert report.group_bytes_needed == truth().nbytes
        assert truth().nbytes <= report.group_bytes_read <= stored
        assert "; all ranks, shared reads: read 96.0 MB for 96.0 MB wanted" in str(report)
    for report in run_ranks(4, load, False):
        assert not report.reads_shared
        assert report.group_bytes_read >= 4 * truth().nbytes
        assert "; all ranks, each for itself: read 384.0 MB for 96.0 MB wanted" in str(report)


@pytest.mark.parametrize("share_reads", [None, True], ids=["default", "asked for"])
def test_what_nobody_shares_is_read_by_the_rank_that_needs_it(
    storage: MemoryStorage, share_reads: bool | None
) -> None:
    def load(exchange: Exchange) -> remesh.checkpoint.RestoreReport:
        rows = SHAPE[0] // 3
        box = Box((exchange.rank * rows, 0), (rows, SHAPE[1]))
        return load_box(exchange, storage, box, share_reads=share_reads)

    for report in run_ranks(3, load):
        assert report.reads_shared == bool(share_reads)
        assert report.bytes_needed <= report.bytes_read <= report.bytes_needed + (2 << 20)


def test_a_rank_that_reads_damage_fails_all_and_stops_none() -> None:
    storage = stored_by_rows()
    (path,) = [p for p in storage.list() if p.endswith("00001.safetensors")]
    data = bytearray(storage.read(path))
    data[20_000_000] ^= 1
    storage.put(path, bytes(data), overwrite=True)
    errors = errors_of(2, load_box, storage, Box.whole(SHAPE))
    all_are(errors, remesh.CorruptCheckpointError, "00001.safetensors")


def save_and_load_over_gloo(exchange: Exchange, path: str) -> int:
    place = LocalStorage(path)
    rows = share_of("w", truth(), exchange.rank, exchange.world_size)
    remesh.save({"w": rows}, place, group=exchange)
    return load_box(exchange, place, column(exchange.rank, exchange.world_size)).bytes_read


def test_processes_swap_over_gloo(tmp_path: Path) -> None:
    read = run_processes(2, save_and_load_over_gloo, str(tmp_path))
    assert truth().nbytes <= sum(read) <= truth().nbytes + (2 << 20)


def touched_by(windows: list[int]) -> IntArray:
    return np.array([(window, 10, 5) for window in sorted(windows)], np.int64).reshape(-1, 3)


@given(st.lists(st.lists(st.integers(0, 40), unique=True), min_size=1, max_size=40))
@settings(deadline=None)
def test_the_assignment_of_readers(touched: list[list[int]]) -> None:
    assigned = assign_readers(list(map(touched_by, touched)), FAR)
    shares = [ReadAssignment.decode(share.encode()) for share in assigned]
    readers: dict[tuple[int, int], set[int]] = {}
    for rank, share in enumerate(shares):
        shared = [
            window for window in sorted(touched[rank]) if sum(window in of for of in touched) > 1
        ]
        assert share.windows.tolist() == shared
        rows = share.rows_of(np.array(sorted(touched[rank]), dtype=np.int64))
        assert (rows >= 0).sum() == len(shared)
        assert share.rows_of(np.array([99])).tolist() == [-1]
        for window, reader in zip(shared, share.reader.tolist(), strict=True):
            readers.setdefault((window, reader), set()).add(rank)
        assert (share.turn < share.num_turns).all()
    asking: dict[int, set[int]] = {rank: set() for rank in range(len(touched))}
    for (window, reader), sharers in readers.items():
        assert reader in sharers
        assert 2 <= len(sharers) <= MAX_SHARERS
        assert all(window in touched[rank] for rank in sharers)
        rounds = {
            int(shares[rank].turn[shares[rank].rows_of(np.array([window]))[0]]) for rank in sharers
        }
        assert len(rounds) == 1
        asking[reader] |= sharers - {reader}
    for rank, share in enumerate(shares):
        assert set(share.asked_by.tolist()) == asking[rank]
        read = share.turn[share.reader == rank]
        assert (np.bincount(read, minlength=1) * FAR.window_bytes <= TURN_BYTES).all()
    assert len({share.num_turns for share in shares}) == 1


@pytest.mark.parametrize(
    ("num_ranks", "num_reads", "most"),
    [
        (2, 16, 8),
        (4, 16, 8),
        (8, 16, 4),
        (16, 16, 2),
        (40, 16, 2),
        (2, 32, 8),
        (2, 8, 4),
        (2, 1, 1),
    ],
)
def test_turns_are_small_where_many_share_and_few_reads_are_made(
    num_ranks: int, num_reads: int, most: int
) -> None:
    limits = ReadLimits(2 << 20, num_reads=num_reads)
    shares = assign_readers([touched_by(list(range(160)))] * num_ranks, limits)
    for rank, share in enumerate(shares):
        assert np.bincount(share.turn[share.reader == rank]).max() == most


@given(
    st.lists(st.lists(st.integers(0, 20), unique=True), min_size=1, max_size=12),
    st.data(),
)
@settings(deadline=None)
def test_owners_read_whether_they_need_it_or_not(
    touched: list[list[int]], data: st.DataObject
) -> None:
    owners = data.draw(st.lists(st.integers(0, len(touched) - 1), min_size=21, max_size=21))
    shares = assign_to_owners(
        list(map(touched_by, touched)), FAR, lambda windows: np.array(owners)[windows]
    )
    for rank, share in enumerate(shares):
        needed = {window for of in touched for window in of if owners[window] == rank}
        assert set(share.windows.tolist()) == set(touched[rank]) | needed
        assert share.reader.tolist() == [owners[window] for window in share.windows.tolist()]
        others = {
            other for other in range(len(touched)) if other != rank and needed & set(touched[other])
        }
        assert set(share.asked_by.tolist()) == others


def test_sharing_pays_if_it_spares_more_than_it_moves() -> None:
    def pays(num_read: int, num_needed: int, cost: float) -> bool:
        """Of two ranks that read one window and need some bytes of it: reading once spares one."""
        touched = [np.array([(0, num_read, num_needed)])] * 2
        return assign_readers_if_cheaper(touched, ReadLimits(), exchange_cost=cost) is not None

    read, needed = 100 * SHARING_BYTES, 50 * SHARING_BYTES
    assert pays(read, needed, 1.97)
    assert not pays(read, needed, 1.98)
    # A small load is over before the ranks have agreed on anything.
    assert not pays(100, 0, 0.1)


def test_what_is_decided_for_whom() -> None:
    def touched(num_read: int, num_needed: int, windows: range = range(8)) -> IntArray:
        return np.array([(one, num_read << 20, num_needed << 20) for one in windows])

    replica, column = touched(8, 8), touched(8, 4)
    # Four columns of what was saved by rows: each byte is needed once, and read four times.
    quarter = touched(8, 2)
    local, remote = LOCAL_EXCHANGE_COST, REMOTE_EXCHANGE_COST
    assert assign_readers_if_cheaper([quarter] * 4, FAR, exchange_cost=local) is not None
    assert assign_readers_if_cheaper([column] * 2, FAR, exchange_cost=local) is not None
    # Replicas on one machine move as much as they spare.
    assert assign_readers_if_cheaper([replica] * 4, FAR, exchange_cost=local) is None
    assert assign_readers_if_cheaper([replica] * 4, FAR, exchange_cost=remote) is not None
    # Nothing is needed twice.
    apart = [touched(8, 8, range(4)), touched(8, 8, range(4, 8))]
    assert assign_readers_if_cheaper(apart, FAR, exchange_cost=remote) is None
    nothing = touched_by([])
    assert assign_readers_if_cheaper([nothing] * 2, FAR, exchange_cost=remote) is None
