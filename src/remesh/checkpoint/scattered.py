"""A checkpoint that lies scattered over nodes, each part where only the ranks of its node reach it.

For snapshots in the memory of nodes, which outlive the processes. It is a checkpoint in remesh's
own format: the same files with the same digests. Each node has a place of its own. Every rank
writes its data file to the place of its node, and record, index and values go to the places of all
nodes. So nodes that together have all data files, whichever they are, have the checkpoint.

*Saving* is a copy into memory, so it happens in the foreground, and is done when it returns: the
ranks agree on who writes what, write, and rank 0 makes the index of all parts and sends it to all
ranks. The first record is put when all data files are finished on all nodes; a reader that sees a
record anywhere knows that only the loss of a node can make the checkpoint incomplete.

*Replicas* guard against that: before the commit each file is copied to further nodes, between
ranks, as if each were a tensor of bytes.

*Finding* asks all nodes what they have. *Loading* takes small files from any node that has them. A
data file is read by a rank that reaches it, once, and passed on to those who need something of it.
No storage is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from remesh.checkpoint.agree import PlanCache, SaveOptions, agree
from remesh.checkpoint.buffers import Buffers
from remesh.checkpoint.commit import decode_parts, last_steps, remove_own
from remesh.checkpoint.loading import fill_planned, plan_into
from remesh.checkpoint.match import LoadOptions
from remesh.checkpoint.report import RestoreReport
from remesh.checkpoint.saving import write
from remesh.checkpoint.stored import StoredState
from remesh.core.dtypes import CarrierDType
from remesh.core.geometry import Box
from remesh.core.index import Index, StoredFile
from remesh.core.memory import CarrierArray, Memory
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
)
from remesh.events import Emit
from remesh.exchange import Exchange, run_each, run_joined, run_on_all, run_on_one
from remesh.formats import native
from remesh.formats.writer import Part, SmallFile
from remesh.pipeline import Destination, read_together
from remesh.pipeline.source import TensorSource
from remesh.planner import Assign, ReadLimits, plan_load
from remesh.planner.assignment import assign_to_owners
from remesh.planner.loading import files_of_windows
from remesh.storage import Storage, Writer

ROOT_NAME = "root"
"""A file beside the checkpoints of a place that says where else the job saves to, for agents."""

PIECE_BYTES = 2 << 20
"""What is read and written at a time when files are copied to other nodes."""

_LOGGER = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Which ranks reach the same place."""

    ranks: tuple[tuple[int, ...], ...]  # of each node, ascending; nodes go by their first ranks
    node: tuple[int, ...]  # the node of each rank

    def is_first(self, rank: int) -> bool:
        """True if a rank is the one that acts for its node."""
        return self.ranks[self.node[rank]][0] == rank

    def peer(self, rank: int, distance: int) -> int:
        """The rank that takes the files of a rank, on the node that is `distance` further."""
        node = self.node[rank]
        there = self.ranks[(node + distance) % len(self.ranks)]
        return there[self.ranks[node].index(rank) % len(there)]


def nodes_of(places: Sequence[str]) -> Nodes:
    """The nodes of a job, given what names the place of each rank; equal on one node alone."""
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    number = {place: node for node, place in enumerate(ranks)}
    return Nodes(tuple(map(tuple, ranks.values())), tuple(number[place] for place in places))


def replica_distances(num_nodes: int, num_replicas: int) -> list[int]:
    """How many nodes further the replicas of a node's files lie.

    They are spread over the job: nodes that are next to each other often share a rack, and fail
    together. There are fewer replicas if there are not so many other nodes.
    """
    num_replicas = min(num_replicas, num_nodes - 1)
    return [number * num_nodes // (num_replicas + 1) for number in range(1, num_replicas + 1)]


# ---------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------


def save_scattered(
    state: Any,
    storage: Storage,
    nodes: Nodes,
    exchange: Exchange,
    *,
    metadata: Mapping[str, object],
    buffers: Buffers | None = None,
    num_replicas: int,
    cache: PlanCache,
    emit: Emit,
) -> None:
    """Save a state into the places of the nodes. Collective; complete when it returns.

    The storage is the place of this rank's node, for this checkpoint alone. Each file lies on
    `num_replicas` further nodes, if there are so many. After any
    failure what was written is removed, unless it may be complete.
    """
    options = SaveOptions(metadata=metadata, overwrite=True, shares_place=False, buffers=buffers)
    mine = agree(exchange, storage, state, options, cache=cache, emit=emit)
    parts: list[list[Part]] = []

    def join(replies: list[bytes]) -> list[bytes]:
        parts.extend(decode_parts(replies))
        files = [[(part.path, part.num_bytes) for part in own] for own in parts]
        return [msgspec.msgpack.encode(files)] * len(parts)

    def describe() -> bytes:
        emit("save.parts_gathered", sum(part.num_bytes for own in parts for part in own))
        return msgspec.msgpack.encode(last_steps(mine.on_rank_0, parts))

    try:
        files = msgspec.msgpack.decode(
            run_joined(exchange, lambda: msgspec.msgpack.encode(write(storage, mine, emit)), join),
            type=list[list[tuple[str, int]]],
        )
        for distance in replica_distances(len(nodes.ranks), num_replicas):
            _copy_files(exchange, storage, files, nodes, distance)
        small = run_on_one(exchange, describe)
    except Exception:
        remove_own(storage, mine.save_id, mine.paths)
        raise
    # If that fails, the files stay: on another node the checkpoint may be committed already.
    run_each(exchange, lambda: _put_small_files(storage, small, nodes, exchange, emit))
    emit("save.done")


def _put_small_files(
    storage: Storage, small: bytes, nodes: Nodes, exchange: Exchange, emit: Emit
) -> None:
    """The first rank of each node: commit."""
    if nodes.is_first(exchange.rank):
        *others, (mark, content) = msgspec.msgpack.decode(small, type=list[SmallFile])
        for path, data in others:
            storage.put(path, data, overwrite=False)
        emit("save.before_commit")
        storage.put(mark, content, overwrite=True)
        emit("save.committed")


@dataclass(frozen=True, slots=True, eq=False)
class _WrittenFile(Memory):
    """A file that is written, as the memory of a vector of bytes."""

    writer: Writer
    carrier: CarrierDType = field(default=np.dtype(np.uint8), init=False)

    def copy_in(self, box: Box, values: CarrierArray) -> None:
        [start] = box.offset
        self.writer.write(start, values)


def _copy_files(
    exchange: Exchange,
    storage: Storage,
    files: Sequence[Sequence[tuple[str, int]]],
    nodes: Nodes,
    distance: int,
) -> None:
    """Give every rank's files to its peer. Collective."""
    owners = [rank for rank, own in enumerate(files) for _ in own]
    stored = [StoredFile(path, size) for own in files for path, size in own]
    tensors = TensorTable.of([(file.path, "uint8", (file.num_bytes,)) for file in stored])
    whole = [(row, Box.whole((file.num_bytes,))) for row, file in enumerate(stored)]
    rows = np.arange(len(stored))
    index = Index.of(BoxTable.of(tensors, whole), rows, np.zeros_like(rows), tuple(stored))
    taken = [row for row, own in enumerate(owners) if nodes.peer(own, distance) == exchange.rank]
    wanted = BoxTable.of(tensors, [whole[row] for row in taken])
    plan = plan_load(index, wanted, ReadLimits(PIECE_BYTES))
    writers: list[Writer] = []
    with ExitStack() as stack:

        def create() -> None:
            for row in taken:
                writers.append(storage.create(stored[row].path, stored[row].num_bytes))
                stack.callback(writers[-1].abort)

        def copy() -> None:
            to = [Destination((0,), _WrittenFile(writer)) for writer in writers]
            assign = _assign_to(index, owners)
            source = TensorSource(storage, index)
            read_together(exchange, source, plan, to, lambda _size: None, assign=assign)

        def finish() -> None:
            for writer in writers:
                writer.finish()

        for step in (create, copy, finish):
            run_each(exchange, step)


def _assign_to(index: Index, owners: Sequence[int]) -> Assign:
    """Assigns the windows of each file to the rank that reads it."""
    of_file = np.array(owners, np.int64)
    return lambda touched, limits: assign_to_owners(
        touched, limits, lambda windows: of_file[files_of_windows(index, windows, limits)]
    )


# ---------------------------------------------------------------------------------------------
# Finding
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scattered:
    """A checkpoint that was found on some nodes."""

    name: str  # its directory in the places of the nodes
    record: native.CommitRecord  # what was committed
    nodes: tuple[int, ...]  # the nodes that have its small files
    holders: tuple[tuple[int, ...], ...]  # the nodes that have each data file of the record

    @property
    def missing(self) -> list[str]:
        """Data files that no node has."""
        files = zip(self.record.files, self.holders, strict=True)
        return [file.path for file, nodes in files if not nodes]


def find_scattered(storage: Storage, nodes: Nodes, exchange: Exchange) -> list[Scattered]:
    """The checkpoints in the places of the nodes, whole or not. Collective.

    The storage is the place of this rank's node, above the checkpoints.
    """

    def look() -> bytes:
        found = _look(storage) if nodes.is_first(exchange.rank) else []
        return msgspec.msgpack.encode(found)

    found: dict[tuple[str, str], tuple[native.CommitRecord, list[int], dict[str, list[int]]]] = {}
    for rank, data in enumerate(run_on_all(exchange, look)):
        for name, text, files in msgspec.msgpack.decode(data, type=list[_Found]):
            record = native.decode_record(text, name)
            _, able, holders = found.setdefault((name, record.save_id), (record, [], {}))
            able.append(nodes.node[rank])
            for file in files:
                holders.setdefault(file, []).append(nodes.node[rank])
    return [
        Scattered(
            name,
            record,
            tuple(able),
            tuple(tuple(holders.get(file.path, ())) for file in record.files),
        )
        for (name, _), (record, able, holders) in found.items()
    ]


_Found = tuple[str, bytes, list[str]]
"""Name of a checkpoint, its record, and those of its data files that are here."""


def _look(storage: Storage) -> list[_Found]:
    """The checkpoints in the place of one node."""
    found: list[_Found] = []
    sizes = storage.list_sizes()
    for path in sorted(sizes):
        name, _, file = path.rpartition("/")
        if file != native.RECORD_NAME:
            continue
        try:
            text = storage.read(path)
            record = native.decode_record(text, f"{storage.url}/{path}")
        except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError) as error:
            _LOGGER.warning("not used: %s", error)  # or removed since it was listed
            continue
        files = (record.index, record.values, *record.files)
        here = [one.path for one in files if sizes.get(f"{name}/{one.path}") == one.num_bytes]
        if here[:2] == [record.index.path, record.values.path]:
            found.append((name, text, here[2:]))
    return found


# ---------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------


def load_scattered(
    state: Any,
    storage: Storage,
    found: Scattered,
    nodes: Nodes,
    exchange: Exchange,
    *,
    options: LoadOptions,
    emit: Emit,
) -> RestoreReport:
    """Load a checkpoint out of the places of the nodes into any layout. Collective.

    Nodes are those that it was found with; the storage is the place of this rank's node, for this
    checkpoint alone. Returns this rank's report, without the time that the load took.
    """
    if found.missing:
        raise CheckpointNotFoundError(
            f"{found.name}: no node that is here has {', '.join(found.missing)}; load another "
            "checkpoint, or keep replicas"
        )
    stored = _open(storage, found, nodes, exchange)
    run_each(exchange, lambda: emit("load.opened"))
    owners = [_owner(number, found, nodes) for number in range(len(found.holders))]
    all_have_all = all(len(holders) == len(nodes.ranks) for holders in found.holders)
    assign = None if all_have_all else _assign_to(stored.index, owners)

    source = TensorSource(storage, stored.index)
    read = partial(read_together, exchange, source, assign=assign)
    plan, _ = plan_into(state, stored, exchange, options, read=read)
    return fill_planned(plan, exchange, read, emit)


def _open(storage: Storage, found: Scattered, nodes: Nodes, exchange: Exchange) -> StoredState:
    """Index and values, from the first node that has them."""
    giver = nodes.ranks[found.nodes[0]][0]

    def give() -> bytes:
        if exchange.rank != giver:
            return b""
        files = native.read_small_files(storage)
        return msgspec.msgpack.encode((files.index_bytes, files.values_bytes))

    reply = run_joined(exchange, give, lambda replies: [replies[giver]] * len(replies))
    index, values = msgspec.msgpack.decode(reply, type=tuple[bytes, bytes])
    return StoredState(
        storage.url,
        Index.decode(index, found.name),
        native.ValuesDocument.decode(values, found.name),
        rank=exchange.rank,
    )


def _owner(number: int, found: Scattered, nodes: Nodes) -> int:
    """Who reads a file: the rank of the number that wrote it, if that reaches it."""
    able = [rank for node in found.holders[number] for rank in nodes.ranks[node]]
    writer = int(found.record.files[number].path.rpartition("/")[2].partition(".")[0])
    return writer if writer in able else able[number % len(able)]
