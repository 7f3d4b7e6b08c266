"""Reading what a load plan asks for: storage → buffer → digests → memory.

Each thread takes the next run, reads it into its buffer, checks the digests of its blocks, and
copies every region of the run to where it is wanted. Storages that read into memory of their own,
as object stores do, need no buffer. A region lies in the buffer as it lies in its
piece, so it is the buffer seen with the piece's strides; no bytes are rearranged before the one
copy into the destination. A run may hold thousands of small tensors, so what the plan says of its
regions is taken out of the columns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from remesh.core.dtypes import DTYPES
from remesh.core.geometry import Box, IntArray, row_strides
from remesh.core.index import Index
from remesh.core.integrity import find_damage, repair_advice
from remesh.core.memory import CarrierArray, HostMemory, Memory, contiguous_bytes
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError
from remesh.planner import LoadPlan, ReadLimits, Regions
from remesh.storage import Buffer, Storage
from remesh.storage.workers import flow_for, run_workers

_OTHERS_ADVICE = "Load another checkpoint, or restore this file from a copy"

REMOTE_WINDOWS = (2 << 20, 8 << 20)
"""Bytes of the smallest and the largest window where every request waits for a network first."""

NUM_REMOTE_READS = 16
"""Reads under way at a time there, at least."""

MAX_PARTS = 512
"""Places that one read fills at most; the system takes 1024."""

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

Writing = Callable[[], AbstractContextManager[object]]
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
    reader = RunReader(storage, index, plan, np.arange(plan.num_runs))

    def read(task: int, buffer: Buffer) -> None:
        reader.read(task, buffer, destinations.__getitem__, nullcontext)

    run_workers(plan.limits.num_reads, plan.num_runs, reader.buffer_bytes, read)


@dataclass(frozen=True, slots=True, eq=False)
class RunReader:
    """Reads, checks and distributes the runs of a load plan, each as a task."""

    storage: Storage  # where the files are
    index: Index
    plan: LoadPlan
    order: IntArray  # the run of each task
    in_place: bool = False
    """Whether bytes that lie in the system's memory are copied to where they go at once, which
    leaves no digest to be checked before."""

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer that a task needs: that of a run, unless the storage has its own."""
        return 0 if self.storage.reads_own_memory else self.plan.longest_run

    def read(self, task: int, buffer: Buffer, place: Place, writing: Writing) -> int:
        """Perform one task; returns the size of the run. Fails as `read_runs`.

        `writing` is entered to write into wanted memory.
        """
        plan, run = self.plan, int(self.order[task])
        which, file = plan.run[run], int(plan.file[run])
        start, stop = int(plan.runs.run_start[which]), int(plan.runs.run_stop[which])
        path = self.index.files[file].path
        regions, begin = plan.taken(self.order[task : task + 1])
        begin = begin - start
        if self.in_place:
            copies = _copies(self.index, regions, begin, place, buffer)
            parts = _parts_in_place(copies, begin.tolist(), buffer[: stop - start])
            if parts:
                with writing():
                    if self.storage.read_cached(path, start, parts):
                        return stop - start
        try:
            data = self.storage.read_range(path, start, stop - start, buffer)
        except CheckpointNotFoundError:
            raise CorruptCheckpointError(
                f"{self.storage.url}/{path}: missing, though the checkpoint names it. "
                f"{self._advice}"
            ) from None
        self._check(file, start, stop, data)
        with writing():
            for memory, box, values in _copies(self.index, regions, begin, place, data):
                memory.copy_in(box, values)
        return len(data)

    def _check(self, file: int, start: int, stop: int, data: Buffer) -> None:
        """Check that bytes of a data file are as they were written."""
        url = self.storage.url
        if data.size < stop - start:
            raise CorruptCheckpointError(
                f"{url}/{self.index.files[file].path}: ends at byte {start + data.size}, but its "
                f"index has bytes up to {stop}\nThe file was cut short. {self._advice}"
            )
        damages = find_damage(self.index, file, start, data)
        if damages:
            raise CorruptCheckpointError(f"{url}/{damages[0]}. {self._advice}")

    @property
    def _advice(self) -> str:
        """What to do about bytes that are not what was written."""
        # What another system wrote has no digests, and nothing can be proven to be whole.
        return repair_advice(self.storage.url) if self.index.block_size else _OTHERS_ADVICE


def _parts_in_place(copies: Iterable[_Copy], begins: Sequence[int], buffer: Buffer) -> list[Buffer]:
    """Where the bytes of a run go: to wanted memory, or into the buffer where nothing wants them.

    Empty if they must be copied: where wanted memory has gaps, or is wanted for several tensors.
    """
    parts: list[Buffer] = []
    end = 0
    for begin, (memory, box, values) in sorted(zip(begins, copies, strict=True), key=itemgetter(0)):
        into = None
        if isinstance(memory, HostMemory) and values.flags.c_contiguous:
            into = contiguous_bytes(HostMemory(memory.view(box)))
        if into is None or begin < end:
            return []
        parts += [buffer[end:begin], into]
        end = begin + len(into)
    return [*parts, buffer[end:]] if len(parts) < MAX_PARTS else []


_Copy = tuple[Memory, Box, CarrierArray]
"""A box of a memory, and the elements that go there."""


def _copies(
    index: Index, regions: Regions, begin: IntArray, place: Place, data: Buffer
) -> Iterator[_Copy]:
    """The copies of regions that begin at some bytes of a buffer to where they go."""
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
        yield target.memory, Box(corner, shape), region
