"""Stored tensors as memories, so that what is saved may lie in another checkpoint.

A memory of the pipeline gives the elements of any box of a tensor. `StoredMemory` reads them from
files. The copies that fill one chunk of a file are queued and then read together, so that a chunk
of a thousand small tensors costs one read and not a thousand, and no digest block is read twice for
it. With a transformation, the boxes of the sources that make up a box are read, rearranged and
converted.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from remesh.checkpoint.stored import read_boxes
from remesh.core.dtypes import BY_NAME, CarrierDType
from remesh.core.geometry import Box
from remesh.core.index import Index
from remesh.core.memory import CarrierArray, CopyQueue, Memory, SourceMemory
from remesh.errors import UnsupportedValueError
from remesh.formats import native
from remesh.storage import Storage
from remesh.transform import Region, Resolved, arranged

_Wanted = tuple[str, Box, CarrierArray]
"""Name of a tensor, a box of it, and the array of this shape that gets the elements."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredSource:
    """A checkpoint that tensors are read from."""

    storage: Storage  # where it is
    index: Index
    identity: str  # see `remesh.formats.native.identity_of`
    resolved: Resolved | None = None
    """The transformation of its tensors; None if they are taken as they are."""
    entered: threading.local = field(default_factory=threading.local)
    """The queue that each thread has entered."""

    def read(self, wanted: Sequence[_Wanted]) -> None:
        """Read boxes of tensors into arrays, all in one plan."""
        boxes: list[tuple[str, Box]] = []
        arrays: list[CarrierArray] = []
        blocks: list[tuple[Region, CarrierArray, CarrierArray]] = []
        for name, box, into in wanted:
            if self.resolved is None:
                boxes.append((name, box))
                arrays.append(into)
                continue
            for region in self.resolved.regions(name, box):
                carrier = BY_NAME[self.index[region.source].dtype].carrier
                block = np.empty(region.source_box.shape, carrier)
                boxes.append((region.source, region.source_box))
                arrays.append(block)
                place: tuple[Any, ...] = (*region.target_box.relative_to(box).slices, ...)
                blocks.append((region, block, into[place]))
        with native.unless_replaced(self.storage, self.identity):
            read_boxes(self.storage, self.index, boxes, arrays)
        for region, block, part in blocks:
            stored = self.index[region.source].dtype
            part[...] = converted(arranged(block, region), stored, region.dtypes)


def converted(block: CarrierArray, stored: str, dtypes: Sequence[str]) -> CarrierArray:
    """Elements after conversions, as carriers; torch knows how to convert those numpy lacks."""
    if not dtypes:
        return block
    opaque = [name for name in (stored, *dtypes) if BY_NAME[name].is_opaque]
    if opaque:
        raise UnsupportedValueError(f"torch does not convert elements of type {opaque[0]}")
    torch = importlib.import_module("torch")
    flat = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(flat).view(getattr(torch, stored))
    for name in dtypes:
        tensor = tensor.to(getattr(torch, name))
    bits: CarrierArray = tensor.view(torch.uint8).numpy()
    return bits.view(BY_NAME[dtypes[-1]].carrier).reshape(block.shape)


@dataclass(slots=True, eq=False)
class StoredCopies:
    """The queue of one thread: copies that are read together. Enter it to queue copies."""

    source: StoredSource
    waiting: list[_Wanted] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.source.entered.queue = self
        return self

    def __exit__(self, *_error: object) -> None:
        del self.source.entered.queue

    def mark(self) -> Callable[[], None]:
        """See `CopyQueue.mark`: the function that is returned reads what is queued by now."""
        wanted, self.waiting = self.waiting, []
        return lambda: self.source.read(wanted)


@dataclass(frozen=True, slots=True, eq=False)
class StoredMemory(SourceMemory):
    """A whole tensor that is read box by box; `remesh.core.memory.QueuedMemory`."""

    source: StoredSource  # what it is read from
    name: str  # its name, after the transformation if there is one
    dtype: str  # name of its element type
    shape: tuple[int, ...]

    @property
    def carrier(self) -> CarrierDType:
        return BY_NAME[self.dtype].carrier

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        self.source.read([(self.name, box, into)])

    def queue_copy_out(self, box: Box, into: CarrierArray) -> None:
        self.source.entered.queue.waiting.append((self.name, box, into))


def stored_copies(memories: Iterable[Memory]) -> Callable[[], CopyQueue] | None:
    """The maker of queues for copies out of a checkpoint; None if no memory is stored in one."""
    found = next((one for one in memories if isinstance(one, StoredMemory)), None)
    if found is None:
        return None
    source = found.source
    return lambda: StoredCopies(source)
