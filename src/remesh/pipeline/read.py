"""Reading what a load plan asks for: storage → buffer → digests → memory.

Each thread takes the next run, reads it into its buffer, checks the digests of its blocks, and
copies every region of the run to where it is wanted. A region lies in the buffer as it lies in its
piece, so it is the buffer seen with the piece's strides; no bytes are rearranged before the one
copy into the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError
from remesh.geometry import Box
from remesh.index import Index
from remesh.integrity import find_damage
from remesh.memory import CarrierArray, Memory
from remesh.pipeline.workers import run_workers
from remesh.planner import LoadPlan
from remesh.storage import Buffer, Storage

NUM_THREADS = 4
"""Readers: enough to keep a disk's queue filled while others copy."""


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """Where a wanted box goes: its offset in the stored tensor, and its memory."""

    offset: tuple[int, ...]
    memory: Memory


def read_runs(
    storage: Storage,
    index: Index,
    plan: LoadPlan,
    wants: Sequence[Want],
    on_run: Callable[[int], None],
) -> None:
    """Execute a load plan.

    Args:
        storage: Where the checkpoint is.
        index: Its index.
        plan: What to read.
        wants: Where each wanted box of the plan goes.
        on_run: Called after each run, in the thread that read it, with its size in bytes.

    Raises:
        CorruptCheckpointError: If a file is missing, too short, or its bytes are not what was
            written. Wanted boxes may be partly filled then.
        StorageError: If the storage fails.
    """
    if not plan.num_runs:
        return
    longest = int((plan.run_stop - plan.run_start).max())

    def read_run(run: int, buffer: Buffer) -> None:
        on_run(_read_run(storage, index, plan, run, wants, buffer))

    run_workers(NUM_THREADS, plan.num_runs, longest, read_run)


def _read_run(
    storage: Storage,
    index: Index,
    plan: LoadPlan,
    run: int,
    wants: Sequence[Want],
    buffer: Buffer,
) -> int:
    """Read, check and distribute one run; returns its size."""
    first, last = int(plan.run_first[run]), int(plan.run_first[run + 1])
    start, stop = int(plan.run_start[run]), int(plan.run_stop[run])
    file = int(index.file[plan.piece[first]])
    path = index.files[file].path
    data = buffer[: stop - start]
    try:
        num_read = storage.read_into(path, start, data)
    except CheckpointNotFoundError:
        raise CorruptCheckpointError(
            f"{path}: missing, though the commit record names it. Load another checkpoint, or "
            "restore this file from a copy."
        ) from None
    if num_read < len(data):
        raise CorruptCheckpointError(
            f"{path}: ends at byte {start + num_read}, but its index has bytes up to {stop}; the "
            "file was cut short. Load another checkpoint, or restore this file from a copy."
        )
    damages = find_damage(index, file, start, data)
    if damages:
        raise CorruptCheckpointError(str(damages[0]))
    boxes = index.boxes
    for row in range(first, last):
        piece = int(plan.piece[row])
        ndim = int(boxes.tensors.ndims[boxes.tensor[piece]])
        dtype = boxes.tensors.dtype(int(boxes.tensor[piece]))
        extents = tuple(plan.extents[row, :ndim].tolist())
        region: CarrierArray = np.ndarray(
            extents,
            dtype.carrier,
            buffer=data.data,
            offset=int(plan.start[row]) - start,
            strides=_byte_strides(boxes.extents[piece, :ndim].tolist(), dtype.itemsize),
        )
        want = wants[int(plan.want[row])]
        offset = tuple(plan.offsets[row, :ndim].tolist())
        want.memory.copy_in(Box(offset, extents).relative_to(Box(want.offset, extents)), region)
    return len(data)


def _byte_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
