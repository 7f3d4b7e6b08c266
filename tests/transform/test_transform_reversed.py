"""Turning programs around: what they say then, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from remesh import Transform
from remesh.errors import TransformError
from tests.transform.simulated import Array


def numbered(*shape: int, start: int = 0) -> Array:
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("text", "reverse"),
    [
        ("a -> b\nc, d -> e, axis=1", "e -> c, d, axis=1\nb -> a"),
        ("_ -> z  a -> _", "_ -> a\nz -> _"),
        ("a -> b, c, axis=0, sizes=[1, 2]", "b, c -> a, axis=0"),
        ("a, b -> c, stack=-1", "c -> a, b, unstack=-1"),
        ("c -> e.*.w, unstack=0, parts=3", "e.*.w -> c, stack=0"),
        ("a^T -> b", "b -> a^T"),
        ("a -> b, permute=[-1, 0, 1]", "b -> a, permute=[1, 2, 0]"),
        ("a -> b, permute=[]", "b -> a, permute=[]"),
        ("a, b -> c, tie", "c -> a, b, untie"),
        (
            "q, k, v -> w, fused_qkv_old, num_heads=2, num_key_value_groups=2, dst_parts=2",
            "w -> q, k, v, fused_qkv_old, num_heads=2, num_key_value_groups=2, axis=1, src_parts=2",
        ),
        ("w -> gate, up, fused_ffn, axis=0", "gate, up -> w, fused_ffn, axis=0"),
        ("l.$LAYER_ID.w -> m.$LAYER_ID-1.w", "m.$LAYER_ID-1.w -> l.$LAYER_ID.w"),
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
