"""Sources and targets as statements see them: shapes, how they are cut, what ends up where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from remesh.transform import messages
from remesh.transform.expressions import Leaf, Node, Permuted, without_conversions
from remesh.transform.messages import Problem
from remesh.transform.optimizer_state import States
from remesh.transform.rearrange import inverse_order, take
from remesh.transform.tensor_info import Infos, TensorInfo
from remesh.transform.wildcards import Step


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

    def origin(self, node: Node) -> TensorInfo | None:
        """The source that a tensor is, at most converted and permuted, with its axes; else None."""
        node = without_conversions(node)
        order = tuple(range(len(node.shape)))
        while isinstance(node, Permuted):
            order = take(node.order, order)
            node = without_conversions(node.node)
        return self.info(node.name).permuted(order) if isinstance(node, Leaf) else None

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


def ends_of_results(
    groups: Sequence[Sequence[Step]], targets: Mapping[str, TensorInfo]
) -> dict[tuple[int, str], TensorInfo]:
    """The target that each result ends up in, by the place of its statement and its name.

    A result need not be a target itself: it is followed through later statements that only pass it
    on. A statement passes a tensor on if it has one name on either side: it renames, permutes or
    casts. Ties and copies pass it on too. Statements are walked from the last to the first, and the
    axes of a target are turned back on the way, to the order that the result has them in.
    """
    found: dict[tuple[int, str], TensorInfo] = {}
    becomes = dict(targets)  # what the tensor that has a name at this point ends up in
    own = set(targets)  # targets that no statement after this point assigns
    for steps in reversed(groups):
        for step in steps:
            for name in (operand.name for operand in step.right):
                own.discard(name)
                if name in becomes:
                    found[step.position, name] = becomes.pop(name)
        for step in filter(_passes_on, reversed(steps)):
            ends = [found.get((step.position, operand.name)) for operand in step.right]
            target = next((_read_as(step, end) for end in ends if end is not None), None)
            for name in (operand.name for operand in step.left):
                if target is not None and name not in own:
                    becomes[name] = target
    return found


def _passes_on(step: Step) -> bool:
    is_turned = {operand.origin.transposed for operand in step.left}
    return step.statement.operator.passes_on and len(is_turned) == 1


def _read_as(step: Step, target: TensorInfo) -> TensorInfo | None:
    """A target with its axes as a step that passes it on reads them; None if that cannot be."""
    axes = tuple(range(len(target.shape)))
    order = axes[::-1] if step.left[0].origin.transposed else axes
    try:
        order = take(order, step.statement.operator.order(len(axes)))
    except Problem:  # the target has another number of axes; that is refused when it is made
        return None
    return target.permuted(inverse_order(order[::-1] if step.right[0].origin.transposed else order))
