"""Wildcards: one statement with wildcards to many *steps* with plain names.

In this order, statement by statement:

1. placeholders (`$LAYER_ID`): one step for each combination of numbers for which a name left of
   the arrow exists (right of it, for `_ -> ...`);
2. arrays: `q[0:2]` becomes `q_0, q_1`;
3. `*`: the names that exist, in the order of their numbers. Left of the arrow sources are
   searched, right of it targets.

Left of an arrow, those names exist that a literal name could refer to at this point: sources, and
what earlier statements assigned, less what they deleted. All steps of one statement belong
together: they read what was there before the statement, so `l.$LAYER_ID -> l.$LAYER_ID+1` shifts.

No pattern is compared with every name. A wildcard stands for a whole run of digits. So a name has a
*form*, itself with every run of digits blanked out, and its *numbers*, those runs; and a pattern
can only match names of its own form. Within a form, names are filed under the numbers that a
pattern fixes, once for each choice of places that patterns fix. Rules for a hundred layers thus
cost a look-up each.

Steps keep their statement and the numbers of their placeholders, from which an error message shows
each expansion; it is made only when there is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from remesh.errors import TransformError
from remesh.transform import syntax
from remesh.transform.operators import Operand, Operands
from remesh.transform.statements import Statement
from remesh.transform.syntax import STAR, Name, Pieces, Problem, Span, Wildcard

Binding = tuple[tuple[str, str], ...]
"""The digits that each placeholder stands for."""
Numbers = tuple[str, ...]

_DIGITS = re.compile("([0-9]+)")
_BLANK = "\0"
_MAX_DIGITS = 18
_MAX_NAMES = 1_000_000

# ---------------------------------------------------------------------------------------------
# Names that a pattern stands for
# ---------------------------------------------------------------------------------------------


def form_of(name: str) -> tuple[str, Numbers]:
    """The form and the numbers of a name."""
    parts = _DIGITS.split(name)
    return _BLANK.join(parts[::2]), tuple(parts[1::2])


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name with wildcards, ready to be looked up."""

    form: str  # its form, wildcards blanked out like numbers
    fixed: tuple[tuple[int, str], ...]  # (place, number) of the numbers that are written out
    wildcards: tuple[tuple[int, Wildcard], ...]  # (place, wildcard) of the others

    @classmethod
    def of(cls, pieces: Pieces) -> Pattern:
        form: list[str] = []
        fixed: list[tuple[int, str]] = []
        wildcards: list[tuple[int, Wildcard]] = []
        place = 0
        for piece in pieces:
            if isinstance(piece, Wildcard):
                form.append(_BLANK)
                wildcards.append((place, piece))
                place += 1
                continue
            text, numbers = form_of(piece)
            form.append(text)
            fixed += enumerate(numbers, place)
            place += len(numbers)
        return cls("".join(form), tuple(fixed), tuple(wildcards))

    def filled(self, numbers: Numbers) -> str:
        """The name that it matched with these numbers."""
        by_place = dict(self.fixed)
        by_place.update(
            (place, digits) for (place, _), digits in zip(self.wildcards, numbers, strict=True)
        )
        first, *rest = self.form.split(_BLANK)
        return first + "".join(by_place[place] + text for place, text in enumerate(rest))

    def binding(self, numbers: Numbers) -> Binding | None:
        """The numbers that placeholders stand for in such a name; None if they contradict.

        A placeholder with an offset stands for the number found less the offset.
        """
        values: dict[str, str] = {}
        for (_, wildcard), digits in zip(self.wildcards, numbers, strict=True):
            if wildcard.name == STAR:
                continue
            value = _shifted(digits, -wildcard.offset)
            if value is None or values.setdefault(wildcard.name, value) != value:
                return None
        return tuple(sorted(values.items()))


def _shifted(digits: str, offset: int) -> str | None:
    """The number that is `offset` away from the given one; None if that is no usable number."""
    if not offset:
        return digits
    if len(digits) > _MAX_DIGITS:
        return None
    number = int(digits) + offset
    return str(number) if number >= 0 else None


def _substituted(name: Name, binding: Binding) -> Pieces | None:
    """The pieces of a name with its placeholders filled in; None if a number becomes negative."""
    values = dict(binding)
    pieces: list[str | Wildcard] = []
    for piece in name.pieces:
        if isinstance(piece, Wildcard) and piece.name != STAR:
            digits = _shifted(values[piece.name], piece.offset)
            if digits is None:
                return None
            pieces.append(digits)
        else:
            pieces.append(piece)
    return tuple(pieces)


@dataclass(slots=True)
class _Forms:
    """All names of one form: their numbers, and the files they are kept in."""

    numbers: dict[Numbers, None] = field(default_factory=dict)
    files: dict[tuple[int, ...], dict[Numbers, list[Numbers]]] = field(default_factory=dict)


class NameIndex:
    """A growing set of names that answers patterns."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._forms: dict[str, _Forms] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        if _BLANK in name:
            return  # no pattern can match it
        form, numbers = form_of(name)
        filed = self._forms.get(form)
        if filed is None:
            filed = self._forms[form] = _Forms()
        if numbers in filed.numbers:
            return
        filed.numbers[numbers] = None
        for places, groups in filed.files.items():
            groups.setdefault(tuple(numbers[p] for p in places), []).append(numbers)

    def match(self, pattern: Pattern) -> list[Numbers]:
        """The numbers of the wildcards of every name that the pattern matches, sorted."""
        filed = self._forms.get(pattern.form)
        if filed is None:
            return []
        places = tuple(place for place, _ in pattern.fixed)
        groups = filed.files.get(places)
        if groups is None:
            groups = filed.files[places] = {}
            for numbers in filed.numbers:
                groups.setdefault(tuple(numbers[p] for p in places), []).append(numbers)
        found = groups.get(tuple(number for _, number in pattern.fixed), [])
        wanted = [place for place, _ in pattern.wildcards]
        matches = [tuple(numbers[place] for place in wanted) for numbers in found]
        return sorted(matches, key=lambda match: [_number_key(digits) for digits in match])


def _number_key(digits: str) -> tuple[int, str, str]:
    """Sort key of a run of digits: by value, without making an integer of it."""
    significant = digits.lstrip("0")
    return len(significant), significant, digits


# ---------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step(Operands):
    """A statement with plain names: what is executed."""

    statement: Statement
    position: int  # its place in the program, from 0
    binding: Binding  # the numbers that placeholders stand for

    def error(
        self, message: str, span: Span | None = None, hints: Sequence[str] = ()
    ) -> TransformError:
        """An error in this step, at a place in the text, else at its operator."""
        at = span or self.statement.operator_span
        return self.statement.error(message, at, hints, self._expansions())

    def _expansions(self) -> list[tuple[str, str]]:
        """The expansion of the statement by each macro: (macro, text), as they are evaluated."""
        statement = self.statement
        names = (*statement.left, *statement.right)
        made = []
        if self.binding:
            values = ", ".join(f"${name}={digits}" for name, digits in self.binding)
            sides = (
                ", ".join(_filled_in(name, self.binding) for name in side)
                for side in (statement.left, statement.right)
            )
            made.append((values, f"{' -> '.join(sides)}{statement.operator}"))
        macros = ["array"] if any(name.array is not None for name in names) else []
        macros += ["*"] if any(name.has_star for name in names) else []
        if (self.left or self.right) and macros:
            sides = (_operands_text(side) for side in (self.left, self.right))
            made.append((" and ".join(macros), f"{' -> '.join(sides)}{statement.operator}"))
        if any(operand.origin.transposed for operand in self.left):
            made.append(("^T", "the marked names are transposed before anything else"))
        explanation = statement.operator.explain()
        return [*made, (statement.operator.leads[0], explanation)] if explanation else made


def _filled_in(name: Name, binding: Binding) -> str:
    pieces = _substituted(name, binding)
    text = "(no such number)" if pieces is None else "".join(map(str, pieces))
    array = f"[{name.array[0]}:{name.array[1]}]" if name.array else ""
    return f"{text}{array}{'^T' if name.transposed else ''}"


def _operands_text(operands: Sequence[Operand]) -> str:
    shown = [f"{o.name}^T" if o.origin.transposed else o.name for o in operands[:4]]
    if len(operands) > len(shown):
        shown[-1] = f"... ({len(operands)} names in all)"
    return ", ".join(shown)


class Expander:
    """Expands statements one after the other, keeping track of which names exist.

    Names of sources and targets include parameters of which there is only optimizer state.
    """

    def __init__(
        self,
        sources: Iterable[str],
        targets: Callable[[], Iterable[str]] | None,
    ) -> None:
        self._source_names = sources
        self._target_names = targets
        self._sources: NameIndex | None = None
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
                        f"{operand.name!r} stands twice on this side of the statement",
                        operand.origin.span,
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

    def _source_index(self) -> NameIndex:
        if self._sources is None:
            self._sources = NameIndex([*self._source_names, *self._assigned])
        return self._sources

    def _target_index(self) -> NameIndex:
        if self._targets is None:
            self._targets = NameIndex(self._target_names() if self._target_names else ())
        return self._targets

    def _bindings(self, statement: Statement) -> Iterable[Binding]:
        """Every combination of numbers for the placeholders of a statement."""
        is_add = statement.adds
        names = statement.right if is_add else statement.left
        if not any(name.placeholders for name in names):
            return [()]
        found: dict[Binding, None] = {}
        for name in names:
            array = () if name.array is None else (f"_{name.array[0]}",)
            pattern = Pattern.of((*name.pieces, *array))
            index = self._target_index() if is_add else self._source_index()
            for numbers in index.match(pattern):
                binding = pattern.binding(numbers)
                is_gone = not is_add and self._deleted and pattern.filled(numbers) in self._deleted
                if binding is not None and not is_gone:
                    found[binding] = None
        if not found and not (is_add and self._target_names is None):
            problem = self._unmatched(names[0], names[0].pieces, in_targets=is_add)
            raise statement.error(str(problem), problem.span, problem.hints)
        return found

    def _unmatched(self, name: Name, pieces: Pieces, *, in_targets: bool) -> Problem:
        where = "target" if in_targets else "source"
        known = [*self._source_names, *self._assigned]
        if in_targets:
            known = list(self._target_names() if self._target_names else ())
        like = "".join("0" if isinstance(piece, Wildcard) else piece for piece in pieces)
        text = "".join(map(str, pieces))
        hints = syntax.nearest(like, known)
        return Problem(f"no {where} matches {text!r}", name.span, hints)

    def _step(self, statement: Statement, binding: Binding) -> Step:
        try:
            left, right = (
                tuple(
                    operand
                    for name in names
                    for operand in self._operands(binding, name, is_left=is_left)
                )
                for names, is_left in ((statement.left, True), (statement.right, False))
            )
            if max(len(left), len(right)) > _MAX_NAMES:
                raise _too_many(None)
        except Problem as problem:
            step = Step((), (), statement, self._num_expanded, binding)
            raise step.error(str(problem), problem.span, problem.hints) from None
        return Step(left, right, statement, self._num_expanded, binding)

    def _operands(self, binding: Binding, name: Name, *, is_left: bool) -> list[Operand]:
        literal = name.literal
        if literal is not None:
            return [] if name.is_nothing else [Operand(literal, name)]
        pieces = _substituted(name, binding)
        if pieces is None:
            raise Problem(f"{name} would have a negative number", name.span)
        expanded = [pieces]
        if name.array is not None:
            start, stop = name.array
            if stop - start > _MAX_NAMES:
                raise _too_many(name.span)
            expanded = [(*pieces, f"_{number}") for number in range(start, stop)]
        if not name.has_star:
            return [Operand("".join(map(str, one)), name) for one in expanded]
        return [
            Operand(text, name)
            for one in expanded
            for text in self._stars(name, one, is_left=is_left)
        ]

    def _stars(self, name: Name, pieces: Pieces, *, is_left: bool) -> list[str]:
        """The names that pieces with `*` match."""
        pattern = Pattern.of(pieces)
        index = self._source_index() if is_left else self._target_index()
        found = [pattern.filled(numbers) for numbers in index.match(pattern)]
        if is_left:
            found = [text for text in found if text not in self._deleted]
        if found:
            return found
        if not is_left and self._target_names is None:
            raise Problem(
                "without targets, nothing tells how many names '*' stands for",
                name.span,
                ["write the names out, or give the targets"],
            )
        raise self._unmatched(name, pieces, in_targets=not is_left)


def _too_many(span: Span | None) -> Problem:
    return Problem(f"this stands for more than {_MAX_NAMES} names", span)
