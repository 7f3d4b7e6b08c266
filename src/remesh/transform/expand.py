"""Macros in names: one statement with wildcards to many *steps* with plain names.

In this order, statement by statement:

1. placeholders (`$LAYER_ID`): one step for each combination of numbers for which a name left of
   the arrow exists (right of it, for `_ -> ...`);
2. arrays: `q[0:2]` becomes `q_0, q_1`;
3. `*`: the names that exist, in the order of their numbers. Left of the arrow sources are
   searched, right of it targets.

Left of an arrow, those names exist that a literal name could refer to at this point: sources, and
what earlier statements assigned, less what they deleted. All steps of one statement belong
together: they read what was there before the statement, so `l.$LAYER_ID -> l.$LAYER_ID+1` shifts.

Steps keep their statement and the numbers of their placeholders, from which an error message shows
each expansion; it is made only when there is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from remesh.errors import TransformError
from remesh.transform import messages
from remesh.transform.optimizer_state import is_state_like
from remesh.transform.patterns import (
    Binding,
    NameIndex,
    Pattern,
    bindings_of,
    filled,
    substitute,
)
from remesh.transform.syntax import Name, Span, Statement, Wildcard

_MAX_NAMES = 1_000_000


@dataclass(frozen=True, slots=True)
class Operand:
    """A plain name in a step, and the name in the statement that it came from."""

    name: str
    origin: Name


@dataclass(frozen=True, slots=True)
class Step:
    """A statement with plain names: what is executed."""

    statement: Statement
    position: int  # its place in the program, from 0
    binding: Binding  # the numbers that placeholders stand for
    left: tuple[Operand, ...]  # the operands that it reads; none if it adds
    right: tuple[Operand, ...]  # the operands that it assigns; none if it deletes

    def error(
        self, message: str, at: Operand | Span | None = None, hints: Sequence[str] = ()
    ) -> TransformError:
        """An error in this step, `at` an operand or a place in the text, else its operator."""
        span = at.origin.span if isinstance(at, Operand) else at or self.statement.operator_span
        return messages.statement_error(message, self.statement, span, self.expansions(), hints)

    def expansions(self) -> list[tuple[str, str]]:
        """The expansion of the statement by each macro: (macro, text), as they are evaluated."""
        statement = self.statement
        names = (*statement.left, *statement.right)
        made = _placeholders_filled(statement, self.binding)
        if (self.left or self.right) and any(name.is_many for name in names):
            arrays = any(name.array is not None for name in names)
            stars = any(
                isinstance(piece, Wildcard) and piece.name == "*"
                for name in names
                for piece in name.pieces
            )
            macro = " and ".join([*(["array"] if arrays else []), *(["*"] if stars else [])])
            made.append((macro, str(self)))
        if any(operand.origin.transposed for operand in self.left):
            made.append(("^T", "the marked names are transposed before anything else"))
        explanation = statement.operator.explain()
        return [*made, *([explanation] if explanation else [])]

    def __str__(self) -> str:
        left, right = (_operands_text(side) for side in (self.left, self.right))
        return f"{left} -> {right}{self.statement.operator}"


def _operands_text(operands: Sequence[Operand]) -> str:
    shown = [f"{o.name}^T" if o.origin.transposed else o.name for o in operands[:4]]
    if len(operands) > len(shown):
        shown[-1] = f"... ({len(operands)} names in all)"
    return ", ".join(shown)


def _placeholders_filled(statement: Statement, binding: Binding) -> list[tuple[str, str]]:
    if not binding:
        return []
    values = ", ".join(f"${name}={digits}" for name, digits in binding)
    sides = []
    for names in (statement.left, statement.right):
        texts = []
        for name in names:
            pieces = substitute(name, binding)
            text = "".join(map(str, pieces)) if pieces is not None else "(no such number)"
            array = f"[{name.array[0]}:{name.array[1]}]" if name.array else ""
            texts.append(f"{text}{array}{'^T' if name.transposed else ''}")
        sides.append(", ".join(texts))
    return [(values, f"{sides[0]} -> {sides[1]}{statement.operator}")]


class Expander:
    """Expands statements one after the other, keeping track of which names exist.

    `sources` are the names of sources, and of parameters whose optimizer state is a source;
    `states` those that are optimizer state; `targets` gives the names of targets likewise, or is
    None if they are not known. `original_names` returns the names that a name with a star matched
    in the statement that a step undoes; empty if it undoes none.
    """

    def __init__(
        self,
        sources: Iterable[str],
        states: Iterable[str],
        targets: Callable[[], Iterable[str]] | None,
        original_names: Callable[[Step, Name], list[str]],
    ) -> None:
        self._source_names = sources
        self._state_names = states
        self._original_names = original_names
        self._target_names = targets
        self._sources: NameIndex | None = None
        self._has_states = False
        self._targets: NameIndex | None = None
        self._assigned: dict[str, None] = {}
        self._deleted: set[str] = set()
        self._num_expanded = 0

    def expand(self, statement: Statement) -> tuple[Step, ...]:
        steps = tuple(self._step(statement, binding) for binding in self._bindings(statement))
        seen: set[str] = set()
        for step in steps:
            for operand in step.right or step.left:
                if operand.name in seen:
                    raise step.error(
                        f"{operand.name!r} stands twice on this side of the statement", operand
                    )
                seen.add(operand.name)
        self._record(steps)
        self._num_expanded += 1
        return steps

    def _record(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if not step.right:
                self._deleted.update(operand.name for operand in step.left)
            for operand in step.right:
                self._deleted.discard(operand.name)
                self._assigned[operand.name] = None
                if self._sources is not None:
                    self._sources.add(operand.name)

    def _source_index(self, pattern: Pattern) -> NameIndex:
        if self._sources is None:
            self._sources = NameIndex([*self._source_names, *self._assigned])
        if not self._has_states and is_state_like(pattern.form):
            # Statements rarely name optimizer states, and there are many of them.
            self._has_states = True
            for name in self._state_names:
                self._sources.add(name)
        return self._sources

    def _target_index(self) -> NameIndex:
        if self._targets is None:
            self._targets = NameIndex(self._target_names() if self._target_names else ())
        return self._targets

    def _bindings(self, statement: Statement) -> list[Binding]:
        """Every combination of numbers for the placeholders of a statement."""
        is_add = statement.adds
        names = statement.right if is_add else statement.left
        if not any(name.placeholders for name in names):
            return [()]
        excluded: set[str] = set() if is_add else self._deleted
        found: dict[Binding, None] = {}
        for name in names:
            pattern = Pattern.of(_first_of_array(name.pieces, name))
            index = self._target_index() if is_add else self._source_index(pattern)
            found.update(dict.fromkeys(bindings_of(pattern, index, excluded)))
        if not found and not (is_add and self._target_names is None):
            where = "target" if is_add else "source"
            raise messages.statement_error(
                f"no {where} matches {str(names[0])!r}",
                statement,
                names[0].span,
                hints=self._nearest(names[0].pieces, in_targets=is_add),
            )
        return list(found)

    def _nearest(self, pieces: Sequence[str | Wildcard], *, in_targets: bool) -> list[str]:
        text = "".join("0" if isinstance(piece, Wildcard) else piece for piece in pieces)
        if not in_targets:
            return messages.nearest(
                text, [*self._source_names, *self._state_names, *self._assigned]
            )
        return messages.nearest(text, self._target_names() if self._target_names else ())

    def _step(self, statement: Statement, binding: Binding) -> Step:
        draft = Step(statement, self._num_expanded, binding, (), ())
        left = [o for name in statement.left for o in self._operands(draft, name, is_left=True)]
        right = [o for name in statement.right for o in self._operands(draft, name, is_left=False)]
        if max(len(left), len(right)) > _MAX_NAMES:
            raise draft.error(f"this stands for more than {_MAX_NAMES} names")
        return Step(statement, self._num_expanded, binding, tuple(left), tuple(right))

    def _operands(self, draft: Step, name: Name, *, is_left: bool) -> list[Operand]:
        literal = name.literal
        if literal is not None:
            return [] if name.is_nothing else [Operand(literal, name)]
        pieces = substitute(name, draft.binding)
        if pieces is None:
            raise draft.error(f"{name} would have a negative number", name.span)
        if name.array is None:
            return [Operand(text, name) for text in self._stars(draft, name, pieces, is_left)]
        start, stop = name.array
        if stop - start > _MAX_NAMES:
            raise draft.error(f"this stands for more than {_MAX_NAMES} names", name.span)
        return [
            Operand(text, name)
            for number in range(start, stop)
            for text in self._stars(draft, name, (*pieces, f"_{number}"), is_left)
        ]

    def _stars(
        self, draft: Step, name: Name, pieces: Sequence[str | Wildcard], is_left: bool
    ) -> list[str]:
        """The names that pieces with `*` match; the name itself if there is none."""
        if not any(isinstance(piece, Wildcard) for piece in pieces):
            return ["".join(map(str, pieces))]
        pattern = Pattern.of(pieces)
        index = self._source_index(pattern) if is_left else self._target_index()
        found = [filled(pattern, numbers) for numbers in index.match(pattern)]
        if is_left and self._deleted:
            found = [text for text in found if text not in self._deleted]
        if not is_left and not found:
            found = self._original_names(draft, name) or _numbered(draft, pieces)
        if not found:
            raise self._unmatched(draft, name, pieces, is_left)
        return found

    def _unmatched(
        self, draft: Step, name: Name, pieces: Sequence[str | Wildcard], is_left: bool
    ) -> TransformError:
        if not is_left and self._target_names is None:
            return draft.error(
                "without targets, nothing tells how many names '*' stands for",
                name.span,
                ["add parts= with their number, or give the targets"],
            )
        where = "source" if is_left else "target"
        text = "".join(map(str, pieces))
        hints = self._nearest(pieces, in_targets=not is_left)
        return draft.error(f"no {where} matches {text!r}", name.span, hints)


def _first_of_array(pieces: Sequence[str | Wildcard], name: Name) -> tuple[str | Wildcard, ...]:
    return tuple(pieces) if name.array is None else (*pieces, f"_{name.array[0]}")


def _numbered(draft: Step, pieces: Sequence[str | Wildcard]) -> list[str]:
    """The names of a star that no target matches, if the statement says how many: 0, 1, 2, ..."""
    num_parts = draft.statement.operator.num_parts if len(draft.statement.right) == 1 else 0
    if num_parts > _MAX_NAMES:
        raise draft.error(f"this stands for more than {_MAX_NAMES} names")
    return [
        "".join(str(number) if isinstance(piece, Wildcard) else piece for piece in pieces)
        for number in range(num_parts)
    ]
