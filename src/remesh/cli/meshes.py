"""Parallel layouts written as text (`tp=2,fsdp=4`), and the boxes that their ranks hold.

A layout is a mesh: axes with sizes, the first one outermost, as in `init_device_mesh`.

* `dp` replicates.
* `fsdp` cuts the first dim, as FSDP2 does: into equal chunks, the last ones shorter or empty.
* `tp` cuts matrices by rows, or by columns where the name of the parameter is that of a layer whose
  input is cut (`o_proj`, `down_proj` and their like in other models); vectors are whole. Rules of
  the user's, `PATTERN=DIM`, come first; DIM is `-` for a tensor that every rank holds.
* `ep` gives each rank its share of experts: those of some numbers (`experts.3.w1`), or a part of
  the first dim of a tensor of all (`experts.gate_up_proj`). Everything else is replicated.
* `pp` gives each rank its share of layers, by their numbers. Of what is in no layer, embeddings lie
  on the first rank, all else on the last.

States of an optimizer lie as their parameters do, as their names end with those of the parameters
or contain them. What a rank holds of a tensor is one box, unless `fsdp` cuts what `tp` has cut in
the same dim, which is one box too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from remesh.core.geometry import IntArray
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import StateError

KINDS = ("dp", "fsdp", "tp", "ep", "pp")
_INPUT_CUT = re.compile(
    r"(^|\.)(o_proj|out_proj|down_proj|dense_4h_to_h|linear_proj|linear_fc2|c_proj|wo|w2"
    r"|attention\.dense|attention\.output\.dense|output\.dense|fc2)\.weight(\.|$)"
)

_EXPERT = re.compile(r"^(?P<group>.*?)(^|\.)(local_)?experts\.(?P<number>[0-9]{1,9})\.")
_EXPERTS = re.compile(r"(^|\.)experts\.")
_LAYER = re.compile(r"^(?P<group>.*?)(^|\.)(layers|layer|h|blocks|block)\.(?P<number>[0-9]{1,9})\.")
_FIRST = re.compile(r"embed|wte|wpe|tok_")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A parallel layout: kinds of its axes and their sizes, the outermost first."""

    axes: tuple[tuple[str, int], ...]
    rules: tuple[tuple[str, int | None], ...] = ()  # patterns, and the dim that tp cuts, if any

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return ",".join(f"{kind}={size}" for kind, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis."""
        found = {}
        for kind, size in reversed(self.axes):
            found[kind] = rank % size
            rank //= size
        return found

    def size(self, kind: str) -> int:
        """The size of an axis; 1 if there is none."""
        return dict(self.axes).get(kind, 1)


def parse_mesh(text: str, rules: Sequence[str] = ()) -> Mesh:
    """A layout of its text, and rules of theirs."""
    axes = []
    for part in text.split(","):
        kind, _, size = part.strip().partition("=")
        if kind not in KINDS or not size.isdecimal() or int(size) < 1:
            raise StateError(
                f"{text!r} is not a layout: write axes like fsdp=4 or dp=2,tp=2; known are "
                f"{', '.join(KINDS)}"
            )
        axes.append((kind, int(size)))
    if len(dict(axes)) < len(axes):
        raise StateError(f"{text!r}: every axis may stand once")
    return Mesh(tuple(axes), tuple(map(_rule, rules)))


def _rule(text: str) -> tuple[str, int | None]:
    pattern, found, dim = text.rpartition("=")
    if not found or not pattern or not (dim == "-" or dim.isdecimal()):
        raise StateError(f"{text!r} is not a rule: write PATTERN=DIM, or PATTERN=- for no dim")
    return pattern, None if dim == "-" else int(dim)


def boxes_of_rank(mesh: Mesh, rank: int, tensors: TensorTable) -> BoxTable:
    """The boxes that a rank of a layout holds; tensors of which it holds nothing are left out."""
    place = mesh.coordinates(rank)
    offsets = np.zeros_like(tensors.shapes)
    extents = tensors.shapes.copy()
    if mesh.size("pp") > 1:
        stages = _stages(tensors.names, mesh.size("pp"))
        extents[stages != place["pp"], 0] = 0
    if mesh.size("ep") > 1:
        numbers, is_stacked = _experts(tensors, mesh.size("ep"))
        extents[(numbers >= 0) & (numbers != place["ep"]), 0] = 0
        _cut(offsets, extents, np.where(is_stacked, 0, -1), mesh.size("ep"), place["ep"])
    if mesh.size("tp") > 1:
        dims = np.array(list(_tp_dims(mesh, tensors)), dtype=np.int64)
        _cut(offsets, extents, dims, mesh.size("tp"), place["tp"])
    if mesh.size("fsdp") > 1:
        dims = np.where(tensors.ndims > 0, 0, -1)
        _cut(offsets, extents, dims, mesh.size("fsdp"), place["fsdp"])
    rows = np.flatnonzero(extents.prod(axis=1) > 0)
    return BoxTable(tensors, rows, offsets[rows], extents[rows])


def _cut(offsets: IntArray, extents: IntArray, dims: IntArray, parts: int, number: int) -> None:
    """Cut boxes into chunks along a dim each (-1 for none), in place, and keep one of them."""
    rows = np.flatnonzero(dims >= 0)
    dim = dims[rows]
    length = extents[rows, dim]
    chunk = -(-length // parts)
    start = np.minimum(chunk * number, length)
    extents[rows, dim] = np.minimum(chunk, length - start)
    offsets[rows, dim] += start


def _shares(pattern: re.Pattern[str], names: Sequence[str], parts: int) -> IntArray:
    """The part to which the number in each name belongs; -1 where there is none."""
    found = [pattern.search(name) for name in names]
    numbers = np.array([-1 if one is None else int(one["number"]) for one in found], np.int64)
    counts: dict[str, int] = {}
    for one, number in zip(found, numbers.tolist(), strict=True):
        if one is not None:
            counts[one["group"]] = max(counts.get(one["group"], 0), number + 1)
    of = np.array([1 if one is None else counts[one["group"]] for one in found], np.int64)
    return np.where(numbers < 0, -1, numbers // -(-of // parts))


def _stages(names: Sequence[str], parts: int) -> IntArray:
    shares = _shares(_LAYER, names, parts)
    is_first = np.array([_FIRST.search(name) is not None for name in names], np.bool_)
    return np.where(shares >= 0, shares, np.where(is_first, 0, parts - 1))


def _experts(tensors: TensorTable, parts: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """The part of each tensor of one expert, -1 for others, and which tensors are of several."""
    numbers = _shares(_EXPERT, tensors.names, parts)
    named = [_EXPERTS.search(name) is not None for name in tensors.names]
    return numbers, np.array(named, np.bool_) & (numbers < 0) & (tensors.ndims > 1)


def _tp_dims(mesh: Mesh, tensors: TensorTable) -> Iterator[int]:
    """The dim of each tensor that tensor parallelism cuts; -1 for none."""
    for name, ndim in zip(tensors.names, tensors.ndims.tolist(), strict=True):
        dims = [dim for pattern, dim in mesh.rules if fnmatchcase(name, pattern)]
        if dims:
            dim = -1 if dims[0] is None else dims[0]
            if dim >= ndim:
                raise StateError(f"{name}: has {ndim} dims, so none is dim {dim}")
            yield dim
        elif ndim != 2:
            yield -1
        else:
            yield 1 if _INPUT_CUT.search(name) else 0
