"""Operators: their base, the attributes that they are parsed from, the values that they take.

An operator is one class, a subclass of `Operator`: how attributes say it, how it is written, what
it makes of tensors, and what turns it around. `remesh.transform.operators.OPERATORS` has a row for
each attribute that names one; nothing else asks which operator a statement has.

Axes of values may carry labels (`w[out, in]`). A label follows its axis through transpositions; an
axis that is cut, joined or reshaped loses it. Two labels that meet on one axis must be equal. This
finds the transposition that was forgotten where both axes happen to have the same size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from remesh.transform.expressions import Node, reverse_axes
from remesh.transform.syntax import Name, Span

if TYPE_CHECKING:
    from remesh.transform.expand import Operand, Step
    from remesh.transform.layout import Layout

CAST_DTYPES = ("float16", "bfloat16", "float32")
_INTEGER_LIST = re.compile(r"\s*[\[(]\s*((?:-?[0-9]{1,18}\s*,\s*)*(?:-?[0-9]{1,18})?)\s*[\])]\s*")

AttributeValue = int | str | tuple[int, ...] | bool


class Operator:
    """The effect of a statement."""

    __slots__ = ()
    keeps_shape: ClassVar[bool] = True
    """Whether a result that is made of one tensor has its axes, in some order."""
    copies: ClassVar[bool] = False  # whether each result holds what each source does

    @classmethod
    def parse(cls, given: Attributes) -> Operator:
        """The operator that a statement's attributes and numbers of names say."""
        raise NotImplementedError

    def attributes(self) -> list[tuple[str, object]]:
        """The attributes that `parse` takes, by name; None stands for an absent one, "" for a flag.

        The text of a statement is made of them.
        """
        return []

    def apply(self, step: Step, values: list[Value], layout: Layout) -> list[Value]:
        """The tensors right of the arrow, made of those on the left."""
        raise NotImplementedError

    def opposite(self) -> Operator:
        """The operator of the statement with its sides exchanged."""
        raise NotImplementedError

    def undo(self) -> Operator:
        """Like `opposite`, but it restores the sources exactly; sizes may come from the targets."""
        return self.opposite()

    @property
    def needs_targets(self) -> bool:
        """True if the result depends on the targets that it goes to."""
        return False

    @property
    def num_parts(self) -> int:
        """How many results a `*` on the right stands for; 0 if the statement does not say."""
        return 0

    def order(self, ndim: int) -> tuple[int, ...]:
        """The axes of the tensor that is read, in the order of the result's."""
        return tuple(range(ndim))

    def explain(self) -> tuple[str, str] | None:
        """For errors: the name of a macro, and what it does."""
        return None

    def __str__(self) -> str:
        """The attributes as text, with a comma before each."""
        items = [(name, value) for name, value in self.attributes() if value is not None]
        return "".join(
            f", {name}" if value == "" else f", {name}={_text(value)}" for name, value in items
        )


def _text(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


class Problem(Exception):  # noqa: N818 - it is turned into an error that shows the text
    """An error of an operator, and its place; the whole statement if `span` is None."""

    def __init__(self, message: str, span: Span | None = None, hints: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.span = span
        self.hints = hints


@dataclass(frozen=True, slots=True)
class Attribute:
    """`name=value`, or a flag, whose value is True."""

    name: str
    value: AttributeValue
    span: Span


@dataclass(frozen=True, slots=True)
class Attributes:
    """The names and attributes of a statement, as operators ask for them."""

    left: Sequence[Name]
    right: Sequence[Name]
    by_name: Mapping[str, Attribute]

    @property
    def left_is_many(self) -> bool:
        """True if there may be several names left of the arrow."""
        return len(self.left) > 1 or self.left[0].is_many

    @property
    def right_is_many(self) -> bool:
        """True if there may be several names right of the arrow."""
        return len(self.right) > 1 or self.right[0].is_many

    def check_one_to_one(self, what: str) -> None:
        if self.left_is_many or self.right_is_many:
            raise Problem(f"{what} takes one name on either side")

    def check_one_side_is_single(self) -> None:
        if self.left_is_many and self.right_is_many:
            raise Problem(
                "several names on both sides: one side must be single (write $EXPERT_ID instead "
                "of *)"
            )

    def span(self, name: str) -> Span:
        return self.by_name[name].span

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; an attribute without a default must be there."""
        attribute = self.by_name.get(name)
        if attribute is None:
            if default is None:
                raise Problem(f"{name}= is missing")
            return default
        if type(attribute.value) is not int:
            raise Problem(f"{name} must be a whole number", attribute.span)
        return attribute.value

    def positive(self, name: str) -> int:
        value = self.integer(name)
        if value < 1:
            raise Problem(f"{name} must be at least 1", self.span(name))
        return value

    def optional_positive(self, name: str) -> int | None:
        return self.positive(name) if name in self.by_name else None

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, which may be quoted."""
        attribute = self.by_name[name]
        value = attribute.value
        if isinstance(value, tuple):
            return value
        match = _INTEGER_LIST.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise Problem(f"{name} must be a list such as [1, 0]", attribute.span)
        return tuple(int(item) for item in match.group(1).split(",") if item.strip())

    def integers_or_targets(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None for the word `targets`."""
        return None if self.by_name[name].value == "targets" else self.integers(name)

    def dtype(self, name: str) -> str:
        attribute = self.by_name.get(name)
        if attribute is None:
            raise Problem(f"{name}= is missing")
        if attribute.value not in CAST_DTYPES:
            raise Problem(f"{name} must be one of {', '.join(CAST_DTYPES)}", attribute.span)
        return str(attribute.value)


# ---------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------

Axes = tuple[str | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """The value of a name: a tensor, and the labels of its axes as far as they are known."""

    node: Node
    axes: Axes


def transposed(value: Value) -> Value:
    """A value with all axes reversed."""
    return Value(reverse_axes(value.node), value.axes[::-1])


def merge_labels(step: Step, operand: Operand, axes: Axes, stated: tuple[str, ...] | None) -> Axes:
    """The labels of a tensor after a statement has named its axes."""
    if stated is None:
        return axes
    if len(stated) != len(axes):
        raise step.error(
            f"{operand.name!r} has {len(axes)} axes, but {len(stated)} are named here", operand
        )
    for axis, (known, label) in enumerate(zip(axes, stated, strict=True)):
        if known is not None and known != label:
            raise step.error(
                f"axis {axis} of {operand.name!r} is {known!r}, but is called {label!r} here\nIs a "
                "transposition missing or too many?",
                operand,
            )
    return stated


def common_labels(step: Step, values: Sequence[Value], free: int | None) -> Axes:
    """The labels of tensors that are joined; those of the axis `free` may differ, and are lost."""
    axes = list(values[0].axes)
    for operand, value in zip(step.left, values, strict=True):
        for axis, label in enumerate(value.axes):
            if axis == free:
                continue
            if axes[axis] is None:
                axes[axis] = label
            elif label is not None and label != axes[axis]:
                raise step.error(
                    f"axis {axis} of {operand.name!r} is {label!r}, but that of "
                    f"{step.left[0].name!r} is {axes[axis]!r}",
                    operand,
                )
    if free is not None:
        axes[free] = None
    return tuple(axes)


def full_axis(step: Step, axis: int, ndim: int) -> int:
    """An axis, not counted from the end."""
    if not -ndim <= axis < ndim:
        raise step.error(f"there is no axis {axis}: {step.left[0].name!r} has {ndim}")
    return axis % ndim


def check_alike(step: Step, values: Sequence[Value], axis: int | None) -> None:
    """Refuse tensors that are joined and differ in dtype, or in shape, except along `axis`."""
    first = values[0].node
    for operand, value in zip(step.left, values, strict=True):
        node = value.node
        same_shape = len(node.shape) == len(first.shape) and all(
            a == b
            for i, (a, b) in enumerate(zip(node.shape, first.shape, strict=True))
            if i != axis
        )
        if not same_shape:
            raise step.error(
                f"{operand.name!r} has shape {node.shape}, which does not fit "
                f"{step.left[0].name!r} with {first.shape}",
                operand,
            )
        if node.dtype is not None and first.dtype is not None and node.dtype != first.dtype:
            raise step.error(
                f"{operand.name!r} is {node.dtype}, {step.left[0].name!r} is {first.dtype}",
                operand,
                ["cast one of them in a statement of its own before this"],
            )
