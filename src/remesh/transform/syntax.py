"""The syntax tree: statements before they meet any tensor.

A statement has names left and right of its arrow and exactly one *operator*, which the parser
derives from the attributes and from how many names there are. Names may hold wildcards: `*` and
placeholders such as `$LAYER_ID`, both of which stand for a run of digits. Everything here knows
where it came from in the text, so that errors can point at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.transform.operator_base import Operator

NOTHING = "_"
STAR = "*"
FLAGS = ("fused_qkv", "fused_qkv_old", "fused_ffn", "tie", "untie")


@dataclass(frozen=True, slots=True)
class Span:
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


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a statement."""

    pieces: tuple[str | Wildcard, ...]  # its text, cut at wildcards
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
    def is_many(self) -> bool:
        """True if it may stand for several names within one statement."""
        return self.array is not None or any(
            isinstance(piece, Wildcard) and piece.name == STAR for piece in self.pieces
        )

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


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement."""

    number: int  # its place among the statements as they were written, from 1
    text: str  # the text that it is part of
    span: Span  # where it stands there
    left: tuple[Name, ...]  # names left of the arrow
    right: tuple[Name, ...]  # names right of the arrow
    operator: Operator
    operator_span: Span  # where the attribute that says so stands, for errors
    is_reversed: bool = False  # whether left and right have been exchanged since it was written

    @property
    def adds(self) -> bool:
        """True if it says that targets keep their initial values: `_ -> ...`."""
        return self.left[0].is_nothing

    @property
    def deletes(self) -> bool:
        """True if it says that sources are not wanted: `... -> _`."""
        return self.right[0].is_nothing

    def __str__(self) -> str:
        left, right = (", ".join(map(str, names)) for names in (self.left, self.right))
        return f"{left} -> {right}{self.operator}"
