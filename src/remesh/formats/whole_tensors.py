"""Files in which tensors lie whole, written by all ranks together.

Rank 0 decides which tensor lies where in which file. Then every rank writes the bytes that it holds
at their place in the file, so all ranks write at the same time, no tensor is sent anywhere, and no
rank ever holds more than its boxes. Rows of a box that are not neighbours in the tensor are written
one by one.

Files have the id of the save behind their names until all of them are durable.

In an object store a file has one writer. There each file is given to a rank (`give_to_ranks`) that
collects its tensors (`remesh.pipeline.collect`), and the id of the save may be a part of its name.

Weights fill one file after the other up to a limit, in their order, as model hubs do it
(`split_into_files`). Inside a safetensors file wide elements come first, so that each begins at a
multiple of its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from remesh.core.dtypes import BY_NAME, DType
from remesh.core.geometry import IntArray
from remesh.core.safetensors_file import encode_header
from remesh.core.tables import BoxTable
from remesh.errors import UnsupportedValueError
from remesh.formats.writer import Frame, Rename, Saved, SmallFile, Writer

_NUMBER_AND_SUFFIX = re.compile(r"(-\d{5,}-of-\d{5,})?\.[^.]+$")


class WholeFile(msgspec.Struct, frozen=True):
    """A file."""

    name: str  # its final name
    num_bytes: int  # its size
    literals: list[tuple[int, bytes]]  # position and content of all bytes that are not of tensors
    checksums: list[tuple[int, int, tuple[int, ...]]] = []
    """See `Frame.checksums`; zeros stand there in `literals`."""


class WholeFiles(msgspec.Struct, frozen=True):
    """All files."""

    files: list[WholeFile]
    places: dict[str, tuple[int, int]]  # for each tensor its file and its first byte there
    index: str = ""
    """Name of the file that says which tensor lies in which file; empty if there is none."""
    writers: list[int] = []  # the rank that writes each file; empty if all ranks write all files
    names: str = "renamed"
    """Whether files are renamed when all are durable (`renamed`), have the id of the save in their
    names (`by_save`), or have their final names at once (`final`)."""

    def encode(self) -> bytes:
        """The form that is sent to all ranks."""
        return msgspec.msgpack.encode(self)


def decode_files(plan: bytes) -> WholeFiles:
    """The files of their encoded form."""
    return msgspec.msgpack.decode(plan, type=WholeFiles)


class WholeWriter(Writer):
    """Writes files in which tensors lie whole; `plan` says which."""

    def frames(
        self, boxes: BoxTable, rows: IntArray, rank: int, save_id: str, plan: bytes
    ) -> list[Frame]:
        """The files of which a rank writes something; shared literals are written by rank 0."""
        files, names = decode_files(plan), boxes.tensors.names
        if files.writers:  # a rank has collected the tensors of its files, and writes them in order
            rows = np.arange(len(boxes))
        placed = [files.places[names[tensor]] for tensor in boxes.tensor[rows].tolist()]
        numbers, positions = np.array(placed, np.int64).reshape(-1, 2).T
        found = []
        for number, file in enumerate(files.files):
            here = np.flatnonzero(numbers == number)
            name, literals = written_name(files, number, save_id), tuple(file.literals)
            if files.writers and files.writers[number] == rank:
                here = here[np.argsort(positions[here], kind="stable")]
                place = rows[here], positions[here]
                frame = Frame(
                    name, file.num_bytes, *place, literals=literals, checksums=tuple(file.checksums)
                )
                found.append(frame)
            elif not files.writers and (rank == 0 or len(here)):
                literals, place = literals if rank == 0 else (), (rows[here], positions[here])
                frame = Frame(name, file.num_bytes, *place, literals=literals, is_shared=True)
                found.append(frame)
        return found

    def small_files(self, saved: Saved) -> Sequence[SmallFile | Rename]:
        """How the files get their final names, if they do not have them."""
        plan = decode_files(saved.plan)
        if plan.names != "renamed":
            return []
        return [
            Rename(written_name(plan, number, saved.save_id), file.name)
            for number, file in enumerate(plan.files)
        ]


def give_to_ranks(plan: bytes, world_size: int, names: str) -> bytes:
    """Let each file be written by one rank: large ones first, to the rank that has least."""
    files = decode_files(plan)
    writers = [0] * len(files.files)
    loads = [0] * world_size
    for number in sorted(range(len(writers)), key=lambda number: -files.files[number].num_bytes):
        writers[number] = loads.index(min(loads))
        loads[writers[number]] += files.files[number].num_bytes
    return msgspec.structs.replace(files, writers=writers, names=names).encode()


def written_name(plan: WholeFiles, number: int, save_id: str) -> str:
    """The name under which a file is written."""
    name = plan.files[number].name
    if plan.names != "by_save":
        return name if plan.names == "final" else f"{name}.{save_id}"
    return _NUMBER_AND_SUFFIX.sub(rf"-{save_id}\g<0>", name, count=1)


# ---------------------------------------------------------------------------------------------
# Weight files
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a weight file."""

    name: str
    dtype: str  # name of its element type in the file
    shape: tuple[int, ...]  # its whole shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize


def safetensors_code(name: str, dtype: DType) -> str:
    """The name of an element type in safetensors files that others read."""
    if dtype.pairs or dtype.is_opaque or name == "__metadata__":
        what = f"elements of type {dtype.name}" if name != "__metadata__" else "a tensor called so"
        raise UnsupportedValueError(
            f"{name}: a safetensors file has no form for {what}\n"
            "Leave it out, or choose another format"
        )
    return dtype.safetensors


def safetensors_header(tensors: Sequence[FileTensor]) -> tuple[bytes, list[int]]:
    """The first bytes of a safetensors file, and the byte at which each tensor begins."""
    rows = [
        (one.name, safetensors_code(one.name, BY_NAME[one.dtype]), one.shape, one.num_bytes)
        for one in tensors
    ]
    return encode_header(rows, {"format": "pt"})


def split_into_files(
    tensors: Sequence[FileTensor], max_file_bytes: int | None
) -> list[list[FileTensor]]:
    """The tensors of each file, wide elements first; one above the limit has a file alone."""
    files: list[list[FileTensor]] = []
    num_bytes = 0
    for tensor in tensors:
        is_full = max_file_bytes is not None and num_bytes + tensor.num_bytes > max_file_bytes
        if not files or (is_full and files[-1]):
            files.append([])
            num_bytes = 0
        files[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return [sorted(file, key=lambda tensor: -BY_NAME[tensor.dtype].itemsize) for file in files]


def file_names(stem: str, suffix: str, num_files: int) -> list[str]:
    """`model.safetensors`, or `model-00001-of-00003.safetensors` and so on."""
    if num_files == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{n + 1:05d}-of-{num_files:05d}{suffix}" for n in range(num_files)]
