"""Folders of transformers, PEFT, diffusers, Accelerate and the Trainer, read as they lie.

::

    model.safetensors                   weights: one file,
    model.safetensors.index.json        or several, and which of them holds which name
    pytorch_model.bin[.index.json]      the same by torch.save
    adapter_model.safetensors           an adapter of PEFT
    model_index.json                    diffusers: each folder below is a part of the pipeline,
    unet/diffusion_pytorch_model...     whose names begin with the name of the folder
    optimizer.pt, scheduler.pt          the Trainer and Accelerate (`.bin`): a whole training state
    pytorch_model_fsdp_0/, optimizer_0/ the same with FSDP: folders by DCP, or one file for each

Names are those of the module's state dict. Where an optimizer lies beside the weights, the folder
is a training state, as `remesh.save` would have it: names begin with `model.`, `optimizer.`,
`scheduler.` or `scaler.`, and those of Accelerate's second model with `model_1.`.

What is chosen where there are several is what transformers would choose: safetensors before
torch.save, a single file before several, `model.safetensors` before `model.fp16.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import msgspec

from remesh.core.state import Path, name_of
from remesh.errors import CheckpointNotFoundError, StateError
from remesh.formats import safetensors, torch_dcp, torch_file
from remesh.formats.building import IndexBuilder
from remesh.formats.checks import damaged, decode_json
from remesh.formats.contents import Contents, Place
from remesh.storage import Storage

NAME = "huggingface"
PARTS_NAME = "model_index.json"
LOOKS_FOR = "model.safetensors, pytorch_model.bin or adapter_model.* (Hugging Face)"

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


def recognise(place: Place) -> bool:
    """True if a folder with these files is one of these."""
    paths = place.listing
    if torch_file.is_single(paths):
        return False  # a single file of torch.save, whatever it is called
    return bool(_parts_in(paths)) or any(map(_SHARDED.fullmatch, paths))


def read(place: Place) -> Contents:
    """Read what such a folder holds; its tensors stay where they are."""
    storage, paths, allow = place.storage, place.listing, place.allow
    parts = _parts_in(paths)
    sharded = [found[1] for path in paths if (found := _SHARDED.fullmatch(path))]
    if not parts and not sharded:
        raise CheckpointNotFoundError(f"{storage.url}: no {LOOKS_FOR}")
    builder = IndexBuilder(storage, paths)
    states = [found for path in paths if (found := _STATE.fullmatch(path))]
    is_training = bool(sharded) or any(found["key"].startswith("optimizer") for found in states)
    for folder, names in parts.items():
        for number, group in groupby(sorted(_weights_in(names)), lambda found: found.number):
            chosen = _chosen(list(group), f"{storage.url}/{folder}")
            keys = [f"model{number}"] if is_training or number else []
            _add_weights(builder, folder, chosen, (*filter(None, [folder]), *keys), allow)
    for base in sharded:  # their names begin with `model.` and `optimizer.` already
        torch_dcp.add_folder(builder, base, allow)
    for found in states if is_training else ():
        archive = torch_file.open_archive(storage, found[0], paths, allow=allow)
        builder.add_nested((found["key"],), archive, found[0])
    return Contents.of(NAME, builder)


def _parts_in(paths: Iterable[str]) -> dict[str, list[str]]:
    """Folder → names of the files in it, for the folders with weights; "" is the place itself."""
    folders: dict[str, list[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    if PARTS_NAME not in folders.get("", ()):
        folders = {"": folders.get("", [])}
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


def _add_weights(
    builder: IndexBuilder, folder: str, weights: _Weights, prefix: Path, allow: Collection[str]
) -> None:
    """Add the tensors of a file, or of the files that an index names."""
    base = f"{folder}/" if folder else ""
    places: Mapping[str, str] = {}
    files = [base + weights.name]
    if weights.is_index:
        places = _places(builder.storage, base, weights.name)
        files = sorted(set(places.values()))
        for path in files:
            builder.size_of(path)  # a missing one is an error that says who names it
    if weights.is_pickled:
        for path in files:
            archive = torch_file.open_archive(builder.storage, path, builder.listing, allow=allow)
            builder.add_nested(prefix, archive, path)
    else:
        arrays = safetensors.read_arrays(builder.storage, files, builder.listing)
        chosen = (
            (name, array)
            for path in files
            for name, array in arrays[path].items()
            if places.get(name, path) == path
        )
        safetensors.add_arrays(builder, chosen, prefix)
    lost = sorted(name for name in places if not builder.has_tensor(name_of((*prefix, name))))
    if lost:
        raise damaged(
            f"{builder.storage.url}/{base}{weights.name}",
            f"names {len(lost)} tensors that are not in their files, such as {lost[0]}",
        )


def _places(storage: Storage, base: str, name: str) -> dict[str, str]:
    """Tensor → file, as an index has them."""
    where = f"{storage.url}/{base}{name}"
    places = decode_json(storage.read(base + name), where, _WeightMap).weight_map
    return {tensor: base + path for tensor, path in places.items()}
