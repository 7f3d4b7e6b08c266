"""Ranks that are late: which ones they are, when to warn of them, and when to give up.

A rank that has waited in a call for a moment sets a mark in the key-value store that the ranks
share, and takes it away when the call has succeeded. The ranks without a mark are those that have
not come. They are found by halving, since a store says at once whether all of some keys are set;
calls that do not wait send nothing to the store.

Of the ranks that wait, the first that has waited long enough warns. A rank whose call fails leaves
its mark, since the group cannot be used from then on, and leaves the reason in the store, where the
other ranks that wait find it. So they need not wait for their own deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

_LOGGER = logging.getLogger("remesh")

_NAMED = 16
"""Late ranks that a message names at most."""

_LOOKS_PER_SECOND = 200
"""Looks at the store that all waiting ranks together take in a second."""

_PREFIX = "remesh/late/"
_FAILURE, _WARNS = _PREFIX + "failure", _PREFIX + "warns"


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


class LateRanks:
    """What one rank of a group knows and tells of ranks that are late, call by call.

    A store may be gone or frozen, as the rank that serves it may be. The first call of it that
    fails, or does not answer within `patience` seconds, is the last.

    Args:
        store: The store of the group, as `torch.distributed.Store`; None if it has none.
        rank: This rank in the group.
        global_ranks: The global rank of each rank of the group.
        timeout: Seconds until a call fails.
        warn_after: Seconds until the first warning; each next one comes after twice the time.
        patience: Seconds that the store has for an answer.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        global_ranks: Sequence[int],
        timeout: float,
        warn_after: float = 10.0,
        *,
        patience: float = 10.0,
    ) -> None:
        self.timeout = timeout
        self.mark_after = min(1.0, timeout / 4, warn_after / 4)
        """Seconds until a rank marks that it waits."""
        self._store = store
        self._trouble = "" if store is not None else "the group has no store"
        self._patience = patience
        self._rank = rank
        self._global_ranks = global_ranks
        self._warn_after = warn_after
        self._interval = max(self.mark_after, len(global_ranks) / _LOOKS_PER_SECOND)
        self._operation = ""
        self._awaited: Sequence[int] = ()
        self._next_warning = warn_after
        self._warns = False  # whether it is this rank that warns

    def begin(self, operation: str, awaited: Sequence[int]) -> None:
        """Note that a call has waited for some ranks for a moment."""
        self._operation, self._awaited = operation, awaited
        self._next_warning, self._warns = self._warn_after, False
        self._ask(lambda store: store.set(_mark_of(self._rank), "1"))

    def look(self, waited: float) -> float:
        """Look what the other ranks do, and warn if it is time to; seconds until the next look.

        Raises RuntimeError if the deadline has passed, or another rank has given up.
        """
        if (reason := self._failure()) is not None:
            raise RuntimeError(f"another rank has given up: {reason}")
        if waited >= self.timeout:
            raise RuntimeError(f"no end within {self.timeout:g} s: {self._describe_absent()}")
        if waited >= self._next_warning:
            self._next_warning = 2 * waited
            self._warns = self._warns or self._ask(lambda store: store.add(_WARNS, 1)) == 1
            if self._warns or (self._trouble and self._rank == 0):
                _LOGGER.warning(
                    "%s on rank %d has waited %.0f s: %s\n"
                    "Every rank must make this call (it fails after %g s)",
                    self._operation,
                    self._rank,
                    waited,
                    self._describe_absent(),
                    self.timeout,
                )
        return min(self._interval, min(self.timeout, self._next_warning) - waited)

    def end(self) -> None:
        """Note that the call has succeeded."""
        self._ask(lambda store: store.delete_key(_mark_of(self._rank)))
        if self._warns:
            self._ask(lambda store: store.delete_key(_WARNS))

    def report_failure(self, reason: str) -> None:
        """Leave for the other ranks why this one has given up, if no other rank has."""
        if self._failure() is None:
            self._ask(lambda store: store.set(_FAILURE, reason))

    def _failure(self) -> str | None:
        """Why a rank has given up, if one has."""
        reason: bytes | None = self._ask(
            lambda store: store.get(_FAILURE) if store.check([_FAILURE]) else None
        )
        return None if reason is None else reason.decode()

    def _describe_absent(self) -> str:
        def find(store: Any) -> list[int]:
            absent = find_absent(self._awaited, lambda some: store.check([*map(_mark_of, some)]))
            return list(islice(absent, _NAMED + 1))

        found = self._ask(find)
        if found is None:
            return f"which ranks have not come is not known: {self._trouble}"
        return describe_absent(found, self._global_ranks)

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """The answer of the store, or None if it does not answer."""
        store = self._store
        if store is None or self._trouble:
            return None
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(question(store))
            except Exception as error:  # noqa: BLE001 - raised below
                answer.set_exception(error)

        # In a thread, for a call of a store whose server stands still has no time limit.
        threading.Thread(target=ask, name="remesh-late", daemon=True).start()
        try:
            return answer.result(self._patience)
        except TimeoutError:
            self._trouble = f"the group's store did not answer within {self._patience:g} s"
        except Exception as error:  # noqa: BLE001 - it is told with the ranks that are late
            self._trouble = f"the group's store failed: {error}"
        return None


def _mark_of(rank: int) -> str:
    return f"{_PREFIX}{rank}"
