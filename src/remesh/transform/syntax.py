"""Names as statements write them, before they meet any tensor.

A name may hold wildcards: `*` and placeholders such as `$LAYER_ID`, both of which stand for a run
of digits. It knows where it stands in the text, so that errors can point at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    axes: tuple[str, ...] | None = None  # the labels of `name[in, out]`, one for each axis
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
        if self.axes is not None:
            text += f"[{', '.join(self.axes)}]"
        return f"{text}^T" if self.transposed else text


def are_many(names: Sequence[Name]) -> bool:
    """True if names on a side of an arrow may stand for several within one statement."""
    return len(names) > 1 or names[0].array is not None or names[0].has_star
