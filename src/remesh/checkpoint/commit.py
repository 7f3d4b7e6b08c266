"""The commit: rank 0 makes a checkpoint exist once every rank's file is durable.

The values are known before the tensors are written, so they are written beside them
(`write_beside`), as are the directories. What is left to do after the last byte is short: the file
itself, the index and the record.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from contextlib import suppress

from remesh import __version__
from remesh.checkpoint.save_plan import GlobalSavePlan
from remesh.checkpoint.sharing import check_arrived
from remesh.errors import CheckpointError, StorageError
from remesh.events import Emit
from remesh.formats import native
from remesh.integrity import hex_digest
from remesh.maintenance.orphans import remove_files, remove_orphans
from remesh.storage import Storage


def write_beside(storage: Storage, save: GlobalSavePlan | None, emit: Emit) -> None:
    """What a rank does while its file is being written.

    Directories are made durable, and rank 0 writes the values.

    Args:
        storage: Where the checkpoint is.
        save: On rank 0, what it knows of the save.
        emit: Told of `save.values_written`.

    Raises:
        StorageError: If the storage fails.
    """
    if save is None:
        storage.sync()
    else:
        document = save.document.encode()
        storage.put(_values_path(save.save_id), document, overwrite=False)
        emit("save.values_written", len(document))


def commit(
    storage: Storage, save: GlobalSavePlan, parts: Sequence[native.Part], emit: Emit
) -> None:
    """Write the index and, in one atomic step, the commit record; the values are there already.

    A failure before that step removes all files of the save. A failure in it, or after it, leaves
    everything in place, because the record may be visible already.

    Args:
        storage: Where the checkpoint is.
        save: What rank 0 knows of the save.
        parts: What each rank says of its file, in rank order.
        emit: Told of the moments from `save.parts_gathered` to `save.committed`.

    Raises:
        CheckpointExistsError: If somebody else has committed a checkpoint there meanwhile.
        NotSharedError: If files of other ranks are not there.
        StorageError: If the storage fails.
    """
    try:
        emit("save.parts_gathered", sum(part.num_bytes for part in parts))
        _check_arrived(storage, save.save_id, parts)
        record = _write_index(storage, save, parts, emit)
        storage.sync()
        emit("save.before_commit")
    except BaseException:
        remove_files(storage, save.save_id)
        raise
    # Another job may have committed here since the ranks agreed; then its save is replaced, too.
    replaced = {save.replaced.save_id} if save.replaced is not None else set()
    if save.options.overwrite:
        with suppress(CheckpointError, StorageError):  # what cannot be read is not removed
            replaced.add(native.read_record(storage).save_id)
    storage.put(native.RECORD_NAME, native.encode_record(record), overwrite=save.options.overwrite)
    emit("save.committed")
    for save_id in replaced:
        remove_files(storage, save_id)
    if replaced:
        with suppress(StorageError):  # the checkpoint is there; leftovers may be removed later
            remove_orphans(storage)


def _check_arrived(storage: Storage, save_id: str, parts: Sequence[native.Part]) -> None:
    """Check that the files of all ranks are where this rank, which has seen its own, looks."""
    if len(parts) > 1:
        files = ((rank, part.path, part.num_bytes) for rank, part in enumerate(parts) if part.path)
        check_arrived(storage, f"{native.data_folder(save_id)}/", files)


def _values_path(save_id: str) -> str:
    return f"{native.data_folder(save_id)}/values.msgpack"


def _write_index(
    storage: Storage, save: GlobalSavePlan, parts: Sequence[native.Part], emit: Emit
) -> native.CommitRecord:
    """Write the index; returns the record that refers to everything."""
    files = small_files_of(save, parts)
    storage.put(files.record.index.path, files.index_bytes, overwrite=False)
    emit("save.index_written", len(files.index_bytes))
    return files.record


def small_files_of(save: GlobalSavePlan, parts: Sequence[native.Part]) -> native.NativeFiles:
    """Index, values and the record that refers to everything; nothing is written.

    Args:
        save: What rank 0 knows of the save.
        parts: What each rank says of its file, in rank order.
    """
    document = save.document.encode()
    index = native.build_index(save.boxes, save.assignments, parts, save.document.aliases)
    encoded = index.encode()
    index_path = f"{native.data_folder(save.save_id)}/index.safetensors"
    record = native.CommitRecord(
        format=native.FORMAT_NAME,
        version=native.FORMAT_VERSION,
        save_id=save.save_id,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        world_size=len(parts),
        remesh_version=__version__,
        index=native.FileRecord(
            path=index_path, num_bytes=len(encoded), digest=hex_digest(encoded)
        ),
        values=native.FileRecord(
            path=_values_path(save.save_id), num_bytes=len(document), digest=hex_digest(document)
        ),
        files=tuple(
            native.FileRecord(path=file.path, num_bytes=file.num_bytes, digest=digest)
            for file, digest in zip(index.files, native.file_digests(index), strict=True)
        ),
        metadata=dict(save.options.metadata),
    )
    return native.NativeFiles(record, encoded, document)
