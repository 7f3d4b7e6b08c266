"""The operators, one class each, and the table that the parser looks them up in.

A new operator is a class here (or in a module of its own, as the fused projections have) and a row
in `OPERATORS`. docs/transform.md specifies what each one means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from remesh.transform.expressions import (
    EXACT_CASTS,
    concatenated,
    convert,
    permute,
    reshape,
    sliced,
    tied,
)
from remesh.transform.fused import FusedFfn, FusedQkv
from remesh.transform.messages import nearest
from remesh.transform.operator_base import (
    Attribute,
    Attributes,
    Operator,
    Problem,
    Value,
    check_alike,
    common_labels,
    full_axis,
)
from remesh.transform.rearrange import Shape, inverse_order
from remesh.transform.syntax import FLAGS, Name, Span

if TYPE_CHECKING:
    from remesh.transform.expand import Step
    from remesh.transform.layout import Layout


@dataclass(frozen=True, slots=True)
class Rename(Operator):
    """`a -> b`: the same tensor under another name. `_ -> z` and `a -> _` have it too."""

    def apply(self, _step: Step, values: list[Value], _layout: Layout) -> list[Value]:
        return values

    def opposite(self) -> Rename:
        return self


@dataclass(frozen=True, slots=True)
class Concat(Operator):
    """`a, b -> c, axis=1`."""

    axis: int

    @classmethod
    def parse(cls, given: Attributes) -> Operator:
        """Concatenation, split, or, with one name on either side, a rename."""
        axis = given.integer("axis")
        given.check_one_side_is_single()
        if given.right_is_many:
            return Split.parse(given)
        for name in ("sizes", "parts"):
            if name in given.by_name:
                raise Problem(
                    f"{name} belongs to a split: one name on the left, several on the right",
                    given.span(name),
                )
        return cls(axis) if given.left_is_many else Rename()

    def attributes(self) -> list[tuple[str, object]]:
        return [("axis", self.axis)]

    def apply(self, step: Step, values: list[Value], _layout: Layout) -> list[Value]:
        axis = full_axis(step, self.axis, len(values[0].node.shape))
        check_alike(step, values, axis)
        if len(values) == 1:
            return values
        node = concatenated([value.node for value in values], axis)
        return [Value(node, common_labels(step, values, axis))]

    def opposite(self) -> Split:
        return Split(self.axis)

    def undo(self) -> Split:
        return Split(self.axis, from_targets=True)


@dataclass(frozen=True, slots=True)
class Split(Operator):
    """`a -> b, c, axis=0`: into equal parts, or into the given sizes."""

    axis: int  # the axis that is cut
    sizes: tuple[int, ...] | None = None  # extents of the parts; None if they are equal
    from_targets: bool = False  # whether the extents are those of the targets that the parts go to
    parts: int | None = None  # how many parts a `*` on the right stands for

    @classmethod
    def parse(cls, given: Attributes) -> Split:
        """See `Operator.parse`; `Concat` shares the attribute and comes here."""
        axis, parts = given.integer("axis"), given.optional_positive("parts")
        if "sizes" not in given.by_name:
            return cls(axis, parts=parts)
        sizes = given.integers_or_targets("sizes")
        if sizes is not None and (not sizes or min(sizes) < 0):
            raise Problem("sizes must be one extent for each name", given.span("sizes"))
        return cls(axis, sizes, sizes is None, parts)

    def attributes(self) -> list[tuple[str, object]]:
        sizes = "targets" if self.from_targets else self.sizes
        return [("axis", self.axis), ("sizes", sizes), ("parts", self.parts)]

    def apply(self, step: Step, values: list[Value], layout: Layout) -> list[Value]:
        node = values[0].node
        axis = full_axis(step, self.axis, len(node.shape))
        sizes = self._sizes(step, node.shape, axis, layout)
        if len(sizes) == 1:
            return values
        labels = common_labels(step, values, axis)
        parts, start = [], 0
        for size in sizes:
            parts.append(Value(sliced(node, axis, start, size), labels))
            start += size
        return parts

    def _sizes(self, step: Step, shape: Shape, axis: int, layout: Layout) -> Sequence[int]:
        extent, num_parts = shape[axis], len(step.right)
        name = step.left[0].name
        _check_num_parts(step, self.parts)
        if self.from_targets:
            sizes: Sequence[int] = [layout.result_shape(step, o)[axis] for o in step.right]
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
    def needs_targets(self) -> bool:
        return self.from_targets

    @property
    def num_parts(self) -> int:
        return self.parts or len(self.sizes or ())


def _check_num_parts(step: Step, num_parts: int | None) -> None:
    if num_parts is not None and num_parts != len(step.right):
        raise Problem(f"parts={num_parts}, but there are {len(step.right)} names")


@dataclass(frozen=True, slots=True)
class Stack(Operator):
    """`a, b -> c, stack=0`: along a new axis at this place."""

    keeps_shape: ClassVar[bool] = False
    axis: int

    @classmethod
    def parse(cls, given: Attributes) -> Stack:
        if given.right_is_many:
            raise Problem("stack takes one name on the right")
        return cls(given.integer("stack"))

    def attributes(self) -> list[tuple[str, object]]:
        return [("stack", self.axis)]

    def apply(self, step: Step, values: list[Value], _layout: Layout) -> list[Value]:
        check_alike(step, values, None)
        shape = values[0].node.shape
        axis = full_axis(step, self.axis, len(shape) + 1)
        slab = (*shape[:axis], 1, *shape[axis:])
        node = concatenated([reshape(value.node, slab) for value in values], axis)
        labels = common_labels(step, values, None)
        return [Value(node, (*labels[:axis], None, *labels[axis:]))]

    def opposite(self) -> Unstack:
        return Unstack(self.axis)


@dataclass(frozen=True, slots=True)
class Unstack(Operator):
    """`c -> a, b, unstack=0`: the axis at this place disappears."""

    keeps_shape: ClassVar[bool] = False
    axis: int
    parts: int | None = None  # how many parts a `*` on the right stands for

    @classmethod
    def parse(cls, given: Attributes) -> Unstack:
        if given.left_is_many:
            raise Problem("unstack takes one name on the left")
        return cls(given.integer("unstack"), given.optional_positive("parts"))

    def attributes(self) -> list[tuple[str, object]]:
        return [("unstack", self.axis), ("parts", self.parts)]

    def apply(self, step: Step, values: list[Value], _layout: Layout) -> list[Value]:
        node, labels = values[0].node, values[0].axes
        axis = full_axis(step, self.axis, len(node.shape))
        _check_num_parts(step, self.parts)
        num_parts = len(step.right)
        if node.shape[axis] != num_parts:
            raise Problem(
                f"axis {axis} of {step.left[0].name!r} has extent {node.shape[axis]}, but there "
                f"are {num_parts} names"
            )
        shape = (*node.shape[:axis], *node.shape[axis + 1 :])
        kept = (*labels[:axis], *labels[axis + 1 :])
        return [
            Value(reshape(sliced(node, axis, index, 1), shape), kept) for index in range(num_parts)
        ]

    def opposite(self) -> Stack:
        return Stack(self.axis)

    @property
    def num_parts(self) -> int:
        return self.parts or 0


@dataclass(frozen=True, slots=True)
class Permute(Operator):
    """`a -> b, permute=[2, 0, 1]`: axis i of b is axis axes[i] of a; empty reverses all axes."""

    axes: tuple[int, ...]

    @classmethod
    def parse(cls, given: Attributes) -> Permute:
        given.check_one_to_one("permute")
        return cls(given.integers("permute"))

    def attributes(self) -> list[tuple[str, object]]:
        return [("permute", self.axes)]

    def apply(self, _step: Step, values: list[Value], _layout: Layout) -> list[Value]:
        node, labels = values[0].node, values[0].axes
        order = self.order(len(node.shape))
        return [Value(permute(node, order), tuple(labels[axis] for axis in order))]

    def opposite(self) -> Permute:
        ndim = len(self.axes)
        return Permute(inverse_order([axis % ndim for axis in self.axes]))

    def order(self, ndim: int) -> tuple[int, ...]:
        """See `Operator.order`; none of the axes is counted from the end."""
        if not self.axes:
            return tuple(reversed(range(ndim)))
        order = tuple(axis + ndim if axis < 0 else axis for axis in self.axes)
        if sorted(order) != list(range(ndim)):
            raise Problem(f"{list(self.axes)} is no order of the {ndim} axes of the tensor")
        return order


@dataclass(frozen=True, slots=True)
class Reshape(Operator):
    """`a -> b, reshape=[8, 128, 4096]`, or back to two axes if `a` has that shape.

    The shape is None for `reshape=targets`: that of the target which the result goes to.
    """

    keeps_shape: ClassVar[bool] = False
    shape: tuple[int, ...] | None

    @classmethod
    def parse(cls, given: Attributes) -> Reshape:
        given.check_one_to_one("reshape")
        shape = given.integers_or_targets("reshape")
        if min(shape or (), default=0) < 0:
            raise Problem("extents are not negative", given.span("reshape"))
        return cls(shape)

    def attributes(self) -> list[tuple[str, object]]:
        return [("reshape", "targets" if self.shape is None else self.shape)]

    def apply(self, step: Step, values: list[Value], layout: Layout) -> list[Value]:
        node, shape = values[0].node, self.shape
        if shape is None:
            shape = layout.result_shape(step, step.right[0])
        elif node.shape == shape and len(shape) >= 3:
            shape = (shape[0] * shape[1], math.prod(shape[2:]))
        if math.prod(shape) != math.prod(node.shape):
            raise Problem(
                f"{step.left[0].name!r} has shape {node.shape}, which has not as many elements as "
                f"{shape}"
            )
        return [Value(reshape(node, shape), (None,) * len(shape))]

    def opposite(self) -> Reshape:
        """See `Operator.opposite`: with three axes or more, it means both directions."""
        if self.shape is None or len(self.shape) < 3:
            raise Problem(
                "a reshape to fewer than three axes does not say what to go back to",
            )
        return self

    def undo(self) -> Reshape:
        return Reshape(None)

    @property
    def needs_targets(self) -> bool:
        return self.shape is None


@dataclass(frozen=True, slots=True)
class Cast(Operator):
    """`a -> b, dtype=float32`, or with the source's dtype stated so that it can be undone."""

    dtype: str
    source_dtype: str | None = None

    @classmethod
    def parse(cls, given: Attributes) -> Cast:
        given.check_one_to_one("a cast")
        if "dtype" in given.by_name:
            return cls(given.dtype("dtype"))
        return cls(given.dtype("dst_dtype"), given.dtype("src_dtype"))

    def attributes(self) -> list[tuple[str, object]]:
        name = "dtype" if self.source_dtype is None else "dst_dtype"
        return [("src_dtype", self.source_dtype), (name, self.dtype)]

    def apply(self, step: Step, values: list[Value], _layout: Layout) -> list[Value]:
        node, name = values[0].node, step.left[0].name
        if node.dtype is not None:
            if self.source_dtype is not None and node.dtype != self.source_dtype:
                raise Problem(f"{name!r} is {node.dtype}, not {self.source_dtype}")
            if "float" not in node.dtype:
                raise Problem(f"{name!r} is {node.dtype}; only floats can be cast")
        return [Value(convert(node, self.dtype), values[0].axes)]

    def opposite(self) -> Cast:
        if self.source_dtype is None:
            raise Problem(
                "a cast with dtype= does not say what to go back to",
                hints=["write src_dtype= and dst_dtype= instead"],
            )
        return Cast(self.source_dtype, self.dtype)

    def undo(self) -> Cast:
        casts = (self.source_dtype, self.dtype)
        if None not in casts and casts[0] != casts[1] and casts not in EXACT_CASTS:
            raise Problem(
                f"a cast from {casts[0]} to {casts[1]} loses digits, so it has no inverse"
            )
        return self.opposite()


@dataclass(frozen=True, slots=True)
class Tie(Operator):
    """`a, b -> c, tie`: a and b hold the same values, which is checked, and c is either."""

    copies: ClassVar[bool] = True

    @classmethod
    def parse(cls, given: Attributes) -> Tie:
        if given.right_is_many:
            raise Problem("tie takes one name on the right")
        return cls()

    def attributes(self) -> list[tuple[str, object]]:
        return [("tie", "")]

    def apply(self, step: Step, values: list[Value], _layout: Layout) -> list[Value]:
        check_alike(step, values, None)
        node = tied([value.node for value in values])
        return [Value(node, common_labels(step, values, None))]

    def opposite(self) -> Untie:
        return Untie()


@dataclass(frozen=True, slots=True)
class Untie(Operator):
    """`a -> b, c, untie`: b and c are copies."""

    copies: ClassVar[bool] = True

    @classmethod
    def parse(cls, given: Attributes) -> Untie:
        if given.left_is_many:
            raise Problem("untie takes one name on the left")
        return cls()

    def attributes(self) -> list[tuple[str, object]]:
        return [("untie", "")]

    def apply(self, step: Step, values: list[Value], _layout: Layout) -> list[Value]:
        return values * len(step.right)

    def opposite(self) -> Tie:
        return Tie()


# ---------------------------------------------------------------------------------------------
# From attributes to operators
# ---------------------------------------------------------------------------------------------

OPERATORS: dict[str, tuple[type[Operator], tuple[str, ...]]] = {
    "axis": (Concat, ("sizes", "parts")),
    "stack": (Stack, ()),
    "unstack": (Unstack, ("parts",)),
    "permute": (Permute, ()),
    "reshape": (Reshape, ()),
    "dtype": (Cast, ()),
    "src_dtype": (Cast, ("dst_dtype",)),
    "dst_dtype": (Cast, ("src_dtype",)),
    "tie": (Tie, ()),
    "untie": (Untie, ()),
    "fused_qkv": (FusedQkv, ("num_heads", "num_key_value_groups", "axis")),
    "fused_qkv_old": (
        FusedQkv,
        ("num_heads", "num_key_value_groups", "axis", "src_parts", "dst_parts"),
    ),
    "fused_ffn": (FusedFfn, ("axis", "src_parts", "dst_parts")),
}
"""By the attribute that names it: each operator, and the attributes that may stand beside that."""

ATTRIBUTES = sorted({*OPERATORS, *(name for _, beside in OPERATORS.values() for name in beside)})
"""The names of all attributes."""


def operator_of(
    left: Sequence[Name], right: Sequence[Name], attributes: Mapping[str, Attribute]
) -> tuple[Operator, Span | None]:
    """The operator of a statement, and the span of the attribute that names it."""
    given = Attributes(left, right, attributes)
    for attribute in attributes.values():
        _check_known(attribute)
    if left[0].is_nothing or right[0].is_nothing:
        for attribute in attributes.values():
            raise Problem("a statement with _ takes no attributes", attribute.span)
        return Rename(), None
    leader = _leader(list(attributes.values()))
    if leader is not None:
        return OPERATORS[leader.name][0].parse(given), leader.span
    given.check_one_side_is_single()
    if given.left_is_many or given.right_is_many:
        raise Problem(
            "several names on one side need axis= (or stack=, unstack=, tie, untie, or one of the "
            "fused_ macros)"
        )
    return Rename(), None


def _check_known(attribute: Attribute) -> None:
    if attribute.name not in ATTRIBUTES:
        hints = "".join(f"; {hint}" for hint in nearest(attribute.name, ATTRIBUTES))
        raise Problem(f"unknown attribute {attribute.name!r}{hints}", attribute.span)
    is_flag = attribute.name in FLAGS
    if is_flag != (attribute.value is True):
        form = "stands alone, without a value" if is_flag else "needs a value"
        raise Problem(f"{attribute.name} {form}", attribute.span)


def _leader(attributes: Sequence[Attribute]) -> Attribute | None:
    """The attribute that names the operator; None if no attribute does, and there is none."""
    leaders = [attribute for attribute in attributes if attribute.name in OPERATORS]
    # `axis` names an operator of its own unless it stands beside another.
    outer = [one for one in leaders if not any(_gives_way(one, other) for other in leaders)]
    leader = outer[0] if outer else None
    beside = OPERATORS[leader.name][1] if leader is not None else ()
    for other in leaders:
        if leader is not None and other is not leader and other.name not in beside:
            raise Problem(
                f"{leader.name} and {other.name} are two operators; write two statements",
                other.span,
            )
    for attribute in attributes:
        if attribute is not leader and attribute.name not in beside:
            owners = [name for name, (_, names) in OPERATORS.items() if attribute.name in names]
            raise Problem(
                f"{attribute.name} belongs to {' or '.join(owners)}, not to this statement",
                attribute.span,
            )
    return leader


def _gives_way(one: Attribute, other: Attribute) -> bool:
    return one.name in OPERATORS[other.name][1] and other.name not in OPERATORS[one.name][1]
