"""One save, from top to bottom.

Two rounds of messages, whatever the size of the world:

1. Every rank describes what it holds. Rank 0 unites the descriptions, checks that every element is
   held exactly once and that there is room, and tells each rank what to write.
2. Every rank writes its file and makes it durable. Rank 0 gets the positions and digests, writes
   values and index, and then the commit record: the one atomic step that makes the checkpoint
   exist.

A rank that fails takes part in the round all the same, with its error in place of its result; all
ranks raise it, and rank 0 removes what was written.
"""

from __future__ import annotations

import datetime as dt
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from remesh import __version__, values
from remesh.checkpoint.local import (
    LocalTensors,
    describe_local,
    exchange_of,
    sample_digests,
    tensors_to_store,
)
from remesh.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DivergedReplicaError,
    NoSpaceError,
    StateError,
    StorageError,
)
from remesh.events import Event, OnEvent, ignore
from remesh.exchange import Exchange, run_joined
from remesh.formats import native
from remesh.geometry import IntArray
from remesh.index import BoxTable, decode_columns, encode_columns
from remesh.integrity import hex_digest
from remesh.pipeline import FilePiece, write_file
from remesh.planner import Holdings, SavePlan, plan_save
from remesh.state import Description
from remesh.storage import FileSystemSpace, Storage, open_storage


def save(
    state: Any,
    path: Any,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
    group: Any = None,
    on_event: OnEvent = ignore,
) -> None:
    """Save a state. Collective: every rank of the group calls it with its part of the state.

    Returns when the checkpoint is committed and durable.

    Args:
        state: A nested dict whose leaves are modules, optimizers, objects with a state dict,
            tensors, arrays, plain values or remesh's descriptions; or one module or object.
        path: Directory of the checkpoint, the same on every rank; it need not exist.
        overwrite: Replace a checkpoint that is there. Readers see the old one until the new one is
            committed; its files are removed afterwards.
        metadata: What to record beside the state: a JSON object, taken from rank 0.
        group: A torch process group or an `Exchange`; by default torch's default group if it is
            initialised, else this process alone.
        on_event: Told of the moments in `remesh.events.SAVE_POINTS`.

    Raises:
        StateError: If the state cannot be stored, ranks disagree, or a tensor has holes.
        CheckpointExistsError: If there is a checkpoint and `overwrite` is false.
        NoSpaceError: If there is too little room, which is found before writing where possible.
        StorageError: If the storage fails.
        ExchangeError: If a rank died. Whether the save was committed is then seen by opening it.
    """
    exchange = exchange_of(group)
    storage = open_storage(path)
    saving = _Saving(exchange, storage, on_event, overwrite, dict(metadata or {}))
    order = run_joined(exchange, lambda: saving.describe(state), saving.plan)
    run_joined(exchange, lambda: saving.write(order), saving.commit, saving.remove_files)
    saving.emit("save.done")


class _Described(msgspec.Struct, frozen=True):
    """What a rank tells rank 0 in the first round."""

    holdings: bytes
    samples: list[str]
    document: bytes
    space: tuple[str, int] | None


class _Order(msgspec.Struct, frozen=True):
    """What rank 0 tells a rank to write: rows of its holdings, in file order, as int64 bytes."""

    save_id: str
    rows: bytes


@dataclass(slots=True)
class _Coordination:
    """What rank 0 remembers between the rounds."""

    save_id: str
    plan: SavePlan
    assignments: list[IntArray]
    document: native.ValuesDocument


@dataclass(slots=True)
class _Saving:
    """One save on one rank; its methods are the steps of the rounds."""

    exchange: Exchange
    storage: Storage
    on_event: OnEvent
    overwrite: bool
    metadata: dict[str, object]
    tensors: LocalTensors | None = field(default=None, init=False)
    coordination: _Coordination | None = field(default=None, init=False)
    replaced: native.CommitRecord | None = field(default=None, init=False)

    def emit(self, point: str, num_bytes: int = 0) -> None:
        """Tell the listener."""
        self.on_event(Event(self.exchange.rank, point, num_bytes))

    # ----- round 1 -----

    def describe(self, state: Any) -> bytes:
        """Every rank: what do I hold?"""
        if self.exchange.rank == 0:
            self._look_for_existing()
            _check_metadata(self.metadata)
        description = describe_local(state)
        self.tensors = tensors_to_store(description)
        space = self.storage.space()
        self.emit("save.described")
        return msgspec.msgpack.encode(
            _Described(
                encode_columns({**self.tensors.boxes.columns(), "role": self.tensors.roles}),
                sample_digests(self.tensors) if self.exchange.world_size > 1 else [],
                document_of(description, self.tensors.aliases).encode(),
                None if space is None else (space.identity, space.free_bytes),
            )
        )

    def _look_for_existing(self) -> None:
        try:
            self.replaced = native.read_record(self.storage)
        except CheckpointNotFoundError:
            return
        except CheckpointError:
            # A damaged record is replaced like any other, but what it refers to is unknown.
            if not self.overwrite:
                raise
            return
        if not self.overwrite:
            raise CheckpointExistsError(
                f"{self.storage.url}: there is a checkpoint already, saved "
                f"{self.replaced.created}. Save to another path, or pass overwrite=True to "
                "replace it."
            )

    def plan(self, replies: list[bytes]) -> list[bytes]:
        """Rank 0: who writes what?"""
        described = [msgspec.msgpack.decode(reply, type=_Described) for reply in replies]
        holdings = []
        for rank, one in enumerate(described):
            columns, _ = decode_columns(one.holdings, f"holdings of rank {rank}")
            holdings.append(Holdings(BoxTable.from_columns(columns), columns["role"]))
        check_samples(holdings, [one.samples for one in described])
        plan = plan_save(holdings)
        document = native.merge_documents(
            [native.ValuesDocument.decode(one.document, "values") for one in described]
        )
        _check_names(plan, document)
        world_size = self.exchange.world_size
        _check_space(
            [None if one.space is None else FileSystemSpace(*one.space) for one in described],
            plan.bytes_per_rank(world_size),
        )
        assignments = plan.assignments(world_size)
        save_id = secrets.token_hex(6)
        self.coordination = _Coordination(save_id, plan, assignments, document)
        self.emit("save.planned")
        return [
            msgspec.msgpack.encode(_Order(save_id, plan.row[rows].tobytes()))
            for rows in assignments
        ]

    # ----- round 2 -----

    def write(self, message: bytes) -> bytes:
        """Every rank: write my file."""
        order = msgspec.msgpack.decode(message, type=_Order)
        rows = np.frombuffer(order.rows, dtype=np.int64)
        if not len(rows):
            return msgspec.msgpack.encode(native.Part("", 0, b"", b""))
        assert self.tensors is not None
        boxes = self.tensors.boxes
        header, positions, num_bytes = native.data_header(boxes, rows)
        pieces = [
            FilePiece(
                self.tensors.memories[row],
                boxes.box(row).shape,
                boxes.tensors.dtype(int(boxes.tensor[row])),
                position,
            )
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True)
        ]
        path = native.data_path(order.save_id, self.exchange.rank)
        self.emit("save.file_created", num_bytes)
        written = write_file(
            self.storage,
            path,
            header,
            pieces,
            num_bytes,
            lambda size: self.emit("save.chunk_written", size),
        )
        self.storage.sync()
        self.emit("save.file_finished", num_bytes)
        digests = native.encode_digests(written.digests)
        return msgspec.msgpack.encode(native.Part(path, num_bytes, positions.tobytes(), digests))

    def commit(self, replies: list[bytes]) -> list[bytes]:
        """Rank 0: all files are durable; make the checkpoint exist."""
        assert self.coordination is not None
        done = self.coordination
        parts = [msgspec.msgpack.decode(reply, type=native.Part) for reply in replies]
        try:
            self.emit("save.parts_gathered")
            record = self._write_small_files(done, parts)
            self.storage.sync()
            self.emit("save.before_commit")
        except BaseException:
            self.remove_files()
            raise
        # From here on a failure leaves everything in place: the record may be visible already.
        self.storage.put(native.RECORD_NAME, native.encode_record(record), overwrite=self.overwrite)
        self.emit("save.committed")
        if self.replaced is not None:
            _remove_folder(self.storage, self.replaced.save_id)
        return [b""] * self.exchange.world_size

    def _write_small_files(
        self, done: _Coordination, parts: Sequence[native.Part]
    ) -> native.CommitRecord:
        """Write values and index; returns the record that refers to everything."""
        folder = native.data_folder(done.save_id)
        document = done.document.encode()
        values_path = f"{folder}/values.msgpack"
        self.storage.put(values_path, document, overwrite=False)
        self.emit("save.values_written", len(document))
        index = native.build_index(done.plan.boxes, done.assignments, parts, done.document.aliases)
        encoded = index.encode()
        index_path = f"{folder}/index.safetensors"
        self.storage.put(index_path, encoded, overwrite=False)
        self.emit("save.index_written", len(encoded))
        digests = native.file_digests(index)
        return native.CommitRecord(
            format=native.FORMAT_NAME,
            version=native.FORMAT_VERSION,
            save_id=done.save_id,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            world_size=self.exchange.world_size,
            remesh_version=__version__,
            index=native.FileRecord(
                path=index_path, num_bytes=len(encoded), digest=hex_digest(encoded)
            ),
            values=native.FileRecord(
                path=values_path, num_bytes=len(document), digest=hex_digest(document)
            ),
            files=tuple(
                native.FileRecord(path=file.path, num_bytes=file.num_bytes, digest=digest)
                for file, digest in zip(index.files, digests, strict=True)
            ),
            metadata=self.metadata,
        )

    def remove_files(self) -> None:
        """Rank 0: the save failed before its commit; remove what was written for it."""
        assert self.coordination is not None
        _remove_folder(self.storage, self.coordination.save_id)


def document_of(description: Description, aliases: Mapping[str, str]) -> native.ValuesDocument:
    """What a rank knows that is not a tensor."""
    document = native.ValuesDocument(
        values={
            name: msgspec.Raw(values.encode(value, name))
            for name, value in description.values.items()
        },
        lists=dict(description.merged_lists),
        sequences=[(list(path), kind) for path, kind in description.sequences.items()],
        aliases=dict(aliases),
    )
    for element in description.objects:
        if element.is_main_replica:
            document.objects[element.unique_name] = native.ObjectElement(
                element.name,
                element.global_shape,
                element.global_offset,
                msgspec.Raw(values.encode(element.data, element.unique_name)),
            )
    for name, path in description.paths.items():
        document.set_path(name, path)
    for name in (*(entry.name for entry in description.tensors), *document.objects):
        if name not in description.paths:
            document.set_path(name, (name,))
    return document


def check_samples(holdings: Sequence[Holdings], samples: Sequence[Sequence[str]]) -> None:
    """Check that copies which ranks only assume to be equal begin and end equally.

    Raises:
        DivergedReplicaError: Naming the first tensor that differs, and the ranks.
    """
    seen: dict[tuple[str, bytes, bytes], tuple[int, str]] = {}
    for rank, (held, digests) in enumerate(zip(holdings, samples, strict=True)):
        boxes = held.boxes
        for row, digest in enumerate(digests):
            if not digest:
                continue
            name = boxes.tensors.names[boxes.tensor[row]]
            key = (name, boxes.offsets[row].tobytes(), boxes.extents[row].tobytes())
            first, expected = seen.setdefault(key, (rank, digest))
            if digest != expected:
                raise DivergedReplicaError(
                    f"{name}: ranks {first} and {rank} hold different values of shape "
                    f"{boxes.box(row).shape} under this one name. If they are shards of a larger "
                    "tensor, describe them (DTensor, or remesh.ShardedTensor with the global "
                    "shape). If each rank has its own, give them names of their own or wrap them "
                    "in remesh.ShardedObject. If they should be equal, broadcast them from one "
                    "rank before saving."
                )


def _check_names(plan: SavePlan, document: native.ValuesDocument) -> None:
    """A name is a tensor or a value or an alias, on whichever ranks."""
    tensors = set(plan.boxes.tensors.names)
    for kind, names in (("value", document.values), ("tied tensor", document.aliases)):
        both = tensors.intersection(names)
        if both:
            name = min(both)
            raise StateError(
                f"{name}: a tensor of its own on one rank and a {kind} on another; give them "
                "different names, or make the ranks agree"
            )


def _check_space(spaces: Sequence[FileSystemSpace | None], num_bytes: IntArray) -> None:
    """Is there room for all files that share a file system?"""
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for space, size in zip(spaces, num_bytes.tolist(), strict=True):
        if space is not None:
            needed[space.identity] += size
            free[space.identity] = min(space.free_bytes, free.get(space.identity, space.free_bytes))
    for identity, size in needed.items():
        if size > free[identity]:
            raise NoSpaceError(
                f"the state needs {size / 1e9:.3f} GB on {identity}, where "
                f"{free[identity] / 1e9:.3f} GB are free. Nothing was written. Free some space, or "
                "save elsewhere."
            )


def _check_metadata(metadata: dict[str, object]) -> None:
    try:
        same = msgspec.json.decode(msgspec.json.encode(metadata)) == metadata
    except (TypeError, msgspec.MsgspecError) as error:
        raise StateError(f"metadata must be a JSON object: {error}") from error
    if not same:
        raise StateError(
            "metadata must be a JSON object: only strings as keys, and str, int, float, bool, None,"
            " lists and dicts as values"
        )


def _remove_folder(storage: Storage, save_id: str) -> None:
    """Remove the files of a save, as far as the storage can."""
    try:
        for path in storage.list(native.data_folder(save_id) + "/"):
            storage.delete(path)
    except StorageError:
        # They are not part of any checkpoint; the failure that led here matters more.
        return
