"""safetensors files, read as they lie: a single one, or those of a folder.

Files of a folder are one state: their tensors lie side by side under the names in the headers
(`safetensors_files`). Folders that other formats make of such files are theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from remesh.core.tables import Cuts
from remesh.errors import CheckpointNotFoundError
from remesh.formats import huggingface, paddle
from remesh.formats.building import IndexBuilder
from remesh.formats.native import ValuesDocument
from remesh.formats.place import Place
from remesh.formats.safetensors_files import add_arrays, read_arrays

NAME = "safetensors"
SUFFIX = ".safetensors"
MARKER = "a file *.safetensors, or a folder with such files"
FILES = re.compile(r".*\.safetensors")


def is_at(place: Place) -> bool:
    """True if a folder holds such; those of remesh's data folders are none."""
    names = [path for path in paddle.other_files(place.listing) if "/" not in path]
    is_data_folder = any(name.startswith("index-") and name.endswith(SUFFIX) for name in names)
    return bool(_files_of(names)) and not is_data_folder and not huggingface.is_at(place)


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what a file or a folder holds; its tensors stay where they are."""
    paths = [place.file] if place.file else _files_of(place.listing)
    if not paths:
        raise CheckpointNotFoundError(f"{place.url}: no file *{SUFFIX}")
    arrays = read_arrays(builder, paths)
    add_arrays(builder, (item for file in paths for item in arrays[file].items()))


def _files_of(paths: Iterable[str]) -> list[str]:
    return sorted(path for path in paths if path.endswith(SUFFIX) and "/" not in path)


class SafetensorsWriter(huggingface.HuggingFaceWriter):
    """Writes weights in a single file."""

    name = NAME
    options = ()
    has_metadata = False
    object_names = "final"

    def plan(self, cuts: Cuts, document: ValuesDocument, _options: Mapping[str, object]) -> bytes:
        return huggingface.plan_files(cuts.tensors, document, None)


WRITERS = (SafetensorsWriter(),)
