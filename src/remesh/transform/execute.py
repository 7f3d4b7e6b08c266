"""Executing the steps of statements: names are bound to tensors, statement by statement.

Nothing is computed. A name is bound to a node of the graph that `remesh.transform.expressions`
describes; every shape and dtype is checked on the way, so that a mistake is found where it was
made. A name stands for what it was last bound to, else for the source of that name.
"""

from __future__ import annotations

from collections.abc import Sequence

from remesh.transform.expand import Operand, Step
from remesh.transform.expressions import MAX_DEPTH
from remesh.transform.layout import Layout
from remesh.transform.operator_base import Axes, Problem, Value, merge_labels, transposed
from remesh.transform.rearrange import Shape


class Bindings:
    """Executes steps, and knows what they have made of names so far."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sources = layout.sources
        self._source_axes: dict[str, Axes] = {}
        self.values: dict[str, Value] = {}
        self.added: dict[str, Step] = {}  # names that keep their initial value
        self.deleted: dict[str, Step] = {}  # names of sources that are not wanted
        self.made_by: dict[str, Step] = {}
        self.unread: dict[str, None] = {}  # names bound to something that no statement has read
        self.read: dict[str, None] = {}  # sources that a statement has read
        # By the statement's number and the name.
        self.read_shapes: dict[tuple[int, str], Shape] = {}

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
                self._assign(step, operand, value)

    def _apply(self, step: Step) -> list[Value]:
        values = [self._read(step, operand) for operand in step.left]
        try:
            return step.statement.operator.apply(step, values, self._layout)
        except Problem as problem:
            raise step.error(str(problem), problem.span, problem.hints) from None

    def _read(self, step: Step, operand: Operand) -> Value:
        name = operand.name
        value = self.values.get(name)
        if value is not None:
            self.unread.pop(name, None)
        else:
            value = self._read_source(step, operand)
        self.read_shapes[step.statement.number, name] = value.node.shape
        axes = merge_labels(step, operand, value.axes, operand.origin.axes)
        value = Value(value.node, axes)
        if name not in self.values:
            self._source_axes[name] = axes
        return transposed(value) if operand.origin.transposed else value

    def _read_source(self, step: Step, operand: Operand) -> Value:
        name = operand.name
        if name in self.added:
            number = self.added[name].statement.number
            raise step.error(
                f"{name!r} keeps its initial value (statement {number}), so there is nothing to "
                "make of it",
                operand,
            )
        if name in self.deleted:
            number = self.deleted[name].statement.number
            raise step.error(f"{name!r} has been deleted by statement {number}", operand)
        leaf = self._sources.leaf(name)
        if leaf is None:
            raise step.error(
                f"there is no source and no earlier result {name!r}",
                operand,
                self._sources.nearest(name),
            )
        self.read[name] = None
        return Value(leaf, self._source_axes.get(name, (None,) * len(leaf.shape)))

    def _assign(self, step: Step, operand: Operand, value: Value) -> None:
        if operand.origin.transposed:
            value = transposed(value)
        axes = merge_labels(step, operand, value.axes, operand.origin.axes)
        if value.node.depth > MAX_DEPTH:
            raise step.error(
                f"{operand.name!r} is built of more than {MAX_DEPTH} nested operations"
            )
        self.values[operand.name] = Value(value.node, axes)
        self.made_by[operand.name] = step
        self.unread[operand.name] = None
        self.added.pop(operand.name, None)
        self.deleted.pop(operand.name, None)

    def _add(self, step: Step) -> None:
        for operand in step.right:
            self.added[operand.name] = step
            self._forget(operand.name)

    def _delete(self, step: Step) -> None:
        for operand in step.left:
            name = operand.name
            if name not in self.values and self._sources.leaf(name) is None:
                hints = self._sources.nearest(name)
                raise step.error(f"there is no source {name!r} to delete", operand, hints)
            self.deleted[name] = step
            self.added.pop(name, None)
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.values.pop(name, None)
        self.unread.pop(name, None)
