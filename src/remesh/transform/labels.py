"""What a name is bound to, and the labels of its axes.

Axes may carry labels (`w[out, in]`). A label follows its axis through transpositions; an axis that
is cut, joined or reshaped loses it. Two labels that meet on one axis must be equal. This finds the
transposition that was forgotten where both axes happen to have the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remesh.transform.expand import Operand, Step
from remesh.transform.expressions import Node, reverse_axes

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
