"""Folders of transformers, PEFT, diffusers, Accelerate and the Trainer, read as they lie.

::

    model.safetensors                   weights: one file,
    model.safetensors.index.json        or several, and which of them holds which name
    pytorch_model.bin[.index.json]      the same by torch.save
    adapter_model.safetensors           an adapter of PEFT, and others
    NAME/adapter_model.safetensors      of one model, whose names begin with the name of the folder;
                                        without the above only if all folders here are such
    model_index.json                    diffusers: each folder below is a part of the pipeline,
    unet/diffusion_pytorch_model...     whose names begin with the name of the folder
    optimizer.pt, scheduler.pt          the Trainer and Accelerate (`.bin`): a whole training state
    pytorch_model_fsdp_0/, optimizer_0/ the same with FSDP: folders by DCP, or one file for each

Names are those of the module's state dict. Where an optimizer lies beside the weights, the folder
is a training state, as `remesh.save` would have it: names begin with `model.`, `optimizer.`,
`scheduler.` or `scaler.`, and those of Accelerate's second model with `model_1.`.

What is chosen where there are several is what transformers would choose: safetensors before
torch.save, a single file before several, `model.safetensors` before `model.fp16.safetensors`.

The weights alone can be written, in files of whole tensors (`whole_tensors`). The index of several
files comes last; a single file exists when it has its name. In an object store the id of the save
is a part of the names of files, and an index names them, also if it is one file. Where a single
file is asked for, it exists when its upload is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np

from remesh.core.state import Path, name_of
from remesh.core.tables import Cuts, TensorTable
from remesh.errors import CheckpointNotFoundError, StateError
from remesh.formats import safetensors_files, torch_dcp, torch_file
from remesh.formats.building import IndexBuilder
from remesh.formats.checks import MALFORMED, damaged, decode_json
from remesh.formats.native import ValuesDocument
from remesh.formats.place import Place
from remesh.formats.whole_tensors import (
    FileTensor,
    WholeFile,
    WholeFiles,
    WholeWriter,
    decode_files,
    file_names,
    safetensors_header,
    split_into_files,
    written_name,
)
from remesh.formats.writer import Existing, Rename, Saved, SmallFile
from remesh.storage import Storage

NAME = "huggingface"
PARTS_NAME = "model_index.json"
CONFIG_NAME, ADAPTER_CONFIG_NAME = "config.json", "adapter_config.json"
MARKER = "model.safetensors, pytorch_model.bin or adapter_model.* (Hugging Face)"

_WEIGHTS = re.compile(
    r"(?P<stem>model|pytorch_model|pytorch_model_fsdp|diffusion_pytorch_model|adapter_model)"
    r"(?P<number>_[0-9]{1,9})?"
    r"(?P<variant>\.[A-Za-z0-9_]+)?\.(?P<kind>safetensors|bin)"
    r"(?:\.index(?P<index_variant>\.[A-Za-z0-9_]+)?\.json)?"
)
_STEMS = (
    "model",
    "pytorch_model",
    "pytorch_model_fsdp",
    "diffusion_pytorch_model",
    "adapter_model",
)
ADAPTER_NAME = "adapter_model"
_ADAPTER = _STEMS.index(ADAPTER_NAME)
_TRAINER_STEP = re.compile(r"checkpoint-[0-9]+")
_OF_PEFT = {"base_layer", "modules_to_save"}
_OF_TORCH = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_SHARDED = re.compile(r"((?:pytorch_model_fsdp|optimizer)_[0-9]{1,9}/)\.metadata")
_STATE = re.compile(r"(?P<key>(?:optimizer|scheduler|scaler)(?:_[0-9]{1,9})?)\.(?:pt|bin)")


class _WeightMap(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, order=True)
class _Weights:
    """A file with weights, or with the names of such files; in order of preference."""

    number: str  # which of several models, as Accelerate numbers them: "" or `_1`
    is_pickled: bool  # whether it is a file of torch.save
    variant: str  # "" or `.fp16`, say
    stem: int  # number of the stem in `_STEMS`
    is_index: bool  # whether it names the files
    name: str


def is_at(place: Place) -> bool:
    """True if a folder with these files is one of these."""
    paths = place.listing
    if torch_file.is_single(paths):
        return False  # a single file of torch.save, whatever it is called
    return bool(_parts_in(paths)) or any(map(_SHARDED.fullmatch, paths))


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what such a folder holds; its tensors stay where they are."""
    paths = place.listing
    parts = _parts_in(paths)
    sharded = [found[1] for path in paths if (found := _SHARDED.fullmatch(path))]
    if not parts and not sharded:
        raise CheckpointNotFoundError(f"{place.url}: no {MARKER}")
    states = [found for path in paths if (found := _STATE.fullmatch(path))]
    is_training = bool(sharded) or any(found["key"].startswith("optimizer") for found in states)
    for folder, names in parts.items():
        for number, group in groupby(sorted(_weights_in(names)), lambda found: found.number):
            chosen = _chosen(list(group), builder.where(folder))
            keys = [f"model{number}"] if is_training or number else []
            _add_weights(builder, folder, chosen, (*keys, *filter(None, [folder])))
    for base in sharded:  # their names begin with `model.` and `optimizer.` already
        torch_dcp.add_folder(builder, base)
    for found in states if is_training else ():
        builder.add_nested((found["key"],), builder.archive(found[0]))


def _parts_in(paths: Iterable[str]) -> dict[str, list[str]]:
    """Folder → names of the files in it, for the folders with weights; "" is the place itself."""
    folders: dict[str, list[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    if PARTS_NAME not in folders.get("", ()):
        top = folders.pop("", [])
        # The Trainer keeps its steps below a folder of the same kind.
        adapters = {
            folder: names
            for folder, names in folders.items()
            if ADAPTER_CONFIG_NAME in names and not _TRAINER_STEP.fullmatch(folder)
        }
        weights = _weights_in(top)
        # Without an adapter here, they are those of one model only if there is nothing else.
        are_parts = (
            all(one.stem == _ADAPTER for one in weights)
            if weights
            else {folder.partition("/")[0] for folder in folders} <= adapters.keys()
        )
        folders = (adapters if are_parts else {}) | {"": top}
    return {
        folder: names
        for folder, names in sorted(folders.items())
        if "/" not in folder and _weights_in(names)
    }


def _weights_in(names: Iterable[str]) -> list[_Weights]:
    """The files with weights, or with their names, among others."""
    found = []
    for name in names:
        match = _WEIGHTS.fullmatch(name)
        if match is not None:
            variant = match["variant"] or match["index_variant"] or ""
            stem, is_index = _STEMS.index(match["stem"]), name.endswith(".json")
            is_pickled = match["kind"] == "bin"
            number = match["number"] or ""
            found.append(_Weights(number, is_pickled, variant, stem, is_index, name))
    return found


def _chosen(found: list[_Weights], where: str) -> _Weights:
    """The one to read of those in a folder, which are sorted."""
    first = found[0]
    variants = sorted({one.variant for one in found})
    if first.variant and len(variants) > 1:
        listed = ", ".join(one.name for one in found)
        raise StateError(f"{where}: holds several variants; name the file to read: {listed}")
    return first


def _add_weights(builder: IndexBuilder, folder: str, weights: _Weights, prefix: Path) -> None:
    """Add the tensors of a file, or of the files that an index names."""
    base = f"{folder}/" if folder else ""
    places: Mapping[str, str] = {}
    files = [base + weights.name]
    if weights.is_index:
        where, index = builder.where(base + weights.name), builder.storage.read(base + weights.name)
        named = decode_json(index, where, _WeightMap).weight_map
        places = {tensor: base + path for tensor, path in named.items()}
        files = sorted(set(places.values()))
        for path in files:
            builder.size_of(path)  # a missing one is an error that says who names it
    if weights.is_pickled:
        for path in files:
            builder.add_nested(prefix, builder.archive(path))
    else:
        arrays = safetensors_files.read_arrays(builder, files)
        chosen = (
            (name, array)
            for path in files
            for name, array in arrays[path].items()
            if places.get(name, path) == path
        )
        safetensors_files.add_arrays(builder, chosen, prefix)
    lost = sorted(name for name in places if not builder.has_tensor(name_of((*prefix, name))))
    if lost:
        raise damaged(
            builder.where(base + weights.name),
            f"names {len(lost)} tensors that are not in their files, such as {lost[0]}",
        )


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors that a file has at most, if nothing is said."""

_STEM, SUFFIX = "model", ".safetensors"
FILE_NAME = f"{_STEM}{SUFFIX}"
INDEX_NAME = f"{FILE_NAME}.index.json"


def index_name(stem: str) -> str:
    """Name of the index of files whose names begin so."""
    return f"{stem}{SUFFIX}.index.json"


def plan_files(
    tensors: TensorTable, document: ValuesDocument, max_shard_bytes: int | None, stem: str = _STEM
) -> bytes:
    """The files, and where the tensors lie in them. `stem` begins their names."""
    check_is_weights(document)
    weights = [
        FileTensor(name, tensors.dtype(number).name, tensors.shape(number))
        for number, name in enumerate(tensors.names)
    ]
    shards = split_into_files(weights, max_shard_bytes)
    files: list[WholeFile] = []
    places: dict[str, tuple[int, int]] = {}
    for name, shard in zip(file_names(stem, SUFFIX, len(shards)), shards, strict=True):
        header, positions = safetensors_header(shard)
        for weight, position in zip(shard, positions, strict=True):
            places[weight.name] = len(files), position
        num_bytes = len(header) + sum(weight.num_bytes for weight in shard)
        files.append(WholeFile(name, num_bytes, [(0, header)]))
    return WholeFiles(files, places, index_name(stem)).encode()


def check_is_weights(document: ValuesDocument) -> None:
    """Check that there is nothing but tensors."""
    others = sorted([*document.values, *document.lists, *document.objects])
    if others:
        raise StateError(
            "safetensors files hold tensors alone\n"
            f"The state has {len(others)} other entries: "
            f"{', '.join(others[:5])}{', ...' if len(others) > 5 else ''}. Save the weights "
            "by themselves: remesh.save(model, path, format=...); in a conversion, choose "
            "them by only='model.*' (remesh convert --only 'model.*')"
        )


def check_names(names: Sequence[str]) -> None:
    """Refuse names that wrappers have made: `from_pretrained` ignores them without an error."""
    is_wrapped = all(name.startswith("base_model.model.") for name in names)
    of_all = "module." if all(name.startswith("module.") for name in names) else ""
    for name in names:
        keys = name.split(".")
        if is_wrapped or any(key in _OF_PEFT or key.startswith("lora_") for key in keys):
            raise StateError(
                f"{name}: a weight of a peft model, whose names from_pretrained ignores\n"
                "Export the live PeftModel, not its get_base_model(): its adapters alone or, by "
                "merge=True, all weights merged: "
                "remesh.training.export_weights(model, path, merge=True). If these names are "
                "wanted, say so there: names=lambda name: name"
            )
        wrapped = next((f"{key}." for key in keys if key in _OF_TORCH), of_all)
        if wrapped:
            raise StateError(
                f"{name}: {wrapped} is of a wrapper, and from_pretrained ignores such names\n"
                "Take it off: remesh.training.export_weights(..., "
                f'names=lambda name: name.replace("{wrapped}", ""))'
            )


def limit_of(options: Mapping[str, object]) -> int:
    """Bytes of tensors that a file has at most."""
    limit = options.get("max_shard_bytes", MAX_SHARD_BYTES)
    if not isinstance(limit, int) or limit < 1:
        raise StateError(f"max_shard_bytes must be a number of bytes, not {limit!r}")
    return limit


def config_file(saved: Saved) -> list[SmallFile]:
    """The configuration, if there is one; of an adapter under the name that peft gives it."""
    if not saved.metadata:
        return []
    text = json.dumps(dict(saved.metadata), indent=2, sort_keys=True) + "\n"
    is_adapter = saved.options.get("name") == ADAPTER_NAME
    return [(ADAPTER_CONFIG_NAME if is_adapter else CONFIG_NAME, text.encode())]


def _index_file(saved: Saved, name: str, places: Mapping[str, str]) -> SmallFile:
    """The file that says which tensor lies in which file."""
    tensors = saved.cuts.tensors
    sizes = [tensors.shape(number) for number in range(len(tensors.names))]
    num_elements = [int(np.prod(shape, dtype=np.int64)) for shape in sizes]
    total = {
        "total_size": int(np.dot(num_elements, tensors.itemsizes)),
        "total_parameters": sum(num_elements),
    }
    index = json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=2)
    return name, index.encode()


def indexed_files(storage: Storage, index: str) -> list[str]:
    """The files that an index names; none if it is damaged, so that they stay."""
    text = storage.read(index)
    try:
        return sorted(set(msgspec.json.decode(text, type=_WeightMap).weight_map.values()))
    except MALFORMED:
        return []


class HuggingFaceWriter(WholeWriter):
    """Writes weights: one file, or several with an index."""

    name = NAME
    options: tuple[str, ...] = ("max_shard_bytes",)
    has_metadata = True
    object_names = "by_save"

    def plan(self, cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> bytes:
        check_names(cuts.tensors.names)
        return plan_files(cuts.tensors, document, limit_of(options))

    def small_files(self, saved: Saved) -> Sequence[SmallFile | Rename]:
        """The configuration, the files under their final names, and the index of several files."""
        plan, steps = decode_files(saved.plan), [*config_file(saved), *super().small_files(saved)]
        if len(plan.files) == 1 and plan.names != "by_save":
            return steps
        names = [
            written_name(plan, number, saved.save_id) if plan.names == "by_save" else file.name
            for number, file in enumerate(plan.files)
        ]
        places = {name: names[number] for name, (number, _) in plan.places.items()}
        return [*steps, _index_file(saved, plan.index, places)]

    def existing(self, storage: Storage, _options: Mapping[str, object]) -> Existing | None:
        if storage.exists(FILE_NAME):
            return Existing(FILE_NAME, paths=(FILE_NAME,))
        try:
            names = indexed_files(storage, INDEX_NAME)
        except CheckpointNotFoundError:
            return None
        own = [name for name in names if name.startswith(_STEM) and name.endswith(SUFFIX)]
        return Existing(INDEX_NAME, paths=(INDEX_NAME, *own))


# ---------------------------------------------------------------------------------------------
# Weights for inference (`remesh.training.export_weights`)
#
# The caller chooses the name of the files, which may lie beside others: only those of an earlier
# export of the same name are replaced. In an object store a single file is replaced when its upload
# is complete; several have the id of the save in their names, and the index, which is replaced in
# one step, names them.
# ---------------------------------------------------------------------------------------------


class SafetensorsExport(HuggingFaceWriter):
    """Writes weights in safetensors files."""

    name = "exported safetensors"
    options = ("name", "max_shard_bytes")
    object_names = "final"
    is_beside_others = True

    def plan(self, cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> bytes:
        limit, name = limit_of(options), str(options["name"])
        return plan_files(cuts.tensors, document, limit, name)

    def existing(self, storage: Storage, options: Mapping[str, object]) -> Existing | None:
        """The index first, and the files that only it names."""
        name, suffix = str(options["name"]), SUFFIX
        there, index = storage.list_directory().files, index_name(name)
        paths = []
        if index in there:
            # Another export may have a name that looks like one with the id of a save.
            by_save = re.compile(
                rf"{re.escape(name)}-[0-9a-f]{{12}}-\d{{5}}-of-\d{{5}}{re.escape(suffix)}"
            )
            named = indexed_files(storage, index)
            paths = [index, *(file for file in named if file in there and by_save.fullmatch(file))]
        return _existing([*paths, *_files_of(name, suffix, there)])


class PthExport(torch_file.TorchFileWriter):
    """Writes weights in a `.pth` file.

    It has checksums of its tensors, as every archive should that is given to others. So it has one
    writer, which sees all bytes of it.
    """

    name = "exported pth"
    options = ("name",)
    has_metadata = has_checksums = is_beside_others = True

    def plan(self, cuts: Cuts, document: ValuesDocument, options: Mapping[str, object]) -> bytes:
        return torch_file.plan_archive(cuts, document, f"{options['name']}.pth")

    def small_files(self, saved: Saved) -> Sequence[SmallFile | Rename]:
        return [*config_file(saved), *super().small_files(saved)]

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


WRITERS = (HuggingFaceWriter(),)
EXPORTS = (SafetensorsExport(), PthExport())
