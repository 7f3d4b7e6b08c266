"""Turning programs around: what comes back, and what is refused because it is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from remesh import Transform
from remesh.errors import TransformError
from tests.transform.simulated import Array


def numbered(*shape: int, start: int = 0) -> Array:
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def there_and_back(text: str, **tensors: Any) -> None:
    """Apply a program and its inverse, and compare."""
    transform = Transform(text)
    result = transform.apply(tensors)
    back = transform.inverse().apply(
        result, {name: np.zeros_like(array) for name, array in tensors.items()}
    )
    for name, array in tensors.items():
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize(
    ("text", "inverse"),
    [
        ("a -> b", "b -> a"),
        ("a, b -> c, axis=1", "c -> a, b, axis=1, sizes=targets"),
        ("a -> b, c, axis=0", "b, c -> a, axis=0"),
        ("a -> b, c, axis=0, sizes=[1, 2]", "b, c -> a, axis=0"),
        ("a, b -> c, stack=-1", "c -> a, b, unstack=-1"),
        ("c -> e.*.w, unstack=0, parts=3", "e.*.w -> c, stack=0"),
        ("a^T -> b", "b -> a^T"),
        ("a -> b, permute=[1, 2, 0]", "b -> a, permute=[2, 0, 1]"),
        ("a -> b, permute=[-1, 0, 1]", "b -> a, permute=[1, 2, 0]"),
        ("a -> b, permute=[]", "b -> a, permute=[]"),
        ("a -> b, reshape=[2, 3, 4]", "b -> a, reshape=targets"),
        (
            "a -> b, src_dtype=bfloat16, dst_dtype=float32",
            "b -> a, src_dtype=float32, dst_dtype=bfloat16",
        ),
        ("_ -> z", "z -> _"),
        ("a, b -> c, tie", "c -> a, b, untie"),
        ("a -> b, c, untie", "b, c -> a, tie"),
        (
            "q, k, v -> w, fused_qkv_old, num_heads=2, num_key_value_groups=2, dst_parts=2",
            "w -> q, k, v, fused_qkv_old, num_heads=2, num_key_value_groups=2, axis=1, src_parts=2",
        ),
        ("w -> gate, up, fused_ffn, axis=0", "gate, up -> w, fused_ffn, axis=0"),
        ("l.$LAYER_ID.w -> m.$LAYER_ID-1.w", "m.$LAYER_ID-1.w -> l.$LAYER_ID.w"),
        ("a -> b  b -> c", "c -> b\nb -> a"),
        ("a -> b  a -> c", "c -> _copy1.a\nb -> _copy2.a\n_copy1.a, _copy2.a -> a, tie"),
        ("a, a -> b, stack=0", "b -> _copy1.a, _copy2.a, unstack=0\n_copy1.a, _copy2.a -> a, tie"),
    ],
)
def test_what_the_inverse_says(text: str, inverse: str) -> None:
    assert str(Transform(text).inverse()) == inverse


@pytest.mark.parametrize(
    ("text", "reverse"),
    [
        ("a -> b\nc, d -> e, axis=1", "e -> c, d, axis=1\nb -> a"),
        ("_ -> z  a -> _", "_ -> a\nz -> _"),
        ("a -> b  a -> c", "c -> a\nb -> a"),
        (
            "a -> b, src_dtype=float32, dst_dtype=float16",
            "b -> a, src_dtype=float16, dst_dtype=float32",
        ),
        ("a -> b, reshape=[2, 3, 4]", "b -> a, reshape=[2, 3, 4]"),
    ],
)
def test_what_reverse_says(text: str, reverse: str) -> None:
    assert str(Transform(text).reversed()) == reverse


def test_reverse_refuses_what_has_no_opposite() -> None:
    with pytest.raises(TransformError, match="does not say what to go back to"):
        Transform("a -> b, dtype=float32").reversed()
    with pytest.raises(TransformError, match="fewer than three axes"):
        Transform("a -> b, reshape=[2, 3]").reversed()


def test_reverse_of_an_offset_shifts_back() -> None:
    text = "l.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w"
    t = {f"l.{n}.w": numbered(1, start=n) for n in (1, 2)}
    forth = Transform(text).apply(t)
    assert list(forth) == ["m.0.w", "m.1.w"]
    back = Transform(text).reversed().apply(forth)
    assert {name: array.tolist() for name, array in back.items()} == {"l.1.w": [1], "l.2.w": [2]}


def test_unequal_parts() -> None:
    there_and_back("a, b, c -> d, axis=0", a=numbered(1, 2), b=numbered(3, 2), c=numbered(2, 2))


def test_unequal_parts_that_are_no_targets() -> None:
    """Their sizes come from the program that is undone."""
    text = "a, b -> ab, axis=0   ab, c -> abc, axis=0   abc^T, d^T -> e, axis=1"
    rows = {"a": 1, "b": 3, "c": 2, "d": 4}
    there_and_back(text, **{name: numbered(n, 2, start=10 * n) for name, n in rows.items()})


def test_transposed_parts_behind_a_star() -> None:
    tensors = {f"e.{n}.w": numbered(n + 1, 2, start=100 * n) for n in range(3)}
    there_and_back("e.*.w^T -> f, axis=1", **tensors)


def test_a_star_for_names_that_are_no_targets() -> None:
    text = """
        e.$EXPERT_ID.gate, e.$EXPERT_ID.up -> e.$EXPERT_ID.both, axis=0
        e.*.both -> grouped, stack=0
    """
    tensors = {
        f"e.{n}.{name}": numbered(2, 3, start=10 * n) for n in (0, 1, 7) for name in ("gate", "up")
    }
    there_and_back(text, **tensors)


def test_general_reshape() -> None:
    there_and_back("a -> b, reshape=[4, 3]", a=numbered(2, 6))
    there_and_back("a -> b, reshape=[2, 3, 2]", a=numbered(3, 4))


def test_fused_layouts_between_degrees() -> None:
    text = """
        gate, up -> w, fused_ffn, axis=0, dst_parts=4
        w -> v, fused_ffn, axis=0, src_parts=4, dst_parts=2
        q, k, u -> x, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0
    """
    rows = {"gate": 8, "up": 8, "q": 8, "k": 4, "u": 4}
    there_and_back(text, **{name: numbered(n, start=100 * n) for name, n in rows.items()})


def test_an_exact_cast_comes_back() -> None:
    a = torch.tensor([0.1, 1.1]).bfloat16()
    transform = Transform("a -> b, src_dtype=bfloat16, dst_dtype=float32")
    assert torch.equal(transform.inverse().apply(transform.apply({"a": a}))["a"], a)


def test_copies_must_agree_when_they_come_back() -> None:
    transform = Transform("a -> b   a^T -> c")
    result = transform.apply({"a": numbered(2, 3)})
    result["c"][0, 1] += 1
    with pytest.raises(TransformError, match="1 of 6 elements differ"):
        transform.inverse().apply(result)


def test_layers_read_twice_are_compared_layer_by_layer() -> None:
    text = "l.$LAYER_ID.w -> m.$LAYER_ID.w   l.$LAYER_ID.w^T -> n.$LAYER_ID.w"
    there_and_back(text, **{f"l.{n}.w": numbered(2, 3, start=n) for n in range(3)})


def test_states_come_back_too() -> None:
    tensors = {
        "a": numbered(2, 3),
        "a.exp_avg": numbered(2, 3, start=10),
        "a.step": np.full(1, 4, np.float32),
        "b": numbered(4, 3),
        "b.exp_avg": numbered(4, 3, start=50),
        "b.step": np.full(1, 4, np.float32),
    }
    there_and_back("a, b -> c, axis=0", **tensors)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a -> _", "what is deleted cannot be restored"),
        ("a -> b, dtype=float32", "does not say what to go back to"),
        ("a -> b, src_dtype=float32, dst_dtype=bfloat16", "from float32 to bfloat16 loses digits"),
        ("a -> b, src_dtype=float16, dst_dtype=bfloat16", "from float16 to bfloat16 loses digits"),
        ("a -> x  b -> x", "x is overwritten by statement 2 before anything reads it"),
        ("a -> x, y, axis=0  b -> y", "y is overwritten by statement 2"),
        ("a -> b  b -> c  d -> c", "c is overwritten by statement 3"),
        ("e.*.w -> f, axis=0  e.*.w -> g, axis=0", "only possible for names without * and [:]"),
        ("e.*.w -> f, axis=0  e.0.w -> g", "may be the same tensor"),
        ("l.$LAYER_ID.w -> m.$LAYER_ID.w  l.3.w -> x", "may be the same tensor"),
        ("a_1 -> b  a[0:2] -> c, axis=0", "may be the same tensor"),
    ],
)
def test_what_is_lost_is_refused(text: str, says: str) -> None:
    with pytest.raises(TransformError) as caught:
        Transform(text).inverse()
    assert says in str(caught.value)
    assert "statement " in str(caught.value)


def test_a_result_that_was_read_before_it_was_overwritten_is_not_lost() -> None:
    there_and_back("a -> x   x^T -> y   b -> x", a=numbered(2, 3), b=numbered(3))


def test_a_copy_that_was_overwritten_does_not_matter() -> None:
    there_and_back("a -> x   a -> y   b -> x", a=numbered(2, 3), b=numbered(3))


def test_numbers_that_differ_are_different_names() -> None:
    text = "l.0.w -> x   l.1.$E.w -> m.$E.w   l.1.w -> y   l.2.$E.w -> n.$E"
    names = ["l.0.w", "l.1.0.w", "l.1.w", "l.2.0.w"]
    there_and_back(text, **{name: numbered(2, start=n) for n, name in enumerate(names)})
