"""Parsing: what statements mean, where they end, and what errors say."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh import Transform
from remesh.errors import TransformError
from remesh.transform import TensorInfo
from tests.transform.programs import Program, programs


def message_of(text: str | list[str]) -> str:
    with pytest.raises(TransformError) as caught:
        Transform(text)
    return str(caught.value)


def resolve_message(text: str, *names: str) -> str:
    """What resolving says, with float32 sources of shape (4, 4)."""
    sources = {name: TensorInfo("float32", (4, 4)) for name in names}
    with pytest.raises(TransformError) as caught:
        Transform(text).resolve(sources)
    return str(caught.value)


def test_statements_need_nothing_between_them() -> None:
    text = "a -> b, axis=0 c, d -> e, axis=1 f^T -> g # the rest of the line h -> i\nj->k"
    assert str(Transform(text)).splitlines() == [
        "a -> b",
        "c, d -> e, axis=1",
        "f^T -> g",
        "j -> k",
    ]


def test_texts_and_lists_of_texts_are_numbered_alike() -> None:
    for statements in ("a -> b\nc -> d\ne -> f", ["a -> b\n", "c -> d e -> f"]):
        assert [s.number for s in Transform(statements).statements] == [1, 2, 3]


@pytest.mark.parametrize(
    "statement",
    [
        "a -> b",
        "a, b -> c, axis=-1",
        "a -> b, c, axis=0, sizes=[1, 2]",
        "a -> b, c, axis=0, sizes=targets",
        "a -> e.*.w, axis=0",
        "e.*.w -> f, stack=0",
        "f -> e.*.w, unstack=0",
        "l.$LAYER_ID.q^T, l.$LAYER_ID.k^T -> l.$LAYER_ID+1.qk, axis=0",
        "l.$LAYER_ID.e.$EXPERT_ID-2.w -> m.$EXPERT_ID.$LAYER_ID.w",
        "q[0:2], k[0:1] -> a, axis=0",
        "a -> b, permute=[2, 0, 1]",
        "a -> b, permute=[]",
        "a -> b, reshape=[2, -0, 3]".replace("-0", "4"),
        "a -> b, dtype=bfloat16",
        "a -> b, src_dtype=float16, dst_dtype=float32",
        "_ -> a",
        "a -> _",
        "a, b -> c, tie",
        "a -> b, c, untie",
        "q, k, v -> w, fused_qkv, num_heads=8, num_key_value_groups=2, axis=1",
        "w -> w, fused_qkv_old, num_heads=8, num_key_value_groups=2, axis=0, src_parts=2",
        "gate, up -> w, fused_ffn, axis=1, dst_parts=4",
        "'_' -> \"it's\"",
        "'tie', 'a b' -> 'untie', axis=0",
    ],
)
def test_text_and_meaning_go_both_ways(statement: str) -> None:
    transform = Transform(statement)
    assert str(transform) == statement
    assert str(Transform(str(transform))) == statement


@settings(deadline=None)
@given(programs())
def test_random_programs_survive_their_text(program: Program) -> None:
    once = str(Transform(program.statements))
    assert str(Transform(once)) == once


@pytest.mark.parametrize(
    ("text", "says", "under_caret"),
    [
        ("a ? b", "unexpected character '?'", "?"),
        ("a <- b", "arrows point right", "<"),
        ("q-proj -> b", "a name with a hyphen must be quoted", "-"),
        ("größe -> b", "must be quoted", "ö"),
        ("a -> 'b", "this quote is not closed", "'"),
        ("a^ -> b", "the transpose mark is ^T", "^"),
        ("a^T2 -> b", "the transpose mark is ^T", "^"),
        ("a b", "expected ',' or '->', found 'b'", "b"),
        ("a ->", "expected a name right of the arrow, the text ends", None),
        ("a, -> b", "expected a name after the comma, found '->'", "->"),
        ("a -> b,", "expected a name or an attribute after the comma", None),
        ("a -> b axis=0", "a comma is missing before it", "="),
        ("a -> b, axis=", "expected a value", None),
        ("a -> b, axis=0, c", "names come before attributes", "c"),
        ("12 -> b", "a name of digits alone must be quoted", "12"),
        ("'' -> b", "a name cannot be empty", "''"),
        ("a[2:2] -> b, axis=0", "[2:2] is empty", "2:2"),
        ("a[0:-1] -> b, axis=0", "expected a whole number, found '-1'", "-1"),
        ("a[x] -> b", "expected a whole number, found 'x'", "x"),
        ("a -> b^T", "^T stands left of the arrow only", "^T"),
        ("_, a -> b, axis=0", "_ must stand alone on the left", "_"),
        ("a -> _, b, axis=0", "_ must stand alone on the right", "_"),
        ("_ -> _", "_ on both sides does nothing", "_ -> _"),
        ("_^T -> a", "_ is no tensor", "_^T"),
        ("_ -> a, dtype=float32", "a statement with _ takes no attributes", "dtype=float32"),
        ("a -> b, foo=1", "unknown attribute 'foo'", "foo=1"),
        ("a -> b, aksis=1", "nearest: 'axis'", "aksis=1"),
        ("a -> b, axis=0, axis=1", "axis is given twice", "axis=1"),
        ("a, b -> c", "several names on one side need axis=", "a, b -> c"),
        ("a, b -> c, d, axis=0", "one side must be single", None),
        ("e.*.w -> f.*.w, axis=0", "$EXPERT_ID instead of *", None),
        ("a -> b, permute=[1,0], dtype=float16", "are two operators", "dtype=float16"),
        ("a -> b, stack=0, axis=0", "are two operators", "axis=0"),
        ("a -> b, num_heads=2", "num_heads belongs to fused_qkv or", "num_heads=2"),
        ("a -> b, c, axis=x", "axis must be a whole number", "axis=x"),
        ("a -> b, fused_ffn, src_parts=0", "src_parts must be at least 1", "src_parts=0"),
        ("a -> b, permute='1,0'", "permute must be a list such as [1, 0]", "permute='1,0'"),
        ("a -> b, c, permute=[1, 0]", "permute takes one name on either side", None),
        ("a -> b, dtype=int64", "dtype must be one of float16, bfloat16, float32", "dtype=int64"),
        ("a -> b, src_dtype=float32", "dst_dtype= is missing", None),
        ("a -> b, dst_dtype=float32", "src_dtype= is missing", None),
        ("a, b -> c, tie=1", "tie stands alone, without a value", "tie=1"),
        ("a -> b, reshape=[2, -1]", "extents are not negative", "reshape=[2, -1]"),
        ("a -> b, fused_ffn, num_heads=2", "num_heads belongs to", "num_heads=2"),
        ("w -> w, fused_qkv, num_heads=1, num_key_value_groups=1", "takes 3 -> 1", "fused_qkv"),
        ("q, k, v -> w, fused_qkv, num_heads=4", "num_key_value_groups= is missing", None),
        ("l.$layer.w -> b", "a placeholder is written in capitals", "$layer"),
        ("l.$LAYER_ID_OFFSET-2.w -> b", "takes no number", "$LAYER_ID_OFFSET-2"),
        ("l.$LAYER_ID.w -> b", "this name lacks $LAYER_ID", "b"),
        ("l.1$LAYER_ID.w -> b.1$LAYER_ID", "something other than a digit", "$LAYER_ID"),
        ("l.$A$B.w -> b.$A.$B", "something other than a digit", "$B"),
        ("a -> b, axis=1234567890123456789012", "this number is too long", None),
    ],
)
def test_errors_point_at_the_fault(text: str, says: str, under_caret: str | None) -> None:
    message = message_of(f"x -> y\n{text}")
    assert says in message
    first, line, carets, *_ = message.splitlines()
    assert says in first
    assert line.startswith("  statement ")
    assert set(carets.strip()) == {"^"}
    if under_caret is not None:
        start = carets.index("^")
        assert line[start : start + carets.count("^")] == under_caret


def test_a_long_line_is_shown_around_the_fault() -> None:
    message = message_of(f"{'a, ' * 5000}? -> b")
    line, carets = message.splitlines()[1:]
    assert len(line) < 200
    assert line[carets.index("^")] == "?"


def test_an_error_tells_every_expansion() -> None:
    text = "m.$LAYER_ID.e.*.w^T, m.$LAYER_ID.b[0:2] -> n.$LAYER_ID.f, axis=7"
    message = resolve_message(text, "m.4.e.0.w", "m.4.e.1.w", "m.4.b_0", "m.4.b_1")
    assert message.splitlines() == [
        "there is no axis 7: 'm.4.e.0.w' has 2",
        f"  statement 1: {text}",
        " " * (15 + text.index("axis")) + "^" * 6,
        "  $LAYER_ID=4: m.4.e.*.w^T, m.4.b[0:2] -> n.4.f, axis=7",
        "  array and *: m.4.e.0.w^T, m.4.e.1.w^T, m.4.b_0, m.4.b_1 -> n.4.f, axis=7",
        "  ^T: the marked names are transposed before anything else",
    ]


def test_an_error_shortens_long_expansions() -> None:
    message = resolve_message("e.*.w -> f, axis=7", *(f"e.{n}.w" for n in range(1000)))
    assert "*: e.0.w, e.1.w, e.2.w, ... (1000 names in all) -> f, axis=7" in message


def test_an_error_in_a_reversed_program_shows_both_directions() -> None:
    transform = Transform("a, b -> c, axis=0").reversed()
    with pytest.raises(TransformError, match="reversed: c -> a, b, axis=0"):
        transform.apply({"c": np.zeros(3)})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope -> b", "there is no source and no earlier result 'nope'"),
        ("l.0.v_proj -> b", "nearest: 'l.0.q_proj', 'l.0.k_proj'"),
        ("x.*.q_proj -> b, axis=0", "no source matches 'x.*.q_proj'"),
        ("x.$LAYER_ID.q_proj -> x.$LAYER_ID.b", "no source matches 'x.$LAYER_ID.q_proj'"),
        ("l.*.v_proj -> b, axis=0", "nearest: 'l.0.q_proj'"),
        ("nope -> _", "there is no source 'nope' to delete"),
        ("l.0.q_proj -> _ l.0.q_proj -> a", "'l.0.q_proj' has been deleted by statement 1"),
        ("_ -> z z -> a", "'z' keeps its initial value (statement 1)"),
        ("l.0.q_proj -> a, a, untie", "'a' stands twice on this side"),
        ("l.0.q_proj -> a, permute=[0, 2]", "[0, 2] is no order of the 2 axes"),
        ("l.0.q_proj -> a, permute=[0]", "[0] is no order of the 2 axes"),
        ("l.0.q_proj -> a, b, c, axis=1", "extent 4 cannot be cut into 3 equal parts"),
        ("l.0.q_proj -> e.*.w, axis=0", "nothing tells how many names '*' stands for"),
        ("a[0:2000000] -> b, axis=0", "stands for more than 1000000 names"),
        (
            "l.0.q_proj -> a, fused_ffn, src_parts=3",
            "2 heads or rows cannot be divided into 3 blocks",
        ),
        ("l.0.q_proj -> a, src_dtype=float16, dst_dtype=float32", "is float32, not float16"),
        ("l.0.q_proj -> a, b, axis=0, sizes=[2, 1]", "add up to 3, and the axis has extent 4"),
        ("l.0.q_proj -> a, b, c, axis=0, sizes=[2, 2]", "2 sizes for 3 names"),
        ("l.0.q_proj -> a, b, c, unstack=0", "extent 4, but there are 3 names"),
        ("l.0.q_proj -> a, reshape=[2, 4, 7]", "not as many elements"),
        ("l.0.q_proj -> a, b, axis=2", "there is no axis 2"),
        ("l.$LAYER_ID_OFFSET.q_proj -> m.$LAYER_ID_OFFSET.w", "$LAYER_ID=0"),
    ],
)
def test_errors_of_statements_that_meet_tensors(text: str, says: str) -> None:
    assert says in resolve_message(text, "l.0.q_proj", "l.0.k_proj")


def test_dtypes_that_meet_must_be_equal() -> None:
    sources = {"a": TensorInfo("float32", (4,)), "b": TensorInfo("bfloat16", (4,))}
    for text in ("a, b -> c, axis=0", "a, b -> c, stack=0", "a, b -> c, tie"):
        with pytest.raises(
            TransformError, match=r"(?s)'b' is bfloat16, 'a' is float32\n(.*\n)+  cast"
        ):
            Transform(text).resolve(sources)


def test_only_floats_are_cast() -> None:
    with pytest.raises(TransformError, match="'a' is int64; only floats can be cast"):
        Transform("a -> b, dtype=float32").resolve({"a": TensorInfo("int64", (4,))})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n, m -> c, stack=0", "'n' is a plain value, which has no elements"),
        ("n -> c, reshape=[1, 1]", "'n' is a plain value, which has no elements"),
        ("n -> c, dtype=float32", "'n' is a plain value; only floats can be cast"),
        ("a, n -> c, stack=0", "'n' is a plain value, 'a' is float32"),
        ("n, a -> c, tie", "'a' is float32, 'n' is a plain value"),
        ("n -> tensor", "target 'tensor' is float32, but this makes it a plain value"),
        ("a -> plain", "target 'plain' is a plain value, but this makes it float32"),
    ],
)
def test_plain_values_are_only_renamed_copied_and_tied(text: str, says: str) -> None:
    tensor = TensorInfo("float32", ())
    sources = {"n": None, "m": None, "a": tensor}
    assert Transform("n -> c, d, untie   n, m -> e, tie").resolve(sources).targets["e"] is None
    targets = {"tensor": tensor, "plain": None} if text.count(",") == 0 else None
    with pytest.raises(TransformError, match=f"^{re.escape(says)}"):
        Transform(text).resolve(sources, targets)


def test_shapes_that_meet_must_fit() -> None:
    sources = {"a": TensorInfo("float32", (2, 3)), "b": TensorInfo("float32", (3, 3))}
    Transform("a, b -> c, axis=0").resolve(sources)
    for text in ("a, b -> c, axis=1", "a, b -> c, stack=0", "a, b -> c, tie"):
        with pytest.raises(TransformError, match=r"'b' has shape \(3, 3\), which does not fit 'a'"):
            Transform(text).resolve(sources)


def test_a_target_of_another_shape_is_refused() -> None:
    sources = {"a": TensorInfo("float32", (2, 3))}
    targets = {"b": TensorInfo("float32", (3, 3))}
    with pytest.raises(TransformError, match=r"target 'b' has shape \(3, 3\), but this makes it"):
        Transform("a -> b").resolve(sources, targets)


# Sizes that would hurt if anything grew faster than the text.


def test_many_statements_for_one_name() -> None:
    """Renaming builds nothing, and permutations cancel out."""
    statements = ["a -> a", "a^T -> a", "a -> a, permute=[1, 0]"] * 3000
    resolved = Transform(statements).resolve({"a": TensorInfo("float32", (2, 3))})
    (region,) = resolved.regions("a")
    assert region.steps == ()


def test_nesting_has_a_limit() -> None:
    statements = ["a, b -> a, axis=0"] * 400
    with pytest.raises(TransformError, match="more than 150 nested operations"):
        Transform(statements).resolve(
            {"a": TensorInfo("float32", (2, 3)), "b": TensorInfo("float32", (0, 3))}
        )


def test_doubling_costs_nothing_until_it_is_read() -> None:
    statements = ["a, a -> a, axis=0"] * 60
    resolved = Transform(statements).resolve({"a": TensorInfo("float32", (2,))})
    assert resolved.targets["a"] == TensorInfo("float32", (2**61,))


@pytest.mark.parametrize("times", [20_001, pytest.param(200_001, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("text", ["a.", "$A", "a, ", "'", "[", "*"])
def test_long_nonsense_is_refused(text: str, times: int) -> None:
    assert len(message_of(text * times)) < 1000


def _parsed_or_message(text: str) -> Transform | str:
    try:
        return Transform(text)
    except TransformError as error:
        return str(error)


@settings(deadline=None)
@given(st.text(alphabet=list("ab.0*$AZ_^T->=,:[]'\"#\n (é"), max_size=40))
def test_any_text_parses_or_fails_with_a_caret(text: str) -> None:
    result = _parsed_or_message(text)
    if isinstance(result, str):
        assert re.search(r"\n *\^+", result)
    else:
        assert str(Transform(str(result))) == str(result)
