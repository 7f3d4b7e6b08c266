"""Optimizer state follows its parameter, by whatever name its system gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from remesh import MismatchError, Transform
from remesh.errors import TransformError
from remesh.transform import TensorInfo
from remesh.transform.optimizer_state import find_states
from tests.transform.simulated import Array


def numbered(*shape: int, start: int = 0) -> Array:
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def count(value: float) -> Array:
    return np.full(1, value, np.float32)


Naming = Callable[[str, str], str]

NAMINGS: dict[str, Naming] = {
    "suffix": lambda parameter, slot: f"{parameter}.{slot}",
    "torch": lambda parameter, slot: f"optimizer.state.{parameter}.{slot}",
    "bare torch": lambda parameter, slot: f"state.{parameter}.{slot}",
    "megatron": lambda parameter, slot: f"optimizer.state.{slot}.{parameter}",
}


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)
def test_states_go_the_way_of_their_parameter(naming: Naming) -> None:
    t: dict[str, Array] = {}
    for n, name in enumerate(("l.0.q", "l.0.k", "other")):
        t[name] = numbered(2, 3, start=100 * n)
        t[naming(name, "exp_avg")] = numbered(2, 3, start=1000 + 100 * n)
        t[naming(name, "exp_avg_sq")] = numbered(2, 3, start=2000 + 100 * n)
        t[naming(name, "step")] = np.full((), 7, np.float32)
    result = Transform("l.$LAYER_ID.q^T, l.$LAYER_ID.k^T -> l.$LAYER_ID.qk, axis=1").apply(t)
    assert result.keys() == {
        name if slot is None else naming(name, slot)
        for name in ("l.0.qk", "other")
        for slot in (None, "exp_avg", "exp_avg_sq", "step")
    }
    for slot in ("exp_avg", "exp_avg_sq"):
        parts = [t[naming(name, slot)].T for name in ("l.0.q", "l.0.k")]
        assert np.array_equal(result[naming("l.0.qk", slot)], np.concatenate(parts, 1))
        assert np.array_equal(result[naming("other", slot)], t[naming("other", slot)])
    assert result[naming("l.0.qk", "step")] == 7


def test_the_same_into_given_targets() -> None:
    """Any slot follows in PyTorch's style, known or not."""
    t = {
        "model.a": numbered(4, 2),
        "opt.state.a.exp_avg": numbered(4, 2, start=10),
        "opt.state.a.my_slot": numbered(4, 2, start=20),
        "opt.state.a.step": count(3),
    }
    names = [f"opt.state.{x}.{slot}" for x in "bc" for slot in ("exp_avg", "my_slot", "step")]
    targets = {
        name: np.zeros(1 if name.endswith("step") else (2, 2), np.float32)
        for name in ("model.b", "model.c", *names)
    }
    Transform("model.a -> model.b, model.c, axis=0").apply(t, targets)
    assert np.array_equal(targets["opt.state.c.exp_avg"], numbered(2, 2, start=14))
    assert np.array_equal(targets["opt.state.b.my_slot"], numbered(2, 2, start=20))
    assert [targets[f"opt.state.{x}.step"].tolist() for x in "bc"] == [[3], [3]]


def test_paddle_names_become_torch_names() -> None:
    t = {
        "a": numbered(2),
        "b": numbered(2),
        "a.moment1_0": numbered(2, start=10),
        "b.moment2_0": numbered(2, start=20),
        "a.w_0": numbered(2, start=30),
    }
    targets = {
        "model.c": np.zeros(2, np.float32),
        "model.b": np.zeros(2, np.float32),
        "optimizer.state.c.exp_avg": np.zeros(2, np.float32),
        "optimizer.state.b.exp_avg_sq": np.zeros(2, np.float32),
        "optimizer.state.c.master_param": np.zeros(2, np.float32),
    }
    Transform("a -> model.c\n b -> model.b").apply(t, targets)
    assert targets["optimizer.state.c.exp_avg"].tolist() == [10, 11]
    assert targets["optimizer.state.b.exp_avg_sq"].tolist() == [20, 21]
    assert targets["optimizer.state.c.master_param"].tolist() == [30, 31]


def test_untouched_states_are_found_under_other_names_too() -> None:
    targets = {"state.a.exp_avg": np.zeros(2, np.float32), "a": np.zeros(2, np.float32)}
    Transform("").apply({"a": numbered(2), "a.moment1_0": numbered(2, start=5)}, targets)
    assert targets["state.a.exp_avg"].tolist() == [5, 6]


def test_a_cast_leaves_states_alone() -> None:
    moment = torch.tensor([0.1, 1.1])
    t = {"a": torch.tensor([0.1, 1.1]), "a.exp_avg": moment, "a.w_0": moment * 3}
    result = Transform("a -> b, dtype=bfloat16").apply(t)
    assert result["b"].dtype == torch.bfloat16
    assert torch.equal(result["b.exp_avg"], moment)
    assert torch.equal(result["b.w_0"], moment * 3)


def test_a_parameter_can_be_made_of_its_master_weight() -> None:
    t = {"a.w_0": torch.tensor([0.1, 1.1]), "a.moment1_0": torch.tensor([3.0, 4.0])}
    targets = {
        "a": torch.zeros(2, dtype=torch.bfloat16),
        "a.w_0": torch.zeros(2),
        "a.moment1_0": torch.zeros(2),
    }
    Transform("a.w_0 -> a, dtype=bfloat16").apply(t, targets)
    assert torch.equal(targets["a"], t["a.w_0"].bfloat16())
    assert torch.equal(targets["a.w_0"], t["a.w_0"])
    assert torch.equal(targets["a.moment1_0"], t["a.moment1_0"])


def counted(**steps: Any) -> dict[str, Any]:
    t: dict[str, Any] = {}
    for name, step in steps.items():
        t[name] = numbered(2)
        t[f"{name}.exp_avg"] = numbered(2)
        t[f"{name}.step"] = step
    return t


def test_counts_that_merge_must_agree() -> None:
    merge = Transform("a, b -> c, axis=0")
    five, six = count(5), count(6)
    assert merge.apply(counted(a=five, b=five.copy()))["c.step"].tolist() == [5]
    targets = {"c": np.zeros(4, np.float32), "c.step": np.zeros(1, np.float32)}
    with pytest.raises(TransformError, match=r"c\.step: 'b\.step' must hold the same values as"):
        merge.apply(counted(a=five, b=six), targets)
    assert not targets["c"].any()


def test_counts_that_are_plain_values() -> None:
    merge = Transform("a, b -> c, axis=0")
    assert merge.apply(counted(a=5, b=5))["c.step"] == 5
    with pytest.raises(TransformError, match=r"'a\.step' and 'b.step' hold\nThese are 5 and 6"):
        merge.apply(counted(a=5, b=6))


def test_each_part_of_a_split_has_the_count() -> None:
    result = Transform("a -> b, c, axis=0").apply(counted(a=count(5)))
    assert result["b.step"].tolist() == result["c.step"].tolist() == [5]


def test_moments_of_one_element_are_not_counts() -> None:
    """Only the slot tells: shapes are equal."""
    t = {
        "a": numbered(1),
        "b": numbered(1, start=1),
        "a.moment1_0": numbered(1, start=10),
        "b.moment1_0": numbered(1, start=20),
        "a.beta1_pow_acc_0": count(0.9),
        "b.beta1_pow_acc_0": count(0.9),
    }
    result = Transform("a, b -> c, axis=0").apply(t)
    assert result["c.moment1_0"].tolist() == [10, 20]
    assert result["c.beta1_pow_acc_0"].tolist() == pytest.approx([0.9])


def test_states_without_their_parameters() -> None:
    """Statements still name parameters, with wildcards and macros."""
    t = {f"e.{n}.w.exp_avg": numbered(2, 4, start=10 * n) for n in range(3)}
    targets = {"f.exp_avg": np.zeros((6, 4), np.float32)}
    Transform("e.*.w -> f, axis=0").apply(t, targets)
    assert np.array_equal(targets["f.exp_avg"], np.concatenate(list(t.values())))
    back = {name: np.zeros((2, 4), np.float32) for name in t}
    Transform("f -> e.*.w, axis=0").apply(targets, back)
    assert all(np.array_equal(back[name], t[name]) for name in t)


def test_a_parameter_is_not_made_of_its_states() -> None:
    with pytest.raises(MismatchError, match="made of 'a', which the sources lack") as caught:
        Transform("a -> b").apply(
            {"a.exp_avg": numbered(2)},
            {"b": np.zeros(2, np.float32), "b.exp_avg": np.zeros(2, np.float32)},
        )
    assert caught.value.missing == ("b",)


def test_added_and_deleted_parameters_take_their_states_along() -> None:
    t = {"a": numbered(2), "a.exp_avg": numbered(2), "z.exp_avg": numbered(2)}
    names = ("a", "a.exp_avg", "z", "z.exp_avg")
    targets = {name: np.full(2, 9, np.float32) for name in names}
    infos = {name: TensorInfo("float32", (2,)) for name in t}
    transform = Transform("_ -> z\n a -> _")
    resolved = transform.resolve(infos, {name: TensorInfo("float32", (2,)) for name in names})
    assert resolved.kept.keys() == set(names)
    assert resolved.deleted == ("a", "a.exp_avg")
    transform.apply(t, targets)
    assert all(array.tolist() == [9, 9] for array in targets.values())


def test_a_missing_state_is_explained() -> None:
    t = {"a": numbered(2), "b": numbered(2), "a.exp_avg": numbered(2)}
    with pytest.raises(MismatchError, match=r"it follows 'c', which is made of 'b', of which"):
        Transform("a, b -> c, axis=0").apply(t)


def test_states_are_not_converted_unless_asked() -> None:
    sources = {"a": TensorInfo("float32", (4,)), "a.exp_avg": TensorInfo("float32", (4,))}
    targets = {
        "b": TensorInfo("float32", (2,)),
        "c": TensorInfo("float32", (2,)),
        "b.exp_avg": TensorInfo("bfloat16", (2,)),
    }
    split = Transform("a -> b, c, axis=0")
    with pytest.raises(TransformError, match=r"is bfloat16, but follows 'a\.exp_avg', which"):
        split.resolve(sources, targets)
    resolved = split.resolve(sources, targets, cast=True)
    assert [region.dtypes for region in resolved.regions("b.exp_avg")] == [("bfloat16",)]
    assert [region.dtypes for region in resolved.regions("b")] == [()]


def test_cast_converts_whatever_differs() -> None:
    sources = {
        "a": TensorInfo("float32", (4,)),
        "a.exp_avg": TensorInfo("float32", (4,)),
        "b": TensorInfo("float32", (4,)),
    }
    targets = {
        "c": TensorInfo("float16", (4,)),
        "c.exp_avg": TensorInfo("bfloat16", (4,)),
        "b": TensorInfo("float16", (4,)),
    }
    rename = Transform("a -> c")
    resolved = rename.resolve(sources, targets, cast=True)
    resolved.check()
    dtypes = {name: [region.dtypes for region in resolved.regions(name)] for name in targets}
    assert dtypes == {"c": [("float16",)], "c.exp_avg": [("bfloat16",)], "b": [("float16",)]}


def test_states_of_other_shapes_follow_renames_only() -> None:
    """Factored second moments have a row and a column, which no split or permutation knows of."""
    t = {"a": numbered(2, 4), "state.a.step": count(1)}
    t.update({"state.a.row": numbered(2), "state.a.col": numbered(4)})
    result = Transform("a -> b").apply(t)
    assert result["state.b.row"].shape == (2,)
    assert result["state.b.col"].shape == (4,)
    with pytest.raises(TransformError, match=r"'state.a.row' has shape \(2,\), the parameter 'a'"):
        Transform("a^T -> b").apply(t)
    stated = Transform("a^T -> b  state.a.row -> state.b.col  state.a.col -> state.b.row")
    assert stated.apply(t)["state.b.row"].shape == (4,)


def test_a_statement_for_a_state_comes_first() -> None:
    t = {"a": numbered(2), "a.exp_avg": numbered(2, start=5), "x": numbered(2, start=7)}
    result = Transform("a -> b  x -> b.exp_avg").apply(t)
    assert result["b.exp_avg"].tolist() == [7, 8]


def test_statements_that_contradict_following_are_refused() -> None:
    t = {"a": numbered(2), "a.exp_avg": numbered(2)}
    targets = {"b.exp_avg": np.zeros(2, np.float32)}
    for text in ("a -> b  a.exp_avg -> _", "a -> b  a.exp_avg^T -> a.exp_avg"):
        with pytest.raises(TransformError, match="Statement 2 says otherwise"):
            Transform(text).apply(t, targets)


def test_tied_parameters_have_one_state() -> None:
    """An untied model is made of a tied one, whose optimizer knows one of the two names."""
    t: dict[str, Array] = {
        "model.embed.weight": numbered(3, 2),
        "optimizer.state.embed.weight.exp_avg": numbered(3, 2, start=10),
        "optimizer.state.embed.weight.step": count(4),
    }
    names = ["embed.weight", "lm_head.weight"]
    targets = {
        f"{prefix}{name}{suffix}": np.zeros(1 if suffix == ".step" else (3, 2), np.float32)
        for name in names
        for prefix, suffix in [
            ("model.", ""),
            ("optimizer.state.", ".exp_avg"),
            ("optimizer.state.", ".step"),
        ]
    }
    Transform("model.embed.weight -> model.lm_head.weight").apply(t, targets)
    for name in names:
        assert np.array_equal(targets[f"model.{name}"], t["model.embed.weight"])
        assert targets[f"optimizer.state.{name}.exp_avg"][0, 0] == 10
        assert targets[f"optimizer.state.{name}.step"].tolist() == [4]


def test_an_alias_finds_the_states_of_its_tensor() -> None:
    info = TensorInfo("float32", (4, 2))
    sources = {"embed": info, "head": info, "embed.exp_avg": info}
    targets = {"a": TensorInfo("float32", (2, 2)), "b": TensorInfo("float32", (2, 2))}
    targets["a.exp_avg"] = targets["a"]
    split = Transform("head -> a, b, axis=0")
    assert split.resolve(sources, targets).missing.keys() == {"a.exp_avg"}
    resolved = split.resolve(sources, targets, aliases={"head": "embed"})
    assert resolved.sources_of("a.exp_avg") == ("embed.exp_avg",)


def test_tie_takes_the_state_of_whoever_has_one() -> None:
    t = {"embed": numbered(2), "head": numbered(2), "head.exp_avg": numbered(2, start=5)}
    assert Transform("embed, head -> w, tie").apply(t)["w.exp_avg"].tolist() == [5, 6]


def test_tie_compares_states() -> None:
    t = counted(embed=count(1), head=count(1))
    tie = Transform("embed, head -> w, tie")
    assert tie.apply(t)["w.exp_avg"].tolist() == [0, 1]
    t["head.exp_avg"] = t["head.exp_avg"] + 1
    with pytest.raises(TransformError, match=r"w.exp_avg: 'head.exp_avg' must hold the same"):
        tie.apply(t)


def two_models() -> dict[str, Array]:
    names = ("model.a", "ema.a", "optimizer.state.a.exp_avg")
    return {name: numbered(4, start=10 * n) for n, name in enumerate(names)}


def test_an_owner_that_cannot_be_told_must_be_stated() -> None:
    targets = {
        name: np.zeros(2, np.float32)
        for name in ("model.b", "model.c", "optimizer.state.b.exp_avg", "optimizer.state.c.exp_avg")
    }
    text = "model.a -> model.b, model.c, axis=0"
    with pytest.raises(TransformError, match=r"(?s)of 'model\.a' or of 'ema\.a'.*\n?.*owners="):
        Transform(text).apply(two_models(), targets)
    owned = Transform(text, owners={"optimizer.state.": "model."})
    owned.apply(two_models(), targets)
    assert targets["optimizer.state.c.exp_avg"].tolist() == [22, 23]


def test_an_owner_that_does_not_matter_need_not_be_stated() -> None:
    t = {**two_models(), "x": numbered(2)}
    result = Transform("x -> y").apply(t)
    assert np.array_equal(result["optimizer.state.a.exp_avg"], t["optimizer.state.a.exp_avg"])


def test_names_that_only_look_like_states() -> None:
    """A module may be called `state`, and a buffer `step`."""
    t = {
        "m.state.proj.weight": numbered(2),
        "m.state.proj.bias": numbered(2, start=5),
        "scheduler.step": numbered(1),
        "m.proj": numbered(3),
    }
    assert Transform("m.proj -> m.out").apply(t).keys() == {
        "m.state.proj.weight",
        "m.state.proj.bias",
        "scheduler.step",
        "m.out",
    }
    renamed = Transform("m.state.proj.weight -> m.weight").apply(t)
    assert renamed["m.weight"].tolist() == [0, 1]


def test_parameters_inside_a_module_called_state() -> None:
    names = ["model.state.w", "optimizer.state.state.w.exp_avg", "model.v"]
    states = find_states([*names, "optimizer.state.v.exp_avg"], [], {})
    assert states.by_name["optimizer.state.v.exp_avg"].parameter == "model.v"
    assert states.by_name["optimizer.state.state.w.exp_avg"].parameter == "model.state.w"


def test_two_optimizers_of_one_parameter_keep_apart() -> None:
    t = {
        "a": numbered(2),
        "first.state.a.exp_avg": numbered(2, start=10),
        "second.state.a.exp_avg": numbered(2, start=20),
    }
    result = Transform("a -> b").apply(t)
    assert result["first.state.b.exp_avg"].tolist() == [10, 11]
    assert result["second.state.b.exp_avg"].tolist() == [20, 21]


def test_real_optimizer_names() -> None:
    """As PyTorch names them, from a model that trained a step."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    t: dict[str, Any] = {f"model.{name}": tensor for name, tensor in weights.items()}
    per_parameter = states["state"]
    assert isinstance(per_parameter, dict)
    for name, slots in per_parameter.items():
        assert isinstance(slots, dict)
        t.update({f"optimizer.state.{name}.{slot}": value for slot, value in slots.items()})
    text = "model.$LAYER_ID.weight -> model.$LAYER_ID.up, model.$LAYER_ID.down, axis=0"
    result = Transform(text).apply(t)
    assert torch.equal(
        result["optimizer.state.0.down.exp_avg"], t["optimizer.state.0.weight.exp_avg"][3:]
    )
    assert torch.equal(result["optimizer.state.1.up.step"], torch.tensor(1.0))
    assert torch.equal(
        result["optimizer.state.1.bias.exp_avg"], t["optimizer.state.1.bias.exp_avg"]
    )


def test_outputs_beside_the_targets() -> None:
    """An optimizer that has no state yet learns from them what there will be."""
    slots = ("exp_avg", "step")

    def infos(shape: tuple[int, ...], *names: str) -> dict[str, TensorInfo | None]:
        found: dict[str, TensorInfo | None] = {}
        for name in names:
            found[f"model.{name}"] = TensorInfo("float32", shape)
            found[f"opt.state.{name}.exp_avg"] = TensorInfo("float32", shape)
            found[f"opt.state.{name}.step"] = TensorInfo("float32", ())
        return found

    sources = infos((4, 2), "grouped", "embed", "other")
    targets = {
        name: info
        for name, info in [
            *infos((2, 2), "e.0", "e.1").items(),
            *infos((4, 2), "embed", "head", "other").items(),
        ]
        if name.startswith("model.")
    }
    transform = Transform("model.grouped -> model.e.*, axis=0\n model.embed -> model.head")
    resolved = transform.resolve(sources, targets, with_outputs=True)
    resolved.check()
    names = ("e.0", "e.1", "embed", "head", "other")
    assert resolved.targets.keys() == {
        *targets,
        *(f"opt.state.{name}.{slot}" for name in names for slot in slots),
    }
    assert resolved.targets["opt.state.e.1.exp_avg"] == TensorInfo("float32", (2, 2))
    assert resolved.targets["opt.state.e.1.step"] == TensorInfo("float32", ())
    assert resolved.sources_of("opt.state.head.exp_avg") == ("opt.state.embed.exp_avg",)


def test_placeholders_find_states_whose_slot_has_a_number() -> None:
    state = {"l.0.w": np.zeros(2), "l.0.w.moment1_0": np.ones(2)}
    text = "l.$LAYER_ID.w.moment1_0 -> m.$LAYER_ID.moment"
    assert set(Transform(text).apply(state)) == {"l.0.w", "m.0.moment"}


def test_a_plain_value_can_be_renamed() -> None:
    assert Transform("a -> b").apply({"a": 3, "c": 4}) == {"b": 3, "c": 4}


def test_a_state_that_a_statement_renames_does_not_follow_as_well() -> None:
    state = {
        "model.w": np.zeros(2),
        "optimizer.state.w.exp_avg": np.ones(2),
        "optimizer.state.w.step": np.array(3.0),
    }
    renamed = Transform({"model.": "net.", "optimizer.": "adam."}).apply(state)
    assert set(renamed) == {"net.w", "adam.state.w.exp_avg", "adam.state.w.step"}
