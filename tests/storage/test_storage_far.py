"""Storages that are a network away: how requests follow size and latency; their number."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from obstore.store import MemoryStore, S3Store

import remesh
from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.report import RestoreReport
from remesh.exchange import Exchange
from remesh.pipeline import limits_for
from remesh.planner import ReadLimits, assignment
from remesh.storage import Buffer, Requests, flow_for, open_storage
from remesh.storage.buckets import _signing
from remesh.storage.distance import BYTES_UNDER_WAY, CONNECTIONS, JOB_CONNECTIONS, connect
from remesh.storage.object_store import NUM_UPLOADS, PART_BYTES, ObjectStorage
from remesh.testing import run_ranks
from tests.storage.object_servers import BUCKET, S3Server, s3_server

MIB = 1 << 20


class Far(ObjectStorage):
    """Objects in memory that say how far away they are, and count the reads at a time."""

    def __init__(self, store: MemoryStore, latency: float) -> None:
        super().__init__("memory://far", store)
        self._latency = latency
        self._counting = threading.Lock()
        self.under_way = self.most_under_way = self.largest = 0

    @property
    def latency(self) -> float:
        return self._latency

    def read_own(self, path: str, start: int, stop: int) -> Buffer:
        with self._counting:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.largest = max(self.largest, stop - start)
        try:
            return super().read_own(path, start, stop)
        finally:
            with self._counting:
                self.under_way -= 1


class TestFlow:
    def test_a_few_bytes_take_one_round_trip(self) -> None:
        flow = flow_for(48 * MIB, 0.1, sizes=(2 * MIB, 8 * MIB), min_number=16)
        assert flow.size == 2 * MIB
        assert flow.number * flow.size >= 48 * MIB

    def test_many_bytes_take_large_requests(self) -> None:
        near, far = (
            flow_for(10 << 30, latency, sizes=(2 * MIB, 8 * MIB), min_number=16)
            for latency in (0.001, 0.1)
        )
        assert near.size == far.size == 8 * MIB
        assert near.number == 16 < far.number

    @pytest.mark.parametrize("latency", [0.0, 0.01, 0.1, 3.0, 1e6])
    @pytest.mark.parametrize("num_bytes", [0, 1, 100 * MIB, 1 << 50])
    def test_what_is_under_way_is_bounded(self, num_bytes: int, latency: float) -> None:
        for sizes, least in (((2 * MIB, 8 * MIB), 16), (PART_BYTES, NUM_UPLOADS)):
            flow = flow_for(num_bytes, latency, sizes=sizes, min_number=least)
            assert sizes[0] <= flow.size <= sizes[1]
            assert least <= flow.number
            assert flow.size * flow.number <= BYTES_UNDER_WAY

    def test_a_near_server_is_asked_for_less_at_a_time(self) -> None:
        assert limits_for(0.001, 1 << 40) == ReadLimits(4 * MIB, 512 << 10, 8)
        for latency in (0.0, 0.005):
            assert limits_for(latency, 1 << 40) == ReadLimits(8 * MIB, MIB, 16)

    def test_a_local_storage_is_read_as_before(self) -> None:
        assert limits_for(None, 1 << 40) == ReadLimits()


def test_the_connections_that_a_job_opens_in_advance_are_bounded() -> None:
    class Opening(Far):
        def connect(self, number: int) -> None:
            opened.append(number)

    for world_size in (1, 2, 8, 300, 1024, 1025, 100_000):
        opened = list[int]()
        connect(Opening(MemoryStore(), latency=0.1), world_size)
        assert world_size * sum(opened) <= JOB_CONNECTIONS
        assert opened or world_size > JOB_CONNECTIONS
        assert opened == [CONNECTIONS] or world_size > JOB_CONNECTIONS // CONNECTIONS


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

        def load(exchange: Exchange) -> tuple[int, Far]:
            storage = Far(store, latency=0.1)
            save_rows(exchange, storage)
            before, target = (
                storage.requests,
                [np.zeros((1024, 256), np.float32) for _ in range(10)],
            )
            state = state_of(target, exchange.rank, 1)
            remesh.load(state, storage, group=exchange, on_report=reports.append)
            for number, part in enumerate(target):
                np.testing.assert_array_equal(part, shard(number, exchange.rank, 1))
            received = (storage.requests - before).bytes_received
            return received, storage

        found = run_ranks(4, load)
        small = sum(len(open_small(store, name)) for name in ("index", "values", "record"))
        # Each file begins with a header of some kilobytes, which shares its block with a tensor.
        assert 40 * MIB <= sum(received for received, _ in found) - small <= 40 * MIB + 4 * 4096
        assert all(report.reads_shared for report in reports)
        for _, storage in found:
            assert 1 <= storage.most_under_way <= 32
            assert storage.largest * storage.most_under_way <= BYTES_UNDER_WAY


class Together(Far):
    """Answers the first reads only when several are under way, more than two turns need."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, latency=0.1)
        self._enough, self._left = threading.Event(), 4

    def read_own(self, path: str, start: int, stop: int) -> Buffer:
        with self._counting:
            self._left -= 1
            if not self._left:
                self._enough.set()
        assert self._enough.wait(100)
        return super().read_own(path, start, stop)


def test_requests_under_way_do_not_depend_on_the_size_of_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assignment, "TURN_BYTES", 2 * MIB)  # a window
    store = MemoryStore()

    def load(exchange: Exchange) -> None:
        save_rows(exchange, Far(store, latency=0.1))
        target = [np.zeros((1024, 256), np.float32) for _ in range(10)]
        state = state_of(target, exchange.rank, 1)
        remesh.load(state, Together(store), group=exchange, share_reads=True)
        for number, part in enumerate(target):
            np.testing.assert_array_equal(part, shard(number, exchange.rank, 1))

    run_ranks(4, load)


def open_small(store: MemoryStore, name: str) -> bytes:
    """One of the small files of the only checkpoint in a store."""
    storage = ObjectStorage("memory://far", store)
    ends = {"index": "index.safetensors", "values": "values.msgpack", "record": "remesh.json"}
    [path] = [path for path in storage.list() if path.endswith(ends[name])]
    return storage.read(path)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


class TestCounts:
    """What is counted is what a server of others received."""

    @pytest.fixture
    def received(self, server: S3Server) -> Callable[[], Requests]:
        """The requests that arrived since the last call, in their classes."""

        def since() -> Requests:
            counts = Counter(server.methods)
            server.methods.clear()
            # S3 charges for what lists as for what writes.
            return Requests(
                counts["PUT"] + counts["POST"] + counts["LIST"],
                counts["GET"] + counts["HEAD"],
                counts["DELETE"],
            )

        since()
        return since

    def test_a_save_and_a_load(
        self,
        server: S3Server,
        received: Callable[[], Requests],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        url = f"s3://{BUCKET}/counted"
        storage = open_storage(url)
        assert isinstance(storage, ObjectStorage)
        data = np.arange(20 * MIB // 4, dtype=np.float32)
        with caplog.at_level(logging.INFO, "remesh"):
            remesh.save({"w": data}, storage)
        sent = storage.requests
        arrived = received()
        assert (sent.puts, sent.gets, sent.deletes) == (
            arrived.puts,
            arrived.gets,
            arrived.deletes,
        )
        assert sent.bytes_sent >= data.nbytes
        assert f"all ranks sent {sent}" in caplog.text
        reports: list[RestoreReport] = []
        target = {"w": np.zeros_like(data)}
        remesh.load(target, url, on_report=reports.append)
        np.testing.assert_array_equal(target["w"], data)
        of_load, arrived = reports[0].requests, received()
        assert (of_load.puts, of_load.gets) == (arrived.puts, arrived.gets)
        assert of_load.bytes_received >= data.nbytes
        assert str(of_load) in str(reports[0])
        assert reports[0].group_requests == of_load

    def test_the_requests_of_all_ranks(
        self, received: Callable[[], Requests], caplog: pytest.LogCaptureFixture
    ) -> None:
        url, reports = f"s3://{BUCKET}/all-ranks", list[RestoreReport]()

        def take_part(exchange: Exchange) -> None:
            row = np.full((1, 8), exchange.rank, np.float32)
            whole = remesh.ShardedTensor.from_rank_offsets("w", row, (0, exchange.rank, 3))
            remesh.save({"w": whole}, url, group=exchange)
            remesh.load({"w": whole}, url, group=exchange, on_report=reports.append)

        with caplog.at_level(logging.INFO, "remesh"):
            run_ranks(3, take_part)
        arrived = received()
        group = reports[0].group_requests
        [line] = [one for one in caplog.messages if one.startswith("all ranks sent")]
        puts, gets = (int(line.split(f" {kind}")[0].split()[-1]) for kind in ("PUT", "GET"))
        assert (puts + group.puts, gets + group.gets) == (arrived.puts, arrived.gets)
        assert sum((one.requests for one in reports), Requests()) == group

    @pytest.mark.parametrize("writer", ["thread", "process"])
    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_the_requests_of_a_background_save(
        self,
        num_ranks: int,
        writer: Any,
        received: Callable[[], Requests],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def take_part(exchange: Exchange) -> None:
            row = np.full((1, MIB), exchange.rank, np.float32)
            whole = remesh.ShardedTensor.from_rank_offsets("w", row, (0, exchange.rank, num_ranks))
            with remesh.Saver(group=exchange, writer=writer) as saver:
                saver.save_async({"w": whole}, f"s3://{BUCKET}/{writer}-{num_ranks}").result()

        with caplog.at_level(logging.INFO, "remesh"):
            run_ranks(num_ranks, take_part)
        arrived = received()
        [line] = [one for one in caplog.messages if " sent " in one]
        assert line.startswith("all ranks sent")
        puts, gets = (int(line.split(f" {kind}")[0].split()[-1]) for kind in ("PUT", "GET"))
        # Data files, rank 0's part, values, index and record; others look for the end longer.
        assert num_ranks + 4 <= puts <= arrived.puts
        assert 0 < gets <= arrived.gets
        assert f"({num_ranks * 4.2:.1f} MB out" in line

    def test_prices(self) -> None:
        requests = Requests(puts=2000, gets=10_000)
        assert requests.price() == pytest.approx(0.014)
        assert requests.price(per_1000_puts=1, per_1000_gets=0) == 2
        assert not Requests(bytes_sent=1)
        assert requests - requests == Requests()


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
