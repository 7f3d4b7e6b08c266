"""Brings the newest snapshot from the memory of the nodes to storage, when a job ends in failure.

Snapshots in memory end with the agents. While the job runs, its processes start again and save at
once what they loaded from memory. When the job ends in failure, the agents store it: each copies
the data files of its node, and writes a note for each whole file. An agent that finds notes for all
files writes the commit record. So agents need not exchange messages, the last one commits, and if
files are lost, there is no commit.

A process may have died during the commit of the newest snapshot, which is then committed on some
nodes only. Therefore the one before is stored as well, unless the newest is in storage by then.

The name of a snapshot may be taken in the root by a checkpoint of another run, or by one that is
damaged. The snapshot is then stored under a name that begins with its save id.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from remesh import catalog
from remesh.catalog import CheckpointInfo
from remesh.checkpoint.scattered import ROOT_NAME
from remesh.errors import CheckpointExistsError, CheckpointNotFoundError, RemeshError
from remesh.formats import native
from remesh.storage import LocalStorage, Storage, open_storage

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20


def store_newest(directory: str, *, whole_only: bool) -> list[str]:
    """Copy the newest snapshots of each root to it; where this call committed checkpoints."""
    committed = []
    for folder in sorted(Path(directory).iterdir()) if directory else []:
        try:
            committed += _store_from(folder, whole_only=whole_only)
        except RemeshError as error:
            log.warning("the snapshots in %s are not stored: %s", folder, error)
    return committed


def _store_from(folder: Path, *, whole_only: bool) -> list[str]:
    """Store the snapshots of a folder; where one was committed, if it was."""
    memory = LocalStorage(folder, direct_io=False)
    root = memory.read(ROOT_NAME).decode()
    stored = catalog.list_checkpoints(open_storage(root))
    for info in reversed([info for info in catalog.list_checkpoints(memory) if not info.problem]):
        if any(_replaces(one, info) for one in stored):
            break
        source = LocalStorage(folder / info.name, direct_io=False)
        record = native.read_record(source)
        if whole_only and not all(source.exists(file.path) for file in record.files):
            continue
        is_taken = any(one.name == info.name for one in stored)
        name = f"{info.save_id}_{info.name}" if is_taken else info.name
        place = catalog.place_of(root, name)
        if _store(source, record, open_storage(place)):
            log.info("stored %s, which was in memory only", place)
            return [place]
    return []


def _replaces(stored: CheckpointInfo, snapshot: CheckpointInfo) -> bool:
    """True if a checkpoint in storage makes a snapshot unnecessary.

    One of another run does not, nor one that cannot be read, nor anything else below the root.
    """
    return stored.run == snapshot.run and stored.step >= snapshot.step and not stored.problem


def _store(source: Storage, record: native.CommitRecord, target: Storage) -> bool:
    """Copy what a node has, and commit if all files are there; whether this call has."""
    files = native.read_small_files(source)
    notes = {file.path: f"{file.path}.whole" for file in record.files}
    for file in record.files:
        # What is there already another node copies, which has a replica.
        if source.exists(file.path) and not target.exists(file.path):
            _copy(source, target, file)
            target.sync()
            target.put(notes[file.path], b"", overwrite=True)
    target.put(record.index.path, files.index_bytes, overwrite=True)
    target.put(record.values.path, files.values_bytes, overwrite=True)
    if not set(notes.values()) <= set(target.list()):
        return False
    try:
        target.put(native.RECORD_NAME, native.encode_record(record), overwrite=False)
    except CheckpointExistsError:
        return False  # another node was the last one as well
    for note in notes.values():
        target.delete(note)
    return True


def _copy(source: Storage, target: Storage, file: native.FileRecord) -> None:
    writer = target.create(file.path, file.num_bytes)
    try:
        for start in range(0, file.num_bytes, PIECE_BYTES):
            piece = np.empty(min(PIECE_BYTES, file.num_bytes - start), np.uint8)
            if source.read_into(file.path, start, piece) < len(piece):
                raise CheckpointNotFoundError(f"{source.url}/{file.path} is shorter than it was")
            writer.write(start, piece)
        writer.finish()
    finally:
        writer.abort()
