"""`remesh diff`: names, types, shapes and values of two checkpoints compared, of any formats.

Values are compared in chunks, so memory is bounded, and small tensors are read many at a time. Of
each tensor the largest difference and the number of elements that differ are found; two NaN at the
same place are equal. With a transformation, what it makes of the first checkpoint is compared with
the second; casts that it asks for are left out, so a tolerance should be given.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.cli.places import transform_option
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.index import Index
from remesh.core.values import encode_read, unread
from remesh.events import progress
from remesh.formats import native
from remesh.storage import shown_url
from remesh.transform import Region, Resolved, Transform, arranged, infos_of

_Array = summary.Array

_Part = tuple[Box, tuple[str, Box], Region | None]
"""A box of the second checkpoint, the box of a tensor of the first, and how it is rearranged."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The difference of one tensor."""

    name: str  # its name, in the second checkpoint if the first is transformed
    dtypes: tuple[str, str]  # its element types in both
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # its shapes in both
    num_different: int | None = None
    """Elements that differ by more than the tolerance; None if the shapes differ, or values were
    not compared."""
    max_difference: float | None = None
    """The largest absolute difference of finite elements, likewise."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of two checkpoints."""

    only_first: tuple[str, ...]
    """Names of tensors that only the first has; with a transformation, those that nothing in the
    second is made of."""
    only_second: tuple[str, ...]  # names of tensors that only the second has
    tensors: tuple[TensorDifference, ...]  # the tensors that differ
    num_equal: int  # tensors that do not
    only_first_values: tuple[str, ...]  # names of plain values and objects that only the first has
    only_second_values: tuple[str, ...]  # those that only the second has
    values: Mapping[str, tuple[str, str]]
    """Name → text of both values, of values that differ or cannot be read."""

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        lists = (self.only_first, self.only_second, self.tensors, self.only_first_values)
        return not any(map(bool, (*lists, self.only_second_values, self.values)))


_Tolerance = tuple[float, float]
"""Elements are equal if they differ by `absolute + relative * abs(second)` at most: both."""


def compare(
    first: Checkpoint,
    second: Checkpoint,
    *,
    transform: Transform | None,
    tolerance: _Tolerance | None,
    on_read: Callable[[int], None],
) -> Comparison:
    """Compare two checkpoints, of any formats; without a tolerance no values of tensors."""
    resolved = None
    if transform is not None:
        known, wanted = (
            {**infos_of(one.index), **dict.fromkeys([*one.values, *one.lists, *one.objects])}
            for one in (first, second)
        )
        resolved = transform.resolve(known, wanted, aliases=first.index.aliases)
    only_first, only_second, both = _names_of(first.index, second.index, resolved)
    as_is = {n for n in both if resolved is None or n in resolved.untouched}
    pairs = [n for n in both if n not in as_is or first.index[n].shape == second.index[n].shape]
    compared: Mapping[str, tuple[int, float]] = {}
    if tolerance is not None:
        compared = _compare_values(first, second, pairs, resolved, tolerance, on_read)
    differences, num_equal = [], 0
    for name in both:
        right = second.index[name]
        left = first.index[name] if name in as_is else right
        count, largest = compared.get(name, (None, None))
        if count or (left.dtype, left.shape) != (right.dtype, right.shape):
            dtypes, shapes = (left.dtype, right.dtype), (left.shape, right.shape)
            differences.append(TensorDifference(name, dtypes, shapes, count, largest))
        else:
            num_equal += 1
    values = _compare_plain(first, second) if resolved is None else ((), (), {})
    return Comparison(only_first, only_second, tuple(differences), num_equal, *values)


def _names_of(
    first: Index, second: Index, resolved: Resolved | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names that only the first has, that only the second has, and that both have."""
    if resolved is None:
        both = tuple(name for name in second if name in first)
        return tuple(sorted({*first} - {*second})), tuple(sorted({*second} - {*first})), both
    untouched = {name for name in resolved.untouched if name in first}
    made = tuple(name for name in second if name in untouched or resolved.sources_of(name))
    unused = tuple(name for name in resolved.unused if name in first)
    return unused, tuple(sorted({*second} - {*made})), made


def _compare_values(
    first: Checkpoint,
    second: Checkpoint,
    names: Sequence[str],
    resolved: Resolved | None,
    tolerance: _Tolerance,
    on_read: Callable[[int], None],
) -> dict[str, tuple[int, float]]:
    """The elements of each tensor that differ, and the largest difference of finite ones."""
    found = dict.fromkeys(names, (0, 0.0))
    whole = ((name, Box.whole(second.index[name].shape)) for name in names)
    for batch in summary.batches_of(second.index, whole):
        parts = [_parts(name, chunk, resolved) for name, chunk in batch]
        sources = [source for own in parts for _, source, _ in own]
        blocks = iter(_numbers(first, sources))
        for (name, chunk), own, right in zip(batch, parts, _numbers(second, batch), strict=True):
            made = [(box, _made(next(blocks), region)) for box, _, region in own]
            left = np.empty(right.shape, np.result_type(*(block.dtype for _, block in made)))
            for box, block in made:
                place: tuple[Any, ...] = (*box.relative_to(chunk).slices, ...)
                left[place] = block
            count, distance = _difference(left, right, tolerance)
            found[name] = (found[name][0] + count, max(found[name][1], distance))
            on_read(chunk.size * BY_NAME[second.index[name].dtype].itemsize)
    return found


def _parts(name: str, chunk: Box, resolved: Resolved | None) -> list[_Part]:
    """The parts of the first checkpoint in a box of the second."""
    if resolved is None or name in resolved.untouched:
        return [(chunk, (name, chunk), None)]
    regions = resolved.regions(name, chunk)
    return [(region.target_box, (region.source, region.source_box), region) for region in regions]


def _made(block: _Array, region: Region | None) -> _Array:
    return block if region is None else arranged(block, region)


def _numbers(checkpoint: Checkpoint, boxes: Sequence[tuple[str, Box]]) -> list[_Array]:
    arrays = checkpoint.read_arrays(boxes) if boxes else []
    return [
        summary.true_values(carried.reshape(-1), checkpoint.index[name].dtype).reshape(box.shape)
        for (name, box), carried in zip(boxes, arrays, strict=True)
    ]


def _difference(left: _Array, right: _Array, tolerance: _Tolerance) -> tuple[int, float]:
    if left.dtype.kind not in "fc" and right.dtype.kind not in "fc":
        unequal = left != right
        if not unequal.any():
            return 0, 0.0
        left, right = left[unequal], right[unequal]
        # Exact, which 64 bits as floating point are not: unsigned numbers wrap around.
        a, b = left.astype(np.uint64), right.astype(np.uint64)
        distance = np.where(left > right, a - b, b - a).astype(np.float64)
        limit = tolerance[0] + tolerance[1] * np.abs(right.astype(np.float64))
        return int((~(distance <= limit)).sum()), float(distance.max())
    wide = np.complex128 if "c" in (left.dtype.kind, right.dtype.kind) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = left.astype(wide), right.astype(wide)  # a signalling NaN is invalid
        distance = np.abs(a - b)
        limit = tolerance[0] + tolerance[1] * np.abs(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    is_different = ~(same | (finite & (distance <= limit)))
    return int(is_different.sum()), float(distance[finite].max(initial=0.0))


def _compare_plain(
    first: Checkpoint, second: Checkpoint
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[str, str]]]:
    """Names of values that only one has, and the values that differ, as text.

    What could not be read is not known to be equal, so it differs.
    """
    left = {**first.values, **first.lists, **first.objects}
    right = {**second.values, **second.lists, **second.objects}
    # As they are encoded: the text of an array is rounded, and has not all of its elements.
    differ = [
        name
        for name in left
        if name in right
        and (
            any(unread(left[name]))
            or encode_read(left[name], name) != encode_read(right[name], name)
        )
    ]
    text = output.format_value
    return (
        tuple(sorted(left.keys() - right.keys())),
        tuple(sorted(right.keys() - left.keys())),
        {name: (text(left[name]), text(right[name])) for name in differ},
    )


@click.command(
    epilog=output.example(
        "remesh diff runs/step_00001000 runs/step_00002000",
        "remesh diff runs/step_00001000 exported --transform names.aoa --atol 1e-6",
    )
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@transform_option("What A becomes before it is compared")
@click.option("--structure", is_flag=True, help="Compare names, types and shapes alone.")
@click.option("--rtol", type=output.Number(min=0), default=0.0, help="Relative tolerance.")
@click.option("--atol", type=output.Number(min=0), default=0.0, help="Absolute tolerance.")
@output.all_option
@places.format_option()
@output.json_option
@click.pass_context
def diff(
    ctx: click.Context,
    *,
    first: str,
    second: str,
    transform: Transform | None,
    structure: bool,
    rtol: float,
    atol: float,
    show_all: bool,
    as_json: bool,
) -> None:
    """Show what differs between two checkpoints, of any formats.

    Names, types and shapes of tensors, their values, and plain values. Elements are equal if they
    differ by atol + rtol * abs(B) at most; two NaN are equal. Tensors are read in chunks. With a
    transformation plain values are not compared. The exit code is 0 if nothing differs, 1 if
    something does, 2 if one of them cannot be read.
    """
    tolerance = None if structure else (atol, rtol)

    def run() -> Comparison:
        one, other = (Checkpoint(at, format=places.format_of(at)) for at in (first, second))
        num_bytes = 0 if structure else other.index.num_bytes
        with progress(f"comparing {shown_url(second)}", num_bytes) as on_read:
            return compare(one, other, transform=transform, tolerance=tolerance, on_read=on_read)

    comparison = native.retry_if_replaced(run)
    if as_json:
        document = {
            "kind": "difference",
            "first": shown_url(first),
            "second": shown_url(second),
            "equal": comparison.is_equal,
            **asdict(comparison),
        }
        output.print_json(document)
    else:
        _print_comparison(comparison, show_all=show_all)
    if not comparison.is_equal:
        ctx.exit(output.EXIT_DIFFERENT)


def _print_comparison(found: Comparison, *, show_all: bool) -> None:
    def names(title: str, listed: Sequence[str]) -> None:
        if listed:
            output.line(f"{title}: {len(listed)}", style="bold")
            output.print_list(listed, show_all=show_all)

    names("tensors only in A", found.only_first)
    names("tensors only in B", found.only_second)
    if renames := prefixes_of(found.only_first, found.only_second):
        option = shlex.quote(json.dumps(dict([renames])))
        output.line(f"  a prefix differs; compare with --transform {option}", style="yellow")
    if found.tensors:
        output.line(f"tensors that differ: {len(found.tensors)}", style="bold")
        columns = ("<dtype", "<shape", ">elements", ">largest", "<name")
        output.print_table(columns, found.tensors, _row, indent="  ", show_all=show_all)
    names("values only in A", found.only_first_values)
    names("values only in B", found.only_second_values)
    texts = [f"{name}: {output.cut(a)} | {output.cut(b)}" for name, (a, b) in found.values.items()]
    names("values that differ", texts)
    equal = output.plural(found.num_equal, "tensor")
    output.line(f"equal: {equal}" + ("" if not found.is_equal else "; nothing differs"))


def prefixes_of(first: Sequence[str], second: Sequence[str]) -> tuple[str, str] | None:
    """The prefixes in which all names of one side differ from names of the other, if they do."""
    fewer, more = sorted((first, second), key=len)
    names = set(more)
    for other in more if fewer else ():
        ends = zip(reversed(fewer[0].split(".")), reversed(other.split(".")), strict=False)
        common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], ends)))
        if common:
            rest = ".".join(fewer[0].split(".")[-common:])
            old, new = fewer[0].removesuffix(rest), other.removesuffix(rest)
            if all(one.startswith(old) and new + one.removeprefix(old) in names for one in fewer):
                return (old, new) if fewer is first else (new, old)
    return None


def _row(one: TensorDifference) -> tuple[str, ...]:
    def both(left: str, right: str) -> str:
        return left if left == right else f"{left} | {right}"

    count = "-" if one.num_different is None else str(one.num_different)
    largest = "-" if one.max_difference is None else f"{one.max_difference:.3g}"
    shapes = both(*(output.format_shape(shape) for shape in one.shapes))
    return both(*one.dtypes), shapes, count, largest, one.name
