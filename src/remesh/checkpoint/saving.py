"""One save, from top to bottom.

1. The ranks plan together who writes what (`save_plan`).
2. Every rank writes its file and makes it durable; rank 0 writes the values beside it.
3. Rank 0 gets the positions and digests of all files, and commits (`commit`).

A rank that fails takes part in the exchange all the same, with its error in place of its result;
all ranks raise it, and rank 0 removes what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from remesh.checkpoint.arguments import check_order
from remesh.checkpoint.buffers import Buffers, check_buffers
from remesh.checkpoint.commit import commit, write_beside
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.save_plan import PlanCache, RankSavePlan, SaveOptions, make_save_plan
from remesh.checkpoint.stopwatch import timed
from remesh.errors import NotSharedError
from remesh.events import Emit, OnEvent, emitter, ignore
from remesh.exchange import run_joined
from remesh.formats import native
from remesh.maintenance.orphans import remove_files
from remesh.pipeline import WrittenFile, write_file
from remesh.storage import Storage, open_storage


def save(
    state: Any,
    path: Any,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
    buffers: Buffers | None = None,
    verify_replicas: bool = False,
    group: Any = None,
    on_event: OnEvent = ignore,
) -> None:
    """Save a state. Collective: every rank of the group calls it with its part of the state.

    Returns when the checkpoint is committed and durable.

    Args:
        state: A nested dict whose leaves are modules, optimizers, objects with a state dict,
            tensors, arrays, plain values or remesh's descriptions; or one module or object.
        path: Directory of the checkpoint, the same on every rank; it need not exist.
        overwrite: Replace a checkpoint that is there. Readers see the old one until the new one is
            committed; its files are removed afterwards.
        metadata: What to record beside the state: a JSON object, taken from rank 0.
        buffers: Whose buffers of modules are stored where those of ranks differ, such as running
            statistics of BatchNorm: those of the lowest rank (`"rank0"`), the mean of all
            (`"mean"`), or each rank's own (`"per_rank"`), which a load gives back to the rank of
            the same number, and to others those of the lowest. None: they must be equal, or are
            those that the framework takes (DDP: rank 0's).
        verify_replicas: Compare every byte of all copies that ranks hold of one tensor, also of
            those that a framework or a description says are equal. Otherwise only plain tensors
            under one name are compared completely.
        group: A torch process group or an `Exchange`; by default torch's default group if it is
            initialised, else this process alone.
        on_event: Told of the moments in `remesh.events.SAVE_POINTS`.

    Raises:
        StateError: If the state cannot be stored, ranks disagree, or a tensor has holes.
        DivergedReplicaError: If ranks hold different values of what should be copies.
        CheckpointExistsError: If there is a checkpoint and `overwrite` is false.
        NoSpaceError: If there is too little room, which is found before writing where possible.
        NotSharedError: If the ranks do not save to one place that all of them reach.
        StorageError: If the storage fails.
        ExchangeError: If a rank died. Whether the save was committed is then seen by opening it.
    """
    options = options_of(overwrite, metadata, buffers, verify_replicas)
    save_agreed(state, path, options, group=group, cache=PlanCache(), on_event=on_event)


def options_of(
    overwrite: bool,
    metadata: Mapping[str, object] | None,
    buffers: Buffers | None,
    verify_replicas: bool,
    *,
    meets: bool = False,
) -> SaveOptions:
    """What the caller of a save asked for.

    Raises:
        StateError: If there is no such choice of buffers.
    """
    return SaveOptions(
        overwrite,
        dict(metadata or {}),
        meets=meets,
        buffers=check_buffers(buffers),
        compares="all" if verify_replicas else "whole",
    )


def save_agreed(
    state: Any,
    path: Any,
    options: SaveOptions,
    *,
    group: Any,
    cache: PlanCache,
    on_event: OnEvent,
    first: Callable[[], None] | None = None,
) -> None:
    """`save`, with the plan of earlier saves; for `first` see `make_save_plan`."""
    check_order("save", state, path)
    exchange = exchange_of(group)
    storage = open_storage(path)
    emit = timed(emitter(on_event, exchange.rank), "save", exchange.rank, storage.url)
    mine = make_save_plan(exchange, storage, state, options, cache=cache, emit=emit, first=first)

    def write() -> bytes:
        return msgspec.msgpack.encode(_write(storage, mine, emit))

    def join(replies: list[bytes]) -> list[bytes]:
        parts = [msgspec.msgpack.decode(reply, type=native.Part) for reply in replies]
        commit(storage, mine.on_rank_0, parts, emit)
        return [b""] * exchange.world_size

    try:
        run_joined(exchange, write, join, lambda: remove_files(storage, mine.save_id))
    except NotSharedError:
        # Rank 0 has removed what it sees; this rank's file lies elsewhere.
        remove_files(storage, mine.save_id)
        raise
    emit("save.done")


def _write(storage: Storage, mine: RankSavePlan, emit: Emit) -> native.Part:
    """Write this rank's file, if it has one, and what goes beside it."""

    def beside() -> None:
        write_beside(storage, mine.global_plan, emit)

    if not mine.path:
        beside()
        return native.NO_PART
    emit("save.file_created", mine.layout.num_bytes)
    written = write_file(
        storage, mine.path, mine.layout, lambda size: emit("save.chunk_written", size), beside
    )
    storage.sync()
    emit("save.file_finished", mine.layout.num_bytes)
    return part_of(written, native.encode_positions(mine.layout.positions))


def part_of(written: WrittenFile, positions: bytes) -> native.Part:
    """What a rank tells rank 0 of its finished file; `positions` are those of its pieces."""
    return native.Part(
        written.path, written.num_bytes, positions, native.encode_digests(written.digests)
    )
