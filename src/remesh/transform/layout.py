"""What statements ask about layouts: tensor-parallel degrees, and sizes that targets decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from remesh.transform import syntax
from remesh.transform.expand import Flows, Operand, Step
from remesh.transform.info import TensorInfo
from remesh.transform.labels import Value
from remesh.transform.order import Shape, inverse_order, take
from remesh.transform.sources import SourceSpace
from remesh.transform.tensors import Leaf, Permuted, without_conversions

ShapeOf = Callable[[Step, Operand], Shape | None]


class Layout:
    """How sources and targets are cut.

    Args:
        sources: The sources.
        targets: The targets; None if they are not known.
        flows: Where results go, if the targets are known.
        original_shape: The shape of a result that goes to no target, if that is known from
            elsewhere.
    """

    def __init__(
        self,
        sources: SourceSpace,
        targets: Mapping[str, TensorInfo] | None,
        flows: Flows | None,
        original_shape: ShapeOf,
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.flows = flows
        self.original_shape = original_shape

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
        order = take(order, full_order(step, operator, ndim))
    return order[::-1] if step.right[0].origin.transposed else order


def full_order(step: Step, operator: syntax.Permute, ndim: int) -> tuple[int, ...]:
    """The order of axes that a permutation asks for, none of them counted from the end.

    Raises:
        TransformError: If it is no order of as many axes.
    """
    if not operator.order:
        return tuple(reversed(range(ndim)))
    order = tuple(axis + ndim if axis < 0 else axis for axis in operator.order)
    if sorted(order) != list(range(ndim)):
        raise step.error(
            f"{list(operator.order)} is no order of the {ndim} axes of {step.left[0].name!r}"
        )
    return order
