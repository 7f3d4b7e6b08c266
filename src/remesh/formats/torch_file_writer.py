"""Writing a whole state as one file of `torch.save`: `torch.load(weights_only=True)` reads it.

The file is an archive with a pickle of the nested state, and the elements of each tensor as a
storage of its own (`torch_archive`); a tied tensor is stored once. All bytes but the elements are
known before one of them moves, so ranks write their elements into the one file (`whole_tensors`).
Checksums of the elements are 0 then, because no rank sees all of a tensor; torch does not look at
them. In an object store one rank collects the tensors and writes the file, with checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remesh.core import values
from remesh.core.state import Path, assemble
from remesh.core.tables import Cuts
from remesh.errors import UnsupportedValueError
from remesh.formats import whole_tensors
from remesh.formats.archive_writer import tensor_value
from remesh.formats.building import exists
from remesh.formats.framing import Existing, Grid, Rename, Saved, Writer
from remesh.formats.native import ValuesDocument
from remesh.formats.pickle_writer import dumps
from remesh.formats.torch_archive import TorchArchive
from remesh.formats.torch_file import NAME
from remesh.formats.weight_files import FileTensor
from remesh.storage import Storage

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
    kinds = {tuple(path): kind for path, kind in document.sequences}
    holding = {path[:at] for path in leaves for at in range(len(path))}
    return dumps(assemble(leaves, {path: kinds[path] for path in holding & kinds.keys()}))


def small_files(saved: Saved) -> Sequence[Rename]:
    """The file exists when it has its name."""
    return whole_tensors.renames(saved)


def existing(storage: Storage, _options: Mapping[str, object]) -> Existing | None:
    """The file that is there."""
    return Existing(FILE_NAME, paths=(FILE_NAME,)) if exists(storage, FILE_NAME) else None


TORCH_FILE = Writer(
    NAME, one_archive, whole_tensors.frames, small_files, existing, object_names="final"
)
