"""The forms of the language that acceptance cases and random programs do not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from remesh import MismatchError, Transform
from remesh.core.geometry import Box
from remesh.errors import TransformError
from remesh.transform import TensorInfo, arrays
from tests.transform.simulated import Array, numbered


def layers(form: str, *numbers: int) -> dict[str, Array]:
    """A tensor of one element for each layer or expert: its number."""
    return {form.format(number): numbered(1, start=number) for number in numbers}


def filled(text: str, tensors: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Any]:
    """What a program makes of arrays for targets of some shapes."""
    return Transform(text).apply(tensors, {name: np.full_like(a, -1) for name, a in like.items()})


X, Q, K, V = (numbered(*shape) for shape in ((2, 3, 4), (3, 8), (3, 4), (3, 4)))
HEADS = "num_heads=4, num_key_value_groups=2"
BY_RANK = np.concatenate(
    [x[:, n * len(x[0]) // 2 :][:, : len(x[0]) // 2] for n in (0, 1) for x in (Q, K, V)], 1
)
GATE, UP = numbered(2, 4), numbered(2, 4, start=50)
EXPERTS = {f"e.{n}.w": numbered(2, 3, start=10 * n) for n in range(4)}

FORMS: dict[str, tuple[str, dict[str, Array], dict[str, Array]]] = {
    "an order of axes from the end": (
        "x -> y, permute=[-1, 0, 1]",
        {"x": X},
        {"y": X.transpose(2, 0, 1)},
    ),
    "a reshape": ("x -> y, reshape='[2,2,6]'", {"x": X}, {"y": X.reshape(2, 2, 6)}),
    "a reshape of what has the shape already": (
        "x -> y, reshape=[2, 3, 4]",
        {"x": X},
        {"y": X.reshape(6, 4)},
    ),
    "a bias of fused projections": (
        f"q, k, v -> w, fused_qkv, {HEADS}, axis=0",
        {"q": numbered(4), "k": numbered(2, start=10), "v": numbered(2, start=20)},
        {"w": np.array([0, 1, 10, 20, 2, 3, 11, 21], np.float32)},
    ),
    "projections fused by rank": (
        f"q, k, v -> w, fused_qkv_old, {HEADS}, dst_parts=2",
        {"q": Q, "k": K, "v": V},
        {"w": BY_RANK},
    ),
    "projections apart again": (
        f"w -> q, k, v, fused_qkv_old, {HEADS}, src_parts=2",
        {"w": BY_RANK},
        {"q": Q, "k": K, "v": V},
    ),
    "gate and up by a stated degree": (
        "gate, up -> w, fused_ffn, dst_parts=2",
        {"gate": GATE, "up": UP},
        {"w": np.concatenate([GATE[:, :2], UP[:, :2], GATE[:, 2:], UP[:, 2:]], 1)},
    ),
    "a stack of a star": (
        "e.*.w -> w, stack=-1",
        EXPERTS,
        {"w": np.stack([*EXPERTS.values()], -1)},
    ),
    "arrays": (
        "q[0:2], k[0:1] -> a, axis=0",
        {**layers("q_{}", 0, 1), "k_0": numbered(1, start=2)},
        {"a": numbered(3)},
    ),
    "layers": (
        "l.$LAYER_ID.w -> m.$LAYER_ID.w",
        layers("l.{}.w", 0, 3, 12),
        layers("m.{}.w", 0, 3, 12),
    ),
    "all layers shifted at once": (
        "l.$LAYER_ID.w -> l.$LAYER_ID+2.w",
        layers("l.{}.w", 0, 1, 2),
        {f"l.{n + 2}.w": numbered(1, start=n) for n in range(3)},
    ),
    "an offset on the left": (
        "l.$LAYER_ID+5.w -> m.$LAYER_ID.w",
        layers("l.{}.w", 5, 6),
        {f"m.{n - 5}.w": numbered(1, start=n) for n in (5, 6)},
    ),
    "the layer before": (
        "l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w",
        layers("l.{}.w", 1, 2),
        {f"l.{n - 1}.w": numbered(1, start=n) for n in (1, 2)},
    ),
    "a star over what an earlier statement made": (
        "e.$EXPERT_ID.w^T -> turned.$EXPERT_ID.w\n turned.*.w -> f, axis=0",
        EXPERTS,
        {"f": np.concatenate([array.T for array in EXPERTS.values()])},
    ),
    "a star without what was deleted": (
        "e.1.w -> _\n e.*.w -> f, axis=0",
        layers("e.{}.w", 0, 1, 2),
        {"f": numbered(2) * 2},
    ),
    "quoted names": (
        "'0-weird/name' -> \"a b\"\n tie -> x",
        {"0-weird/name": numbered(2), "tie": numbered(3)},
        {"a b": numbered(2), "x": numbered(3)},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    text, tensors, expected = FORMS[form]
    for found in (Transform(text).apply(tensors), filled(text, tensors, expected)):
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, name)


def test_star_on_the_right_goes_by_number() -> None:
    like = {f"e.{n}.w": numbered(1, start=at) for at, n in enumerate((2, 9, 10))}
    assert filled("f -> e.*.w, axis=0", {"f": numbered(3)}, dict(reversed(like.items()))) == like


def test_split_into_the_sizes_of_targets() -> None:
    """Through later statements that only pass the parts on."""
    text = """
        a -> b, c, axis=0, sizes=targets
        b^T -> turned
        turned -> out.b, dtype=float32
    """
    a = {"a": numbered(4, 2)}
    result = filled(text, a, {"out.b": numbered(2, 3), "c": numbered(1, 2)})
    assert result["out.b"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert result["c"].tolist() == [[6, 7]]
    says = "'b' goes to no target that would tell its size"
    with pytest.raises(TransformError, match=says):
        Transform("a -> b, c, axis=0, sizes=targets").apply(a)
    with pytest.raises(TransformError, match=says):
        filled("a -> b, c, axis=1, sizes=targets", a, {"b": numbered(4), "c": numbered(4, 1)})


@pytest.mark.parametrize(
    ("box", "num_regions"),
    [(Box((3, 1), (3, 3)), 1), (Box((2, 1), (2, 3)), 2), (Box((0, 0), (6, 4)), 1)],
)
def test_a_reshape_cuts_only_what_is_no_box_on_both_sides(box: Box, num_regions: int) -> None:
    resolved = Transform("x -> y, reshape=[6, 4]").resolve({"x": TensorInfo("int8", (2, 3, 4))})
    assert len(resolved.regions("y", box)) == num_regions


def test_delete_ignores_a_source_and_leaves_a_target_of_its_name_alone() -> None:
    t = {"a": numbered(2), "b": numbered(2)}
    a, b = np.full(2, 5, np.float32), np.zeros(2, np.float32)
    resolved = Transform("a -> _").resolve(arrays.describe(t), arrays.describe(t))
    assert resolved.kept == {"a": "'a' is deleted by statement 1"}
    assert resolved.deleted == ("a",)
    arrays.apply(resolved, t, {"a": a, "b": b})
    assert a.tolist() == [5, 5]
    assert b.tolist() == [0, 1]
    assert Transform("a -> _").apply(t).keys() == {"b"}


def test_a_deletion_among_renames_has_the_number_of_its_statement() -> None:
    rules = Transform({"b": "x", "c": None})
    sources = arrays.describe({"b": numbered(2), "c": numbered(2)})
    targets = arrays.describe({"x": numbered(2), "c": numbered(2)})
    assert str(rules.bind(sources)) == "c -> _\nb -> x"
    assert rules.resolve(sources, targets).kept == {"c": "'c' is deleted by statement 1"}


def test_tie_compares_bits() -> None:
    tie = Transform("a, b -> c, tie")
    same = np.array([np.nan, 1], np.float32)
    np.testing.assert_array_equal(tie.apply({"a": same, "b": same.copy()})["c"], same)
    for one, other in ((0.0, -0.0), (1.0, 2.0)):
        target = {"c": np.full(2, 9, np.float32)}
        t = {"a": np.array([3, one], np.float32), "b": np.array([3, other], np.float32)}
        with pytest.raises(TransformError, match="1 of 2 elements differ"):
            tie.apply(t, target)
        assert target["c"].tolist() == [9, 9]


def test_float16_wanted_from_bfloat16_is_refused() -> None:
    """One name is a part of the other; only equal names are equal."""
    with pytest.raises(TransformError, match="target 'b' is float16, but this makes it bfloat16"):
        Transform("a -> b").apply(
            {"a": torch.ones(2, dtype=torch.bfloat16)}, {"b": torch.ones(2, dtype=torch.float16)}
        )


def test_missing_targets_are_all_listed() -> None:
    targets = {name: np.zeros(2, np.float32) for name in ("a", "weigth", "c")}
    with pytest.raises(MismatchError, match="nearest: 'weight'") as caught:
        Transform("").apply({"a": numbered(2), "weight": numbered(2)}, targets)
    assert caught.value.missing == ("weigth", "c")
    assert "_ -> c" in str(caught.value)


def test_report_of_what_is_left_over() -> None:
    infos = {name: TensorInfo("float32", (2,)) for name in ("a", "b", "c", "d", "e")}
    targets = {name: TensorInfo("float32", (2,)) for name in ("x", "d", "e")}
    resolved = Transform("a -> x  b -> y  c -> _  _ -> e").resolve(infos, targets)
    assert resolved.unused == ("b", "e")
    assert resolved.unused_results == ("y",)
    assert resolved.deleted == ("c",)
    assert resolved.untouched == {"d"}
    assert resolved.kept == {"e": "'e' is added by statement 4"}
    assert resolved.sources_of("x") == ("a",)
    assert resolved.sources_of("e") == ()


@pytest.mark.parametrize(
    ("text", "reverse"),
    [
        ("a -> b\nc, d -> e, axis=1", "e -> c, d, axis=1\nb -> a"),
        ("_ -> z  a -> _", "_ -> a\nz -> _"),
        ("a -> b, c, axis=0, sizes=[1, 2]", "b, c -> a, axis=0"),
        ("a, b -> c, stack=-1", "c -> a, b, unstack=-1"),
        ("c -> e.*.w, unstack=0", "e.*.w -> c, stack=0"),
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a -> b, dtype=float32", "does not say what to go back to"),
        ("a -> b, reshape=[2, 3]", "fewer than three axes"),
    ],
)
def test_reverse_refuses_what_has_no_opposite(text: str, says: str) -> None:
    with pytest.raises(TransformError, match=says):
        Transform(text).reversed()


@pytest.mark.parametrize("text", ["x, tie -> a, axis=0", "x, fused_qkv, untie -> a, stack=0"])
def test_the_text_of_a_reversed_statement_reads_flags_as_names(text: str) -> None:
    back = Transform(text).reversed()
    names = list(text.split(" -> ", maxsplit=1)[0].split(", "))
    whole = {"a": numbered(len(names), 3)}
    found = Transform(str(back)).apply(whole)
    assert sorted(found) == sorted(names)
    for name in names:
        np.testing.assert_array_equal(found[name], back.apply(whole)[name])
