"""The forms of the language that the acceptance cases do not have, and what goes beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from remesh import MismatchError, Transform
from remesh.errors import TransformError
from remesh.transform import TensorInfo, arrays
from tests.transform.simulated import Array


def numbered(*shape: int, start: int = 0) -> Array:
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def apply(text: str, **tensors: Any) -> dict[str, Any]:
    return Transform(text).apply(tensors)


def run(
    text: str,
    tensors: Mapping[str, Array],
    targets: Mapping[str, tuple[int, ...]],
    *,
    source_pieces: Mapping[str, tuple[int, ...]] | None = None,
    target_pieces: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Array]:
    """Apply a program to float32 arrays that are cut as stated."""
    sources = {
        name: TensorInfo("float32", array.shape, (source_pieces or {}).get(name))
        for name, array in tensors.items()
    }
    infos = {
        name: TensorInfo("float32", shape, (target_pieces or {}).get(name))
        for name, shape in targets.items()
    }
    resolved = Transform(text).resolve(sources, infos)
    resolved.check()
    filled = {name: np.full(shape, -1, np.float32) for name, shape in targets.items()}
    return arrays.apply(resolved, tensors, filled)


def names(*letters: str, shape: tuple[int, ...] = (2, 3)) -> dict[str, Array]:
    return {letter: numbered(*shape, start=100 * n) for n, letter in enumerate(letters)}


# The forms, in the order of docs/transform.md.


def test_transposition_before_concatenation() -> None:
    t = names("q", "k", "v")
    result = apply("q^T, k^T, v^T -> qkv, axis=1", **t)
    assert np.array_equal(result["qkv"], np.concatenate([t["q"].T, t["k"].T, t["v"].T], 1))


def test_permutation() -> None:
    x = numbered(2, 3, 4)
    assert np.array_equal(apply("x -> y, permute='[2,0,1]'", x=x)["y"], x.transpose(2, 0, 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cast(dtype: str) -> None:
    a = torch.tensor([0.1, 1.1], dtype=torch.float32)
    result = apply(f"a -> b, dtype='{dtype}'", a=a)["b"]
    assert torch.equal(result, a.to(getattr(torch, dtype)))
    assert result.dtype == getattr(torch, dtype)


def test_cast_with_both_dtypes() -> None:
    a = torch.tensor([0.1, 1.1])
    text = "a -> b, src_dtype='float32', dst_dtype='bfloat16'"
    assert torch.equal(apply(text, a=a)["b"], a.to(torch.bfloat16))
    with pytest.raises(TransformError, match="'a' is float64, not float32"):
        apply(text, a=a.double())


def test_add_keeps_the_initial_value_even_if_there_is_a_source() -> None:
    z = np.full((2,), 7.0, np.float32)
    Transform("_ -> z").apply({"z": np.zeros(2, np.float32)}, {"z": z})
    assert z.tolist() == [7, 7]


def test_delete_ignores_a_source_and_leaves_a_target_of_its_name_alone() -> None:
    t = {"a": numbered(2), "b": numbered(2)}
    a, b = np.full(2, 5, np.float32), np.zeros(2, np.float32)
    resolved = Transform("a -> _").resolve(arrays.describe(t), arrays.describe(t))
    assert resolved.kept == {"a": "'a' is deleted by statement 1"}
    assert resolved.deleted == ("a",)
    arrays.apply(resolved, t, {"a": a, "b": b})
    assert a.tolist() == [5, 5]
    assert b.tolist() == [0, 1]
    assert apply("a -> _", **t).keys() == {"b"}


def test_a_deletion_among_renames_has_the_number_of_its_statement() -> None:
    rules = Transform({"b": "x", "c": None})
    sources = arrays.describe({"b": numbered(2), "c": numbered(2)})
    targets = arrays.describe({"x": numbered(2), "c": numbered(2)})
    assert str(rules.bind(sources)) == "c -> _\nb -> x"
    assert rules.resolve(sources, targets).kept == {"c": "'c' is deleted by statement 1"}


def test_a_name_can_be_bound_again() -> None:
    a = numbered(2, 3)
    result = apply("a -> a, permute='[1,0]'\n a -> b, c, d, axis=0", a=a)
    assert [result[name].tolist() for name in "bcd"] == [[[0, 3]], [[1, 4]], [[2, 5]]]


def test_one_name_on_either_side_with_an_axis_is_a_rename() -> None:
    a = numbered(2, 3)
    assert np.array_equal(apply("a -> b, axis=0", a=a)["b"], a)


def test_star_on_the_right_goes_by_number() -> None:
    result = run("f -> e.*.w, axis=0", {"f": numbered(3)}, {f"e.{n}.w": (1,) for n in (10, 9, 2)})
    assert {name: array.tolist() for name, array in result.items()} == {
        "e.2.w": [0],
        "e.9.w": [1],
        "e.10.w": [2],
    }


def test_arrays() -> None:
    t = {"q_0": numbered(1), "q_1": numbered(1, start=1), "k_0": numbered(1, start=2)}
    assert apply("q[0:2], k[0:1] -> a, axis=0", **t)["a"].tolist() == [0, 1, 2]


def test_layers() -> None:
    t = {f"l.{n}.w": numbered(2, start=n) for n in (0, 3, 12)}
    result = Transform("l.$LAYER_ID.w -> m.$LAYER_ID.w").apply(t)
    assert list(result) == ["m.0.w", "m.3.w", "m.12.w"]
    assert result["m.12.w"].tolist() == [12, 13]


def test_layer_offset() -> None:
    t = {f"l.{n}.w": numbered(1, start=n) for n in (1, 2, 3)}
    result = run(
        "l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w", t, {f"l.{n}.w": (1,) for n in (0, 1, 2)}
    )
    assert [result[f"l.{n}.w"].tolist() for n in (0, 1, 2)] == [[1], [2], [3]]


def test_layer_offset_refuses_to_go_below_zero() -> None:
    t = {"l.0.w": numbered(1), "l.1.w": numbered(1)}
    with pytest.raises(TransformError, match=r"\$LAYER_ID=0"):
        Transform("l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w").apply(t)


HEADS = "num_heads=4, num_key_value_groups=2"


def fused(q: Array, k: Array, v: Array, groups: int, axis: int) -> Array:
    """Per group: its query heads, key heads, value heads."""
    parts = [np.split(x, groups, axis) for x in (q, k, v)]
    return np.concatenate([x[group] for group in range(groups) for x in parts], axis)


def qkv(axis: int = 1) -> dict[str, Array]:
    shapes = {"q": 8, "k": 4, "v": 4}
    return {
        name: numbered(*((3, rows) if axis else (rows,)), start=100 * n)
        for n, (name, rows) in enumerate(shapes.items())
    }


def test_fused_qkv_bias() -> None:
    t = qkv(axis=0)
    result = apply(f"q, k, v -> qkv, fused_qkv, {HEADS}, axis=0", **t)
    assert np.array_equal(result["qkv"], fused(**t, groups=2, axis=0))
    with pytest.raises(TransformError, match="there is no axis 1"):
        apply(f"q, k, v -> qkv, fused_qkv, {HEADS}", **t)


def test_fused_qkv_old_changes_the_degree() -> None:
    t = qkv()
    result = run(
        f"w -> w, fused_qkv_old, {HEADS}",
        {"w": fused(**t, groups=1, axis=1)},
        {"w": (3, 16)},
        target_pieces={"w": (1, 2)},
    )
    assert np.array_equal(result["w"], fused(**t, groups=2, axis=1))


def test_fused_qkv_old_joined_and_taken_apart() -> None:
    t = qkv()
    joined = run(
        f"q, k, v -> w, fused_qkv_old, {HEADS}", t, {"w": (3, 16)}, target_pieces={"w": (1, 2)}
    )
    assert np.array_equal(joined["w"], fused(**t, groups=2, axis=1))
    apart = run(
        f"w -> q, k, v, fused_qkv_old, {HEADS}",
        joined,
        {name: array.shape for name, array in t.items()},
        source_pieces={"w": (1, 2)},
    )
    assert all(np.array_equal(apart[name], t[name]) for name in t)


def test_fused_ffn_changes_the_degree() -> None:
    gate, up = numbered(2, 6), numbered(2, 6, start=50)
    both = np.concatenate([gate, up], 1)
    result = run(
        "w -> w, fused_ffn",
        {
            "w": np.concatenate(
                [x for n in (0, 3) for x in (gate[:, n : n + 3], up[:, n : n + 3])], 1
            )
        },
        {"w": (2, 12)},
        source_pieces={"w": (1, 2)},
        target_pieces={"w": (1, 3)},
    )
    thirds = [x[:, n : n + 2] for n in (0, 2, 4) for x in (gate, up)]
    assert np.array_equal(result["w"], np.concatenate(thirds, 1))
    assert sorted(result["w"].ravel()) == sorted(both.ravel())


def test_fused_ffn_joined_and_taken_apart() -> None:
    t = {"gate": numbered(2, 4), "up": numbered(2, 4, start=50)}
    joined = run("gate, up -> w, fused_ffn", t, {"w": (2, 8)}, target_pieces={"w": (1, 2)})
    assert joined["w"][0].tolist() == [0, 1, 50, 51, 2, 3, 52, 53]
    apart = run(
        "w -> gate, up, fused_ffn",
        joined,
        {"gate": (2, 4), "up": (2, 4)},
        source_pieces={"w": (1, 2)},
    )
    assert all(np.array_equal(apart[name], t[name]) for name in t)


def test_export_of_a_tied_model() -> None:
    t = {"embed.weight": numbered(4, 3), "lm_head.weight": numbered(4, 3)}
    assert Transform("lm_head.weight -> _").apply(t).keys() == {"embed.weight"}


def test_router_kept_in_float32() -> None:
    name = "model.layers.{}.mlp.gate.weight"
    t = {name.format(n): torch.tensor([1.5], dtype=torch.bfloat16) for n in range(2)}
    pattern = name.format("$LAYER_ID")
    result = Transform(f"{pattern} -> {pattern}, dtype='float32'").apply(t)
    assert [result[name.format(n)].dtype for n in range(2)] == [torch.float32] * 2


def test_reshape_both_ways() -> None:
    w = numbered(8, 6)
    text = "w -> v, reshape='[2,4,6]'"
    grouped = apply(text, w=w)["v"]
    assert np.array_equal(grouped, w.reshape(2, 4, 6))
    assert np.array_equal(apply(text, w=grouped)["v"], w)
    assert apply("w -> v, reshape=[2, 4, 2, 3]", w=numbered(2, 4, 2, 3))["v"].shape == (8, 6)
    with pytest.raises(TransformError, match="not as many elements"):
        apply("w -> v, reshape=[2, 4, 7]", w=w)


# Beyond the forms of the reference.


def test_uneven_split() -> None:
    result = apply("a -> b, c, d, axis=0, sizes=[3, 0, 1]", a=numbered(4))
    assert [result[name].tolist() for name in "bcd"] == [[0, 1, 2], [], [3]]
    with pytest.raises(TransformError, match="add up to 3, and the axis has extent 4"):
        apply("a -> b, c, axis=0, sizes=[2, 1]", a=numbered(4))
    with pytest.raises(TransformError, match="2 sizes for 3 names"):
        apply("a -> b, c, d, axis=0, sizes=[2, 2]", a=numbered(4))


def test_split_into_the_sizes_of_targets() -> None:
    """Through later statements that only pass the parts on."""
    text = """
        a -> b, c, axis=0, sizes=targets
        b^T -> turned
        turned -> out.b, dtype=float32
    """
    result = run(text, {"a": numbered(4, 2)}, {"out.b": (2, 3), "c": (1, 2)})
    assert result["out.b"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert result["c"].tolist() == [[6, 7]]
    with pytest.raises(TransformError, match="goes to no target that would tell its size"):
        apply("a -> b, c, axis=0, sizes=targets", a=numbered(4, 2))
    with pytest.raises(TransformError, match="'b' goes to no target that would tell its size"):
        run("a -> b, c, axis=1, sizes=targets", {"a": numbered(4, 2)}, {"b": (4,), "c": (4, 1)})


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_stack_and_unstack(axis: int) -> None:
    t = {f"e.{n}.w": numbered(2, 3, start=10 * n) for n in range(4)}
    grouped = Transform(f"e.*.w -> w, stack={axis}").apply(t)["w"]
    assert np.array_equal(grouped, np.stack(list(t.values()), axis))
    back = Transform(f"w -> e.*.w, unstack={axis}, parts=4").apply({"w": grouped})
    assert all(np.array_equal(back[name], t[name]) for name in t)


def test_unstack_needs_as_many_names_as_there_are() -> None:
    with pytest.raises(TransformError, match="extent 2, but there are 3 names"):
        apply("w -> a, b, c, unstack=0", w=numbered(2, 3))


def test_general_offsets_shift_all_layers_at_once() -> None:
    t = {f"l.{n}.w": numbered(1, start=n) for n in range(3)}
    result = Transform("l.$LAYER_ID.w -> l.$LAYER_ID+2.w").apply(t)
    assert {name: array.tolist() for name, array in result.items()} == {
        "l.2.w": [0],
        "l.3.w": [1],
        "l.4.w": [2],
    }


def test_offsets_on_the_left() -> None:
    t = {f"l.{n}.w": numbered(1, start=n) for n in (5, 6)}
    result = Transform("l.$LAYER_ID+5.w -> m.$LAYER_ID.w").apply(t)
    assert {name: array.tolist() for name, array in result.items()} == {"m.0.w": [5], "m.1.w": [6]}


def test_negative_axes() -> None:
    t = names("a", "b")
    assert apply("a, b -> c, axis=-1", **t)["c"].shape == (2, 6)
    assert apply("a -> b, c, axis=-2", **t)["b"].shape == (1, 3)
    assert apply("x -> y, permute=[-1, 0, 1]", x=numbered(2, 3, 4))["y"].shape == (4, 2, 3)


def test_tie_compares() -> None:
    embed = numbered(4, 3)
    text = "embed, head -> shared, tie"
    assert np.array_equal(apply(text, embed=embed, head=embed.copy())["shared"], embed)
    other = embed.copy()
    other[1, 2] += 1
    target = {"shared": np.zeros((4, 3), np.float32)}
    with pytest.raises(TransformError, match="1 of 12 elements differ"):
        Transform(text).apply({"embed": embed, "head": other}, target)
    assert not target["shared"].any()


def test_tie_compares_bits() -> None:
    nan = np.array([np.nan, 1], np.float32)
    assert np.isnan(apply("a, b -> c, tie", a=nan, b=nan.copy())["c"][0])
    with pytest.raises(TransformError, match="differ"):
        apply("a, b -> c, tie", a=np.zeros(1, np.float32), b=-np.zeros(1, np.float32))


def test_untie_copies() -> None:
    result = apply("shared -> embed, head, untie", shared=numbered(2, 3))
    assert np.array_equal(result["embed"], result["head"])
    assert result.keys() == {"embed", "head"}


def test_degrees_can_be_stated() -> None:
    t = {"gate": numbered(2, 4), "up": numbered(2, 4, start=50)}
    result = apply("gate, up -> w, fused_ffn, dst_parts=2", **t)
    assert result["w"][0].tolist() == [0, 1, 50, 51, 2, 3, 52, 53]
    back = apply("w -> gate, up, fused_ffn, src_parts=2", **result)
    assert all(np.array_equal(back[name], t[name]) for name in t)


def test_quoted_names() -> None:
    t = {"0-weird/name": numbered(2), "tie": numbered(2)}
    result = Transform("'0-weird/name' -> \"a b\"\n tie -> x").apply(t)
    assert result.keys() == {"a b", "x"}


# Semantics.


def test_a_swap_needs_a_third_name() -> None:
    t = names("a", "b")
    result = run("a -> c  b -> a  c -> b", t, {"a": (2, 3), "b": (2, 3)})
    assert np.array_equal(result["a"], t["b"])
    assert np.array_equal(result["b"], t["a"])


def test_transposing_a_name_does_not_bind_it_again() -> None:
    a = numbered(2, 3)
    result = run("a^T -> b", {"a": a}, {"a": (2, 3), "b": (3, 2)})
    assert np.array_equal(result["a"], a)
    assert np.array_equal(result["b"], a.T)


def test_two_targets_may_read_overlapping_parts_of_one_source() -> None:
    a = numbered(4, 2)
    text = "a -> b, c, axis=0\n a -> d, e, axis=1\n a^T -> f"
    targets = {"a": (4, 2), "b": (2, 2), "c": (2, 2), "d": (4, 1), "e": (4, 1), "f": (2, 4)}
    result = run(text, {"a": a}, targets)
    assert np.array_equal(result["c"], a[2:])
    assert np.array_equal(result["d"], a[:, :1])
    assert np.array_equal(result["f"], a.T)
    assert np.array_equal(result["a"], a)


def test_wildcards_match_what_earlier_statements_made() -> None:
    t = {f"e.{n}.w": numbered(2, 3, start=10 * n) for n in range(2)}
    text = "e.$EXPERT_ID.w^T -> turned.$EXPERT_ID.w\n turned.*.w -> f, axis=0"
    result = Transform(text).apply(t)
    assert np.array_equal(result["f"], np.concatenate([t["e.0.w"].T, t["e.1.w"].T]))


def test_wildcards_do_not_match_what_was_deleted() -> None:
    t = {f"e.{n}.w": numbered(1, start=n) for n in range(3)}
    assert Transform("e.1.w -> _\n e.*.w -> f, axis=0").apply(t)["f"].tolist() == [0, 2]


def test_conversions_happen_one_after_the_other() -> None:
    a = torch.tensor([1.0 + 2**-9, 1.0 + 2**-12])
    text = "a -> b, dtype=bfloat16\n b -> c, dtype=float32"
    assert torch.equal(apply(text, a=a)["c"], a.bfloat16().float())


def test_float16_wanted_from_bfloat16_is_refused() -> None:
    """One name is a part of the other; only equal names are equal."""
    with pytest.raises(TransformError, match="target 'b' is float16, but this makes it bfloat16"):
        Transform("a -> b").apply(
            {"a": torch.ones(2, dtype=torch.bfloat16)}, {"b": torch.ones(2, dtype=torch.float16)}
        )


def test_target_and_source_may_share_memory() -> None:
    state = names("a", "b")
    before = {name: array.copy() for name, array in state.items()}
    Transform("a -> c  b -> a  c -> b").apply(state, {"a": state["a"], "b": state["b"]})
    assert np.array_equal(state["a"], before["b"])
    assert np.array_equal(state["b"], before["a"])


def test_missing_targets_are_all_listed() -> None:
    targets = {name: np.zeros(2, np.float32) for name in ("a", "weigth", "c")}
    with pytest.raises(MismatchError, match="nearest: 'weight'") as caught:
        Transform("").apply({"a": numbered(2), "weight": numbered(2)}, targets)
    assert caught.value.missing == ("weigth", "c")
    assert "_ -> c" in str(caught.value)


def test_report_of_what_is_left_over() -> None:
    infos = {name: TensorInfo("float32", (2,)) for name in ("a", "b", "c", "d")}
    targets = {name: TensorInfo("float32", (2,)) for name in ("x", "d", "e")}
    resolved = Transform("a -> x  b -> y  c -> _  _ -> e").resolve(infos, targets)
    assert resolved.unused == ("b",)
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
    t = {f"l.{n}.w": np.full(1, n) for n in (1, 2)}
    forth = Transform(text).apply(t)
    assert list(forth) == ["m.0.w", "m.1.w"]
    back = Transform(text).reversed().apply(forth)
    assert {name: array.tolist() for name, array in back.items()} == {"l.1.w": [1], "l.2.w": [2]}
