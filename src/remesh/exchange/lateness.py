"""Ranks that are late: which ones they are, when to warn of them, and when to give up.

A rank that has waited in a call for a moment sets a mark in the key-value store that the ranks
share, and takes it away when the call has succeeded. The ranks without a mark are those that have
not come. They are found by halving, since a store says at once whether all of some keys are set;
calls that do not wait send nothing to the store.

Of the ranks that wait, one warns: rank 0, or the first to do so if rank 0 is not among them. A rank
whose call fails leaves its mark, since the group cannot be used from then on, and leaves the reason
in the store, where the other ranks that wait find it. So they need not wait for their own deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

T = TypeVar("T")

_LOGGER = logging.getLogger("remesh")

_NAMED = 16
"""Late ranks that a message names at most."""

_LOOKS_PER_SECOND = 200
"""Looks at the store that all waiting ranks together take in a second."""

_PREFIX = "remesh/late/"


class LateError(RuntimeError):
    """The deadline of a call has passed, or another rank has given up."""


class KeyStore(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str) -> object:
        """Set a key."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key; blocks while it is not set."""
        ...

    def check(self, keys: list[str]) -> bool:
        """True if all keys are set."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0; its new value."""
        ...

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a call waits for other ranks."""

    timeout: float  # seconds until it fails
    warn_after: float = 10.0
    """Seconds until the first warning; each next one comes after twice the time."""

    @property
    def mark_after(self) -> float:
        """Seconds until a rank marks that it waits."""
        return min(1.0, self.timeout / 4, self.warn_after / 4)


def find_absent(
    ranks: Sequence[int], all_present: Callable[[Sequence[int]], bool]
) -> Iterator[int]:
    """The ranks that are not present, in order.

    `all_present` is asked twice per halving for each absent rank, and once if none is absent.
    """
    if not ranks or all_present(ranks):
        return
    if len(ranks) == 1:
        yield ranks[0]
        return
    middle = len(ranks) // 2
    yield from find_absent(ranks[:middle], all_present)
    yield from find_absent(ranks[middle:], all_present)


def describe_absent(absent: Sequence[int], global_ranks: Sequence[int]) -> str:
    """A sentence about ranks of the group that have not come, of which the first 16 are named."""
    if not absent:
        return "all ranks wait, but this call did not end; did they make different calls?"
    named = absent[:_NAMED]
    text = _list_ranks("rank", named)
    if any(global_ranks[rank] != rank for rank in named):
        text += f" ({_list_ranks('global rank', [global_ranks[rank] for rank in named])})"
    if len(absent) > _NAMED:
        text += " and more"
    return f"{text} {'has' if len(absent) == 1 else 'have'} not come"


def _list_ranks(word: str, ranks: Sequence[int]) -> str:
    return f"{word}{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


class Marks:
    """The marks of the ranks of one group, as one rank sees and sets them.

    A store may be gone or frozen, as the rank that serves it may be. The first call of it that
    fails, or does not answer within `patience` seconds, is the last; `trouble` then says why.
    """

    def __init__(
        self,
        store: KeyStore | None,
        rank: int,
        global_ranks: Sequence[int],
        *,
        patience: float = 10.0,
    ) -> None:
        self.rank = rank
        self.global_ranks = global_ranks
        self.trouble = "" if store is not None else "the group has no store"
        self._store = store
        self._patience = patience

    def set(self) -> None:
        """Mark that this rank waits."""
        self._ask(lambda store: store.set(_mark_of(self.rank), "1"))

    def clear(self, *, was_speaker: bool) -> None:
        """Take the mark of this rank away, and its right to warn if it had taken it."""
        self._ask(lambda store: store.delete_key(_mark_of(self.rank)))
        if was_speaker:
            self._ask(lambda store: store.delete_key(_PREFIX + "speaker"))

    def take_turn(self) -> bool:
        """True if this rank is the one that warns, from now until it clears its mark."""
        if self.rank == 0 or self.trouble:
            return self.rank == 0
        if self._ask(lambda store: store.check([_mark_of(0)])):
            return False
        return self._ask(lambda store: store.add(_PREFIX + "speaker", 1)) == 1

    def report_failure(self, reason: str) -> None:
        """Leave for the other ranks why this one has given up, if no other rank has."""
        if self.failure() is None:
            self._ask(lambda store: store.set(_PREFIX + "failure", reason))

    def failure(self) -> str | None:
        """Why a rank has given up, if one has."""
        if not self._ask(lambda store: store.check([_PREFIX + "failure"])):
            return None
        reason = self._ask(lambda store: store.get(_PREFIX + "failure"))
        return None if reason is None else reason.decode()

    def describe_absent(self, awaited: Sequence[int]) -> str:
        """A sentence that says which of the awaited ranks have not come."""

        def find(store: KeyStore) -> list[int]:
            absent = find_absent(awaited, lambda ranks: store.check([_mark_of(r) for r in ranks]))
            return list(islice(absent, _NAMED + 1))

        found = self._ask(find)
        if found is None:
            return f"which ranks have not come is not known: {self.trouble}"
        return describe_absent(found, self.global_ranks)

    def _ask(self, question: Callable[[KeyStore], T]) -> T | None:
        """The answer of the store, or None if it does not answer."""
        store = self._store
        if store is None or self.trouble:
            return None
        answers: list[T] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                answers.append(question(store))
            except Exception as error:  # noqa: BLE001 - `trouble` has it
                errors.append(error)

        # In a thread, for a call of a store whose server stands still has no time limit.
        thread = threading.Thread(target=ask, name="remesh-late", daemon=True)
        thread.start()
        thread.join(self._patience)
        if answers:
            return answers[0]
        self.trouble = (
            f"the group's store failed: {errors[0]}"
            if errors
            else f"the group's store did not answer within {self._patience:g} s"
        )
        return None


class SlowCall:
    """A call that has waited for other ranks since some moment."""

    def __init__(
        self, operation: str, marks: Marks, awaited: Sequence[int], limits: Limits
    ) -> None:
        self._operation = operation
        self._marks = marks
        self._awaited = awaited
        self._limits = limits
        self._interval = max(limits.mark_after, len(marks.global_ranks) / _LOOKS_PER_SECOND)
        self._next_warning = limits.warn_after
        self._is_speaker = False
        marks.set()

    def look(self, waited: float) -> float:
        """Look what the other ranks do, and warn if it is time to; seconds until the next look.

        Raises `LateError` if the deadline has passed, or another rank has given up.
        """
        if (reason := self._marks.failure()) is not None:
            raise LateError(f"another rank has given up: {reason}")
        if waited >= self._limits.timeout:
            late = self._marks.describe_absent(self._awaited)
            raise LateError(f"no end within {self._limits.timeout:g} s: {late}")
        if waited >= self._next_warning:
            self._next_warning = 2 * waited
            self._is_speaker = self._is_speaker or self._marks.take_turn()
            if self._is_speaker:
                self._warn(waited)
        return min(self._interval, min(self._limits.timeout, self._next_warning) - waited)

    def end(self) -> None:
        """Note that the call has succeeded."""
        self._marks.clear(was_speaker=self._is_speaker and self._marks.rank != 0)

    def _warn(self, waited: float) -> None:
        _LOGGER.warning(
            "%s on rank %d has waited %.0f s: %s\n"
            "Every rank must make this call (it fails after %g s)",
            self._operation,
            self._marks.rank,
            waited,
            self._marks.describe_absent(self._awaited),
            self._limits.timeout,
        )


def _mark_of(rank: int) -> str:
    return f"{_PREFIX}{rank}"
