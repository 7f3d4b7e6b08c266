"""Damaged checkpoints, drawn at random: whatever is wrong with the files, no wrong value is read.

Each run damages a copy of a small checkpoint in one to three places: flipped bits, blocks of zeros
or of noise, files that are cut, that go on, that are missing, that are in each other's place, that
are, altogether or from somewhere on, those of another save of the same layout. The data files of
every second copy are compressed. Loading it must
either raise an error of remesh, with every element right or untouched, or give what was saved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import remesh
from remesh.formats import native
from remesh.pipeline import Compress
from remesh.storage import MemoryStorage, Storage
from tests.campaigns.settings import dice_of, lengths, noted, seed
from tests.engine.small_checkpoint import (
    NUM_RANKS,
    VALUES,
    arrays,
    is_right,
    nothing_wrong_in,
    save_part,
    whole_state,
)
from tests.fuzz.files import Files, in_memory
from tests.support import run_ranks


def saved(compress: Compress | None, *, fill: bool) -> Files:
    """The files of the small checkpoint; if not filled, with other numbers in the same layout."""
    storage = MemoryStorage()
    run_ranks(NUM_RANKS, partial(save_part, fill=fill), storage, compress)
    return {path: storage.read(path) for path in storage.list()}


def named_alike(files: Files) -> dict[str, str]:
    """Each file by its name without the save id."""
    return {path.rpartition("/")[2]: path for path in files}


# ---------------------------------------------------------------------------------------------
# Damages: each changes one file, or two
# ---------------------------------------------------------------------------------------------


def flip_bits(files: Files, path: str, dice: random.Random) -> None:
    content = bytearray(files[path])
    for _ in range(dice.choice((1, 1, 1, 2, 8))):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    files[path] = bytes(content)


def lose_block(files: Files, path: str, dice: random.Random) -> None:
    """Zeros or noise where something was written."""
    content = bytearray(files[path])
    first = dice.randrange(len(content))
    block = content[first : first + dice.choice((4, 64, 512))]
    content[first : first + len(block)] = dice.choice((bytes, dice.randbytes))(len(block))
    files[path] = bytes(content)


def cut(files: Files, path: str, dice: random.Random) -> None:
    files[path] = files[path][: dice.randrange(len(files[path]))]


def lengthen(files: Files, path: str, dice: random.Random) -> None:
    more = dice.choice((b"\0", b"\n", dice.randbytes(100), files[path]))
    files[path] = dice.choice((files[path] + more, more + files[path]))


def lose(files: Files, path: str, dice: random.Random) -> None:
    del files[path]


def swap(files: Files, path: str, dice: random.Random) -> None:
    other = dice.choice([one for one in files if one != path] or [path])
    files[path], files[other] = files[other], files[path]


DAMAGES: tuple[Callable[[Files, str, random.Random], None], ...] = (
    flip_bits, flip_bits, flip_bits, lose_block, cut, lengthen, lose, swap,
)  # fmt: skip


def mix_in(files: Files, path: str, other: Files, dice: random.Random) -> None:
    """From somewhere on, the file is that of the other save."""
    theirs = other[named_alike(other)[path.rpartition("/")[2]]]
    first = dice.choice((0, dice.randrange(len(theirs))))
    files[path] = files[path][:first] + theirs[first:]


def damaged(right: Files, other: Files, dice: random.Random) -> tuple[Files, str]:
    """A copy with damages, and what they are."""
    files, done = dict(right), []
    for _ in range(dice.choice((1, 1, 2, 3))):
        path = dice.choice(sorted(files))
        if not files[path]:
            continue
        number = dice.randrange(len(DAMAGES) + 1)
        if number == len(DAMAGES):
            mix_in(files, path, other, dice)
            done.append(f"mix_in {path}")
        else:
            DAMAGES[number](files, path, dice)
            done.append(f"{DAMAGES[number].__name__} {path}")
    return files, ", ".join(done)


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def load_whole(storage: Storage) -> str:
    """Load everything; how it ended."""
    state = whole_state()
    try:
        remesh.load(state, storage)
    except (remesh.errors.CheckpointError, remesh.MismatchError):
        assert nothing_wrong_in(state)
        return "refused"
    assert is_right(state)
    return "right"


def look_inside(storage: Storage) -> bool:
    """Read each tensor and the values without a state; whether all of it could be read."""
    try:
        checkpoint = remesh.Checkpoint(storage)
    except remesh.errors.CheckpointError:
        return False
    assert dict(checkpoint.values) == {f"values.{name}": value for name, value in VALUES.items()}
    num_read = 0
    for name, right in arrays(fill=True).items():
        try:
            found = checkpoint.read_array(name)
        except remesh.errors.CheckpointError:
            continue
        num_read += 1
        np.testing.assert_array_equal(found, right)
    if checkpoint.verify().ok:
        assert num_read == len(arrays(fill=True))
    return num_read == len(arrays(fill=True))


@pytest.mark.timeout(7200)
@lengths("num_damages", 300, 10_000)
def test_no_damage_gives_a_wrong_value(num_damages: int, covered: Callable[[str], None]) -> None:
    ways: tuple[Compress | None, ...] = (None, "zstd")
    pairs = [(saved(way, fill=True), saved(way, fill=False)) for way in ways]
    for right, other in pairs:
        assert sorted(named_alike(right)) == sorted(named_alike(other))
    ends: Counter[str] = Counter()
    for number in range(num_damages):
        right, other = pairs[number % 2]
        files, what = damaged(right, other, dice_of("damage", number))
        with noted(f"run {number}: {what}"):
            storage = in_memory(files)
            end = load_whole(storage)
            assert look_inside(storage) == (end == "right")
        ends[end] += 1
    covered(f"seed {seed()}: {dict(ends)}")
    # Blanks in the record and bytes behind the end of a file do no harm; nearly all else does.
    assert ends["right"] < ends.total() // 10
    assert native.RECORD_NAME in right
