"""Damaged checkpoints, and places that are none: errors that name the file, never a wrong value.

All that is done to a plain checkpoint is done to one with compressed data files, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import remesh
from remesh.core.integrity import BLOCK_SIZE
from remesh.formats import native
from remesh.pipeline import Compress
from remesh.storage import LocalStorage
from tests.engine.scenes import all_are, errors_of
from tests.engine.small_checkpoint import (
    KINDS,
    NUM_RANKS,
    file_of,
    flip,
    load_numbers,
    load_part,
    loading_error,
    save_part,
    stored_place,
    without_privileges,
)
from tests.support import run_ranks

FLIPS_PER_FILE = 80


@pytest.fixture(params=[None, "zstd"], ids=["plain", "compressed"])
def compress(request: pytest.FixtureRequest) -> Compress | None:
    how: Compress | None = request.param
    return how


@pytest.fixture
def saved(compress: Compress | None, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    run_ranks(NUM_RANKS, save_part, path, compress)
    return path


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
    assert isinstance(error, remesh.errors.CheckpointError), what
    assert file.name in str(error), (what, str(error))
    if file.name.startswith("0"):
        damages = remesh.Checkpoint(saved).verify().damages
        assert {damage.file for damage in damages} == {str(file.relative_to(saved))}, what
    else:
        with pytest.raises(remesh.errors.CheckpointError, match=file.name):
            remesh.Checkpoint(saved)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_byte_anywhere_is_found(kind: str, saved: Path, compress: str | None) -> None:
    file = file_of(saved, kind)
    right = file.read_bytes()
    chance, num_harmless = random.Random(f"{kind} 1"), 0
    for _ in range(FLIPS_PER_FILE):
        position, change = chance.randrange(len(right)), chance.randrange(1, 256)
        wrong = bytearray(right)
        wrong[position] ^= change
        file.write_bytes(wrong)
        what = f"byte {position} of {kind}: {right[position]} -> {wrong[position]}"
        # The record is text, in which a blank for another blank between its parts means the same.
        is_blank = kind == "record" and chr(right[position]).isspace()
        # Of a compressed file, some bytes say nothing of the content.
        is_mute = compress is not None and kind.endswith("data")
        if (is_blank or is_mute) and loading_error(saved) is None:
            assert is_mute or chr(wrong[position]).isspace(), what
            num_harmless += is_mute
        else:
            check_damage_is_found(saved, file, what)
    assert num_harmless < FLIPS_PER_FILE // 8
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
def test_files_that_are_not_what_they_were(
    kind: str, damage: str, saved: Path, compress: Compress | None
) -> None:
    file = file_of(saved, kind)
    right = file.read_bytes()
    file.write_bytes(DAMAGES[damage](right, random.Random(2)))
    # A compressed file ends with a table that only repairs need.
    mute = {"twice"} if compress is None else {"twice", "two bytes short"}
    if damage in mute and kind.endswith("data"):
        # All bytes of tensors are there; only the size of the file gives it away.
        assert loading_error(saved) is None
        damages = remesh.Checkpoint(saved).verify().damages
        assert [found.file for found in damages] == [str(file.relative_to(saved))]
    else:
        check_damage_is_found(saved, file, f"{damage} {kind}")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_missing_file_is_named(kind: str, saved: Path) -> None:
    file = file_of(saved, kind)
    file.unlink()
    check_damage_is_found(saved, file, kind)
    assert "missing" in str(loading_error(saved))


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_another_save_of_the_same_state(
    kind: str, saved: Path, compress: Compress | None, tmp_path: Path
) -> None:
    """The same layout, sizes and names, but other numbers."""
    other = tmp_path / "other"
    run_ranks(NUM_RANKS, partial(save_part, fill=False), other, compress)
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
    assert f"remesh repair {saved} --dry-run" in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"version": 2}, ["version 2", "'remesh' version 1", "Upgrade"]), ({"format": "x"}, ["'x'"])],
    ids=["version", "format"],
)
def test_a_checkpoint_of_a_newer_format(
    change: dict[str, Any], words: list[str], saved: Path
) -> None:
    record = msgspec.structs.replace(native.read_record(LocalStorage(saved)), **change)
    (saved / "remesh.json").write_bytes(native.encode_record(record))
    error = loading_error(saved)
    assert isinstance(error, remesh.errors.FormatVersionError)
    assert all(word in str(error) for word in [*words, "remesh.json"])
    with pytest.raises(remesh.errors.FormatVersionError):
        remesh.Checkpoint(saved)
    with pytest.raises(remesh.errors.FormatVersionError):
        remesh.save({"a": 1}, saved)


def test_a_damaged_record_is_not_replaced_by_accident(saved: Path) -> None:
    (saved / "remesh.json").write_bytes(b"{}")
    with pytest.raises(remesh.CorruptCheckpointError, match=r"remesh\.json"):
        remesh.save({"a": 1}, saved)
    remesh.save({"a": 1}, saved, overwrite=True)
    assert remesh.Checkpoint(saved).values == {"a": 1}


def test_damage_that_is_not_read_does_no_harm(compress: Compress | None, tmp_path: Path) -> None:
    """Digests are of blocks: what lies in others can be read, and `verify` says what cannot."""
    arrays = {name: np.random.default_rng(1).random((300, 1024)) for name in "abc"}
    remesh.save(arrays, tmp_path, compress=compress)
    checkpoint = remesh.Checkpoint(tmp_path)
    piece = checkpoint.index.pieces("b")[0]
    file, wrong = tmp_path / piece.path, piece.position + 8 * 1024 * 150
    flip(file, stored_place(checkpoint.index, 0, wrong))
    for name in "ac":
        np.testing.assert_array_equal(checkpoint.read_array(name), arrays[name])
    first_rows = remesh.sharding.Box((0, 0), (16, 1024))
    np.testing.assert_array_equal(checkpoint.read_array("b", first_rows), arrays["b"][:16])
    for box in (None, remesh.sharding.Box((150, 7), (1, 1))):
        with pytest.raises(remesh.CorruptCheckpointError, match=rf"(?s){file.name}.*tensors b"):
            checkpoint.read_array("b", box)
    report = checkpoint.verify()
    [damage] = report.damages
    assert damage.tensors == ("b",)
    assert damage.start == wrong // BLOCK_SIZE * BLOCK_SIZE
    assert damage.stop == damage.start + BLOCK_SIZE
    target = {name: np.zeros_like(array) for name, array in arrays.items()}
    with pytest.raises(remesh.CorruptCheckpointError, match="tensors b") as caught:
        remesh.load(target, tmp_path)
    assert any("partly loaded" in note for note in caught.value.__notes__)
    for name, array in target.items():
        assert ((array == arrays[name]) | (array == 0)).all()


def test_damage_that_one_rank_meets_is_raised_by_all(saved: Path) -> None:
    file = file_of(saved, "second data")
    flip(file, file.stat().st_size // 2)
    errors = errors_of(4, load_numbers, saved)
    all_are(errors, remesh.CorruptCheckpointError, file.name)
    for error in errors:
        assert any("partly loaded" in note for note in error.__notes__)
    # Ranks 0 and 1 want nothing of the second file; what they raise is another's.
    origins = [getattr(error, "rank", None) for error in errors]
    assert set(origins[:2]) <= {2, 3}
    assert None in origins[2:]


# ---------------------------------------------------------------------------------------------
# Places that are no checkpoint
# ---------------------------------------------------------------------------------------------


def test_a_foreign_directory_is_shown(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK")
    (tmp_path / "notes.txt").write_bytes(b"x")
    with pytest.raises(remesh.CheckpointNotFoundError, match="not a checkpoint") as caught:
        remesh.load({"a": 1}, tmp_path)
    assert "model.pt" in str(caught.value)
    remesh.save({"a": 1}, tmp_path)
    assert remesh.Checkpoint(tmp_path).values == {"a": 1}
    assert (tmp_path / "model.pt").read_bytes() == b"PK"


def test_a_mistyped_path_is_one_short_error(tmp_path: Path) -> None:
    for open_it in (remesh.Checkpoint, lambda path: remesh.load({"a": 1}, path)):
        with pytest.raises(remesh.CheckpointNotFoundError, match="no such directory") as caught:
            open_it(tmp_path / "mistyped")
        assert caught.value.__suppress_context__  # a traceback shows no other error before it
        assert caught.value.__cause__ is None


def test_a_directory_in_place_of_a_file(saved: Path) -> None:
    file = file_of(saved, "first data")
    file.unlink()
    file.mkdir()
    error = loading_error(saved)
    assert isinstance(error, remesh.StorageError)
    assert file.name in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_may_not_be_read(kind: str) -> None:
    with without_privileges() as directory:
        run_ranks(NUM_RANKS, save_part, directory)
        file = file_of(directory, kind)
        file.chmod(0)
        errors = errors_of(NUM_RANKS, load_part, directory)
        all_are(errors, remesh.StorageError, file.name, "right")
        assert not any(isinstance(error, remesh.CheckpointNotFoundError) for error in errors)


def test_a_directory_that_may_not_be_written() -> None:
    with without_privileges() as directory:
        directory.chmod(0o500)
        for place in (directory, directory / "below"):
            errors = errors_of(NUM_RANKS, save_part, place)
            all_are(errors, remesh.StorageError, str(directory), "right")
        assert list(directory.iterdir()) == []


def test_a_directory_that_may_not_be_searched() -> None:
    with without_privileges() as directory:
        run_ranks(NUM_RANKS, save_part, directory / "step")
        directory.chmod(0)
        all_are(errors_of(NUM_RANKS, load_part, directory / "step"), remesh.StorageError)
