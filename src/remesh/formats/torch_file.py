"""Files of `torch.save`: one archive with a nested state in it, read as it lies.

Names are the keys on the way to each tensor or value, joined by dots. A tensor that shares its
storage with another, whole or in part, is a range of the same bytes. What is not a dict is called
`value`.

A whole state is written as such a file, which `torch.load(weights_only=True)` reads, by all ranks
together (`whole_tensors`); a tied tensor is stored once. Checksums of the elements are 0 then,
because no rank sees all of a tensor; torch does not look at them. In an object store one rank
collects the tensors and writes the file, with checksums.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

from remesh.core import values
from remesh.core.state import Path, assemble
from remesh.core.tables import Cuts
from remesh.errors import CheckpointNotFoundError, UnsupportedValueError
from remesh.formats.archive import ArchiveLayout, tensor_record
from remesh.formats.building import IndexBuilder
from remesh.formats.native import ValuesDocument
from remesh.formats.pickle_writer import dumps
from remesh.formats.place import Place
from remesh.formats.whole_tensors import WholeFile, WholeFiles, WholeWriter
from remesh.formats.writer import Existing
from remesh.storage import Storage

NAME = "torch_file"
FILES = re.compile(r".*\.(pt|pth|bin|ckpt)")
MARKER = "a single file *.pt, *.pth, *.bin or *.ckpt (torch.save)"


def is_at(place: Place) -> bool:
    """True if a folder holds such a file and nothing else."""
    return is_single(place.listing)


def is_single(paths: Collection[str]) -> bool:
    """True if the only file is one."""
    return len(paths) == 1 and all(map(FILES.fullmatch, paths))


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what such a file holds; its tensors stay where they are."""
    files = [place.file] if place.file else list(place.listing)
    paths = list(filter(FILES.fullmatch, files)) or files
    if len(paths) != 1 and FILE_NAME not in paths:
        raise CheckpointNotFoundError(
            f"{place.url}: no {FILE_NAME}, but {len(paths)} files\nGive the path of the one to read"
        )
    builder.add_nested((), builder.archive(FILE_NAME if len(paths) > 1 else paths[0]))


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


FILE_NAME = "state.pt"


def plan_archive(cuts: Cuts, document: ValuesDocument, file_name: str) -> bytes:
    """Where the tensors lie in a file of this name."""
    table = cuts.tensors
    sizes = [
        math.prod(table.shape(number)) * table.dtype(number).itemsize
        for number in range(len(table.names))
    ]
    archive = ArchiveLayout(_pickle(cuts, document), sizes)
    places = {
        name: (0, position) for name, position in zip(table.names, archive.positions, strict=True)
    }
    file = WholeFile(file_name, archive.num_bytes, archive.literals, archive.checksums)
    return WholeFiles([file], places).encode()


def _pickle(cuts: Cuts, document: ValuesDocument) -> bytes:
    """The nested state."""
    if document.objects:
        raise UnsupportedValueError(
            f"{min(document.objects)}: an element of a sharded object, which a file of torch.save "
            "has no form for\nLeave it out, or save in another format"
        )
    leaves: dict[Path, object] = {}
    for name, raw in document.values.items():
        value = values.decode(bytes(raw))
        try:
            dumps(value)
        except TypeError as error:
            raise UnsupportedValueError(
                f"{name}: {error}; store plain values, or save in another format"
            ) from error
        leaves[document.path_of(name)] = value
    leaves |= {document.path_of(name): list(items) for name, items in document.lists.items()}
    names = {name: number for number, name in enumerate(cuts.tensors.names)}
    names |= {alias: names[name] for alias, name in document.aliases.items()}
    for name, number in names.items():
        tensor = tensor_record(cuts.tensors.dtype(number), cuts.tensors.shape(number), str(number))
        leaves[document.path_of(name)] = tensor
    return dumps(assemble(leaves, {tuple(path): kind for path, kind in document.sequences}))


class TorchFileWriter(WholeWriter):
    """Writes one file that `torch.load` reads."""

    name = NAME
    object_names = "final"

    def plan(self, cuts: Cuts, document: ValuesDocument, _options: Mapping[str, object]) -> bytes:
        return plan_archive(cuts, document, FILE_NAME)

    def existing(self, storage: Storage, _options: Mapping[str, object]) -> Existing | None:
        return Existing(FILE_NAME, paths=(FILE_NAME,)) if storage.exists(FILE_NAME) else None


WRITERS = (TorchFileWriter(),)
