"""State from layout to layout between live processes, without storage.

Resharding is a save and a load with the disk left out. The ranks agree on the source state as they
would for a save: who holds which box, every element exactly once, the copies of a box dealt to
those who have them by bytes. What a save would write to a rank's file is here an imaginary file: it
has a layout, positions and an index, but no bytes. Against this index the target state is compared
and planned as for a load. So all that holds for loading holds here: any layout, and what does not
fit is found on all ranks before a byte moves.

Only then the paths part: what a rank has itself it copies, and the rest is sent from rank to rank
through buffers of bounded size (`remesh.pipeline.routes`).

Who pushes weights again and again keeps a `Resharder`. As for saves, ranks then compare
fingerprints, and while the layouts are what they were, neither plans nor requests are exchanged.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from remesh._repr import short_repr
from remesh.checkpoint.comparing import Wanted, source_in_target
from remesh.checkpoint.loading import load_into
from remesh.checkpoint.local import LocalTensors, exchange_of
from remesh.checkpoint.report import RestoreReport
from remesh.checkpoint.save_plan import PlanCache, RankSavePlan, SaveOptions, make_save_plan
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.target import LoadOptions, Target
from remesh.errors import StateError
from remesh.events import Emit, OnEvent, emitter, ignore
from remesh.exchange import Exchange, run_joined, run_on_all, run_on_one
from remesh.formats import native
from remesh.index import Index
from remesh.integrity import raw_digest
from remesh.pipeline import Want
from remesh.pipeline.routes import Routes, deliver, find_routes
from remesh.planner import LoadPlan
from remesh.storage import MemoryStorage
from remesh.transform import Program, Transform, as_transform

__all__ = ["ReshardReport"]


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What bringing a state over did on this rank.

    Attributes:
        restored: What became of each name.
        bytes_sent: Bytes of tensor data that this rank sent to others.
        bytes_received: Bytes of tensor data that it got from others.
        bytes_local: Bytes that it had itself.
        group_bytes_sent: Bytes of tensor data that all ranks sent.
        buffer_bytes: Memory that the messages took, the most at any time.
        plan_reused: Whether plan and requests were those of the last time.
        seconds: Wall time.
    """

    restored: RestoreReport
    bytes_sent: int
    bytes_received: int
    bytes_local: int
    group_bytes_sent: int
    buffer_bytes: int
    plan_reused: bool
    seconds: float

    __repr__ = short_repr


def reshard(
    source_state: Any,
    target_state: Any,
    *,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["ignore", "error"] = "ignore",
    cast: bool = False,
    transform: Transform | Program | None = None,
    group: Any = None,
    on_report: Callable[[RestoreReport], None] | None = None,
    on_event: OnEvent = ignore,
) -> Any:
    """Bring a state from one layout into another between live processes. Collective.

    Every rank of the group passes its part of the source and its part of the target; a rank that
    has none of one passes `{}`. The two must not share memory: the source is read while the target
    is filled. To do the same again and again, keep a `Resharder`.

    Args:
        source_state: What is to be brought over, as for `remesh.save`.
        target_state: What is filled, as for `remesh.load`.
        missing: See `remesh.load`.
        unexpected: See `remesh.load`.
        cast: See `remesh.load`.
        transform: See `remesh.load`.
        group: See `remesh.save`.
        on_report: Is given this rank's `RestoreReport`; `bytes_read` counts what this rank took of
            its own source, for itself and for others.
        on_event: Told of `save.described` and `save.planned` for the source, and of the moments in
            `remesh.events.LOAD_POINTS` from `load.planned` on.

    Returns:
        The target state: the same object, unless it is itself a tuple or a plain value.

    Raises:
        StateError: If the source cannot be saved, or the target cannot be loaded into, or they
            share elements in memory. Nothing was changed.
        MismatchError: If they do not fit. Nothing was changed.
        ExchangeError: If a rank died.
    """
    resharder = Resharder(
        source_state,
        target_state,
        missing=missing,
        unexpected=unexpected,
        cast=cast,
        transform=transform,
        group=group,
        on_event=on_event,
    )
    report = resharder.push()
    if on_report is not None:
        on_report(report.restored)
    return resharder.target_state


class Resharder:
    """Brings a state over again and again: weights from trainers to those who serve them.

    It keeps the plan and the buffers. The states are looked at anew with each push, so what they
    hold may change, layouts included; then there is a new plan.

    Args:
        source_state: See `reshard`.
        target_state: See `reshard`.
        missing: See `remesh.load`.
        unexpected: See `remesh.load`.
        cast: See `remesh.load`.
        transform: See `remesh.load`.
        group: See `remesh.save`.
        on_event: See `reshard`.

    Attributes:
        target_state: The target, filled by the last push.
    """

    def __init__(
        self,
        source_state: Any,
        target_state: Any,
        *,
        missing: Literal["error", "keep"] = "error",
        unexpected: Literal["ignore", "error"] = "ignore",
        cast: bool = False,
        transform: Transform | Program | None = None,
        group: Any = None,
        on_event: OnEvent = ignore,
    ) -> None:
        self.target_state = target_state
        self._source_state = source_state
        self._options = LoadOptions(missing == "keep", unexpected == "error", cast)
        self._transform = as_transform(transform)
        self._exchange = exchange_of(group)
        self._emit = emitter(on_event, self._exchange.rank)
        self._kept = _Kept()

    def push(self) -> ReshardReport:
        """Bring the source over as it is now. Collective.

        Returns:
            What was done on this rank.

        Raises:
            StateError: See `reshard`.
            MismatchError: See `reshard`.
            ExchangeError: If a rank died.
        """
        started = time.monotonic()
        exchange, kept = self._exchange, self._kept
        stored, mine, is_known = _agree_on_source(exchange, self._source_state, kept, self._emit)
        moved: list[tuple[Routes, bool]] = []
        reports: list[RestoreReport] = []

        def read(target: Target, wanted: Wanted, on_run: Callable[[int], None]) -> bool:
            way = kept.filling if wanted is target.filling else kept.comparing
            routes, reused = _move(exchange, kept, way, wanted, mine.tensors, may_reuse=is_known)
            on_run(routes.bytes_local + routes.bytes_sent)
            moved.append((routes, reused))
            return False

        self.target_state = load_into(
            self.target_state,
            stored,
            "the source state",
            exchange,
            self._options,
            transform=self._transform,
            read=read,
            check=lambda target: _refuse_overlap(mine.tensors, target),
            emit=self._emit,
            on_report=reports.append,
        )
        # What was compared, if anything, was moved before.
        (routes, reused), [restored] = moved[-1], reports
        seconds = time.monotonic() - started
        return ReshardReport(
            dataclasses.replace(restored, seconds=seconds),
            routes.bytes_sent,
            routes.bytes_received,
            routes.bytes_local,
            routes.group_bytes_sent,
            routes.buffer_bytes,
            reused,
            seconds,
        )


# ---------------------------------------------------------------------------------------------
# The source
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Way:
    """How this rank gets what it wants.

    Attributes:
        key: Fingerprint of what it wants of the index.
        routes: How it gets there; None if that is not known.
    """

    key: bytes = b""
    routes: Routes | None = None


@dataclass(slots=True, eq=False)
class _Kept:
    """What stays from push to push.

    Attributes:
        plan: How the ranks cut the source.
        index: What lies in which imaginary file.
        owners: The rank that has each file.
        filling: How the target is filled.
        comparing: How this rank gets what it compares before that.
    """

    plan: PlanCache = field(default_factory=PlanCache)
    index: Index | None = None
    owners: list[int] = field(default_factory=list)
    filling: _Way = field(default_factory=_Way)
    comparing: _Way = field(default_factory=_Way)


def _agree_on_source(
    exchange: Exchange, state: Any, kept: _Kept, emit: Emit
) -> tuple[StoredState, RankSavePlan, bool]:
    """What there is; this rank's part of it; whether it is cut as the last time."""
    options = SaveOptions(overwrite=False, metadata={}, shares_place=False, compares="sampled")
    num_hits = kept.plan.hits

    def encode() -> bytes:
        return mine.on_rank_0.document.encode()

    mine = make_save_plan(exchange, MemoryStorage(), state, options, cache=kept.plan, emit=emit)
    is_known = kept.plan.hits > num_hits and kept.index is not None
    document = run_on_one(exchange, encode) if is_known else _share_index(exchange, mine, kept)
    assert kept.index is not None
    values = native.ValuesDocument.decode(document, "the source state")
    index = kept.index
    if values.aliases != index.aliases:
        kept.index = index = dataclasses.replace(index, aliases=values.aliases)
    return StoredState(index, values), mine, is_known


def _share_index(exchange: Exchange, mine: RankSavePlan, kept: _Kept) -> bytes:
    """Tell all ranks what lies in which imaginary file, and what is not a tensor."""

    def say() -> bytes:
        positions = native.encode_positions(mine.layout.positions)
        part = native.Part(mine.path, mine.layout.num_bytes, positions, b"")
        return msgspec.msgpack.encode(part if mine.path else native.NO_PART)

    def unite(replies: list[bytes]) -> list[bytes]:
        save = mine.on_rank_0
        parts = [msgspec.msgpack.decode(reply, type=native.Part) for reply in replies]
        index = native.build_index(save.boxes, save.assignments, parts, save.document.aliases)
        owners = [rank for rank, part in enumerate(parts) if part.path]
        live = Index(index.boxes, index.file, index.position, index.files, index.aliases)
        message = (live.encode(), save.document.encode(), owners)
        return [msgspec.msgpack.encode(message)] * exchange.world_size

    encoded, document, kept.owners = msgspec.msgpack.decode(
        run_joined(exchange, say, unite), type=tuple[bytes, bytes, list[int]]
    )
    kept.index = Index.decode(encoded, "the source state")
    kept.filling, kept.comparing = _Way(), _Way()
    return document


def _refuse_overlap(tensors: LocalTensors, target: Target) -> None:
    """Refuse a target in the memory of the source.

    Raises:
        StateError: If a tensor of one shares an element with a tensor of the other.
    """
    table = tensors.boxes
    names = [table.tensors.names[row] for row in table.tensor.tolist()]
    sources = [
        (name, layout)
        for name, memory in zip(names, tensors.memories, strict=True)
        if (layout := memory.layout) is not None
    ]
    found = source_in_target(sources, target.filled)
    if found is not None:
        raise StateError(
            f"{found[0]} of the source and {found[1]} of the target state share memory\n"
            "The source is read while the target is filled; give the target tensors of its own."
        )


def _move(
    exchange: Exchange,
    kept: _Kept,
    way: _Way,
    wanted: Wanted,
    tensors: LocalTensors,
    *,
    may_reuse: bool,
) -> tuple[Routes, bool]:
    """Bring this rank what it wants, and the others what they want. Collective.

    Returns:
        What moved, and whether the routes were those of the last time.
    """
    assert kept.index is not None
    assert wanted.plan is not None
    key = _key_of(wanted.plan, wanted.wants)
    is_same = may_reuse and way.routes is not None and key == way.key
    reuse = all(reply == b"y" for reply in run_on_all(exchange, lambda: b"y" if is_same else b"n"))
    if not reuse:
        way.routes = find_routes(
            exchange, kept.index, kept.owners, wanted.plan, wanted.wants, tensors.boxes
        )
        way.key = key
    routes = way.routes
    assert routes is not None
    deliver(exchange, routes, tensors.memories, wanted.wants)
    return routes, reuse


def _key_of(plan: LoadPlan, wants: Iterable[Want]) -> bytes:
    """A fingerprint of what is wanted, and where it goes."""
    columns = (plan.want, plan.piece, plan.offsets, plan.extents)
    places = msgspec.msgpack.encode([want.offset for want in wants])
    return raw_digest(b"".join([places, *(column.tobytes() for column in columns)]))
