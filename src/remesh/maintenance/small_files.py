"""The small files of a damaged checkpoint: commit record, index and values.

Each may be gone or damaged. What the record has a digest for is *intact* or *damaged*. Without a
record, index and values file are accepted if they *decode*, which proves less.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from remesh.core import values
from remesh.core.index import Index
from remesh.core.integrity import hex_digest
from remesh.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from remesh.formats import native
from remesh.storage import Storage

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
