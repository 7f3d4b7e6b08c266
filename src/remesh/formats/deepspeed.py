"""Checkpoints of DeepSpeed's engine, read as they lie: ZeRO 1 to 3, no ZeRO, and universal ones.

::

    latest                                              the tag: the name of the folder to read
    global_step10/mp_rank_00_model_states.pt            the module, and what the script added
    global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt   what data-parallel rank 1 holds of
    global_step10/bf16_zero_pp_rank_...                       the optimizer
    global_step10/zero_pp_rank_1_mp_rank_00_model_states.pt   ZeRO 3: a module file for each rank
    global_step10/layer_00-model_states.pt                    pipelines: the weights of a layer
    global_step10/layer_0_expert_1_mp_rank_00_model_states.pt the weights of an expert
    global_step10_universal/zero/<parameter>/fp32.pt, exp_avg.pt, ..., step.pt

All files are archives of torch.save. With ZeRO the trained parameters are not read from the module
but from the optimizer, which has them in float32. They lie flattened, group after group
(`param_shapes` has their names, shapes and order):

* ZeRO 1 and 2, and the bf16 optimizer, flatten a whole group and cut it into one range a rank;
* ZeRO 3 cuts each parameter into one range a rank, all of one length, of which the last may be
  padded, and flattens those of a rank.

State of the optimizer in one dim is flattened and cut alike; state without dims, such as a step,
belongs to all parameters of a group. What is found has the names of the state `{"model": model,
"optimizer": optimizer}`; all other entries keep theirs.

Pipeline stages have a file for each layer, `layer_00-model_states.pt`, and a number of their own in
place of the tensor-parallel rank; they are joined. Experts have files of their own, and with ZeRO 1
and 2 their groups are cut over the ranks that hold them. Without ZeRO, optimizers of stages and of
expert-parallel ranks number their parameters, each from 0, so they have names of their own:
`mp_rank_01.optimizer`, `expp_rank_1.optimizer`.

Tensor-parallel ranks (`mp_rank_01`) are not joined. Names then begin with `mp_rank_00` and so on; a
universal checkpoint has joined them. DeepSpeed's own tool finds out along which dim a parameter was
cut by regular expressions that the training script has put into `universal_checkpoint_info` (what
matches none was cut along dim 0). They are not used here: an expression of a file can take
exponential time, and many scripts store none.

The layout was read off DeepSpeed's source (`runtime/engine.py`, `runtime/zero`,
`checkpoint/ds_to_universal.py`) and its own checkpoints.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remesh._repr import shown
from remesh.core.state import Path, name_of
from remesh.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from remesh.formats.archive import Archive
from remesh.formats.building import FlatPart, IndexBuilder, add_flat_parts
from remesh.formats.checks import check_name, damaged, integers, mapping, sequence
from remesh.formats.place import Place
from remesh.formats.restricted_pickle import ArchivedTensor

NAME = "deepspeed"
MARKER = "mp_rank_XX_model_states.pt, zero_pp_rank_* or zero/*/fp32.pt, or latest (DeepSpeed)"

_MODEL = re.compile(
    r"(?:zero_pp_rank_(?P<dp>[0-9]{1,6})_)?mp_rank_(?P<mp>[0-9]{2,6})_model_states\.pt"
)
_OPTIM = re.compile(
    r"(?:bf16_)?zero_pp_rank_(?P<dp>[0-9]{1,6})_mp_rank_(?P<mp>[0-9]{2,6})_optim_states\.pt"
)
_UNIVERSAL = re.compile(r"zero/(?P<parameter>[^/]+)/(?P<key>[A-Za-z_][A-Za-z0-9_]*)\.pt")
_UNIVERSAL_GROUPS = "zero/optimizer_state.pt"
_EXPERTS = re.compile(
    r"(?:layer_[0-9]{1,6}_)?expert_[0-9]{1,6}_mp_rank_(?P<mp>[0-9]{2,6})_model_states\.pt"
)
_EXPERT_OPTIM = re.compile(
    r"expp_rank_(?P<ep>[0-9]{1,6})_mp_rank_(?P<mp>[0-9]{2,6})_optim_states\.pt"
)
_LAYER = re.compile(
    r"layer_(?P<number>[0-9]{1,6})-(?:model_(?P<model>[0-9]{1,6})-)?model_states\.pt"
)

_CONSUMED = frozenset({
    "module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments",
})  # fmt: skip
"""Entries of a module file that say where tensors are, or are read by themselves."""


def _is_mark(path: str) -> bool:
    found = _UNIVERSAL.fullmatch(path)
    is_universal = found is not None and found["key"] == "fp32"
    return is_universal or bool(_MODEL.fullmatch(path) or _OPTIM.fullmatch(path))


_TAG_FILES = ("latest", "latest_universal")
"""Files that name the folder of the newest checkpoint, the first that is there counts."""
_MAX_TAG_BYTES = 1 << 12


def is_at(place: Place) -> bool:
    """True if a place with these files is such a checkpoint, or names one by its tag."""
    paths = place.listing
    return any(map(_is_mark, paths)) or (
        any(name in paths for name in _TAG_FILES)
        and any(_is_mark(path.partition("/")[2]) for path in paths)
    )


def _folder(place: Place) -> str:
    """The folder of the checkpoint, with a slash at its end; empty for the place itself."""
    storage, paths = place.storage, place.listing
    if any(map(_is_mark, paths)):
        return ""
    name = next((name for name in _TAG_FILES if name in paths), None)
    if name is None:
        raise CheckpointNotFoundError(f"{storage.url}: no checkpoint, and no {_TAG_FILES[0]}")
    tag = storage.read(name, 0, _MAX_TAG_BYTES).decode(errors="replace").strip()
    if not any(path.startswith(f"{tag}/") and _is_mark(path[len(tag) + 1 :]) for path in paths):
        raise CorruptCheckpointError(
            f"{storage.url}/{name}: names {shown(tag)}, and there is no such checkpoint\n"
            "Name the folder of another one"
        )
    return f"{tag}/"


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what such a checkpoint holds; its tensors stay where they are."""
    base = _folder(place)
    names = [path.removeprefix(base) for path in place.listing if path.startswith(base)]
    reader = _Reader(builder, base)
    if any(map(_UNIVERSAL.fullmatch, names)):
        reader.read_universal(names)
    else:
        reader.read_ranks(names)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A pipeline stage; by default the only one."""

    number: str = ""  # its number in the names of files; empty for the only one
    is_first: bool = True  # whether it is the first one
    is_last: bool = True  # whether it is the last one


@dataclass(slots=True)
class _Reader:
    """One checkpoint while it is read."""

    builder: IndexBuilder  # what is built
    base: str  # the folder, with a slash at its end
    prefix: Path = ()  # keys before all names: the tensor-parallel rank, if there are several
    groups: list[list[str]] = field(default_factory=list)
    """Names of the parameters of each group, as far as they are known."""

    def open(self, name: str) -> RankFile:
        """Open a file with a dict in it."""
        archive = self.builder.archive(self.base + name)
        return RankFile(archive, mapping(archive.value(), archive.where, "its content"))

    # -- by rank ------------------------------------------------------------------------------

    def read_ranks(self, names: Iterable[str]) -> None:
        """Read the files of all ranks."""
        models: dict[str, dict[int, str]] = {}
        optims: dict[str, dict[int, str]] = {}
        for name in names:
            for pattern, found in ((_MODEL, models), (_OPTIM, optims)):
                match = pattern.fullmatch(name)
                if match is not None:
                    found.setdefault(match["mp"], {})[int(match["dp"] or 0)] = name
        where = self.builder.where(self.base)
        if models.keys() < optims.keys():
            raise damaged(where, "has no *_model_states.pt")
        layers = [match for match in map(_LAYER.fullmatch, names) if match is not None]
        if len({match["model"] for match in layers}) > 1:
            raise FormatVersionError(f"{where}: {NOT_READ}")
        ranks = sorted(models)
        for number in ranks:
            stage = _Stage()
            if len(ranks) > 1 and layers:
                stage = _Stage(number, number == ranks[0], number == ranks[-1])
            elif len(ranks) > 1:
                self.prefix = (f"mp_rank_{number}",)
            self._read_rank(models[number], optims.get(number, {}), stage)
        for match in layers:
            self._add_weights(self.open(match.string), f"{int(match['number'])}.")
        for match in filter(None, map(_EXPERTS.fullmatch, names)):
            self.prefix = (f"mp_rank_{match['mp']}",) if len(models) > 1 else ()
            self._add_weights(self.open(match.string), "")
        for match in filter(None, map(_EXPERT_OPTIM.fullmatch, names)):
            self.prefix = (f"mp_rank_{match['mp']}",) if len(models) > 1 else ()
            file = self.open(match.string)
            tree = (f"expp_rank_{match['ep']}", "optimizer")
            self._add_tree(tree, file.content.get("optimizer"), file)

    def _read_rank(
        self, models: Mapping[int, str], optims: Mapping[int, str], stage: _Stage
    ) -> None:
        """Read the files of the data-parallel ranks of a tensor-parallel rank or pipeline stage."""
        files = [self.open(name) for _, name in sorted(models.items())]
        first = files[0]
        if not optims:
            self._add_tree(("model",), first.content.get("module"), first)
            # Without ZeRO its parameters have numbers, and those of each stage begin at 0.
            place = (f"mp_rank_{stage.number}",) if stage.number else ()
            self._add_tree((*place, "optimizer"), first.content.get("optimizer"), first)
        else:
            shards = [Shard.of(self.open(name)) for _, name in sorted(optims.items())]
            self._check_ranks(optims, shards)
            self._read_parameters(param_shapes(first), shards, stage)
            if stage.is_last:
                self._add_groups(shards[0].groups, shards[0].file)
            self._add_frozen(files)
            self._add_rest_of_module(first)
        if stage.is_first:
            self._add_others(first)

    def _add_weights(self, file: RankFile, prefix: str) -> None:
        """Add the weights of a layer or expert, except those that the optimizer has in float32."""
        for name, value in file.content.items():
            place = self._at("model", prefix + check_name(name, file.where))
            if isinstance(value, ArchivedTensor) and not self._has(name_of(place)):
                self.builder.add_leaf(place, value, file.archive)

    def _check_ranks(self, names: Mapping[int, str], shards: Sequence[Shard]) -> None:
        """Check that there is a file for each rank."""
        wanted = max(shards[0].counts, default=len(names))
        if wanted != len(names) or sorted(names) != list(range(len(names))):
            raise damaged(
                self.builder.where(self.base),
                f"has optimizer files of the ranks {shown(sorted(names))}, and was saved by "
                f"{wanted}: some are missing",
            )

    def _read_parameters(
        self,
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
        shards: Sequence[Shard],
        stage: _Stage,
    ) -> None:
        """Add the parameters of all groups and their state."""
        where = shards[0].file.where
        if any(len(shard.weights) != len(shapes) for shard in shards):
            raise damaged(where, f"has other groups than the {len(shapes)} of the module's file")
        if stage.is_first:
            self.groups = [[] for _ in shapes]
        elif len(self.groups) != len(shapes):
            raise FormatVersionError(f"{where}: {NOT_READ}")
        for number, group in enumerate(shapes):
            for names, holders in holders_of(group, number, shards):
                self._read_group(group, number, names, holders)

    def _read_group(
        self,
        group: Mapping[str, tuple[int, ...]],
        number: int,
        names: Mapping[str, str],
        shards: Sequence[Shard],
    ) -> None:
        """Add the parameters of a group and their state, under new names, from some ranks."""
        where = shards[0].file.where
        # Each of the pipeline stages that a parameter ties has it.
        added = {
            name: new
            for name, new in names.items()
            if not self._has(name_of(self._at("model", new)))
        }
        self.groups[number] += added.values()
        cut = self._cut_of(shards[0], number, len(group))
        # The parameters themselves have no key.
        flat: dict[str | None, list[Any]] = {None: [shard.weights[number] for shard in shards]}
        for key, value in shards[0].state[number].items():
            if isinstance(value, ArchivedTensor) and len(value.shape) == 1:
                flat[check_name(key, where)] = [shard.state[number].get(key) for shard in shards]
            else:
                self._add_common(added.values(), check_name(key, where), value, shards[0].file)
        for key, held in flat.items():
            what = f"{'parameters' if key is None else key} of a group"
            own = [shard.file.part(value, what) for shard, value in zip(shards, held, strict=True)]
            for name, parts in cut(group, own, where).items():
                if name in added:
                    at = self._at("model", added[name])
                    if key is not None:
                        at = self._at("optimizer", "state", added[name], key)
                    add_flat_parts(self.builder, at, group[name], parts)

    def _cut_of(self, shard: Shard, number: int, num_parameters: int) -> Cut:
        """How the parameters of a group are cut."""
        if shard.cuts_parameters:
            return cut_parameters
        if not shard.paddings:
            return functools.partial(cut_group, paddings=(0,) * num_parameters)
        found = shard.paddings[number] if number < len(shard.paddings) else None
        where = shard.file.where
        paddings = [
            integers((one,), where, "a padding")[0] for one in sequence(found, where, "paddings")
        ]
        if len(paddings) != num_parameters:
            raise damaged(where, f"{len(paddings)} paddings of {num_parameters} parameters")
        return functools.partial(cut_group, paddings=paddings)

    def _add_common(self, group: Iterable[str], key: str, value: object, file: RankFile) -> None:
        """Add what is the same for all parameters of a group."""
        for name in group:
            self._add_state(self._at("optimizer", "state", name, key), value, file)

    def _add_state(self, place: Path, value: Any, file: RankFile) -> None:
        """Add a state of a parameter; DeepSpeed counts steps in numbers, torch in tensors."""
        # A count that float32 cannot hold stays a value.
        is_count = type(value) in {int, float} and abs(value) <= 2**24 and value == int(value)
        if place[-1] == "step" and is_count:
            self.builder.add_number(place, value)
        else:
            self.builder.add_leaf(place, value, file.archive)

    def _add_groups(self, groups: Sequence[Any], file: RankFile) -> None:
        """Add the options of the groups, and the steps that are counted there."""
        first = 0
        for number, group in enumerate(groups):
            options = mapping(group, file.where, "a group of param_groups")
            flat = options.get("params")
            # ZeRO 3 cuts a group into several; `params` numbers them.
            length = len(sequence(flat, file.where, "params")) if flat is not None else 1
            own = [name for some in self.groups[first : first + length] for name in some]
            first += length
            place = self._at("optimizer", "param_groups", number)
            for option, value in options.items():
                if option != "params":
                    at = (*place, check_name(option, file.where))
                    self.builder.add_leaf(at, value, file.archive)
            if self.groups:
                self.builder.add_leaf((*place, "params"), own)
            if "step" in options:  # fused optimizers count there
                for name in own:
                    at = self._at("optimizer", "state", name, "step")
                    if not self._has(name_of(at)):
                        self._add_state(at, options["step"], file)
        if groups:
            self.builder.set_sequences({self._at("optimizer", "param_groups"): "list"})

    def _add_frozen(self, files: Sequence[RankFile]) -> None:
        """Add the parameters that are not trained; with ZeRO 3 each rank has a part of each."""
        first = files[0]
        stored = first.content.get("frozen_param_shapes")
        for name, value in mapping(stored or {}, first.where, "frozen_param_shapes").items():
            shape = integers(value, f"{first.where}: {name!s:.200}", "a shape")
            fragments = [
                mapping(
                    file.content.get("frozen_param_fragments") or {},
                    file.where,
                    "frozen parameters",
                ).get(name)
                for file in files
            ]
            place = self._at("model", check_name(name, first.where))
            if isinstance(fragments[0], ArchivedTensor) and fragments[0].shape == shape:
                self.builder.add_leaf(place, fragments[0], first.archive)
            elif fragments[0] is not None:
                weights = [
                    file.part(part, name) for file, part in zip(files, fragments, strict=True)
                ]
                cut = cut_parameters({name: shape}, weights, first.where)
                add_flat_parts(self.builder, place, shape, cut[name])

    def _add_rest_of_module(self, file: RankFile) -> None:
        """Add buffers, and the further names of tied parameters."""
        module = file.content.get("module")
        tensors = mapping({} if module is None else module, file.where, "module")
        buffers = sequence(file.content.get("buffer_names") or [], file.where, "buffer_names")
        for name in [check_name(buffer, file.where) for buffer in buffers]:
            if isinstance(tensors.get(name), ArchivedTensor):
                self.builder.add_leaf(self._at("model", name), tensors[name], file.archive)
        shared = mapping(file.content.get("shared_params") or {}, file.where, "shared_params")
        for alias, name in shared.items():
            place = self._at("model", check_name(alias, file.where))
            of = name_of(self._at("model", check_name(name, file.where)))
            if self.builder.has_tensor(of):
                self.builder.add_alias(name_of(place), of)
                self.builder.set_path(name_of(place), place)

    def _add_others(self, file: RankFile) -> None:
        """Add what the engine and the script stored beside module and optimizer."""
        for key, value in file.content.items():
            if key not in _CONSUMED:
                self._add_tree((key if isinstance(key, str) else repr(key),), value, file)

    def _add_tree(self, path: Path, root: object, file: RankFile) -> None:
        if root is not None:
            self.builder.add_tree((*self.prefix, *path), root, file.archive)

    def _at(self, *keys: str | int) -> Path:
        return (*self.prefix, *keys)

    def _has(self, name: str) -> bool:
        return self.builder.has_tensor(name) or name in self.builder.document.values

    # -- universal ----------------------------------------------------------------------------

    def read_universal(self, names: Sequence[str]) -> None:
        """Read a checkpoint that has a file for each parameter and state."""
        models = sorted(filter(_MODEL.fullmatch, names))
        files = [self.open(name) for name in models]
        by_group = param_shapes(files[0]) if files else []
        shapes = {name: shape for group in by_group for name, shape in group.items()}
        for name in names:
            found = _UNIVERSAL.fullmatch(name)
            if found is not None:
                self._add_parameter(name, found["parameter"], found["key"], shapes)
        self.groups = [list(group) for group in by_group]
        if _UNIVERSAL_GROUPS in names:
            file = self.open(_UNIVERSAL_GROUPS)
            groups = file.content.get("param_groups") or []
            self._add_groups(sequence(groups, file.where, "param_groups"), file)
            self._add_common_state(file)
        if files:
            self._add_frozen(files)
            self._add_rest_of_module(files[0])
            self._add_others(files[0])

    def _add_common_state(self, file: RankFile) -> None:
        """Add what all parameters of a group share, such as steps, where ZeRO 3 has left it."""
        optimizer = file.content.get("optimizer_state_dict") or {}
        stored = mapping(optimizer, file.where, "optimizer_state_dict").get("state") or {}
        state = mapping(stored, file.where, "the state of the optimizer")
        for number, names in enumerate(self.groups):
            own = mapping(state.get(number, {}), file.where, "the state of a group")
            for key, value in own.items():
                if not (isinstance(value, ArchivedTensor) and value.shape):
                    missing = [
                        name
                        for name in names
                        if not self._has(name_of(self._at("optimizer", "state", name, key)))
                    ]
                    self._add_common(missing, check_name(key, file.where), value, file)

    def _add_parameter(
        self, file_name: str, parameter: str, key: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Add a parameter or a state of it."""
        archive = self.builder.archive(self.base + file_name)
        value = archive.value()
        file = RankFile(archive, value if isinstance(value, Mapping) else {})
        tensor = file.content.get("param", value)
        place = self._at("optimizer", "state", parameter, key)
        if key == "fp32":
            place = self._at("model", parameter)
        shape = shapes.get(parameter)
        is_flat = isinstance(tensor, ArchivedTensor) and len(tensor.shape) == 1
        if is_flat and shape is not None and tensor.shape == (math.prod(shape),):
            add_flat_parts(self.builder, place, shape, [file.part(tensor, key)])
        else:
            self._add_state(place, tensor, file)


# ---------------------------------------------------------------------------------------------
# Files of ranks: how they cut flattened groups of parameters
# ---------------------------------------------------------------------------------------------


NOT_READ = (
    "parameters that are cut over other ranks than the rest, in a way that is not read; make a "
    "universal checkpoint of it with DeepSpeed's ds_to_universal.py and read that"
)
_EXPERT = re.compile(r"\.deepspeed_experts\.(?P<number>[0-9]{1,6})(?=\.|$)")


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file with a dict in it."""

    archive: Archive
    content: Mapping[Any, Any]

    @property
    def where(self) -> str:
        """The file, for error messages."""
        return self.archive.where

    def part(self, value: object, what: str) -> FlatPart:
        """The elements of a tensor in one dim."""
        if not isinstance(value, ArchivedTensor) or len(value.shape) != 1:
            raise damaged(self.where, f"{what} is no tensor in one dim")
        if value.strides != (1,) and value.shape[0] > 1:
            raise damaged(self.where, f"{what} does not lie without gaps")
        position = self.archive.position(value)
        return FlatPart(self.archive.path, position, value.shape[0], value.dtype)


def param_shapes(file: RankFile) -> list[dict[str, tuple[int, ...]]]:
    """The parameters of each group, in the order in which they lie flattened."""
    found = file.content.get("param_shapes")
    if found is None:
        return []
    # Early versions have one dict of all groups.
    groups = [found] if isinstance(found, Mapping) else sequence(found, file.where, "param_shapes")
    return [
        {
            check_name(name, file.where): integers(shape, f"{file.where}: {name!s:.200}", "a shape")
            for name, shape in mapping(group, file.where, "param_shapes").items()
        }
        for group in groups
    ]


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of the optimizer."""

    file: RankFile
    weights: Sequence[Any]  # the flattened float32 parameters of each group
    state: Sequence[Mapping[Any, Any]]  # the state of each group, by key
    groups: Sequence[Any]  # the options of each group of the optimizer; none if they are not stored
    paddings: Sequence[Any]  # elements behind each parameter of each group; empty if there are none
    cuts_parameters: bool  # whether each parameter was cut, as ZeRO 3 does it, and not each group
    counts: tuple[int, ...] = ()
    """Over how many ranks each group is cut, or one number for all; empty if not stored."""

    @classmethod
    def of(cls, file: RankFile) -> Shard:
        """The shard that a file describes."""
        where = file.where
        content = mapping(file.content.get("optimizer_state_dict"), where, "optimizer_state_dict")
        if content.get("ds_zero_partition_groups"):
            raise FormatVersionError(f"{where}: {NOT_READ}")
        cuts_parameters = "fp32_flat_groups" in content
        key = "fp32_flat_groups" if cuts_parameters else "single_partition_of_fp32_groups"
        weights = sequence(content.get(key), where, key)
        paddings = sequence(content.get("param_alignment_paddings") or [], where, "paddings")
        stored_counts = content.get("partition_count")
        found = stored_counts if isinstance(stored_counts, list) else [stored_counts]
        counts = tuple(one for one in found if type(one) is int and one > 0)
        base = content.get("optimizer_state_dict" if cuts_parameters else "base_optimizer_state")
        if isinstance(base, list | tuple):  # elastic checkpoints: the state of each group alone
            if len(base) != len(weights):
                raise damaged(where, f"has the state of {len(base)} of {len(weights)} groups")
            # The step of a fused optimizer, which counts in its groups, stands beside it.
            step = content.get("base_optimizer_state_step")
            common = {} if step is None else {"step": step}
            state: list[Mapping[Any, Any]] = [
                {**common, **mapping(one, where, "the state of a group")} for one in base
            ]
            return cls(file, weights, state, [], paddings, cuts_parameters, counts)
        base = mapping(base, where, "the state of the optimizer")
        stored = mapping(base.get("state"), where, "the state of the optimizer")
        state = [
            mapping(stored.get(number, {}), where, "the state of a group")
            for number in range(len(weights))
        ]
        groups = sequence(base.get("param_groups"), where, "param_groups")
        return cls(file, weights, state, groups, paddings, cuts_parameters, counts)


def holders_of(
    group: Mapping[str, tuple[int, ...]], number: int, shards: Sequence[Shard]
) -> list[tuple[dict[str, str], Sequence[Shard]]]:
    """The ranks that hold parts of a group: all of them, or for experts those of each share.

    Expert-parallel ranks follow each other, and all call their experts 0, 1 and so on. With the
    ranks come the names of the parameters in the model.
    """
    counts = shards[0].counts
    count = counts[number] if number < len(counts) else len(shards)
    num_shares = len(shards) // count
    if num_shares <= 1:
        return [({name: name for name in group}, shards)]
    found = {name: _EXPERT.search(name) for name in group}
    numbers = {int(match["number"]) for match in found.values() if match is not None}
    if None in found.values() or len(shards) % count or numbers != {*range(len(numbers))}:
        raise FormatVersionError(f"{shards[0].file.where}: {NOT_READ}")
    shares = []
    for share in range(num_shares):
        names = {
            name: f"{name[: match.start('number')]}{share * len(numbers) + int(match['number'])}"
            f"{name[match.end('number') :]}"
            for name, match in found.items()
            if match is not None
        }
        shares.append((names, shards[share::num_shares]))
    return shares


Cut = Callable[[Mapping[str, tuple[int, ...]], Sequence[FlatPart], str], dict[str, list[FlatPart]]]
"""Shapes of a group's parameters, what each rank holds of the group and a file → their parts."""


def cut_group(
    group: Mapping[str, tuple[int, ...]],
    parts: Sequence[FlatPart],
    where: str,
    *,
    paddings: Sequence[int],
) -> dict[str, list[FlatPart]]:
    """The parts of each parameter of a group that is cut as a whole."""
    found, start = {}, 0
    num_elements = sum(part.num_elements for part in parts)
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        stop = start + math.prod(shape)
        if stop > num_elements:
            raise damaged(where, f"a group has fewer elements than its parameter {name}")
        own, begin = [], 0
        for part in parts:
            low, high = max(start - begin, 0), min(stop - begin, part.num_elements)
            if low < high:
                own.append(part.range(low, high))
            begin += part.num_elements
        found[name] = own or [parts[0].range(0, 0)]
        start = stop + padding
    return found


def cut_parameters(
    group: Mapping[str, tuple[int, ...]], parts: Sequence[FlatPart], where: str
) -> dict[str, list[FlatPart]]:
    """The parts of each parameter of a group whose parameters are cut one by one."""
    found: dict[str, list[FlatPart]] = {}
    offset = 0
    for name, shape in group.items():
        size = math.prod(shape)
        length = -(-size // len(parts))
        own = []
        for rank, part in enumerate(parts):
            held = max(min(length, size - rank * length), 0)
            if offset + held > part.num_elements:
                raise damaged(where, f"a group has fewer elements than its parameter {name}")
            own.append(part.range(offset, offset + held))
        found[name] = own
        offset += length
    return found
