"""What each operator makes of its operands, with every check that shapes and dtypes allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remesh.transform import fused, syntax
from remesh.transform.expand import Step
from remesh.transform.labels import Value, common_labels
from remesh.transform.layout import Layout, full_order
from remesh.transform.order import Shape
from remesh.transform.tensors import concatenated, convert, permute, reshape, sliced, tied


@dataclass(frozen=True, slots=True)
class Call:
    """A step that is executed.

    Attributes:
        layout: How sources and targets are cut.
        number: Which statement it belongs to, from 0.
        step: The step.
    """

    layout: Layout
    number: int
    step: Step


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


def _alias(_call: Call, values: list[Value]) -> list[Value]:
    return values


def _concat(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
    operator = step.statement.operator
    assert isinstance(operator, syntax.Concat)
    axis = _axis(step, operator.axis, len(values[0].node.shape))
    check_alike(step, values, axis)
    node = concatenated(tuple(value.node for value in values), axis)
    if len(values) == 1:
        return values
    return [Value(node, common_labels(step, values, axis))]


def _split(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
    operator = step.statement.operator
    assert isinstance(operator, syntax.Split)
    value = values[0]
    axis = _axis(step, operator.axis, len(value.node.shape))
    sizes = _split_sizes(call, value.node.shape, axis)
    if len(sizes) == 1:
        return values
    axes = common_labels(step, values, axis)
    parts, start = [], 0
    for size in sizes:
        parts.append(Value(sliced(value.node, axis, start, size), axes))
        start += size
    return parts


def _split_sizes(call: Call, shape: Shape, axis: int) -> Sequence[int]:
    step = call.step
    operator = step.statement.operator
    assert isinstance(operator, syntax.Split)
    extent, num_parts = shape[axis], len(step.right)
    _check_num_parts(step, operator.parts)
    if operator.from_targets:
        sizes: Sequence[int] = [
            call.layout.result_shape(call.number, step, operand)[axis] for operand in step.right
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


def _stack(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
    operator = step.statement.operator
    assert isinstance(operator, syntax.Stack)
    check_alike(step, values, None)
    axis = _axis(step, operator.axis, len(values[0].node.shape) + 1)
    nodes = [
        reshape(value.node, (*value.node.shape[:axis], 1, *value.node.shape[axis:]))
        for value in values
    ]
    labels = common_labels(step, values, None)
    return [Value(concatenated(tuple(nodes), axis), (*labels[:axis], None, *labels[axis:]))]


def _unstack(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
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


def _permute(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
    operator = step.statement.operator
    assert isinstance(operator, syntax.Permute)
    node, axes = values[0].node, values[0].axes
    order = full_order(step, operator, len(node.shape))
    return [Value(permute(node, order), tuple(axes[axis] for axis in order))]


def _reshape(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
    operator = step.statement.operator
    assert isinstance(operator, syntax.Reshape)
    node, shape = values[0].node, operator.shape
    if shape is None:
        shape = call.layout.result_shape(call.number, step, step.right[0])
    elif node.shape == shape and len(shape) >= 3:
        shape = (shape[0] * shape[1], math.prod(shape[2:]))
    if math.prod(shape) != math.prod(node.shape):
        raise step.error(
            f"{step.left[0].name!r} has shape {node.shape}, which has not as many elements as "
            f"{shape}"
        )
    return [Value(reshape(node, shape), (None,) * len(shape))]


def _cast(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
    operator = step.statement.operator
    assert isinstance(operator, syntax.Cast)
    node = values[0].node
    if node.dtype is not None:
        if operator.source_dtype is not None and node.dtype != operator.source_dtype:
            raise step.error(f"{step.left[0].name!r} is {node.dtype}, not {operator.source_dtype}")
        if "float" not in node.dtype:
            raise step.error(f"{step.left[0].name!r} is {node.dtype}; only floats can be cast")
    return [Value(convert(node, operator.dtype), values[0].axes)]


def _tie(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
    check_alike(step, values, None)
    node = tied(tuple(value.node for value in values))
    return [Value(node, common_labels(step, values, None))]


def _untie(call: Call, values: list[Value]) -> list[Value]:
    return values * len(call.step.right)


def _fused_qkv(call: Call, values: list[Value]) -> list[Value]:
    operator = call.step.statement.operator
    assert isinstance(operator, syntax.FusedQkv)
    heads = (operator.num_heads, operator.num_kv_heads, operator.num_kv_heads)
    return _reorder(call, values, heads)


def _fused_ffn(call: Call, values: list[Value]) -> list[Value]:
    step = call.step
    operator = step.statement.operator
    assert isinstance(operator, syntax.FusedFfn)
    node = values[0].node
    extent = node.shape[_axis(step, operator.axis, len(node.shape))]
    if len(values) == 1 and extent % 2:
        raise step.error(f"extent {extent} is not even, so it does not hold gate and up")
    rows = max(extent // 2 if len(values) == 1 else extent, 1)
    return _reorder(call, values, (rows, rows))


def _reorder(call: Call, values: list[Value], heads: Sequence[int]) -> list[Value]:
    step, layout = call.step, call.layout
    operator = step.statement.operator
    assert isinstance(operator, syntax.FusedQkv | syntax.FusedFfn)
    ndim = len(values[0].node.shape)
    axis = _axis(step, operator.axis, ndim)
    check_alike(step, values, axis)
    if isinstance(operator, syntax.FusedQkv) and not operator.by_rank:
        source_blocks = blocks = operator.num_kv_heads
    else:
        source_blocks = layout.source_ranks(step, values[0], axis) if len(values) == 1 else 1
        blocks = layout.target_ranks(call.number, step, axis, ndim) if len(step.right) == 1 else 1
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
    labels = common_labels(step, values, axis)
    return [Value(node, labels) for node in nodes]


OPERATIONS: dict[type[syntax.Operator], Callable[[Call, list[Value]], list[Value]]] = {
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
