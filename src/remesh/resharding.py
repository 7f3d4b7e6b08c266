"""State from layout to layout between live processes, without storage.

`reshard` is a save and a load with the disk left out. The ranks agree on the source state as they
would for a save: who holds which box, every element exactly once. What a save would write to a
rank's file is here an imaginary file: it has a layout, positions and an index, but its bytes are
read from the tensors themselves. The target state is then loaded from these files as from a
checkpoint, through the rounds in which ranks read for each other (`remesh.pipeline.share`), dealt
so that every rank reads its own file. So all that holds for loading holds here: any layout, only
the bytes that are needed travel, in bounded rounds, no whole tensor is made, and what does not fit
is found on all ranks before a byte moves.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from remesh.checkpoint.agreement import Agreement, PlanCache, SaveOptions, agree
from remesh.checkpoint.loading import load_into
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.report import RestoreReport
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.target import LoadOptions, Target
from remesh.errors import StateError
from remesh.events import OnEvent, emitter, ignore
from remesh.exchange import Exchange, run_joined
from remesh.formats import native
from remesh.geometry import IntArray
from remesh.index import Index
from remesh.pipeline import Dealer, FileLayout, Patience, deal_to_owners
from remesh.planner import files_of_windows
from remesh.storage import Buffer, MemoryStorage
from remesh.transform import Transform


def reshard(
    source_state: Any,
    target_state: Any,
    *,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["ignore", "error"] = "ignore",
    cast: bool = False,
    transform: Transform | None = None,
    group: Any = None,
    on_report: Callable[[RestoreReport], None] | None = None,
    on_event: OnEvent = ignore,
) -> Any:
    """Bring a state from one layout into another between live processes. Collective.

    Every rank of the group passes its part of the source and its part of the target; a rank that
    has none of one passes `{}`. The two must not share memory: the source is read while the target
    is filled.

    Args:
        source_state: What is to be brought over, as for `remesh.save`.
        target_state: What is filled, as for `remesh.load`.
        missing: See `remesh.load`.
        unexpected: See `remesh.load`.
        cast: See `remesh.load`.
        transform: See `remesh.load`.
        group: See `remesh.save`.
        on_report: Is given this rank's `RestoreReport`; `bytes_read` counts what this rank read of
            its own source.
        on_event: Told of `save.described` and `save.planned` for the source, and of the moments in
            `remesh.events.LOAD_POINTS` from `load.planned` on.

    Returns:
        The target state: the same object, unless it is itself a tuple or a plain value.

    Raises:
        StateError: If the source cannot be saved, or the target cannot be loaded into, or they
            share memory. Nothing was changed.
        MismatchError: If they do not fit. Nothing was changed.
        ExchangeError: If a rank died.
    """
    started = time.monotonic()
    exchange = exchange_of(group)
    emit = emitter(on_event, exchange.rank)
    options = SaveOptions(overwrite=False, metadata={})
    nowhere = MemoryStorage()
    mine = agree(exchange, nowhere, source_state, options, cache=PlanCache(), emit=emit)
    stored, owners = _share_index(exchange, mine)
    storage = _OwnFile(mine.path, mine.layout)

    def report(found: RestoreReport) -> None:
        if on_report is not None:
            on_report(dataclasses.replace(found, seconds=time.monotonic() - started))

    return load_into(
        target_state,
        stored,
        storage,
        exchange,
        LoadOptions(missing == "keep", unexpected == "error", cast),
        transform=transform,
        read=lambda target: target.read(
            lambda size: emit("load.run_read", size),
            exchange,
            _dealer_to(owners, target),
            Patience(),
        ),
        check=lambda target: _refuse_overlap(mine.layout, target),
        emit=emit,
        on_report=report,
    )


class _OwnFile(MemoryStorage):
    """The imaginary file of this rank, read from its tensors."""

    def __init__(self, path: str, layout: FileLayout) -> None:
        super().__init__()
        self._path = path
        self._layout = layout

    @property
    def url(self) -> str:
        """See `Storage.url`."""
        return "the source state"

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        """See `Storage.read_into`."""
        if path != self._path:
            raise StateError(
                "tensors that are tied in the target state are different tensors of the source, "
                "some of them on other ranks, where they cannot be compared; untie them, or leave "
                "all but one out"
            )
        self._layout.fill(start, buffer)
        return len(buffer)


def _share_index(exchange: Exchange, mine: Agreement) -> tuple[StoredState, IntArray]:
    """Tell all ranks what lies in which imaginary file; and the rank that has each file."""

    def say() -> bytes:
        positions = native.encode_positions(mine.layout.positions)
        part = native.Part(mine.path, mine.layout.num_bytes, positions, b"")
        return msgspec.msgpack.encode(part if mine.path else native.NO_PART)

    def unite(replies: list[bytes]) -> list[bytes]:
        save = mine.coordinator
        parts = [msgspec.msgpack.decode(reply, type=native.Part) for reply in replies]
        index = native.build_index(save.plan.boxes, save.assignments, parts, save.document.aliases)
        owners = [rank for rank, part in enumerate(parts) if part.path]
        live = Index(index.boxes, index.file, index.position, index.files, index.aliases)
        message = (live.encode(), save.document.encode(), owners)
        return [msgspec.msgpack.encode(message)] * exchange.world_size

    index_bytes, document, owners = msgspec.msgpack.decode(
        run_joined(exchange, say, unite), type=tuple[bytes, bytes, list[int]]
    )
    stored = StoredState(
        Index.decode(index_bytes, "the source state"),
        native.ValuesDocument.decode(document, "the source state"),
    )
    return stored, np.array(owners, dtype=np.int64)


def _dealer_to(owners: IntArray, target: Target) -> Dealer:
    """Deals what is in a file to the rank that has it."""
    index, limits = target.stored.index, target.limits
    return lambda touched: deal_to_owners(
        touched, lambda windows: owners[files_of_windows(index, windows, limits)]
    )


def _refuse_overlap(source: FileLayout, target: Target) -> None:
    """Refuse a target in the memory of the source.

    Raises:
        StateError: If a tensor of one begins or ends in a tensor of the other.
    """
    spans = [(piece.memory.span, True) for piece in source.pieces]
    spans += [(want.memory.span, False) for want in target.wants]
    known = sorted((span, is_source) for span, is_source in spans if span is not None)
    reached = {True: ("", 0), False: ("", 0)}
    for (device, start, stop), is_source in known:
        other_device, other_stop = reached[not is_source]
        if other_device == device and start < other_stop:
            raise StateError(
                "source and target state share memory, but the source is read while the target is "
                "filled; give the target tensors of its own"
            )
        own_device, own_stop = reached[is_source]
        reached[is_source] = (device, max(stop, own_stop) if own_device == device else stop)
