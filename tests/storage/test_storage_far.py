"""Storages that are a network away: how requests follow size and latency; their number."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from obstore.store import MemoryStore, S3Store

import remesh
from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.report import RestoreReport
from remesh.exchange import Exchange
from remesh.pipeline.read import limits_for
from remesh.planner import ReadLimits, assignment
from remesh.storage import Buffer, open_storage
from remesh.storage.object_store import NUM_UPLOADS, PART_BYTES, ObjectStorage, _signing
from remesh.storage.workers import BYTES_UNDER_WAY, flow_for
from tests.storage.object_servers import BUCKET, S3Server
from tests.support import run_ranks

MIB = 1 << 20


class Far(ObjectStorage):
    """Objects in memory that say how far away they are, and count the reads at a time."""

    def __init__(self, store: MemoryStore, latency: float) -> None:
        super().__init__("memory://far", store)
        self._latency = latency
        self._counting = threading.Lock()
        self.under_way = self.most_under_way = self.largest = self.received = 0

    @property
    def latency(self) -> float:
        return self._latency

    def read_range(self, path: str, start: int, num_bytes: int, buffer: Buffer) -> Buffer:
        with self._counting:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.largest = max(self.largest, num_bytes)
        try:
            found = super().read_range(path, start, num_bytes, buffer)
        finally:
            with self._counting:
                self.under_way -= 1
        with self._counting:
            self.received += found.size
        return found


class TestFlow:
    def test_a_few_bytes_take_one_round_trip(self) -> None:
        size, number = flow_for(48 * MIB, 0.1, sizes=(2 * MIB, 8 * MIB), min_number=16)
        assert size == 2 * MIB
        assert number * size >= 48 * MIB

    def test_many_bytes_take_large_requests(self) -> None:
        near, far = (
            flow_for(10 << 30, latency, sizes=(2 * MIB, 8 * MIB), min_number=16)
            for latency in (0.001, 0.1)
        )
        assert near == (8 * MIB, 16)
        assert far[0] == 8 * MIB
        assert far[1] > 16

    @pytest.mark.parametrize("latency", [0.0, 0.01, 0.1, 3.0, 1e6])
    @pytest.mark.parametrize("num_bytes", [0, 1, 100 * MIB, 1 << 50])
    def test_what_is_under_way_is_bounded(self, num_bytes: int, latency: float) -> None:
        for sizes, least in (((2 * MIB, 8 * MIB), 16), (PART_BYTES, NUM_UPLOADS)):
            size, number = flow_for(num_bytes, latency, sizes=sizes, min_number=least)
            assert sizes[0] <= size <= sizes[1]
            assert least <= number
            assert size * number <= BYTES_UNDER_WAY

    def test_a_near_server_is_asked_for_less_at_a_time(self) -> None:
        assert limits_for(0.001, 1 << 40) == ReadLimits(4 * MIB, 512 << 10, 8)
        for latency in (0.0, 0.005):
            assert limits_for(latency, 1 << 40) == ReadLimits(8 * MIB, MIB, 16)

    def test_a_local_storage_is_read_as_before(self) -> None:
        assert limits_for(None, 1 << 40) == ReadLimits()


def shard(number: int, rank: int, dim: int) -> Any:
    """A quarter of a tensor of 4 MiB, cut along a dim."""
    whole = np.arange(MIB, dtype=np.float32).reshape(1024, 1024) + number
    return np.ascontiguousarray(np.split(whole, 4, axis=dim)[rank])


def state_of(parts: Sequence[Any], rank: int, dim: int) -> dict[str, remesh.ShardedTensor]:
    """A rank's parts of all tensors as a state."""
    make = remesh.ShardedTensor.from_rank_offsets
    return {
        str(number): make(str(number), part, (dim, rank, 4)) for number, part in enumerate(parts)
    }


def save_rows(exchange: Exchange, storage: ObjectStorage) -> None:
    """Save ten tensors, a quarter of the rows of each on each rank."""
    rows = [shard(number, exchange.rank, 0) for number in range(10)]
    remesh.save(state_of(rows, exchange.rank, 0), storage, group=exchange)


def load_columns(exchange: Exchange, storage: ObjectStorage, **options: Any) -> RestoreReport:
    """Load a quarter of the columns of each tensor on each rank, and check them."""
    target = [np.zeros((1024, 256), np.float32) for _ in range(10)]
    state = state_of(target, exchange.rank, 1)
    report = remesh.load(state, storage, group=exchange, **options)
    for number, part in enumerate(target):
        np.testing.assert_array_equal(part, shard(number, exchange.rank, 1))
    return report


class TestReads:
    def test_ranks_plan_alike_whatever_each_of_them_measures(self) -> None:
        store = MemoryStore()

        def find(exchange: Exchange) -> ReadLimits:
            storage = Far(store, latency=0.1 / (1 + exchange.rank))
            save_rows(exchange, storage)
            return open_shared(exchange, storage).limits

        found = run_ranks(4, find)
        assert found == [limits_for(0.1, 10 * MIB)] * 4

    def test_columns_of_rows_are_asked_for_once(self) -> None:
        store, reports = MemoryStore(), list[RestoreReport]()

        def load(exchange: Exchange) -> Far:
            storage = Far(store, latency=0.1)
            save_rows(exchange, storage)
            reports.append(load_columns(exchange, storage))
            return storage

        found = run_ranks(4, load)
        # Each file begins with a header of some kilobytes, which shares its block with a tensor.
        assert 40 * MIB <= sum(storage.received for storage in found) <= 40 * MIB + 4 * 4096
        assert all(report.reads_shared for report in reports)
        for storage in found:
            assert 1 <= storage.most_under_way <= 32
            assert storage.largest * storage.most_under_way <= BYTES_UNDER_WAY


class Together(Far):
    """Answers the first reads only when several are under way, more than two turns need."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, latency=0.1)
        self._enough, self._left = threading.Event(), 4

    def read_range(self, path: str, start: int, num_bytes: int, buffer: Buffer) -> Buffer:
        with self._counting:
            self._left -= 1
            if not self._left:
                self._enough.set()
        assert self._enough.wait(100)
        return super().read_range(path, start, num_bytes, buffer)


def test_requests_under_way_do_not_depend_on_the_size_of_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assignment, "TURN_BYTES", 2 * MIB)  # a window
    store = MemoryStore()

    def load(exchange: Exchange) -> None:
        save_rows(exchange, Far(store, latency=0.1))
        load_columns(exchange, Together(store), share_reads=True)

    run_ranks(4, load)


def test_the_debug_log_counts_what_a_server_of_others_received(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    url, data = f"s3://{BUCKET}/counted", np.arange(20 * MIB // 4, dtype=np.float32)
    storage = open_storage(url)
    server.methods.clear()
    with caplog.at_level(logging.DEBUG, "remesh"):
        remesh.save({"w": data}, storage)
        target = {"w": np.zeros_like(data)}
        remesh.load(target, storage)
    np.testing.assert_array_equal(target["w"], data)
    told = [re.fullmatch(rf"{url}: request (\d+), (\w+).*", line) for line in caplog.messages]
    counted = [(int(one[1]), one[2]) for one in told if one is not None]
    assert sorted(number for number, _ in counted) == list(range(1, len(counted) + 1))
    assert Counter(method for _, method in counted) == Counter(server.methods)


@pytest.mark.parametrize(
    ("environment", "config"),
    [
        ({}, {"unsigned_payload": True}),
        ({"AWS_ENDPOINT_URL": "https://store.example"}, {"unsigned_payload": True}),
        ({"AWS_ENDPOINT_URL": "http://store.example"}, {}),
        ({"AWS_UNSIGNED_PAYLOAD": "false"}, {}),
    ],
)
def test_tls_takes_the_place_of_signed_content(
    environment: dict[str, str], config: dict[str, bool]
) -> None:
    assert _signing(environment) == config
    S3Store("bucket", region="us-east-1", **config)  # type: ignore[arg-type]
