"""Reading what a load plan asks for: storage → buffer → digests → memory.

Each thread takes the next run, reads it into its buffer, checks the digests of its blocks, and
copies every region of the run to where it is wanted. Storages that read into memory of their own,
as object stores do, need no buffer. A region lies in the buffer as it lies in its
piece, so it is the buffer seen with the piece's strides; no bytes are rearranged before the one
copy into the destination. A run may hold thousands of small tensors, so what the plan says of its
regions is taken out of the columns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from remesh.core.dtypes import DTYPES
from remesh.core.geometry import Box, IntArray, row_strides
from remesh.core.index import Index
from remesh.core.integrity import find_damage, repair_advice
from remesh.core.memory import CarrierArray, Memory
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError
from remesh.planner import LoadPlan, ReadLimits, Regions
from remesh.storage import Buffer, Storage
from remesh.storage.workers import flow_for, run_workers

_OTHERS_ADVICE = "Load another checkpoint, or restore this file from a copy"

REMOTE_WINDOWS = (2 << 20, 8 << 20)
"""Bytes of the smallest and the largest window where every request waits for a network first."""

NUM_REMOTE_READS = 16
"""Reads under way at a time there, at least."""

NEAR_SECONDS = 0.005
"""A server that answers sooner is in the same room; then half as many reads keep it busy, and
windows of half the size are in the caches of the processor when they are copied."""


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """Where a wanted box goes: its offset in the stored tensor, and its memory."""

    offset: tuple[int, ...]
    memory: Memory


Place = Callable[[int], Destination]
"""Where regions go, by `Regions.want`."""

Writing = AbstractContextManager[object]
"""What a thread enters to write into wanted memory (`TaskPool.writing`); several may be inside."""


def limits_for(latency: float | None, num_bytes: int) -> ReadLimits:
    """The limits of a rank that reads about `num_bytes`; the latency is that of all ranks."""
    if latency is None:
        return ReadLimits()
    (smallest, largest), number = REMOTE_WINDOWS, NUM_REMOTE_READS
    if 0 < latency < NEAR_SECONDS:
        largest, number = largest // 2, number // 2
    size, number = flow_for(num_bytes, latency, sizes=(smallest, largest), min_number=number)
    return ReadLimits(size, size // 8, number)


def read_runs(
    storage: Storage,
    index: Index,
    plan: LoadPlan,
    destinations: Sequence[Destination],
) -> None:
    """Execute a load plan, for this process alone.

    Raises:
        CorruptCheckpointError: If a file is missing, too short, or its bytes are not what was
            written. Wanted boxes may be partly filled then.
        StorageError: If the storage fails.
    """

    def read(run: int, buffer: Buffer) -> None:
        place, writing = destinations.__getitem__, nullcontext()
        read_run(storage, index, plan, run, place=place, buffer=buffer, writing=writing)

    buffer_bytes = 0 if storage.reads_own_memory else plan.longest_run
    run_workers(plan.limits.num_reads, plan.num_runs, buffer_bytes, read)


def read_run(
    storage: Storage,
    index: Index,
    plan: LoadPlan,
    run: int,
    *,
    place: Place,
    buffer: Buffer,
    writing: Writing,
) -> int:
    """Read, check and distribute one run; returns its size. Fails as `read_runs`.

    The buffer is as long as the run, unless the storage `reads_own_memory`; `writing` is entered to
    write into wanted memory.
    """
    which = plan.run[run]
    start, stop = int(plan.runs.run_start[which]), int(plan.runs.run_stop[which])
    data = _read_checked(storage, index, int(plan.file[run]), start, stop - start, buffer)
    with writing:
        regions, begin = plan.taken(np.array([run]))
        _distribute(index, regions, begin - start, place, data)
    return len(data)


def _distribute(
    index: Index, regions: Regions, begin: IntArray, place: Place, data: Buffer
) -> None:
    """Copy regions that have been read, and begin at some bytes of a buffer, to where they go."""
    pieces, raw = index.rows(regions.piece), data.data
    tensors, dtypes = index.tensors, index.tensors.dtypes[pieces.tensor]
    strides = row_strides(pieces.extents) * tensors.itemsizes[pieces.tensor][:, None]
    for want, ndim, dtype, at, offset, extent, steps in zip(
        regions.want.tolist(),
        tensors.ndims[pieces.tensor].tolist(),
        dtypes.tolist(),
        begin.tolist(),
        regions.offsets.tolist(),
        regions.extents.tolist(),
        strides.tolist(),
        strict=True,
    ):
        target = place(want)
        shape = tuple(extent[:ndim])
        region: CarrierArray = np.ndarray(shape, DTYPES[dtype].carrier, raw, at, steps[:ndim])
        # The padding of the offset ends with the shorter one.
        corner = tuple(o - w for o, w in zip(offset, target.offset, strict=False))
        target.memory.copy_in(Box(corner, shape), region)


def _read_checked(
    storage: Storage, index: Index, file: int, start: int, num_bytes: int, buffer: Buffer
) -> Buffer:
    """Read bytes of a data file that are as they were written."""
    path = index.files[file].path
    where = f"{storage.url}/{path}"
    # What another system wrote has no digests, and nothing can be proven to be whole.
    advice = repair_advice(storage.url) if index.block_size else _OTHERS_ADVICE
    try:
        data = storage.read_range(path, start, num_bytes, buffer)
    except CheckpointNotFoundError:
        raise CorruptCheckpointError(
            f"{where}: missing, though the checkpoint names it. {advice}"
        ) from None
    if data.size < num_bytes:
        raise CorruptCheckpointError(
            f"{where}: ends at byte {start + data.size}, but its index has bytes up to "
            f"{start + num_bytes}\nThe file was cut short. {advice}"
        )
    damages = find_damage(index, file, start, data)
    if damages:
        raise CorruptCheckpointError(f"{storage.url}/{damages[0]}. {advice}")
    return data
