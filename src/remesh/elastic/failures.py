"""The cause of a failure, and what follows from it: pure functions.

When one process of a job dies, its peers fail too: their collectives lose a partner. Restarts are
charged to the node where the failure began, and its error is shown first. A lost connection to a
server looks like a lost partner, so a consequence that nothing explains is charged as well, when
the next round begins (`remesh.elastic.job`). What is known of each failed process (exit code,
signal, message, last lines of its log) is sorted into kinds by `classify`; `root_cause` orders the
failures of a round; `decide` says what a node does next.

The signs of hardware faults and of lost partners are patterns that users can extend. The exit codes
are DLRover's: 201 and 202 are what its operators give to broken devices.
"""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from remesh.errors import StorageError

MAX_MESSAGE = 4096
"""Characters of a message, and of a log's end, that are kept."""
MAX_PAUSE = 30.0
"""Longest pause, in seconds, before processes that keep failing start again."""


class Kind(StrEnum):
    """The kind of a process's failure."""

    PROCESS = "process"
    NODE = "node"
    COLLATERAL = "collateral"
    STOPPED = "stopped"


class ProcessFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One failed process."""

    node_id: int
    round: int  # the round in which it ran
    rank: int  # its rank in that round
    local_rank: int  # its rank on the node
    exit_code: int  # as the operating system reports it; negative for a signal
    time: float  # when it failed, in seconds since the epoch by the node's clock
    message: str = ""  # what it said: the exception, if it could be recorded
    log_tail: str = ""  # the last lines that it wrote
    step: int | None = None  # the last step that it had finished, if it reports steps

    @property
    def signal_name(self) -> str:
        """The signal that ended it, or nothing."""
        if self.exit_code >= 0:
            return ""
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


class Patterns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Regular expressions that tell kinds of failures apart, searched in message and log."""

    node: tuple[str, ...] = (
        r"uncorrectable (ECC|NVLink) error",
        r"\bNVRM: Xid\b",
        r"hardware error",
        r"CUDA error: (an illegal instruction|unspecified launch failure|device kernel image)",
        r"No CUDA GPUs are available",
        r"GPU has fallen off the bus",
        r"\bECC error\b",
    )  # signs that the machine is broken
    memory: tuple[str, ...] = (
        r"out of memory",
        r"\bMemoryError\b",
        r"Cannot allocate memory",
        r"DefaultCPUAllocator: can't allocate",
    )  # signs that memory ran out, which no other process has caused
    collateral: tuple[str, ...] = (
        r"Connection (closed by peer|reset by peer|refused|timed out)",
        r"No route to host|Network is unreachable",
        r"Broken pipe",
        r"\bncclRemoteError\b",
        r"NCCL communicator was aborted",
        r"Watchdog caught collective operation timeout",
        r"Timed out waiting .* (recv|send) operation",
        r"timeout caused pair closure",
        r"DistNetworkError",
        r"\bExchangeError\b",
        r"connectFullMesh",
        r"barrier .*timed? ?out",
    )  # signs that a partner was lost
    node_exit_codes: tuple[int, ...] = (201, 202)
    """Exit codes by which a script says that the machine is broken."""

    def __post_init__(self) -> None:
        for sign in (*self.node, *self.memory, *self.collateral):
            try:
                re.compile(sign)
            except re.error as error:
                raise ValueError(f"{sign!r} is no regular expression: {error}") from error


def read_patterns(path: str | None) -> Patterns:
    """The patterns in a JSON file; the usual ones where it names none, or without a file."""
    if path is None:
        return Patterns()
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Patterns)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: the failure patterns cannot be used: {error}") from error


# A page asks every second, and searching the logs of hundreds of failures takes as long.
@functools.lru_cache(maxsize=4096)
def classify(failure: ProcessFailure, patterns: Patterns) -> Kind:
    """The kind of one failure.

    A broken machine is looked for first: such errors are often followed by those of the others.
    """
    text = f"{failure.message}\n{failure.log_tail}"

    def shows(signs: Iterable[str]) -> bool:
        return any(re.search(sign, text, re.IGNORECASE) for sign in signs)

    if failure.exit_code in patterns.node_exit_codes or shows(patterns.node):
        return Kind.NODE
    if shows(patterns.memory):
        return Kind.PROCESS
    if failure.exit_code == -signal.SIGTERM:
        return Kind.STOPPED
    if shows(patterns.collateral):
        return Kind.COLLATERAL
    return Kind.PROCESS


_CONSEQUENCES = (Kind.COLLATERAL, Kind.STOPPED)
_ORDER = (Kind.NODE, Kind.PROCESS, Kind.COLLATERAL, Kind.STOPPED)


def is_consequence(failure: ProcessFailure, patterns: Patterns) -> bool:
    """True if a process failed because of what happened elsewhere."""
    return classify(failure, patterns) in _CONSEQUENCES


def root_cause(failures: Sequence[ProcessFailure], patterns: Patterns) -> list[ProcessFailure]:
    """Failures with the likeliest root cause first.

    Processes that lost a partner or were stopped come after all others; within each half the
    earliest comes first, by the clocks of the nodes, which may differ a little.
    """

    def place(failure: ProcessFailure) -> tuple[bool, float, int, int]:
        kind = classify(failure, patterns)
        return kind in _CONSEQUENCES, failure.time, _ORDER.index(kind), failure.rank

    return sorted(failures, key=place)


class FailureAction(StrEnum):
    """What follows from the failures of a node."""

    EXCUSE = "excuse"  # start the processes again: others have caused it
    CHARGE = "charge"  # start them again, if the node's budget has a restart left
    REPLACE = "replace"  # another node takes the place of this one


def restart_pause(num_failed: int) -> float:
    """Seconds before the next start, after so many failed ones in a row; none after the first.

    It doubles each time: what the processes need may come back, a server for example.
    """
    return min(2.0 ** min(num_failed - 2, 10), MAX_PAUSE) if num_failed > 1 else 0.0


def decide(
    failures: Sequence[ProcessFailure], *, num_ranks: int, patterns: Patterns
) -> tuple[FailureAction, str]:
    """What follows from the failures of one node in one round, and why, in a sentence."""
    first = root_cause(failures, patterns)[0]
    kind = classify(first, patterns)
    where = f"rank {first.rank} (local rank {first.local_rank}) on node {first.node_id}"
    how = first.signal_name or f"exit code {first.exit_code}"
    if kind is Kind.NODE:
        reason = f"{where} reports a broken machine ({how}); another node should replace it"
        return FailureAction.REPLACE, reason
    if kind is Kind.STOPPED:
        return FailureAction.EXCUSE, f"{where} was stopped ({how})"
    if kind is Kind.COLLATERAL and num_ranks != 1:
        return FailureAction.EXCUSE, f"{where} failed because others did ({how})"
    return FailureAction.CHARGE, f"{where} failed ({how})"
