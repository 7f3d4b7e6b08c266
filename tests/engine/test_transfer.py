"""The engine that moves boxes between ranks: messages, turns, and ranks that fail."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh.core.geometry import Box, IntArray
from remesh.core.index import Index, StoredFile
from remesh.core.memory import CarrierArray, HostMemory
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import RankFailedError
from remesh.exchange import Exchange, run_on_all
from remesh.pipeline import Destination, from_memory
from remesh.pipeline import transfer as engine
from remesh.pipeline.from_memory import plan_between_memories
from remesh.planner import ReadLimits, Regions, plan_load, transfer
from remesh.planner.transfer import Messages, decode_request, encode_request, turns_of_distances
from tests.engine.scenes import all_are, errors_of
from tests.support import run_ranks

SIZE = 1000


def vector_index(num_files: int) -> Index:
    """Vectors of bytes, each a file of its own."""
    tensors = TensorTable.of([(f"t{row}", "uint8", (SIZE,)) for row in range(num_files)])
    boxes = BoxTable.of(tensors, [(row, Box.whole((SIZE,))) for row in range(num_files)])
    files = tuple(StoredFile(f"f{row}", SIZE) for row in range(num_files))
    rows = np.arange(num_files)
    return Index.of(boxes, rows, np.zeros_like(rows), files)


def regions_of(index: Index, rows: list[tuple[int, int]]) -> Regions:
    """A region of some bytes of a piece for each row."""
    offsets = np.array([[number] for number, _ in enumerate(rows)], np.int64).reshape(-1, 1)
    extents = np.array([[size] for _, size in rows], np.int64).reshape(-1, 1)
    piece = np.array([piece for piece, _ in rows], np.int64)
    return Regions(np.arange(len(rows)), piece, offsets, extents)


PARTS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 5)), max_size=9),
    max_size=4,
)


@given(PARTS)
def test_both_sides_agree_on_every_byte(parts: list[list[tuple[int, int, int]]]) -> None:
    """A sender has the regions of each rank among those of others, the receiver alone."""
    index = vector_index(4)
    asked = []
    for rank, rows in enumerate(parts):
        regions = regions_of(index, [row[:2] for row in rows])
        turn = np.array([turn for *_, turn in rows], np.int64)
        asked.append(((rank,), *decode_request(encode_request(regions, turn))))
    sent = Messages.of(index, asked)
    assert sent.num_bytes == sum(size for rows in parts for _, size, _ in rows)
    for (peers, regions, turn), rows in zip(asked, parts, strict=True):
        got = Messages.of(index, [(peers, regions, turn)])
        assert sorted(set(got.turn.tolist())) == sorted({turn for *_, turn in rows})
        leaving = [number for number, to in enumerate(sent.peers) if to == peers]
        assert sent.turn[leaving].tolist() == got.turn.tolist()
        for here, there in zip(range(len(got.turn)), leaving, strict=True):
            assert got.start[here] == 0
            assert got.stop[here] == sent.stop[there] - sent.start[there]
            mine = slice(*got.first[here : here + 2].tolist())
            its = slice(*sent.first[there : there + 2].tolist())
            assert (got.position[mine] == sent.position[its] - sent.start[there]).all()
            assert (got.regions.offsets[mine] == sent.regions.offsets[its]).all()
            assert (got.regions.piece[mine] == sent.regions.piece[its]).all()


@given(PARTS)
def test_messages_of_a_turn_lie_apart(parts: list[list[tuple[int, int, int]]]) -> None:
    index = vector_index(4)
    messages = Messages.of(
        index,
        [
            (
                (rank,),
                regions_of(index, [row[:2] for row in rows]),
                np.array([turn for *_, turn in rows], np.int64),
            )
            for rank, rows in enumerate(parts)
        ],
    )
    for turn in range(6):
        end = 0
        for number in messages.in_turn(turn):
            assert messages.turn[number] == turn
            assert messages.start[number] == end
            end = int(messages.start[number]) + transfer.HEAD_BYTES
            for row in range(*messages.first[number : number + 2].tolist()):
                assert end <= messages.position[row] < end + 16
                end = int(messages.position[row] + messages.regions.extents[row, 0])
            assert end <= messages.stop[number] <= messages.buffer_bytes()
            end = int(messages.stop[number])
    assert messages.turn_of_region.tolist() == sorted(t for rows in parts for *_, t in rows)


@given(
    st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(0, 4), min_size=n * n, max_size=n * n))
)
@settings(deadline=None)
def test_between_memories_each_rank_sends_and_gets_one_message_a_turn(counts: list[int]) -> None:
    num_ranks = int(len(counts) ** 0.5)
    num_messages = np.array(counts, np.int64).reshape(num_ranks, num_ranks)
    first = turns_of_distances(num_messages).tolist()
    taken: set[tuple[str, int, int]] = set()
    for receiver in range(num_ranks):
        for sender in range(num_ranks):
            for number in range(int(num_messages[receiver, sender])):
                turn = first[(receiver - sender) % num_ranks] + number
                assert turn < first[-1]
                ends = {("from", sender, turn), ("to", receiver, turn)}
                assert not ends & taken
                taken |= ends


class Broken(HostMemory):
    def copy_out(self, box: Box, into: CarrierArray) -> None:
        raise OSError("the device is gone")


@pytest.mark.parametrize("message_bytes", [100, 10_000])
@pytest.mark.parametrize("is_shared", [False, True])
def test_of_a_rank_that_fails_nothing_is_used(
    message_bytes: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank wants all vectors, and rank 1 cannot read its own."""
    if not is_shared:
        monkeypatch.setattr(engine, "map_buffers", lambda *_: None)
    monkeypatch.setattr(from_memory, "MESSAGE_BYTES", message_bytes)
    index, num_ranks = vector_index(3), 3
    filled = [[np.full(SIZE, 255, np.uint8) for _ in range(3)] for _ in range(num_ranks)]

    def run(exchange: Exchange) -> None:
        me = exchange.rank
        tensors = index.tensors
        whole = [(row, Box.whole((SIZE,))) for row in range(3)]
        plan = plan_load(
            index, BoxTable.of(tensors, whole), ReadLimits(window_bytes=64, page_bytes=1)
        )
        held = BoxTable.of(tensors, [whole[me]])
        source = (Broken if me == 1 else HostMemory)(np.full(SIZE, me, np.uint8))
        targets = [Destination((0,), HostMemory(array)) for array in filled[me]]

        def move() -> bytes:
            found = plan_between_memories(exchange, index, plan.regions, 3, held)
            found.execute(exchange, [source], targets, lambda _size: None)
            return b""

        run_on_all(exchange, move)

    errors = errors_of(num_ranks, run)
    all_are(errors, Exception, "the device is gone")
    assert [type(error) for error in errors] == [RankFailedError, OSError, RankFailedError]
    for rank in (0, 2):
        values = [np.unique(array).tolist() for array in filled[rank]]
        assert values == [[0], [255], [2]]


class Late(HostMemory):
    """Bytes of which the last ones are copied only when another rank was answered."""

    answered = threading.Event()

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        assert box.offset[0] < 800 or self.answered.wait(100)
        super().copy_out(box, into)


def test_a_rank_without_messages_is_not_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has gone through all turns before the others, which answer it in between."""
    Late.answered.clear()
    monkeypatch.setattr(engine, "map_buffers", lambda *_: None)
    monkeypatch.setattr(from_memory, "MESSAGE_BYTES", 64)
    index, filled = vector_index(1), np.zeros(SIZE, np.uint8)

    def run(exchange: Exchange) -> None:
        me, tensors = exchange.rank, index.tensors
        whole = [(0, Box.whole((SIZE,)))]
        wanted = BoxTable.of(tensors, whole if me == 1 else [])
        plan = plan_load(index, wanted, ReadLimits(window_bytes=64, page_bytes=1))
        held = BoxTable.of(tensors, whole if me == 0 else [])
        targets = [Destination((0,), HostMemory(filled))] * (me == 1)
        found = plan_between_memories(exchange, index, plan.regions, len(targets), held)
        assert found.plan.num_turns == 16
        if me == 2:
            all_gather = exchange.all_gather

            def answered(data: bytes) -> list[bytes]:
                replies = all_gather(data)
                Late.answered.set()
                return replies

            monkeypatch.setattr(exchange, "all_gather", answered)
        sources = [Late(np.full(SIZE, 7, np.uint8))] * (me == 0)
        found.execute(exchange, sources, targets, lambda _size: None)

    run_ranks(3, run)
    assert np.unique(filled).tolist() == [7]


def test_equal_requests_are_packed_once() -> None:
    index = vector_index(2)
    regions = regions_of(index, [(0, 50), (1, 60)])
    turn: IntArray = np.array([0, 1])
    messages = Messages.of(index, [((1, 2, 5), regions, turn)])
    assert messages.peers == [(1, 2, 5)] * 2
    assert messages.num_bytes == 3 * 110
    assert messages.buffer_bytes() == transfer.HEAD_BYTES + 64
