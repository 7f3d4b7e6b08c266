"""What every storage and every exchange must do, as tests to inherit.

Subclass a suite, supply its hook, and pytest runs the whole of it::

    class TestMyStorage(StorageConformance):
        def make_storage(self, tmp_path):
            return MyStorage(tmp_path)

The suites test the promises in the docstrings of `remesh.storage` and `remesh.exchange` and
nothing else, so a storage may do more than they ask.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import pytest

from remesh.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    MismatchError,
    RankFailedError,
    StateError,
    StorageError,
)
from remesh.exchange import Exchange, run_joined, run_on_all, run_on_one
from remesh.storage import (
    ALIGNMENT,
    Buffer,
    Storage,
    aligned_buffer,
)
from tests.support.outcomes import Outcome, Raised, returned_values

T = TypeVar("T")


class StorageConformance:
    """The suite for storages; supply `make_storage`."""

    finds_files_late: ClassVar[bool] = False
    """Whether `create` begins a file that exists already, and the writer raises the error, as
    `Storage.create` allows a storage that is a network away."""

    def make_storage(self, tmp_path: Path) -> Storage:
        """An empty storage; `tmp_path` is an empty directory that pytest removes."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        """The storage under test."""
        return self.make_storage(tmp_path)

    # ----- whole small files -----

    def test_empty_storage_lists_nothing(self, storage: Storage) -> None:
        assert storage.list() == []
        assert storage.list("step_1/") == []

    @pytest.mark.parametrize("size", [0, 1, ALIGNMENT, 100_001])
    def test_put_then_read(self, storage: Storage, size: int) -> None:
        data = _pattern(size).tobytes()
        storage.put("step_1/values", data, overwrite=False)
        assert storage.read("step_1/values") == data
        assert storage.exists("step_1/values")
        assert not storage.exists("step_1/value")
        assert storage.size("step_1/values") == size

    def test_put_does_not_replace(self, storage: Storage) -> None:
        storage.put("a/b", b"old", overwrite=False)
        with pytest.raises(CheckpointExistsError, match="a/b"):
            storage.put("a/b", b"new", overwrite=False)
        assert storage.read("a/b") == b"old"
        assert storage.list() == ["a/b"]

    @pytest.mark.parametrize("content", [b"", b"longer than before"])
    def test_put_replaces_on_request(self, storage: Storage, content: bytes) -> None:
        storage.put("a/b", b"old", overwrite=True)
        storage.put("a/b", content, overwrite=True)
        assert storage.read("a/b") == content

    def test_one_of_many_puts_wins(self, storage: Storage) -> None:
        barrier = threading.Barrier(8)

        def race(number: int) -> bool:
            barrier.wait()
            try:
                storage.put("race", b"%d" % number * 1000, overwrite=False)
            except CheckpointExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(race, range(8)))
        assert won.count(True) == 1
        assert storage.read("race") == b"%d" % won.index(True) * 1000
        assert storage.list() == ["race"]

    def test_readers_see_whole_puts(self, storage: Storage) -> None:
        def content(number: int) -> bytes:
            return b"%d" % (number % 10) * (5000 + 1000 * (number % 2))

        storage.put("hint", content(0), overwrite=True)
        stop = threading.Event()

        def replace() -> None:
            for number in range(50):
                storage.put("hint", content(number), overwrite=True)
            stop.set()

        seen = set()
        buffer = aligned_buffer(2 * ALIGNMENT)
        with ThreadPoolExecutor(1) as pool:
            replacing = pool.submit(replace)
            while not stop.is_set() and not replacing.done():
                seen.add(storage.read("hint"))
                seen.add(buffer[: storage.read_into("hint", 0, buffer)].tobytes())
                assert storage.list() == ["hint"]
            replacing.result()
        assert seen <= {content(number) for number in range(10)}

    # ----- reading -----

    def test_ranges(self, storage: Storage) -> None:
        storage.put("file", b"0123456789", overwrite=False)
        assert storage.read("file", 3) == b"3456789"
        assert storage.read("file", 3, 6) == b"345"
        assert storage.read("file", 8, 100) == b"89"
        assert storage.read("file", 10, 12) == b""
        assert storage.read("file", 50) == b""
        assert storage.read("file", 6, 3) == b""

    @pytest.mark.parametrize("size", [0, 5, ALIGNMENT, 3 * ALIGNMENT + 7])
    def test_read_into(self, storage: Storage, size: int) -> None:
        content = _pattern(size)
        _write(storage, "data/0", content)
        starts = (0, 1, ALIGNMENT, 2 * ALIGNMENT)
        lengths = (0, 1, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT + 1)
        for start, length, shift in itertools.product(starts, lengths, (0, 1)):
            buffer = aligned_buffer(length + shift)[shift:]
            buffer[:] = 255
            expected = content[start : start + length]
            assert storage.read_into("data/0", start, buffer) == expected.size
            np.testing.assert_array_equal(buffer[: expected.size], expected)
            found = storage.read_range("data/0", start, length, buffer[:length])
            np.testing.assert_array_equal(found, expected)

    def test_missing_files(self, storage: Storage) -> None:
        storage.put("here", b"x", overwrite=False)
        for path in ("gone", "no/such/directory", "here/below"):
            with pytest.raises(CheckpointNotFoundError, match=path):
                storage.read(path)
            with pytest.raises(CheckpointNotFoundError, match=path):
                storage.size(path)
            with pytest.raises(CheckpointNotFoundError, match=path):
                storage.read_into(path, 0, aligned_buffer(ALIGNMENT))
            with pytest.raises(CheckpointNotFoundError, match=path):
                storage.read_range(path, 0, ALIGNMENT, aligned_buffer(ALIGNMENT))

    # ----- files written by ranges -----

    @pytest.mark.parametrize("size", [0, 1, ALIGNMENT - 1, ALIGNMENT, 5 * ALIGNMENT + 1])
    @pytest.mark.parametrize("chunk", [ALIGNMENT, 2 * ALIGNMENT, 1000])
    def test_create_then_read(self, storage: Storage, *, size: int, chunk: int) -> None:
        content = _pattern(size)
        _write(storage, "step_1/data/0", content, chunk)
        assert storage.size("step_1/data/0") == size
        assert storage.read("step_1/data/0") == content.tobytes()

    def test_ranges_in_any_order_and_from_threads(self, storage: Storage) -> None:
        content = _pattern(64 * ALIGNMENT + 123)
        # Lengths that are no multiples of the alignment, so that direct and buffered writes meet.
        edges = sorted({0, content.size, *range(0, content.size, 3 * ALIGNMENT + 512)})
        ranges = list(itertools.pairwise(edges))
        writer = storage.create("file", content.size)
        buffer = aligned_buffer(content.size)
        buffer[:] = content

        def write(span: tuple[int, int]) -> None:
            writer.write(span[0], buffer[span[0] : span[1]])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, ranges[::-1]))
        writer.finish()
        assert storage.read("file") == content.tobytes()

    def test_unwritten_ranges_are_counted(self, storage: Storage) -> None:
        writer = storage.create("file", 3 * ALIGNMENT)
        writer.write(ALIGNMENT, _aligned(_pattern(ALIGNMENT)))
        writer.finish()
        assert storage.size("file") == 3 * ALIGNMENT
        assert storage.read("file", ALIGNMENT, 2 * ALIGNMENT) == _pattern(ALIGNMENT).tobytes()

    @pytest.mark.parametrize("num_bytes", [0, 1, ALIGNMENT, 2 * ALIGNMENT + 7])
    def test_a_file_may_be_shorter_than_was_said(self, storage: Storage, num_bytes: int) -> None:
        writer = storage.create("file", 3 * ALIGNMENT)
        writer.write(0, _aligned(_pattern(num_bytes)))
        writer.finish(num_bytes)
        assert storage.size("file") == num_bytes
        assert storage.read("file") == _pattern(num_bytes).tobytes()

    def test_create_does_not_replace(self, storage: Storage) -> None:
        _write(storage, "file", _pattern(10))
        begin = _write if self.finds_files_late else _create
        with pytest.raises(StorageError, match=r"file.*exists"):
            begin(storage, "file", _pattern(11))
        assert storage.read("file") == _pattern(10).tobytes()

    def test_a_file_is_replaced_when_the_new_one_is_whole(self, storage: Storage) -> None:
        if storage.shares_files:
            return  # there a file is renamed
        _write(storage, "file", _pattern(10))
        for num_bytes in (11, 3 * ALIGNMENT):
            old = storage.read("file")
            for ends in (False, True):
                writer = storage.create("file", num_bytes, overwrite=True)
                writer.write(0, _aligned(_pattern(num_bytes)))
                assert storage.read("file") == old
                writer.finish() if ends else writer.abort()
                assert storage.read("file") == (_pattern(num_bytes).tobytes() if ends else old)

    def test_one_writer_at_a_time(self, storage: Storage) -> None:
        writer = storage.create("file", 10)
        with pytest.raises(StorageError, match="exists"):
            storage.create("file", 10)
        writer.abort()
        _write(storage, "file", _pattern(5))
        assert storage.size("file") == 5

    def test_abort_removes(self, storage: Storage) -> None:
        writer = storage.create("a/file", 2 * ALIGNMENT)
        writer.write(0, _aligned(_pattern(ALIGNMENT)))
        writer.abort()
        writer.abort()
        assert storage.list() == []
        with pytest.raises(CheckpointNotFoundError):
            storage.read("a/file")

    def test_abort_after_finish_does_nothing(self, storage: Storage) -> None:
        writer = storage.create("file", 3)
        writer.write(0, _pattern(3))
        writer.finish()
        writer.abort()
        assert storage.read("file") == _pattern(3).tobytes()

    # ----- names -----

    def test_list_is_sorted_and_filtered(self, storage: Storage) -> None:
        paths = ["step_2/a", "step_10/data/0", "step_1/b", "step_1/data/1", "step_1/data/0", "top"]
        for path in paths:
            storage.put(path, b"", overwrite=False)
        assert storage.list() == sorted(paths)
        assert storage.list("step_1/") == ["step_1/b", "step_1/data/0", "step_1/data/1"]
        assert storage.list("step_1") == sorted(p for p in paths if p.startswith("step_1"))
        assert storage.list("step_1/data/1") == ["step_1/data/1"]
        assert storage.list("step_1/data/0/") == []
        assert storage.list("no/such/") == []

    def test_sizes_of_all_files(self, storage: Storage) -> None:
        assert storage.list_sizes() == {}
        storage.put("a/b", b"12", overwrite=False)
        storage.put("top", b"", overwrite=False)
        _write(storage, "a/data", _pattern(ALIGNMENT + 1))
        sizes = {"a/b": 2, "a/data": ALIGNMENT + 1, "top": 0}
        assert storage.list_sizes() == sizes
        assert storage.list_sizes("a/d") == {"a/data": ALIGNMENT + 1}
        assert sorted(storage.list_sizes()) == storage.list()

    def test_entries_of_a_directory(self, storage: Storage) -> None:
        assert storage.list_directory().files == {}
        for path in ("a/b/c", "a/d", "aa/e", "top"):
            storage.put(path, b"12", overwrite=False)
        root, inside = storage.list_directory(), storage.list_directory("a")
        assert (root.directories, set(root.files)) == (("a", "aa"), {"top"})
        assert (inside.directories, set(inside.files)) == (("b",), {"d"})
        assert inside.files["d"].num_bytes == 2
        assert storage.list_directory("nothing").files == {}

    def test_delete_many(self, storage: Storage) -> None:
        for path in ("a/b", "a/c", "top"):
            storage.put(path, b"1", overwrite=False)
        storage.delete_many([])
        storage.delete_many(["a/b", "a/c", "never/was"])
        assert storage.list() == ["top"]

    def test_delete(self, storage: Storage) -> None:
        storage.put("a/b/c", b"1", overwrite=False)
        storage.put("a/d", b"2", overwrite=False)
        storage.delete("a/b/c")
        storage.delete("a/b/c")
        storage.delete("never/was")
        assert storage.list() == ["a/d"]
        with pytest.raises(CheckpointNotFoundError):
            storage.read("a/b/c")
        storage.put("a/b/c", b"3", overwrite=False)
        assert storage.read("a/b/c") == b"3"

    def test_a_link_stays_if_the_first_one_goes(self, storage: Storage) -> None:
        data = _pattern(100_001).tobytes()
        storage.put("a/first", data, overwrite=False)
        assert not storage.link_from(storage, "a/absent", "b/absent", 1)
        assert not storage.link_from(storage, "a/first", "b/cut", len(data) - 1)
        is_linked = storage.link_from(storage, "a/first", "b/second", len(data))
        storage.sync()
        storage.delete("a/first")
        assert storage.list() == ["b/second"] * is_linked
        if is_linked:
            assert storage.read("b/second") == data

    @pytest.mark.parametrize(
        "path", ["", "..", "../out", "a/../../out", "/etc/passwd", "a//b", "a/", "./a", "a\0b"]
    )
    def test_paths_stay_inside(self, storage: Storage, path: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: storage.read(path),
            lambda: storage.size(path),
            lambda: storage.read_into(path, 0, aligned_buffer(1)),
            lambda: storage.put(path, b"", overwrite=True),
            lambda: storage.create(path, 1),
            lambda: storage.delete(path),
        ]
        for call in calls:
            with pytest.raises(StorageError, match="not a path inside"):
                call()

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../../", "/etc/"])
    def test_prefixes_stay_inside(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(StorageError, match="not a path inside"):
            storage.list(prefix)

    # ----- the rest -----

    def test_sync_and_space(self, storage: Storage) -> None:
        first = storage.space()
        _write(storage, "a/b/file", _pattern(10))
        storage.sync()
        storage.sync()
        second = storage.space()
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first.identity == second.identity
            assert first.free_bytes >= 0

    def test_url_names_the_storage(self, storage: Storage) -> None:
        assert storage.url
        with pytest.raises(CheckpointNotFoundError) as caught:
            storage.read("gone")
        assert storage.url in str(caught.value)


class ExchangeConformance:
    """The suite for exchanges; supply `run`, and `world_size` if not 1, 2 and 3 are to be tested.

    What the ranks do is in functions of this module, so `run` may hand them to processes.
    """

    @pytest.fixture(params=[1, 2, 3])
    def world_size(self, request: pytest.FixtureRequest) -> int:
        """Number of ranks; override to choose others."""
        size: int = request.param
        return size

    def run(self, world_size: int, fn: Callable[..., T], *args: object) -> list[Outcome[T]]:
        """Call `fn(exchange, *args)` on each rank of a new group; how each ended."""
        raise NotImplementedError

    def test_ranks(self, world_size: int) -> None:
        expected = [(rank, world_size) for rank in range(world_size)]
        assert returned_values(self.run(world_size, _who)) == expected

    @pytest.mark.parametrize("size", [0, 1, 70_000])
    def test_messages_arrive(self, world_size: int, size: int) -> None:
        # Sizes differ between ranks, and rank 0 has the smallest.
        messages = [_message(rank, size + rank) for rank in range(world_size)]
        for rank, got in enumerate(returned_values(self.run(world_size, _talk, size))):
            all_gathered, gathered, scattered, received = got
            assert all_gathered == messages
            assert gathered == (messages if rank == 0 else None)
            assert scattered == _message(100 + rank, size + rank)
            assert received == _message(7, size)

    def test_one_rank_has_all_the_bytes(self, world_size: int) -> None:
        last = world_size - 1
        expected = [b"" if rank != last else _message(last, 200_000) for rank in range(world_size)]
        for got in returned_values(self.run(world_size, _talk_unevenly)):
            assert got == expected

    @pytest.mark.parametrize("size", [0, 1, 70_000])
    def test_swap(self, world_size: int, size: int) -> None:
        for rank, got in enumerate(returned_values(self.run(world_size, _swap, size))):
            # The diagonal included; the message from a rank to itself is one of them.
            expected = [
                _message(100 * r + rank + part, size * (r + rank))
                for r in range(world_size)
                for part in range((r + rank) % 3)
            ]
            assert got == expected

    def test_calls_keep_their_order(self, world_size: int) -> None:
        expected = [[b"%d:%d" % (turn, r) for r in range(world_size)] for turn in range(50)]
        assert returned_values(self.run(world_size, _take_turns)) == [expected] * world_size

    def test_run_on_all_returns_everything(self, world_size: int) -> None:
        expected = [b"from %d" % rank for rank in range(world_size)]
        assert returned_values(self.run(world_size, _all_succeed)) == [expected] * world_size

    def test_run_on_one_returns_the_result(self, world_size: int) -> None:
        assert returned_values(self.run(world_size, _one_succeeds)) == [b"from 0"] * world_size

    def test_run_joined_returns_the_shares(self, world_size: int) -> None:
        total = sum(range(world_size))
        expected = [b"%d of %d" % (rank, total) for rank in range(world_size)]
        assert returned_values(self.run(world_size, _join)) == expected

    @pytest.mark.parametrize("step", ["all", "joined"])
    def test_own_error_reaches_all(self, world_size: int, step: str) -> None:
        outcomes = self.run(world_size, _fail_on_last, step, StateError("weight: no such dtype"))
        last = world_size - 1
        for rank, error in enumerate(_errors(outcomes)):
            assert type(error) is StateError
            assert "weight: no such dtype" in str(error)
            assert error.rank == (None if rank == last else last)

    def test_lists_of_a_mismatch_reach_all(self, world_size: int) -> None:
        thrown = MismatchError("does not fit", ("a", "b"), ("c",), ("d: shape",))
        for error in _errors(self.run(world_size, _fail_on_last, "all", thrown)):
            assert isinstance(error, MismatchError)
            assert (error.missing, error.unexpected) == (("a", "b"), ("c",))
            assert error.conflicts == ("d: shape",)

    @pytest.mark.parametrize("step", ["all", "joined"])
    def test_foreign_error_reaches_all(self, world_size: int, step: str) -> None:
        outcomes = self.run(world_size, _fail_on_last, step, KeyError("lr"))
        last = world_size - 1
        for rank, error in enumerate(_errors(outcomes)):
            if rank == last:
                assert type(error) is KeyError
                continue
            assert isinstance(error, RankFailedError)
            assert (error.rank, error.error_type) == (last, "builtins.KeyError")
            assert "'lr'" in str(error)

    def test_error_of_rank_0_reaches_all(self, world_size: int) -> None:
        outcomes = self.run(world_size, _fail_on_first, StorageError("disk: gone"))
        for rank, error in enumerate(_errors(outcomes)):
            assert type(error) is StorageError
            assert error.rank == (None if rank == 0 else 0)

    def test_error_while_joining_reaches_all(self, world_size: int) -> None:
        outcomes = self.run(world_size, _fail_to_join)
        for rank, error in enumerate(_errors(outcomes)):
            if rank == 0:
                assert type(error) is ZeroDivisionError
            else:
                assert isinstance(error, RankFailedError)
                assert error.rank == 0

    def test_the_group_survives_an_error(self, world_size: int) -> None:
        outcomes = self.run(world_size, _fail_then_talk)
        expected = [b"%d" % rank for rank in range(world_size)]
        assert returned_values(outcomes) == [expected] * world_size


# ----- what ranks do in the suite for exchanges -----


def _who(exchange: Exchange) -> tuple[int, int]:
    return exchange.rank, exchange.world_size


def _talk(exchange: Exchange, size: int) -> tuple[list[bytes], list[bytes] | None, bytes, bytes]:
    rank = exchange.rank
    own = _message(rank, size + rank)
    shares = [_message(100 + peer, size + peer) for peer in range(exchange.world_size)]
    return (
        exchange.all_gather(own),
        exchange.gather(own),
        exchange.scatter(shares if rank == 0 else None),
        exchange.broadcast(_message(7, size) if rank == 0 else None),
    )


def _talk_unevenly(exchange: Exchange) -> list[bytes]:
    last = exchange.world_size - 1
    own = _message(last, 200_000) if exchange.rank == last else b""
    shares = exchange.gather(own)
    assert exchange.scatter(shares) == own
    return exchange.all_gather(own)


def _swap(exchange: Exchange, size: int) -> list[bytes]:
    me, ranks = exchange.rank, range(exchange.world_size)
    outgoing = [
        [
            np.frombuffer(_message(100 * me + rank + part, size * (me + rank)), np.uint8).copy()
            for part in range((me + rank) % 3)
        ]
        for rank in ranks
    ]
    incoming = [
        [np.zeros(size * (me + rank), np.uint8) for _ in range((me + rank) % 3)] for rank in ranks
    ]
    exchange.swap(outgoing, incoming)
    return [bytes(buffer) for buffers in incoming for buffer in buffers]


def _take_turns(exchange: Exchange) -> list[list[bytes]]:
    return [exchange.all_gather(b"%d:%d" % (turn, exchange.rank)) for turn in range(50)]


def _all_succeed(exchange: Exchange) -> list[bytes]:
    return run_on_all(exchange, lambda: b"from %d" % exchange.rank)


def _one_succeeds(exchange: Exchange) -> bytes:
    return run_on_one(exchange, lambda: b"from %d" % exchange.rank)


def _join(exchange: Exchange) -> bytes:
    def join(parts: list[bytes]) -> list[bytes]:
        total = sum(int(part) for part in parts)
        return [b"%s of %d" % (part, total) for part in parts]

    return run_joined(exchange, lambda: b"%d" % exchange.rank, join)


def _fail_on_last(exchange: Exchange, step: str, error: Exception) -> None:
    def act() -> bytes:
        if exchange.rank == exchange.world_size - 1:
            raise error
        return b"fine"

    if step == "all":
        run_on_all(exchange, act)
    else:
        run_joined(exchange, act, lambda parts: parts)


def _fail_on_first(exchange: Exchange, error: Exception) -> None:
    def act() -> bytes:
        raise error

    run_on_one(exchange, act)


def _fail_to_join(exchange: Exchange) -> None:
    run_joined(exchange, lambda: b"", lambda parts: [b"%d" % (1 // 0) for _ in parts])


def _fail_then_talk(exchange: Exchange) -> list[bytes]:
    with pytest.raises((StateError, RankFailedError)):
        _fail_on_last(exchange, "all", StateError("first"))
    with pytest.raises((KeyError, RankFailedError)):
        _fail_on_last(exchange, "joined", KeyError("second"))
    return exchange.all_gather(b"%d" % exchange.rank)


# ----- helpers -----


def _errors(outcomes: list[Outcome[T]]) -> list[BaseException]:
    """The exceptions of ranks that all raised."""
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
    return [outcome.error for outcome in outcomes if isinstance(outcome, Raised)]


def _message(rank: int, size: int) -> bytes:
    return bytes((rank + index) % 251 for index in range(min(size, 997))).ljust(size, b"~")


def _pattern(size: int) -> Buffer:
    """Bytes that tell positions apart, also those that differ by a multiple of a page."""
    return (np.arange(size, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)


def _aligned(data: Buffer) -> Buffer:
    buffer = aligned_buffer(data.size)
    buffer[:] = data
    return buffer


def _create(storage: Storage, path: str, content: Buffer) -> None:
    storage.create(path, content.size)


def _write(storage: Storage, path: str, content: Buffer, chunk: int = 4 * ALIGNMENT) -> None:
    writer = storage.create(path, content.size)
    for start in range(0, content.size, chunk):
        writer.write(start, _aligned(content[start : start + chunk]))
    writer.finish()
