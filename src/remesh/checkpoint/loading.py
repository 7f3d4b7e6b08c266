"""One load, from top to bottom.

1. Rank 0 reads the small files (record, index, values) once and broadcasts them.
2. Every rank describes its target state, compares it with what is stored, and plans its own reads
   from the index alone. All ranks learn whether any of them found a mismatch; until then nothing in
   any state has been touched.
3. Every rank reads its runs straight into the memory of its tensors.
4. Values are put back, and objects with a state dict get theirs.

A failure in steps 3 or 4 raises on every rank and leaves the state partly loaded; the message says
so. Digests are checked before bytes reach a tensor, so no tensor ever holds damaged data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.report import RestoreReport
from remesh.checkpoint.stopwatch import timed
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.target import MAX_LISTED, LoadOptions, Target
from remesh.checkpoint.transformed import TransformedTarget
from remesh.errors import MismatchError
from remesh.events import OnEvent, emitter, ignore
from remesh.exchange import Alone, Exchange, run_on_all, run_on_one
from remesh.formats import native
from remesh.storage import Storage, open_storage
from remesh.transform import Transform


def load(
    state: Any,
    path: Any,
    *,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["ignore", "error"] = "ignore",
    cast: bool = False,
    transform: Transform | None = None,
    share_reads: bool = False,
    group: Any = None,
    on_report: Callable[[RestoreReport], None] | None = None,
    on_event: OnEvent = ignore,
) -> Any:
    """Load a checkpoint into a state of any layout. Collective, like `save`.

    Tensors are filled in place. Plain values are replaced in their dicts and lists; modules,
    optimizers and other objects get what is theirs.

    Args:
        state: The target, built like the state that was saved. Only what it names is read.
        path: Directory of a committed checkpoint.
        missing: What to do about names that the state has and the checkpoint lacks.
        unexpected: What to do about names that the checkpoint has and no rank's state.
        cast: Convert tensors whose stored dtype differs from the target's; otherwise that is an
            error.
        transform: What the stored tensors become on their way: renamed, fused, split, transposed,
            cast. Their optimizer state follows. Only the bytes that are needed are read. The
            language is specified in docs/transform.md.
        share_reads: Let one rank read what several need and pass it on, so that storage serves
            every byte once. Pays where storage is slower than the network between ranks: many
            replicas, object stores, shared file systems. On a local disk it does not.
        group: See `save`.
        on_report: Is given this rank's `RestoreReport`.
        on_event: Told of the moments in `remesh.events.LOAD_POINTS`.

    Returns:
        The state: the same object, unless it is itself a tuple or a plain value.

    Raises:
        CheckpointNotFoundError: If there is no committed checkpoint.
        MismatchError: If state and checkpoint do not fit. Nothing was changed.
        StateError: If the state cannot be a target (a tensor on the meta device, say). Nothing
            was changed.
        CorruptCheckpointError: If stored bytes are missing or damaged.
        FormatVersionError: If the checkpoint was written by a newer remesh.
        StorageError: If the storage fails.
        ExchangeError: If a rank died.
    """
    started = time.monotonic()
    exchange = exchange_of(group)
    storage = open_storage(path)
    emit = timed(emitter(on_event, exchange.rank), "load", exchange.rank, storage.url)
    stored = open_shared(exchange, storage)
    emit("load.opened")
    options = LoadOptions(missing == "keep", cast)
    target = Target(stored, storage, options)
    if transform is None:
        replies = run_on_all(exchange, lambda: target.prepare(state))
    else:
        target = changed = TransformedTarget(stored, storage, options, transform)
        first = run_on_all(exchange, lambda: changed.describe(state))
        tables = run_on_all(exchange, lambda: changed.describe_again(state, first))
        replies = run_on_all(exchange, lambda: changed.prepare_among(tables))
    extra = _unexpected_names(stored, replies)
    if extra and unexpected == "error":
        raise MismatchError(
            f"{storage.url} holds {len(extra)} names that no rank asks for: {_listed(extra)}",
            unexpected=tuple(extra),
        )
    emit("load.planned")

    def read() -> bytes:
        target.read(lambda size: emit("load.run_read", size), exchange if share_reads else Alone())
        emit("load.read")
        return b""

    result = state

    def put_back() -> bytes:
        nonlocal result
        result = target.rebuild()
        return b""

    try:
        run_on_all(exchange, read)
        run_on_all(exchange, put_back)
    except Exception as error:
        error.add_note("The state is partly loaded; load again before using it.")
        raise
    if on_report is not None:
        on_report(target.report(extra, time.monotonic() - started))
    emit("load.done")
    return result


def open_shared(exchange: Exchange, storage: Storage) -> StoredState:
    """Open a checkpoint on every rank; only rank 0 reads.

    Raises:
        CheckpointError: If there is none or its small files are damaged.
    """

    def read() -> bytes:
        files = native.read_small_files(storage)
        record = native.encode_record(files.record)
        return msgspec.msgpack.encode((record, files.index_bytes, files.values_bytes))

    record, index_bytes, values_bytes = msgspec.msgpack.decode(
        run_on_one(exchange, read), type=tuple[bytes, bytes, bytes]
    )
    files = native.NativeFiles(native.decode_record(record, storage.url), index_bytes, values_bytes)
    return StoredState.decode(files, storage.url)


def _unexpected_names(stored: StoredState, replies: list[bytes]) -> list[str]:
    """Stored names that no rank asks for."""
    names = list(stored.names())
    asked = np.zeros(len(names), dtype=np.bool_)
    for reply in replies:
        bits = np.unpackbits(np.frombuffer(reply, dtype=np.uint8), count=len(names))
        asked |= bits.astype(np.bool_)
    return [name for name, wanted in zip(names, asked.tolist(), strict=True) if not wanted]


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f", ... and {len(shown) - MAX_LISTED} more" if len(shown) > MAX_LISTED else ""
    return ", ".join(shown[:MAX_LISTED]) + more
