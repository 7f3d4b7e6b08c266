"""Uploads in parts, conditional puts, real checkpoints in a bucket, and servers that fail."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import obstore
import pytest
import torch
from click.testing import CliRunner
from obstore.store import MemoryStore, S3Store

import remesh
from remesh.cli import cli
from remesh.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage, Storage, StorageView, open_storage
from remesh.storage.messages import explain
from remesh.storage.object_store import CLIENT, RETRIES, ObjectStorage
from tests.storage.faulty_proxy import Fault, Plan, faulty_proxy
from tests.storage.object_servers import BUCKET, S3Server, s3_server
from tests.storage.scenes import pattern, winners_of
from tests.support import Fail, FaultyStorage, run_ranks

PART = 5 << 20
"""The smallest part that S3 accepts."""


@pytest.fixture
def root(server: S3Server, request: pytest.FixtureRequest) -> str:
    """A prefix of its own for each test."""
    return f"s3://{BUCKET}/{request.node.name}"


def in_parts(root: str, part_bytes: int = PART) -> ObjectStorage:
    """A storage whose uploads have small parts."""
    prefix = root.removeprefix(f"s3://{BUCKET}/")
    store = S3Store(BUCKET, prefix=prefix, client_options={"allow_http": True})
    return ObjectStorage(root, store, part_bytes=part_bytes)


class TestUploads:
    def test_chunks_from_threads_become_parts(self, server: S3Server, root: str) -> None:
        storage, content, chunk = in_parts(root), pattern(3 * PART + 12_345), 1 << 20
        writer = storage.create("a/file", content.size)

        def write(start: int) -> None:
            writer.write(start, content[start : start + chunk])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write, range(0, content.size, chunk)))
        assert storage.list() == []
        assert len(server.uploads()) == 1
        writer.finish()
        assert server.uploads() == []
        assert storage.list_sizes() == {"a/file": content.size}
        assert storage.read("a/file") == content.tobytes()
        target = np.zeros(PART, np.uint8)
        assert storage.read_into("a/file", PART - 7, target) == PART
        np.testing.assert_array_equal(target, content[PART - 7 : 2 * PART - 7])

    def test_abort_leaves_nothing(self, server: S3Server, root: str) -> None:
        storage = in_parts(root)
        writer = storage.create("file", 3 * PART)
        writer.write(0, pattern(PART + 5))
        writer.abort()
        assert storage.list() == []
        assert server.uploads() == []

    def test_unwritten_parts_are_zeros(self) -> None:
        storage = ObjectStorage("memory://x", MemoryStore(), part_bytes=10)
        writer = storage.create("file", 35)
        writer.write(12, pattern(3))
        writer.finish()
        expected = bytes(12) + pattern(3).tobytes() + bytes(20)
        assert storage.read("file") == expected

    def test_a_window_that_stands_still_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("remesh.storage.remote.STALL_SECONDS", 0.01)
        writer = ObjectStorage("memory://x", MemoryStore(), part_bytes=10).create("file", 100)
        writer.write(25, pattern(5))
        with pytest.raises(StorageError, match="part 3 has waited 0 s for part 0"):
            writer.write(30, pattern(1))
        writer.abort()

    def test_abort_frees_who_waits(self) -> None:
        storage = ObjectStorage("memory://x", MemoryStore(), part_bytes=10)
        writer = storage.create("file", 100)
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(writer.write, 90, pattern(10))
            writer.abort()
            # It fails whether it has begun to wait or comes too late.
            assert ahead.exception() is not None
        assert storage.list() == []

    def test_parts_grow_with_the_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []
        monkeypatch.setattr(
            "remesh.storage.object_store.StreamWriter",
            lambda _name, _num_bytes, part_bytes, _upload: sizes.append(part_bytes),
        )
        storage = ObjectStorage("memory://x", MemoryStore())
        for number, num_bytes in enumerate((1, 160 << 30, 1 << 40)):
            storage.create(f"{number}", num_bytes)
            assert -(-num_bytes // sizes[-1]) <= 10_000
        assert sizes[:2] == [8 << 20, 17 << 20]


class TestPuts:
    def test_a_repeated_request_meets_its_own_object(
        self, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real_put = obstore.put

        def put_twice(*args: Any, **kwargs: Any) -> Any:
            # As when the answer to the first is lost on its way.
            real_put(*args, **kwargs)
            return real_put(*args, **kwargs)

        storage = open_storage(root)
        monkeypatch.setattr(obstore, "put", put_twice)
        storage.put("record", b"1", overwrite=False)
        with pytest.raises(CheckpointExistsError, match="record exists already"):
            storage.put("record", b"1", overwrite=False)

    def test_a_failure_leaves_no_probe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store, num_puts, real_put = MemoryStore(), 0, obstore.put

        def fail_second(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_puts
            num_puts += 1
            if num_puts == 2:
                raise OSError("the server has lost its disk")
            return real_put(*args, **kwargs)

        monkeypatch.setattr(obstore, "put", fail_second)
        with pytest.raises(StorageError, match="lost its disk"):
            ObjectStorage("memory://", store).put("record", b"1", overwrite=False)
        assert num_puts == 2
        assert obstore.list(store).collect() == []

    def test_a_small_file_does_not_replace_one_made_meanwhile(
        self, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours, theirs = open_storage(root), open_storage(root)
        monkeypatch.setattr(ours, "exists", lambda _path: False)  # whenever it is asked
        writer = ours.create("file", 3)
        writer.write(0, pattern(3))
        theirs.put("file", b"theirs", overwrite=False)
        with pytest.raises(StorageError, match="another writer was first"):
            writer.finish()
        assert ours.read("file") == b"theirs"


@pytest.fixture(scope="class")
def ignoring(server: S3Server) -> Iterator[None]:
    """A server that ignores If-None-Match, in place of the other one."""
    with s3_server("If-None-Match"):
        yield


@pytest.mark.usefixtures("ignoring")
class TestStoresThatIgnoreConditions:
    def test_nothing_is_replaced(self, root: str) -> None:
        open_storage(root).put("record", b"first", overwrite=False)
        for storage in (open_storage(root), open_storage(root)):
            with pytest.raises(CheckpointExistsError, match="record exists already"):
                storage.put("record", b"second", overwrite=False)
        assert open_storage(root).read("record") == b"first"
        assert open_storage(root).list() == ["record"]

    def test_at_most_one_of_many_writers_wins(self, root: str) -> None:
        """Wherever the others are when a writer comes."""
        for turn in range(5):
            won = winners_of([open_storage(root) for _ in range(4)], f"{turn}")
            assert len(won) <= 1
            for number in won:
                assert open_storage(root).read(f"{turn}") == b"%d" % number

    def test_a_writer_that_is_overtaken_gives_up(
        self, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another writer comes between the announcement of the first and its look around."""
        ours, theirs = open_storage(root), open_storage(root)
        for storage in (ours, theirs):
            storage.put(f"of {id(storage)}", b"", overwrite=False)  # both have probed
        real_list = obstore.list

        def overtaken(*args: Any) -> Any:
            monkeypatch.setattr(obstore, "list", real_list)
            with pytest.raises(CheckpointExistsError, match="being written by another process"):
                theirs.put("record", b"theirs", overwrite=False)
            return real_list(*args)

        monkeypatch.setattr(obstore, "list", overtaken)
        ours.put("record", b"ours", overwrite=False)
        assert theirs.read("record") == b"ours"


def save_three_ranks(place: str) -> None:
    def job(exchange: Exchange) -> None:
        rows = np.arange(40, dtype=np.float32).reshape(4, 10) + 40 * exchange.rank
        table = remesh.ShardedTensor.from_rank_offsets("table", rows, (0, exchange.rank, 3))
        remesh.save({"table": table, "step": 1}, place, group=exchange)

    run_ranks(3, job)


class TestCheckpoints:
    def test_a_save_that_is_refused_leaves_no_upload(self, root: str, server: S3Server) -> None:
        whole = np.zeros((2, 2 * PART), np.uint8)

        def save(exchange: Exchange) -> None:
            row = whole[exchange.rank :][:1]
            table = remesh.ShardedTensor.from_rank_offsets("table", row, (0, exchange.rank, 2))
            remesh.save({"table": table}, in_parts(root), group=exchange)
            with pytest.raises(CheckpointExistsError, match="there is a checkpoint already"):
                remesh.save({"table": table}, in_parts(root), group=exchange)

        run_ranks(2, save)
        assert server.uploads() == []
        assert len(in_parts(root).list()) == 5

    def test_a_view_is_as_far_away_as_what_it_shows(self, root: str) -> None:
        storage = open_storage(root)
        storage.put("file", b"content", overwrite=False)
        view = StorageView(StorageView(storage))
        assert view.latency == storage.latency != 0

    @pytest.mark.parametrize(
        ("below", "message"),
        [
            ("", "it holds 1 checkpoint, .*/step_1; name that"),
            ("/nothing", "no file has a name that begins so"),
            ("/step_2", "remesh repair .*/step_2 --dry-run"),
            ("/notes", "not a checkpoint .* it holds today"),
        ],
    )
    def test_places_without_a_checkpoint(self, root: str, below: str, message: str) -> None:
        storage = open_storage(root)
        save_three_ranks(f"{root}/step_1")
        storage.put("step_2/data-1/0", b"x", overwrite=False)
        storage.put("notes/today", b"x", overwrite=False)
        result = CliRunner().invoke(cli, ["show", f"{root}{below}", "table"])
        assert result.exit_code != 0
        assert re.search(message, " ".join(result.stderr.split()))


class TestOpenBuckets:
    """What is open is used again as long as nothing has changed that it was opened with."""

    def test_storages_in_a_bucket_share_what_is_known_of_it(
        self, server: S3Server, root: str
    ) -> None:
        remesh.save({"step": 1}, f"{root}/1")
        server.methods.clear()
        remesh.save({"step": 2}, f"{root}/2")
        assert server.methods.count("PUT") == 3  # values, index and record; no probe
        assert open_storage(f"{root}/3").latency != 0


class TestFailures:
    @pytest.fixture
    def closed(self) -> Iterator[Storage]:
        """A storage whose server does not listen; it repeats only once."""
        with socket.socket() as unused:
            # Bound all the while, so that nobody else can be given the port and listen there.
            unused.bind(("127.0.0.1", 0))
            store = S3Store(
                BUCKET,
                endpoint=f"http://user:hidden@127.0.0.1:{unused.getsockname()[1]}",
                access_key_id="key",
                secret_access_key="hidden",
                region="us-east-1",
                client_options={"allow_http": True},
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=5)},
            )
            yield ObjectStorage(f"s3://{BUCKET}", store, part_bytes=10)

    def test_no_server(self, closed: Storage) -> None:
        calls: dict[str, Callable[[], object]] = {
            "list": closed.list,
            "read": lambda: closed.size("a/file"),
            "write": lambda: closed.put("a/file", b"x", overwrite=True),
            "remove": lambda: closed.delete("a/file"),
        }
        for action, call in calls.items():
            with pytest.raises(StorageError, match="AWS_ENDPOINT_URL") as caught:
                call()
            assert str(caught.value).startswith(f"cannot {action} s3://{BUCKET}/")
            assert "hidden" not in str(caught.value)
            assert "\n" not in str(caught.value)
            assert caught.value.__suppress_context__

    def test_the_server_goes_while_a_file_is_written(self) -> None:
        with s3_server():
            storage = S3Store(
                BUCKET,
                client_options={"allow_http": True},
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=5)},
            )
            writer = ObjectStorage("s3://x", storage, part_bytes=PART).create("file", 40 * PART)
            writer.write(0, pattern(PART))

        def write_rest() -> None:
            for start in range(PART, 40 * PART, PART):
                writer.write(start, pattern(PART))

        with pytest.raises(StorageError, match=r"(?s)cannot write s3://x/file: .*reached"):
            write_rest()
        writer.abort()

    @pytest.mark.usefixtures("server")
    def test_no_bucket(self) -> None:
        storage = open_storage("s3://no-such-bucket/run")
        with pytest.raises(CheckpointNotFoundError):
            storage.size("remesh.json")
        calls: list[Callable[[], object]] = [
            storage.list,
            lambda: storage.put("a", b"", overwrite=False),
            lambda: remesh.save({"step": 1}, "s3://no-such-bucket/run"),
        ]
        for call in calls:
            with pytest.raises(StorageError, match="there is no such bucket: create it"):
                call()

    @pytest.mark.parametrize(
        ("text", "remedy"),
        [
            ("status code: 403 Forbidden: <Error><Code>AccessDenied</Code>", "the rights"),
            ("GET http://169.254.169.254/latest failed", "AWS_SECRET_ACCESS_KEY"),
            ("error sending request\nkind: Timeout", "did not answer in time"),
            ("status code: 503 Service Unavailable: <Error><Code>SlowDown", "fewer requests"),
            ("status code: 500 Internal Server Error", "the store failed"),
        ],
    )
    def test_remedies(self, text: str, remedy: str) -> None:
        error = explain("write", "s3://b/f", RuntimeError(text))
        assert type(error) is StorageError
        assert str(error).startswith("cannot write s3://b/f: ")
        assert remedy in str(error)

    def test_secrets_stay_out_of_messages(self) -> None:
        text = (
            "Error performing GET https://me:pw1@host/c/f?sv=1&sig=pw2 - Server returned 400: "
            "<?xml?><Error><Code>InvalidToken</Code><Message>bad</Message><Token-0>pw3</Token-0>"
            "\n\nDebug source: pw4"
        )
        message = str(explain("read", "az://c/f", ValueError(text)))
        assert not re.search(r"pw\d", message)
        assert "https://host/c/f" in message
        assert "InvalidToken: bad" in message


def test_a_request_that_has_no_answer_is_repeated(server: S3Server, root: str) -> None:
    assert CLIENT["read_timeout"] < RETRIES["retry_timeout"]  # type: ignore[operator]
    open_storage(root).put("file", b"abcdef", overwrite=False)
    plan = Plan("stall")
    with faulty_proxy(server.endpoint, plan) as proxy:
        store = S3Store(
            BUCKET,
            prefix=root.removeprefix(f"s3://{BUCKET}/"),
            endpoint=proxy.endpoint,
            client_options=CLIENT | {"read_timeout": timedelta(seconds=2)},
            retry_config=RETRIES,
        )
        faults: list[Fault | None] = ["stall"]
        plan.draw = lambda: (faults.pop() if faults else None, 0.0)  # type: ignore[method-assign]
        assert ObjectStorage(root, store).read("file", 2, 5) == b"cde"
        assert faults == []


class TestManyFiles:
    def test_they_are_removed_by_one_request(
        self, server: S3Server, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = open_storage(root)
        for name in "abcd":
            storage.put(f"x/{name}", b"1", overwrite=False)
        monkeypatch.setattr(ObjectStorage, "delete", None)
        storage.delete_many(["x/a", "x/b", "x/never"])
        assert storage.list() == ["x/c", "x/d"]

    def test_a_store_that_cannot_do_it_is_asked_for_each(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = ObjectStorage("memory://x", MemoryStore())
        names = [f"x/{number}" for number in range(40)]
        for name in names:
            storage.put(name, b"1", overwrite=False)
        remove = obstore.delete

        def one_by_one(store: Any, paths: Any) -> None:
            if not isinstance(paths, str) or paths == "x/7":
                raise OSError("not implemented")
            remove(store, paths)

        monkeypatch.setattr(obstore, "delete", one_by_one)
        with pytest.raises(StorageError, match="x/7"):
            storage.delete_many(names)
        assert storage.list() == ["x/7"]

    def test_a_failure_leaves_no_other_file(self) -> None:
        inner = MemoryStorage()
        for name in "abc":
            inner.put(name, b"1", overwrite=False)
        storage = FaultyStorage(inner, [Fail("delete", path="b")])
        with pytest.raises(StorageError, match="b"):
            storage.delete_many(["a", "b", "c"])
        assert inner.list() == ["b"]


def test_a_save_says_that_a_store_ignores_ranges(
    server: S3Server, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_server("Range"):
        remesh.save({"w": torch.ones(4)}, root)
        assert "checkpoints cannot be read from it: use another store" in caplog.text
        with pytest.raises(StorageError, match="copy them to a directory to read them"):
            remesh.Checkpoint(root)
