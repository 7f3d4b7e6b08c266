"""Operators: what statements do to tensors.

An operator is one class, a subclass of `Operator`. Its fields are the attributes that a statement
gives, each declared with the function that reads and checks one; how a statement is parsed and
printed follows from them. The class adds what it makes of tensors, and what turns it around.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

from remesh.transform.expressions import (
    Node,
    concatenated,
    convert,
    permute,
    reshape,
    sliced,
    tied,
)
from remesh.transform.rearrange import Shape, inverse_order
from remesh.transform.syntax import Name, Problem, Span, are_many
from remesh.transform.tensor_info import TensorInfo

CAST_DTYPES = ("float16", "bfloat16", "float32")
_INTEGER_LIST = re.compile(r"\s*[\[(]\s*((?:-?[0-9]{1,18}\s*,\s*)*(?:-?[0-9]{1,18})?)\s*[\])]\s*")

# ---------------------------------------------------------------------------------------------
# Attributes
# ---------------------------------------------------------------------------------------------

AttributeValue = int | str | tuple[int, ...] | bool
Sizes = tuple[int, ...] | Literal["targets"]
"""Extents of parts, or the word that stands for those of the targets that they go to."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """`name=value`, or a flag, whose value is True."""

    name: str
    value: AttributeValue
    span: Span


def attribute(read: Callable[[Attribute], object], default: object = MISSING) -> Any:
    """The field of an operator that an attribute of the same name gives."""
    return field(default=default, metadata={"read": read})


def integer(given: Attribute) -> int:
    """A whole number."""
    if type(given.value) is not int:
        raise Problem(f"{given.name} must be a whole number", given.span)
    return given.value


def positive(given: Attribute) -> int:
    """A whole number from 1."""
    value = integer(given)
    if value < 1:
        raise Problem(f"{given.name} must be at least 1", given.span)
    return value


def integers(given: Attribute) -> tuple[int, ...]:
    """A list of whole numbers, which may be quoted."""
    if isinstance(given.value, tuple):
        return given.value
    match = _INTEGER_LIST.fullmatch(given.value) if isinstance(given.value, str) else None
    if match is None:
        raise Problem(f"{given.name} must be a list such as [1, 0]", given.span)
    return tuple(int(item) for item in match.group(1).split(",") if item.strip())


def extents(given: Attribute) -> tuple[int, ...]:
    """A list of extents of axes."""
    found = integers(given)
    if min(found, default=0) < 0:
        raise Problem(f"{given.name} must be a list whose extents are not negative", given.span)
    return found


def part_sizes(given: Attribute) -> Sizes:
    """A list of extents, or the word `targets`."""
    return "targets" if given.value == "targets" else extents(given)


def cast_dtype(given: Attribute) -> str:
    """The name of an element type that tensors may be converted to."""
    if given.value not in CAST_DTYPES:
        raise Problem(f"{given.name} must be one of {', '.join(CAST_DTYPES)}", given.span)
    return str(given.value)


# ---------------------------------------------------------------------------------------------
# Operands
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operand:
    """A plain name, and the name in a statement that it came from."""

    name: str
    origin: Name


@dataclass(frozen=True, slots=True)
class Operands:
    """The plain names of one execution of a statement."""

    left: tuple[Operand, ...]  # what it reads; none if it adds
    right: tuple[Operand, ...]  # what it assigns; none if it deletes


class Ends(NamedTuple):
    """Where tensors come from and go to, with axes as the operator sees them."""

    source: TensorInfo | None = None  # the source that the only tensor is, if it is one
    targets: tuple[TensorInfo | None, ...] = ()  # the target that each result ends up in


def full_axis(step: Operands, axis: int, ndim: int) -> int:
    """An axis, not counted from the end."""
    if not -ndim <= axis < ndim:
        raise Problem(f"there is no axis {axis}: {step.left[0].name!r} has {ndim}")
    return axis % ndim


def check_alike(step: Operands, nodes: Sequence[Node], axis: int | None) -> None:
    """Refuse tensors that are joined and differ in dtype, or in shape, except along `axis`."""
    first = nodes[0]
    for operand, node in zip(step.left, nodes, strict=True):
        same_shape = len(node.shape) == len(first.shape) and all(
            a == b
            for i, (a, b) in enumerate(zip(node.shape, first.shape, strict=True))
            if i != axis
        )
        if not same_shape:
            raise Problem(
                f"{operand.name!r} has shape {node.shape}, which does not fit "
                f"{step.left[0].name!r} with {first.shape}",
                operand.origin.span,
            )
        if node.dtype is not None and first.dtype is not None and node.dtype != first.dtype:
            raise Problem(
                f"{operand.name!r} is {node.dtype}, {step.left[0].name!r} is {first.dtype}",
                operand.origin.span,
                ["cast one of them in a statement of its own before this"],
            )


# ---------------------------------------------------------------------------------------------
# Operators
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operator:
    """The effect of a statement."""

    leads: ClassVar[tuple[str, ...]] = ()
    """The attributes that give a statement this operator; those that are no fields are flags."""
    title: ClassVar[str] = ""  # how messages call it; empty for the attribute that leads
    reads_many: ClassVar[bool] = False  # whether several names may stand left of the arrow
    makes_many: ClassVar[bool] = False  # whether several names may stand right of it
    passes_on: ClassVar[bool] = False
    """Whether each result holds what each source does, at most with its axes permuted and cast."""

    @classmethod
    def parse(
        cls, left: Sequence[Name], right: Sequence[Name], given: Mapping[str, Attribute]
    ) -> Self:
        """The operator with its attributes, checked."""
        cls.check_names(left, right)
        values = {}
        for own in fields(cls):
            if own.name in given:
                values[own.name] = own.metadata["read"](given[own.name])
            elif own.default is MISSING:
                raise Problem(f"{own.name}= is missing")
        return cls(**values)

    @classmethod
    def check_names(cls, left: Sequence[Name], right: Sequence[Name]) -> None:
        """Refuse more names on a side than the operator takes."""
        if (cls.reads_many or not are_many(left)) and (cls.makes_many or not are_many(right)):
            return
        side = "the right" if cls.reads_many else "the left" if cls.makes_many else "either side"
        raise Problem(f"{cls.title or cls.leads[0]} takes one name on {side}")

    @property
    def needs_ends(self) -> bool:
        """True if the results depend on what `Ends` tells."""
        return False

    def apply(self, step: Operands, nodes: list[Node], ends: Ends) -> list[Node]:
        """The tensors right of the arrow, made of those on the left."""
        raise NotImplementedError

    def opposite(self) -> Operator:
        """The operator of the statement with its sides exchanged: by default the same."""
        return self

    def order(self, ndim: int) -> tuple[int, ...]:
        """The axes of the tensor that is read, in the order of the result's."""
        return tuple(range(ndim))

    def explain(self) -> str:
        """What a macro does, for errors; empty for an operator that says so itself."""
        return ""

    def __str__(self) -> str:
        """The attributes as text, with a comma before each."""
        values = {own.name: getattr(self, own.name) for own in fields(self)}
        flags = [f", {name}" for name in self.leads if name not in values]
        given = [f", {name}={_text(v)}" for name, v in values.items() if v is not None]
        return "".join([*flags, *given])


def _text(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Rename(Operator):
    """`a -> b`: the same tensor under another name. `_ -> z` and `a -> _` have it too."""

    passes_on: ClassVar[bool] = True

    def apply(self, _step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        return nodes


@dataclass(frozen=True, slots=True)
class Concat(Operator):
    """`a, b -> c, axis=1`."""

    leads: ClassVar[tuple[str, ...]] = ("axis",)
    reads_many: ClassVar[bool] = True
    axis: int = attribute(integer)

    def apply(self, step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        axis = full_axis(step, self.axis, len(nodes[0].shape))
        check_alike(step, nodes, axis)
        return [concatenated(nodes, axis)]

    def opposite(self) -> Split:
        return Split(self.axis)


@dataclass(frozen=True, slots=True)
class Split(Operator):
    """`a -> b, c, axis=0`: into equal parts, or into the given sizes."""

    leads: ClassVar[tuple[str, ...]] = ("axis",)
    title: ClassVar[str] = "a split"
    makes_many: ClassVar[bool] = True
    axis: int = attribute(integer)  # the axis that is cut
    sizes: Sizes | None = attribute(part_sizes, None)  # None for equal parts

    def apply(self, step: Operands, nodes: list[Node], ends: Ends) -> list[Node]:
        [node] = nodes
        axis = full_axis(step, self.axis, len(node.shape))
        sizes = self._sizes(step, node.shape, axis, ends)
        starts = itertools.accumulate(sizes, initial=0)
        return [sliced(node, axis, start, size) for start, size in zip(starts, sizes, strict=False)]

    def _sizes(self, step: Operands, shape: Shape, axis: int, ends: Ends) -> Sequence[int]:
        extent, num_parts = shape[axis], len(step.right)
        name = step.left[0].name
        if self.sizes == "targets":
            pairs = zip(step.right, ends.targets, strict=True)
            sizes: Sequence[int] = [_target_extent(*pair, axis) for pair in pairs]
        elif self.sizes is not None:
            sizes = self.sizes
        elif extent % num_parts:
            raise Problem(
                f"axis {axis} of {name!r}: extent {extent} cannot be cut into {num_parts} equal "
                "parts",
                hints=["for unequal parts, write sizes=[...]"],
            )
        else:
            return [extent // num_parts] * num_parts
        if len(sizes) != num_parts:
            raise Problem(f"there are {len(sizes)} sizes for {num_parts} names")
        if sum(sizes) != extent:
            raise Problem(
                f"the sizes {list(sizes)} do not fit axis {axis} of {name}\n"
                f"They add up to {sum(sizes)}, and the axis has extent {extent}"
            )
        return sizes

    def opposite(self) -> Concat:
        return Concat(self.axis)

    @property
    def needs_ends(self) -> bool:
        return self.sizes == "targets"


def _target_extent(operand: Operand, target: TensorInfo | None, axis: int) -> int:
    if target is None or axis >= len(target.shape):
        raise Problem(
            f"{operand.name!r} goes to no target that would tell its size",
            operand.origin.span,
            ["write the numbers instead of targets, or give the targets"],
        )
    return target.shape[axis]


@dataclass(frozen=True, slots=True)
class Stack(Operator):
    """`a, b -> c, stack=0`: along a new axis at this place."""

    leads: ClassVar[tuple[str, ...]] = ("stack",)
    reads_many: ClassVar[bool] = True
    stack: int = attribute(integer)

    def apply(self, step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        check_alike(step, nodes, None)
        shape = nodes[0].shape
        axis = full_axis(step, self.stack, len(shape) + 1)
        slab = (*shape[:axis], 1, *shape[axis:])
        return [concatenated([reshape(node, slab) for node in nodes], axis)]

    def opposite(self) -> Unstack:
        return Unstack(self.stack)


@dataclass(frozen=True, slots=True)
class Unstack(Operator):
    """`c -> a, b, unstack=0`: the axis at this place disappears."""

    leads: ClassVar[tuple[str, ...]] = ("unstack",)
    makes_many: ClassVar[bool] = True
    unstack: int = attribute(integer)

    def apply(self, step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        [node] = nodes
        axis = full_axis(step, self.unstack, len(node.shape))
        num_parts = len(step.right)
        if node.shape[axis] != num_parts:
            raise Problem(
                f"axis {axis} of {step.left[0].name!r} has extent {node.shape[axis]}, but there "
                f"are {num_parts} names"
            )
        shape = (*node.shape[:axis], *node.shape[axis + 1 :])
        return [reshape(sliced(node, axis, index, 1), shape) for index in range(num_parts)]

    def opposite(self) -> Stack:
        return Stack(self.unstack)


@dataclass(frozen=True, slots=True)
class Permute(Operator):
    """`a -> b, permute=[2, 0, 1]`: axis i of b is axis permute[i] of a; empty reverses all axes."""

    leads: ClassVar[tuple[str, ...]] = ("permute",)
    passes_on: ClassVar[bool] = True
    permute: tuple[int, ...] = attribute(integers)

    def apply(self, _step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        [node] = nodes
        return [permute(node, self.order(len(node.shape)))]

    def opposite(self) -> Permute:
        ndim = len(self.permute)
        return Permute(inverse_order([axis % ndim for axis in self.permute]))

    def order(self, ndim: int) -> tuple[int, ...]:
        # None of the axes is counted from the end.
        if not self.permute:
            return tuple(reversed(range(ndim)))
        order = tuple(axis + ndim if axis < 0 else axis for axis in self.permute)
        if sorted(order) != list(range(ndim)):
            raise Problem(f"{list(self.permute)} is no order of the {ndim} axes of the tensor")
        return order


@dataclass(frozen=True, slots=True)
class Reshape(Operator):
    """`a -> b, reshape=[8, 128, 4096]`, or back to two axes if `a` has that shape."""

    leads: ClassVar[tuple[str, ...]] = ("reshape",)
    reshape: Shape = attribute(extents)

    def apply(self, step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        [node] = nodes
        shape = self.reshape
        if node.shape == shape and len(shape) >= 3:
            shape = (shape[0] * shape[1], math.prod(shape[2:]))
        if math.prod(shape) != math.prod(node.shape):
            raise Problem(
                f"{step.left[0].name!r} has shape {node.shape}, which has not as many elements as "
                f"{shape}"
            )
        return [reshape(node, shape)]

    def opposite(self) -> Reshape:
        # With three axes or more, it means both directions.
        if len(self.reshape) < 3:
            raise Problem("a reshape to fewer than three axes does not say what to go back to")
        return self


@dataclass(frozen=True, slots=True)
class Cast(Operator):
    """`a -> b, dtype=float32`."""

    leads: ClassVar[tuple[str, ...]] = ("dtype",)
    title: ClassVar[str] = "a cast"
    passes_on: ClassVar[bool] = True
    dtype: str = attribute(cast_dtype)

    def apply(self, step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        return [_cast(step, nodes[0], self.dtype)]

    def opposite(self) -> Cast:
        raise Problem(
            "a cast with dtype= does not say what to go back to",
            hints=["write src_dtype= and dst_dtype= instead"],
        )


@dataclass(frozen=True, slots=True)
class StatedCast(Operator):
    """`a -> b, src_dtype=float16, dst_dtype=float32`, which can be turned around."""

    leads: ClassVar[tuple[str, ...]] = ("src_dtype", "dst_dtype")
    title: ClassVar[str] = "a cast"
    passes_on: ClassVar[bool] = True
    src_dtype: str = attribute(cast_dtype)
    dst_dtype: str = attribute(cast_dtype)

    def apply(self, step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        found = nodes[0].dtype
        if found is not None and found != self.src_dtype:
            raise Problem(f"{step.left[0].name!r} is {found}, not {self.src_dtype}")
        return [_cast(step, nodes[0], self.dst_dtype)]

    def opposite(self) -> StatedCast:
        return StatedCast(self.dst_dtype, self.src_dtype)


def _cast(step: Operands, node: Node, dtype: str) -> Node:
    if node.dtype is not None and "float" not in node.dtype:
        raise Problem(f"{step.left[0].name!r} is {node.dtype}; only floats can be cast")
    return convert(node, dtype)


@dataclass(frozen=True, slots=True)
class Tie(Operator):
    """`a, b -> c, tie`: a and b hold the same values, which is checked, and c is either."""

    leads: ClassVar[tuple[str, ...]] = ("tie",)
    reads_many: ClassVar[bool] = True
    passes_on: ClassVar[bool] = True

    def apply(self, step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        check_alike(step, nodes, None)
        return [tied(nodes)]

    def opposite(self) -> Untie:
        return Untie()


@dataclass(frozen=True, slots=True)
class Untie(Operator):
    """`a -> b, c, untie`: b and c are copies."""

    leads: ClassVar[tuple[str, ...]] = ("untie",)
    makes_many: ClassVar[bool] = True
    passes_on: ClassVar[bool] = True

    def apply(self, step: Operands, nodes: list[Node], _ends: Ends) -> list[Node]:
        return nodes * len(step.right)

    def opposite(self) -> Tie:
        return Tie()


# ---------------------------------------------------------------------------------------------
# Fused projections: several tensors in one, interleaved block by block along an axis
#
# Both kinds of fused tensors are one scheme. Components (query, key, value; or gate, up) are
# counted in heads, and the fused axis holds a number of equal blocks, each with its share of the
# heads of every component, in order. For grouped-query attention a block is one key-value head
# with its query heads; for tensor parallelism it is one rank. One block means one component after
# the other.
# ---------------------------------------------------------------------------------------------

MAX_BLOCKS = 65536


class _Fused(Operator):
    """Base of both kinds; the direction follows from the numbers of names."""

    __slots__ = ()
    num_components: ClassVar[int]
    may_reorder: ClassVar[bool] = False  # whether a fused tensor may become another one
    axis: int  # the fused axis

    @classmethod
    def check_names(cls, left: Sequence[Name], right: Sequence[Name]) -> None:
        counts = len(left), len(right)
        allowed = [(cls.num_components, 1), (1, cls.num_components)]
        allowed += [(1, 1)] if cls.may_reorder else []
        if counts not in allowed or any(are_many([name]) for name in (*left, *right)):
            forms = " or ".join(f"{a} -> {b}" for a, b in allowed)
            raise Problem(
                f"{cls.leads[0]} takes {forms} names, each written out, not "
                f"{counts[0]} -> {counts[1]}"
            )

    def heads(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Heads of each component, given the extents of the tensors along the fused axis."""
        raise NotImplementedError

    def blocks(self, step: Operands, axis: int, ends: Ends) -> tuple[int, int]:
        """The numbers of blocks of a fused source and of a fused target."""
        raise NotImplementedError

    def apply(self, step: Operands, nodes: list[Node], ends: Ends) -> list[Node]:
        axis = full_axis(step, self.axis, len(nodes[0].shape))
        check_alike(step, nodes, axis)
        heads = self.heads([node.shape[axis] for node in nodes])
        source_blocks, target_blocks = self.blocks(step, axis, ends)
        if len(nodes) == 1:
            nodes = _separated(nodes[0], axis, heads, source_blocks)
        else:
            _check_heads([node.shape[axis] for node in nodes], heads)
        if len(step.right) == 1:
            nodes = [_interleaved(nodes, axis, heads, target_blocks)]
        return nodes


class _ByRank(_Fused):
    """One block for each tensor-parallel rank, as stated, else as the tensors are cut."""

    __slots__ = ()
    may_reorder: ClassVar[bool] = True
    src_parts: int | None
    dst_parts: int | None

    @property
    def needs_ends(self) -> bool:
        return True

    def opposite(self) -> Operator:
        swapped = {"src_parts": self.dst_parts, "dst_parts": self.src_parts}
        return replace(self, **swapped)

    def blocks(self, step: Operands, axis: int, ends: Ends) -> tuple[int, int]:
        is_stated = self.src_parts is not None or len(step.left) > 1
        if ends.source is None and not is_stated:
            raise Problem(
                f"{step.left[0].name!r} is put together from other tensors, so its tensor-parallel "
                "degree is not known",
                hints=["state it with src_parts="],
            )
        return (
            self.src_parts or _num_ranges(ends.source, axis),
            self.dst_parts or _num_ranges(ends.targets[0], axis),
        )


def _num_ranges(info: TensorInfo | None, axis: int) -> int:
    cuts = None if info is None else info.num_pieces
    return 1 if cuts is None or axis >= len(cuts) else cuts[axis]


@dataclass(frozen=True, slots=True)
class FusedQkv(_Fused):
    """Attention projections, a block for each key-value head: its query heads, key and value."""

    leads: ClassVar[tuple[str, ...]] = ("fused_qkv",)
    num_components: ClassVar[int] = 3
    num_heads: int = attribute(positive)
    num_key_value_groups: int = attribute(positive)
    axis: int = attribute(integer, 1)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_value_groups:
            raise Problem(
                f"num_heads={self.num_heads} is no multiple of "
                f"num_key_value_groups={self.num_key_value_groups}\n"
                "That is the number of key-value heads"
            )

    def heads(self, _extents: Sequence[int]) -> tuple[int, ...]:
        return self.num_heads, self.num_key_value_groups, self.num_key_value_groups

    def blocks(self, _step: Operands, _axis: int, _ends: Ends) -> tuple[int, int]:
        return self.num_key_value_groups, self.num_key_value_groups

    def explain(self) -> str:
        return (
            f"along axis {self.axis}, {self.num_key_value_groups} blocks of "
            f"{self.num_heads // self.num_key_value_groups} query heads, 1 key head and 1 value "
            "head"
        )


@dataclass(frozen=True, slots=True)
class FusedQkvByRank(_ByRank, FusedQkv):
    """Attention projections, a block for each rank: its query, key and value heads."""

    leads: ClassVar[tuple[str, ...]] = ("fused_qkv_old",)
    src_parts: int | None = attribute(positive, None)
    dst_parts: int | None = attribute(positive, None)

    def explain(self) -> str:
        return (
            f"along axis {self.axis}, for each tensor-parallel rank its query, key and value heads"
        )


@dataclass(frozen=True, slots=True)
class FusedFfn(_ByRank):
    """Gate and up projections, one block of both for each tensor-parallel rank."""

    leads: ClassVar[tuple[str, ...]] = ("fused_ffn",)
    num_components: ClassVar[int] = 2
    axis: int = attribute(integer, 1)
    src_parts: int | None = attribute(positive, None)
    dst_parts: int | None = attribute(positive, None)

    def heads(self, extents: Sequence[int]) -> tuple[int, ...]:
        # Every row counts as a head.
        extent = extents[0]
        if len(extents) == 1 and extent % 2:
            raise Problem(f"extent {extent} is not even, so it does not hold gate and up")
        rows = max(extent // 2 if len(extents) == 1 else extent, 1)
        return rows, rows

    def explain(self) -> str:
        return f"along axis {self.axis}, for each tensor-parallel rank its rows of gate and of up"


def _check_blocks(heads: Sequence[int], blocks: int) -> None:
    if blocks > MAX_BLOCKS:
        raise Problem(f"{blocks} blocks are more than {MAX_BLOCKS}")
    for count in heads:
        if count % blocks:
            raise Problem(f"{count} heads or rows cannot be divided into {blocks} blocks")


def _check_heads(extents: Sequence[int], heads: Sequence[int]) -> None:
    """Every component must have the same number of rows per head."""
    for extent, count in zip(extents, heads, strict=True):
        if extent % count:
            raise Problem(f"extent {extent} is no multiple of {count} heads")
    rows = [extent // count for extent, count in zip(extents, heads, strict=True)]
    if len(set(rows)) > 1:
        raise Problem(
            f"extents {list(extents)} of {list(heads)} heads mean {rows} rows per head, which "
            "should be equal"
        )


def _separated(node: Node, axis: int, heads: Sequence[int], blocks: int) -> list[Node]:
    """The components of a fused tensor."""
    extent = node.shape[axis]
    if extent % sum(heads):
        raise Problem(f"extent {extent} is no multiple of {sum(heads)} heads")
    _check_blocks(heads, blocks)
    rows = extent // sum(heads)
    widths = [count * rows // blocks for count in heads]
    components: list[Node] = []
    offset = 0
    for width in widths:
        parts = [sliced(node, axis, block * sum(widths) + offset, width) for block in range(blocks)]
        components.append(concatenated(parts, axis))
        offset += width
    return components


def _interleaved(components: Sequence[Node], axis: int, heads: Sequence[int], blocks: int) -> Node:
    """A fused tensor of components."""
    _check_blocks(heads, blocks)
    parts = []
    for block in range(blocks):
        for component in components:
            width = component.shape[axis] // blocks
            parts.append(sliced(component, axis, block * width, width))
    return concatenated(parts, axis)


OPERATORS: tuple[type[Operator], ...] = (
    *(Rename, Concat, Split, Stack, Unstack, Permute, Reshape, Cast, StatedCast, Tie, Untie),
    *(FusedQkv, FusedQkvByRank, FusedFfn),
)
"""What a statement can have."""
