"""Executing the steps of statements: names are bound to tensors, statement by statement.

Nothing is computed. A name is bound to a node of the graph that `remesh.transform.expressions`
describes; every shape and dtype is checked on the way, so that a mistake is found where it was
made. A name stands for what it was last bound to, else for the source of that name. Statements see
of sources and targets their shapes, how they are cut, and what ends up where.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from remesh.errors import TransformError
from remesh.transform.expressions import (
    MAX_DEPTH,
    Leaf,
    Node,
    Permuted,
    reverse_axes,
    without_conversions,
)
from remesh.transform.operators import Ends, Operand
from remesh.transform.optimizer_state import States
from remesh.transform.rearrange import inverse_order, take
from remesh.transform.syntax import Problem, nearest
from remesh.transform.tensor_info import PLAIN, Infos, TensorInfo
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
            return Leaf(info.shape, info.dtype, 0, name) if info else Leaf((), PLAIN, 0, name)
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
        return nearest(name, [*self.infos, *self.states.by_parameter])

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


class Bindings:
    """Executes steps, and knows what they have made of names so far."""

    def __init__(self, sources: Sources, ends: Mapping[tuple[int, str], TensorInfo]) -> None:
        # `ends` has the targets of results, by the place of the statement and the name.
        self._sources = sources
        self._ends = ends
        self.made_by: dict[str, Step] = {}  # the step that assigned a name
        self.values: dict[str, Node] = {}
        # By name, the number of the statement.
        self.added: dict[str, int] = {}  # names that keep their initial value
        self.deleted: dict[str, int] = {}  # names of sources that are not wanted
        self.unread: dict[str, None] = {}  # names bound to something that no statement has read
        self.read: dict[str, None] = {}  # sources that a statement has read

    def error(self, name: str, message: str, hints: Sequence[str] = ()) -> TransformError:
        """An error where a name was assigned."""
        step = self.made_by[name]
        span = next((o.origin.span for o in step.right if o.name == name), None)
        return step.error(message, span, hints)

    def execute(self, steps: Sequence[Step]) -> None:
        """Execute the steps of a statement, which all read before any assigns."""
        results = [(step, self._apply(step)) for step in steps if step.left and step.right]
        for step in steps:
            if not step.left:
                self._add(step)
            elif not step.right:
                self._delete(step)
        for step, values in results:
            for operand, value in zip(step.right, values, strict=True):
                name = operand.name
                self.values[name] = value
                self.made_by[name] = step
                self.unread[name] = None
                self.added.pop(name, None)
                self.deleted.pop(name, None)

    def _apply(self, step: Step) -> list[Node]:
        """What the names right of the arrow are bound to."""
        operator = step.statement.operator
        try:
            nodes = [self._read(operand) for operand in step.left]
            if nodes[0].dtype == PLAIN and not operator.passes_on:
                raise Problem(f"{step.left[0].name!r} is a plain value, which has no elements")
            ends = self._ends_of(step, nodes) if operator.needs_ends else Ends()
            results = operator.apply(step, nodes, ends)
            return [_made(operand, n) for operand, n in zip(step.right, results, strict=True)]
        except Problem as problem:
            raise step.error(str(problem), problem.span, problem.hints) from None

    def _ends_of(self, step: Step, nodes: Sequence[Node]) -> Ends:
        source = self._sources.origin(nodes[0]) if len(nodes) == 1 else None
        return Ends(source, tuple(self._target_of(step, operand) for operand in step.right))

    def _target_of(self, step: Step, operand: Operand) -> TensorInfo | None:
        """The target of a result, before `^T` on the right is undone."""
        info = self._ends.get((step.position, operand.name))
        if info is None or not operand.origin.transposed:
            return info
        return info.permuted(range(len(info.shape))[::-1])

    def _read(self, operand: Operand) -> Node:
        name = operand.name
        node = self.values.get(name)
        if node is None:
            node = self._read_source(operand)
        else:
            self.unread.pop(name, None)
        return reverse_axes(node) if operand.origin.transposed else node

    def _read_source(self, operand: Operand) -> Leaf:
        name, span = operand.name, operand.origin.span
        if name in self.added:
            raise Problem(
                f"{name!r} keeps its initial value (statement {self.added[name]}), so there is "
                "nothing to make of it",
                span,
            )
        if name in self.deleted:
            raise Problem(f"{name!r} has been deleted by statement {self.deleted[name]}", span)
        leaf = self._sources.leaf(name)
        if leaf is None:
            hints = self._sources.nearest(name)
            raise Problem(f"there is no source and no earlier result {name!r}", span, hints)
        self.read[name] = None
        return leaf

    def _add(self, step: Step) -> None:
        for operand in step.right:
            self.added[operand.name] = step.statement.number
            self._forget(operand.name)

    def _delete(self, step: Step) -> None:
        for operand in step.left:
            name = operand.name
            if name not in self.values and self._sources.leaf(name) is None:
                raise step.error(
                    f"there is no source {name!r} to delete",
                    operand.origin.span,
                    self._sources.nearest(name),
                )
            self.deleted[name] = step.statement.number
            self.added.pop(name, None)
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.values.pop(name, None)
        self.unread.pop(name, None)


def _made(operand: Operand, node: Node) -> Node:
    """A result as the name that it is bound to says."""
    if node.depth > MAX_DEPTH:
        raise Problem(f"{operand.name!r} is built of more than {MAX_DEPTH} nested operations")
    return reverse_axes(node) if operand.origin.transposed else node
