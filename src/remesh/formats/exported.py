"""Weights for inference, in files whose name the caller chooses (`remesh.training.export_weights`).

The files are those of the formats `huggingface` and `torch_file`. They may lie beside other files:
only those of an earlier export of the same name are replaced. In an object store a single file is
replaced when its upload is complete; several have the id of the save in their names, and the index,
which is replaced in one step, names them.

A `.pth` file has checksums of its tensors, as every archive should that is given to others. So it
has one writer, which sees all bytes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from remesh.core.tables import Cuts
from remesh.formats import huggingface, torch_file
from remesh.formats.framing import Existing, Grid, Rename, Saved, SmallFile
from remesh.formats.native import ValuesDocument
from remesh.storage import Storage


class SafetensorsExport(huggingface.HuggingFaceWriter):
    """Writes weights in safetensors files."""

    name = "exported safetensors"
    options = ("name", "max_shard_bytes")
    object_names = "final"
    is_beside_others = True

    def grid(self, cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> Grid:
        limit, name = huggingface.limit_of(options), str(options["name"])
        return huggingface.plan_files(cuts.tensors, document, limit, name)

    def existing(self, storage: Storage, options: Mapping[str, object]) -> Existing | None:
        """The index first, and the files that only it names."""
        name, suffix = str(options["name"]), huggingface.SUFFIX
        there, index = storage.list_directory().files, huggingface.index_name(name)
        paths = []
        if index in there:
            # Another export may have a name that looks like one with the id of a save.
            by_save = re.compile(
                rf"{re.escape(name)}-[0-9a-f]{{12}}-\d{{5}}-of-\d{{5}}{re.escape(suffix)}"
            )
            named = huggingface.indexed_files(storage, index)
            paths = [index, *(file for file in named if file in there and by_save.fullmatch(file))]
        return _existing([*paths, *_files_of(name, suffix, there)])


class PthExport(torch_file.TorchFileWriter):
    """Writes weights in a `.pth` file."""

    name = "exported pth"
    options = ("name",)
    has_metadata = has_checksums = is_beside_others = True

    def grid(self, cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> Grid:
        return torch_file.plan_archive(cuts, document, f"{options['name']}.pth")

    def small_files(self, saved: Saved) -> Sequence[SmallFile | Rename]:
        return [*huggingface.config_file(saved), *super().small_files(saved)]

    def existing(self, storage: Storage, options: Mapping[str, object]) -> Existing | None:
        there = storage.list_directory().files
        return _existing(_files_of(str(options["name"]), ".pth", there))


def _files_of(name: str, suffix: str, there: Iterable[str]) -> list[str]:
    """The files of an export of this name, also those of one that was killed."""
    end = re.escape(suffix)
    pattern = rf"{re.escape(name)}(-\d{{5}}-of-\d{{5}}{end}|{end})(\.[0-9a-f]{{12}})?"
    return [path for path in sorted(there) if re.fullmatch(pattern, path)]


def _existing(paths: Sequence[str]) -> Existing | None:
    return Existing(paths[0], paths=tuple(paths)) if paths else None


WRITERS = (SafetensorsExport(), PthExport())
