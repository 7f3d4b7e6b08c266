"""One load, from top to bottom.

1. Rank 0 reads the small files (record, index, values) once and broadcasts them.
2. Every rank describes its target state, compares it with what is stored, and plans its own reads
   from the index alone. All ranks learn whether any of them found a mismatch; until then nothing in
   any state has been touched.
3. Every rank reads its runs straight into the memory of its tensors.
4. Values are put back, and objects with a state dict get theirs.

A failure in steps 3 or 4 raises on every rank and leaves the state partly loaded; the message says
so. Digests are checked before bytes reach a tensor, so no tensor ever holds damaged data.

A checkpoint may be overwritten while it is loaded; its files are then removed. A rank that cannot
read a file, or finds other bytes than were written, reads the commit record again; if that has
changed, all ranks begin anew with step 1, and fill again what they have filled. All ranks do, for
`run_on_all` prefers this failure to any other.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from remesh.checkpoint.arguments import check_order
from remesh.checkpoint.buffers import without_buffers_of_ranks
from remesh.checkpoint.comparing import Wanted
from remesh.checkpoint.local import exchange_of, finish_device_work
from remesh.checkpoint.report import RestoreReport
from remesh.checkpoint.stopwatch import timed
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.target import MAX_LISTED, LoadOptions, Target
from remesh.checkpoint.transformed import TransformedTarget
from remesh.errors import MismatchError
from remesh.events import Emit, OnEvent, emitter, ignore
from remesh.exchange import Exchange, run_on_all, run_on_one
from remesh.formats.native import ValuesDocument, begin_anew, unless_replaced
from remesh.formats.table import Place, place_of, read_encoded
from remesh.index import Index
from remesh.planner import (
    LOCAL_EXCHANGE_COST,
    REMOTE_EXCHANGE_COST,
    Assign,
    assign_readers,
    assign_readers_if_cheaper,
)
from remesh.storage import Storage, is_remote
from remesh.transform import Program, Transform, as_transform

_LOGGER = logging.getLogger("remesh")


def load(  # noqa: PLR0913 - the options of a load, each of which stands for itself
    state: Any,
    path: Any,
    *,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["ignore", "error"] = "ignore",
    cast: bool = False,
    transform: Transform | Program | None = None,
    share_reads: bool | None = None,
    timeout: float | None = None,
    group: Any = None,
    on_report: Callable[[RestoreReport], None] | None = None,
    on_event: OnEvent = ignore,
) -> Any:
    """Load a checkpoint into a state of any layout. Collective, like `save`.

    Tensors are filled in place. Plain values are replaced in their dicts and lists; modules,
    optimizers and other objects get what is theirs.

    Args:
        state: The target, built like the state that was saved. Only what it names is read.
        path: Directory of a committed checkpoint, of remesh or of another system that it reads;
            or a `remesh.formats.Source`.
        missing: What to do about names that the state has and the checkpoint lacks.
        unexpected: What to do about names that the checkpoint has and no rank's state.
        cast: Convert tensors whose stored dtype differs from the target's; otherwise that is an
            error.
        transform: What the stored tensors become on their way: renamed, fused, split, transposed,
            cast. A `Transform`, its statements as text, or a dict of renames, old name to new name.
            Optimizer state follows its parameter. Only the bytes that are needed are read. The
            language is specified in docs/transform.md.
        share_reads: Whether one rank reads what several need and passes it on, so that storage
            serves every byte once. None decides: shared if that spares more reading than it costs
            to move bytes between ranks, which is little where storage is a network away.
        timeout: Seconds that reading tensors may take; None for no limit. A rank that is late then
            is named in the error, on every rank that can still be reached.
        group: See `save`.
        on_report: Is given this rank's `RestoreReport`.
        on_event: Told of the moments in `remesh.events.LOAD_POINTS`.

    Returns:
        The state: the same object, unless it is itself a tuple or a plain value.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        MismatchError: If state and checkpoint do not fit. Nothing was changed.
        TransformError: If the transformation is malformed, or does not fit the stored tensors or
            the state. Nothing was changed.
        StateError: If the state cannot be a target (a tensor on the meta device, say). Nothing
            was changed.
        CorruptCheckpointError: If stored bytes are missing or damaged.
        CheckpointReplacedError: If other saves replaced the checkpoint faster than it could be
            read, many times in a row.
        FormatVersionError: If the checkpoint was written by a newer remesh.
        StorageError: If the storage fails.
        ExchangeError: If a rank died, or reading took longer than `timeout`.
    """
    check_order("load", state, path)
    started = time.monotonic()
    rules = as_transform(transform)
    exchange = exchange_of(group)
    place = place_of(path)
    storage = place.storage
    emit = timed(emitter(on_event, exchange.rank), "load", exchange.rank, storage.url)
    assign = _assign_for(share_reads, exchange, storage)

    def load_once() -> Any:
        stored = open_shared(exchange, place)
        emit("load.opened")

        def read(wanted: Wanted, on_read: Callable[[int], None]) -> bool:
            with unless_replaced(storage, stored.identity):
                return wanted.read(
                    exchange, storage, assign=assign, on_read=on_read, timeout=timeout
                )

        return load_into(
            state,
            stored,
            storage.url,
            exchange,
            LoadOptions(missing == "keep", unexpected == "error", cast),
            transform=rules,
            read=read,
            emit=emit,
            on_report=lambda report: (
                on_report(dataclasses.replace(report, seconds=time.monotonic() - started))
                if on_report is not None
                else None
            ),
        )

    return begin_anew(load_once)


Read = Callable[[Wanted, Callable[[int], None]], bool]
"""Reads what is wanted, while the other ranks read what they want; calls a function
after each run with its size in bytes. Returns whether ranks read for each other. Collective."""


def load_into(
    state: Any,
    stored: StoredState,
    url: str,
    exchange: Exchange,
    options: LoadOptions,
    *,
    transform: Transform | None,
    read: Read,
    check: Callable[[Target], None] = lambda _target: None,
    emit: Emit,
    on_report: Callable[[RestoreReport], None],
) -> Any:
    """Steps 2 to 4 of a load: from what is stored into a state. Collective.

    Args:
        state: The target.
        stored: What is stored.
        url: Where it is, for messages.
        exchange: The ranks that load.
        options: What the caller allows.
        transform: What the stored tensors become.
        read: Reads what a target that is planned wants.
        check: Raises what speaks against filling it.
        emit: Told of the moments from `load.planned` on.
        on_report: Is given this rank's report.
    """
    target, extra = _match(
        state, stored, url, exchange, options, transform=transform, read=read, check=check
    )
    emit("load.planned")
    result = state

    def fill() -> bytes:
        finish_device_work(to.memory for to in target.filling.destinations)
        target.fill_zeros()
        target.reads_shared = read(target.filling, count)
        emit("load.read")
        return msgspec.msgpack.encode((target.filling.num_bytes, sum(target.reads)))

    def count(size: int) -> None:
        target.reads.append(size)
        emit("load.run_read", size)

    def put_back() -> bytes:
        nonlocal result
        result = target.rebuild()
        return b""

    try:
        totals = run_on_all(exchange, fill)
        run_on_all(exchange, put_back)
    except Exception as error:
        error.add_note("The state is partly loaded; load again before using it.")
        raise
    unchecked = _unchecked(stored, extra, url, exchange.rank)
    report = dataclasses.replace(target.report(extra), unchecked=unchecked)
    on_report(_with_totals(report, totals))
    emit("load.done")
    return result


def _match(
    state: Any,
    stored: StoredState,
    url: str,
    exchange: Exchange,
    options: LoadOptions,
    *,
    transform: Transform | None,
    read: Read,
    check: Callable[[Target], None],
) -> tuple[Target, list[str]]:
    """Plan a target; the target, and the stored names that no rank asks for. Collective.

    Args and errors are those of `load_into`.
    """
    target = Target(stored, url, options)

    def checked(bits: bytes) -> bytes:
        check(target)
        return (_COMPARES if target.comparisons.checks else _COMPARES_NOT) + bits

    if transform is None:
        replies = run_on_all(exchange, lambda: checked(target.prepare(state)))
    else:
        target = changed = TransformedTarget(stored, url, options, transform)
        first = run_on_all(exchange, lambda: changed.describe(state))
        tables = run_on_all(exchange, lambda: changed.describe_again(state, first))
        replies = run_on_all(exchange, lambda: checked(changed.prepare_among(tables)))
    if any(reply.startswith(_COMPARES) for reply in replies):
        run_on_all(exchange, lambda: _compare(target, read))
    extra = _unexpected_names(stored, [reply[1:] for reply in replies])
    if extra and options.refuse_unexpected:
        raise MismatchError(
            f"{url} holds {len(extra)} names that no rank asks for: {_listed(extra)}",
            unexpected=tuple(extra),
        )
    if target.description.dropped and exchange.rank == 0:
        _LOGGER.warning(
            "%d entries of plain dicts are not in %s and go, for such a dict is replaced whole: %s",
            len(target.description.dropped),
            url,
            _listed(target.description.dropped),
        )
    return target, extra


_COMPARES, _COMPARES_NOT = b"c", b"-"


def _compare(target: Target, read: Read) -> bytes:
    """Read and compare what a target needs to have equal. Collective."""
    read(target.comparisons.wanted, lambda _size: None)
    target.refuse_unequal()
    return b""


def open_shared(exchange: Exchange, source: Any) -> StoredState:
    """Open a checkpoint of any format on every rank; only rank 0 reads.

    Args:
        exchange: The ranks.
        source: A path, URL, storage or `Source`, or a `Place`.

    Raises:
        CheckpointError: If there is none or its small files are damaged.
        StateError: If it is not clear which format it has.
    """
    place = source if isinstance(source, Place) else place_of(source)
    index, document, identity = msgspec.msgpack.decode(
        run_on_one(exchange, lambda: msgspec.msgpack.encode(read_encoded(place))),
        type=tuple[bytes, bytes, str],
    )
    where = place.storage.url
    return StoredState(
        Index.decode(index, where),
        ValuesDocument.decode(document, where),
        identity,
        exchange.rank,
    )


def _with_totals(report: RestoreReport, replies: list[bytes]) -> RestoreReport:
    """A report that also says what all ranks needed and read."""
    totals = [msgspec.msgpack.decode(reply, type=tuple[int, int]) for reply in replies]
    return dataclasses.replace(
        report,
        group_bytes_needed=sum(needed for needed, _ in totals),
        group_bytes_read=sum(num_read for _, num_read in totals),
    )


def _unchecked(
    stored: StoredState, not_asked: Iterable[str], url: str, rank: int
) -> tuple[str, ...]:
    """The names which ranks have asked for that no digest proves; rank 0 warns of them."""
    found = tuple(sorted(set(stored.document.unchecked_names).difference(not_asked)))
    if found and rank == 0:
        text = "%s was repaired, and no digest proves that these are what was saved: %s"
        _LOGGER.warning(text, url, _listed(found))
    return found


def _assign_for(share_reads: bool | None, exchange: Exchange, storage: Storage) -> Assign | None:
    """What assigns windows to readers; None if every rank reads for itself."""
    if share_reads is False or exchange.world_size == 1:
        return None
    if share_reads:
        return assign_readers
    cost = REMOTE_EXCHANGE_COST if is_remote(storage) else LOCAL_EXCHANGE_COST
    return lambda touched: assign_readers_if_cheaper(touched, exchange_cost=cost)


def _unexpected_names(stored: StoredState, replies: list[bytes]) -> list[str]:
    """Stored names that no rank asks for."""
    names = list(stored.names())
    asked = np.zeros(len(names), dtype=np.bool_)
    for reply in replies:
        bits = np.unpackbits(np.frombuffer(reply, dtype=np.uint8), count=len(names))
        asked |= bits.astype(np.bool_)
    extra = [name for name, wanted in zip(names, asked.tolist(), strict=True) if not wanted]
    return without_buffers_of_ranks(names, extra)


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f", ... and {len(shown) - MAX_LISTED} more" if len(shown) > MAX_LISTED else ""
    return ", ".join(shown[:MAX_LISTED]) + more
