"""One save, from top to bottom, in any format that can be written.

1. Plan: the ranks agree who writes what, and each lays out its files (`agree`).
2. Write: every rank writes its files and makes them durable.
3. Finish: rank 0 gets the positions and digests of all files, and commits (`commit`).

To an object store this takes six round trips, one after the other: to see what is there; to begin
the upload, for its last part, and to end it; for index and values, while rank 0 lists the files of
all ranks; and for the commit record.

A rank that fails takes part in the exchange all the same, with its error in place of its result;
all ranks raise it, and rank 0 gives the save up: it removes what was written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

from remesh.checkpoint.agree import PlanCache, RankSavePlan, SaveOptions, agree
from remesh.checkpoint.arguments import check_choice, check_flag, check_order
from remesh.checkpoint.buffers import Buffers
from remesh.checkpoint.commit import commit, encode_parts, remove_own
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.report import SaveReport
from remesh.core.compression import check_library
from remesh.errors import NotSharedError, StateError
from remesh.events import Emit, OnEvent, emitter, ignore, showing, timed
from remesh.exchange import Outcome, join_outcomes, run_each
from remesh.formats.native import FORMAT_NAME
from remesh.formats.table import writer_of
from remesh.formats.writer import Part, as_written
from remesh.pipeline import Compress, write_staged
from remesh.pipeline.collect import direct_stager
from remesh.pipeline.source import stored_copies
from remesh.storage import Storage, open_storage


def save(  # noqa: PLR0913 - each option stands for itself
    state: Any,
    path: Any,
    *,
    format: str = FORMAT_NAME,  # noqa: A002 - what everybody calls it
    format_options: Mapping[str, object] | None = None,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
    buffers: Buffers | None = None,
    verify_replicas: bool = False,
    compress: Compress | None = None,
    group: Any = None,
    on_event: OnEvent = ignore,
) -> SaveReport:
    """Save a state. Collective: every rank of the group calls it with its part of the state.

    Returns when the checkpoint is committed and durable.

    Args:
        state: A nested dict whose leaves are modules, optimizers, objects with a state dict,
            tensors, arrays, plain values or remesh's descriptions; or one module or object.
        path: Directory of the checkpoint, the same on every rank; it need not exist.
        format: The format of the files: `remesh`, or that of another system which shall load them
            (`huggingface`, `safetensors`, `torch_file`, `torch_dcp`, `torch_dist`).
        format_options: Options of the format: of `huggingface`, `max_shard_bytes`; of `torch_dcp`
            and `torch_dist`, `separation_hint`: tensors whose names begin with it are written to
            files of their own, whose names begin with it; and `flat_shapes`: the true shapes, by
            name, of tensors that the state holds as Megatron stores flattened ones.
        overwrite: Replace a checkpoint of the format that is there. Readers see the old one until
            the new one is committed; its files and its pin are removed afterwards. Small files with
            fixed names in formats of other systems are replaced one after the other, so a reader
            may see some of each.
        metadata: A JSON object to record beside the state, taken from rank 0. For
            `huggingface` it is the model's `config.json`; other formats of other systems cannot
            store it.
        buffers: Which buffers of modules are stored if those of ranks differ, such as running
            statistics of BatchNorm: those of the lowest rank (`"rank0"`), or each rank's own
            (`"per_rank"`), which a load gives back to the rank of the same number, and to others
            those of the lowest. None: they must be equal, or are those that the framework takes
            (DDP: rank 0's).
        verify_replicas: Compare every byte of all copies that ranks hold of one tensor, also of
            those that a framework or a description says are equal. Otherwise only plain tensors
            under one name are compared completely.
        compress: How data files of the format `remesh` are compressed, without loss: `"zstd"`.
            None: not at all, so that programs that read safetensors files can read them.
        group: A torch process group or an `Exchange`; by default torch's default group if it is
            initialised, else this process alone.
        on_event: Called at the points in `remesh.events.SAVE_POINTS`.

    Returns:
        What this rank wrote, and how long the save took.

    Raises:
        OptionError: If an option has a wrong type or value, or the library for `compress` is
            missing.
        StateError: If the state cannot be stored, ranks disagree, a tensor has holes, or the format
            cannot be written, or not compressed.
        DivergedReplicaError: If ranks hold different values of what should be copies.
        CheckpointExistsError: If there is a checkpoint and `overwrite` is false.
        NoSpaceError: If there is too little free space; found before writing where possible.
        NotSharedError: If the ranks do not save to one place that all of them reach.
        StorageError: If the storage fails.
        ExchangeError: If a rank died. Whether the save was committed is then seen by opening it.
    """
    options = SaveOptions(
        overwrite=overwrite,
        metadata=metadata or {},
        buffers=buffers,
        verify_replicas=verify_replicas,
        format=format,
        format_options=format_options or {},
        compress=compress,
    )
    return save_agreed(state, path, options, group=group, on_event=on_event, is_shown=True)


def open_place(call: str, state: Any, path: Any, options: SaveOptions) -> Storage:
    """Check what the caller of a save asked for, and open the place that it goes to."""
    check_order(call, state, path)
    check_options(options)
    return open_storage(path)


def check_options(options: SaveOptions) -> None:
    """Check the options of a save."""
    check_flag("save", "overwrite", options.overwrite)
    check_flag("save", "verify_replicas", options.verify_replicas)
    if options.buffers is not None:
        check_choice("save", "buffers", options.buffers, get_args(Buffers))
    # The name of an export is one of its options.
    writer = writer_of(options.format, exports="name" in options.format_options)
    compress = options.compress
    if compress is not None:
        check_choice("save", "compress", compress, get_args(Compress))
        if not writer.has_record:
            raise StateError(
                f"compress={compress!r}: files of format {writer.name!r} are never compressed\n"
                "Other programs could not read them; leave compress away, or save in the format "
                "'remesh'"
            )
        check_library()
    unknown = sorted({*options.format_options} - {*writer.options})
    if unknown:
        raise StateError(
            f"format {writer.name!r} has no option {unknown[0]!r}; it has "
            f"{', '.join(writer.options) or 'none'}"
        )
    if options.metadata and not writer.has_metadata:
        raise StateError(
            f"format {writer.name!r} has no place for metadata; put it into the state as plain "
            "values"
        )


def save_agreed(
    state: Any,
    path: Any,
    options: SaveOptions,
    *,
    group: Any,
    on_event: OnEvent,
    cache: PlanCache | None = None,
    is_shown: bool = False,
) -> SaveReport:
    """`save`, with the plan of earlier saves; `is_shown`: with progress on a terminal."""
    started, cache = time.monotonic(), cache or PlanCache()
    exchange = exchange_of(group)
    storage = run_each(exchange, lambda: open_place("save", state, path, options))
    moments = timed(emitter(on_event, exchange.rank), "save", exchange.rank, storage.url)
    bar = showing(moments, "saving", exchange.rank, storage.url)
    with bar if is_shown else nullcontext(moments) as emit:
        mine = agree(exchange, storage, state, options, cache=cache, emit=emit)
        with Outcome() as written:
            parts = write(storage, mine, emit)
            written.reply = encode_parts(parts)
        try:
            commit(partial(join_outcomes, exchange, written), storage, mine.global_plan, emit)
        except NotSharedError:
            # Rank 0 has removed what it sees; this rank's files lie elsewhere.
            remove_own(storage, mine.save_id, mine.paths)
            raise
        cache.history = mine.committed(storage, parts)
        emit("save.done")
    return SaveReport.of(parts, time.monotonic() - started)


def write(storage: Storage, mine: RankSavePlan, emit: Emit) -> list[Part]:
    """Write this rank's files, unless they are there; returns what rank 0 has to know of them.

    Collective if tensors lie on several ranks.
    """
    stream = mine.stream
    if stream.collection is None and not stream.files.paths:
        storage.sync()
        return list(mine.kept)
    num_bytes = stream.layout.num_bytes
    copies = stored_copies(mine.tensors.memories)
    written = write_staged(
        storage,
        stream.files,
        num_bytes,
        direct_stager(stream.layout, copies, stream.collection),
        on_chunk=partial(emit, "save.chunk_written"),
        begin=partial(emit, "save.file_created", num_bytes),
    )
    storage.sync()
    emit("save.file_finished", num_bytes)
    return [*mine.kept, *map(as_written, stream.parts, written)]
