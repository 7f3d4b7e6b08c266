"""Executing the steps of statements: names are bound to tensors, statement by statement.

Nothing is computed. A name is bound to a node of the graph that `remesh.transform.expressions`
describes; every shape and dtype is checked on the way, so that a mistake is found where it was
made. A name stands for what it was last bound to, else for the source of that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remesh.errors import TransformError
from remesh.transform.expressions import MAX_DEPTH
from remesh.transform.layout import Sources
from remesh.transform.messages import Problem
from remesh.transform.operators import Axes, Ends, Operand, Value, with_labels
from remesh.transform.rearrange import Shape
from remesh.transform.renames import Renaming
from remesh.transform.syntax import Span
from remesh.transform.tensor_info import TensorInfo
from remesh.transform.wildcards import Step


class Bindings:
    """Executes steps, and knows what they have made of names so far."""

    def __init__(self, sources: Sources, ends: Mapping[tuple[int, str], TensorInfo]) -> None:
        # `ends` has the targets of results, by the place of the statement and the name.
        self._sources = sources
        self._ends = ends
        self._source_axes: dict[str, Axes] = {}
        self._made_by: dict[str, Step | Renaming] = {}
        self.values: dict[str, Value] = {}
        # By name, the number of the statement.
        self.added: dict[str, int] = {}  # names that keep their initial value
        self.deleted: dict[str, int] = {}  # names of sources that are not wanted
        self.unread: dict[str, None] = {}  # names bound to something that no statement has read
        self.read: dict[str, None] = {}  # sources that a statement has read
        # By the statement's number and the name.
        self.read_shapes: dict[tuple[int, str], Shape] = {}

    def rename(self, renames: Mapping[str, str | None]) -> None:
        """Delete the sources that become None, then give the others new names, all at once."""
        in_order = sorted(renames.items(), key=lambda pair: pair[1] is not None)
        for number, (old, new) in enumerate(in_order, 1):
            renaming = Renaming(number, old, new)
            leaf = self._sources.leaf(old)
            if leaf is None:
                problem = self._no_source(old)
                raise renaming.step().error(str(problem), problem.span, problem.hints)
            if new is None:
                self.deleted[old] = number
                continue
            self.deleted.pop(new, None)
            self.values[new] = Value(leaf, (None,) * len(leaf.shape))
            self._made_by[new] = renaming
            self.unread[new] = None
            self.read[old] = None

    def step_of(self, name: str) -> Step:
        """The step that assigned a name."""
        made = self._made_by[name]
        return made.step() if isinstance(made, Renaming) else made

    def error(self, name: str, message: str, hints: Sequence[str] = ()) -> TransformError:
        """An error where a name was assigned."""
        step = self.step_of(name)
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
                self._made_by[name] = step
                self.unread[name] = None
                self.added.pop(name, None)
                self.deleted.pop(name, None)

    def _apply(self, step: Step) -> list[Value]:
        """What the names right of the arrow are bound to."""
        operator = step.statement.operator
        try:
            values = [self._read(step, operand) for operand in step.left]
            ends = self._ends_of(step, values) if operator.needs_ends else Ends()
            results = operator.apply(step, values, ends)
            return [_made(operand, v) for operand, v in zip(step.right, results, strict=True)]
        except Problem as problem:
            raise step.error(str(problem), problem.span, problem.hints) from None

    def _ends_of(self, step: Step, values: Sequence[Value]) -> Ends:
        source = self._sources.origin(values[0].node) if len(values) == 1 else None
        return Ends(source, tuple(self._target_of(step, operand) for operand in step.right))

    def _target_of(self, step: Step, operand: Operand) -> TensorInfo | None:
        """The target of a result, before `^T` on the right is undone."""
        info = self._ends.get((step.position, operand.name))
        if info is None or not operand.origin.transposed:
            return info
        return info.permuted(range(len(info.shape))[::-1])

    def _read(self, step: Step, operand: Operand) -> Value:
        name = operand.name
        value = self.values.get(name)
        if value is None:
            value = with_labels(operand, self._read_source(operand))
            self._source_axes[name] = value.axes
        else:
            self.unread.pop(name, None)
            value = with_labels(operand, value)
        self.read_shapes[step.statement.number, name] = value.node.shape
        return value.transposed() if operand.origin.transposed else value

    def _read_source(self, operand: Operand) -> Value:
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
            raise self._no_source(name, span)
        self.read[name] = None
        return Value(leaf, self._source_axes.get(name, (None,) * len(leaf.shape)))

    def _no_source(self, name: str, span: Span | None = None) -> Problem:
        hints = self._sources.nearest(name)
        return Problem(f"there is no source and no earlier result {name!r}", span, hints)

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


def _made(operand: Operand, value: Value) -> Value:
    """A result as the name that it is bound to says."""
    if value.node.depth > MAX_DEPTH:
        raise Problem(f"{operand.name!r} is built of more than {MAX_DEPTH} nested operations")
    return with_labels(operand, value.transposed() if operand.origin.transposed else value)
