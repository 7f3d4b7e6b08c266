"""Damaged checkpoints and failing storage: never a wrong value, never a hang, nothing left behind.

The checkpoint is small and written by two ranks, so that every kind of file is there: the record,
the values, the index, and two data files.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import remesh
from remesh.exchange import Exchange
from remesh.formats import native
from remesh.state import ShardedObject, ShardedTensor
from remesh.storage import FileSystemSpace, LocalStorage, MemoryStorage, Storage
from remesh.testing import (
    Fail,
    FaultyStorage,
    FlipBit,
    Raised,
    Truncate,
    run_ranks,
    run_ranks_outcomes,
)

NUM_RANKS = 2
FLIPS_PER_FILE = 80
KINDS = ("record", "values", "index", "first data", "second data")

# ---------------------------------------------------------------------------------------------
# A state, and whether another is right
# ---------------------------------------------------------------------------------------------


def arrays(fill: bool) -> dict[str, Any]:
    """The global tensors; zeros if not filled."""
    whole = {
        "weight": np.arange(1, 241, dtype=np.float32).reshape(20, 12),
        "moment": np.linspace(-1, 1, 120).reshape(20, 6),
        "steps": np.array(77, dtype=np.int64),
        "mask": (np.arange(60) % 3 == 0).reshape(20, 3),
    }
    return whole if fill else {name: np.zeros_like(array) for name, array in whole.items()}


VALUES = {"epoch": 3, "name": "run", "history": [0.5, 0.25], "nothing": None}


def part_of_state(rank: int, num_ranks: int, *, fill: bool) -> dict[str, Any]:
    """Some rows of every tensor, all values, and an element of an object."""
    state: dict[str, Any] = {"values": dict(VALUES) if fill else dict.fromkeys(VALUES)}
    for name, array in arrays(fill).items():
        if array.ndim:
            step = 20 // num_ranks
            rows = array[rank * step : (rank + 1) * step]
            state[name] = ShardedTensor.at_offset(
                name, rows, array.shape, (rank * step, *[0] * (array.ndim - 1))
            )
        else:
            state[name] = array
    state["rng"] = ShardedObject("rng", [rank, b"seed"] if fill else None, (num_ranks,), (rank,))
    return state


def whole_state() -> dict[str, Any]:
    """A target for everything that two ranks save."""
    rngs = [ShardedObject("rng", None, (NUM_RANKS,), (rank,)) for rank in range(NUM_RANKS)]
    return {**arrays(fill=False), "values": dict.fromkeys(VALUES), "rngs": rngs}


def is_right(state: dict[str, Any]) -> bool:
    """Whether a loaded `whole_state` holds what was saved."""
    return (
        all(state[name].tobytes() == array.tobytes() for name, array in arrays(fill=True).items())
        and state["values"] == VALUES
        and [element.data for element in state["rngs"]] == [[0, b"seed"], [1, b"seed"]]
    )


def nothing_wrong_in(state: dict[str, Any]) -> bool:
    """Whether every element is right or still what it was."""
    return all(
        ((state[name] == array) | (state[name] == np.zeros_like(array))).all()
        for name, array in arrays(fill=True).items()
    )


def save_part(exchange: Exchange, place: Storage | Path) -> None:
    state = part_of_state(exchange.rank, exchange.world_size, fill=True)
    remesh.save(state, place, overwrite=True, group=exchange)


def load_part(exchange: Exchange, place: Storage | Path) -> None:
    state = part_of_state(exchange.rank, exchange.world_size, fill=False)
    remesh.load(state, place, group=exchange)


def raised(outcomes: Sequence[object]) -> list[Exception]:
    """What the ranks raised, if all did; none hung or returned."""
    errors = []
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.error, Exception)
        errors.append(outcome.error)
    return errors


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    run_ranks(NUM_RANKS, save_part, path)
    return path


def file_of(checkpoint: Path, kind: str) -> Path:
    """The file of a kind; to be asked while the record is sound."""
    record = native.read_record(LocalStorage(checkpoint))
    names = [native.RECORD_NAME, record.values.path, record.index.path]
    names += [file.path for file in record.files]
    assert len(names) == len(KINDS)
    return checkpoint / names[KINDS.index(kind)]


def loading_error(checkpoint: Path) -> Exception | None:
    """The error of loading everything; None if all is right."""
    state = whole_state()
    try:
        remesh.load(state, checkpoint, unexpected="error")
    except remesh.RemeshError as error:
        assert nothing_wrong_in(state)
        return error
    assert is_right(state)
    return None


def test_the_undamaged_checkpoint_is_right(saved: Path) -> None:
    assert loading_error(saved) is None
    assert sorted(path.name for path in saved.rglob("*") if path.is_file()) == [
        "00000.safetensors", "00001.safetensors", "index.safetensors", "remesh.json",
        "values.msgpack",
    ]  # fmt: skip
    assert remesh.Checkpoint(saved).verify().ok


# ---------------------------------------------------------------------------------------------
# Damaged files
# ---------------------------------------------------------------------------------------------


def check_damage_is_found(saved: Path, file: Path, what: str) -> None:
    """Loading and verifying find the damage and name the file."""
    error = loading_error(saved)
    assert isinstance(error, remesh.CheckpointError), what
    assert file.name in str(error), (what, str(error))
    if file.name.startswith("0"):
        damages = remesh.Checkpoint(saved).verify().damages
        assert {damage.path for damage in damages} == {str(file.relative_to(saved))}, what
    else:
        with pytest.raises(remesh.CheckpointError, match=file.name):
            remesh.Checkpoint(saved)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_byte_anywhere_is_found(kind: str, saved: Path) -> None:
    file = file_of(saved, kind)
    right = file.read_bytes()
    chance = random.Random(f"{kind} 1")
    for _ in range(FLIPS_PER_FILE):
        position, change = chance.randrange(len(right)), chance.randrange(1, 256)
        wrong = bytearray(right)
        wrong[position] ^= change
        file.write_bytes(wrong)
        what = f"byte {position} of {kind}: {right[position]} -> {wrong[position]}"
        # The record is text; a blank for another blank between its parts means the same.
        if kind == "record" and chr(right[position]).isspace() and loading_error(saved) is None:
            assert chr(wrong[position]).isspace(), what
        else:
            check_damage_is_found(saved, file, what)
    file.write_bytes(right)
    assert loading_error(saved) is None


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "emptied": lambda _right, _chance: b"",
    "two bytes short": lambda right, _chance: right[:-2],
    "cut in half": lambda right, _chance: right[: len(right) // 2],
    "first byte gone": lambda right, _chance: right[1:],
    "zeros": lambda right, _chance: bytes(len(right)),
    "noise": lambda right, chance: chance.randbytes(len(right)),
    "twice": lambda right, _chance: right + right,
    "nested without end": lambda _right, _chance: b"[" * 200_000,
    "not unicode": lambda right, _chance: right.replace(b"e", b"\xff"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_not_what_they_were(kind: str, damage: str, saved: Path) -> None:
    file = file_of(saved, kind)
    right = file.read_bytes()
    file.write_bytes(DAMAGES[damage](right, random.Random(2)))
    if damage == "twice" and kind.endswith("data"):
        # All bytes of tensors are there; only the size of the file gives it away.
        assert loading_error(saved) is None
        damages = remesh.Checkpoint(saved).verify().damages
        assert [found.path for found in damages] == [str(file.relative_to(saved))]
    else:
        check_damage_is_found(saved, file, f"{damage} {kind}")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_missing_file_is_named(kind: str, saved: Path) -> None:
    file = file_of(saved, kind)
    file.unlink()
    check_damage_is_found(saved, file, kind)
    assert "missing" in str(loading_error(saved))


@pytest.mark.parametrize("kind", KINDS)
def test_files_in_each_others_place(kind: str, saved: Path) -> None:
    file = file_of(saved, kind)
    right = file.read_bytes()
    for other in KINDS:
        if other != kind:
            file.write_bytes(right)
            file.write_bytes(file_of(saved, other).read_bytes())
            check_damage_is_found(saved, file, f"{other} in place of {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_another_save_of_the_same_state(kind: str, saved: Path, tmp_path: Path) -> None:
    """The same layout, sizes and names, but other numbers."""
    other = tmp_path / "other"

    def save(exchange: Exchange) -> None:
        state = part_of_state(exchange.rank, NUM_RANKS, fill=False)
        remesh.save(state, other, group=exchange)

    run_ranks(NUM_RANKS, save)
    file = file_of(saved, kind)
    file.write_bytes(file_of(other, kind).read_bytes())
    error = loading_error(saved)
    assert isinstance(error, remesh.CorruptCheckpointError)
    if kind == "record":
        assert "missing" in str(error)
    else:
        assert file.name in str(error)


def test_without_its_record_there_is_no_checkpoint(saved: Path) -> None:
    (saved / "remesh.json").unlink()
    error = loading_error(saved)
    assert isinstance(error, remesh.CheckpointNotFoundError)
    assert isinstance(error, FileNotFoundError)
    assert "not finished" in str(error)
    assert str(saved) in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"version": 2}, ["version 2", "up to version 1", "Upgrade"]), ({"format": "x"}, ["'x'"])],
    ids=["version", "format"],
)
def test_a_checkpoint_of_a_newer_format(
    change: dict[str, Any], words: list[str], saved: Path
) -> None:
    record = msgspec.structs.replace(native.read_record(LocalStorage(saved)), **change)
    (saved / "remesh.json").write_bytes(native.encode_record(record))
    error = loading_error(saved)
    assert isinstance(error, remesh.FormatVersionError)
    assert all(word in str(error) for word in [*words, "remesh.json"])
    with pytest.raises(remesh.FormatVersionError):
        remesh.Checkpoint(saved)
    with pytest.raises(remesh.FormatVersionError):
        remesh.save({"a": 1}, saved)


def test_a_damaged_record_is_not_replaced_by_accident(saved: Path) -> None:
    (saved / "remesh.json").write_bytes(b"{}")
    with pytest.raises(remesh.CorruptCheckpointError, match=r"remesh\.json"):
        remesh.save({"a": 1}, saved)
    remesh.save({"a": 1}, saved, overwrite=True)
    assert remesh.Checkpoint(saved).values == {"a": 1}


def test_damage_that_is_not_read_does_no_harm(tmp_path: Path) -> None:
    """Digests are of blocks: what lies in others can be read, and `verify` says what cannot."""
    arrays = {name: np.random.default_rng(1).random((300, 1024)) for name in "abc"}
    remesh.save(arrays, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    piece = checkpoint.index.pieces("b")[0]
    file = tmp_path / piece.path
    content = bytearray(file.read_bytes())
    content[piece.position + 8 * 1024 * 150] ^= 1
    file.write_bytes(content)
    for name in "ac":
        np.testing.assert_array_equal(checkpoint.read_array(name), arrays[name])
    first_rows = remesh.Box((0, 0), (16, 1024))
    np.testing.assert_array_equal(checkpoint.read_array("b", first_rows), arrays["b"][:16])
    for box in (None, remesh.Box((150, 7), (1, 1))):
        with pytest.raises(remesh.CorruptCheckpointError, match=rf"{file.name}.*tensors b"):
            checkpoint.read_array("b", box)
    report = checkpoint.verify()
    assert [damage.tensors for damage in report.damages] == [("b",)]
    target = {name: np.zeros_like(array) for name, array in arrays.items()}
    with pytest.raises(remesh.CorruptCheckpointError, match="tensors b") as caught:
        remesh.load(target, tmp_path)
    assert any("partly loaded" in note for note in caught.value.__notes__)
    for name, array in target.items():
        assert ((array == arrays[name]) | (array == 0)).all()


def test_damage_that_one_rank_meets_is_raised_by_all(saved: Path) -> None:
    file = file_of(saved, "second data")
    wrong = bytearray(file.read_bytes())
    wrong[-1] ^= 4
    file.write_bytes(wrong)
    outcomes = run_ranks_outcomes(4, load_numbers, saved)
    errors = raised(outcomes)
    for error in errors:
        assert isinstance(error, remesh.CorruptCheckpointError)
        assert file.name in str(error)
        assert any("partly loaded" in note for note in error.__notes__)
    # Ranks 0 and 1 read from the first file only; the lowest that failed is the origin.
    assert [getattr(error, "rank", None) for error in errors] == [2, 2, None, None]


def load_numbers(exchange: Exchange, place: Path) -> None:
    """Load a quarter of the rows."""
    state = part_of_state(exchange.rank, exchange.world_size, fill=False)
    del state["rng"], state["steps"]
    remesh.load(state, place, group=exchange)


# ---------------------------------------------------------------------------------------------
# Places that are no checkpoint
# ---------------------------------------------------------------------------------------------


def test_there_is_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "such"):
        with pytest.raises(remesh.CheckpointNotFoundError, match="no checkpoint there") as caught:
            remesh.load({"a": 1}, path)
        assert str(path) in str(caught.value)


def test_a_foreign_directory_is_shown(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK")
    (tmp_path / ".metadata").write_bytes(b"x")
    with pytest.raises(remesh.CheckpointNotFoundError, match="not a remesh checkpoint") as caught:
        remesh.load({"a": 1}, tmp_path)
    assert "model.pt" in str(caught.value)
    remesh.save({"a": 1}, tmp_path)
    assert remesh.Checkpoint(tmp_path).values == {"a": 1}
    assert (tmp_path / "model.pt").read_bytes() == b"PK"


def test_the_path_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"PK")
    with pytest.raises(remesh.CheckpointNotFoundError, match="or a file"):
        remesh.load({"a": 1}, file)
    with pytest.raises(remesh.StorageError, match="a part of the path is a file"):
        remesh.save({"a": 1}, file)
    assert file.read_bytes() == b"PK"


def test_a_directory_in_place_of_a_file(saved: Path) -> None:
    file = file_of(saved, "first data")
    file.unlink()
    file.mkdir()
    error = loading_error(saved)
    assert isinstance(error, remesh.StorageError)
    assert file.name in str(error)


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A directory of a user whom permissions bind; the superuser becomes one for the while."""
    directory = Path(tempfile.mkdtemp(prefix="remesh-test-"))
    is_superuser = os.geteuid() == 0
    nobody = 65534
    try:
        if is_superuser:
            os.chown(directory, nobody, nobody)
            os.seteuid(nobody)
        yield directory
    finally:
        if is_superuser:
            os.seteuid(0)
        for path in directory.rglob("*"):
            path.chmod(0o700)
        directory.chmod(0o700)
        shutil.rmtree(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_may_not_be_read(kind: str) -> None:
    with without_privileges() as directory:
        run_ranks(NUM_RANKS, save_part, directory)
        file = file_of(directory, kind)
        file.chmod(0)
        errors = raised(run_ranks_outcomes(NUM_RANKS, load_part, directory))
        for error in errors:
            assert isinstance(error, remesh.StorageError)
            assert not isinstance(error, remesh.CheckpointNotFoundError)
            assert file.name in str(error)
            assert "right" in str(error)


def test_a_directory_that_may_not_be_written() -> None:
    with without_privileges() as directory:
        directory.chmod(0o500)
        errors = raised(run_ranks_outcomes(NUM_RANKS, save_part, directory))
        for error in errors:
            assert isinstance(error, remesh.StorageError)
            assert str(directory) in str(error)
            assert "right" in str(error)
        assert list(directory.iterdir()) == []
        errors = raised(run_ranks_outcomes(NUM_RANKS, save_part, directory / "below"))
        assert all(isinstance(error, remesh.StorageError) for error in errors)


def test_a_directory_that_may_not_be_searched() -> None:
    with without_privileges() as directory:
        run_ranks(NUM_RANKS, save_part, directory / "step")
        directory.chmod(0)
        errors = raised(run_ranks_outcomes(NUM_RANKS, load_part, directory / "step"))
        assert all(isinstance(error, remesh.StorageError) for error in errors)


# ---------------------------------------------------------------------------------------------
# Storage that fails while it is written
# ---------------------------------------------------------------------------------------------

WRITE_FAULTS = {
    "create": Fail("create", number=errno.ENOSPC),
    "create second": Fail("create", "*/00001*", number=errno.ENOSPC),
    "write": Fail("write", number=errno.ENOSPC),
    "write second": Fail("write", "*/00001*", number=errno.EIO),
    "finish": Fail("finish", number=errno.EIO),
    "finish first": Fail("finish", "*/00000*", number=errno.EDQUOT),
    "sync": Fail("sync", number=errno.EIO),
    "last sync": Fail("sync", number=errno.EIO, skip=NUM_RANKS),
    "values": Fail("put", "*/values.msgpack", number=errno.ENOSPC),
    "index": Fail("put", "*/index.safetensors", number=errno.EIO),
    "record": Fail("put", "remesh.json", number=errno.ENOSPC),
    "space": Fail("space", number=errno.EIO),
    "read": Fail("read", number=errno.EIO),
}


@pytest.mark.parametrize("fault", WRITE_FAULTS)
@pytest.mark.parametrize("again", [False, True], ids=["first save", "over an old one"])
def test_a_failing_save_fails_on_all_ranks_and_leaves_what_was(fault: str, again: bool) -> None:
    inner = MemoryStorage()
    if again:
        run_ranks(NUM_RANKS, save_part, inner)
    before = inner.list()
    storage = FaultyStorage(inner, [WRITE_FAULTS[fault]])
    errors = raised(run_ranks_outcomes(NUM_RANKS, save_part, storage))
    full = WRITE_FAULTS[fault].number != errno.EIO
    for error in errors:
        assert type(error) is (remesh.NoSpaceError if full else remesh.StorageError)
        assert "injected" in str(error)
    if fault != "record":
        assert inner.list() == before
    else:
        # Whether a failed put of the record has made it visible, nobody can tell.
        assert set(inner.list()) > set(before)
    if again:
        state = whole_state()
        remesh.load(state, inner)
        assert is_right(state)
        assert remesh.Checkpoint(inner).verify().ok
    else:
        with pytest.raises(remesh.CheckpointNotFoundError):
            remesh.Checkpoint(inner)
    run_ranks(NUM_RANKS, save_part, inner)
    state = whole_state()
    remesh.load(state, inner)
    assert is_right(state)


def test_what_cannot_be_removed_does_not_hide_why_the_save_failed() -> None:
    faults = [Fail("put", "*/index.safetensors", number=errno.ENOSPC), Fail("delete")]
    storage = FaultyStorage(MemoryStorage(), faults)
    for error in raised(run_ranks_outcomes(NUM_RANKS, save_part, storage)):
        assert isinstance(error, remesh.NoSpaceError)
        assert "put" in str(error)


READ_FAULTS = {
    "record": Fail("read", "remesh.json"),
    "values": Fail("read", "*/values.msgpack"),
    "index": Fail("read", "*/index.safetensors"),
    "data": Fail("read_into", "*/00000*"),
    "later data": Fail("read_into", "*/00001*", skip=1),
}


@pytest.mark.parametrize("fault", READ_FAULTS)
def test_a_failing_read_fails_on_all_ranks(fault: str) -> None:
    inner = MemoryStorage()
    run_ranks(NUM_RANKS, save_part, inner)
    storage = FaultyStorage(inner, [READ_FAULTS[fault]])
    errors = raised(run_ranks_outcomes(4, load_numbers, storage))
    for error in errors:
        assert type(error) is remesh.StorageError
        assert "Input/output error" in str(error)
    assert sum(getattr(error, "rank", None) is None for error in errors) >= 1
    run_ranks(4, load_numbers, inner)


@pytest.mark.parametrize("when", ["written", "read"])
def test_a_bit_that_flips_on_its_way(when: Any) -> None:
    inner = MemoryStorage()
    flip = FlipBit("*/00001*", position=900, bit=3, when=when)
    flipping = FaultyStorage(inner, [flip])
    run_ranks(NUM_RANKS, save_part, flipping if when == "written" else inner)
    storage = flipping if when == "read" else inner
    for error in raised(run_ranks_outcomes(NUM_RANKS, load_part, storage)):
        assert isinstance(error, remesh.CorruptCheckpointError)
        assert "00001.safetensors" in str(error)
    assert len(remesh.Checkpoint(storage).verify().damages) == 1


def test_a_file_that_seems_to_end_early() -> None:
    inner = MemoryStorage()
    run_ranks(NUM_RANKS, save_part, inner)
    storage = FaultyStorage(inner, [Truncate("*/00000*", 700)])
    for error in raised(run_ranks_outcomes(NUM_RANKS, load_part, storage)):
        assert isinstance(error, remesh.CorruptCheckpointError)
        assert "00000.safetensors: ends at byte 700" in str(error)


# ---------------------------------------------------------------------------------------------
# No room
# ---------------------------------------------------------------------------------------------


class Crowded(FaultyStorage):
    """Writes down its calls, and says what room there is."""

    def __init__(self, inner: Storage, space: FileSystemSpace | None) -> None:
        super().__init__(inner, ())
        self._space = space

    def space(self) -> FileSystemSpace | None:
        return self._space


def needed_bytes() -> int:
    return sum(array.nbytes for array in arrays(fill=True).values())


def test_a_full_disk_is_found_before_anything_is_written() -> None:
    """What ranks need on one disk is added up; each alone would fit."""
    space = FileSystemSpace("disk", needed_bytes() - 1)
    storage = Crowded(MemoryStorage(), space)
    for error in raised(run_ranks_outcomes(NUM_RANKS, save_part, storage)):
        assert isinstance(error, remesh.NoSpaceError)
        assert "Nothing was written" in str(error)
        assert storage.url in str(error)
    assert {operation for operation, _ in storage.calls} == {"read", "list"}


@pytest.mark.parametrize(
    "identities", [("same", "same"), ("one", "other")], ids=["one disk", "two disks"]
)
def test_room_is_counted_by_disk(identities: tuple[str, str]) -> None:
    inner = MemoryStorage()
    free = needed_bytes() * 2 // 3

    def save(exchange: Exchange) -> None:
        save_part(exchange, Crowded(inner, FileSystemSpace(identities[exchange.rank], free)))

    outcomes = run_ranks_outcomes(NUM_RANKS, save)
    if identities[0] == identities[1]:
        assert all(isinstance(error, remesh.NoSpaceError) for error in raised(outcomes))
        assert inner.list() == []
    else:
        assert not any(isinstance(outcome, Raised) for outcome in outcomes)
        assert remesh.Checkpoint(inner).verify().ok


def big_part(exchange: Exchange, place: Storage | Path) -> None:
    """Save half a megabyte a rank."""
    rows = np.full((1, 1 << 19), exchange.rank, dtype=np.uint8)
    tensor = ShardedTensor.at_offset(
        "w", rows, (exchange.world_size, rows.shape[1]), (exchange.rank, 0)
    )
    remesh.save({"w": tensor, "blob": bytes(1 << 18)}, place, overwrite=True, group=exchange)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [1 << 12, (1 << 18) + 100])
def test_files_that_may_not_be_so_large(num_bytes: int, tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, save_part, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with file_size_limit(num_bytes):
        errors = raised(run_ranks_outcomes(NUM_RANKS, big_part, tmp_path))
    for error in errors:
        assert isinstance(error, remesh.NoSpaceError)
        assert "ulimit -f" in str(error)
    assert sorted(tmp_path.rglob("*")) == before
    assert loading_error(tmp_path) is None


@contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of a certain size, where this user may mount one."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


# Room for the old checkpoint and nothing else, for one of two data files, and for both of them but
# not for the values.
@pytest.mark.parametrize("num_bytes", [1 << 16, 3 << 18, (1 << 20) + (1 << 16)])
@pytest.mark.parametrize("honest", [True, False], ids=["known room", "unknown room"])
def test_a_disk_that_becomes_full(num_bytes: int, honest: bool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_bytes) as disk:
        path = disk / "step"
        run_ranks(NUM_RANKS, save_part, path)
        before = sorted(path.rglob("*"))

        def save(exchange: Exchange) -> None:
            storage = LocalStorage(path)
            big_part(exchange, storage if honest else Crowded(storage, None))

        for error in raised(run_ranks_outcomes(NUM_RANKS, save)):
            assert isinstance(error, remesh.NoSpaceError)
        assert sorted(path.rglob("*")) == before
        assert loading_error(path) is None
