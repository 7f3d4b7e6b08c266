"""Finding the names that a pattern stands for, without comparing every pattern to every name.

A wildcard stands for a whole run of digits. So a name has a *form*, itself with every run of
digits blanked out, and its *numbers*, those runs; and a pattern can only match names of its own
form. Within a form, names are filed under the numbers that a pattern fixes, once for each choice
of places that patterns fix. Rules for a hundred layers thus cost a look-up each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from remesh.transform.syntax import STAR, Name, Wildcard

Binding = tuple[tuple[str, str], ...]
Numbers = tuple[str, ...]

_DIGITS = re.compile("[0-9]+")
_BLANK = "\0"
_MAX_DIGITS = 18


def number_key(digits: str) -> tuple[int, str, str]:
    """Sort key of a run of digits: by value, without making an integer of it."""
    significant = digits.lstrip("0")
    return len(significant), significant, digits


def form_of(name: str) -> tuple[str, Numbers]:
    """The form and the numbers of a name."""
    return _DIGITS.sub(_BLANK, name), tuple(_DIGITS.findall(name))


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name with wildcards, ready to be looked up."""

    form: str  # its form, wildcards blanked out like numbers
    fixed: tuple[tuple[int, str], ...]  # (place, number) of the numbers that are written out
    wildcards: tuple[tuple[int, Wildcard], ...]  # (place, wildcard) of the others

    @classmethod
    def of(cls, pieces: Sequence[str | Wildcard]) -> Pattern:
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
        filed = self._forms.setdefault(form, _Forms())
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
        return sorted(matches, key=lambda match: [number_key(digits) for digits in match])


def shifted(digits: str, offset: int) -> str | None:
    """The number that is `offset` away from the given one; None if that is no usable number."""
    if not offset:
        return digits
    if len(digits) > _MAX_DIGITS:
        return None
    number = int(digits) + offset
    return str(number) if number >= 0 else None


def bindings_of(pattern: Pattern, index: NameIndex, excluded: set[str]) -> list[Binding]:
    """The numbers that the placeholders of a pattern may stand for, each combination once.

    `*` in the pattern matches any number. A placeholder with an offset stands for the number found
    less the offset. Names in `excluded` are not matched.
    """
    found: dict[Binding, None] = {}
    for numbers in index.match(pattern):
        values: dict[str, str] = {}
        for (_, wildcard), digits in zip(pattern.wildcards, numbers, strict=True):
            if wildcard.name == STAR:
                continue
            value = shifted(digits, -wildcard.offset)
            if value is None or values.setdefault(wildcard.name, value) != value:
                break
        else:
            if excluded and filled(pattern, numbers) in excluded:
                continue
            found[tuple(sorted(values.items()))] = None
    return list(found)


def filled(pattern: Pattern, numbers: Numbers) -> str:
    """The name that a pattern matched with these numbers."""
    by_place = dict(pattern.fixed)
    by_place.update(
        (place, digits) for (place, _), digits in zip(pattern.wildcards, numbers, strict=True)
    )
    pieces = pattern.form.split(_BLANK)
    return pieces[0] + "".join(by_place[place] + text for place, text in enumerate(pieces[1:]))


def substitute(name: Name, binding: Binding) -> tuple[str | Wildcard, ...] | None:
    """The pieces of a name with its placeholders filled in; None if a number becomes negative."""
    if not any(isinstance(piece, Wildcard) for piece in name.pieces):
        return name.pieces
    values = dict(binding)
    pieces: list[str | Wildcard] = []
    for piece in name.pieces:
        if isinstance(piece, Wildcard) and piece.name != STAR:
            digits = shifted(values[piece.name], piece.offset)
            if digits is None:
                return None
            pieces.append(digits)
        else:
            pieces.append(piece)
    return tuple(pieces)
