"""A checkpoint as tensors of which boxes are read, and as memory that is saved elsewhere.

A `TensorSource` is a stored checkpoint, what a transformation makes of one, or what is whole of a
damaged one. Boxes that are asked for together are planned together, so no digest block is read
twice for them. What a transformation makes is read as the boxes of stored tensors that it is made
of; a `RegionMemory` takes what is read of each, brings it into its new shape and passes it on.

A `StoredMemory` gives a box of such a tensor to a save. The copies that fill one chunk of a file
are queued and then read together, so a chunk of a thousand small tensors costs one read and not a
thousand.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from remesh.core.dtypes import BY_NAME, CarrierDType, DType
from remesh.core.geometry import Box
from remesh.core.index import Index
from remesh.core.memory import CarrierArray, CopyQueue, HostMemory, Memory
from remesh.core.strided import Layout
from remesh.core.tables import BoxTable
from remesh.errors import UnsupportedValueError
from remesh.formats import native
from remesh.pipeline.read import Destination, limits_for, read_runs
from remesh.planner import plan_load
from remesh.storage import Storage
from remesh.transform import Region, Resolved, arranged


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """A checkpoint that boxes of tensors are read from."""

    storage: Storage  # where it is; files are read there as the positions of the index say
    index: Index
    identity: str = ""  # see `remesh.formats.native.identity_of`
    resolved: Resolved | None = None
    """The transformation of its tensors; None if they are taken as they are."""
    entered: threading.local = field(default_factory=threading.local)
    """The queue that each thread has entered."""

    def read(
        self, boxes: Sequence[tuple[str, Box]], into: Sequence[CarrierArray] | None = None
    ) -> list[CarrierArray]:
        """Read boxes of tensors into carrier arrays, new ones by default, checking digests."""
        index, resolved = self.index, self.resolved
        wanted, regions = list(boxes), list[tuple[int, Region]]()
        if resolved is not None:
            for number, (name, box) in enumerate(boxes):
                regions += [(number, region) for region in resolved.regions(name, box)]
            wanted = [(region.source, region.source_box) for _, region in regions]
        table = BoxTable.of(index.tensors, [(index.row(name), box) for name, box in wanted])
        # First the plan: what is not stored shall not take memory either.
        limits = limits_for(self.storage.latency, int(table.num_bytes.sum()))
        plan = plan_load(index, table, limits)
        arrays = list(into or (np.empty(box.shape, self._carrier(name)) for name, box in boxes))
        destinations = [
            Destination(box.offset, HostMemory(array))
            for (_, box), array in zip(boxes, arrays, strict=True)
        ]
        if resolved is not None:
            destinations = [
                region_destination(index, region, destinations[number])
                for number, region in regions
            ]
        with native.unless_replaced(self.storage, self.identity):
            read_runs(self.storage, index, plan, destinations)
        return arrays

    def _carrier(self, name: str) -> CarrierDType:
        made = None if self.resolved is None else self.resolved.targets[name]
        return BY_NAME[self.index[name].dtype if made is None else made.dtype].carrier


@dataclass(frozen=True, slots=True, eq=False)
class RegionMemory(Memory):
    """Takes what is read of a region's source box, and passes on what it becomes."""

    region: Region  # which elements become what
    dtype: DType  # the stored dtype
    target: Destination  # what is filled with elements in the region's last dtype

    @property
    def carrier(self) -> CarrierDType:
        return self.dtype.carrier

    @property
    def layout(self) -> Layout | None:
        return self.target.memory.layout

    def copy_in(self, box: Box, values: CarrierArray) -> None:
        """See `Memory.copy_in`; boxes are relative to the region's source box."""
        read = box.shift(self.region.source_box.offset)
        for piece in self.region.restrict(read):
            block = arranged(values[piece.source_box.relative_to(read).slices], piece)
            place = piece.target_box.shift(self.target.offset, -1)
            self.target.memory.copy_in(place, converted(block, self.dtype.name, piece.dtypes))


def region_destination(index: Index, region: Region, target: Destination) -> Destination:
    """Where the source box of a region goes, so that it fills its part of a target."""
    dtype = BY_NAME[index[region.source].dtype]
    return Destination(region.source_box.offset, RegionMemory(region, dtype, target))


def converted(block: CarrierArray, stored: str, dtypes: Sequence[str]) -> CarrierArray:
    """Elements after conversions, as carriers; torch knows how to convert those numpy lacks."""
    if not dtypes:
        return block
    check_conversion(stored, dtypes)
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise UnsupportedValueError(
            f"elements are converted to {dtypes[0]} by torch, which is not installed\n"
            "Install it with: pip install 'remesh[torch]'"
        ) from error
    # torch warns of arrays that are read-only.
    flat = np.require(block, None, ["C", "W"]).reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(flat).view(getattr(torch, stored))
    for name in dtypes:
        tensor = tensor.to(getattr(torch, name))
    bits: CarrierArray = tensor.view(torch.uint8).numpy()
    return bits.view(BY_NAME[dtypes[-1]].carrier).reshape(block.shape)


def check_conversion(stored: str, dtypes: Sequence[str]) -> None:
    """Refuse elements that torch knows no values of."""
    opaque = next((name for name in (stored, *dtypes) if BY_NAME[name].is_opaque), None)
    if opaque is not None:
        raise UnsupportedValueError(f"torch does not convert elements of type {opaque}")


@dataclass(frozen=True, slots=True, eq=False)
class StoredMemory(Memory):
    """A box of a stored tensor, read part by part."""

    source: TensorSource  # what it is read from
    name: str  # its name, after the transformation if there is one
    dtype: str  # name of its element type
    box: Box  # what is here of the tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return self.box.shape

    @property
    def carrier(self) -> CarrierDType:
        return BY_NAME[self.dtype].carrier

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        self.source.read([(self.name, box.shift(self.box.offset))], [into])

    def queue_copy_out(self, box: Box, into: CarrierArray) -> None:
        queue: _StoredCopies = self.source.entered.queue
        queue.boxes.append((self.name, box.shift(self.box.offset)))
        queue.arrays.append(into)


@dataclass(slots=True, eq=False)
class _StoredCopies:
    """The queue of one thread: copies that are read together. Enter it to queue copies."""

    source: TensorSource
    boxes: list[tuple[str, Box]] = field(default_factory=list)
    arrays: list[CarrierArray] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.source.entered.queue = self
        return self

    def __exit__(self, *_error: object) -> None:
        del self.source.entered.queue

    def mark(self) -> Callable[[], None]:
        """See `CopyQueue.mark`: the function that is returned reads what is queued by now."""
        boxes, arrays = self.boxes, self.arrays
        self.boxes, self.arrays = [], []

        def read() -> None:
            self.source.read(boxes, arrays)

        return read


def stored_copies(memories: Iterable[Memory]) -> Callable[[], CopyQueue] | None:
    """The maker of queues for copies out of a checkpoint; None if no memory is stored in one."""
    found = next((one for one in memories if isinstance(one, StoredMemory)), None)
    if found is None:
        return None
    source = found.source
    return lambda: _StoredCopies(source)
