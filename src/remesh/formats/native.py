"""remesh's own format: what its files hold and what they are called.

::

    step_00001000/
      remesh.json                      the commit record, written last
      data-5f3a9c1e07b2/               everything of one save, under its save id
        index.safetensors              the index (`remesh.core.index`)
        values.msgpack                 what is not a tensor (`ValuesDocument`)
        00000.safetensors ...          the tensors, a file for each rank that wrote some

The commit record names every other file with its size and digest. Without a record there is no
checkpoint, whatever else lies there. Each save writes under a fresh id, so two saves to one place
never touch each other's files: what one record refers to is never a mixture, an aborted save
leaves only files that no record refers to, and overwriting is one atomic exchange of the record.

A data file is a plain safetensors file. A piece that is a whole tensor has the tensor's name;
any other piece has the name, `@` and its offset. The header's metadata says for each piece to which
box of which tensor it belongs, so an index can be rebuilt from data files alone.

Numbered rules for implementers are in `docs/format.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec

from remesh._repr import shown
from remesh.core import values
from remesh.core.index import Index
from remesh.core.integrity import (
    NUM_READINGS,
    Finding,
    compare_sizes,
    digest_of_digests,
    hex_digest,
    names_in_stored_range,
    repair_advice,
)
from remesh.core.state import MAX_PATH, Path, cut_name
from remesh.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    DivergedReplicaError,
    FormatVersionError,
    NameCollisionError,
    StorageError,
)
from remesh.formats.checks import MALFORMED
from remesh.formats.place import Place
from remesh.storage import Storage, ask_together

NAME = FORMAT_NAME = "remesh"
FORMAT_VERSION = 1
RECORD_NAME = "remesh.json"
MARKER = f"{RECORD_NAME} (remesh)"
NEEDS_LISTING = False

NUM_BEGINNINGS = 10
"""How often reading begins if the checkpoint is replaced each time before the reading ends."""

_Result = TypeVar("_Result")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file that belongs to a checkpoint."""

    path: str  # relative to the checkpoint
    num_bytes: int  # its size as it is stored
    digest: str  # xxh3-128 in hex; for data files, of the digests of the blocks of their content
    compressed: bool = False  # as `remesh.core.compression` describes


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `remesh.json`."""

    format: str  # always `remesh`
    version: int  # version of the format; readers refuse what they do not know
    save_id: str  # names the save, and its folder
    created: str  # when it was committed, ISO 8601 in UTC
    world_size: int  # number of ranks that saved
    remesh_version: str  # version of the library that wrote it
    index: FileRecord  # the index file
    values: FileRecord  # the values file
    files: tuple[FileRecord, ...]  # the data files
    metadata: dict[str, object] = {}  # what the user wanted to record: a JSON object


DATA_FOLDER = re.compile(r"data-[0-9a-f]{12}")
"""The folders of saves."""


def data_folder(save_id: str) -> str:
    """The folder of a save, relative to the checkpoint."""
    return f"data-{save_id}"


def data_path(save_id: str, rank: int, number: int = 0) -> str:
    """A data file that a rank writes; number 0 holds what changes from save to save."""
    further = f"-{number}" if number else ""
    return f"{data_folder(save_id)}/{rank:05d}{further}.safetensors"


def encode_record(record: CommitRecord) -> bytes:
    """The text of a commit record, which ends with a digest of itself."""
    body = msgspec.json.encode(record)
    text = b'{"record":' + body + b',"digest":"' + hex_digest(body).encode() + b'"}'
    return msgspec.json.format(text, indent=1) + b"\n"


class _RecordFile(msgspec.Struct):
    record: msgspec.Raw
    digest: str


class _Version(msgspec.Struct):
    format: str
    version: int


def decode_record(text: bytes, where: str) -> CommitRecord:
    """The commit record of its text; `FormatVersionError` if it is of another version."""

    def damaged(what: str) -> CorruptCheckpointError:
        advice = repair_advice(where.removesuffix(f"/{RECORD_NAME}"))
        return CorruptCheckpointError(f"{where}: {what}. {advice}")

    try:
        file = msgspec.json.decode(text, type=_RecordFile)
        body = msgspec.json.format(bytes(file.record), indent=-1)
        head = msgspec.json.decode(body, type=_Version)
    except MALFORMED as error:
        raise damaged(f"not a commit record ({error})") from error
    if hex_digest(body) != file.digest:
        raise damaged("the commit record was changed after it was written (its digest differs)")
    if head.format != FORMAT_NAME or head.version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{where}: written in format {head.format!r} version {head.version}\nThis remesh reads "
            f"{FORMAT_NAME!r} version {FORMAT_VERSION}. Upgrade remesh to read it."
        )
    try:
        return msgspec.json.decode(body, type=CommitRecord)
    except MALFORMED as error:
        raise damaged(f"incomplete commit record: {error}") from error


# ---------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------


class ObjectElement(msgspec.Struct, frozen=True):
    """One element of a grid of values (`remesh.sharding.ShardedObject`)."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    value: msgspec.Raw


class ValuesDocument(msgspec.Struct):
    """The content of `values.msgpack`, and a rank's part of it before it is written."""

    values: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    """Plain values by name, encoded by `remesh.core.values`."""
    lists: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Lists of names of which ranks know parts."""
    objects: dict[str, ObjectElement] = msgspec.field(default_factory=dict)
    """Elements of sharded objects by unique name."""
    paths: dict[str, list[str | int]] = msgspec.field(default_factory=dict)
    """Path of each stored name that is not simply the name cut at its dots."""
    sequences: list[tuple[list[str | int], str]] = msgspec.field(default_factory=list)
    """Paths of containers that are a `list` or a `tuple`."""
    aliases: dict[str, str] = msgspec.field(default_factory=dict)  # further names of tensors
    unchecked: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Names of tensors and values that a repair has taken over although no digest proves that they
    are what was saved; stored if there are any."""

    def encode(self) -> bytes:
        """The stored form, in the order of the state."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes, where: str) -> ValuesDocument:
        """The document of its stored form."""
        try:
            document = msgspec.msgpack.decode(data, type=cls)
        except MALFORMED as error:
            raise CorruptCheckpointError(f"{where}: not a values file: {error}") from error
        if any(not 0 < len(at) <= MAX_PATH for at in document.paths.values()):
            raise CorruptCheckpointError(f"{where}: a path of no keys, or of too many")
        for at, kind in document.sequences:
            if len(at) > MAX_PATH or kind not in {"list", "tuple"}:
                raise CorruptCheckpointError(f"{where}: {at[:8]} is no list or tuple, but {kind!r}")
        return document

    @property
    def unchecked_names(self) -> tuple[str, ...]:
        """`unchecked`, or nothing."""
        return () if isinstance(self.unchecked, msgspec.UnsetType) else tuple(self.unchecked)

    def path_of(self, name: str) -> Path:
        """The path of a stored name."""
        path = self.paths.get(name)
        return cut_name(name) if path is None else tuple(path)

    def set_path(self, name: str, path: Path) -> None:
        """Record a path, if it is not what `path_of` would say anyway."""
        if path != cut_name(name):
            self.paths[name] = list(path)


def merge_documents(documents: Sequence[ValuesDocument]) -> ValuesDocument:
    """Unite the documents of ranks, in rank order."""
    merged = ValuesDocument()
    unchecked = dict.fromkeys(name for one in documents for name in one.unchecked_names)
    if unchecked:
        merged.unchecked = list(unchecked)
    origin: dict[str, int] = {}
    sequences: dict[Path, str] = {}
    for rank, document in enumerate(documents):
        for name, raw in document.values.items():
            known = merged.values.setdefault(name, raw)
            first = origin.setdefault(name, rank)
            if bytes(known) != bytes(raw) and values.in_order(known) != values.in_order(raw):
                raise DivergedReplicaError(
                    f"{name}: rank {first} has {_shown(known)}, rank {rank} has {_shown(raw)}\nA "
                    "plain value must be the same on all ranks that have it. Make it so, or wrap "
                    "what belongs to each rank in remesh.sharding.ShardedObject."
                )
        for name, items in document.lists.items():
            union = dict.fromkeys([*merged.lists.get(name, ()), *items])
            merged.lists[name] = list(union)
        for name, element in document.objects.items():
            if bytes(merged.objects.setdefault(name, element).value) != bytes(element.value):
                raise DivergedReplicaError(
                    f"{name}: two ranks, one of them rank {rank}, have different main replicas of "
                    "this element\n"
                    "Exactly one rank must have replica_id 0"
                )
        for name, path in document.paths.items():
            if merged.paths.setdefault(name, path) != path:
                raise NameCollisionError(
                    f"{name!r} is the stored name of {merged.paths[name]} on one rank and of "
                    f"{path} on rank {rank}\nRename one of them"
                )
        sequences.update({tuple(path): kind for path, kind in document.sequences})
        merged.aliases.update(document.aliases)
    merged.sequences = [(list(path), kind) for path, kind in sequences.items()]
    return merged


def _shown(raw: msgspec.Raw) -> str:
    return shown(values.decode(bytes(raw)))


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def is_at(place: Place) -> bool:
    """True if a place holds a commit record."""
    return place.storage.exists(RECORD_NAME)


@dataclass(frozen=True, slots=True)
class NativeFiles:
    """The small files of a committed checkpoint, checked against the record."""

    record: CommitRecord
    index_bytes: bytes = field(repr=False)
    values_bytes: bytes = field(repr=False)


def read_record(storage: Storage) -> CommitRecord:
    """Read the commit record; `CheckpointNotFoundError` if there is none."""
    try:
        return read_record_at(storage, RECORD_NAME)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(
            f"{storage.url}: no checkpoint there (no {RECORD_NAME})"
        ) from None


def read_record_at(storage: Storage, path: str) -> CommitRecord:
    """Read the commit record at a path below the root. Raises what `read_record` raises."""
    where = f"{storage.url}/{path}"
    for _ in range(NUM_READINGS - 1):
        with suppress(CorruptCheckpointError):
            return decode_record(storage.read(path), where)
    return decode_record(storage.read(path), where)


def read_small_files(storage: Storage) -> NativeFiles:
    """Read record, index and values, each checked against its digest."""
    for beginning in beginnings():
        with beginning:
            record = read_record(storage)
            with unless_replaced(storage, identity_of(record)):
                files = (record.index, record.values)
                parts = [partial(_read_checked, storage, file) for file in files]
                index, values = ask_together(storage, parts)
                break
    return NativeFiles(record, index, values)


# ---------------------------------------------------------------------------------------------
# Reading what another save may replace meanwhile
# ---------------------------------------------------------------------------------------------


def identity_of(record: CommitRecord) -> str:
    """A text that is different for every commit record."""
    return hex_digest(msgspec.json.encode(record))


def check_current(storage: Storage, identity: str) -> None:
    """Check that the commit record is still that of `identity`; "" is that of other formats."""
    if not identity:
        return
    try:
        found = identity_of(read_record(storage))
    except CheckpointNotFoundError:
        found = ""
    except (CheckpointError, StorageError):
        return  # that the record cannot be read now does not mean that it is another one
    if found != identity:
        what = "replaced by another save" if found else "removed"
        raise CheckpointReplacedError(
            f"{storage.url}: the checkpoint was {what} while it was being read\n"
            "Open it again; if this happens again and again, save every checkpoint to a path "
            "of its own."
        )


@contextmanager
def unless_replaced(storage: Storage, identity: str) -> Iterator[None]:
    """Read what a record refers to; a failure is a `CheckpointReplacedError` if that has changed.

    The files of a replaced checkpoint are removed, so what is missing may be in perfect order.
    """
    try:
        yield
    except (CheckpointError, StorageError) as error:
        try:
            check_current(storage, identity)
        except CheckpointReplacedError as replaced:
            raise replaced from error
        raise


def beginnings() -> Iterator[AbstractContextManager[object]]:
    """Contexts in which a checkpoint is read from its record on, until it was not replaced."""
    yield from [suppress(CheckpointReplacedError)] * (NUM_BEGINNINGS - 1)
    yield nullcontext()


def retry_if_replaced(read: Callable[[], _Result]) -> _Result:
    """Read a checkpoint from its record on, again if it was replaced meanwhile."""
    for beginning in beginnings():
        with beginning:
            return read()
    raise AssertionError


def records_of_files(index: Index) -> tuple[FileRecord, ...]:
    """The entries of the commit record for the data files of an index."""
    starts, stops = index.first_block[:-1].tolist(), index.first_block[1:].tolist()
    has_digests = bool(index.block_size)
    records = []
    for number, (file, num_bytes) in enumerate(zip(index.files, index.stored_sizes, strict=True)):
        blocks = slice(starts[number], stops[number]) if has_digests else slice(0)
        records.append(
            FileRecord(
                path=file.path,
                num_bytes=num_bytes,
                digest=digest_of_digests(index.digests[blocks]) if has_digests else "",
                compressed=bool((index.stored_begin[blocks] >= 0).any()),
            )
        )
    return tuple(records)


def _read_checked(storage: Storage, file: FileRecord) -> bytes:
    try:
        data = storage.read(file.path)
    except CheckpointNotFoundError:
        raise CorruptCheckpointError(
            f"{storage.url}/{file.path}: missing, though {RECORD_NAME} names it. "
            f"{repair_advice(storage.url)}"
        ) from None
    is_whole = len(data) == file.num_bytes
    if not is_whole or hex_digest(data) != file.digest:
        what = "other bytes" if is_whole else f"{len(data)} bytes of {file.num_bytes}"
        raise CorruptCheckpointError(
            f"{storage.url}/{file.path}: not what was written ({what})\n"
            f"{repair_advice(storage.url)}"
        )
    return data


def check_files(storage: Storage, record: CommitRecord | None, index: Index) -> list[Finding]:
    """Check, without reading them, that the data files are there and belong to the index.

    Other systems have no commit record.
    """
    if record is not None and records_of_files(index) != record.files:
        raise CorruptCheckpointError(
            f"{storage.url}: the index and {RECORD_NAME} disagree about the data files\nThey "
            f"belong to different saves. {repair_advice(storage.url)}"
        )
    paths = [file.path for file in index.files]
    numbers = {path: number for number, path in enumerate(paths)}
    findings = []
    sizes = zip(paths, index.stored_sizes, strict=True)
    for found in compare_sizes(sizes, partial(size_of, storage)):
        names = names_in_stored_range(index, numbers[found.file], found.start, found.stop)
        findings.append(replace(found, tensors=tuple(names)))
    return findings


def size_of(storage: Storage, path: str) -> int | None:
    """Bytes of a file; None if there is none."""
    try:
        return storage.size(path)
    except CheckpointNotFoundError:
        return None
