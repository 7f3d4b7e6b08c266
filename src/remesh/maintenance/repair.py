"""Saving what can be saved of a damaged checkpoint, into a new one.

`damage_scan` finds out what is whole, without writing; `plan_repair` puts that into a report, and
`repair` writes it down. The damaged checkpoint is never changed. The new one gets a save id, an
index and a record of its own. Data files that are sound are taken over as they are, by hard links
where the file system has them. Elsewhere, and of a damaged file, the pieces of whole tensors are
copied into a new file, so that every file of the new checkpoint is sound from its first byte to its
last. What is copied is compared with the digests of the scan.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from remesh._repr import short_repr
from remesh.core.geometry import IntArray
from remesh.core.state import Path as StatePath
from remesh.core.tables import Cuts
from remesh.errors import CheckpointError, CheckpointExistsError
from remesh.formats import native, native_writer
from remesh.formats.framing import Part, Saved, SmallFile, part_of
from remesh.maintenance.damage_scan import (
    DataFileState,
    LostTensor,
    ScannedFile,
    ScannedTensors,
    SmallFiles,
    SmallFileState,
    assemble_tensors,
    contents_of,
    read_small_files,
    scan_data_files,
)
from remesh.maintenance.orphans import remove_files
from remesh.pipeline import FileLayout, FilePiece, one_file, write_stream
from remesh.pipeline.source import StoredMemory, TensorSource, stored_copies
from remesh.storage import Storage, is_local, open_storage

__all__ = ["FileReport", "RepairPlan", "RepairReport", "plan_repair", "repair", "write_repaired"]


@dataclass(frozen=True, slots=True)
class FileReport:
    """State of a data file of a damaged checkpoint."""

    path: str
    """Relative to the damaged checkpoint."""
    state: DataFileState
    """`sound`, `damaged`, `truncated`, `unreadable` (nothing in it can be found) or `missing`."""
    problem: str
    """What is wrong with it; empty if it is sound."""

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

    small, files = native.begin_anew(read)
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
    marked = {name for name in document.unchecked_names if any(name in held for held in holders)}
    if keep_unchecked:
        marked |= unchecked
    new = native.ValuesDocument(
        document.values,
        document.lists,
        document.objects,
        document.paths,
        _whole_sequences(document, there, gone),
        kept,
        sorted(marked) or msgspec.UNSET,
    )
    return new, lost, left_out


def _whole_sequences(
    document: native.ValuesDocument, there: Iterable[StatePath], gone: Iterable[StatePath]
) -> list[tuple[list[str | int], str]]:
    """Lists and tuples without lost items; in others, later items would move up."""
    nodes = {path[:length] for path in there for length in range(len(path) + 1)}
    broken = {
        path[: length - 1]
        for path in gone
        for length in range(1, len(path) + 1)
        if path[:length] not in nodes
    }
    return [(path, kind) for path, kind in document.sequences if tuple(path) not in broken]


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
        if file.state == "sound" and storage.copy_from(plan.storage, file.path, path, stored):
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
    pieces = []
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        tensor, box = int(boxes.tensor[row]), boxes.box(row)
        name, dtype = boxes.tensors.names[tensor], boxes.tensors.dtype(tensor)
        memory = StoredMemory(plan.source, name, dtype.name, box)
        pieces.append(FilePiece(memory, box.shape, dtype, position))
    layout = FileLayout(header, pieces, positions.tolist(), num_bytes)
    copies = stored_copies(piece.memory for piece in pieces)
    files = one_file(path, num_bytes)
    [written] = write_stream(target, files, layout, lambda _size: None, copies)
    return part_of(path, num_bytes, positions, written)
