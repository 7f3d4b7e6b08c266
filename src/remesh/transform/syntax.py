"""Names as statements write them, before they meet any tensor.

A name may hold wildcards: `*` and placeholders such as `$LAYER_ID`, both of which stand for a run
of digits. It knows where it stands in the text. Errors point there: they show the text, a caret,
what each macro became and the nearest names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remesh.errors import TransformError

NOTHING = "_"
STAR = "*"


class Span(NamedTuple):
    """Characters [start, stop) of a text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Wildcard:
    """A run of digits to be found."""

    name: str  # `*`, or the placeholder's name without `$`
    offset: int = 0  # added to the number that the placeholder stands for

    def __str__(self) -> str:
        if self.name == STAR:
            return STAR
        return f"${self.name}{self.offset:+d}" if self.offset else f"${self.name}"


Pieces = tuple[str | Wildcard, ...]
"""The text of a name, cut at wildcards."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a statement."""

    pieces: Pieces
    span: Span  # where it stands, brackets and `^T` included
    array: tuple[int, int] | None = None
    """The bounds of `name[start:stop]`, which stands for name_start ... name_(stop - 1)."""
    transposed: bool = False
    """Whether all its axes are reversed. Only reversed programs have such names on the right of an
    arrow."""
    quoted: bool = False  # whether it was quoted, and so holds no wildcard

    @property
    def literal(self) -> str | None:
        """The name itself, if nothing in it is to be expanded."""
        if self.array is None and len(self.pieces) == 1 and isinstance(self.pieces[0], str):
            return self.pieces[0]
        return None

    @property
    def is_nothing(self) -> bool:
        """True if it is `_`, which stands for no tensor."""
        return not self.quoted and self.literal == NOTHING

    @property
    def has_star(self) -> bool:
        """True if the names that exist decide which it stands for."""
        return any(isinstance(piece, Wildcard) and piece.name == STAR for piece in self.pieces)

    @property
    def placeholders(self) -> frozenset[str]:
        """Names of its placeholders."""
        return frozenset(
            piece.name
            for piece in self.pieces
            if isinstance(piece, Wildcard) and piece.name != STAR
        )

    def __str__(self) -> str:
        text = "".join(map(str, self.pieces))
        if self.quoted:
            text = f"'{text}'" if "'" not in text else f'"{text}"'
        if self.array is not None:
            text += f"[{self.array[0]}:{self.array[1]}]"
        return f"{text}^T" if self.transposed else text


def are_many(names: Sequence[Name]) -> bool:
    """True if names on a side of an arrow may stand for several within one statement."""
    return len(names) > 1 or names[0].array is not None or names[0].has_star


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------

_WIDTH = 100
_DIGITS = re.compile("[0-9]+")
_MAX_CANDIDATES = 500


class Problem(Exception):  # noqa: N818 - it is turned into an error that shows the text
    """An error at a place of a statement, whose text the raiser does not know."""

    def __init__(self, message: str, span: Span | None = None, hints: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.span = span
        self.hints = hints


def text_error(
    message: str, number: int, text: str, span: Span, notes: Iterable[str] = ()
) -> TransformError:
    """An error at a place of the text of a statement, with notes about it."""
    lines = [message, *_excerpt(f"statement {number}", text, span)]
    return TransformError("\n".join([*lines, *(f"  {note}" for note in notes)]))


def _excerpt(label: str, text: str, span: Span) -> list[str]:
    """The line of the text that holds the span, and carets under it."""
    begin = text.rfind("\n", 0, span.start) + 1
    end = text.find("\n", span.start)
    end = len(text) if end < 0 else end
    # Of a very long line, only the surroundings of the span are shown.
    first = begin if end - begin <= _WIDTH else max(begin, span.start - _WIDTH // 2)
    last = min(end, first + _WIDTH)
    line = text[first:last]
    head = "..." if first > begin else ""
    tail = "..." if last < end else ""
    num_carets = max(1, min(span.stop, last) - span.start)
    indent = f"  {label}: {head}"
    carets = " " * (len(indent) + span.start - first) + "^" * num_carets
    return [f"{indent}{line}{tail}", carets]


def shorten(text: str) -> str:
    """A text cut in its middle to what fits a line of a message."""
    limit = 2 * _WIDTH
    return text if len(text) <= limit else f"{text[: limit - 60]} ... {text[-55:]}"


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Hint with the names that look most like `name`; empty if none does.

    Names that differ only in numbers are compared as one, so that a hundred thousand names of a
    few forms cost as much as those few forms.
    """
    form = _DIGITS.sub("0", name)
    digits = _DIGITS.findall(name)
    best: dict[str, tuple[int, str]] = {}
    for other in names:
        other_digits = _DIGITS.findall(other)
        agreement = sum(a == b for a, b in zip(digits, other_digits, strict=False))
        other_form = _DIGITS.sub("0", other)
        if other_form not in best or agreement > best[other_form][0]:
            best[other_form] = (agreement, other)
    # difflib is slow: first keep the forms of about the right length.
    forms = sorted(best, key=lambda other: abs(len(other) - len(form)))[:_MAX_CANDIDATES]
    found = [best[other][1] for other in difflib.get_close_matches(form, forms, n=3, cutoff=0.5)]
    found = [other for other in found if other != name]
    return [f"nearest: {', '.join(map(repr, found))}"] if found else []
