"""The agreement of the ranks of a save, before a byte moves: who writes what.

Every rank describes what it holds. Rank 0 unites the descriptions, checks that every element is
held exactly once and that there is room, decides who writes what, and sends each rank its write
assignment.

A job saves the same layout again and again, so a `Saver` keeps a `PlanCache`. The ranks first
exchange fingerprints of their layouts, 16 bytes each. If all are what they were the last time, the
plan of the last time is used and no layout crosses the network. A process keeps the part of one
rank of one group: if any process has another rank now, or was not there when the plan was made, the
ranks plan anew. Each save, rank 0 sends a digest of what a rank is to write, and the rank checks
that it writes that. Values differ from save to save; rank 0's copy is taken if the fingerprints say
that all ranks have the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from remesh.checkpoint.arguments import check_same_options
from remesh.checkpoint.buffers import Buffers, choose_buffers
from remesh.checkpoint.collecting import plan_files
from remesh.checkpoint.copies import Compares, Comparison, compare_copies
from remesh.checkpoint.documents import (
    check_metadata,
    document_of,
    document_of_all,
)
from remesh.checkpoint.local import (
    LocalTensors,
    describe_local,
    finish_device_work,
    tensors_to_store,
)
from remesh.checkpoint.local_boxes import BoxesMessage, decode_local_boxes, encode_local_boxes
from remesh.checkpoint.replacing import existing_checkpoint
from remesh.checkpoint.sharing import check_same_place, check_space, is_one_directory, meet
from remesh.checkpoint.unchanged import History
from remesh.core.collector import collector_rests
from remesh.core.geometry import IntArray
from remesh.core.integrity import raw_digest
from remesh.core.state import Description
from remesh.core.tables import Cuts
from remesh.events import Emit
from remesh.exchange import Exchange, run_joined, run_on_all
from remesh.formats import native
from remesh.formats.framing import Existing, Grid, Part, Saved
from remesh.formats.table import writer_of
from remesh.pipeline import Compress
from remesh.planner import LocalBoxes, SavePlan, plan_save
from remesh.storage import FileSystemSpace, Storage


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of the caller of a save."""

    overwrite: bool  # replace a checkpoint that is there
    metadata: Mapping[str, object]  # what to record beside the state
    shares_place: bool = True
    """Whether all ranks save to one place, as all do except snapshots in the memory of nodes."""
    meets: bool = False
    """Whether the ranks will communicate through the place alone, so that it must be known
    beforehand that they share it."""
    buffers: Buffers | None = None
    """Whose buffers of modules are stored where ranks differ; None if they must not."""
    compares: Compares = "whole"  # which copies of tensors are compared
    format: str = native.FORMAT_NAME  # name of the format that is written
    format_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the format; those of rank 0 count."""
    without: tuple[str, ...] = ()  # small files that the caller writes by itself
    keeps: bool = False
    """Whether files that did not change since the last save of the `PlanCache` are kept."""
    compress: Compress | None = None  # how data files are compressed; None if they are not


@dataclass(frozen=True, slots=True, eq=False)
class GlobalSavePlan:
    """The knowledge of rank 0 about a save."""

    save_id: str  # names the save
    options: SaveOptions  # what the caller asked for
    cuts: Cuts  # the distinct boxes that are stored
    assignments: Sequence[IntArray]  # rows of these that each rank writes, in the order of its file
    document: native.ValuesDocument  # the values of all ranks
    replaced: Existing | None  # the checkpoint that is going to be overwritten, if there is one
    grid: Grid  # what the writer of the format makes of the boxes

    def saved(self, parts: Sequence[Sequence[Part]]) -> Saved:
        """The save as a writer sees it, with what each rank has written."""
        return Saved(
            self.save_id,
            self.cuts,
            self.assignments,
            self.document,
            self.grid,
            self.options.metadata,
            len(self.assignments),
            parts,
            self.options.format_options,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """The agreement of the ranks of a save, as one of them knows it."""

    save_id: str  # names the save
    rank: int
    options: SaveOptions  # what the caller asked for
    tensors: LocalTensors  # the boxes that this rank holds, copies included
    layout: bytes  # a digest of these boxes
    rows: IntArray  # rows of them that it writes, in file order
    is_as_assigned: bool  # whether these are the rows that rank 0 has assigned to it
    document: bytes  # its values, encoded
    grid: Grid  # what the writer of the format makes of the boxes
    holders: bytes  # what all ranks hold, as an index, if each file has one writer
    global_plan: GlobalSavePlan | None  # on rank 0, what it knows of all ranks

    @property
    def on_rank_0(self) -> GlobalSavePlan:
        """On rank 0, what it knows of all ranks."""
        assert self.global_plan is not None
        return self.global_plan


_NO_KEY = bytes(16)


@dataclass(slots=True)
class PlanCache:
    """The plan of the last save of a layout, kept by a `Saver`."""

    plan_id: str = ""  # names the plan: the save that it was made for
    key: bytes = _NO_KEY
    """Names it with the layouts of all ranks and the rank whose part this is (`_plan_keys`); zeros
    if there is no plan."""
    rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rows of this rank's boxes that it writes."""
    shared: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rows of this rank's boxes that other ranks hold as well."""
    local_boxes: list[LocalBoxes] = field(default_factory=list)  # on rank 0, what each rank holds
    plan: SavePlan | None = None  # on rank 0, the plan
    assignments: list[IntArray] = field(default_factory=list)  # on rank 0, rows of the plan by rank
    hits: int = 0  # how often it was used
    met_in: str | None = None
    """URL of the directory in which ranks last found that they share it; None before."""
    history: History = field(default_factory=History)
    """What this rank knows of the last save that was committed."""


class _Described(msgspec.Struct, frozen=True):
    """Message of a rank to rank 0; boxes and document are empty if rank 0 has them already."""

    local_boxes: BoxesMessage
    document: bytes
    replicas: list[str]
    url: str
    options: tuple[str | None, str, str, str | None]
    space: tuple[str, int, str] | None
    num_bytes_to_keep: int

    @classmethod
    def of(
        cls, held: _Held, storage: Storage, options: SaveOptions, num_bytes_to_keep: int
    ) -> Self:
        space = storage.space()
        return cls(
            held.boxes,
            held.document,
            held.replicas,
            storage.url,
            (options.buffers, options.compares, options.format, options.compress),
            None if space is None else (space.identity, space.free_bytes, space.directory),
            num_bytes_to_keep,
        )


class _WriteAssignment(msgspec.Struct, frozen=True):
    """Message of rank 0 to a rank: rows of its boxes as int64 bytes."""

    save_id: str  # names the save
    rows: bytes | None  # those that the rank writes, in file order; None if the rank knows them
    shared: bytes | None  # those that other ranks hold as well; None if the rank knows them
    digest: bytes  # a digest of both, whether the rank knows them or not
    compares: bool  # whether there is anything to compare
    meets: bool  # whether the ranks find out whether they share the place
    grid: Grid  # what the writer of the format makes of the boxes
    holders: bytes  # what all ranks hold, as an index, if each file has one writer


class _Fingerprint(NamedTuple):
    """Four digests: what a rank sends first."""

    layout: bytes  # of its boxes
    document: bytes  # of its values
    key: bytes  # the key of its `PlanCache`
    shared: bytes  # of what it has in common with other ranks (`BoxesMessage`)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(*(data[at : at + 16] for at in range(0, 64, 16)))


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What a rank holds."""

    tensors: LocalTensors
    boxes: BoxesMessage
    document: bytes  # its values, encoded
    replicas: list[str]  # elements of sharded objects of which it has another replica

    @classmethod
    def of(cls, state: Any, buffers: Buffers | None, rank: int) -> Self:
        description, tensors, document = describe_to_store(state, buffers, rank)
        replicas = [one.unique_name for one in description.objects if not one.is_main_replica]
        boxes = encode_local_boxes(tensors.boxes, tensors.roles)
        return cls(tensors, boxes, document, replicas)

    def fingerprint(self, key: bytes) -> bytes:
        """The first message of the rank, given the key of its `PlanCache`."""
        document = raw_digest(self.document)
        return b"".join(_Fingerprint(self.boxes.layout, document, key, self.boxes.digest))

    def unknown(self, fingerprints: Sequence[_Fingerprint], rank: int, *, is_known: bool) -> Self:
        """What rank 0 does not know yet of it."""
        boxes, document = self.boxes, self.document
        if is_known:
            boxes = BoxesMessage()
        elif [one.shared for one in fingerprints].index(boxes.digest) != rank:
            boxes = boxes.without_shared()
        if rank and len({one.document for one in fingerprints}) == 1:
            document = b""
        return replace(self, boxes=boxes, document=document)


def agree(
    exchange: Exchange,
    storage: Storage,
    state: Any,
    options: SaveOptions,
    *,
    cache: PlanCache,
    emit: Emit,
    earlier: BaseException | None = None,
) -> Agreement:
    """Describe, compare, check and plan. Collective; all ranks raise the failure of one.

    The cache has the plan of the last save, and gets that of this one. An `earlier` failure of a
    rank is raised in place of the first step.
    """
    held: list[_Held] = []
    replaced: list[Existing | None] = []
    global_plan: list[GlobalSavePlan] = []

    def describe() -> bytes:
        if earlier is not None:
            raise earlier
        with collector_rests():
            if exchange.rank == 0:
                check_metadata(options.metadata)
                replaced.append(_existing(storage, options))
            held.append(_Held.of(state, options.buffers, exchange.rank))
        emit("save.described")
        return held[0].fingerprint(cache.key)

    def tell() -> bytes:
        kept = cache.history.num_bytes_to_keep(held[0].boxes.layout) if options.keeps else 0
        unknown = held[0].unknown(fingerprints, exchange.rank, is_known=is_known)
        return msgspec.msgpack.encode(_Described.of(unknown, storage, options, kept))

    def plan(replies: list[bytes]) -> list[bytes]:
        described = [msgspec.msgpack.decode(reply, type=_Described) for reply in replies]
        made, assignments = _plan(described, storage, options, cache, is_known, replaced[0])
        global_plan.append(made)
        emit("save.planned")
        return assignments

    fingerprints = [_Fingerprint.decode(data) for data in run_on_all(exchange, describe)]
    is_known = _is_known(cache, fingerprints)
    assignment = msgspec.msgpack.decode(run_joined(exchange, tell, plan), type=_WriteAssignment)
    if assignment.meets:
        meet(exchange, storage, _meeting_path(assignment.save_id))
        cache.met_in = _parent(storage.url)
    [mine] = held
    _look_at_copies(exchange, mine.tensors, options, assignment, cache)
    _remember(cache, assignment, fingerprints, exchange.rank)
    return Agreement(
        assignment.save_id,
        exchange.rank,
        options,
        mine.tensors,
        mine.boxes.layout,
        cache.rows,
        _assignment_digest(cache.rows, cache.shared) == assignment.digest,
        mine.document,
        assignment.grid,
        assignment.holders,
        global_plan[0] if global_plan else None,
    )


def describe_to_store(
    state: Any, buffers: Buffers | None, rank: int
) -> tuple[Description, LocalTensors, bytes]:
    """The state of a rank to store: its description, its boxes, and all else, encoded."""
    description = describe_local(state)
    description.tensors = choose_buffers(description.tensors, buffers, rank)
    tensors = tensors_to_store(description)
    return description, tensors, document_of(description, tensors.aliases).encode()


def _existing(storage: Storage, options: SaveOptions) -> Existing | None:
    """The checkpoint that is going to be overwritten, if there is one."""
    return existing_checkpoint(
        storage, options.format, options.format_options, overwrite=options.overwrite
    )


def _is_known(cache: PlanCache, fingerprints: Sequence[_Fingerprint]) -> bool:
    """True if all ranks hold what they held the last time; otherwise the plan is forgotten."""
    # A process that is new to the job, or has another rank, sends another key; then no rank uses
    # what it has kept.
    if [one.key for one in fingerprints] == _plan_keys(cache.plan_id, fingerprints):
        return True
    # On all ranks, so that none believes in the old plan if this save fails.
    cache.key, cache.plan, cache.local_boxes, cache.met_in = _NO_KEY, None, [], None
    return False


def _plan(
    described: Sequence[_Described],
    storage: Storage,
    options: SaveOptions,
    cache: PlanCache,
    is_known: bool,
    replaced: Existing | None,
) -> tuple[GlobalSavePlan, list[bytes]]:
    """Rank 0: who writes what? The plan, and the message to each rank."""
    world_size, writer = len(described), writer_of(options.format)
    if options.shares_place:
        check_same_place([one.url for one in described])
    check_same_options([one.options for one in described])
    if not is_known:
        cache.local_boxes = decode_local_boxes([one.local_boxes for one in described])
        cache.plan = plan_save(cache.local_boxes)
        cache.assignments = cache.plan.assignments(world_size)
    plan = cache.plan
    assert plan is not None
    told = [(one.document, one.replicas) for one in described]
    document = document_of_all(told, plan.cuts.tensors.names)
    spaces = [None if one.space is None else FileSystemSpace(*one.space) for one in described]
    kept = np.array([one.num_bytes_to_keep for one in described], dtype=np.int64)
    check_space(spaces, np.maximum(plan.bytes_per_rank(world_size) - kept, 0), storage.url)
    save_id = secrets.token_hex(6)
    grid, holders = plan_files(writer, storage, plan, document, options.format_options, world_size)
    meets = options.meets or bool(writer.object_names)
    meets = meets and world_size > 1 and not is_one_directory(spaces)
    meets = meets and cache.met_in != _parent(storage.url)
    if meets:
        storage.put(_meeting_path(save_id), b"", overwrite=False)
    comparison = _comparison(options, is_new=not is_known)
    compares = len(plan.copies.box) > 0 and any(
        comparison.levels(held.roles).any() for held in cache.local_boxes
    )
    assignments = []
    by_rank = zip(cache.assignments, plan.copies.by_rank(world_size), strict=True)
    for rows, shared in ((plan.row[one], plan.copies.row[two]) for one, two in by_rank):
        assignment = _WriteAssignment(
            save_id,
            None if is_known else rows.tobytes(),
            None if is_known else shared.tobytes(),
            _assignment_digest(rows, shared),
            compares,
            meets,
            grid,
            holders,
        )
        assignments.append(msgspec.msgpack.encode(assignment))
    made = GlobalSavePlan(save_id, options, plan.cuts, cache.assignments, document, replaced, grid)
    return made, assignments


def _comparison(options: SaveOptions, *, is_new: bool) -> Comparison:
    """The copies that are compared; ranks have the same options.

    Copies of frameworks are looked at when the layout is new.
    """
    return Comparison(options.compares, is_new, options.buffers is not None)


def _look_at_copies(
    exchange: Exchange,
    tensors: LocalTensors,
    options: SaveOptions,
    assignment: _WriteAssignment,
    cache: PlanCache,
) -> None:
    """Compare the copies that several ranks hold. Collective."""
    if assignment.shared is not None:
        cache.shared = np.frombuffer(assignment.shared, dtype=np.int64)
    if not assignment.compares:
        return
    finish_device_work(tensors.memories)
    copies = None if cache.plan is None else cache.plan.copies
    comparison = _comparison(options, is_new=assignment.rows is not None)
    compare_copies(exchange, tensors, cache.shared, comparison, copies, cache.local_boxes)


def _remember(
    cache: PlanCache,
    assignment: _WriteAssignment,
    fingerprints: Sequence[_Fingerprint],
    rank: int,
) -> None:
    """Keep the rows that this rank writes; None of the assignment: those of the last time."""
    if assignment.rows is None:
        cache.hits += 1
    else:
        cache.rows = np.frombuffer(assignment.rows, dtype=np.int64)
        cache.plan_id = assignment.save_id
        cache.key = _plan_keys(cache.plan_id, fingerprints)[rank]


def _meeting_path(save_id: str) -> str:
    """The file by which ranks see that they share a place."""
    return f"{native.data_folder(save_id)}/meeting"


def _parent(url: str) -> str:
    return url.rpartition("/")[0]


def _plan_keys(plan_id: str, fingerprints: Sequence[_Fingerprint]) -> list[bytes]:
    """The key of each rank's part of a plan, in rank order."""
    layouts = raw_digest(b"".join(one.layout for one in fingerprints))
    return [
        raw_digest(f"{plan_id} {rank} ".encode() + layouts) for rank in range(len(fingerprints))
    ]


def _assignment_digest(rows: IntArray, shared: IntArray) -> bytes:
    """A digest of the rows that a rank writes, and of those that others hold as well."""
    return raw_digest(raw_digest(rows.tobytes()) + raw_digest(shared.tobytes()))
