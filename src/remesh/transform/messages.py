"""Errors in statements: the text, a caret, what each macro became, the nearest names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from remesh.errors import TransformError
from remesh.transform.syntax import Span

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


def listing(names: Sequence[str], limit: int = 5) -> str:
    """Names for a message: the first few, and how many there are more."""
    shown = ", ".join(map(repr, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


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
