"""Bits that flip in what a save itself reads: right values or an error, and nothing lost.

In each run one bit of one reading is wrong, of a file and at a place that are drawn, or of all
readings of such files from then on. What was written stays right, so a checkpoint that was
announced must be there, bit for bit, and so must the one before if no other one is.
"""

from __future__ import annotations

import random
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

import remesh
from remesh.checkpoint import unchanged
from remesh.exchange import Exchange
from remesh.storage import LocalStorage
from tests.campaigns.killed_saving import arrays_of, compress_of, part_of_state, whole_state
from tests.campaigns.settings import dice_of, lengths, noted, seed
from tests.campaigns.test_faults import stored_step
from tests.flipped_reads import flip_reads
from tests.support import FaultInjector, InjectedError, Raised, Returned, run_ranks_outcomes

NUM_RANKS = 3
Way = Literal["save", "async", "failing", "manager", "huggingface", "torch_dcp"]
WAYS: tuple[Way, ...] = ("save", "async", "failing", "async", "manager", "huggingface", "torch_dcp")
FOREIGN = ("huggingface", "torch_dcp")
WEIGHTS = ("weight", "moment", "replicated")


@dataclass(frozen=True, slots=True)
class Flip:
    """Which bit flips."""

    kind: str  # the kind of file, as `kind_of` says it
    skip: int  # how many readings of such files go well first
    place: float  # where in the bytes that are read, from 0 to 1
    stays: bool  # whether all later readings of such files are wrong as well


def kind_of(path: str) -> str:
    """The name of a file, without what tells ranks and saves from each other."""
    return re.sub(r"[0-9a-f]{5,}", "#", path.rpartition("/")[2])


class Readings:
    """The readings of a run, some of which are wrong."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.num_flipped = 0
        self._flip: Flip | None = None
        self._counts = False
        self._lock = threading.Lock()

    def begin(self, flip: Flip | None) -> None:
        """Count the readings from now on, and let the bit flip."""
        self.seen, self.num_flipped, self._flip, self._counts = Counter(), 0, flip, True

    def end(self) -> None:
        """Let the next readings be right."""
        self._counts = False

    def choose(self, path: str, num_bytes: int) -> int | None:
        """See `flip_reads`."""
        kind = kind_of(path)
        with self._lock:
            if not (self._counts and num_bytes):
                return None
            flip, number = self._flip, self.seen[kind]
            self.seen[kind] += 1
            if flip is None or kind != flip.kind or number < flip.skip:
                return None
            if number > flip.skip and not flip.stays:
                return None
            self.num_flipped += 1
        return int(flip.place * 8 * num_bytes)


def draw(dice: random.Random, seen: Counter[str]) -> Flip | None:
    """A bit of what such a save has read before; None for the first one."""
    if not seen:
        return None
    kind = dice.choice(sorted(seen))
    skip = dice.choice((0, dice.randrange(seen[kind])))
    return Flip(kind, skip, dice.random(), stays=dice.random() < 0.3)


def deadline_of(flip: Flip | None) -> float:
    """Seconds that ranks wait for each other: some never see what they wait for."""
    return 0.5 if flip is not None and flip.stays else 100.0


def state_of(step: int, rank: int, way: Way) -> dict[str, Any]:
    state = part_of_state(step, rank, NUM_RANKS)
    return {name: state[name] for name in WEIGHTS} if way in FOREIGN else state


def save_two(
    exchange: Exchange, root: Path, step: int, way: Way, flip: Flip | None, readings: Readings
) -> None:
    """Save two steps with one saver, the second one over what is there and with the flip."""
    faults, is_foreign = FaultInjector(), way in FOREIGN
    saver = remesh.Saver(
        group=exchange,
        format=way if is_foreign else "remesh",
        format_options={"max_shard_bytes": 1000} if way == "huggingface" else None,
        compress=None if is_foreign else compress_of(step),
        deadline=deadline_of(flip),
        on_event=faults,
    )
    saver.save(state_of(step, exchange.rank, way), root / f"first-{step}")
    if exchange.rank == 0:
        readings.begin(flip)
        if way == "failing":
            faults.fail_at(0, "save.before_commit")
    elif way == "failing" and step % NUM_RANKS == exchange.rank:
        faults.fail_at(exchange.rank, "save.chunk_written")
    exchange.all_gather(b"")
    state, place = state_of(step + 1, exchange.rank, way), root / "latest"
    if way == "save" or (is_foreign and step % 4):
        saver.save(state, place, overwrite=True)
    else:
        saver.save_async(state, place, overwrite=True)
    saver.close()


def stored_in(place: Path, way: Way, steps: tuple[int, ...]) -> int:
    """The step that is there; fails if it is not all of it."""
    if way not in FOREIGN:
        return stored_step(LocalStorage(place))
    checkpoint = remesh.Checkpoint(place)
    found = {name: checkpoint.read_array(name).tobytes() for name in WEIGHTS}
    for step in steps:
        whole = whole_state(step)
        if all(found[name] == whole[name].tobytes() for name in WEIGHTS):
            return step
    raise AssertionError(f"{place} holds another state than those of the steps {steps}")


def meet(
    root: Path, step: int, before: int, *, way: Way, flip: Flip | None, readings: Readings
) -> tuple[str, int]:
    """Save with a flip over what is there; how it ended, and the step that is there then."""
    outcomes = run_ranks_outcomes(NUM_RANKS, save_two, root, step, way, flip, readings)
    readings.end()
    for outcome in outcomes:
        assert isinstance(outcome, Raised | Returned), outcome
        if isinstance(outcome, Raised):
            assert isinstance(outcome.error, remesh.RemeshError | InjectedError), outcome.traceback
    assert stored_in(root / f"first-{step}", way, (step,)) == step
    shutil.rmtree(root / f"first-{step}")
    is_announced = any(isinstance(outcome, Returned) for outcome in outcomes)
    if way == "failing":
        assert not is_announced
        return "raised", before
    after = stored_in(root / "latest", way, (step + 1, before))
    assert after == step + 1 or (after == before and not is_announced), outcomes
    went_well = all(isinstance(outcome, Returned) for outcome in outcomes)
    assert went_well or (flip is not None and flip.stays), outcomes
    return "went well" if went_well else "raised", after


def manage(root: Path, step: int, *, flip: Flip | None, readings: Readings) -> str:
    """Save some steps with a manager that keeps the last one, and resume; how it ended."""
    announced, end = 0, "went well"
    try:
        with remesh.Manager(root, every=1, keep=1, deadline=deadline_of(flip)) as manager:
            for number in range(step, step + 4):
                manager.step(number, {"state": part_of_state(number, 0, 1)})
                manager.wait()
                announced = number
                if number == step + 1:
                    readings.begin(flip)
    except remesh.RemeshError:
        end = "raised"
    readings.end()
    state = part_of_state(1, 0, 1)
    for array in arrays_of(state).values():
        array[...] = 0
    with remesh.Manager(root, save_at_end=False) as manager:
        resumed = manager.resume({"state": state})
    assert resumed is not None
    assert announced <= resumed.step < step + 4
    assert resumed.passed_over == ()
    wanted = arrays_of(part_of_state(resumed.step, 0, 1))
    for name, array in arrays_of(state).items():
        assert array.tobytes() == wanted[name].tobytes(), name
    shutil.rmtree(root)
    return end


@pytest.mark.timeout(7200)
@lengths("num_saves", 35, 1000)
def test_bits_that_flip_while_a_save_reads(
    num_saves: int,
    tmp_path: Path,
    covered: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unchanged, "MIN_BYTES", 1)  # frozen files are kept
    readings = Readings()
    flip_reads(monkeypatch, LocalStorage, readings.choose)
    before = dict.fromkeys(WAYS, 0)
    seen: dict[Way, Counter[str]] = {way: Counter() for way in WAYS}
    ends: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for number in range(num_saves):
        dice, way = dice_of("flipped reads", number), WAYS[number % len(WAYS)]
        flip, root, step = draw(dice, seen[way]), tmp_path / way, 20 * number + 2
        with noted(f"run {number}: {way}, {flip}"):
            if way == "manager":
                # No large state, so that what is resumed has one size.
                end = manage(root, 19 * number + 2, flip=flip, readings=readings)
            else:
                run = partial(meet, way=way, flip=flip, readings=readings)
                end, before[way] = run(root, step, before[way])
        seen[way] |= readings.seen
        ends[f"{way} {end}"] += 1
        if flip is not None and readings.num_flipped:
            files[flip.kind] += 1
    covered(f"seed {seed()}: {dict(ends)}; a bit flipped in {dict(files)}")
    assert sum(files.values()) > num_saves / 3
    assert {"part-#.msgpack", "failed.msgpack", "remesh.json"} <= {*files}
