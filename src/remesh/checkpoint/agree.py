"""The agreement of the ranks of a save, before a byte moves: who writes what.

Every rank tells rank 0 what it holds. Rank 0 unites that, checks that every element is held exactly
once and that there is room, decides who writes what, and sends each rank its write assignment.

Nearly all of it is what another rank holds as well, or what the rank held at the last save. So a
rank first sends digests, and rank 0 asks for what it has not got: the boxes of all ranks, unless
they are those of the plan that it keeps (`PlanCache`); and of equal values, as of equal lists of
tensors, those of the first rank that has them. Mostly it asks for nothing, and no layout crosses
the network.

A process keeps the part of one rank in one plan, and says so: if any process has another rank now,
or was not there when the plan was made, rank 0 plans anew.

Then each rank lays out its files, as the writer of the format says. In a storage in which an object
is written by one process, and for files that hold checksums of their tensors, each file has one
writer, which collects its tensors (`remesh.pipeline.collect`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np

from remesh.checkpoint.arguments import check_same_options
from remesh.checkpoint.buffers import Buffers, choose_buffers
from remesh.checkpoint.copies import Compares, Comparison, compare_copies, roles_of_copies
from remesh.checkpoint.local import (
    LocalTensors,
    describe_local,
    describe_weights,
    finish_device_work,
    tensors_to_store,
)
from remesh.checkpoint.local_boxes import BoxesMessage, decode_local_boxes, encode_local_boxes
from remesh.checkpoint.replacing import existing_checkpoint
from remesh.checkpoint.sharing import check_same_place, check_space, check_visible, is_one_directory
from remesh.checkpoint.stream_layout import RankStream, lay_out
from remesh.checkpoint.unchanged import History, OwnFile, keep_frozen, own_files, remove_paths
from remesh.core import values
from remesh.core.collector import gc_paused
from remesh.core.geometry import BoolArray, Box, IntArray
from remesh.core.index import Index
from remesh.core.integrity import raw_digest
from remesh.core.memory import Memory
from remesh.core.state import Description
from remesh.core.tables import BoxTable
from remesh.errors import CoverageError, NameCollisionError, StateError, StorageError
from remesh.events import Emit
from remesh.exchange import Exchange, Outcome, join_outcomes, run_joined, share_outcomes
from remesh.formats import huggingface, native
from remesh.formats.native import ValuesDocument
from remesh.formats.table import writer_of
from remesh.formats.whole_tensors import decode_files, give_to_ranks
from remesh.formats.writer import Existing, Frame, Part, Saved, Writer
from remesh.pipeline import Collection, Compress
from remesh.pipeline.collect import SpreadMemory
from remesh.pipeline.write import CHUNK_SIZE
from remesh.planner import LocalBoxes, SavePlan, plan_save
from remesh.storage import FileSystemSpace, Storage


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of the caller of a save."""

    overwrite: bool = False  # replace a checkpoint that is there
    metadata: Mapping[str, object] = field(default_factory=dict)  # what to record beside the state
    shares_place: bool = True
    """Whether all ranks save to one place, as all do except snapshots in the memory of nodes."""
    in_background: bool = False
    """Whether the ranks will communicate through the place alone, so that it must be known
    beforehand that they share it."""
    buffers: Buffers | None = None
    """Whose buffers of modules are stored where ranks differ; None if they must not."""
    verify_replicas: bool = False  # compare all bytes of all copies
    compares: Compares = "whole"  # which copies of tensors are compared otherwise
    format: str = native.FORMAT_NAME  # name of the format that is written
    format_options: Mapping[str, object] = field(default_factory=dict)
    """Options of the format; those of rank 0 count."""
    keeps: bool = False
    """Whether frozen files that did not change since the last save of the `PlanCache` are kept."""
    compress: Compress | None = None  # how data files are compressed; None if they are not

    @property
    def compared(self) -> Compares:
        """Which copies of tensors are compared."""
        return "all" if self.verify_replicas else self.compares


@dataclass(frozen=True, slots=True, eq=False)
class GlobalSavePlan:
    """The knowledge of rank 0 about a save."""

    options: SaveOptions  # what the caller asked for
    saved: Saved  # the save as a writer sees it, yet without what the ranks have written
    replaced: Existing | None  # the checkpoint that is going to be overwritten, if there is one


@dataclass(frozen=True, slots=True, eq=False)
class RankSavePlan:
    """The part of one rank in a save that the ranks have agreed on."""

    save_id: str  # names the save
    options: SaveOptions  # what the caller asked for
    tensors: LocalTensors  # the boxes that this rank holds, copies included
    document: bytes  # its values, encoded
    stream: RankStream  # what it writes
    layout: bytes  # digest of its boxes
    frozen: OwnFile | None  # its file of frozen tensors, if that may be kept
    kept: Sequence[Part]
    """What it says of those that did not change, which are there already."""
    global_plan: GlobalSavePlan | None = None  # on rank 0, what it knows of all ranks

    @property
    def on_rank_0(self) -> GlobalSavePlan:
        """On rank 0, what it knows of all ranks."""
        assert self.global_plan is not None
        return self.global_plan

    @property
    def paths(self) -> list[str]:
        """All data files of this rank."""
        return [*(part.path for part in self.kept), *self.stream.files.paths]

    def remove_kept(self, storage: Storage) -> None:
        """Remove what is there already, if the save is given up before it has begun."""
        remove_paths(storage, [part.path for part in self.kept])

    def committed(self, storage: Storage, parts: Sequence[Part]) -> History:
        """The history after this save is committed, given what this rank said of it."""
        return History.after(self.layout, storage, self.frozen, parts)


@dataclass(slots=True)
class PlanCache:
    """The plan of the last save of a layout, kept by a `Saver`."""

    plan_id: str = ""  # names the plan: the save that it was made for; empty if there is none
    rank: int = 0  # the rank whose part this is
    rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rows of this rank's boxes that it writes."""
    shared: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rows of this rank's boxes that other ranks hold as well."""
    apart: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Which of these ranks hold that no mesh joins with this one or another."""
    layouts: list[tuple[bytes, list[int]]] = field(default_factory=list)
    """On rank 0, for each rank a digest of what it holds, and its meshes."""
    local_boxes: list[LocalBoxes] = field(default_factory=list)  # on rank 0, what each rank holds
    plan: SavePlan | None = None  # on rank 0, the plan
    assignments: list[IntArray] = field(default_factory=list)  # on rank 0, rows of the plan by rank
    checked_directory: str | None = None
    """On rank 0, the directory in which ranks last found that they share it; None before."""
    hits: int = 0  # how often it was used
    history: History = field(default_factory=History)
    """What this rank knows of the last save that was committed."""


class _Summary(msgspec.Struct, frozen=True):
    """First message of a rank to rank 0."""

    plan: tuple[str, int]  # the plan of its cache, and the rank whose part it keeps
    layout: bytes  # digest of its boxes
    meshes: list[int]  # lowest ranks of the meshes that it is in
    shared: bytes  # digest of what it has in common with other ranks (`BoxesMessage`)
    document: bytes  # digest of its values
    replicas: list[str]  # elements of sharded objects of which it has another replica
    url: str
    options: tuple[str | None, str, str, str | None]
    space: tuple[str, int, str, str] | None
    num_bytes_to_keep: int


class _Request(msgspec.Struct, frozen=True, tag=True):
    """Answer of rank 0 to a rank, if it has to know more of some rank."""

    boxes: bool
    shared: bool
    document: bool


class _Details(msgspec.Struct, frozen=True):
    """Second message of a rank to rank 0; empty for what it did not ask for."""

    boxes: BoxesMessage = BoxesMessage()
    document: bytes = b""


class _WriteAssignment(msgspec.Struct, frozen=True, tag=True):
    """Answer of rank 0 to a rank."""

    save_id: str  # names the save
    own: tuple[bytes, bytes, bytes] | None
    """`PlanCache.rows`, `shared` and `apart` of the rank as bytes; None if the rank knows them."""
    compares: bool  # whether there is anything to compare
    checks_place: bool  # whether the ranks find out whether they share the place
    file_plan: bytes  # what the writer of the format makes of the boxes
    holders: bytes  # what all ranks hold, as an index, if each file has one writer


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What a rank holds."""

    tensors: LocalTensors
    boxes: BoxesMessage
    meshes: list[int]  # lowest ranks of its meshes
    document: bytes  # its values, encoded
    replicas: list[str]  # elements of sharded objects of which it has another replica

    @classmethod
    def of(cls, state: Any, buffers: Buffers | None, rank: int) -> Self:
        description, tensors, document = describe_to_store(state, buffers, rank)
        replicas = [one.unique_name for one in description.objects if not one.is_main_replica]
        boxes = encode_local_boxes(tensors.boxes, tensors.roles)
        meshes = sorted(set(description.meshes.values()))
        return cls(tensors, boxes, meshes, document, replicas)

    def summary(self, storage: Storage, options: SaveOptions, cache: PlanCache) -> _Summary:
        space, layout = storage.space(), self.boxes.layout
        return _Summary(
            (cache.plan_id, cache.rank),
            layout,
            self.meshes,
            self.boxes.digest,
            raw_digest(self.document),
            self.replicas,
            storage.url,
            (options.buffers, options.compared, options.format, options.compress),
            None if space is None else astuple(space),
            cache.history.num_bytes_to_keep(layout) if options.keeps else 0,
        )

    def details(self, request: _Request) -> bytes:
        boxes = self.boxes if request.shared else msgspec.structs.replace(self.boxes, shared=b"")
        document = self.document if request.document else b""
        return msgspec.msgpack.encode(
            _Details(boxes if request.boxes else BoxesMessage(), document)
        )


def agree(
    exchange: Exchange,
    storage: Storage,
    state: Any,
    options: SaveOptions,
    *,
    cache: PlanCache,
    emit: Emit,
) -> RankSavePlan:
    """Describe, compare, check and plan. Collective; all ranks raise the failure of one.

    The cache has the plan of the last save, and gets that of this one.
    """
    with Outcome() as described:
        with gc_paused():
            planner = _Planner(storage, options, cache, emit) if exchange.rank == 0 else None
            own = describe_weights(state) if options.format == huggingface.NAME else state
            mine = _Held.of(own, options.buffers, exchange.rank)
        emit("save.described")
        described.reply = msgspec.msgpack.encode(mine.summary(storage, options, cache))

    def look(replies: list[bytes]) -> list[bytes]:
        assert planner is not None
        return planner.look(replies, mine.document)

    def plan(replies: list[bytes]) -> list[bytes]:
        assert planner is not None
        return planner.plan([msgspec.msgpack.decode(one, type=_Details) for one in replies])

    answer = msgspec.msgpack.decode(
        join_outcomes(exchange, described, look), type=_Request | _WriteAssignment
    )
    if isinstance(answer, _Request):
        tell = partial(mine.details, answer)
        answer = msgspec.msgpack.decode(run_joined(exchange, tell, plan), type=_WriteAssignment)
    if answer.own is None:
        cache.hits += 1
    else:
        cache.rows, cache.shared = (np.frombuffer(one, np.int64) for one in answer.own[:2])
        cache.apart = np.frombuffer(answer.own[2], np.bool_)
        cache.plan_id, cache.rank = answer.save_id, exchange.rank
    planned = _compare_and_plan(exchange, storage, mine, options, answer, cache)
    return replace(planned, global_plan=None if planner is None else planner.made)


def _compare_and_plan(
    exchange: Exchange,
    storage: Storage,
    mine: _Held,
    options: SaveOptions,
    assigned: _WriteAssignment,
    cache: PlanCache,
) -> RankSavePlan:
    """Compare copies, check the place, and lay out this rank's files. Collective."""
    planned: RankSavePlan | None = None
    probe = _probe_path(assigned.save_id)
    try:
        if assigned.compares:
            comparison = _comparison(options, is_new=assigned.own is not None)
            copies = None if cache.plan is None else cache.plan.copies
            rows = cache.shared
            roles = roles_of_copies(mine.tensors.roles[rows], cache.apart)
            compare_copies(
                exchange, mine.tensors, (rows, roles), comparison, copies, cache.local_boxes
            )
        with Outcome() as found:
            if assigned.checks_place and exchange.rank:
                check_visible(storage, exchange.rank, probe)
            planned = _plan_rank(exchange, storage, mine, options, assigned, cache)
        share_outcomes(exchange, found)
    except BaseException:
        if planned is not None:
            planned.remove_kept(storage)
        raise
    finally:
        if assigned.checks_place and not exchange.rank:
            with suppress(StorageError):  # an orphan is recognised by its name
                storage.delete(probe)
    if assigned.checks_place:
        cache.checked_directory = _parent(storage.url)
    assert planned is not None
    return planned


def describe_to_store(
    state: Any, buffers: Buffers | None, rank: int
) -> tuple[Description, LocalTensors, bytes]:
    """The state of a rank to store: its description, its boxes, and all else, encoded."""
    description = describe_local(state)
    description.tensors = choose_buffers(description.tensors, buffers, rank)
    tensors = tensors_to_store(description)
    return description, tensors, _document_of(description, tensors.aliases).encode()


class _Planner:
    """Rank 0, which hears what the ranks hold and decides who writes what."""

    def __init__(
        self, storage: Storage, options: SaveOptions, cache: PlanCache, emit: Emit
    ) -> None:
        self._storage = storage
        self._options = replace(options, metadata=_plain_metadata(options.metadata))
        self._cache = cache
        self._emit = emit
        self._summaries: list[_Summary] = []
        self._document = b""  # that of rank 0
        self._replaced = existing_checkpoint(
            storage, options.format, options.format_options, overwrite=options.overwrite
        )
        self.made: GlobalSavePlan | None = None

    def look(self, replies: Sequence[bytes], document: bytes) -> list[bytes]:
        """What to ask the ranks; if that is nothing, their assignments."""
        summaries = [msgspec.msgpack.decode(reply, type=_Summary) for reply in replies]
        self._summaries, self._document, cache = summaries, document, self._cache
        if self._options.shares_place:
            check_same_place([one.url for one in summaries])
        check_same_options([one.options for one in summaries])
        is_known = (
            cache.plan_id != ""
            and [one.plan for one in summaries]
            == [(cache.plan_id, rank) for rank in range(len(summaries))]
            and [(one.layout, one.meshes) for one in summaries] == cache.layouts
        )
        if not is_known:
            cache.plan_id, cache.checked_directory = "", None  # also if this save fails
        boxes = _are_first([one.shared for one in summaries])
        documents = _are_first([one.document for one in summaries])
        documents[0] = False  # it is here
        requests = [
            _Request(not is_known, is_first, document)
            for is_first, document in zip(boxes, documents, strict=True)
        ]
        if is_known and not any(documents):
            return self.plan([_Details()] * len(summaries))
        return [msgspec.msgpack.encode(request) for request in requests]

    def plan(self, details: Sequence[_Details]) -> list[bytes]:
        """The assignments of the ranks, given what they were asked for."""
        summaries, options = self._summaries, self._options
        storage, cache, writer = self._storage, self._cache, writer_of(options.format)
        world_size, save_id = len(summaries), secrets.token_hex(6)
        is_new = not cache.plan_id
        if is_new:
            cache.local_boxes = decode_local_boxes([one.boxes for one in details])
            cache.plan = plan_save(cache.local_boxes, [one.meshes for one in summaries])
            cache.assignments = cache.plan.assignments(world_size)
            cache.layouts = [(one.layout, one.meshes) for one in summaries]
        plan = cache.plan
        assert plan is not None
        encoded = [self._document, *(one.document for one in details[1:])]
        replicas = [one.replicas for one in summaries]
        document = _document_of_all(encoded, replicas, plan.cuts.tensors.names)
        spaces = [None if one.space is None else FileSystemSpace(*one.space) for one in summaries]
        kept = np.array([one.num_bytes_to_keep for one in summaries], dtype=np.int64)
        num_bytes = np.maximum(plan.bytes_per_rank(world_size) - kept, 0)
        check_space(spaces, num_bytes, storage.url, options.compress)
        how = options.format_options
        files, holders = _plan_files(writer, storage, plan, document, how, world_size)
        checks_place = (
            (options.in_background or bool(writer.object_names))
            and world_size > 1
            and not is_one_directory(spaces)
            and cache.checked_directory != _parent(storage.url)
        )
        if checks_place:
            storage.put(_probe_path(save_id), b"", overwrite=False)
        comparison = _comparison(options, is_new=is_new)
        compares = bool(plan.copies.apart.any()) or (
            len(plan.copies.box) > 0
            and any(comparison.levels(held.roles).any() for held in cache.local_boxes)
        )
        answers = []
        for rows, copies in zip(cache.assignments, plan.copies.by_rank(world_size), strict=True):
            shared, apart = plan.copies.row[copies], plan.copies.apart[copies]
            own = (plan.row[rows].tobytes(), shared.tobytes(), apart.tobytes()) if is_new else None
            answer = _WriteAssignment(save_id, own, compares, checks_place, files, holders)
            answers.append(msgspec.msgpack.encode(answer))
        saved = Saved(
            save_id,
            plan.cuts,
            cache.assignments,
            document,
            files,
            options.metadata,
            world_size,
            options=how,
        )
        self.made = GlobalSavePlan(options, saved, self._replaced)
        self._emit("save.planned")
        return answers


def _plan_files(
    writer: Writer,
    storage: Storage,
    plan: SavePlan,
    document: ValuesDocument,
    options: Mapping[str, object],
    world_size: int,
) -> tuple[bytes, bytes]:
    """Rank 0: the plan of a format's files; what all ranks hold, if each file has one writer."""
    file_plan = writer.plan(plan.cuts, document, options)
    if not writer.object_names or (storage.shares_files and not writer.has_checksums):
        return file_plan, b""
    is_final = writer.object_names == "final" and len(decode_files(file_plan).files) == 1
    names = "renamed" if storage.shares_files else "final" if is_final else "by_save"
    return give_to_ranks(file_plan, world_size, names), plan.index_of_holders(world_size).encode()


def _are_first(digests: Sequence[bytes]) -> list[bool]:
    """Whether each rank is the first that has its digest."""
    first: dict[bytes, int] = {}
    return [first.setdefault(digest, rank) == rank for rank, digest in enumerate(digests)]


def _comparison(options: SaveOptions, *, is_new: bool) -> Comparison:
    """The copies that are compared; those of frameworks are looked at when the layout is new."""
    return Comparison(options.compared, is_new, options.buffers is not None)


def _probe_path(save_id: str) -> str:
    """The file by which ranks see that they share a place."""
    return f"{native.data_folder(save_id)}/meeting"


def _parent(url: str) -> str:
    return url.rpartition("/")[0]


# ---------------------------------------------------------------------------------------------
# The files of a rank
# ---------------------------------------------------------------------------------------------


def _plan_rank(
    exchange: Exchange,
    storage: Storage,
    held: _Held,
    options: SaveOptions,
    assigned: _WriteAssignment,
    cache: PlanCache,
) -> RankSavePlan:
    """Lay out this rank's files, and keep those that did not change since the save before."""
    tensors, rows, writer = held.tensors, cache.rows, writer_of(options.format)
    # All of them: a live reshard reads also what other ranks' files hold.
    finish_device_work(tensors.memories)
    save_id, rank, file_plan = assigned.save_id, exchange.rank, assigned.file_plan
    frozen: OwnFile | None = None
    kept: list[Part] = []
    layout = held.boxes.layout

    def frames_of(boxes: BoxTable) -> Sequence[Frame]:
        return writer.frames(boxes, rows, rank, save_id, file_plan)

    if options.keeps and writer.has_record:
        changing, frozen = own_files(writer, tensors, rows, (rank, save_id, file_plan))
        kept = keep_frozen(storage, cache.history, frozen, tensors)
        left = [file for file in (changing, None if kept else frozen) if file is not None]
        frames, numbers = [file.frame for file in left], [file.numbers for file in left]
        stream = lay_out(frames, tensors, numbers, CHUNK_SIZE, options.compress)
    elif not assigned.holders:
        stream = lay_out(frames_of(tensors.boxes), tensors, compress=options.compress)
    else:
        stream = _lay_out_collected(frames_of, tensors, rows, assigned.holders, exchange)
        is_final = decode_files(file_plan).names == "final"
        replaces = is_final and options.overwrite
        stream = replace(stream, files=replace(stream.files, replaces=replaces))
    return RankSavePlan(save_id, options, tensors, held.document, stream, layout, frozen, kept)


def _lay_out_collected(
    frames_of: Callable[[BoxTable], Sequence[Frame]],
    tensors: LocalTensors,
    rows: IntArray,
    holders: bytes,
    exchange: Exchange,
) -> RankStream:
    """The stream of a rank that writes whole tensors of which others (`holders`) hold boxes."""
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


# ---------------------------------------------------------------------------------------------
# What is not a tensor
# ---------------------------------------------------------------------------------------------


def _document_of(description: Description, aliases: Mapping[str, str]) -> ValuesDocument:
    """All that a rank knows that is not a tensor."""
    document = ValuesDocument(
        values={
            name: msgspec.Raw(values.encode(value, name))
            for name, value in description.values.items()
        },
        lists=dict(description.merged_lists),
        sequences=[(list(path), kind) for path, kind in description.sequences.items()],
        aliases=dict(aliases),
        unchecked=list(description.unchecked) or msgspec.UNSET,
    )
    for element in description.objects:
        if element.is_main_replica:
            name = element.unique_name
            value = values.encode_object(element.data, name)
            stored = native.ObjectElement(
                element.name, element.global_shape, element.global_offset, msgspec.Raw(value)
            )
            if bytes(document.objects.setdefault(name, stored).value) != value:
                raise NameCollisionError(
                    f"{name}: this element has two different main replicas\n"
                    "Rename one of them, or give it its own offset"
                )
    for name, path in description.paths.items():
        document.set_path(name, path)
    for name in (*(entry.name for entry in description.tensors), *document.objects):
        if name not in description.paths:
            document.set_path(name, (name,))
    return document


def _document_of_all(
    documents: Sequence[bytes], replicas: Sequence[Sequence[str]], names: Sequence[str]
) -> ValuesDocument:
    """The values of all ranks, which go together with each other and with names of tensors.

    Of each rank, in rank order: its encoded document, empty if it is that of another rank; and the
    elements of sharded objects of which it has another replica than the main one.
    """
    document = native.merge_documents(
        [
            ValuesDocument.decode(encoded, "values") if encoded else ValuesDocument()
            for encoded in documents
        ]
    )
    _check_names(names, document)
    _check_replicas(document, replicas)
    return document


def _check_names(tensor_names: Iterable[str], document: ValuesDocument) -> None:
    """Check that a name is a tensor or a value or an alias, on whichever ranks."""
    tensors = set(tensor_names)
    for kind, names in (("value", document.values), ("tied tensor", document.aliases)):
        both = tensors.intersection(names)
        if both:
            name = min(both)
            raise StateError(
                f"{name}: a tensor of its own on one rank and a {kind} on another\nGive them "
                "different names, or make the ranks agree"
            )


def _check_replicas(document: ValuesDocument, replicas: Sequence[Sequence[str]]) -> None:
    """Check that every element of a sharded object has a main replica."""
    for rank, names in enumerate(replicas):
        for name in names:
            if name not in document.objects:
                raise CoverageError(
                    f"{name}: rank {rank} has a replica of this element, but no rank its main "
                    "replica\n"
                    "Exactly one rank must have replica_id 0"
                )


def _plain_metadata(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """What is recorded beside the state, checked: a JSON object, without classes of the caller."""
    try:
        plain = msgspec.json.decode(msgspec.json.encode(metadata))
        same = plain == dict(metadata)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise StateError(f"metadata must be a JSON object: {error}") from error
    if not same:
        raise StateError(
            "metadata must be a JSON object\n"
            "Only strings as keys, and str, int, float, bool, None, lists and dicts as values"
        )
    return dict(plain)
