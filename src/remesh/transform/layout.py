"""Sources and targets as statements see them: names, tensor-parallel degrees, sizes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

from remesh.transform import messages
from remesh.transform.expand import Operand, Step
from remesh.transform.expressions import Leaf, Permuted, without_conversions
from remesh.transform.operator_base import Problem, Value
from remesh.transform.optimizer_state import States
from remesh.transform.rearrange import Shape, inverse_order, take
from remesh.transform.tensor_info import Infos, TensorInfo

ShapeOf = Callable[[Step, Operand], Shape | None]


class Sources:
    """The sources by name, and the parameters of which only optimizer states are sources."""

    def __init__(self, infos: Infos, states: States, aliases: Mapping[str, str]) -> None:
        self.infos = infos
        self.states = states
        self._leaves: dict[str, Leaf | None] = {}
        self._groups: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self._groups.setdefault(name, [name]).append(alias)
        self._groups.update({alias: self._groups[name] for alias, name in aliases.items()})

    def leaf(self, name: str) -> Leaf | None:
        """The source of this name, or the parameter of this name of which only states exist."""
        if name not in self._leaves:
            self._leaves[name] = self._make_leaf(name)
        return self._leaves[name]

    def _make_leaf(self, name: str) -> Leaf | None:
        if name in self.infos:
            info = self.infos[name]
            return Leaf(info.shape, info.dtype, 0, name) if info else Leaf((), None, 0, name)
        if name in self.states.by_parameter:
            return Leaf(self.info(name).shape, None, 0, name)
        return None

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a source, or of a parameter as its states show them."""
        info = self.infos.get(name)
        if info is not None:
            return info
        return info_from_states(name, self.states, self.infos) or TensorInfo("", ())

    def nearest(self, name: str) -> list[str]:
        return messages.nearest(name, [*self.infos, *self.states.by_parameter])

    def names_of(self, name: str) -> list[str]:
        """A name and the others that its tensor has."""
        group = self._groups.get(name)
        return [name] if group is None else sorted(group, key=lambda other: other != name)


def info_from_states(parameter: str, states: States, infos: Infos) -> TensorInfo | None:
    """Dtype and shape of a parameter as its largest state shows them."""
    found = [
        info
        for names in states.by_parameter.get(parameter, {}).values()
        for name in names
        if (info := infos.get(name)) is not None
    ]
    return max(found, key=lambda info: math.prod(info.shape), default=None)


class Layout:
    """How sources and targets are cut.

    A result need not be a target itself: it is followed through later statements that only pass it
    on, to the target it ends up in. A statement passes a tensor on if it has one name on either
    side: it renames, permutes or casts. Ties and copies pass it on too. `original_shape` gives the
    shape of a result that goes to no target, if that is known from elsewhere.
    """

    def __init__(
        self,
        sources: Sources,
        targets: Mapping[str, TensorInfo] | None,
        groups: Sequence[Sequence[Step]],
        original_shape: ShapeOf,
    ) -> None:
        self.sources = sources
        self._targets = targets
        self._original_shape = original_shape
        self._assigned: dict[str, list[int]] = {}
        self._passed_on: dict[str, list[tuple[int, Step]]] = {}
        self._num_groups = len(groups)
        for number, steps in enumerate(groups if targets is not None else ()):
            for step in steps:
                for operand in step.right:
                    self._assigned.setdefault(operand.name, []).append(number)
                if _passes_on(step):
                    for operand in step.left:
                        self._passed_on.setdefault(operand.name, []).append((number, step))

    def source_ranks(self, step: Step, value: Value, axis: int) -> int:
        """Into how many ranges the source that a value comes from is cut along an axis."""
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

    def target_ranks(self, step: Step, axis: int, ndim: int) -> int:
        """Into how many ranges the target that a result goes to is cut along an axis."""
        operand = step.right[0]
        info = self.target_info(step, operand)
        if info is None or info.num_pieces is None or len(info.shape) != ndim:
            return 1
        return info.num_pieces[ndim - 1 - axis if operand.origin.transposed else axis]

    def result_shape(self, step: Step, operand: Operand) -> Shape:
        """The shape that a result must have, before `^T` on the right is undone."""
        info = self.target_info(step, operand)
        shape = self._original_shape(step, operand) if info is None else info.shape
        if shape is None:
            raise step.error(
                f"{operand.name!r} goes to no target that would tell its size",
                operand,
                ["write the numbers instead of targets, or give the targets"],
            )
        return shape[::-1] if operand.origin.transposed else shape

    def target_info(self, step: Step, operand: Operand) -> TensorInfo | None:
        """The target that a result ends up in, its axes in the order of what is assigned."""
        found = None if self._targets is None else self._target_of(operand.name, step.position)
        if found is None:
            return None
        info, way = found
        order = tuple(range(len(info.shape)))
        for passing in way:
            order = take(order, _order_of(passing, len(order)))
        back = inverse_order(order)
        num_pieces = None if info.num_pieces is None else take(info.num_pieces, back)
        return TensorInfo(info.dtype, take(info.shape, back), num_pieces)

    def _target_of(self, name: str, number: int) -> tuple[TensorInfo, tuple[Step, ...]] | None:
        """The target that `name`, as statement `number` assigned it, ends up in."""
        assert self._targets is not None
        way: list[Step] = []
        while True:
            assigned = self._assigned.get(name, [])
            after = bisect.bisect_right(assigned, number)
            is_last = after == len(assigned)
            if is_last and name in self._targets:
                return self._targets[name], tuple(way)
            # The statement that assigns the name again still reads what it was before.
            last = self._num_groups if is_last else assigned[after]
            readers = self._passed_on.get(name, [])
            next_reader = bisect.bisect_right(readers, number, key=lambda reader: reader[0])
            if next_reader == len(readers) or readers[next_reader][0] > last:
                return None
            number, step = readers[next_reader]
            way.append(step)
            name = step.right[0].name


def _passes_on(step: Step) -> bool:
    """True if a result is the tensor that was read, at most with its axes permuted and cast."""
    operator = step.statement.operator
    if operator.copies:
        return len({operand.origin.transposed for operand in step.left}) == 1
    return operator.keeps_shape and len(step.left) == len(step.right) == 1


def _order_of(step: Step, ndim: int) -> tuple[int, ...]:
    """How a step that passes a tensor on permutes its axes."""
    order = tuple(range(ndim))
    if step.left[0].origin.transposed:
        order = order[::-1]
    try:
        order = take(order, step.statement.operator.order(ndim))
    except Problem as problem:
        raise step.error(str(problem)) from None
    return order[::-1] if step.right[0].origin.transposed else order
