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
`share_outcomes` prefers this failure to any other.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from remesh._repr import listed
from remesh.catalog import explained_absence
from remesh.checkpoint.arguments import (
    check_choice,
    check_flag,
    check_order,
    check_seconds,
    check_target,
)
from remesh.checkpoint.buffers import without_buffers_of_ranks
from remesh.checkpoint.local import (
    describe_local,
    exchange_of,
    finish_device_work,
    target_of,
)
from remesh.checkpoint.match import (
    LoadOptions,
    Names,
    RankLoadPlan,
    match,
)
from remesh.checkpoint.mismatch import refuse, unasked, with_recipe
from remesh.checkpoint.optimizer_names import with_parameter_names
from remesh.checkpoint.report import Findings, RestoreReport
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.transformed import describe_transformed
from remesh.core.collector import gc_paused
from remesh.core.index import Index
from remesh.core.strided import Layout
from remesh.errors import MismatchError, StateError
from remesh.events import Emit, OnEvent, emitter, ignore, showing, timed
from remesh.exchange import Exchange, Outcome, broadcast_outcome, run_each, share_outcomes
from remesh.formats.decoding import decoded
from remesh.formats.native import ValuesDocument, beginnings
from remesh.formats.table import place_of, read_encoded
from remesh.pipeline import Destination, read_together
from remesh.pipeline.read import limits_for
from remesh.pipeline.source import TensorSource
from remesh.planner import Assign, LoadPlan
from remesh.planner.assignment import (
    LOCAL_EXCHANGE_COST,
    REMOTE_EXCHANGE_COST,
    assign_readers,
    assign_readers_if_cheaper,
)
from remesh.storage import Storage
from remesh.transform import Program, Transform, as_transform

_LOGGER = logging.getLogger("remesh")


def load(  # noqa: PLR0913 - the options of a load, each of which stands for itself
    state: Any,
    path: Any,
    *,
    format: str | None = None,  # noqa: A002 - as in `save`
    allow: Sequence[str] = (),
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["ignore", "error"] = "ignore",
    cast: bool = False,
    transform: Transform | Program | None = None,
    share_reads: bool | None = None,
    timeout: float | None = None,
    group: Any = None,
    on_event: OnEvent = ignore,
) -> RestoreReport:
    """Load a checkpoint into a state of any layout. Collective, like `save`.

    The state is filled in place: the elements of tensors, and plain values in their dicts and
    lists; modules, optimizers and other objects load their state dicts.

    Args:
        state: The target, built like the state that was saved. Only its names are read. A tuple or
            a plain value stands in a dict or list, where it can be replaced.
        path: Directory of a committed checkpoint, of remesh or of another system that it reads. Of
            a model of peft, files of peft fill the adapters.
        format: The format to read, if there are files of several at the path; None to look.
        allow: Qualified names (`package.module.Class`) that a pickle in the checkpoint may import
            and call. A person who can write such a checkpoint can then do with this process what
            these names can do.
        missing: What to do about names that the state has and the checkpoint lacks.
        unexpected: What to do about names that the checkpoint has and no rank's state.
        cast: Convert tensors whose stored dtype differs from the target's; otherwise that is an
            error.
        transform: Renames, fuses, splits, transposes or casts stored tensors. A `Transform`, its
            statements as text, a dict of renames, of names or prefixes (`{"model.": "net."}`), or a
            function from name to name. Optimizer state follows its parameter. Only the bytes that
            are needed are read. The language is specified in docs/transform.md.
        share_reads: Whether one rank reads what several need and passes it on, so that storage
            serves every byte once. None decides: shared if that spares more reading than it costs
            to move bytes between ranks, which is little where storage is a network away.
        timeout: Seconds that reading tensors may take; None for no limit. A rank that is late then
            is named in the error, on every rank that can still be reached.
        group: See `save`.
        on_event: Called at the points in `remesh.events.LOAD_POINTS`.

    Returns:
        What became of each name, on this rank.

    Raises:
        OptionError: If an option has a wrong type or value.
        CheckpointNotFoundError: If there is no committed checkpoint.
        MismatchError: If state and checkpoint do not fit. Nothing was changed.
        TransformError: If the transformation is malformed, or does not fit the stored tensors or
            the state. Nothing was changed.
        StateError: If the state cannot be a target (a tensor on the meta device, say). Nothing was
            changed.
        CorruptCheckpointError: If stored bytes are missing or damaged.
        CheckpointReplacedError: If other saves replaced the checkpoint faster than it could be
            read, many times in a row.
        FormatVersionError: If the checkpoint was written by a newer remesh.
        StorageError: If the storage fails.
        ExchangeError: If a rank died, or reading took longer than `timeout`.
    """
    started, exchange = time.monotonic(), exchange_of(group)
    with Outcome() as checked:
        check_order("load", state, path)
        check_target("load", state)
        if share_reads is not None:
            check_flag("load", "share_reads", share_reads)
        if timeout is not None:
            check_seconds("load", "timeout", timeout)
        options = checked_options("load", missing, unexpected, cast, transform)
        place = place_of(path, format, allow)
        checked.reply = repr((options.transform is not None, share_reads)).encode()
    if len({*share_outcomes(exchange, checked)}) > 1:
        raise StateError("load: ranks disagree about transform or share_reads; pass them on all")
    storage, makes = place.storage, options.transform is not None
    moments = timed(emitter(on_event, exchange.rank), "load", exchange.rank, storage.url)
    assign = _assign_for(share_reads, exchange, storage)

    for beginning in beginnings():
        with beginning, showing(moments, "loading", exchange.rank, storage.url) as emit:
            stored = open_shared(exchange, place)
            with Outcome() as chosen:
                emit("load.opened")
                target = target_of(state, stored, is_transformed=makes)
            share_outcomes(exchange, chosen)
            stored = with_parameter_names(exchange, target, stored, is_transformed=makes)
            with Outcome() as found:
                source = TensorSource(decoded(storage, stored.index), stored.index, stored.identity)
            share_outcomes(exchange, found)
            read = partial(read_together, exchange, source, assign=assign, timeout=timeout)
            plan, _ = plan_into(target, stored, exchange, options, read=read)
            report = fill_planned(plan, exchange, read, emit)
            break
    report = dataclasses.replace(report, seconds=time.monotonic() - started)
    if exchange.rank == 0:
        _LOGGER.info("loaded %s: %s", storage.url, report)
    return report


def checked_options(
    call: str,
    missing: str,
    unexpected: str,
    cast: bool,
    transform: Transform | Program | None,
) -> LoadOptions:
    """The options of the caller of a load or a reshard."""
    check_choice(call, "missing", missing, ("error", "keep"))
    check_choice(call, "unexpected", unexpected, ("ignore", "error"))
    check_flag(call, "cast", cast)
    keeps, refuses = missing == "keep", unexpected == "error"
    return LoadOptions(keeps, refuses, cast, as_transform(transform))


OnRead = Callable[[int], None]
"""Called after each read of a rank with its size in bytes."""

Read = Callable[[LoadPlan, Sequence[Destination], OnRead], bool]
"""Reads what this rank wants to where it goes, while the others read what they want. Collective.
Returns whether ranks read for each other."""


def plan_into(
    state: Any,
    stored: StoredState,
    exchange: Exchange,
    options: LoadOptions,
    *,
    read: Read,
    reserved: Sequence[tuple[str, Layout]] = (),
) -> tuple[RankLoadPlan, bool]:
    """Step 2 of a load; memory in `reserved` must not be filled. Collective.

    Returns the plan of this rank, and whether what is stored was compared for it on any rank, so
    that it holds for these bytes alone.
    """
    transform, made = options.transform, None
    if transform is not None:
        made = describe_transformed(exchange, state, stored, transform, cast=options.cast)
    with Outcome() as planned:
        known: Names = stored
        with gc_paused():
            if made is not None:
                description, known = made
            else:
                description = describe_local(state, stored, stored.rank)
            try:
                mine = match(description, known, options, reserved)
            except MismatchError as error:
                raise error if transform else with_recipe(error, state, stored) from None
        facts = bool(mine.checks), options.refuse_unexpected, mine.asked_bits()
        planned.reply = msgspec.msgpack.encode(facts)
    replies = [
        msgspec.msgpack.decode(reply, type=tuple[bool, bool, bytes])
        for reply in share_outcomes(exchange, planned)
    ]
    compares, refuses_unexpected, _ = map(any, zip(*replies, strict=True))
    if compares:
        run_each(exchange, lambda: _compare(mine, read))
    names = list(stored)
    asked = np.zeros(len(names), np.bool_)  # by any rank
    for *_, bits in replies:
        asked |= np.unpackbits(np.frombuffer(bits, np.uint8), count=len(names)).astype(np.bool_)
    left = [name for name, is_asked in zip(names, asked.tolist(), strict=True) if not is_asked]
    unexpected = without_buffers_of_ranks(names, left)
    if unexpected and refuses_unexpected:
        raise unasked(unexpected, stored)
    unproven = set(stored.document.unchecked_names).difference(unexpected)
    report = dataclasses.replace(
        mine.report, unexpected=tuple(unexpected), unchecked=tuple(sorted(unproven))
    )
    if exchange.rank == 0:
        _warn(report, stored.url, has_tensors=bool(asked[: len(stored.index)].any()))
    return dataclasses.replace(mine, report=report), compares


def _compare(plan: RankLoadPlan, read: Read) -> None:
    """Read and compare what a plan needs to have equal. Collective."""
    read(plan.comparing.plan, plan.comparing.destinations, lambda _size: None)
    problems = dict.fromkeys(problem for problem, is_equal in plan.checks if not is_equal())
    refuse(plan.stored, Findings(conflicts=list(problems)))


def fill_planned(plan: RankLoadPlan, exchange: Exchange, read: Read, emit: Emit) -> RestoreReport:
    """Steps 3 and 4 of a load: fill the tensors of the state, put all else back. Collective.

    Returns this rank's report, without the time that the load took.
    """
    sizes: list[int] = []
    filling = plan.filling

    def count(size: int) -> None:
        sizes.append(size)
        emit("load.run_read", size)

    try:
        # What may fail on one rank alone comes before ranks wait for each other's bytes.
        with Outcome() as prepared:
            finish_device_work(to.memory for to in filling.destinations)
            for act in plan.before:
                act()
            emit("load.planned", plan.report.bytes_needed)
        share_outcomes(exchange, prepared)
        with Outcome() as filled:
            shared = read(filling.plan, filling.destinations, count)
            emit("load.read")
            filled.reply = msgspec.msgpack.encode((plan.report.bytes_needed, sum(sizes)))
        replies = share_outcomes(exchange, filled)
        run_each(exchange, lambda: plan.description.rebuild(plan))
    except Exception as error:
        error.add_note("The state is partly loaded; load again before using it.")
        raise
    totals = [msgspec.msgpack.decode(reply, type=tuple[int, int]) for reply in replies]
    emit("load.done")
    return dataclasses.replace(
        plan.report,
        bytes_read=sum(sizes),
        num_reads=len(sizes),
        reads_shared=shared,
        group_bytes_needed=sum(needed for needed, _ in totals),
        group_bytes_read=sum(num_read for _, num_read in totals),
    )


def _is_left(name: str, unexpected: Iterable[str]) -> bool:
    """True if a name is that of a group whose optimizer has stored state that is not loaded."""
    optimizer, found, rest = f".{name}".partition(".param_groups.")
    state = f"{optimizer}.state.".lstrip(".")
    is_group = bool(found) and rest.endswith(".params")
    return is_group and any(other.startswith(state) for other in unexpected)


def open_shared(exchange: Exchange, source: Any) -> StoredState:
    """Open a checkpoint of any format on every rank; only rank 0 reads."""
    place = place_of(source)
    with Outcome() as opened:
        if exchange.rank == 0:
            with explained_absence(place):
                small = read_encoded(place)
            opened.reply = msgspec.msgpack.encode((*small, place.storage.latency))
    encoded, document, identity, latency = msgspec.msgpack.decode(
        broadcast_outcome(exchange, opened),
        type=tuple[bytes, bytes, str, float | None],
    )
    where = place.url
    index = Index.decode(encoded, where)
    return StoredState(
        where,
        index,
        ValuesDocument.decode(document, where),
        identity,
        exchange.rank,
        limits_for(latency, sum(file.num_bytes for file in index.files) // exchange.world_size),
    )


def _warn(report: RestoreReport, url: str, *, has_tensors: bool) -> None:
    """Warn of what a load does that its caller may not expect."""
    if report.missing and not has_tensors:
        _LOGGER.warning(
            "no tensor is loaded, for %s has none of their names\n"
            "The state has %s; stored is %s. Rename what is stored with transform=",
            url,
            listed(report.missing),
            listed(report.unexpected),
        )
    groups = (name.partition(".param_groups.") for name in report.restored)
    loaded = tuple({f"{optimizer}.state." for optimizer, found, _ in groups if found})
    left = [name for name in report.unexpected if name.startswith(loaded)]
    if left:
        _LOGGER.warning(
            "%d entries of optimizer state in %s belong to no parameter of the state\n"
            "They are %s. If parameters have other names now, rename them with transform=",
            len(left),
            url,
            listed(left),
        )
    new = [name for name in report.missing if _is_left(name, report.unexpected)]
    if new:
        _LOGGER.warning(
            "%d groups of optimizers stay as they are, without the state in %s\n"
            "Their parameters are not in its groups: %s. If they have other names there, rename "
            "them with transform=",
            len(new),
            url,
            listed(new),
        )
    if report.dropped:
        _LOGGER.warning(
            "%d entries of plain dicts are not in %s\n"
            "A stored dict replaces that of the state, which had %s",
            len(report.dropped),
            url,
            listed(report.dropped),
        )
    if report.unchecked:
        text = "%s was repaired, and no digest proves that these are what was saved: %s"
        _LOGGER.warning(text, url, listed(report.unchecked))


def _assign_for(share_reads: bool | None, exchange: Exchange, storage: Storage) -> Assign | None:
    """The function that assigns windows to readers; None if every rank reads for itself."""
    if share_reads is False or exchange.world_size == 1:
        return None
    if share_reads:
        return assign_readers
    cost = REMOTE_EXCHANGE_COST if storage.is_remote else LOCAL_EXCHANGE_COST
    return partial(assign_readers_if_cheaper, exchange_cost=cost)
