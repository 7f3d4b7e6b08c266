"""What a rank writes, as one stream of bytes: the data files that a writer describes, laid out.

A writer says which of the rank's boxes lie where in which file (`Frame`). The files follow each
other in the stream, each from an aligned byte on, so that direct I/O works for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from remesh.checkpoint.local import LocalTensors
from remesh.core.dtypes import DTYPES
from remesh.core.geometry import IntArray, flat_runs
from remesh.formats.writer import Frame, Part, column_bytes
from remesh.pipeline import Collection, Compress, FileLayout, FilePiece, StreamFiles
from remesh.pipeline.write import whole_files
from remesh.storage import ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class RankStream:
    """The bytes that one rank writes."""

    layout: FileLayout  # the bytes
    files: StreamFiles  # the files that they are cut into
    parts: tuple[Part, ...]  # what the rank will say of each file, without digests
    collection: Collection | None = None
    """What the ranks hold together, if the rank collects the tensors of its files."""


def lay_out(
    frames: Sequence[Frame],
    tensors: LocalTensors,
    numbers: Sequence[IntArray] = (),
    alignment: int = ALIGNMENT,
    compress: Compress | None = None,
) -> RankStream:
    """The stream of a rank; rows of the frames of its data files are those of its boxes.

    For each file, `numbers` has the numbers of its boxes in the rank's assignment; None for all.
    Files may begin at multiples of `alignment`, and begin with chunks if they are compressed.
    """
    if any(frame.is_shared for frame in frames):
        return _lay_out_shared(frames, tensors)
    pieces: list[FilePiece] = []
    starts: list[int] = []
    end = 0
    for frame in frames:
        start = -(-end // alignment) * alignment
        if start > end:
            pieces.append(FilePiece.of_bytes(end, bytes(start - end)))
        added = [FilePiece.of_bytes(start + at, data) for at, data in frame.literals if data]
        added += _pieces(frame, tensors, start)
        pieces += sorted(added, key=lambda piece: piece.position)
        starts.append(start)
        end = start + frame.num_bytes
    paths, sizes = [frame.path for frame in frames], [frame.num_bytes for frame in frames]
    files = whole_files(paths, sizes, starts)
    if compress is not None:
        assert files.has_digests
        element_start, element_bytes = _element_sizes(pieces)
        files = replace(
            files,
            compress=compress,
            element_start=element_start,
            element_bytes=element_bytes,
        )
    return RankStream(
        FileLayout(pieces, end),
        files,
        _parts_of(frames, numbers),
    )


def _element_sizes(pieces: Sequence[FilePiece]) -> tuple[IntArray, IntArray]:
    """The bytes of a stream at which the size of its elements changes, and the sizes."""
    start, num_bytes = [0], [1]
    for piece in pieces:
        # The parts of a complex number are alike, and it is not.
        size = piece.dtype.itemsize // (2 if piece.dtype.pairs else 1)
        if size != num_bytes[-1]:
            start.append(piece.position)
            num_bytes.append(size)
    return np.array(start, np.int64), np.array(num_bytes, np.int64)


def _parts_of(frames: Sequence[Frame], numbers: Sequence[IntArray] = ()) -> tuple[Part, ...]:
    columns = [column_bytes(one) for one in numbers] if numbers else [None] * len(frames)
    return tuple(
        Part(frame.path, frame.num_bytes, column_bytes(frame.positions), b"", column)
        for frame, column in zip(frames, columns, strict=True)
    )


def _lay_out_shared(frames: Sequence[Frame], tensors: LocalTensors) -> RankStream:
    """The stream of a rank that writes boxes of tensors which lie whole in files of all ranks.

    In the stream boxes follow each other, each row by row. In a file a box is several runs, unless
    it is contiguous in its tensor: each of them is a range.
    """
    boxes = tensors.boxes
    pieces: list[FilePiece] = []
    ranges: list[tuple[int, int, IntArray, int]] = []  # file, start, positions, bytes of each
    end = 0
    for number, frame in enumerate(frames):
        for position, data in frame.literals:
            pieces.append(FilePiece.of_bytes(end, data))
            ranges.append((number, end, np.array([position]), len(data)))
            end += len(data)
        of = boxes.tensor[frame.rows]
        order = np.argsort(-boxes.tensors.itemsizes[of], kind="stable")
        for at in order.tolist():
            row, tensor = int(frame.rows[at]), int(of[at])
            box, dtype = boxes.box(row), boxes.tensors.dtype(tensor)
            runs, num_elements = flat_runs(boxes.tensors.shape(tensor), box)
            start = -(-end // dtype.itemsize) * dtype.itemsize
            if start > end:
                pieces.append(FilePiece.of_bytes(end, bytes(start - end)))
            end = start
            pieces.append(FilePiece(tensors.memories[row], box.shape, dtype, end))
            positions = int(frame.positions[at]) + runs * dtype.itemsize
            ranges.append((number, end, positions, num_elements * dtype.itemsize))
            end += box.size * dtype.itemsize
    layout = FileLayout(pieces, end)
    counts = [len(positions) for _, _, positions, _ in ranges]
    num_bytes = np.repeat(np.array([size for *_, size in ranges], np.int64), counts)
    starts = [start + size * np.arange(len(runs)) for _, start, runs, size in ranges]
    files = StreamFiles(
        tuple(frame.path for frame in frames),
        tuple(frame.num_bytes for frame in frames),
        np.repeat(np.array([file for file, *_ in ranges], np.int64), counts),
        np.concatenate([np.zeros(0, np.int64), *starts]),
        np.concatenate([np.zeros(0, np.int64), *(runs for _, _, runs, _ in ranges)]),
        num_bytes,
        is_shared=True,
    )
    return RankStream(layout, files, _parts_of(frames))


def _pieces(frame: Frame, tensors: LocalTensors, start: int) -> list[FilePiece]:
    boxes, rows = tensors.boxes, frame.rows
    dtypes = [DTYPES[code] for code in boxes.tensors.dtypes[boxes.tensor[rows]].tolist()]
    places = (frame.positions + start).tolist()
    _, shapes = boxes.bounds(rows)
    return [
        FilePiece(tensors.memories[row], shape, dtype, position)
        for row, shape, dtype, position in zip(rows.tolist(), shapes, dtypes, places, strict=True)
    ]
