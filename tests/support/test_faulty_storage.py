from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import pytest

from remesh.errors import NoSpaceError, StorageError
from remesh.storage import MemoryStorage, Storage
from tests.support import Fail, FaultyStorage, FlipBit, Slow, Truncate


def write(storage: Storage, path: str, data: bytes, chunk: int) -> None:
    writer = storage.create(path, len(data))
    content = np.frombuffer(data, np.uint8)
    for start in range(0, len(data), chunk):
        writer.write(start, content[start : start + chunk])
    writer.finish()


def test_failures_are_counted() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, [Fail("write", "data/*", errno.ENOSPC, skip=2, times=1)])
    write(storage, "other", bytes(40), 10)
    writer = storage.create("data/0", 40)
    writer.write(0, np.ones(10, np.uint8))
    writer.write(10, np.ones(10, np.uint8))
    with pytest.raises(NoSpaceError, match="injected: cannot write data/0: No space left"):
        writer.write(20, np.ones(10, np.uint8))
    writer.write(20, np.ones(20, np.uint8))
    writer.finish()
    assert inner.read("data/0") == b"\1" * 40


@pytest.mark.parametrize(
    "operation",
    ["list", "size", "read", "read_into", "put", "create", "delete", "sync", "space"],
)
def test_every_operation_can_fail(operation: str) -> None:
    inner = MemoryStorage()
    inner.put("file", b"x", overwrite=False)
    storage = FaultyStorage(inner, [Fail(operation)])
    calls: dict[str, Callable[[], object]] = {
        "list": storage.list,
        "size": lambda: storage.size("file"),
        "read": lambda: storage.read("file"),
        "read_into": lambda: storage.read_into("file", 0, np.empty(1, np.uint8)),
        "put": lambda: storage.put("file", b"y", overwrite=True),
        "create": lambda: storage.create("new", 1),
        "delete": lambda: storage.delete("file"),
        "sync": storage.sync,
        "space": storage.space,
    }
    for name, call in calls.items():
        if name == operation:
            with pytest.raises(StorageError, match=rf"(?s)cannot {operation}.*Input/output error"):
                call()
    assert inner.read("file") == b"x"
    assert inner.list() == ["file"]
    assert [name for name, _ in storage.calls] == [operation]


@pytest.mark.parametrize("operation", ["finish", "abort"])
def test_writers_can_fail_at_their_end(operation: str) -> None:
    inner = MemoryStorage()
    writer = FaultyStorage(inner, [Fail(operation, times=1)]).create("file", 1)
    end = writer.finish if operation == "finish" else writer.abort
    with pytest.raises(StorageError, match=operation):
        end()
    writer.abort()
    assert inner.list() == []


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("position", [0, 13, 99])
def test_a_wrong_bit_may_be_stored(chunk: int, position: int) -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, [FlipBit("data/*", position, bit=3, when="written")])
    write(storage, "data/0", bytes(100), chunk)
    write(storage, "other", bytes(100), chunk)
    storage.put("data/small", bytes(100), overwrite=False)
    wrong = bytearray(100)
    wrong[position] = 8
    assert inner.read("data/0") == inner.read("data/small") == bytes(wrong)
    assert storage.read("data/0") == bytes(wrong)
    assert inner.read("other") == bytes(100)


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (13, 14), (10, 20), (0, 13), (14, 100)])
def test_a_wrong_bit_may_be_read(start: int, stop: int) -> None:
    inner = MemoryStorage()
    inner.put("file", bytes(100), overwrite=False)
    storage = FaultyStorage(inner, [FlipBit("file", 13)])
    expected = bytearray(100)
    expected[13] = 1
    buffer = np.full(stop - start, 9, np.uint8)
    assert storage.read_into("file", start, buffer) == stop - start
    assert storage.read("file", start, stop) == buffer.tobytes() == bytes(expected[start:stop])
    assert inner.read("file") == bytes(100)


def test_files_may_seem_to_end_early() -> None:
    inner = MemoryStorage()
    inner.put("file", bytes(range(100)), overwrite=False)
    inner.put("other", bytes(100), overwrite=False)
    storage = FaultyStorage(inner, [Truncate("file", 60)])
    assert (storage.size("file"), storage.size("other")) == (60, 100)
    assert storage.read("file") == bytes(range(60))
    assert storage.read("file", 50, 100) == bytes(range(50, 60))
    assert storage.read("file", 80, 100) == b""
    buffer = np.full(100, 255, np.uint8)
    assert storage.read_into("file", 50, buffer[:50]) == 10
    assert buffer[:10].tolist() == list(range(50, 60))
    assert set(buffer[10:]) == {255}
    assert storage.read_into("file", 70, buffer) == 0


def test_slow_calls_wait() -> None:
    naps: list[float] = []
    storage = FaultyStorage(MemoryStorage(), [Slow("put", 2.0, "a*")], sleep=naps.append)
    storage.put("a", b"x", overwrite=False)
    storage.put("b", b"x", overwrite=False)
    storage.read("a")
    assert naps == [2.0]
    assert storage.calls == [("put", "a"), ("put", "b"), ("read", "a")]
