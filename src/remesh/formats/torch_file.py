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

import io
from collections.abc import Collection, Mapping, Sequence

from remesh.core import values
from remesh.core.state import Path, assemble
from remesh.core.tables import Cuts
from remesh.errors import UnsupportedValueError
from remesh.formats import whole_tensors
from remesh.formats.archive import Archive, RangeFile, read_archive
from remesh.formats.archive_writer import TorchArchive, tensor_value
from remesh.formats.building import IndexBuilder, Listing, file_size
from remesh.formats.contents import Contents, Place
from remesh.formats.framing import Existing, Grid, Rename, Saved, Writer
from remesh.formats.native import ValuesDocument
from remesh.formats.pickle_writer import dumps
from remesh.formats.whole_tensors import FileTensor
from remesh.storage import Storage

NAME = "torch_file"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
LOOKS_FOR = "a single file *.pt, *.pth, *.bin or *.ckpt (torch.save)"


def recognise(place: Place) -> bool:
    """True if a place is such a file, or holds one and nothing else."""
    return place.file.endswith(SUFFIXES) if place.file else is_single(place.listing)


def is_single(paths: Collection[str]) -> bool:
    """True if the only file is one."""
    return len(paths) == 1 and all(path.endswith(SUFFIXES) for path in paths)


def read(place: Place) -> Contents:
    """Read what such a file holds; its tensors stay where they are."""
    files = place.listing_beside
    path = place.file or min(files, default="")
    builder = IndexBuilder(place.storage, files)
    builder.add_nested((), open_archive(place.storage, path, files, allow=place.allow), path)
    return Contents.of(NAME, builder)


def open_archive(
    storage: Storage, path: str, listing: Listing, *, allow: Collection[str] = ()
) -> Archive:
    """The archive that a whole file is; its size may be known from a listing."""
    raw = RangeFile(storage, path, 0, file_size(storage, listing, path))
    return read_archive(io.BufferedReader(raw, 1 << 16), f"{storage.url}/{path}", allow=allow)


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


FILE_NAME = "state.pt"


def one_archive(cuts: Cuts, document: ValuesDocument, _options: Mapping[str, object]) -> Grid:
    """Where the tensors lie."""
    return plan_archive(cuts, document, FILE_NAME)


def plan_archive(cuts: Cuts, document: ValuesDocument, file_name: str) -> Grid:
    """Where the tensors lie in a file of this name."""
    table = cuts.tensors
    tensors = [
        FileTensor(name, table.dtype(number).name, table.shape(number))
        for number, name in enumerate(table.names)
    ]
    archive = TorchArchive(tensors, _pickle(cuts, document))
    places = {
        tensor.name: (0, position)
        for tensor, position in zip(tensors, archive.positions, strict=True)
    }
    file = whole_tensors.WholeFile(
        file_name, archive.num_bytes, archive.fillers(), archive.checksums()
    )
    return whole_tensors.WholeFiles([file], places).encode()


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
        tensor = tensor_value(cuts.tensors.dtype(number), cuts.tensors.shape(number), str(number))
        leaves[document.path_of(name)] = tensor
    return dumps(assemble(leaves, {tuple(path): kind for path, kind in document.sequences}))


def small_files(saved: Saved) -> Sequence[Rename]:
    """The file exists when it has its name."""
    return whole_tensors.renames(saved)


def existing(storage: Storage, _options: Mapping[str, object]) -> Existing | None:
    """The file that is there."""
    return Existing(FILE_NAME, paths=(FILE_NAME,)) if storage.exists(FILE_NAME) else None


TORCH_FILE = Writer(
    NAME, one_archive, whole_tensors.frames, small_files, existing, object_names="final"
)
