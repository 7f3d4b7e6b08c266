"""Writing remesh's own format (`native`): safetensors files, index, values and record.

A rank writes one file, or some more for what does not change (`remesh.checkpoint.unchanged`). The
values are known before the tensors are written and are written beside them. When all data files
are durable, the index is made of what each rank says of its file, and then the record, which makes
the checkpoint exist.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from remesh import __version__
from remesh.core import safetensors_file
from remesh.core.dtypes import DTYPES
from remesh.core.geometry import IntArray
from remesh.core.index import Index, StoredFile
from remesh.core.integrity import BLOCK_SIZE, WrittenFile, hex_digest
from remesh.core.tables import BoxTable, Cuts
from remesh.errors import CheckpointNotFoundError
from remesh.formats.native import (
    FORMAT_NAME,
    FORMAT_VERSION,
    RECORD_NAME,
    CommitRecord,
    FileRecord,
    data_folder,
    data_path,
    encode_record,
    read_record,
    records_of_files,
)
from remesh.formats.writer import Existing, Frame, Part, Saved, SmallFile, Writer
from remesh.storage import Storage


def data_header(boxes: BoxTable, rows: IntArray) -> tuple[bytes, IntArray, int]:
    """The header of a data file of some rows, where each piece begins, and the file's size."""
    tensors, entries = [], {}
    table, of = boxes.tensors, boxes.tensor[rows]
    dtypes = [DTYPES[code] for code in table.dtypes[of].tolist()]
    whole = [
        tuple(row[:n])
        for row, n in zip(table.shapes[of].tolist(), table.ndims[of].tolist(), strict=True)
    ]
    num_bytes = boxes.num_bytes[rows].tolist()
    pieces = zip(of.tolist(), dtypes, whole, *boxes.bounds(rows), num_bytes, strict=True)
    for tensor, dtype, full, offset, shape, size in pieces:
        name = table.names[tensor]
        key = name if shape == full else f"{name}@{','.join(map(str, offset))}"
        while key in entries or key == "__metadata__":
            key += "'"
        entries[key] = [name, dtype.name, full, offset]
        tensors.append((key, dtype.safetensors, (*shape, 2) if dtype.pairs else shape, size))
    metadata = {"format": FORMAT_NAME, "pieces": msgspec.json.encode(entries).decode()}
    header, positions = safetensors_file.encode_header(tensors, metadata)
    return header, np.array(positions, dtype=np.int64), len(header) + sum(num_bytes)


def build_index(
    cuts: Cuts,
    assignments: Sequence[IntArray],
    parts: Sequence[Sequence[Part]],
    aliases: Mapping[str, str],
) -> Index:
    """The index of what all ranks wrote: `assignments` are the rows of `cuts` of each."""
    file = np.zeros(len(cuts), dtype=np.int64)
    position = np.zeros(len(cuts), dtype=np.int64)
    files: list[StoredFile] = []
    found: list[WrittenFile] = []
    written = [part for own in parts for part in own]
    for rank, (all_rows, own) in enumerate(zip(assignments, parts, strict=True)):
        in_file = [_numbers_of(part, len(all_rows)) for part in own]
        sent = np.sort(np.concatenate([np.zeros(0, np.int64), *in_file]))
        assert np.array_equal(sent, np.arange(len(all_rows))), (
            f"rank {rank} says that it wrote other boxes than those assigned to it"
        )
        for numbers, part in zip(in_file, own, strict=True):
            file[all_rows[numbers]] = len(files)
            position[all_rows[numbers]] = np.frombuffer(part.positions, dtype=np.int64)
            files.append(StoredFile(part.path, part.num_bytes))
            found.append(part.written)
    digests = [np.zeros((0, 2), dtype=np.uint64), *(one.digests for one in found)]
    compressed: tuple[IntArray, ...] = ()
    if any(one.stored_begin is not None for one in found):
        begins = [
            np.full(len(one.digests), -1) if one.stored_begin is None else one.stored_begin
            for one in found
        ]
        sizes = [part.stored_size for part in written]
        compressed = (np.concatenate(begins), np.array(sizes, dtype=np.int64))
    return Index.of_cuts(
        cuts,
        file,
        position,
        tuple(files),
        dict(aliases),
        BLOCK_SIZE,
        np.concatenate(digests),
        np.cumsum([len(one) for one in digests], dtype=np.int64),
        *compressed,
    )


def _numbers_of(part: Part, num_assigned: int) -> IntArray:
    """Numbers of a file's boxes in its rank's assignment."""
    if part.numbers is None:
        return np.arange(num_assigned)
    return np.frombuffer(part.numbers, dtype=np.int64)


def _record_of(path: str, data: bytes) -> FileRecord:
    return FileRecord(path=path, num_bytes=len(data), digest=hex_digest(data))


class NativeWriter(Writer):
    """Writes remesh's own format."""

    name = FORMAT_NAME
    has_record = has_metadata = True

    def frames(
        self, boxes: BoxTable, rows: IntArray, rank: int, save_id: str, _plan: bytes
    ) -> list[Frame]:
        if not len(rows):
            return []
        header, positions, num_bytes = data_header(boxes, rows)
        path, literals = data_path(save_id, rank), ((0, header),)
        return [Frame(path, num_bytes, rows, positions, literals=literals)]

    def small_files(self, saved: Saved) -> list[SmallFile]:
        """Values and index, and the record that refers to everything."""
        document = saved.document.encode()
        values_path = f"{data_folder(saved.save_id)}/values.msgpack"
        index = build_index(saved.cuts, saved.assignments, saved.parts, saved.document.aliases)
        index_path, encoded = f"{data_folder(saved.save_id)}/index.safetensors", index.encode()
        record = CommitRecord(
            format=FORMAT_NAME,
            version=FORMAT_VERSION,
            save_id=saved.save_id,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            world_size=saved.world_size,
            remesh_version=__version__,
            index=_record_of(index_path, encoded),
            values=_record_of(values_path, document),
            files=records_of_files(index),
            metadata=dict(saved.metadata),
        )
        return [
            (values_path, document),
            (index_path, encoded),
            (RECORD_NAME, encode_record(record)),
        ]

    def existing(self, storage: Storage, _options: Mapping[str, object]) -> Existing | None:
        try:
            record = read_record(storage)
        except CheckpointNotFoundError:
            return None
        return Existing(f"saved {record.created}", record.save_id, (RECORD_NAME,))


WRITERS = (NativeWriter(),)
