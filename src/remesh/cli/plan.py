"""`remesh plan`: whether a checkpoint loads in a layout, and what each rank reads and holds.

A layout is written as text (`tp=2,fsdp=4`). It is a mesh: axes with sizes, the first one outermost,
as in `init_device_mesh`.

* `dp` replicates.
* `fsdp` cuts the first dim, as FSDP2 does: into equal chunks, the last ones shorter or empty.
* `tp` cuts matrices by rows, or by columns where the name of the parameter is that of a layer whose
  input is cut (`o_proj`, `down_proj` and their like in other models); vectors are whole.

States of an optimizer lie as their parameters do, as their names end with those of the parameters
or contain them. What a rank holds of a tensor is one box, unless `fsdp` cuts what `tp` has cut in
the same dim, which is one box too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np

from remesh._repr import format_bytes
from remesh.cli import output, places
from remesh.cli.places import transform_option
from remesh.core.geometry import IntArray
from remesh.core.index import Index
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import CoverageError, StateError
from remesh.planner import LoadPlan, ReadLimits, plan_load
from remesh.storage import shown_url
from remesh.transform import Resolved, Transform

AMPLIFIED = 1.5
"""Bytes read for each byte held above which the reason is printed."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The part of one rank."""

    rank: int  # which
    num_tensors: int  # tensors of which it holds something
    state_bytes: int  # bytes of what it holds
    bytes_read: int  # bytes that it reads alone, with gaps and whole digest blocks
    num_reads: int  # requests
    peak_bytes: int
    """Host memory at most: what it holds, the buffers of its reading threads, and the index."""


@click.command(
    epilog=output.example(
        "remesh plan runs/step_00001000 --layout fsdp=4",
        "remesh plan runs/step_00001000 --layout tp=2,fsdp=2",
        "remesh plan downloaded --layout tp=4 --transform to_megatron.txt",
    )
)
@click.argument("path", metavar="CKPT")
@click.option(
    "--layout",
    "layout_text",
    metavar="AXES",
    help="Axes and sizes of the mesh, such as fsdp=4 or dp=2,tp=2.",
)
@click.option(
    "--like",
    metavar="OTHER",
    help="A checkpoint with the names and shapes of the job that loads; by default CKPT.",
)
@transform_option("The transformation of the load")
@output.all_option
@places.format_option()
@output.json_option
@click.pass_context
def plan(
    ctx: click.Context,
    *,
    path: str,
    layout_text: str | None,
    like: str | None,
    transform: Transform | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Say whether a checkpoint loads in a layout, and what each rank reads and holds.

    Nothing but the index is read: no GPU, no processes, no tensors. Axes are dp (replicate), fsdp
    (cut the first dim) and tp (cut matrices; columns where the name is that of a layer whose input
    is cut, such as o_proj). What ranks read is without the sharing between replicas, which reads
    less. The exit code is 0 if it loads, 1 if names are
    missing or shapes differ.
    """
    mesh = parse_mesh(layout_text or "dp=1")
    checkpoint = places.open_checkpoint(path)
    stored, limits = checkpoint.index, checkpoint.read_limits(mesh.num_ranks)
    wanted = None if like is None else places.open_checkpoint(like).index
    resolved = (transform or Transform("")).resolve(stored, wanted)
    missing, unexpected = tuple(resolved.missing), resolved.unused
    if wanted is not None:
        unexpected = tuple(name for name in unexpected if name not in wanted)
    mismatched = tuple(f"{name}: {conflict}" for name, conflict in resolved.conflicts.items())
    problems = [] if not (missing or mismatched) else ["missing names, or shapes that differ"]
    ranks: list[RankPlan] = []
    try:
        ranks = plan_ranks(stored, mesh, resolved, limits)
    except CoverageError as error:
        problems.append(str(error))
    document = {
        "kind": "plan",
        "path": shown_url(path),
        "layout": str(mesh),
        "num_ranks": mesh.num_ranks,
        "loads": not problems,
        "missing": missing,
        "unexpected": unexpected,
        "mismatched": mismatched,
        "problems": problems,
        "ranks": [asdict(rank) for rank in ranks],
    }
    if as_json:
        output.print_json(document)
    else:
        lists = {
            "missing": missing,
            "unexpected, left alone": unexpected,
            "other shapes": mismatched,
        }
        _print_names(lists, show_all=show_all)
        _print_ranks(ranks, mesh, show_all=show_all)
        verdict = "it loads" if not problems else f"it does not load: {'; '.join(problems)}"
        output.line(verdict, style="bold")
    if problems:
        ctx.exit(output.EXIT_DIFFERENT)


def plan_ranks(index: Index, mesh: Mesh, resolved: Resolved, limits: ReadLimits) -> list[RankPlan]:
    """The reads and boxes of every rank of a layout; ranks at the same place are planned once."""
    made = {
        index.aliases.get(name, name): info
        for name, info in resolved.targets.items()
        if info is not None and name in resolved.plans
    }
    tensors = TensorTable.of([(name, str(one.dtype), one.shape) for name, one in made.items()])
    index_bytes = index.num_bytes_held
    known: dict[tuple[tuple[str, int], ...], RankPlan] = {}
    plans = []
    for rank in range(mesh.num_ranks):
        place = tuple(item for item in mesh.coordinates(rank).items() if item[0] != "dp")
        if place not in known:
            held = boxes_of_rank(mesh, rank, tensors)
            reads = plan_load(index, _sources_of(index, held, resolved), limits)
            known[place] = _plan_rank(rank, held, reads, index_bytes)
        plans.append(RankPlan(**{**asdict(known[place]), "rank": rank}))
    return plans


def _sources_of(index: Index, boxes: BoxTable, resolved: Resolved) -> BoxTable:
    """The boxes of stored tensors that boxes of what is wanted are made of."""
    names, stored = boxes.tensors.names, index.tensors
    if all(map(resolved.is_whole, names)):
        rows = np.array([index.row(resolved.sources_of(name)[0]) for name in names], np.int64)
        missing = stored.shapes.shape[1] - boxes.offsets.shape[1]
        offsets = np.pad(boxes.offsets, ((0, 0), (0, missing)))
        extents = np.pad(boxes.extents, ((0, 0), (0, missing)), constant_values=1)
        return BoxTable(stored, rows[boxes.tensor], offsets, extents)
    regions = [
        (index.row(region.source), region.source_box)
        for row, tensor in enumerate(boxes.tensor.tolist())
        for region in resolved.regions(names[tensor], boxes.box(row))
    ]
    return BoxTable.of(stored, regions)


def _plan_rank(rank: int, held: BoxTable, reads: LoadPlan, index_bytes: int) -> RankPlan:
    state_bytes = int(held.num_bytes.sum())
    buffers = min(reads.limits.num_reads, max(reads.num_runs, 1)) * reads.longest_run
    peak = state_bytes + buffers + index_bytes
    return RankPlan(rank, len(held), state_bytes, reads.bytes_read, reads.num_runs, peak)


def _print_names(lists: Mapping[str, Sequence[str]], *, show_all: bool) -> None:
    for title, names in lists.items():
        if names:
            output.line(f"{title}: {output.listed(names, show_all=show_all)}", style="yellow")


def _print_ranks(ranks: Sequence[RankPlan], mesh: Mesh, *, show_all: bool) -> None:
    if not ranks:
        return

    def row(rank: RankPlan) -> tuple[str, ...]:
        place = reversed(mesh.coordinates(rank.rank).items())
        return (
            str(rank.rank),
            ",".join(f"{kind}={number}" for kind, number in place),
            str(rank.num_tensors),
            format_bytes(rank.state_bytes),
            format_bytes(rank.bytes_read),
            str(rank.num_reads),
            format_bytes(rank.peak_bytes),
        )

    columns = (">rank", "<place", ">tensors", ">holds", ">reads", ">requests", ">peak memory")
    output.print_table(columns, ranks, row, show_all=show_all)
    total, held = sum(one.bytes_read for one in ranks), sum(one.state_bytes for one in ranks)
    output.line(f"{output.plural(len(ranks), 'rank')} read {format_bytes(total)} in all")
    if total > AMPLIFIED * held:
        output.line(
            f"  {total / held:.1f} times what they hold: reads take whole blocks of digests, and "
            "small gaps between what they need"
        )


# ---------------------------------------------------------------------------------------------
# Layouts, and the boxes that their ranks hold
# ---------------------------------------------------------------------------------------------

KINDS = ("dp", "fsdp", "tp")
_INPUT_CUT = re.compile(
    r"(^|\.)(o_proj|out_proj|down_proj|dense_4h_to_h|linear_proj|linear_fc2|c_proj|wo|w2"
    r"|attention\.dense|attention\.output\.dense|output\.dense|fc2)\.weight(\.|$)"
)


@dataclass(frozen=True, slots=True)
class Mesh:
    """A parallel layout: kinds of its axes and their sizes, the outermost first."""

    axes: tuple[tuple[str, int], ...]

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


def parse_mesh(text: str) -> Mesh:
    """A layout of its text."""
    axes = []
    for part in text.split(","):
        kind, _, size = part.strip().partition("=")
        if kind not in KINDS or not re.fullmatch("[1-9][0-9]{0,8}", size):
            raise StateError(
                f"{text!r} is not a layout: write axes like fsdp=4 or dp=2,tp=2; known are "
                f"{', '.join(KINDS)}"
            )
        axes.append((kind, int(size)))
    if len(dict(axes)) < len(axes):
        raise StateError(f"{text!r}: every axis may stand once")
    return Mesh(tuple(axes))


def boxes_of_rank(mesh: Mesh, rank: int, tensors: TensorTable) -> BoxTable:
    """The boxes that a rank of a layout holds; tensors of which it holds nothing are left out."""
    place = mesh.coordinates(rank)
    offsets = np.zeros_like(tensors.shapes)
    extents = tensors.shapes.copy()
    if mesh.size("tp") > 1:
        dims = np.array(list(_tp_dims(tensors)), dtype=np.int64)
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


def _tp_dims(tensors: TensorTable) -> Iterator[int]:
    """The dim of each tensor that tensor parallelism cuts; -1 for none."""
    for name, ndim in zip(tensors.names, tensors.ndims.tolist(), strict=True):
        if ndim != 2:
            yield -1
        else:
            yield 1 if _INPUT_CUT.search(name) else 0
