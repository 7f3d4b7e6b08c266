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
from tests.transform.simulated import Array, numbered


def count(value: float) -> Array:
    return np.full(1, value, np.float32)


def zeros(*names: str) -> dict[str, Array]:
    return {name: np.zeros(2, np.float32) for name in names}


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


MADE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "each part of a split has the count": (
        "a -> b, c, axis=0",
        {"a": numbered(2), "a.step": count(5)},
        {"b": [0], "c": [1], "b.step": [5], "c.step": [5]},
    ),
    "moments of one element are not counts": (
        "a, b -> c, axis=0",
        {
            "a": numbered(1),
            "b": numbered(1, start=1),
            "a.moment1_0": numbered(1, start=10),
            "b.moment1_0": numbered(1, start=20),
            "a.beta1_pow_acc_0": count(0.5),
            "b.beta1_pow_acc_0": count(0.5),
        },
        {"c": [0, 1], "c.moment1_0": [10, 20], "c.beta1_pow_acc_0": [0.5]},
    ),
    "counts that are plain values": (
        "a, b -> c, axis=0",
        {"a": numbered(1), "b": numbered(1), "a.step": 5, "b.step": 5},
        {"c": [0, 0], "c.step": 5},
    ),
    "a plain value": ("a -> b", {"a": 3, "c": 4}, {"b": 3, "c": 4}),
    "a statement for a state comes first": (
        "a -> b  x -> b.exp_avg",
        {"a": numbered(2), "a.exp_avg": numbered(2, start=5), "x": numbered(2, start=7)},
        {"b": [0, 1], "b.exp_avg": [7, 8]},
    ),
    "tied tensors have the state of the one that has any": (
        "embed, head -> w, tie",
        {"embed": numbered(2), "head": numbered(2), "head.exp_avg": numbered(2, start=5)},
        {"w": [0, 1], "w.exp_avg": [5, 6]},
    ),
    "an owner that does not matter need not be stated": (
        "x -> y",
        {"m.a": numbered(1), "ema.a": numbered(1), "opt.state.a.exp_avg": count(3), "x": count(1)},
        {"m.a": [0], "ema.a": [0], "opt.state.a.exp_avg": [3], "y": [1]},
    ),
    "a module called state, and a buffer called step": (
        "m.proj -> m.out",
        {"m.state.proj.weight": count(1), "scheduler.step": count(2), "m.proj": count(3)},
        {"m.state.proj.weight": [1], "scheduler.step": [2], "m.out": [3]},
    ),
    "parameters in a module called state, and their states": (
        "m.state.w -> m.state.u  m.v -> m.x",
        {"m.state.w": count(1), "m.v": count(2)}
        | {"o.state.state.w.exp_avg": count(3), "o.state.v.exp_avg": count(4)},
        {"m.state.u": [1], "m.x": [2]} | {"o.state.state.u.exp_avg": [3], "o.state.x.exp_avg": [4]},
    ),
    "a name in a module called state": (
        "m.state.proj.weight -> m.weight",
        {"m.state.proj.weight": count(1)},
        {"m.weight": [1]},
    ),
    "two optimizers of one parameter keep apart": (
        "a -> b",
        {"a": count(1), "first.state.a.exp_avg": count(2), "second.state.a.exp_avg": count(3)},
        {"b": [1], "first.state.b.exp_avg": [2], "second.state.b.exp_avg": [3]},
    ),
    "a placeholder finds a state whose slot has a number": (
        "l.$LAYER_ID.w.moment1_0 -> m.$LAYER_ID.moment",
        {"l.0.w": count(1), "l.0.w.moment1_0": count(2)},
        {"l.0.w": [1], "m.0.moment": [2]},
    ),
    "factored states follow a rename": (
        "a -> b",
        {"a": numbered(1, 2), "state.a.step": count(1), "state.a.row": count(2)},
        {"b": [[0, 1]], "state.b.step": [1], "state.b.row": [2]},
    ),
    "factored states by statements of their own": (
        "a^T -> b  state.a.row -> state.b.col",
        {"a": numbered(1, 2), "state.a.step": count(1), "state.a.row": count(2)},
        {"b": [[0], [1]], "state.b.step": [1], "state.b.col": [2]},
    ),
}
"""What a program makes: all outputs."""


@pytest.mark.parametrize("case", MADE)
def test_what_a_program_makes(case: str) -> None:
    text, state, expected = MADE[case]
    found = Transform(text).apply(state)
    assert {name: np.asarray(value).tolist() for name, value in found.items()} == expected


INTO: dict[str, tuple[str, dict[str, Array], dict[str, Any]]] = {
    "any slot, known or not": (
        "model.a -> model.b, model.c, axis=0",
        {
            "model.a": numbered(2),
            "opt.state.a.exp_avg": numbered(2, start=10),
            "opt.state.a.my_slot": numbered(2, start=20),
            "opt.state.a.step": count(3),
        },
        {
            "model.c": [1],
            "opt.state.c.exp_avg": [11],
            "opt.state.b.my_slot": [20],
            "opt.state.b.step": [3],
            "opt.state.c.step": [3],
        },
    ),
    "Paddle's names become torch's": (
        "a -> model.c\n b -> model.b",
        {
            "a": numbered(2),
            "b": numbered(2),
            "a.moment1_0": numbered(2, start=10),
            "b.moment2_0": numbered(2, start=20),
            "a.w_0": numbered(2, start=30),
        },
        {
            "model.c": [0, 1],
            "model.b": [0, 1],
            "optimizer.state.c.exp_avg": [10, 11],
            "optimizer.state.b.exp_avg_sq": [20, 21],
            "optimizer.state.c.master_param": [30, 31],
        },
    ),
    "other names without a statement": (
        "",
        {"a": numbered(2), "a.moment1_0": numbered(2, start=5)},
        {"state.a.exp_avg": [5, 6], "a": [0, 1]},
    ),
    "tied parameters have one state": (
        "model.embed.weight -> model.lm_head.weight",
        {
            "model.embed.weight": numbered(2),
            "optimizer.state.embed.weight.exp_avg": numbered(2, start=10),
            "optimizer.state.embed.weight.step": count(4),
        },
        {
            f"{place}{name}.weight{slot}": value
            for name in ("embed", "lm_head")
            for place, slot, value in (
                ("model.", "", [0, 1]),
                ("optimizer.state.", ".exp_avg", [10, 11]),
                ("optimizer.state.", ".step", [4]),
            )
        },
    ),
    "states without their parameters": (
        "e.*.w -> f, axis=0",
        {f"e.{n}.w.exp_avg": numbered(1, 2, start=10 * n) for n in range(3)},
        {"f.exp_avg": [[0, 1], [10, 11], [20, 21]]},
    ),
    "states of which the parameters are in no state": (
        "f -> e.*.w, axis=0",
        {"f.exp_avg": np.array([[0, 1], [10, 11]], np.float32)},
        {"e.0.w.exp_avg": [[0, 1]], "e.1.w.exp_avg": [[10, 11]]},
    ),
}
"""What given targets are filled with."""


@pytest.mark.parametrize("case", INTO)
def test_what_given_targets_are_filled_with(case: str) -> None:
    text, state, expected = INTO[case]
    targets = {name: np.zeros_like(np.float32(value)) for name, value in expected.items()}
    Transform(text).apply(state, targets)
    assert {name: array.tolist() for name, array in targets.items()} == expected


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


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ((count(5), count(6)), r"c\.step: 'b\.step' must hold the same values as"),
        ((5, 6), r"'a\.step' and 'b.step' hold\nThese are 5 and 6"),
    ],
    ids=["tensors", "values"],
)
def test_counts_that_merge_must_agree(steps: Any, says: str) -> None:
    targets: dict[str, Any] = {"c": np.zeros(4, np.float32)}
    targets["c.step"] = steps[0] if isinstance(steps[0], int) else np.zeros(1, np.float32)
    with pytest.raises(TransformError, match=says):
        Transform("a, b -> c, axis=0").apply(counted(a=steps[0], b=steps[1]), targets)
    assert not targets["c"].any()


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


def test_a_factored_state_does_not_follow_what_it_cannot() -> None:
    t = {"a": numbered(2, 4), "state.a.step": count(1), "state.a.row": numbered(2)}
    with pytest.raises(TransformError, match=r"'state.a.row' has shape \(2,\), the parameter 'a'"):
        Transform("a^T -> b").apply(t)


@pytest.mark.parametrize("text", ["a -> b  a.exp_avg -> _", "a -> b  a.exp_avg^T -> a.exp_avg"])
def test_statements_that_contradict_following_are_refused(text: str) -> None:
    t = {"a": numbered(2), "a.exp_avg": numbered(2)}
    with pytest.raises(TransformError, match="Statement 2 says otherwise"):
        Transform(text).apply(t, zeros("b.exp_avg"))


def test_an_alias_finds_the_states_of_its_tensor() -> None:
    info = TensorInfo("float32", (4, 2))
    sources = {"embed": info, "head": info, "embed.exp_avg": info}
    targets = {"a": TensorInfo("float32", (2, 2)), "b": TensorInfo("float32", (2, 2))}
    targets["a.exp_avg"] = targets["a"]
    split = Transform("head -> a, b, axis=0")
    assert split.resolve(sources, targets).missing.keys() == {"a.exp_avg"}
    resolved = split.resolve(sources, targets, aliases={"head": "embed"})
    assert resolved.sources_of("a.exp_avg") == ("embed.exp_avg",)


def test_an_owner_that_cannot_be_told_must_be_stated() -> None:
    names = ("model.a", "ema.a", "optimizer.state.a.exp_avg")
    models = {name: numbered(4, start=10 * n) for n, name in enumerate(names)}
    targets = zeros("model.b", "model.c", "optimizer.state.b.exp_avg", "optimizer.state.c.exp_avg")
    text = "model.a -> model.b, model.c, axis=0"
    with pytest.raises(TransformError, match=r"(?s)of 'model\.a' or of 'ema\.a'.*\n?.*owners="):
        Transform(text).apply(models, targets)
    Transform(text, owners={"optimizer.state.": "model."}).apply(models, targets)
    assert targets["optimizer.state.c.exp_avg"].tolist() == [22, 23]
    row = TensorInfo("float32", (4,))  # a target without the optimizer needs no owner
    nested = {f"state.{name}": row for name in names} | {"state.optimizer.param_groups.0.lr": None}
    resolved = Transform("state.model.a -> x").resolve(nested, {"x": row}, with_outputs=True)
    assert resolved.sources_of("x") == ("state.model.a",)


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


def test_a_state_that_a_statement_renames_does_not_follow_as_well() -> None:
    state = {
        "model.w": np.zeros(2),
        "optimizer.state.w.exp_avg": np.ones(2),
        "optimizer.state.w.step": np.array(3.0),
    }
    renamed = Transform({"model.": "net.", "optimizer.": "adam."}).apply(state)
    assert set(renamed) == {"net.w", "adam.state.w.exp_avg", "adam.state.w.step"}
