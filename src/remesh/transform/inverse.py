"""Turning statements around.

`reverse` does what the notation suggests: last statement first, left and right exchanged, each
operator replaced by its opposite. Whether that undoes the statements is not checked.

`invert` gives statements that do undo them, or fails. It follows every *version* of a name: the
source's, and each that a statement assigns. A statement can be undone if all versions that it
assigned can be restored: a version without readers must not be overwritten, one with readers is
restored from one of them. A version with several readers is restored several times; these copies
must agree, so they are tied. Names with wildcards count as one name, provided that no other name in
the program may match the same tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from remesh.errors import TransformError
from remesh.transform.operators import Operator, Tie
from remesh.transform.statements import Statement
from remesh.transform.syntax import STAR, Name, Pieces, Problem, Wildcard, are_many
from remesh.transform.wildcards import Pattern

Key = tuple[Pieces, tuple[int, int] | None]


def reverse(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """The statements from last to first, each turned around."""
    return tuple(
        _turned(statement, lambda operator: operator.opposite())
        for statement in reversed(statements)
    )


def invert(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """Statements that undo the given ones."""
    history = _History(statements)
    result: list[Statement] = []
    num_copies = 0
    for number in reversed(range(len(statements))):
        if not history.is_undone[number]:
            continue
        turned = _turned(statements[number], lambda operator: operator.undo())
        if turned.deletes:
            result.append(turned)
            continue
        names: list[Name] = []
        for name, version in zip(turned.right, history.read[number], strict=True):
            if history.num_readings(version) > 1:
                num_copies += 1
                copy = _copy_of(name, num_copies, turned)
                version.copies.append(copy)
                names.append(copy)
            else:
                names.append(name)
        result.append(replace(turned, right=tuple(names)))
        for name, version in zip(turned.right, history.read[number], strict=True):
            if len(version.copies) > 1 and history.num_readings(version) == len(version.copies):
                result.append(_tie(turned, version.copies, name))
                version.copies = []
    return tuple(result)


# ---------------------------------------------------------------------------------------------
# One statement
# ---------------------------------------------------------------------------------------------


def _turned(statement: Statement, turn: Callable[[Operator], Operator]) -> Statement:
    """A statement with left and right exchanged, and its operator turned around."""
    try:
        operator = turn(statement.operator)
    except Problem as problem:
        raise statement.error(str(problem), statement.operator_span, problem.hints) from None
    return replace(
        statement,
        left=statement.right,
        right=statement.left,
        operator=operator,
        is_reversed=not statement.is_reversed,
    )


def _tie(like: Statement, copies: Sequence[Name], name: Name) -> Statement:
    return replace(
        like,
        left=tuple(replace(copy, transposed=False) for copy in copies),
        right=(replace(name, transposed=False),),
        operator=Tie(),
    )


COPY = re.compile(r"_copy[0-9]+\.")
"""The beginning of a name of one of several copies."""


def _copy_of(name: Name, number: int, statement: Statement) -> Name:
    """A name for one of several copies that are compared before they become `name`."""
    if are_many([name]):
        raise statement.error(
            f"{name} is read more than once\nIts copies would have to be compared, which is "
            "only possible for names without * and [:]",
            name.span,
        )
    return replace(name, pieces=(f"_copy{number}.", *name.pieces))


# ---------------------------------------------------------------------------------------------
# What becomes of every version of every name
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Version:
    """The tensor that a name stands for between two assignments."""

    name: Name
    maker: int | None  # the statement that assigned it; None for a source
    readers: list[int] = field(default_factory=list)
    """Statements that read it, once for each time they name it."""
    overwriter: int | None = None  # the statement that assigned the name again
    copies: list[Name] = field(default_factory=list)
    """Names under which it comes back, if more than one."""


class _History:
    """Versions of names throughout a program, and which statements can be undone."""

    def __init__(self, statements: Sequence[Statement]) -> None:
        self.statements = statements
        self.read: list[list[_Version]] = []  # of each statement, name by name
        self.made: list[list[_Version]] = []
        current: dict[Key, _Version] = {}
        sources: list[_Version] = []
        _check_no_overlap(statements)
        for number, statement in enumerate(statements):
            if statement.deletes:
                raise statement.error("what is deleted cannot be restored, so there is no inverse")
            readings = []
            for name in () if statement.adds else statement.left:
                version = current.get(_key(name))
                if version is None:
                    version = current[_key(name)] = _Version(name, None)
                    sources.append(version)
                version.readers.append(number)
                readings.append(version)
            assigned = []
            for name in statement.right:
                version = current.get(_key(name))
                if version is not None:
                    version.overwriter = number
                version = current[_key(name)] = _Version(name, number)
                assigned.append(version)
            self.read.append(readings)
            self.made.append(assigned)
        # Whether a statement's sources can be restored from what it assigned.
        self.is_undone = [False] * len(statements)
        for number in reversed(range(len(statements))):
            self.is_undone[number] = all(map(self._comes_back, self.made[number]))
        for version in sources:
            if not self._comes_back(version):
                raise self._lost(version)

    def num_readings(self, version: _Version) -> int:
        """How many times a version comes back."""
        return sum(self.is_undone[number] for number in version.readers)

    def _comes_back(self, version: _Version) -> bool:
        if not version.readers:
            return version.overwriter is None
        return any(self.is_undone[number] for number in version.readers)

    def _lost(self, version: _Version) -> TransformError:
        """Say which overwritten result a version is lost with."""
        while version.readers:
            lost = [v for v in self.made[version.readers[0]] if not self._comes_back(v)]
            version = lost[0]
        assert version.maker is not None
        assert version.overwriter is not None
        number = self.statements[version.overwriter].number
        return self.statements[version.maker].error(
            f"{version.name} is overwritten by statement {number} before anything reads it, so "
            "there is no inverse",
            version.name.span,
        )


def _key(name: Name) -> Key:
    """A key that is equal for names that stand for the same tensors.

    Offsets do not count: a statement that shifts layers reads and assigns one family of names.
    """
    star = Wildcard(STAR)
    pieces = tuple(star if isinstance(piece, Wildcard) else piece for piece in name.pieces)
    return pieces, name.array


def _pattern(name: Name) -> Pattern:
    if name.array is None:
        return Pattern.of(name.pieces)
    return Pattern.of((*name.pieces, "_", Wildcard(STAR)))


def _check_no_overlap(statements: Sequence[Statement]) -> None:
    """No name with a wildcard may match a tensor that another name matches too."""
    wildcards: dict[str, dict[Key, tuple[Pattern, Name]]] = {}
    for statement in statements:
        for name in (*statement.left, *statement.right):
            if name.literal is None:
                pattern = _pattern(name)
                wildcards.setdefault(pattern.form, {})[_key(name)] = (pattern, name)
    for statement in statements:
        for name in (*statement.left, *statement.right):
            pattern = _pattern(name)
            for key, (other, other_name) in wildcards.get(pattern.form, {}).items():
                if key != _key(name) and _overlap(pattern, other):
                    raise statement.error(
                        f"{name} and {other_name} may be the same tensor\nIt cannot be told "
                        "whether there is an inverse",
                        name.span,
                    )


def _overlap(one: Pattern, other: Pattern) -> bool:
    """True if a name may match both of two patterns of the same form."""
    fixed = dict(one.fixed)
    return all(fixed.get(place, number) == number for place, number in other.fixed)
