"""Saving what can be saved of a damaged checkpoint, into a new one.

The scan finds out what is whole, without writing; `plan_repair` puts that into a report, and
`repair` writes it down. The damaged checkpoint is never changed. The new one gets a save id, an
index and a record of its own. Data files that are sound are taken over as they are, by hard links
where the file system has them. Elsewhere, and of a damaged file, the pieces of whole tensors are
copied into a new file, so that every file of the new checkpoint is sound from its first byte to its
last. What is copied is compared with the digests of the scan.

The scan reads the files of one save one after the other:

1. The commit record, the index and the values file, each of which may be gone or damaged. What the
   record has a digest for is *intact* or *damaged*. Without a record, the index and the values file
   are accepted if they *decode*, which proves less.
2. Every data file is read once. Its blocks are digested, for the new index and to be compared with
   whatever old digests there are: those of blocks in any index that decodes (a digest of 128 bits
   that agrees proves both sides), and that of the whole file in the record. A block that differs,
   or that cannot be read, is bad.
3. The pieces of a file come from an intact index, or else from the file's own header, if the
   header is not in a bad block. A piece is good if it lies wholly in what there is of the file, and
   not in a bad block.
4. A tensor is whole if its good pieces cover it exactly once.

Compressed files are read as what they hold: positions, blocks and sizes are those of the content.
Where their blocks lie, an index says, or else the table at the end of each file.

Bytes for which there is no old digest may be wrong: in a file that has lost its first bytes, all
pieces seem to be there. Tensors with such bytes are *unchecked*, and taken only on request.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from remesh._repr import short_repr
from remesh.core import values
from remesh.core.compression import BlockTable
from remesh.core.coverage import faulty_tensors
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import MAX_ELEMENTS, Box, IntArray, uncovered
from remesh.core.index import Index, StoredFile
from remesh.core.integrity import (
    BLOCK_SIZE,
    Digests,
    WrittenFile,
    block_digests,
    digest_of_digests,
    hex_digest,
)
from remesh.core.safetensors_file import Header, HeaderEntry, decode_header, header_length
from remesh.core.state import whole_sequences
from remesh.core.tables import BoxTable, Cuts, TensorTable
from remesh.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from remesh.formats import native, native_writer
from remesh.formats.decoding import DecompressedFiles, decoded
from remesh.formats.writer import Part, Saved, SmallFile, part_of
from remesh.maintenance.orphans import remove_files
from remesh.pipeline import FileLayout, FilePiece, write_staged
from remesh.pipeline.collect import direct_stager
from remesh.pipeline.source import StoredMemory, TensorSource, stored_copies
from remesh.pipeline.write import whole_files
from remesh.storage import Buffer, Storage, is_local, open_storage
from remesh.storage.workers import run_workers

READ_BYTES = 8 * BLOCK_SIZE
"""Bytes read at a time."""

DataFileState = Literal["sound", "readable", "damaged", "truncated", "unreadable", "missing"]

_Flags = npt.NDArray[np.bool_]


# ---------------------------------------------------------------------------------------------
# Small files
# ---------------------------------------------------------------------------------------------


SmallFileState = Literal["intact", "decodes", "damaged", "missing"]

_FOLDER = re.compile(r"data-([0-9a-f]+)/.+", re.DOTALL)

_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """The small files of a save, as far as there is anything of them."""

    save_id: str  # names the save
    record: native.CommitRecord | None  # the commit record, if it is readable
    index: Index | None  # the index, if it decodes
    document: native.ValuesDocument | None
    """The values, if they decode and are not known to be damaged."""
    record_state: SmallFileState  # what is known of the record; it carries its own digest
    index_state: SmallFileState
    """What is known of the index. It may decode and be damaged all the same."""
    values_state: SmallFileState  # what is known of the values file

    @property
    def trusted_index(self) -> Index | None:
        """The index, if its digest proves it."""
        return self.index if self.index_state == "intact" else None


def read_small_files(storage: Storage, save_id: str | None) -> SmallFiles:
    """Find the save, or that which the caller names, and read what there is of its small files."""
    record, record_state = _read_record(storage)
    if save_id is not None and (record is None or record.save_id != save_id):
        record, record_state = None, "missing"
    if save_id is None:
        save_id = record.save_id if record is not None else _only_save(storage)
    elif not storage.list(f"{native.data_folder(save_id)}/"):
        raise CheckpointNotFoundError(f"{storage.url}: there are no files of a save {save_id!r}")
    folder = native.data_folder(save_id)

    def read(
        name: str, file: native.FileRecord | None, decode: Callable[[bytes, str], _Decoded]
    ) -> tuple[_Decoded | None, SmallFileState]:
        path = f"{folder}/{name}" if file is None else file.path
        try:
            data = storage.read(path)
        except CheckpointNotFoundError:
            return None, "missing"
        except StorageError:
            return None, "damaged"
        try:
            decoded = decode(data, path)
        except CorruptCheckpointError:
            return None, "damaged"
        if file is None:
            return decoded, "decodes"
        is_intact = len(data) == file.num_bytes and hex_digest(data) == file.digest
        return decoded, "intact" if is_intact else "damaged"

    index_file, values_file = (None, None) if record is None else (record.index, record.values)
    index, index_state = read("index.safetensors", index_file, Index.decode)
    document, values_state = read("values.msgpack", values_file, _decode_values)
    return SmallFiles(
        save_id,
        record,
        index,
        document if values_state != "damaged" else None,
        record_state,
        index_state,
        values_state,
    )


def _read_record(storage: Storage) -> tuple[native.CommitRecord | None, SmallFileState]:
    try:
        return native.read_record(storage), "intact"
    except CheckpointNotFoundError:
        return None, "missing"
    except (CorruptCheckpointError, StorageError):
        return None, "damaged"


def _only_save(storage: Storage) -> str:
    """The save whose files lie there."""
    found = (_FOLDER.fullmatch(path) for path in storage.list())
    saves = sorted({match[1] for match in found if match is not None})
    if not saves:
        raise CheckpointNotFoundError(
            f"{storage.url}: nothing to repair, there is no folder data-<save id> with files"
        )
    if len(saves) > 1:
        raise CheckpointError(
            f"{storage.url} has files of {len(saves)} saves and no readable "
            f"{native.RECORD_NAME}\n"
            f"Look at each of them with --save: {', '.join(saves)}"
        )
    return saves[0]


def _decode_values(data: bytes, where: str) -> native.ValuesDocument:
    """The document, if every value in it decodes as well."""
    document = native.ValuesDocument.decode(data, where)
    for raw in document.values.values():
        values.decode(bytes(raw))
    for element in document.objects.values():
        values.decode(bytes(element.value))
    return document


# ---------------------------------------------------------------------------------------------
# Data files
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScannedPiece:
    """A piece of a data file."""

    name: str  # its tensor
    dtype: str  # element type of the tensor
    shape: tuple[int, ...]  # global shape of the tensor
    box: Box  # where the piece lies in the tensor
    position: int  # first byte in the file
    num_bytes: int  # its size


@dataclass(frozen=True, slots=True, eq=False)
class ScannedFile:
    """A data file that was read."""

    path: str  # relative to the damaged checkpoint
    num_bytes: int  # its size, if it is compressed that of its content
    state: DataFileState  # `sound` and `readable` files can be used as they are
    problem: str  # what is wrong with it, in words; empty if nothing is
    written: WrittenFile  # the digests of its blocks, and where they lie if it is compressed
    bad: _Flags  # which blocks must not be used
    is_checked: _Flags  # which blocks an old digest proves
    pieces: Sequence[ScannedPiece]  # what it holds or should hold

    def is_good(self, piece: ScannedPiece) -> bool:
        """True if a piece is there and not known to be damaged."""
        inside = piece.position + piece.num_bytes <= self.num_bytes
        return inside and not self.bad[_blocks_of(piece)].any()

    def is_proven(self, piece: ScannedPiece) -> bool:
        """True if old digests prove all bytes of a good piece."""
        return bool(self.is_checked[_blocks_of(piece)].all())


def _blocks_of(piece: ScannedPiece) -> slice:
    stop = -(-(piece.position + piece.num_bytes) // BLOCK_SIZE)
    return slice(piece.position // BLOCK_SIZE, stop)


def contents_of(storage: Storage, small: SmallFiles) -> Storage:
    """A storage in which compressed files can be read as what they hold."""
    index = small.index
    if index is None or index.block_size != BLOCK_SIZE:
        return DecompressedFiles(storage)
    return decoded(storage, index)


def scan_data_files(storage: Storage, contents: Storage, small: SmallFiles) -> list[ScannedFile]:
    """Read every data file that is there or named somewhere, once."""
    folder = f"{native.data_folder(small.save_id)}/"
    # The index is the one file of that ending which has no pieces.
    paths = [path for path in storage.list(folder) if path.endswith(".safetensors")]
    paths = [path for path in paths if path != f"{folder}index.safetensors"]
    if small.record is not None:
        paths += [file.path for file in small.record.files]
    if small.index is not None and small.index_state != "damaged":
        paths += [file.path for file in small.index.files]
    files = []
    for path in sorted(set(paths)):
        known = _Known.of(small, path)
        try:
            size = storage.size(path)
        except CheckpointNotFoundError:
            files.append(_without_blocks(path, "missing", "it is gone", known.pieces))
        except StorageError as error:
            files.append(_without_blocks(path, "unreadable", str(error), known.pieces))
        else:
            files.append(_scan_file(contents, small, known, path, size))
    return files


@dataclass(frozen=True, slots=True)
class _Known:
    """The word of the small files on a data file."""

    stored_bytes: int | None
    digest: str | None
    is_compressed: bool
    blocks: Digests | None
    pieces: Sequence[ScannedPiece] | None

    @classmethod
    def of(cls, small: SmallFiles, path: str) -> _Known:
        stored_bytes, digest, is_compressed, blocks, pieces = None, None, False, None, None
        for file in () if small.record is None else small.record.files:
            if file.path == path:
                stored_bytes, digest = file.num_bytes, file.digest
                is_compressed = file.compressed
        index = small.index
        paths = [] if index is None else [file.path for file in index.files]
        if index is not None and path in paths:
            number = paths.index(path)
            if index.block_size == BLOCK_SIZE:
                blocks = index.digests[index.first_block[number] : index.first_block[number + 1]]
            if small.index_state == "intact":
                stored_bytes = index.stored_sizes[number]
                pieces = _pieces_of(index, number)
        return cls(stored_bytes, digest, is_compressed, blocks, pieces)


def _pieces_of(index: Index, number: int) -> list[ScannedPiece]:
    """The pieces of a file by an index."""
    boxes, sizes = index.boxes, index.boxes.num_bytes
    pieces = []
    for row in np.flatnonzero(index.file == number).tolist():
        tensor = int(boxes.tensor[row])
        name, dtype = boxes.tensors.names[tensor], boxes.tensors.dtype(tensor).name
        shape, position = boxes.tensors.shape(tensor), int(index.position[row])
        pieces.append(ScannedPiece(name, dtype, shape, boxes.box(row), position, int(sizes[row])))
    return pieces


def _scan_file(
    contents: Storage, small: SmallFiles, known: _Known, path: str, size: int
) -> ScannedFile:
    """Read a file; `size` is that of the stored one."""
    try:
        table = _table_of(contents, path)
    except (CorruptCheckpointError, StorageError) as error:
        return _without_blocks(path, "unreadable", str(error), known.pieces)
    expected = known.stored_bytes if table is None else table.num_bytes
    # Blocks that a compressed file lacks can be read, too: as damaged ones.
    there = size if table is None else table.num_bytes
    header, problem = None, ""
    pieces: Sequence[ScannedPiece] = []
    try:
        header = _read_header(contents, path)
        pieces = _pieces_in(header, path)
    except (CorruptCheckpointError, StorageError) as error:
        problem = str(error)
        if table is None and small.index is None and known.is_compressed:
            problem = f"{path}: it is compressed, and both the index and its own table are lost"
    if expected is None and header is not None:
        expected = header.data_start + max(
            (entry.data_offsets[1] for entry in header.entries.values()), default=0
        )
    num_bytes = there if expected is None else min(there, expected)
    digests, unreadable = _digest_blocks(contents, path, num_bytes)
    written = WrittenFile(digests)
    stored_bytes = expected
    if table is not None:
        stored_bytes = size if known.stored_bytes is None else known.stored_bytes
        written = WrittenFile(digests, table.begin, stored_bytes)
    bad, is_checked = _compare(known, digests, num_bytes, is_cut=num_bytes != expected)
    bad |= unreadable
    if known.pieces is not None:
        pieces = known.pieces
    elif header is None or problem or bad[: -(-header.data_start // BLOCK_SIZE)].any():
        why = problem or f"{path}: its header is damaged"
        return ScannedFile(path, num_bytes, "unreadable", why, written, bad, is_checked, [])
    elif not is_checked[: -(-header.data_start // BLOCK_SIZE)].all():
        # Bytes may be proven, but not what they are.
        is_checked = np.zeros_like(is_checked)
    state, why = _state_of(size, stored_bytes, bad, unreadable, problem)
    if state == "sound" and not is_checked.all():
        state = "readable"
    return ScannedFile(path, num_bytes, state, why, written, bad, is_checked, pieces)


def _table_of(contents: Storage, path: str) -> BlockTable | None:
    """Where the blocks of a file lie; None if it is not compressed."""
    table = contents.table(path) if isinstance(contents, DecompressedFiles) else None
    if table is not None and table.block_size != BLOCK_SIZE:
        raise CorruptCheckpointError(
            f"{contents.url}/{path}: blocks of {table.block_size} bytes; repair knows those of "
            f"{BLOCK_SIZE}"
        )
    return table


def _without_blocks(
    path: str, state: DataFileState, problem: str, pieces: Sequence[ScannedPiece] | None
) -> ScannedFile:
    written, flags = WrittenFile(np.zeros((0, 2), np.uint64)), np.zeros(0, np.bool_)
    return ScannedFile(path, 0, state, problem, written, flags, flags, pieces or [])


def _state_of(
    size: int, expected: int | None, bad: _Flags, unreadable: _Flags, problem: str
) -> tuple[DataFileState, str]:
    """The state of a file, and the reason."""
    if expected is not None and size < expected:
        return "truncated", f"it has {size} of {expected} bytes"
    if unreadable.any():
        return "damaged", f"{int(unreadable.sum())} of {len(bad)} blocks cannot be read"
    if bad.any():
        return "damaged", f"{int(bad.sum())} of {len(bad)} blocks are not what was written"
    if expected is not None and size > expected:
        return "damaged", f"it has {size} bytes, {size - expected} too many"
    if problem:
        return "damaged", problem
    return "sound", ""


def _digest_blocks(storage: Storage, path: str, num_bytes: int) -> tuple[Digests, _Flags]:
    """Digests of a file's blocks, and which of them cannot be read."""
    num_blocks = -(-num_bytes // BLOCK_SIZE)
    digests = np.zeros((num_blocks, 2), dtype=np.uint64)
    unreadable = np.zeros(num_blocks, dtype=np.bool_)

    def read(start: int, data: Buffer) -> bool:
        first = start // BLOCK_SIZE
        try:
            if storage.read_into(path, start, data) < len(data):
                return False
        except (StorageError, CheckpointNotFoundError, CorruptCheckpointError):
            return False
        found = block_digests(data)
        digests[first : first + len(found)] = found
        return True

    def read_span(task: int, buffer: Buffer) -> None:
        start = task * READ_BYTES
        stop = min(start + READ_BYTES, num_bytes)
        if read(start, buffer[: stop - start]):
            return
        # Something in there cannot be read; find out which blocks that is.
        for begin in range(start, stop, BLOCK_SIZE):
            if not read(begin, buffer[: min(BLOCK_SIZE, stop - begin)]):
                unreadable[begin // BLOCK_SIZE] = True

    run_workers(4, -(-num_bytes // READ_BYTES), min(READ_BYTES, num_bytes), read_span)
    return digests, unreadable


def _compare(
    known: _Known, digests: Digests, num_bytes: int, *, is_cut: bool
) -> tuple[_Flags, _Flags]:
    """Which blocks differ from what was written, and which are proven to be it."""
    none = np.zeros(len(digests), dtype=np.bool_)
    if known.digest is not None and not is_cut:
        if digest_of_digests(digests) == known.digest:
            return none, ~none
        if known.blocks is None:
            # Something is wrong, and the digest does not say where.
            return ~none, none
    if known.blocks is None:
        return none, none
    # The block in which a file was cut short has no digest to compare it with.
    num_whole = num_bytes // BLOCK_SIZE if is_cut else len(digests)
    num_compared = min(num_whole, len(known.blocks))
    equal = (digests[:num_compared] == known.blocks[:num_compared]).all(axis=1)
    bad, is_checked = none.copy(), none.copy()
    bad[:num_compared], is_checked[:num_compared] = ~equal, equal
    return bad, is_checked


# ---------------------------------------------------------------------------------------------
# Headers
# ---------------------------------------------------------------------------------------------


def _read_header(storage: Storage, path: str) -> Header:
    length = header_length(storage.read(path, 0, 8), path)
    return decode_header(storage.read(path, 0, 8 + length), path)


def _pieces_in(header: Header, path: str) -> list[ScannedPiece]:
    """The pieces of a file by its header."""
    try:
        described = msgspec.json.decode(
            header.metadata["pieces"],
            type=dict[str, tuple[str, str, tuple[int, ...], tuple[int, ...]]],
        )
        return [
            _piece_of(entry, header.data_start, described[key])
            for key, entry in header.entries.items()
        ]
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise CorruptCheckpointError(
            f"{path}: its header does not say what the file holds: {error!r}"
        ) from error


def _piece_of(
    entry: HeaderEntry,
    data_start: int,
    described: tuple[str, str, tuple[int, ...], tuple[int, ...]],
) -> ScannedPiece:
    """The piece of one entry of a header."""
    name, type_name, shape, offset = described
    dtype = BY_NAME[type_name]
    extents = tuple(entry.shape[:-1] if dtype.pairs else entry.shape)
    box, start = Box(offset, extents), data_start + entry.data_offsets[0]
    num_bytes = box.size * dtype.itemsize
    fits = (
        len(shape) == len(offset) == len(extents)
        and math.prod(shape) < MAX_ELEMENTS
        and Box.whole(shape).contains(box)
        and entry.dtype == dtype.safetensors
        and entry.data_offsets[1] - entry.data_offsets[0] == num_bytes > 0
        and start % dtype.itemsize == 0
    )
    if not fits:
        raise ValueError(f"{name}: piece {box} of shape {shape} does not fit its entry")
    return ScannedPiece(name, type_name, shape, box, start, num_bytes)


# ---------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LostTensor:
    """A tensor that is not whole any more."""

    name: str  # stored name
    dtype: str  # element type
    shape: tuple[int, ...]  # global shape
    holes: tuple[Box, ...]
    """The boxes of which no good piece is left; empty if pieces contradict each other."""
    files: tuple[str, ...]
    """The files that hold or should hold the missing pieces, as far as they are known."""


@dataclass(frozen=True, slots=True, eq=False)
class ScannedTensors:
    """The content of all files, put together."""

    boxes: BoxTable  # pieces of the whole tensors, sorted by tensor
    file: npt.NDArray[np.int64]  # row of the file of each piece in the list of files
    position: npt.NDArray[np.int64]  # first byte of each piece there
    unchecked: tuple[str, ...]
    """Names of whole tensors that no old digest proves, whether they are kept or not."""
    lost: tuple[LostTensor, ...]  # the tensors that are not whole

    def index(self, files: Sequence[ScannedFile]) -> Index:
        """The whole tensors as an index of the scanned files, with the digests of the scan."""
        digests = [file.written.digests for file in files]
        return Index.of(
            self.boxes,
            self.file,
            self.position,
            tuple(StoredFile(file.path, file.num_bytes) for file in files),
            block_size=BLOCK_SIZE,
            digests=np.concatenate([*digests, np.zeros((0, 2), np.uint64)]),
            first_block=np.cumsum([0, *map(len, digests)]),
        )


_Kind = tuple[str, tuple[int, ...]]
"""Dtype name and global shape of a tensor."""


def assemble_tensors(
    small: SmallFiles, files: Sequence[ScannedFile], *, keep_unchecked: bool
) -> ScannedTensors:
    """Find out which tensors are whole."""
    kinds, contradicted = _kinds(small, files)
    rows = {name: row for row, name in enumerate(kinds)}
    table = TensorTable.of([(name, *kind) for name, kind in kinds.items()])
    good: list[tuple[int, int, ScannedPiece]] = []
    lost_in: dict[str, set[str]] = {}
    seen: set[tuple[str, Box]] = set()
    for number, file in enumerate(files):
        for piece in file.pieces:
            if file.is_good(piece) and piece.name not in contradicted:
                good.append((rows[piece.name], number, piece))
                if (piece.name, piece.box) in seen:
                    contradicted.add(piece.name)
                seen.add((piece.name, piece.box))
            else:
                lost_in.setdefault(piece.name, set()).add(file.path)
    good.sort(key=lambda found: found[0])
    boxes = BoxTable.of(table, [(row, piece.box) for row, _, piece in good])
    torn = set(faulty_tensors(boxes)) | {rows[name] for name in contradicted}
    whole = [row for row in range(len(table)) if row not in torn]
    names = table.names
    unproven = {p.name for _, number, p in good if not files[number].is_proven(p)}
    if small.trusted_index is None:
        # Of tensors without elements there is nothing but the word of an index.
        unproven |= set(names) - {piece.name for _, _, piece in good}
    unchecked = tuple(names[row] for row in whole if names[row] in unproven)
    if not keep_unchecked:
        whole = [row for row in whole if names[row] not in unproven]
    new_rows = {row: number for number, row in enumerate(whole)}
    kept = [found for found in good if found[0] in new_rows]
    of_torn: dict[int, list[Box]] = {row: [] for row in sorted(torn)}
    for row, _, piece in good:
        if row in torn:
            of_torn[row].append(piece.box)
    return ScannedTensors(
        BoxTable.of(
            TensorTable.of([(names[row], *kinds[names[row]]) for row in whole]),
            [(new_rows[row], piece.box) for row, _, piece in kept],
        ),
        np.array([number for _, number, _ in kept], dtype=np.int64),
        np.array([piece.position for _, _, piece in kept], dtype=np.int64),
        unchecked,
        tuple(
            LostTensor(
                names[row],
                *kinds[names[row]],
                tuple(uncovered(Box.whole(table.shape(row)), found)),
                tuple(sorted(lost_in.get(names[row], ()))),
            )
            for row, found in of_torn.items()
        ),
    )


def _kinds(small: SmallFiles, files: Sequence[ScannedFile]) -> tuple[Mapping[str, _Kind], set[str]]:
    """Every tensor that is known of, and the names about which files contradict each other."""
    kinds: dict[str, _Kind] = {}
    contradicted = set()
    if small.trusted_index is not None:
        kinds.update(_kinds_of(small.trusted_index))
    for file in files:
        for piece in file.pieces:
            kind = (piece.dtype, piece.shape)
            if kinds.setdefault(piece.name, kind) != kind:
                contradicted.add(piece.name)
    if small.index is not None and small.index_state == "decodes":
        # Its word counts for what no file tells, and for nothing else.
        for name, kind in _kinds_of(small.index):
            kinds.setdefault(name, kind)
    return kinds, contradicted


def _kinds_of(index: Index) -> Iterable[tuple[str, _Kind]]:
    tensors = index.tensors
    for row, name in enumerate(tensors.names):
        yield name, (tensors.dtype(row).name, tensors.shape(row))


__all__ = ["FileReport", "RepairPlan", "RepairReport", "plan_repair", "repair", "write_repaired"]


@dataclass(frozen=True, slots=True)
class FileReport:
    """State of a data file of a damaged checkpoint."""

    path: str
    """Relative to the damaged checkpoint."""
    state: DataFileState
    """`sound`, `readable` (no digests prove all of it), `damaged`, `truncated`, `unreadable`
    (nothing in it can be found) or `missing`."""
    problem: str
    """What is wrong with it; empty if nothing is."""

    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The entries of a damaged checkpoint that can be saved, and those that are lost."""

    source: str
    """The damaged checkpoint."""
    target: str
    """The new one; empty as long as none is written."""
    save_id: str
    """Which save was looked at."""
    record: SmallFileState
    """State of the commit record: `intact`, `damaged` or `missing`."""
    index: SmallFileState
    """State of the index: these, or `decodes`: it can be read, but the record that has its digest
    cannot."""
    values: SmallFileState
    """State of the values file, likewise."""
    files: tuple[FileReport, ...]
    """The data files."""
    saved: tuple[str, ...]
    """Names of the tensors that are saved."""
    unchecked: tuple[str, ...]
    """Names of tensors and values that are saved although no digest proves them. The new checkpoint
    has these names, and loads and verifications tell them."""
    left_out: tuple[str, ...]
    """Names of tensors and values that seem whole and are left out, because no digest proves them.
    """
    lost: tuple[LostTensor, ...]
    """The tensors that are not whole, and where their holes are."""
    lost_aliases: tuple[str, ...]
    """Further names of tensors that are lost."""
    num_values: int
    """Values, lists and objects that are saved."""
    num_bytes: int
    """Bytes of the tensors that are saved."""
    notes: tuple[str, ...]
    """What cannot be known."""

    __repr__ = short_repr

    @property
    def is_complete(self) -> bool:
        """True if everything that was saved once is saved again, and digests prove it."""
        is_proven = not self.unchecked and not self.left_out
        is_whole = not self.lost and not self.lost_aliases
        return self.values in {"intact", "decodes"} and self.knows_all and is_whole and is_proven

    @property
    def num_lost(self) -> int:
        """Names of tensors and values that are known and not saved."""
        return len(self.lost) + len(self.lost_aliases) + len(self.left_out)

    @property
    def knows_all(self) -> bool:
        """True if every tensor that has elements is known by name."""
        if self.index in {"intact", "decodes"}:
            return True
        readable = all(file.state not in {"missing", "unreadable"} for file in self.files)
        return self.record == "intact" and readable

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to save."""
        return not self.saved and not self.num_values


@dataclass(frozen=True, slots=True, eq=False)
class RepairPlan:
    """The input of `write_repaired`."""

    storage: Storage  # the damaged checkpoint
    source: TensorSource  # what is whole of it
    small: SmallFiles  # what there is of its small files
    files: tuple[ScannedFile, ...]  # its data files
    tensors: ScannedTensors  # what is whole
    document: native.ValuesDocument  # the values of the new checkpoint
    report: RepairReport  # the same for human readers

    __repr__ = short_repr


def repair(
    path: Any, target: Any, *, save_id: str | None = None, keep_unchecked: bool = False
) -> RepairReport:
    """Save what can be saved of a damaged checkpoint into a new one. Not collective.

    Only whole tensors are saved, and only what a digest proves to be what was saved once; the
    report says what is lost and what is left out. Memory is bounded by what headers and index need.

    Args:
        path: Directory of the damaged checkpoint, which is only read. Its commit record, index and
            values file may be damaged or gone.
        target: Directory of the new checkpoint: empty, or not there yet.
        save_id: Which save to look at, if `path` has files of several and no commit record.
        keep_unchecked: Save also tensors and values that seem whole although no digest proves
            them, which may be wrong. Their names are stored in the new checkpoint: a load that
            reads them warns, and `verify` lists them.

    Returns:
        What was saved and what is lost.

    Raises:
        CheckpointError: If nothing can be saved, or it is not clear which save is meant.
        CheckpointExistsError: If there is something at the target.
        FormatVersionError: If a newer remesh wrote the checkpoint.
        StorageError: If the storage of the target fails.
    """
    return write_repaired(plan_repair(path, save_id=save_id, keep_unchecked=keep_unchecked), target)


def plan_repair(
    path: Any, *, save_id: str | None = None, keep_unchecked: bool = False
) -> RepairPlan:
    """Find out what `repair` would save, reading everything and writing nothing.

    Args and errors are those of `repair`.
    """
    storage = open_storage(path)

    def read() -> tuple[SmallFiles, tuple[ScannedFile, ...]]:
        small = read_small_files(storage, save_id)
        identity = "" if small.record is None else native.identity_of(small.record)
        with native.unless_replaced(storage, identity):
            files = tuple(scan_data_files(storage, contents_of(storage, small), small))
        native.check_current(storage, identity)
        return small, files

    small, files = native.retry_if_replaced(read)
    tensors = assemble_tensors(small, files, keep_unchecked=keep_unchecked)
    document, lost_aliases, left_out = _document(small, tensors, keep_unchecked)
    report = RepairReport(
        source=storage.url,
        target="",
        save_id=small.save_id,
        record=small.record_state,
        index=small.index_state,
        values=small.values_state,
        files=tuple(FileReport(file.path, file.state, file.problem) for file in files),
        saved=tensors.boxes.tensors.names,
        unchecked=document.unchecked_names,
        left_out=left_out,
        lost=tensors.lost,
        lost_aliases=lost_aliases,
        num_values=len(document.values) + len(document.lists) + len(document.objects),
        num_bytes=int(tensors.boxes.num_bytes.sum()),
        notes=(),
    )
    report = replace(report, notes=tuple(_notes(report)))
    index = tensors.index(files)
    source = TensorSource(contents_of(storage, small), index)
    return RepairPlan(storage, source, small, files, tensors, document, report)


def _notes(report: RepairReport) -> Iterable[str]:
    """Say what the loss of files makes unknowable."""
    lost: set[SmallFileState] = {"damaged", "missing"}
    if not report.knows_all:
        yield (
            "the index is lost, and with it what lost files held: a tensor that lay wholly in one "
            "is not listed here"
        )
    if report.index in lost:
        yield "tensors without elements were only in the index: they are not listed here"
        if report.values in lost:
            yield "second names of tied tensors were in the index and the values file: all lost"
    if report.record in lost and report.index in lost and report.values in lost:
        yield (
            "nothing shows that this save was ever finished: files of a save that was killed may "
            "hold zeros where data is missing"
        )


# ---------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------


def _document(
    small: SmallFiles, tensors: ScannedTensors, keep_unchecked: bool
) -> tuple[native.ValuesDocument, tuple[str, ...], tuple[str, ...]]:
    """The values of the new checkpoint, the aliases that it loses, and the names left out."""
    document = native.ValuesDocument() if small.document is None else small.document
    aliases: Mapping[str, str] = document.aliases
    proves_aliases = small.values_state == "intact"
    if small.document is None and small.index is not None and small.index_state != "damaged":
        aliases, proves_aliases = small.index.aliases, small.index_state == "intact"
    names = set(tensors.boxes.tensors.names)
    unchecked = set(tensors.unchecked)
    if not proves_aliases:
        unchecked |= {alias for alias, name in aliases.items() if name in names | unchecked}
    unchecked |= {alias for alias, name in aliases.items() if name in unchecked}
    if small.values_state == "decodes":
        unchecked.update((*document.values, *document.lists, *document.objects))
        if not keep_unchecked:
            document = native.ValuesDocument()
    left_out = () if keep_unchecked else tuple(sorted(unchecked))
    kept = {
        alias: name
        for alias, name in aliases.items()
        if name in names and (keep_unchecked or alias not in unchecked)
    }
    lost = tuple(alias for alias in aliases if alias not in kept and alias not in left_out)
    holders = (names, kept, document.values, document.lists, document.objects)
    there = [document.path_of(name) for holder in holders for name in holder]
    missing = (*lost, *left_out, *(tensor.name for tensor in tensors.lost))
    gone = [document.path_of(name) for name in missing]
    sequences = {tuple(path): kind for path, kind in document.sequences}
    marked = {name for name in document.unchecked_names if any(name in held for held in holders)}
    if keep_unchecked:
        marked |= unchecked
    new = native.ValuesDocument(
        document.values,
        document.lists,
        document.objects,
        document.paths,
        [(list(path), kind) for path, kind in whole_sequences(sequences, there, gone).items()],
        kept,
        sorted(marked) or msgspec.UNSET,
    )
    return new, lost, left_out


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_repaired(plan: RepairPlan, target: Any) -> RepairReport:
    """Write the new checkpoint that was planned.

    Args and errors are those of `repair`.
    """
    if plan.report.is_empty:
        hint = "; keep_unchecked=True saves what no digest proves" if plan.report.left_out else ""
        raise CheckpointError(
            f"{plan.storage.url}: nothing can be saved; load another checkpoint{hint}"
        )
    storage = open_storage(target)
    _check_target(plan.storage, storage)
    save_id = os.urandom(6).hex()
    try:
        mark, content = _write_files(plan, storage, save_id)
    except BaseException:
        remove_files(storage, save_id)
        raise
    storage.put(mark, content, overwrite=False)
    return replace(plan.report, target=storage.url)


def _check_target(source: Storage, target: Storage) -> None:
    if is_local(source) and is_local(target):
        outer, inner = os.path.realpath(source.url), os.path.realpath(target.url)
        if Path(inner).is_relative_to(outer):
            raise CheckpointExistsError(
                f"{target.url} lies in the damaged checkpoint, which is not changed; choose another"
                " place"
            )
    if target.list():
        raise CheckpointExistsError(f"{target.url} is not empty; choose another place")


def _write_files(plan: RepairPlan, storage: Storage, save_id: str) -> SmallFile:
    """Write everything but the record, which is returned; each file is that of a rank."""
    folder, tensors, old = native.data_folder(save_id), plan.tensors, plan.small.record
    boxes = tensors.boxes
    assignments: list[IntArray] = []
    parts: list[list[Part]] = []
    saved = Saved(
        save_id,
        Cuts.of(boxes),
        assignments,
        plan.document,
        b"",
        {
            **({} if old is None else old.metadata),
            "repaired_from": plan.storage.url,
            "num_lost": plan.report.num_lost,
        },
        len(plan.files) if old is None else old.world_size,
        parts,
    )
    for number, file in enumerate(plan.files):
        rows = np.flatnonzero(tensors.file == number)
        if not len(rows):
            continue
        path = f"{folder}/{file.path.rpartition('/')[2]}"
        # As in every data file, wide elements come first.
        order = (tensors.position[rows], -boxes.tensors.itemsizes[boxes.tensor[rows]])
        rows = rows[np.lexsort(order)]
        assignments.append(rows)
        stored = file.written.stored_bytes or file.num_bytes
        is_good = file.state in {"sound", "readable"}
        if is_good and storage.link_from(plan.storage, file.path, path, stored):
            positions = tensors.position[rows]
            parts.append([part_of(path, file.num_bytes, positions, file.written)])
        else:
            parts.append([_copy_pieces(plan, rows, storage, path)])
    # Values and index come last: that makes the links in their folder durable.
    *others, record = native_writer.NativeWriter().small_files(saved)
    for path, data in others:
        storage.put(path, data, overwrite=False)
    storage.sync()
    return record


def _copy_pieces(plan: RepairPlan, rows: IntArray, target: Storage, path: str) -> Part:
    """Copy some pieces into a new file, not compressed."""
    boxes = plan.tensors.boxes
    header, positions, num_bytes = native_writer.data_header(boxes, rows)
    pieces = [FilePiece.of_bytes(0, header)]
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        tensor, box = int(boxes.tensor[row]), boxes.box(row)
        name, dtype = boxes.tensors.names[tensor], boxes.tensors.dtype(tensor)
        memory = StoredMemory(plan.source, name, dtype.name, box)
        pieces.append(FilePiece(memory, box.shape, dtype, position))
    layout = FileLayout(pieces, num_bytes)
    copies = stored_copies(piece.memory for piece in pieces)
    stager = direct_stager(layout, copies)
    files = whole_files([path], [num_bytes], [0])
    [written] = write_staged(target, files, num_bytes, stager, on_chunk=lambda _size: None)
    return part_of(path, num_bytes, positions, written)
