"""Attributes to operators: which attributes go together, and how many names each needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from remesh.transform.report import nearest
from remesh.transform.syntax import (
    FLAGS,
    Add,
    Alias,
    Cast,
    Concat,
    Delete,
    FusedFfn,
    FusedQkv,
    Name,
    Operator,
    Permute,
    Reshape,
    Span,
    Split,
    Stack,
    Tie,
    Unstack,
    Untie,
)

Value = int | str | tuple[int, ...] | bool

CAST_DTYPES = ("float16", "bfloat16", "float32")
_INTEGER_LIST = re.compile(r"\s*[\[(]\s*((?:-?[0-9]{1,18}\s*,\s*)*(?:-?[0-9]{1,18})?)\s*[\])]\s*")

# Which attributes may stand beside each one that names an operator. `axis` alone does too.
_COMPANIONS: dict[str, tuple[str, ...]] = {
    "permute": (),
    "reshape": (),
    "dtype": (),
    "src_dtype": ("dst_dtype",),
    "stack": (),
    "unstack": ("parts",),
    "tie": (),
    "untie": (),
    "fused_qkv": ("num_heads", "num_key_value_groups", "axis"),
    "fused_qkv_old": ("num_heads", "num_key_value_groups", "axis", "src_parts", "dst_parts"),
    "fused_ffn": ("axis", "src_parts", "dst_parts"),
    "axis": ("sizes", "parts"),
}
KNOWN = sorted({*_COMPANIONS, *(name for names in _COMPANIONS.values() for name in names)})


@dataclass(frozen=True, slots=True)
class Attribute:
    """`name=value`, or a flag, whose value is True."""

    name: str
    value: Value
    span: Span


class AttributeProblem(Exception):  # noqa: N818 - it is turned into an error that shows the text
    """What is wrong with a statement, and where; the whole statement if `span` is None."""

    def __init__(self, message: str, span: Span | None = None) -> None:
        super().__init__(message)
        self.span = span


@dataclass(frozen=True, slots=True)
class _Given:
    """The names and attributes of a statement, as the functions below ask for them."""

    left: Sequence[Name]
    right: Sequence[Name]
    attributes: Mapping[str, Attribute]

    @property
    def left_is_many(self) -> bool:
        return len(self.left) > 1 or self.left[0].is_many

    @property
    def right_is_many(self) -> bool:
        return len(self.right) > 1 or self.right[0].is_many

    def integer(self, name: str, default: int | None = None) -> int:
        attribute = self.attributes.get(name)
        if attribute is None:
            if default is None:
                raise AttributeProblem(f"{name}= is missing")
            return default
        if type(attribute.value) is not int:
            raise AttributeProblem(f"{name} must be a whole number", attribute.span)
        return attribute.value

    def positive(self, name: str) -> int:
        value = self.integer(name)
        if value < 1:
            raise AttributeProblem(f"{name} must be at least 1", self.attributes[name].span)
        return value

    def optional_positive(self, name: str) -> int | None:
        return self.positive(name) if name in self.attributes else None

    def integers(self, name: str) -> tuple[int, ...]:
        attribute = self.attributes[name]
        value = attribute.value
        if isinstance(value, tuple):
            return value
        match = _INTEGER_LIST.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise AttributeProblem(f"{name} must be a list such as [1, 0]", attribute.span)
        return tuple(int(item) for item in match.group(1).split(",") if item.strip())

    def dtype(self, name: str) -> str:
        attribute = self.attributes.get(name)
        if attribute is None:
            raise AttributeProblem(f"{name}= is missing")
        if attribute.value not in CAST_DTYPES:
            raise AttributeProblem(
                f"{name} must be one of {', '.join(CAST_DTYPES)}", attribute.span
            )
        assert isinstance(attribute.value, str)
        return attribute.value


def operator_of(
    left: Sequence[Name], right: Sequence[Name], attributes: Mapping[str, Attribute]
) -> tuple[Operator, Span | None]:
    """The operator of a statement, and the span of the attribute that names it.

    Raises:
        AttributeProblem: If attributes or the numbers of names do not go together.
    """
    given = _Given(left, right, attributes)
    for attribute in attributes.values():
        _check_known(attribute)
    if left[0].is_nothing or right[0].is_nothing:
        for attribute in attributes.values():
            raise AttributeProblem("a statement with _ takes no attributes", attribute.span)
        return (Add() if left[0].is_nothing else Delete()), None
    leader = _leader(attributes)
    if leader is None:
        _check_one_side_is_single(given)
        if given.left_is_many or given.right_is_many:
            raise AttributeProblem(
                "several names on one side need axis= (or stack=, unstack=, tie, untie, or one of "
                "the fused_ macros)"
            )
        return Alias(), None
    return _BUILDERS[leader.name](given), leader.span


def _check_known(attribute: Attribute) -> None:
    if attribute.name not in KNOWN:
        hints = "".join(f"; {hint}" for hint in nearest(attribute.name, KNOWN))
        raise AttributeProblem(f"unknown attribute {attribute.name!r}{hints}", attribute.span)
    is_flag = attribute.name in FLAGS
    if is_flag != (attribute.value is True):
        form = "stands alone, without a value" if is_flag else "needs a value"
        raise AttributeProblem(f"{attribute.name} {form}", attribute.span)


def _leader(attributes: Mapping[str, Attribute]) -> Attribute | None:
    """The one attribute that names the operator.

    Raises:
        AttributeProblem: If there are two, or an attribute that belongs to none that is here.
    """
    names = ["src_dtype" if name == "dst_dtype" else name for name in attributes]
    leaders = [name for name in dict.fromkeys(names) if name in _COMPANIONS]
    if len(leaders) > 1 and "axis" in leaders:
        others = [name for name in leaders if name != "axis"]
        leaders = others if "axis" in _COMPANIONS[others[0]] else leaders
    if len(leaders) > 1:
        raise AttributeProblem(
            f"{leaders[0]} and {leaders[1]} are two operators; write two statements",
            _span(attributes, leaders[1]),
        )
    allowed = {*leaders, *(_COMPANIONS[leaders[0]] if leaders else ())}
    for name, attribute in attributes.items():
        if name not in allowed and name not in leaders:
            beside = [leader for leader, others in _COMPANIONS.items() if name in others]
            raise AttributeProblem(
                f"{name} belongs to {' or '.join(beside)}, not to this statement", attribute.span
            )
    if not leaders:
        return None
    found = attributes.get(leaders[0])
    return found if found is not None else attributes["dst_dtype"]


def _span(attributes: Mapping[str, Attribute], name: str) -> Span:
    return attributes[name if name in attributes else "dst_dtype"].span


def _one_to_one(given: _Given, what: str) -> None:
    if given.left_is_many or given.right_is_many:
        raise AttributeProblem(f"{what} takes one name on either side")


def _check_one_side_is_single(given: _Given) -> None:
    if given.left_is_many and given.right_is_many:
        raise AttributeProblem(
            "several names on both sides: one side must be single (for one statement per number, "
            "write a placeholder such as $EXPERT_ID instead of *)"
        )


def _axis(given: _Given) -> Operator:
    """Concatenation, split, or, with one name on either side, nothing at all."""
    axis = given.integer("axis")
    _check_one_side_is_single(given)
    if given.right_is_many:
        return _split(given, axis)
    for name in ("sizes", "parts"):
        if name in given.attributes:
            raise AttributeProblem(
                f"{name} belongs to a split: one name on the left, several on the right",
                given.attributes[name].span,
            )
    return Concat(axis) if given.left_is_many else Alias()


def _split(given: _Given, axis: int) -> Split:
    parts = given.optional_positive("parts")
    if "sizes" not in given.attributes:
        return Split(axis, parts=parts)
    attribute = given.attributes["sizes"]
    if attribute.value == "targets":
        return Split(axis, from_targets=True, parts=parts)
    sizes = given.integers("sizes")
    if not sizes or min(sizes) < 0:
        raise AttributeProblem("sizes must be one extent for each name", attribute.span)
    return Split(axis, sizes, parts=parts)


def _stack(given: _Given) -> Operator:
    if given.right_is_many:
        raise AttributeProblem("stack takes one name on the right")
    return Stack(given.integer("stack"))


def _unstack(given: _Given) -> Operator:
    if given.left_is_many:
        raise AttributeProblem("unstack takes one name on the left")
    return Unstack(given.integer("unstack"), given.optional_positive("parts"))


def _permute(given: _Given) -> Operator:
    _one_to_one(given, "permute")
    return Permute(given.integers("permute"))


def _reshape(given: _Given) -> Operator:
    _one_to_one(given, "reshape")
    if given.attributes["reshape"].value == "targets":
        return Reshape(None)
    shape = given.integers("reshape")
    if min(shape, default=0) < 0:
        raise AttributeProblem("extents are not negative", given.attributes["reshape"].span)
    return Reshape(shape)


def _dtype(given: _Given) -> Operator:
    _one_to_one(given, "a cast")
    return Cast(given.dtype("dtype"))


def _source_and_target_dtype(given: _Given) -> Operator:
    _one_to_one(given, "a cast")
    return Cast(given.dtype("dst_dtype"), given.dtype("src_dtype"))


def _tie(given: _Given) -> Operator:
    if given.right_is_many:
        raise AttributeProblem("tie takes one name on the right")
    return Tie()


def _untie(given: _Given) -> Operator:
    if given.left_is_many:
        raise AttributeProblem("untie takes one name on the left")
    return Untie()


def _fused_qkv(given: _Given) -> Operator:
    by_rank = "fused_qkv_old" in given.attributes
    name = "fused_qkv_old" if by_rank else "fused_qkv"
    _check_fused(given, name, 3, may_reorder=by_rank)
    num_heads = given.positive("num_heads")
    num_kv_heads = given.positive("num_key_value_groups")
    if num_heads % num_kv_heads:
        raise AttributeProblem(
            f"num_heads={num_heads} is no multiple of num_key_value_groups={num_kv_heads}, which "
            "is the number of key-value heads",
            given.attributes["num_key_value_groups"].span,
        )
    ranks = given.optional_positive("src_parts"), given.optional_positive("dst_parts")
    return FusedQkv(given.integer("axis", 1), num_heads, num_kv_heads, by_rank, *ranks)


def _fused_ffn(given: _Given) -> Operator:
    _check_fused(given, "fused_ffn", 2, may_reorder=True)
    ranks = given.optional_positive("src_parts"), given.optional_positive("dst_parts")
    return FusedFfn(given.integer("axis", 1), *ranks)


def _check_fused(given: _Given, macro: str, num_names: int, *, may_reorder: bool) -> None:
    counts = len(given.left), len(given.right)
    allowed = [(num_names, 1), (1, num_names)] + ([(1, 1)] if may_reorder else [])
    if counts not in allowed or any(name.is_many for name in (*given.left, *given.right)):
        forms = " or ".join(f"{a} -> {b}" for a, b in allowed)
        raise AttributeProblem(
            f"{macro} takes {forms} names, each written out, not {counts[0]} -> {counts[1]}",
            given.attributes[macro].span,
        )


_BUILDERS: dict[str, Callable[[_Given], Operator]] = {
    "axis": _axis,
    "stack": _stack,
    "unstack": _unstack,
    "permute": _permute,
    "reshape": _reshape,
    "dtype": _dtype,
    "src_dtype": _source_and_target_dtype,
    "dst_dtype": _source_and_target_dtype,
    "tie": _tie,
    "untie": _untie,
    "fused_qkv": _fused_qkv,
    "fused_qkv_old": _fused_qkv,
    "fused_ffn": _fused_ffn,
}
