"""Weights for inference, in files whose name the caller chooses (`remesh.training.export_weights`).

The files are those of the formats `huggingface` and `torch_file`. They may lie beside other files:
only those of an earlier export of the same name are replaced. In an object store a single file is
replaced when its upload is complete; several have the id of the save in their names, and the index,
which is replaced in one step, names them.

A `.pth` file has checksums of its tensors, as every archive should that is given to others. So it
has one writer, which sees all bytes of it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from remesh.core.tables import Cuts
from remesh.formats import huggingface, torch_file, whole_tensors
from remesh.formats.framing import Existing, Grid, Writer
from remesh.formats.native import ValuesDocument
from remesh.storage import Storage

SAFETENSORS, PTH = "exported safetensors", "exported pth"


def _safetensors(cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> Grid:
    limit = huggingface.limit_of(options)
    return huggingface.plan_files(cuts.tensors, document, limit, str(options["name"]))


def _pth(cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> Grid:
    return torch_file.plan_archive(cuts, document, f"{options['name']}.pth")


def _existing(suffix: str, storage: Storage, options: Mapping[str, object]) -> Existing | None:
    """The files of an export of this name, also those of one that was killed; the index first."""
    name = str(options["name"])
    number = rf"-\d{{5}}-of-\d{{5}}{re.escape(suffix)}"
    pattern = re.compile(rf"{re.escape(name)}({number}|{re.escape(suffix)})" + r"(\.[0-9a-f]{12})?")
    there = storage.list_directory().files
    index = huggingface.index_name(name)
    paths = []
    if suffix == huggingface.SUFFIX and index in there:
        # Another export may have a name that looks like one with the id of a save.
        by_save = re.compile(rf"{re.escape(name)}-[0-9a-f]{{12}}{number}")
        named = huggingface.indexed_files(storage, index)
        paths = [index, *(file for file in named if file in there and by_save.fullmatch(file))]
    paths += filter(pattern.fullmatch, sorted(there))
    if not paths:
        return None
    return Existing(paths[0], paths=tuple(paths))


EXPORTS = {
    SAFETENSORS: Writer(
        SAFETENSORS,
        _safetensors,
        whole_tensors.frames,
        huggingface.small_files,
        functools.partial(_existing, huggingface.SUFFIX),
        has_metadata=True,
        object_names="final",
        is_beside_others=True,
        options=("name", "max_shard_bytes"),
    ),
    PTH: Writer(
        PTH,
        _pth,
        whole_tensors.frames,
        huggingface.config_and_renames,
        functools.partial(_existing, ".pth"),
        has_metadata=True,
        has_checksums=True,
        object_names="final",
        is_beside_others=True,
        options=("name",),
    ),
}
"""How exports are written, by name. They are no formats of checkpoints."""
