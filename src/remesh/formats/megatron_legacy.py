"""Megatron's checkpoints of before `torch_dist`: a folder for each model-parallel rank.

::

    latest_checkpointed_iteration.txt           which folder to read: a number, or `release`
    iter_0000010/mp_rank_01_002/model_optim_rng.pt    tensor-parallel rank 1 of stage 2
    iter_0000010/mp_rank_01/model_optim_rng.pt        the same where there is one stage

Each file is an archive of torch.save with the model (`model`, or `model0`, `model1`, ... of the
chunks of an interleaved pipeline), the optimizer, and values. A single one is read as it is. Of
several the models are joined by what Megatron's own layers say of themselves (the sharded state
dicts of `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding` and the gated MLP):

* Layers are numbered on from stage to stage; with several chunks, chunk by chunk.
* Columns (`linear_qkv`, `linear_fc1`, ...) and vocabularies are cut along dim 0, rows
  (`linear_proj`, `linear_fc2`, ...) along dim 1; norms and biases of rows are alike on all ranks.
* A gated `linear_fc1` has the rank's part of the gate, and then that of the other half. It has
  twice as many rows as the `linear_fc2` beside it has columns; one that is not gated, as many.
  Arguments are not asked: the flags of gated activations are several, and may be unreadable.

Where a name has no rule (experts, modules of the script), nothing is joined: then each part opens
under its own folder, as `mp_rank_01_002.model...`, and a warning says why. Optimizers and
generators of several ranks always do; an optimizer counts its parameters rank by rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remesh._repr import shown
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.formats.archive import Archive
from remesh.formats.building import IndexBuilder, take_apart
from remesh.formats.checks import mapping
from remesh.formats.place import Place, Trackers
from remesh.formats.restricted_pickle import ArchivedTensor

NAME = "megatron_legacy"
MARKER = "mp_rank_XX/model_optim_rng.pt (Megatron before torch_dist)"

_FILE = re.compile(
    r"(?P<folder>mp_rank_(?P<tp>[0-9]{2,6})(?:_(?P<pp>[0-9]{3,6}))?(?:_(?P<ep>[0-9]{3,6}))?)/"
    r"model(?:_optim)?_rng\.pt"
)
_MODEL = re.compile(r"model[0-9]{0,4}")
_LAYER = re.compile(r"(?P<head>(?:.*\.)?layers\.)(?P<number>[0-9]{1,9})(?P<tail>\..*)", re.DOTALL)
_OF_RANKS = frozenset({"optimizer", "rng_state"})
"""Entries that each rank has of its own, beside the model."""

_COLUMNS = "linear_qkv|linear_q|linear_kv|linear_fc1|query_key_value|dense_h_to_4h"
_ROWS = "linear_proj|linear_fc2|dense|dense_4h_to_h"
_RULES: tuple[tuple[re.Pattern[str], int | None], ...] = (
    (re.compile(rf".*\.(?:{_COLUMNS})\.(?:weight|bias)"), 0),
    (re.compile(r"(?:.*\.)?(?:word_embeddings|output_layer)\.(?:weight|bias)"), 0),
    (re.compile(rf".*\.(?:{_ROWS})\.weight"), 1),
    (re.compile(rf".*\.(?:{_ROWS})\.bias"), None),
    (re.compile(r"(?:.*\.)?position_embeddings\.weight"), None),
)
"""Name in the model → the dim along which ranks cut it; None if all have the whole."""
_PARAMETER = re.compile(r"[._](?:weight|bias)\Z")
_SECOND_LAYERS = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
"""The first linear layer of an MLP, which may be gated → the second."""

_log = logging.getLogger("remesh")


def _folder_of(text: str) -> str:
    return f"iter_{int(text):07d}" if re.fullmatch("[0-9]{1,18}", text) else text


_TRACKERS = Trackers(("latest_checkpointed_iteration.txt",), _FILE.fullmatch, _folder_of)


def is_at(place: Place) -> bool:
    """True if a place with these files is such a checkpoint, or names one by its iteration."""
    return _TRACKERS.is_at(place.listing)


def read(place: Place, builder: IndexBuilder) -> None:
    """Read what such a checkpoint holds; its tensors stay where they are."""
    base = _TRACKERS.folder(place)
    parts = []
    for path in place.listing:
        found = _FILE.fullmatch(path.removeprefix(base)) if path.startswith(base) else None
        if found is not None:
            archive = builder.archive(path)
            content = mapping(archive.value(), archive.where, "its content")
            at = int(found["pp"] or 0), int(found["tp"])
            parts.append(_Part(found["folder"], at, archive, content))
    if len(parts) == 1:
        builder.add_tree((), parts[0].content, parts[0].archive)
        return
    parts.sort(key=lambda part: part.place)
    try:
        joined = _Joined.of(parts)
    except _CannotJoinError as reason:
        _log.warning(
            "%s: the models of its %d parts are not joined, because %s\n"
"Names begin with the folders of the parts, such as %s",
            place.url, len(parts), reason, parts[0].folder,
        )  # fmt: skip
        for part in parts:
            builder.add_tree((part.folder,), part.content, part.archive)
        return
    joined.add_to(builder)
    for part in parts:
        for key, value in part.content.items():
            if key in _OF_RANKS:
                builder.add_tree((part.folder, key), value, part.archive)
            elif part is parts[0] and not _is_model(key):
                builder.add_tree((key,), value, part.archive)


def _is_model(key: object) -> bool:
    return isinstance(key, str) and _MODEL.fullmatch(key) is not None


# ---------------------------------------------------------------------------------------------
# Joining
# ---------------------------------------------------------------------------------------------


class _CannotJoinError(Exception):
    """Why parts are not joined."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The content of one rank's file; `place` is its stage and its tensor-parallel rank."""

    folder: str
    place: tuple[int, int]
    archive: Archive
    content: Mapping[Any, Any]


Held = tuple[Archive, ArchivedTensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """A joined model."""

    tensors: dict[str, list[Held]]  # for each name what the tensor-parallel ranks have of it
    leaves: dict[str, object]

    @classmethod
    def of(cls, parts: list[_Part]) -> _Joined:
        """Join the models of all ranks."""
        places = [part.place for part in parts]
        num_stages, num_ranks = max(s for s, _ in places) + 1, max(t for _, t in places) + 1
        if len(set(places)) != len(parts) or len(parts) != num_stages * num_ranks:
            raise _CannotJoinError(
                "their ranks are no full grid, or experts have ranks of their own"
            )
        joined = cls({}, {})
        chunks = [key for key in parts[0].content if _is_model(key)]
        first_layer = 0
        for chunk in chunks:
            for stage in range(num_stages):
                ranks = parts[stage * num_ranks : (stage + 1) * num_ranks]
                models = [
                    take_apart(part.content.get(chunk, {}), ("model",), part.archive).leaves
                    for part in ranks
                ]
                first_layer += joined._add_stage(ranks, models, first_layer)
        for name, held in joined.tensors.items():
            if len(held) > 1:
                joined._cut_of(name, held)
        return joined

    def _add_stage(
        self, ranks: list[_Part], models: Sequence[Mapping[str, Any]], first_layer: int
    ) -> int:
        """Add what the ranks of a stage have; returns how many layers these are."""
        tensors = [
            {name: one for name, (_, one) in model.items() if isinstance(one, ArchivedTensor)}
            for model in models
        ]
        if any(own.keys() != tensors[0].keys() for own in tensors):
            raise _CannotJoinError(f"ranks of {ranks[0].folder} have different names")
        last = -1
        for name, (_, value) in models[0].items():
            found = _LAYER.fullmatch(name)
            new = name
            if found is not None:
                last = max(last, int(found["number"]))
                new = f"{found['head']}{first_layer + int(found['number'])}{found['tail']}"
            if new in self.tensors or new in self.leaves:
                raise _CannotJoinError(f"two stages have {shown(name)}")
            if name in tensors[0]:
                held = zip(ranks, tensors, strict=True)
                self.tensors[new] = [(part.archive, own[name]) for part, own in held]
            else:
                self.leaves[new] = value
        return last + 1

    def add_to(self, builder: IndexBuilder) -> None:
        """Add the model to what is built."""
        for name, held in self.tensors.items():
            self._add_tensor(builder, name, held)
            builder.set_path(name, ("model", name.removeprefix("model.")))
        for name, value in self.leaves.items():
            builder.add_leaf(("model", name.removeprefix("model.")), value)

    def _add_tensor(self, builder: IndexBuilder, name: str, held: list[Held]) -> None:
        archive, first = held[0]
        dim, num_blocks = (None, 1) if len(held) == 1 else self._cut_of(name, held)
        if dim is None:
            builder.add_archived(name, first, archive)
            return
        whole = list(first.shape)
        whole[dim] *= len(held)
        row = builder.add_tensor(name, first.dtype, whole)
        extent = first.shape[dim] // num_blocks
        block = [*first.shape[:dim], extent, *first.shape[dim + 1 :]]
        itemsize = BY_NAME[first.dtype].itemsize
        for rank, (archive, tensor) in enumerate(held):
            for number in range(num_blocks):
                offset = [0] * len(block)
                offset[dim] = (number * len(held) + rank) * extent
                box = Box(tuple(offset), tuple(block))
                position = archive.position(tensor)
                position += number * extent * tensor.strides[dim] * itemsize
                builder.add_strided(row, box, archive.path, position, tensor.strides)

    def _cut_of(self, name: str, held: list[Held]) -> tuple[int | None, int]:
        """The dim that ranks cut, and how many blocks each has; None if each has all of it."""
        if "experts." in name:
            raise _CannotJoinError(f"{shown(name)} is of an expert")
        (_, first), *others = held
        dim = _dim_of(name)
        is_alike = all((one.shape, one.dtype) == (first.shape, first.dtype) for _, one in others)
        if not is_alike or (dim is not None and dim >= len(first.shape)):
            raise _CannotJoinError(f"parts of {shown(name)} differ in shape")
        *mlp, layer, _ = name.split(".")
        if layer not in _SECOND_LAYERS:
            return dim, 1
        second = self.tensors.get(".".join((*mlp, _SECOND_LAYERS[layer], "weight")))
        columns = second[0][1].shape[1:] if second else ()
        for num_blocks in (1, 2):
            if [num_blocks * n for n in columns] == [first.shape[0]]:
                return dim, num_blocks
        raise _CannotJoinError(f"nothing says whether {shown(name)} is gated")


def _dim_of(name: str) -> int | None:
    """The dim along which ranks cut a tensor; None if all have the whole."""
    if _is_norm(name):
        return None
    for pattern, dim in _RULES:
        if pattern.fullmatch(name):
            return dim
    raise _CannotJoinError(f"no rule says how {shown(name)} was cut")


def _is_norm(name: str) -> bool:
    """True if it is a weight or bias such as `q_layernorm.weight` or `layer_norm_bias`."""
    found = _PARAMETER.search(name)
    return found is not None and "norm" in name[: found.start()].rpartition(".")[2]
