"""Executing steps: names are bound to tensors, statement by statement.

Nothing is computed. A name is bound to a node of the graph that `remesh.transform.tensors`
describes; every shape and dtype is checked on the way, so that a mistake is found where it was
made. A name stands for what it was last bound to, else for the source of that name.

Axes may carry labels (`w[out, in]`). A label follows its axis through transpositions; an axis that
is cut, joined or reshaped loses it. Two labels that meet on one axis must be equal. This finds the
transposition that was forgotten where both axes happen to have the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from remesh.transform import fused, syntax
from remesh.transform.expand import Flows, Operand, Step
from remesh.transform.info import TensorInfo
from remesh.transform.order import Shape, inverse_order, take
from remesh.transform.tensors import (
    MAX_DEPTH,
    Leaf,
    Node,
    Permuted,
    concatenated,
    convert,
    permute,
    reshape,
    reverse_axes,
    sliced,
    tied,
    without_conversions,
)

Axes = tuple[str | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What a name is bound to: a tensor, and the labels of its axes as far as they are known."""

    node: Node
    axes: Axes


class Sources(Protocol):
    """The sources, as statements see them."""

    def leaf(self, name: str) -> Leaf | None:
        """The source of this name, or None."""
        ...

    def info(self, name: str) -> TensorInfo:
        """What is known of the source of a leaf."""
        ...

    def nearest(self, name: str) -> list[str]:
        """A hint with similar names, if there are any."""
        ...


@dataclass(slots=True)
class Bindings:
    """What statements have made of names so far.

    Attributes:
        values: Tensors by name.
        added: Names that keep their initial value, and by which step.
        deleted: Names of sources that are not wanted, and by which step.
        made_by: The step that bound a name.
        unread: Names bound to something that no statement has read.
        source_axes: Labels of sources.
        read: Sources that a statement has read.
    """

    values: dict[str, Value] = field(default_factory=dict)
    added: dict[str, Step] = field(default_factory=dict)
    deleted: dict[str, Step] = field(default_factory=dict)
    made_by: dict[str, Step] = field(default_factory=dict)
    unread: dict[str, None] = field(default_factory=dict)
    source_axes: dict[str, Axes] = field(default_factory=dict)
    read: dict[str, None] = field(default_factory=dict)


ShapeOf = Callable[[Step, Operand], Shape | None]


class Builder:
    """Executes steps.

    Args:
        sources: The sources.
        targets: The targets; None if they are not known.
        flows: Where results go, if the targets are known.
        original_shape: The shape of a result that goes to no target, if that is known from
            elsewhere.

    Attributes:
        bindings: What names stand for.
        read_shapes: Shapes of what steps have read, by the statement's number and the name.
    """

    def __init__(
        self,
        sources: Sources,
        targets: Mapping[str, TensorInfo] | None,
        flows: Flows | None,
        original_shape: ShapeOf,
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.flows = flows
        self.original_shape = original_shape
        self.bindings = Bindings()
        self.read_shapes: dict[tuple[int, str], Shape] = {}

    def execute(self, number: int, steps: Sequence[Step]) -> None:
        """Execute the steps of statement `number` (from 0), which all read before any assigns.

        Raises:
            TransformError: If a name does not exist or shapes, dtypes or labels do not fit.
        """
        results: list[tuple[Step, list[Value]]] = []
        for step in steps:
            operator = step.statement.operator
            if isinstance(operator, syntax.Add | syntax.Delete):
                continue
            values = [self._read(step, operand) for operand in step.left]
            results.append((step, _OPERATIONS[type(operator)](self, number, step, values)))
        for step in steps:
            if isinstance(step.statement.operator, syntax.Add):
                self._add(step)
            elif isinstance(step.statement.operator, syntax.Delete):
                self._delete(step)
        for step, values in results:
            for operand, value in zip(step.right, values, strict=True):
                self._assign(step, operand, value)

    def _read(self, step: Step, operand: Operand) -> Value:
        name = operand.name
        value = self.bindings.values.get(name)
        if value is not None:
            self.bindings.unread.pop(name, None)
        else:
            value = self._read_source(step, operand)
        self.read_shapes[step.statement.number, name] = value.node.shape
        axes = _merge_labels(step, operand, value.axes, operand.origin.axes)
        value = Value(value.node, axes)
        if name not in self.bindings.values:
            self.bindings.source_axes[name] = axes
        return _reversed(value) if operand.origin.transposed else value

    def _read_source(self, step: Step, operand: Operand) -> Value:
        name = operand.name
        if name in self.bindings.added:
            number = self.bindings.added[name].statement.number
            raise step.error(
                f"{name!r} keeps its initial value (statement {number}), so there is nothing to "
                "make of it",
                operand,
            )
        if name in self.bindings.deleted:
            number = self.bindings.deleted[name].statement.number
            raise step.error(f"{name!r} has been deleted by statement {number}", operand)
        leaf = self.sources.leaf(name)
        if leaf is None:
            raise step.error(
                f"there is no source and no earlier result {name!r}",
                operand,
                self.sources.nearest(name),
            )
        self.bindings.read[name] = None
        return Value(leaf, self.bindings.source_axes.get(name, (None,) * len(leaf.shape)))

    def _assign(self, step: Step, operand: Operand, value: Value) -> None:
        if operand.origin.transposed:
            value = _reversed(value)
        axes = _merge_labels(step, operand, value.axes, operand.origin.axes)
        if value.node.depth > MAX_DEPTH:
            raise step.error(
                f"{operand.name!r} is built of more than {MAX_DEPTH} nested operations"
            )
        self.bindings.values[operand.name] = Value(value.node, axes)
        self.bindings.made_by[operand.name] = step
        self.bindings.unread[operand.name] = None
        self.bindings.added.pop(operand.name, None)
        self.bindings.deleted.pop(operand.name, None)

    def _add(self, step: Step) -> None:
        for operand in step.right:
            self.bindings.added[operand.name] = step
            self._forget(operand.name)

    def _delete(self, step: Step) -> None:
        for operand in step.left:
            name = operand.name
            if name not in self.bindings.values and self.sources.leaf(name) is None:
                hints = self.sources.nearest(name)
                raise step.error(f"there is no source {name!r} to delete", operand, hints)
            self.bindings.deleted[name] = step
            self.bindings.added.pop(name, None)
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.bindings.values.pop(name, None)
        self.bindings.unread.pop(name, None)

    # -----------------------------------------------------------------------------------------
    # What operators need to know of sources and targets
    # -----------------------------------------------------------------------------------------

    def source_ranks(self, step: Step, value: Value, axis: int) -> int:
        """Into how many ranges the source that a value comes from is cut along an axis."""
        operator = step.statement.operator
        assert isinstance(operator, syntax.FusedQkv | syntax.FusedFfn)
        if operator.source_ranks is not None:
            return operator.source_ranks
        node = without_conversions(value.node)
        while isinstance(node, Permuted):
            axis = node.order[axis]
            node = without_conversions(node.node)
        if not isinstance(node, Leaf):
            raise step.error(
                f"{step.left[0].name!r} is put together from other tensors, so its tensor-parallel "
                "degree is not known",
                hints=["state it with src_parts="],
            )
        num_pieces = self.sources.info(node.name).num_pieces
        return 1 if num_pieces is None else num_pieces[axis]

    def target_ranks(self, number: int, step: Step, axis: int, ndim: int) -> int:
        """Into how many ranges the target that a result goes to is cut along an axis."""
        operator = step.statement.operator
        assert isinstance(operator, syntax.FusedQkv | syntax.FusedFfn)
        if operator.target_ranks is not None:
            return operator.target_ranks
        operand = step.right[0]
        info = self.target_info(number, operand)
        if info is None or info.num_pieces is None or len(info.shape) != ndim:
            return 1
        return info.num_pieces[ndim - 1 - axis if operand.origin.transposed else axis]

    def result_shape(self, number: int, step: Step, operand: Operand) -> Shape:
        """The shape that a result must have, before `^T` on the right is undone.

        Raises:
            TransformError: If nothing tells.
        """
        info = self.target_info(number, operand)
        shape = self.original_shape(step, operand) if info is None else info.shape
        if shape is None:
            raise step.error(
                f"{operand.name!r} goes to no target that would tell its size",
                operand,
                ["write the numbers instead of targets, or give the targets"],
            )
        return shape[::-1] if operand.origin.transposed else shape

    def target_info(self, number: int, operand: Operand) -> TensorInfo | None:
        """The target that a result ends up in, its axes in the order of what is assigned.

        Args:
            number: The statement that makes the result.
            operand: The name right of its arrow.
        """
        if self.flows is None or self.targets is None:
            return None
        found = self.flows.target_of(operand.name, number)
        if found is None:
            return None
        name, way = found
        info = self.targets[name]
        order = tuple(range(len(info.shape)))
        for step in way:
            order = take(order, _order_of(step, len(order)))
        back = inverse_order(order)
        num_pieces = None if info.num_pieces is None else take(info.num_pieces, back)
        return TensorInfo(info.dtype, take(info.shape, back), num_pieces)


def _order_of(step: Step, ndim: int) -> tuple[int, ...]:
    """How a step that passes a tensor on permutes its axes."""
    operator = step.statement.operator
    order = tuple(range(ndim))
    if step.left[0].origin.transposed:
        order = order[::-1]
    if isinstance(operator, syntax.Permute):
        order = take(order, _full_order(step, operator, ndim))
    return order[::-1] if step.right[0].origin.transposed else order


# ---------------------------------------------------------------------------------------------
# Labels
# ---------------------------------------------------------------------------------------------


def _reversed(value: Value) -> Value:
    return Value(reverse_axes(value.node), value.axes[::-1])


def _merge_labels(step: Step, operand: Operand, axes: Axes, stated: tuple[str, ...] | None) -> Axes:
    """The labels of a tensor after a statement has named its axes.

    Raises:
        TransformError: If there are more or fewer labels than axes, or one contradicts.
    """
    if stated is None:
        return axes
    if len(stated) != len(axes):
        raise step.error(
            f"{operand.name!r} has {len(axes)} axes, but {len(stated)} are named here", operand
        )
    for axis, (known, label) in enumerate(zip(axes, stated, strict=True)):
        if known is not None and known != label:
            raise step.error(
                f"axis {axis} of {operand.name!r} is {known!r}, but is called {label!r} here; is a "
                "transposition missing or too many?",
                operand,
            )
    return stated


def _common_labels(step: Step, values: Sequence[Value], free: int | None) -> Axes:
    """The labels of tensors that are joined; those of the axis `free` may differ, and are lost.

    Raises:
        TransformError: If two of them have different labels for another axis.
    """
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


# ---------------------------------------------------------------------------------------------
# Operators
# ---------------------------------------------------------------------------------------------


def _axis(step: Step, axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise step.error(f"there is no axis {axis}: {step.left[0].name!r} has {ndim}")
    return axis % ndim


def check_alike(step: Step, values: Sequence[Value], axis: int | None) -> None:
    """Tensors that are joined must agree in dtype and in shape, except along `axis`."""
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


def _alias(_builder: Builder, _number: int, _step: Step, values: list[Value]) -> list[Value]:
    return values


def _concat(_builder: Builder, _number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.Concat)
    axis = _axis(step, operator.axis, len(values[0].node.shape))
    check_alike(step, values, axis)
    node = concatenated(tuple(value.node for value in values), axis)
    if len(values) == 1:
        return values
    return [Value(node, _common_labels(step, values, axis))]


def _split(builder: Builder, number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.Split)
    value = values[0]
    axis = _axis(step, operator.axis, len(value.node.shape))
    sizes = _split_sizes(builder, number, step, value.node.shape, axis)
    if len(sizes) == 1:
        return values
    axes = _common_labels(step, values, axis)
    parts, start = [], 0
    for size in sizes:
        parts.append(Value(sliced(value.node, axis, start, size), axes))
        start += size
    return parts


def _split_sizes(
    builder: Builder, number: int, step: Step, shape: Shape, axis: int
) -> Sequence[int]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.Split)
    extent, num_parts = shape[axis], len(step.right)
    _check_num_parts(step, operator.parts)
    if operator.from_targets:
        sizes: Sequence[int] = [
            builder.result_shape(number, step, operand)[axis] for operand in step.right
        ]
    elif operator.sizes is not None:
        sizes = operator.sizes
    else:
        if extent % num_parts:
            raise step.error(
                f"axis {axis} of {step.left[0].name!r} has extent {extent}, which cannot be cut "
                f"into {num_parts} equal parts",
                hints=["for unequal parts, write sizes=[...]"],
            )
        return [extent // num_parts] * num_parts
    if len(sizes) != num_parts:
        raise step.error(f"there are {len(sizes)} sizes for {num_parts} names")
    if sum(sizes) != extent:
        raise step.error(
            f"the sizes {list(sizes)} add up to {sum(sizes)}, but axis {axis} of "
            f"{step.left[0].name!r} has extent {extent}"
        )
    return sizes


def _check_num_parts(step: Step, num_parts: int | None) -> None:
    if num_parts is not None and num_parts != len(step.right):
        raise step.error(f"parts={num_parts}, but there are {len(step.right)} names")


def _stack(_builder: Builder, _number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.Stack)
    check_alike(step, values, None)
    axis = _axis(step, operator.axis, len(values[0].node.shape) + 1)
    nodes = [
        reshape(value.node, (*value.node.shape[:axis], 1, *value.node.shape[axis:]))
        for value in values
    ]
    labels = _common_labels(step, values, None)
    return [Value(concatenated(tuple(nodes), axis), (*labels[:axis], None, *labels[axis:]))]


def _unstack(_builder: Builder, _number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.Unstack)
    node, axes = values[0].node, values[0].axes
    axis = _axis(step, operator.axis, len(node.shape))
    _check_num_parts(step, operator.parts)
    if node.shape[axis] != len(step.right):
        raise step.error(
            f"axis {axis} of {step.left[0].name!r} has extent {node.shape[axis]}, but there are "
            f"{len(step.right)} names"
        )
    shape = (*node.shape[:axis], *node.shape[axis + 1 :])
    labels = (*axes[:axis], *axes[axis + 1 :])
    return [
        Value(reshape(sliced(node, axis, index, 1), shape), labels)
        for index in range(len(step.right))
    ]


def _full_order(step: Step, operator: syntax.Permute, ndim: int) -> tuple[int, ...]:
    if not operator.order:
        return tuple(reversed(range(ndim)))
    order = tuple(axis + ndim if axis < 0 else axis for axis in operator.order)
    if sorted(order) != list(range(ndim)):
        raise step.error(
            f"{list(operator.order)} is no order of the {ndim} axes of {step.left[0].name!r}"
        )
    return order


def _permute(_builder: Builder, _number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.Permute)
    node, axes = values[0].node, values[0].axes
    order = _full_order(step, operator, len(node.shape))
    return [Value(permute(node, order), tuple(axes[axis] for axis in order))]


def _reshape(builder: Builder, number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.Reshape)
    node, shape = values[0].node, operator.shape
    if shape is None:
        shape = builder.result_shape(number, step, step.right[0])
    elif node.shape == shape and len(shape) >= 3:
        shape = (shape[0] * shape[1], math.prod(shape[2:]))
    if math.prod(shape) != math.prod(node.shape):
        raise step.error(
            f"{step.left[0].name!r} has shape {node.shape}, which has not as many elements as "
            f"{shape}"
        )
    return [Value(reshape(node, shape), (None,) * len(shape))]


def _cast(_builder: Builder, _number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.Cast)
    node = values[0].node
    if node.dtype is not None:
        if operator.source_dtype is not None and node.dtype != operator.source_dtype:
            raise step.error(f"{step.left[0].name!r} is {node.dtype}, not {operator.source_dtype}")
        if "float" not in node.dtype:
            raise step.error(f"{step.left[0].name!r} is {node.dtype}; only floats can be cast")
    return [Value(convert(node, operator.dtype), values[0].axes)]


def _tie(_builder: Builder, _number: int, step: Step, values: list[Value]) -> list[Value]:
    check_alike(step, values, None)
    node = tied(tuple(value.node for value in values))
    return [Value(node, _common_labels(step, values, None))]


def _untie(_builder: Builder, _number: int, step: Step, values: list[Value]) -> list[Value]:
    return values * len(step.right)


def _fused_qkv(builder: Builder, number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.FusedQkv)
    heads = (operator.num_heads, operator.num_kv_heads, operator.num_kv_heads)
    return _reorder(builder, number, step, values, heads)


def _fused_ffn(builder: Builder, number: int, step: Step, values: list[Value]) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.FusedFfn)
    node = values[0].node
    extent = node.shape[_axis(step, operator.axis, len(node.shape))]
    if len(values) == 1 and extent % 2:
        raise step.error(f"extent {extent} is not even, so it does not hold gate and up")
    rows = max(extent // 2 if len(values) == 1 else extent, 1)
    return _reorder(builder, number, step, values, (rows, rows))


def _reorder(
    builder: Builder, number: int, step: Step, values: list[Value], heads: Sequence[int]
) -> list[Value]:
    operator = step.statement.operator
    assert isinstance(operator, syntax.FusedQkv | syntax.FusedFfn)
    ndim = len(values[0].node.shape)
    axis = _axis(step, operator.axis, ndim)
    check_alike(step, values, axis)
    if isinstance(operator, syntax.FusedQkv) and not operator.by_rank:
        source_blocks = blocks = operator.num_kv_heads
    else:
        source_blocks = builder.source_ranks(step, values[0], axis) if len(values) == 1 else 1
        blocks = builder.target_ranks(number, step, axis, ndim) if len(step.right) == 1 else 1
    try:
        nodes = fused.reorder(
            [value.node for value in values],
            axis,
            heads,
            len(step.right),
            source_blocks=source_blocks,
            blocks=blocks,
        )
    except fused.DoesNotDivideError as error:
        raise step.error(str(error)) from None
    labels = _common_labels(step, values, axis)
    return [Value(node, labels) for node in nodes]


_OPERATIONS: dict[
    type[syntax.Operator], Callable[[Builder, int, Step, list[Value]], list[Value]]
] = {
    syntax.Alias: _alias,
    syntax.Concat: _concat,
    syntax.Split: _split,
    syntax.Stack: _stack,
    syntax.Unstack: _unstack,
    syntax.Permute: _permute,
    syntax.Reshape: _reshape,
    syntax.Cast: _cast,
    syntax.Tie: _tie,
    syntax.Untie: _untie,
    syntax.FusedQkv: _fused_qkv,
    syntax.FusedFfn: _fused_ffn,
}
