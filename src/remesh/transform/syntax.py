"""What a text of statements means before it meets any tensor: the syntax tree.

A statement has names left and right of its arrow and exactly one *operator*, which the parser
derives from the attributes and from how many names there are. Names may hold wildcards: `*` and
placeholders such as `$LAYER_ID`, both of which stand for a run of digits. Everything here knows
where it came from in the text, so that errors can point at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """A run of digits to be found.

    Attributes:
        name: `*`, or the placeholder's name without `$`.
        offset: Added to the number that the placeholder stands for.
    """

    name: str
    offset: int = 0

    def __str__(self) -> str:
        if self.name == STAR:
            return STAR
        return f"${self.name}{self.offset:+d}" if self.offset else f"${self.name}"


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a statement.

    Attributes:
        pieces: Its text, cut at wildcards.
        span: Where it stands, brackets and `^T` included.
        array: The bounds of `name[start:stop]`, which stands for name_start ... name_(stop - 1).
        axes: The labels of `name[in, out]`, one for each axis.
        transposed: Whether all its axes are reversed. Only reversed programs have such names on
            the right of an arrow.
        quoted: Whether it was quoted, and so holds no wildcard.
    """

    pieces: tuple[str | Wildcard, ...]
    span: Span
    array: tuple[int, int] | None = None
    axes: tuple[str, ...] | None = None
    transposed: bool = False
    quoted: bool = False

    @property
    def literal(self) -> str | None:
        """The name itself, if nothing in it is to be expanded."""
        if self.array is None and len(self.pieces) == 1 and isinstance(self.pieces[0], str):
            return self.pieces[0]
        return None

    @property
    def is_nothing(self) -> bool:
        """Whether it is `_`, which stands for no tensor."""
        return not self.quoted and self.literal == NOTHING

    @property
    def is_many(self) -> bool:
        """Whether it may stand for several names within one statement."""
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


# ---------------------------------------------------------------------------------------------
# Operators
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alias:
    """`a -> b`: the same tensor under another name."""


@dataclass(frozen=True, slots=True)
class Concat:
    """`a, b -> c, axis=1`."""

    axis: int


@dataclass(frozen=True, slots=True)
class Split:
    """`a -> b, c, axis=0`: into equal parts, or into the given sizes.

    Attributes:
        axis: The axis that is cut.
        sizes: Extents of the parts; None if they are equal.
        from_targets: Whether the extents are those of the targets that the parts go to.
        parts: How many parts a `*` on the right stands for.
    """

    axis: int
    sizes: tuple[int, ...] | None = None
    from_targets: bool = False
    parts: int | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """`a, b -> c, stack=0`: along a new axis at this place."""

    axis: int


@dataclass(frozen=True, slots=True)
class Unstack:
    """`c -> a, b, unstack=0`: the axis at this place disappears."""

    axis: int
    parts: int | None = None


@dataclass(frozen=True, slots=True)
class Permute:
    """`a -> b, permute=[2, 0, 1]`: axis i of b is axis order[i] of a; empty reverses all axes."""

    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """`a -> b, reshape=[8, 128, 4096]`, or back to two axes if `a` has that shape.

    The shape is None for `reshape=targets`: that of the target which the result goes to.
    """

    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Cast:
    """`a -> b, dtype=float32`, or with the source's dtype stated so that it can be undone."""

    dtype: str
    source_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """`_ -> z`: z keeps its initial value."""


@dataclass(frozen=True, slots=True)
class Delete:
    """`a -> _`: the source a is not wanted."""


@dataclass(frozen=True, slots=True)
class Tie:
    """`a, b -> c, tie`: a and b hold the same values, which is checked, and c is either."""


@dataclass(frozen=True, slots=True)
class Untie:
    """`a -> b, c, untie`: b and c are copies."""


@dataclass(frozen=True, slots=True)
class FusedQkv:
    """Attention projections, `num_kv_heads` blocks of query heads, a key head and a value head.

    With `by_rank`, one block for each tensor-parallel rank: its query, key and value heads.
    The direction follows from the numbers of names. `source_ranks` and `target_ranks` are the
    tensor-parallel degrees if the statement gives them.
    """

    axis: int
    num_heads: int
    num_kv_heads: int
    by_rank: bool = False
    source_ranks: int | None = None
    target_ranks: int | None = None


@dataclass(frozen=True, slots=True)
class FusedFfn:
    """Gate and up projections, one block of both for each tensor-parallel rank."""

    axis: int
    source_ranks: int | None = None
    target_ranks: int | None = None


Operator = (
    Alias
    | Concat
    | Split
    | Stack
    | Unstack
    | Permute
    | Reshape
    | Cast
    | Add
    | Delete
    | Tie
    | Untie
    | FusedQkv
    | FusedFfn
)


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement.

    Attributes:
        number: Its place among the statements as they were written, from 1.
        text: The text that it is part of.
        span: Where it stands there.
        left: Names left of the arrow.
        right: Names right of the arrow.
        operator: What it does.
        operator_span: Where the attribute that says so stands, for errors.
        is_reversed: Whether left and right have been exchanged since it was written.
    """

    number: int
    text: str
    span: Span
    left: tuple[Name, ...]
    right: tuple[Name, ...]
    operator: Operator
    operator_span: Span
    is_reversed: bool = False

    def __str__(self) -> str:
        left, right = (", ".join(map(str, names)) for names in (self.left, self.right))
        return f"{left} -> {right}{attributes_text(self.operator)}"


def attributes_text(operator: Operator) -> str:
    """The attributes that the parser would turn into this operator, with a comma before each."""
    return "".join(f", {name}={value}" if value else f", {name}" for name, value in _of(operator))


def _of(operator: Operator) -> list[tuple[str, str]]:
    """Attributes as (name, value); flags have an empty value."""
    items: list[tuple[str, object]] = []
    match operator:
        case Concat(axis):
            items = [("axis", axis)]
        case Split(axis, sizes, from_targets, parts):
            extents = "targets" if from_targets else _integers(sizes)
            items = [("axis", axis), ("sizes", extents), ("parts", parts)]
        case Stack(axis):
            items = [("stack", axis)]
        case Unstack(axis, parts):
            items = [("unstack", axis), ("parts", parts)]
        case Permute(order):
            items = [("permute", _integers(order))]
        case Reshape(shape):
            items = [("reshape", "targets" if shape is None else _integers(shape))]
        case Cast(dtype, source_dtype):
            name = "dtype" if source_dtype is None else "dst_dtype"
            items = [("src_dtype", source_dtype), (name, dtype)]
        case Tie() | Untie():
            items = [("tie" if isinstance(operator, Tie) else "untie", "")]
        case FusedQkv():
            items = [
                ("fused_qkv_old" if operator.by_rank else "fused_qkv", ""),
                ("num_heads", operator.num_heads),
                ("num_key_value_groups", operator.num_kv_heads),
                *_fused(operator),
            ]
        case FusedFfn():
            items = [("fused_ffn", ""), *_fused(operator)]
        case Alias() | Add() | Delete():
            pass
    return [(name, str(value)) for name, value in items if value is not None]


def _fused(operator: FusedQkv | FusedFfn) -> list[tuple[str, object]]:
    return [
        ("axis", operator.axis),
        ("src_parts", operator.source_ranks),
        ("dst_parts", operator.target_ranks),
    ]


def _integers(numbers: Sequence[int] | None) -> str | None:
    return None if numbers is None else f"[{', '.join(map(str, numbers))}]"
