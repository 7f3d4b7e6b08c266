"""A checkpoint that is overwritten while it is read: intact, so nothing may call it corrupt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import remesh
from remesh.checkpoint.loading import load
from remesh.cli import cli
from remesh.cli.verify import check
from remesh.core.sharded import ShardedTensor
from remesh.errors import (
    CheckpointReplacedError,
    MismatchError,
)
from remesh.exchange import Exchange, run_joined, run_on_all
from remesh.formats import native
from remesh.maintenance.repair import plan_repair
from remesh.storage import LocalStorage, MemoryStorage, Storage
from tests.engine.scenes import all_are, errors_of
from tests.support import FaultyStorage, run_ranks

NUM_ROWS = 6


def state_of(number: int) -> dict[str, Any]:
    """What the save of a number holds: every element says which save it is from."""
    return {
        "weight": np.full((NUM_ROWS, 4), number, np.float32),
        "bias": np.full(3, number, np.int64),
        "number": number,
    }


def number_in(state: dict[str, Any]) -> int:
    """Which save a state is from; fails if it is from several."""
    number: int = state["number"]
    assert (state["weight"] == number).all()
    assert (state["bias"] == number).all()
    return number


class OverwrittenStorage(FaultyStorage):
    """A storage whose checkpoint is overwritten by the next save before chosen calls.

    `is_due` is given the number of a reading call, and says whether a save comes first.
    """

    def __init__(self, inner: Storage, is_due: Callable[[int], bool]) -> None:
        super().__init__(inner, ())
        self.num_saves = 0
        self.num_reads = 0
        self._comes_before = is_due
        self.save()

    def save(self) -> None:
        remesh.save(state_of(self.num_saves), self._inner, overwrite=True)
        self.num_saves += 1

    def meet(self, operation: str, path: str = "") -> None:
        super().meet(operation, path)
        with self._lock:
            if operation in {"size", "read", "read_into", "list"}:
                if self._comes_before(self.num_reads):
                    self.save()
                self.num_reads += 1


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "checkpoint") if request.param == "local" else MemoryStorage()


def count_reads(place: Storage, read: Callable[[Storage], object]) -> int:
    storage = OverwrittenStorage(place, lambda _: False)
    read(storage)
    return storage.num_reads


# ---------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------


def load_alone(storage: Storage) -> int:
    state = state_of(-1)
    load(state, storage)
    return number_in(state)


def test_a_load_begins_anew_wherever_it_is_overtaken(place: Storage) -> None:
    num_reads = count_reads(place, load_alone)
    assert num_reads > 3
    for number in range(num_reads):
        storage = OverwrittenStorage(place, lambda read, number=number: read == number)  # type: ignore[misc]
        assert load_alone(storage) in {0, 1}
        assert storage.num_saves == 2


def load_rows(exchange: Exchange, storage: Storage, share_reads: bool) -> int:
    """Load some rows of the weight, and check that all is from one save."""
    num_rows = NUM_ROWS // exchange.world_size
    rows = np.zeros((num_rows, 4), np.float32)
    offset = (exchange.rank * num_rows, 0)
    state = state_of(-1)
    state["weight"] = ShardedTensor.at_offset("weight", rows, (NUM_ROWS, 4), offset)
    load(state, storage, group=exchange, share_reads=share_reads)
    return number_in({**state, "weight": rows})


@pytest.mark.parametrize("share_reads", [False, True])
def test_all_ranks_begin_anew_together(place: Storage, share_reads: bool) -> None:
    """Whichever rank's read meets the overwriting, all ranks end with one and the same save."""
    quiet = OverwrittenStorage(place, lambda _: False)
    run_ranks(3, load_rows, quiet, share_reads)
    for number in range(quiet.num_reads):
        storage = OverwrittenStorage(place, lambda read, number=number: read == number)  # type: ignore[misc]
        loaded = run_ranks(3, load_rows, storage, share_reads)
        assert len(set(loaded)) == 1, (number, loaded)
        assert loaded[0] in {0, 1}


def test_a_load_that_is_overtaken_again_and_again_says_so(place: Storage) -> None:
    class Overtaken(OverwrittenStorage):
        def meet(self, operation: str, path: str = "") -> None:
            if path.endswith("00000.safetensors"):
                self.save()

    storage = Overtaken(place, lambda _: False)
    errors = errors_of(2, load_rows, storage, False)
    all_are(errors, CheckpointReplacedError, "replaced by another save")
    assert storage.num_saves > native.NUM_BEGINNINGS


def test_a_removed_checkpoint_is_not_found(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    remesh.save(state_of(1), storage)

    class Removed(FaultyStorage):
        def meet(self, operation: str, path: str = "") -> None:
            if path.endswith("00000.safetensors"):
                for name in (native.RECORD_NAME, *storage.list()):
                    storage.delete(name)

    with pytest.raises(remesh.CheckpointNotFoundError):
        load_alone(Removed(storage, ()))


# ---------------------------------------------------------------------------------------------
# Handles, verify, ls, repair
# ---------------------------------------------------------------------------------------------


def test_a_handle_reads_one_save_or_says_that_it_was_replaced(place: Storage) -> None:
    storage = OverwrittenStorage(place, lambda _: False)
    checkpoint = remesh.Checkpoint(storage)
    storage.save()
    for read in (lambda: checkpoint.read_array("weight"), checkpoint.state, checkpoint.verify):
        with pytest.raises(CheckpointReplacedError, match="Open it again"):
            read()
    assert number_in(remesh.Checkpoint(storage).state()) == 1
    assert remesh.Checkpoint(storage).verify().ok


COMMANDS: dict[str, Callable[[Path], bool]] = {
    "verify": lambda path: check(str(path)).status == "sound",
    "ls": lambda path: "\ncommitted " in CliRunner().invoke(cli, ["ls", str(path.parent)]).stdout,
    "repair": lambda path: not plan_repair(path).report.lost,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_begin_anew(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step_1"
    remesh.save(state_of(0), path)
    due, num_calls = -1, 0

    def overtaken(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: LocalStorage, *args: Any, **options: Any) -> Any:
            nonlocal due, num_calls
            num_calls += 1
            if due == num_calls:
                due = -1
                remesh.save(state_of(1), path, overwrite=True)
            return method(self, *args, **options)

        return call

    for name in ("size", "read", "read_into", "list"):
        monkeypatch.setattr(LocalStorage, name, overtaken(getattr(LocalStorage, name)))
    assert COMMANDS[command](path)
    for number in range(1, num_calls + 1):
        due, num_calls = number, 0
        assert COMMANDS[command](path), number
        assert due == -1


# ---------------------------------------------------------------------------------------------
# Agreement among ranks
# ---------------------------------------------------------------------------------------------

ERRORS: list[Exception] = [
    MismatchError("the state does not fit"),
    CheckpointReplacedError("replaced"),
    ValueError("a bug"),
]


def test_all_ranks_agree_that_a_checkpoint_was_replaced() -> None:
    """Ranks that fail in different ways raise the one failure that begins anew."""

    def step(exchange: Exchange, joined: bool) -> None:
        def fail() -> bytes:
            raise ERRORS[exchange.rank]

        if joined:
            run_joined(exchange, fail, lambda replies: replies)
        else:
            run_on_all(exchange, fail)

    for joined in (False, True):
        errors = errors_of(3, step, joined)
        assert [type(error) for error in errors] == [CheckpointReplacedError] * 3
