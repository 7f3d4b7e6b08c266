"""Calls of the file system that fail: one call of a save, a load and a check at a time, in turn.

A call gives an error, or moves fewer bytes than it was asked to. By default one of eleven calls
meets one kind of fault; the nightly run lets every call meet all kinds.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import remesh
from remesh.exchange import Exchange
from tests.campaigns.test_power_loss import CHANGES, number_at, save_part
from tests.descriptors import open_below
from tests.support import Returned, run_ranks, run_ranks_outcomes
from tests.support.outcomes import Outcome, have_succeeded
from tests.support.system_calls import Call, SystemCalls
from tests.waiting import wait_until

NUMBERS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class Kind:
    """What happens to a call."""

    number: int | None  # the error that it gives; None if it only moves a single byte
    late: bool = False
    """Whether it takes effect all the same, as it may if the answer of a file server is lost."""


KINDS = (
    *(Kind(number) for number in NUMBERS),
    *(Kind(number, late=True) for number in (errno.EIO, errno.ESTALE)),
    Kind(None),
)


class OneFault:
    """Makes one call fail, from 1 on, or one of those of a function; for `SystemCalls`."""

    def __init__(self, position: int, kind: Kind, *, only: str = "") -> None:
        self._position = position
        self._kind = kind
        self._only = only
        self._late: OSError | None = None
        self.num_calls = 0
        self.call: Call | None = None
        self.is_announced = False

    def before(self, call: Call) -> int | None:
        self._late = None  # the call before has failed by itself
        self.num_calls += self._only in {"", call.name}
        if self.call is not None or self.num_calls != self._position:
            return None
        self.call = call
        if self._kind.number is None:
            return 1
        error = OSError(self._kind.number, os.strerror(self._kind.number))
        # The system closes a descriptor even if it reports an error.
        if call.name == "close" or (self._kind.late and call.name in CHANGES - {"open"}):
            self._late = error
            return None
        raise error

    def after(self, call: Call) -> None:
        if call.name == "replace" and call.target.endswith("remesh.json"):
            self.is_announced = True
        if self._late is not None:
            error, self._late = self._late, None
            raise error


def load_part(exchange: Exchange, path: Path) -> int:
    found = number_at(path, exchange)
    assert found is not None
    return found


def verify(path: Path) -> bool:
    return remesh.Checkpoint(path).verify().ok


def succeed(outcomes: Sequence[Outcome[object]], root: Path) -> bool:
    """Whether all ranks did; if not, all of them raised an error that names a file."""
    all_did = have_succeeded(outcomes, str(root))
    assert all_did or not any(isinstance(outcome, Returned) for outcome in outcomes), outcomes
    return all_did


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def meet(root: Path, num_ranks: int, fault: OneFault) -> str:
    """Overwrite a checkpoint, load and verify it, with one fault; how that ended."""
    path = root / "checkpoint"
    run_ranks(num_ranks, save_part, path, 1)
    descriptors, threads = num_descriptors(), threading.active_count()
    with SystemCalls(root, before=fault.before, after=fault.after):
        saved = succeed(run_ranks_outcomes(num_ranks, save_part, path, 2), root)
        there = 2 if fault.is_announced else 1
        assert not saved or fault.is_announced
        loads = run_ranks_outcomes(num_ranks, load_part, path)
        loaded = succeed(loads, root)
        checks = run_ranks_outcomes(1, lambda _: verify(path))
        verified = succeed(checks, root)
    if loaded:
        assert {outcome.value for outcome in loads if isinstance(outcome, Returned)} == {there}
    if verified:
        assert checks == [Returned(True)]
    assert open_below(str(root)) == []
    # Fewer, if what an earlier test has left to the garbage collector was collected meanwhile.
    assert num_descriptors() <= descriptors
    wait_until(lambda: threading.active_count() <= threads, "all threads end")
    assert number_at(path) == there
    assert verify(path)
    run_ranks(num_ranks, save_part, path, 3)
    assert number_at(path) == 3
    hidden = [one.name for one in path.rglob(".remesh*")]
    assert len(hidden) <= 1, hidden  # only where it was the call that removes it that failed
    return f"saved {saved}, loaded {loaded}, verified {verified}"


def play(work: Path, num_ranks: int, *, stride: int, offset: int = 0) -> set[str]:
    """Let every `stride`-th call fail, one after the other, beginning with some kind of fault."""
    ends: set[str] = set()
    for turn in itertools.count():
        position, kind = 1 + turn * stride, KINDS[(turn + offset) % len(KINDS)]
        fault = OneFault(position, kind)
        root = work / f"{offset}-{position}"
        root.mkdir()
        try:
            ends.add(meet(root, num_ranks, fault))
        except BaseException as error:
            error.add_note(f"position {position}, {kind}, {fault.call}")
            raise
        if fault.call is None:
            assert fault.num_calls > 100
            return ends
    raise AssertionError


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_any_call_may_fail(tmp_path: Path, num_ranks: int) -> None:
    ends = play(tmp_path, num_ranks, stride=11)
    assert "saved False, loaded True, verified True" in ends


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("offset", range(len(KINDS)))
def test_every_call_may_fail_in_every_way(
    tmp_path: Path, num_ranks: int, offset: int, covered: Callable[[str], None]
) -> None:
    ends = play(tmp_path, num_ranks, stride=1, offset=offset)
    covered(f"every call, once: {sorted(ends)}")
    # Each of the three has failed by itself.
    assert ends >= {
        "saved False, loaded True, verified True",
        "saved True, loaded False, verified True",
        "saved True, loaded True, verified False",
        "saved True, loaded True, verified True",
    }


def test_a_leak_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that cannot fail would show nothing."""
    # An abort that closes and removes nothing.
    monkeypatch.setattr("remesh.storage.local.LocalWriter.abort", lambda _self: None)
    fault = OneFault(1, Kind(errno.EIO), only="fallocate")
    with pytest.raises(AssertionError, match=r"data-.*\.safetensors"):
        meet(tmp_path, 1, fault)
