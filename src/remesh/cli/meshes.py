"""Parallel layouts written as text (`tp=2,fsdp=4`), and the boxes that their ranks hold.

A layout is a mesh: axes with sizes, the first one outermost, as in `init_device_mesh`.

* `dp` replicates.
* `fsdp` cuts the first dim, as FSDP2 does: into equal chunks, the last ones shorter or empty.
* `tp` cuts matrices by rows, or by columns where the name of the parameter is that of a layer whose
  input is cut (`o_proj`, `down_proj` and their like in other models); vectors are whole. Rules of
  the user's, `PATTERN=DIM`, come first; DIM is `-` for a tensor that every rank holds.

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

from remesh.errors import StateError
from remesh.geometry import IntArray
from remesh.index import BoxTable, TensorTable

KINDS = ("dp", "fsdp", "tp")
_INPUT_CUT = re.compile(
    r"(^|\.)(o_proj|out_proj|down_proj|dense_4h_to_h|linear_proj|linear_fc2|c_proj|wo|w2"
    r"|attention\.dense|attention\.output\.dense|output\.dense|fc2)\.weight(\.|$)"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Which dim of tensors is cut by tensor parallelism; None for none."""

    pattern: str
    dim: int | None


@dataclass(frozen=True, slots=True)
class Mesh:
    """A parallel layout: kinds of its axes and their sizes, the outermost first."""

    axes: tuple[tuple[str, int], ...]
    rules: tuple[Rule, ...] = ()

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
    """A layout of its text, and rules of theirs.

    Raises:
        StateError: If the text is not a layout, or a rule not `PATTERN=DIM`.
    """
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


def _rule(text: str) -> Rule:
    pattern, found, dim = text.rpartition("=")
    if not found or not pattern or not (dim == "-" or dim.isdecimal()):
        raise StateError(f"{text!r} is not a rule: write PATTERN=DIM, or PATTERN=- for no dim")
    return Rule(pattern, None if dim == "-" else int(dim))


def boxes_of_rank(mesh: Mesh, rank: int, tensors: TensorTable) -> BoxTable:
    """The boxes that a rank of a layout holds; tensors of which it holds nothing are left out."""
    place = mesh.coordinates(rank)
    offsets = np.zeros_like(tensors.shapes)
    extents = tensors.shapes.copy()
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


def _tp_dims(mesh: Mesh, tensors: TensorTable) -> Iterator[int]:
    """The dim of each tensor that tensor parallelism cuts; -1 for none."""
    for name, ndim in zip(tensors.names, tensors.ndims.tolist(), strict=True):
        rule = next((one for one in mesh.rules if fnmatchcase(name, one.pattern)), None)
        if rule is not None:
            if rule.dim is not None and rule.dim >= ndim:
                raise StateError(f"{name}: has {ndim} dims, so none is dim {rule.dim}")
            yield -1 if rule.dim is None else rule.dim
        elif ndim != 2:
            yield -1
        else:
            yield 1 if _INPUT_CUT.search(name) else 0
