"""`remesh plan`: whether a checkpoint loads in a layout, and what each rank reads and holds.

A layout is written as text (`tp=2,fsdp=4`). It is a mesh: axes with sizes, the first one outermost,
as in `init_device_mesh`.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from remesh._repr import format_bytes
from remesh.cli import output, places
from remesh.cli.places import transform_option
from remesh.core.geometry import Box, IntArray
from remesh.core.index import Index
from remesh.core.tables import BoxTable, TensorTable
from remesh.demo import picture
from remesh.demo.picture import Column, PlacedTensor
from remesh.errors import CoverageError, StateError
from remesh.planner import LoadPlan, ReadLimits, plan_load
from remesh.storage import shown_url
from remesh.transform import Resolved, Transform

MAX_DRAWN = 12
"""Tensors that are drawn if no names are given: the largest ones."""

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
        "remesh plan runs/step_00001000 --layout tp=2,fsdp=2 --shard '*.gate.weight=-'",
        "remesh plan downloaded --layout pp=2,ep=4 --transform to_megatron.txt",
        "remesh plan hf_model 'model.layers.0.*' --layout tp=2,fsdp=2 --draw layout.html",
    )
)
@click.argument("path", metavar="CKPT")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option(
    "--layout",
    "layout_text",
    metavar="AXES",
    help="Axes and sizes of the mesh, such as fsdp=4 or dp=2,tp=2.",
)
@click.option(
    "--shard",
    "rules",
    multiple=True,
    metavar="PATTERN=DIM",
    help="The dim of tensors that tp cuts; - for none. May be given several times.",
)
@click.option(
    "--like",
    metavar="OTHER",
    help="A checkpoint with the names and shapes of the job that loads; by default CKPT.",
)
@transform_option("The transformation of the load")
@click.option("--draw", metavar="FILE", help="Draw who holds what, as an HTML page in one file.")
@output.all_option
@places.format_option()
@output.json_option
@click.pass_context
def plan(
    ctx: click.Context,
    *,
    path: str,
    patterns: tuple[str, ...],
    layout_text: str | None,
    rules: tuple[str, ...],
    like: str | None,
    transform: Transform | None,
    draw: str | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Say whether a checkpoint loads in a layout, and what each rank reads and holds.

    Nothing but the index is read: no GPU, no processes, no tensors. Axes are dp (replicate), fsdp
    (cut the first dim), tp (cut matrices; columns where the name is that of a layer whose input is
    cut, such as o_proj), ep (share experts) and pp (share layers). What ranks read is without the
    sharing between replicas, which reads less. The exit code is 0 if it loads, 1 if names are
    missing or shapes differ.

    With --draw, the tensors that PATTERNs choose (by default the 12 largest) are drawn as they are
    stored, each file as one holder, and beside them as the ranks of the layout hold them.
    """
    mesh = parse_mesh(layout_text or "dp=1", rules)
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
    if draw is not None:
        columns = columns_of(stored, _drawn(path, stored, patterns), mesh if layout_text else None)
        _draw(draw, f"Layout of {shown_url(path)}", columns)
    if problems:
        ctx.exit(output.EXIT_DIFFERENT)


def _draw(file: str, title: str, columns: Sequence[Column]) -> None:
    page = picture.page(title, [("", [picture.layout(columns)])])
    with output.writing(file):
        Path(file).write_text(page, encoding="utf-8")
    click.echo(f"written to {output.printable(file)}", err=True)


def _drawn(path: str, index: Index, patterns: Sequence[str]) -> list[str]:
    tensors = index.tensors
    names = [name for name, ndim in zip(tensors.names, tensors.ndims, strict=True) if ndim > 0]
    if not patterns:
        largest = set(sorted(names, key=lambda name: -index[name].num_bytes)[:MAX_DRAWN])
        return [name for name in names if name in largest]
    chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not chosen:
        raise StateError(f"no tensor in {shown_url(path)} matches {' '.join(patterns)}")
    return chosen


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
        if kind not in KINDS or not re.fullmatch("[1-9][0-9]{0,8}", size):
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
    if not found or not pattern or not re.fullmatch("-|[0-9]{1,3}", dim):
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


# ---------------------------------------------------------------------------------------------
# Drawings
# ---------------------------------------------------------------------------------------------


def columns_of(index: Index, names: Sequence[str], mesh: Mesh | None) -> list[Column]:
    """The tensors as they are stored, and as they lie on the ranks of a layout if one is given."""
    numbers = {file.path: number for number, file in enumerate(index.files)}
    stored = {
        name: [(numbers[piece.path], piece.box) for piece in index.pieces(name)] for name in names
    }
    num_files = output.plural(len(index.files), "file")
    columns = [Column("as stored", num_files, _placed(index, stored), "file")]
    if mesh is not None:
        held: dict[str, list[tuple[int, Box]]] = {name: [] for name in names}
        for rank in range(mesh.num_ranks):
            boxes = boxes_of_rank(mesh, rank, index.tensors)
            rows = {boxes.tensors.names[row]: at for at, row in enumerate(boxes.tensor.tolist())}
            for name in names:
                if name in rows:
                    held[name].append((rank, boxes.box(rows[name])))
        num_ranks = output.plural(mesh.num_ranks, "rank")
        columns.append(Column(str(mesh), num_ranks, _placed(index, held)))
    return columns


def _placed(index: Index, held: Mapping[str, Sequence[tuple[int, Box]]]) -> dict[str, PlacedTensor]:
    return {name: PlacedTensor(index[name].shape, tuple(boxes)) for name, boxes in held.items()}
