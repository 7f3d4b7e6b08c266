"""Directories of ATorch's FSDP checkpoints: flat parameters and optimizer state, rank by rank.

Model and optimizer are two families of files in one directory or in two:

* `flat_param.RRRRR-WWWWW`: for rank R of W, a safetensors file with its shard of the flattened
  parameter of each FSDP unit, by the unit's name. `flat_meta.RRRRR-WWWWW` says for each parameter
  which range of which shard holds a part of it. Parts follow each other in the order of ranks.
* `buffers`: a safetensors file. `ckpt_meta`: the version and the number of ranks.
* `optim_param.RRRRR-WWWWW`: a safetensors file of optimizer state in one dim, by
  `<parameter>-<state>`. Parts follow each other likewise; a state without dims is the same on
  every rank. `optim_meta`: the parameter groups.

ATorch writes the meta files as pickles, remesh as JSON (`remesh.compat.atorch`); both are read
here. What is found has the names of the state `{"model": model, "optimizer": optimizer}`, and
parameters their own shapes, so it loads into any layout.

The layout was read off ATorch's source (dlrover, atorch/utils/fsdp_save_util.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from remesh._repr import shown
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from remesh.formats import restricted_pickle
from remesh.formats.building import FlatPart, IndexBuilder, add_flat_parts
from remesh.formats.checks import check_name, damaged, decode_json, integers, mapping, sequence
from remesh.formats.place import Place
from remesh.formats.safetensors_files import StoredArray, read_arrays

NAME = "flat_param"
MARKER = "files flat_param.RRRRR-WWWWW or optim_param.RRRRR-WWWWW (ATorch's FSDP checkpoints)"
MODEL_META = "ckpt_meta"
OPTIMIZER_META = "optim_meta"
BUFFERS = "buffers"
VERSION = 1

_FILE = re.compile(r"(flat_param|flat_meta|optim_param)\.([0-9]{5,9})-([0-9]{5,9})")
_PICKLE = b"\x80"
_NOT_OPTIONS = frozenset({"params_names", "params_ep_size"})


def file_name(family: str, rank: int, world_size: int) -> str:
    """Name of a rank's file."""
    return f"{family}.{rank:05d}-{world_size:05d}"


def is_at(place: Place) -> bool:
    """True if a directory with these files holds such a checkpoint."""
    return any(_FILE.fullmatch(path) for path in place.listing)


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what a directory holds; its tensors stay where they are."""
    model, metas, optimizer = (
        _family(place, family) for family in ("flat_param", "flat_meta", "optim_param")
    )
    if not model and not optimizer:
        raise CheckpointNotFoundError(f"{place.url}: {MARKER} are not there")
    shapes: dict[str, tuple[int, ...]] = {}
    if model:
        if len(metas) != len(model):
            raise damaged(place.url, f"{len(model)} files flat_param, but {len(metas)} flat_meta")
        shapes = _add_model(builder, model, metas)
    if optimizer:
        _add_optimizer(builder, optimizer, shapes)


def _family(place: Place, family: str) -> list[str]:
    """The files of a family, in the order of ranks."""
    files = place.listing
    found = [match for path in files if (match := _FILE.fullmatch(path)) and match[1] == family]
    ranks = sorted(int(match[2]) for match in found)
    sizes = {int(match[3]) for match in found}
    if found and (sizes != {len(ranks)} or ranks != list(range(len(ranks)))):
        raise CorruptCheckpointError(
            f"{place.url}: the files {family}.* are of ranks {ranks} of {sorted(sizes)}\nSome "
            "are missing, or several checkpoints were saved here"
        )
    return [match[0] for match in sorted(found, key=lambda match: int(match[2]))]


# ---------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------


_Slice = tuple[tuple[int, ...], str, int, int]
"""The part of a parameter that a rank has: shape of the whole parameter, name of the FSDP unit,
first element of the part in the rank's shard of the unit, and one past its last."""


def _add_model(
    builder: IndexBuilder, files: Sequence[str], meta_files: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Add parameters and buffers; returns the shapes of the parameters."""
    _check_version(builder, meta_files[0])
    arrays = read_arrays(builder, files)
    units = [arrays[path] for path in files]
    parts: dict[str, list[FlatPart]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, path in enumerate(meta_files):
        for name, (shape, unit, start, stop) in _read_slices(builder, path).items():
            where = f"{builder.where(path)}: {name}"
            if shapes.setdefault(name, shape) != shape:
                raise damaged(where, f"shape {shape}, on other ranks {shapes[name]}")
            if unit not in units[rank]:
                raise damaged(where, f"{files[rank]} has no unit {unit!r}")
            parts.setdefault(name, []).append(_part(units[rank][unit], start, stop, where))
    for name, shape in shapes.items():
        add_flat_parts(builder, ("model", name), shape, parts[name])
    if BUFFERS in builder.listing:
        for name, array in read_arrays(builder, [BUFFERS])[BUFFERS].items():
            add_flat_parts(builder, ("model", name), array.shape, [array.flat()])
    return shapes


def _check_version(builder: IndexBuilder, meta_file: str) -> None:
    """Check the meta file, which is written last. Early checkpoints of ATorch have none."""
    if MODEL_META not in builder.listing:
        if builder.storage.read(meta_file, 0, 1) == _PICKLE:
            return
        raise CheckpointNotFoundError(
            f"{builder.storage.url}: only files of a save that was not finished (no {MODEL_META})"
        )
    meta = _plain(builder, MODEL_META)
    version = meta.get("version") if isinstance(meta, dict) else None
    if version not in (0, VERSION):
        raise FormatVersionError(
            f"{builder.where(MODEL_META)}: version {version}; known are 0 and {VERSION}"
        )


def _read_slices(builder: IndexBuilder, path: str) -> dict[str, _Slice]:
    where = builder.where(path)
    document = mapping(_plain(builder, path), where, "its content")
    units = mapping(document.get("flat_param_meta", {}), where, "flat_param_meta")
    if any("expert_ranks" in mapping(unit, where, "a unit") for unit in units.values()):
        raise FormatVersionError(
            f"{where}: checkpoints with expert parallelism are not read\n"
            "There, ranks have different tensors of one name"
        )
    slices = mapping(document.get("param_meta", document), where, "param_meta")
    return {check_name(name, where): _slice_of(meta, where) for name, meta in slices.items()}


def _slice_of(value: Any, where: str) -> _Slice:
    meta = mapping(value, where, "a slice")
    shape, offsets = meta.get("param_shapes"), meta.get("param_offsets")
    bounds = integers(offsets, where, "the range of a slice")
    if len(bounds) != 2:
        raise damaged(where, f"{shown(offsets)} is not the range of a slice")
    unit = check_name(meta.get("striped_fsdp_name"), where)
    return integers(shape, where, "a shape"), unit, bounds[0], bounds[1]


# ---------------------------------------------------------------------------------------------
# Optimizer
# ---------------------------------------------------------------------------------------------


def _add_optimizer(
    builder: IndexBuilder, files: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Add the optimizer. Flat state gets the shape of its parameter, if that is as large."""
    parts: dict[str, list[StoredArray]] = {}
    arrays = read_arrays(builder, files)
    for path in files:
        for key, array in arrays[path].items():
            parts.setdefault(key, []).append(array)
    for key, (first, *others) in parts.items():
        parameter, _, state = key.rpartition("-")
        shape, found = first.shape, [first.flat()]
        if len(shape) == 1:
            found += [other.flat() for other in others]
            size = sum(part.num_elements for part in found)
            whole = shapes.get(parameter, (size,))
            shape = whole if math.prod(whole) == size else (size,)
        add_flat_parts(builder, ("optimizer", "state", parameter, state), shape, found)
    groups, where = _plain(builder, OPTIMIZER_META), builder.where(OPTIMIZER_META)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise damaged(where, "not a list of groups")
    for number, group in enumerate(groups):
        for option, value in group.items():
            place = ("optimizer", "param_groups", number, check_name(option, where))
            if option == "params":
                builder.add_leaf(place, list(map(str, sequence(value, where, option))))
            elif option not in _NOT_OPTIONS:
                builder.add_leaf(place, value)
    builder.set_sequences({("optimizer", "param_groups"): "list"})


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


def _part(array: StoredArray, start: int, stop: int, where: str) -> FlatPart:
    """A range of the elements of a tensor of a safetensors file."""
    whole = array.flat()
    if not 0 <= start <= stop <= whole.num_elements:
        raise damaged(where, f"the range [{start}, {stop}) is not in a tensor of {array.shape}")
    return whole.range(start, stop)


def _plain(builder: IndexBuilder, path: str) -> Any:
    """The content of a meta file: a pickle of plain values, or JSON."""
    where, allow = builder.where(path), builder.place.allow
    try:
        data = builder.storage.read(path)
    except CheckpointNotFoundError:
        raise damaged(where, "missing") from None
    if data[:1] == _PICKLE:
        pickled = restricted_pickle.loads(data, where, allow=allow)
        return restricted_pickle.resolved(pickled, where, allow=allow)
    return decode_json(data, where, object)
