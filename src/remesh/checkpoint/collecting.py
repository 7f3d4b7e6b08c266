"""The part of a save that gives each file one writer, which collects its tensors.

That is so in storages in which an object is written by one process, and for files that hold
checksums of their tensors (`remesh.pipeline.collect`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from remesh.checkpoint.local import LocalTensors
from remesh.checkpoint.stream_layout import RankStream, lay_out
from remesh.core.geometry import Box, IntArray
from remesh.core.index import Index
from remesh.core.memory import Memory
from remesh.core.tables import BoxTable
from remesh.exchange import Exchange
from remesh.formats.framing import Frame, Grid, Writer
from remesh.formats.native import ValuesDocument
from remesh.formats.whole_tensors import decode_files, give_to_ranks
from remesh.pipeline import Collection, SpreadMemory
from remesh.planner import SavePlan
from remesh.storage import Storage


def plan_files(
    writer: Writer,
    storage: Storage,
    plan: SavePlan,
    document: ValuesDocument,
    options: Mapping[str, object],
    world_size: int,
) -> tuple[Grid, bytes]:
    """Rank 0: plan the files of a format.

    Returns what its writer makes of what is stored; and what all ranks hold, as an index, if each
    file has one writer.
    """
    grid = writer.grid(plan.cuts, document, options)
    if not writer.object_names or (storage.shares_files and not writer.has_checksums):
        return grid, b""
    is_final = writer.object_names == "final" and len(decode_files(grid).files) == 1
    names = "renamed" if storage.shares_files else "final" if is_final else "by_save"
    return give_to_ranks(grid, world_size, names), plan.index_of_holders(world_size).encode()


def lay_out_collected(
    frames_of: Callable[[BoxTable], Sequence[Frame]],
    tensors: LocalTensors,
    rows: IntArray,
    holders: bytes,
    exchange: Exchange,
) -> RankStream:
    """The stream of a rank that writes whole tensors of which other ranks hold boxes.

    Its frames are made of a table of whole tensors; `holders` is what `plan_files` gave.
    """
    index = Index.decode(holders, "the save")
    table, given = index.tensors, tensors.given(rows)
    boxes = given.boxes
    collection = Collection(exchange, index, boxes, given.memories)
    own = {
        boxes.tensors.names[tensor]: memory
        for row, (tensor, memory) in enumerate(
            zip(boxes.tensor.tolist(), given.memories, strict=True)
        )
        if boxes.box(row).shape == boxes.tensors.shape(tensor)
    }
    numbers = [n for n in range(len(table.names)) if math.prod(table.shape(n))]
    memories: list[Memory] = [
        own.get(table.names[n]) or SpreadMemory(collection, n) for n in numbers
    ]
    whole = BoxTable.of(table, [(n, Box.whole(table.shape(n))) for n in numbers])
    frames = frames_of(whole)
    stream = lay_out(frames, replace(tensors, boxes=whole, memories=memories))
    for frame, at in zip(frames, stream.files.start.tolist(), strict=True):
        collection.checksums.extend(
            (at + first, at + last, tuple(at + place for place in places))
            for first, last, places in frame.checksums
        )
    return replace(stream, collection=collection)
