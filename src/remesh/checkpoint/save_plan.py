"""The plan of a save, which its ranks make together before a byte moves.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from remesh.checkpoint.arguments import check_same_options
from remesh.checkpoint.buffers import Buffers, choose_buffers
from remesh.checkpoint.collecting import lay_out_collected, plan_files
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
from remesh.checkpoint.stream_layout import RankStream, lay_out
from remesh.checkpoint.unchanged import (
    FileSource,
    History,
    OwnFile,
    keep_files,
    own_files,
    remove_paths,
    sources_of,
)
from remesh.core.collector import collector_rests
from remesh.core.geometry import IntArray
from remesh.core.integrity import raw_digest
from remesh.core.state import Description
from remesh.core.tables import BoxTable, Cuts
from remesh.events import Emit
from remesh.exchange import Exchange, run_joined, run_on_all
from remesh.formats import native
from remesh.formats.framing import Existing, Frame, Grid, Part, Saved, Writer
from remesh.formats.table import writer_of
from remesh.formats.whole_tensors import decode_files
from remesh.pipeline import Compress
from remesh.pipeline.write import CHUNK_SIZE
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

    def saved(self, parts: Sequence[Sequence[Part]] = ()) -> Saved:
        """The save as a writer sees it; with what each rank has written, once it has."""
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
class RankSavePlan:
    """The part of one rank in a save."""

    save_id: str  # names the save
    stream: RankStream  # what this rank writes
    tensors: LocalTensors  # the boxes that this rank holds, copies included
    document: bytes  # what else it knows, encoded
    global_plan: GlobalSavePlan | None  # on rank 0, what it knows of all ranks
    files: tuple[OwnFile, ...] = ()  # all files of this rank, if files may be kept
    kept: tuple[Part, ...] = ()
    """What it says of those that did not change, which are there already."""
    history: History = field(default_factory=History)  # what it knew of the last save

    @property
    def on_rank_0(self) -> GlobalSavePlan:
        """On rank 0, what it knows of all ranks."""
        assert self.global_plan is not None
        return self.global_plan

    @property
    def paths(self) -> tuple[str, ...]:
        """All data files of this rank."""
        return (*(part.path for part in self.kept), *self.stream.files.paths)

    @property
    def sources(self) -> list[FileSource]:
        """Files of the last checkpoint that files of the stream may be."""
        of_path = {file.frame.path: file for file in self.files}
        return sources_of(self.history, [of_path[path] for path in self.stream.files.paths])

    def committed(self, storage: Storage, parts: Sequence[Part]) -> History:
        """The history after this save is committed, given what this rank said of it."""
        if not self.files:
            return self.history
        num_bytes = self.tensors.boxes.num_bytes
        return self.history.after(storage, self.files, parts, num_bytes)


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


def make_save_plan(
    exchange: Exchange,
    storage: Storage,
    state: Any,
    options: SaveOptions,
    *,
    cache: PlanCache,
    emit: Emit,
    first: Callable[[], None] | None = None,
    begin: Callable[[RankSavePlan], None] | None = None,
) -> RankSavePlan:
    """Describe, compare, check and plan. Collective.

    When it returns, every rank knows its part and has begun with it. Each rank calls `first` before
    all else, and `begin` when it knows its part; all ranks raise the failure of one. The cache has
    the plan of the last save, and is filled with that of this one.
    """
    rank = _Rank(exchange, storage, options, cache, emit)

    def describe() -> bytes:
        if first is not None:
            first()
        with collector_rests():
            return rank.describe(state)

    def compare_and_tell() -> bytes:
        rank.compare(fingerprints)
        return rank.tell()

    def accept() -> bytes:
        with collector_rests():
            mine = rank.accept(assignment, fingerprints)
        agreed.append(mine)
        if begin is not None:
            begin(mine)
        return b""

    agreed: list[RankSavePlan] = []
    fingerprints = run_on_all(exchange, describe)
    reply = run_joined(exchange, compare_and_tell, rank.plan)
    assignment = msgspec.msgpack.decode(reply, type=_WriteAssignment)
    if assignment.meets:
        meet(exchange, storage, _meeting_path(assignment.save_id))
        cache.met_in = _parent(storage.url)
    rank.look_at_copies(assignment)
    try:
        run_on_all(exchange, accept)
    except BaseException:
        remove_paths(storage, [part.path for mine in agreed for part in mine.kept])
        raise
    return agreed[0]


def describe_to_store(
    state: Any, buffers: Buffers | None, rank: int
) -> tuple[Description, LocalTensors, bytes]:
    """The state of a rank to store: its description, its boxes, and all else, encoded."""
    description = describe_local(state)
    description.tensors = choose_buffers(description.tensors, buffers, rank)
    tensors = tensors_to_store(description)
    return description, tensors, document_of(description, tensors.aliases).encode()


@dataclass(slots=True)
class _Rank:
    """One rank's side of `make_save_plan`; its methods are the steps."""

    exchange: Exchange
    storage: Storage
    options: SaveOptions
    cache: PlanCache
    emit: Emit
    tensors: LocalTensors | None = field(default=None, init=False)
    local_boxes: BoxesMessage = field(default_factory=BoxesMessage, init=False)
    shares_first: bool = field(default=True, init=False)
    document: bytes = field(default=b"", init=False)
    replicas: list[str] = field(default_factory=list, init=False)
    is_known: bool = field(default=False, init=False)
    same_document: bool = field(default=False, init=False)
    replaced: Existing | None = field(default=None, init=False)
    global_plan: GlobalSavePlan | None = field(default=None, init=False)

    def describe(self, state: Any) -> bytes:
        """Describe what this rank holds; on rank 0 also look what is replaced."""
        if self.exchange.rank == 0:
            check_metadata(self.options.metadata)
            self.replaced = existing_checkpoint(
                self.storage,
                self.options.format,
                self.options.format_options,
                overwrite=self.options.overwrite,
            )
        description, self.tensors, self.document = describe_to_store(
            state, self.options.buffers, self.exchange.rank
        )
        self.local_boxes = encode_local_boxes(self.tensors.boxes, self.tensors.roles)
        self.replicas = [
            element.unique_name for element in description.objects if not element.is_main_replica
        ]
        self.emit("save.described")
        layout, shared = self.local_boxes.layout, self.local_boxes.digest
        return b"".join((layout, raw_digest(self.document), self.cache.key, shared))

    def compare(self, fingerprints: Sequence[bytes]) -> None:
        """Do all ranks hold what they held the last time, and have the same values?"""
        # A process that is new to the job, or has another rank, sends another key; then no rank
        # uses what it has kept.
        cache, kept = self.cache, [fingerprint[32:48] for fingerprint in fingerprints]
        self.is_known = kept == _plan_keys(cache.plan_id, fingerprints)
        if not self.is_known:
            # On all ranks, so that none believes in the old plan if this save fails.
            cache.key, cache.plan, cache.local_boxes, cache.met_in = _NO_KEY, None, [], None
        shared = [fingerprint[48:] for fingerprint in fingerprints]
        self.shares_first = shared.index(self.local_boxes.digest) == self.exchange.rank
        self.same_document = len({fingerprint[16:32] for fingerprint in fingerprints}) == 1

    def tell(self) -> bytes:
        """The message to rank 0 of what it does not know yet."""
        assert self.tensors is not None
        space = self.storage.space()
        boxes = self.local_boxes if self.shares_first else self.local_boxes.without_shared()
        if self.is_known:
            boxes = BoxesMessage()
        sends_document = self.exchange.rank == 0 or not self.same_document
        num_bytes_to_keep = self.cache.history.num_bytes_to_keep(self.local_boxes.layout)
        return msgspec.msgpack.encode(
            _Described(
                boxes,
                self.document if sends_document else b"",
                self.replicas,
                self.storage.url,
                (
                    self.options.buffers,
                    self.options.compares,
                    self.options.format,
                    self.options.compress,
                ),
                None if space is None else (space.identity, space.free_bytes, space.directory),
                num_bytes_to_keep if self.options.keeps else 0,
            )
        )

    def plan(self, replies: list[bytes]) -> list[bytes]:
        """Rank 0: who writes what?"""
        described = [msgspec.msgpack.decode(reply, type=_Described) for reply in replies]
        cache, world_size = self.cache, self.exchange.world_size
        writer = writer_of(self.options.format)
        if self.options.shares_place:
            check_same_place([one.url for one in described])
        check_same_options([one.options for one in described])
        if not self.is_known:
            cache.local_boxes = decode_local_boxes([one.local_boxes for one in described])
            cache.plan = plan_save(cache.local_boxes)
            cache.assignments = cache.plan.assignments(world_size)
        plan = cache.plan
        assert plan is not None
        told = [(one.document, one.replicas) for one in described]
        document = document_of_all(told, plan.cuts.tensors.names)
        spaces = [None if one.space is None else FileSystemSpace(*one.space) for one in described]
        kept = np.array([one.num_bytes_to_keep for one in described], dtype=np.int64)
        num_bytes = np.maximum(plan.bytes_per_rank(world_size) - kept, 0)
        check_space(spaces, num_bytes, self.storage.url)
        save_id = secrets.token_hex(6)
        grid, holders = plan_files(
            writer, self.storage, plan, document, self.options.format_options, world_size
        )
        self.global_plan = GlobalSavePlan(
            save_id, self.options, plan.cuts, cache.assignments, document, self.replaced, grid
        )
        meets = self.options.meets or bool(writer.object_names)
        meets = meets and world_size > 1 and not is_one_directory(spaces)
        meets = meets and cache.met_in != _parent(self.storage.url)
        if meets:
            self.storage.put(_meeting_path(save_id), b"", overwrite=False)
        self.emit("save.planned")
        comparison = self.comparison(not self.is_known)
        compares = len(plan.copies.box) > 0 and any(
            comparison.levels(held.roles).any() for held in cache.local_boxes
        )
        assignments = []
        by_rank = zip(cache.assignments, plan.copies.by_rank(world_size), strict=True)
        for rows, shared in ((plan.row[one], plan.copies.row[two]) for one, two in by_rank):
            assignment = _WriteAssignment(
                save_id,
                None if self.is_known else rows.tobytes(),
                None if self.is_known else shared.tobytes(),
                _assignment_digest(rows, shared),
                compares,
                meets,
                grid,
                holders,
            )
            assignments.append(msgspec.msgpack.encode(assignment))
        return assignments

    def comparison(self, is_new: bool) -> Comparison:
        """The copies that are compared; ranks have the same options.

        Copies of frameworks are looked at when the layout is new.
        """
        return Comparison(self.options.compares, is_new, self.options.buffers is not None)

    def look_at_copies(self, assignment: _WriteAssignment) -> None:
        """Compare the copies that several ranks hold. Collective."""
        cache = self.cache
        if assignment.shared is not None:
            cache.shared = np.frombuffer(assignment.shared, dtype=np.int64)
        if not assignment.compares:
            return
        assert self.tensors is not None
        finish_device_work(self.tensors.memories)
        copies = None if cache.plan is None else cache.plan.copies
        comparison = self.comparison(assignment.rows is not None)
        compare_copies(
            self.exchange, self.tensors, cache.shared, comparison, copies, cache.local_boxes
        )

    def accept(self, assignment: _WriteAssignment, fingerprints: Sequence[bytes]) -> RankSavePlan:
        """Lay out my file."""
        cache = self.cache
        if assignment.rows is None:
            cache.hits += 1
        else:
            cache.rows = np.frombuffer(assignment.rows, dtype=np.int64)
            cache.plan_id = assignment.save_id
            cache.key = _plan_keys(cache.plan_id, fingerprints)[self.exchange.rank]
        assert _assignment_digest(cache.rows, cache.shared) == assignment.digest, (
            f"rank {self.exchange.rank} would write other boxes than rank 0 has assigned to it"
        )
        assert self.tensors is not None
        # All of them: a live reshard reads also what other ranks' files hold.
        finish_device_work(self.tensors.memories)
        writer, rows = writer_of(self.options.format), cache.rows
        if self.options.keeps and writer.has_digests:
            return self.accept_files(writer, assignment)
        save_id = assignment.save_id

        def frames_of(boxes: BoxTable) -> Sequence[Frame]:
            return writer.frames(boxes, rows, self.exchange.rank, save_id, assignment.grid)

        if assignment.holders:
            holders = assignment.holders
            stream = lay_out_collected(frames_of, self.tensors, rows, holders, self.exchange)
            is_final = decode_files(assignment.grid).names == "final"
            files = replace(stream.files, replaces=is_final and self.options.overwrite)
            stream = replace(stream, files=files)
        else:
            frames = frames_of(self.tensors.boxes)
            stream = lay_out(frames, self.tensors, compress=self.options.compress)
        return RankSavePlan(save_id, stream, self.tensors, self.document, self.global_plan)

    def accept_files(self, writer: Writer, assignment: _WriteAssignment) -> RankSavePlan:
        """Lay out my files, keeping those that did not change."""
        tensors, save_id = self.tensors, assignment.save_id
        assert tensors is not None
        layout = self.local_boxes.layout
        history = self.cache.history.of_layout(layout, tensors.is_frozen)
        place = (self.exchange.rank, save_id, assignment.grid)
        files = own_files(writer, tensors, self.cache.rows, history.group, place)
        kept = keep_files(self.storage, history, files, tensors, at_once=self.options.meets)
        there = {part.path for part in kept}
        left = [file for file in files if file.frame.path not in there]
        stream = lay_out(
            [file.frame for file in left],
            tensors,
            [file.numbers for file in left],
            CHUNK_SIZE,
            self.options.compress,
        )
        return RankSavePlan(
            save_id,
            stream,
            tensors,
            self.document,
            self.global_plan,
            tuple(files),
            tuple(kept),
            history,
        )


def _meeting_path(save_id: str) -> str:
    """The file by which ranks see that they share a place."""
    return f"{native.data_folder(save_id)}/meeting"


def _parent(url: str) -> str:
    return url.rpartition("/")[0]


def _plan_keys(plan_id: str, fingerprints: Sequence[bytes]) -> list[bytes]:
    """The key of each rank's part of a plan, in rank order."""
    layouts = raw_digest(b"".join(fingerprint[:16] for fingerprint in fingerprints))
    return [
        raw_digest(f"{plan_id} {rank} ".encode() + layouts) for rank in range(len(fingerprints))
    ]


def _assignment_digest(rows: IntArray, shared: IntArray) -> bytes:
    """A digest of the rows that a rank writes, and of those that others hold as well."""
    return raw_digest(raw_digest(rows.tobytes()) + raw_digest(shared.tobytes()))
