"""What does not fit, state and checkpoint or rank and rank: who is told what; nothing has moved.

Ranks are threads over one in-memory storage.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remesh
from remesh.core.dtypes import DTYPES
from remesh.core.sharded import ShardedObject, ShardedTensor
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.engine.bits import TORCH_DTYPES, bits_of, bits_of_all, random_tensor, zeros_like
from tests.engine.scenes import StateOf, errors_of_load, errors_of_save, saved, saved_by
from tests.support import run_ranks


def mismatch(state: Any, storage: MemoryStorage, **options: Any) -> remesh.MismatchError:
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load(state, storage, **options)
    return caught.value


def check_all_raise(
    errors: Sequence[Exception], kind: type[remesh.RemeshError], origin: int, *words: str
) -> None:
    """All raise the same kind, with the words; the others know on which rank it arose."""
    for rank, error in enumerate(errors):
        assert type(error) is kind, (rank, error)
        assert isinstance(error, remesh.RemeshError)
        assert error.rank == (None if rank == origin else origin)
        for word in words:
            assert word in str(error), (rank, word, str(error))
        assert (f"[raised on rank {origin}]" in str(error)) == (rank != origin)


# ---------------------------------------------------------------------------------------------
# Missing and unexpected
# ---------------------------------------------------------------------------------------------


def test_missing_names_come_with_what_is_near() -> None:
    storage = saved({"model": {"layer.0.weight": torch.ones(2)}, "learning_rate": 0.1})
    target = {"model": {"layer.0.weigth": torch.zeros(2)}, "learning-rate": 0.0, "xyz": 1}
    error = mismatch(target, storage)
    assert set(error.missing) == {"model.layer.0.weigth", "learning-rate", "xyz"}
    assert error.conflicts == error.unexpected == ()
    assert error.rank is None
    assert "model.layer.0.weigth (did you mean model.layer.0.weight?)" in str(error)
    assert "learning-rate (did you mean learning_rate?)" in str(error)
    assert "xyz\n" in str(error)
    assert 'missing="keep"' in str(error)
    assert storage.url in str(error)
    assert target["model"]["layer.0.weigth"].tolist() == [0, 0]  # type: ignore[index]


def test_names_with_another_beginning_come_with_the_transform_that_loads_them() -> None:
    stored = {f"layers.{number}.weight": torch.full((2,), number) for number in range(40)}
    storage = saved({"model": {"module": stored}})
    target = {"model": {name: torch.zeros(2, dtype=torch.int64) for name in stored}, "xyz": 1}
    error = mismatch(target, storage)
    assert "model.layers.1.weight\n  ... and 38 more under model.\n" in str(error)
    [rename] = re.findall(r"to load them: transform=(.*)", str(error))
    assert rename == '{"model.module.": "model."}'
    assert "  xyz\n" in str(error)
    remesh.load({"model": target["model"]}, storage, transform=ast.literal_eval(rename))
    assert all(torch.equal(value, stored[name]) for name, value in target["model"].items())  # type: ignore[attr-defined]


def test_a_model_alone_comes_with_the_transform_that_finds_it() -> None:
    """Not with averages beside it, leaves of other modules of it, or states of parameters."""
    names = ("embed.weight", "body.0.weight", "body.0.bias", "head.weight", "head.bias")
    stored = {name: torch.ones(2) for name in names}
    storage = saved({"model": stored, "ema": {name: torch.zeros(2) for name in names}})
    target = {name: torch.zeros(2) for name in names}
    error = mismatch(target, storage)
    assert 'to load them: transform={"model.": ""}\n' in str(error)
    assert "did you mean" not in str(error)
    remesh.load(target, storage, transform={"model.": ""})
    assert all(torch.equal(target[name], stored[name]) for name in names)
    adapted = {
        "body.0.weight": torch.zeros(2),
        "lora.weight": torch.zeros(2),
        "lora.bias": torch.zeros(2),
    }
    assert "to load them" not in str(mismatch({"model": adapted}, storage))
    moments = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    storage = saved({"optimizer": {"state": {"norm.weight": moments}}})
    assert "to load them" not in str(
        mismatch({"optimizer": {"state": {"new.weight": moments}}}, storage)
    )


def test_messages_stay_short_and_the_exception_carries_all() -> None:
    storage = saved({"b": torch.ones(2)})
    target = {f"a{number}": torch.zeros(2) for number in range(25)}
    error = mismatch(target, storage)
    assert error.missing == tuple(target)
    assert "25 names are not stored" in str(error)
    assert "... and 15 more" in str(error)
    wrong = {f"c{number}": torch.ones(3) for number in range(12)}
    error = mismatch({name: torch.zeros(2) for name in wrong}, saved(wrong))
    assert len(error.conflicts) == 12
    assert "... and 2 more" in str(error)
    error = mismatch({}, saved(wrong), unexpected="error")
    assert error.unexpected == tuple(wrong)
    assert "... and 2 more" in str(error)


def test_missing_keep_leaves_what_is_missing() -> None:
    storage = saved({"w": torch.ones(2), "step": 3})
    element = ShardedObject("rng", "mine", (1,), (0,))
    new, module = torch.full((2,), 7.0), nn.Linear(2, 1)
    bias = module.bias.detach().clone()
    target: dict[str, Any] = {"w": torch.zeros(2), "new": new, "step": 0}
    target |= {"epoch": 9, "rng": element, "m": module}
    report = remesh.load(target, storage, missing="keep")
    assert target["w"].tolist() == [1, 1]
    assert target["step"] == 3
    assert target["new"] is new
    assert new.tolist() == [7, 7]
    assert target["epoch"] == 9
    assert target["rng"].data == "mine"
    assert torch.equal(module.bias, bias)
    assert set(report.missing) == {"new", "epoch", element.unique_name, "m.weight", "m.bias"}
    assert set(report.restored) == {"w", "step"}


def test_missing_keep_does_not_excuse_what_differs() -> None:
    error = mismatch(
        {"w": torch.zeros(3), "new": torch.zeros(1)}, saved({"w": torch.ones(2)}), missing="keep"
    )
    assert error.missing == ("new",)
    assert error.conflicts == ("w: shape (2,) is stored, (3,) is wanted",)


def test_a_name_that_only_one_rank_asks_for_is_expected() -> None:
    storage = saved({"w": torch.ones(2), "v": torch.ones(1), "u": torch.ones(1), "step": 3})
    states: list[dict[str, Any]] = [
        {"w": torch.zeros(2)},
        {"v": torch.zeros(1)},
        {"w": torch.zeros(2), "step": 0},
    ]
    errors = errors_of_load(states, storage, unexpected="error")
    for error in errors:
        assert isinstance(error, remesh.MismatchError)
        assert error.unexpected == ("u",)
        assert error.rank is None
    assert states[0]["w"].tolist() == [0, 0]
    states[1]["u"] = torch.zeros(1)

    def load(exchange: Exchange) -> remesh.checkpoint.RestoreReport:
        return remesh.load(
            states[exchange.rank],
            storage,
            group=exchange,
            unexpected="error",
        )

    reports = run_ranks(3, load)
    assert [set(report.restored) for report in reports] == [{"w"}, {"v", "u"}, {"w", "step"}]
    assert [report.unexpected for report in reports] == [(), (), ()]
    assert states[1]["u"].tolist() == [1]


def test_either_name_of_a_tied_weight_is_expected() -> None:
    weight = torch.ones(2)
    storage = saved({"embed": weight, "out": weight})
    for name in ("embed", "out"):
        target = {name: torch.zeros(2)}
        remesh.load(target, storage, unexpected="error")
        assert target[name].tolist() == [1, 1]


def test_state_of_tied_parameters_comes_with_the_transform_that_unties_them() -> None:
    def trained(*, tied: bool) -> dict[str, Any]:
        model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5)}
        )
        if tied:
            model["head"].weight = model["embed"].weight
        optimizer = torch.optim.AdamW(model.parameters())
        torch.autograd.backward(model["head"](model["embed"](torch.tensor([1, 2]))).sum())
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    storage, target = saved(trained(tied=True)), trained(tied=False)
    error = mismatch(target, storage)
    assert "did you mean" not in str(error)
    assert "new to an optimizer" not in str(error)
    [untie] = re.findall(r'To copy it:\n  transform="(.*)"', str(error))
    remesh.load(target, storage, transform=untie)
    state = target["optimizer"].state
    embed, head = target["model"]["embed"].weight, target["model"]["head"].weight
    assert torch.equal(embed, head)
    assert torch.equal(state[embed]["exp_avg"], state[head]["exp_avg"])


# ---------------------------------------------------------------------------------------------
# Shape, dtype and kind
# ---------------------------------------------------------------------------------------------


def test_differences_are_listed_together() -> None:
    storage = saved(
        {"shape": torch.ones(2, 3), "dims": torch.ones(4), "dtype": torch.ones(2), "value": 3,
         "tensor": torch.ones(1), "fine": torch.ones(5)}
    )  # fmt: skip
    target = {
        "shape": torch.zeros(3, 2),
        "dims": torch.zeros(2, 2),
        "dtype": torch.zeros(2, dtype=torch.bfloat16),
        "value": torch.zeros(1),
        "tensor": 17,
        "fine": torch.zeros(5),
    }
    error = mismatch(target, storage)
    assert set(error.conflicts) == {
        "shape: shape (2, 3) is stored, (3, 2) is wanted",
        "dims: shape (4,) is stored, (2, 2) is wanted",
        "dtype: dtype float32 is stored, bfloat16 is wanted (cast=True converts)",
        "value: a plain value is stored where a tensor is wanted; None in its place takes it",
        "tensor: a tensor is stored where a plain value is wanted",
    }
    assert all(conflict in str(error) for conflict in error.conflicts)
    assert "nothing was changed" in str(error)
    assert target["tensor"] == 17
    taken = {"value": None}
    remesh.load(taken, storage)
    assert taken == {"value": 3}
    for name in ("shape", "dims", "dtype", "value", "fine"):
        tensor = target[name]
        assert isinstance(tensor, torch.Tensor)
        assert not tensor.any(), name


def test_a_cast_does_not_excuse_a_shape() -> None:
    storage = saved({"w": torch.ones(2)})
    error = mismatch({"w": torch.zeros(3, dtype=torch.float64)}, storage, cast=True)
    assert error.conflicts == ("w: shape (2,) is stored, (3,) is wanted",)


OPAQUE = [getattr(torch, dtype.name) for dtype in DTYPES if dtype.is_opaque]
# torch converts these not at all, and warns when it drops imaginary parts.
UNCONVERTED = {torch.complex32, *OPAQUE}
CASTS = [
    (stored, wanted)
    for stored in TORCH_DTYPES
    for wanted in TORCH_DTYPES
    if not UNCONVERTED & {stored, wanted} and (wanted.is_complex or not stored.is_complex)
]
VALUES = torch.tensor(
    [0.0, -0.0, 1.0, -1.5, 2.5, 3.7, 100.0, 0.1, 447.9, 65519.0, 1e-3, 6e-8, float("inf")]
)


@pytest.mark.parametrize("stored", [d for d in TORCH_DTYPES if d not in UNCONVERTED], ids=str)
def test_casts_convert_as_torch_does(stored: torch.dtype) -> None:
    finite = VALUES[:-1] if not stored.is_floating_point else VALUES
    source = finite.abs().to(stored) if stored in {torch.uint8, torch.uint16} else finite.to(stored)
    wanted = [target for start, target in CASTS if start == stored and target != stored]
    storage = saved({str(target): source for target in wanted})
    state = {str(target): zeros_like(source.to(target)) for target in wanted}
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load(state, storage)
    assert len(caught.value.conflicts) == len(wanted)
    report = remesh.load(state, storage, cast=True)
    assert bits_of_all(state) == bits_of_all({str(target): source.to(target) for target in wanted})
    names = [str(dtype).removeprefix("torch.") for dtype in (stored, *wanted)]
    assert report.cast == {f"torch.{name}": f"{names[0]} → {name}" for name in names[1:]}
    assert report.restored == ()
    assert report.bytes_needed == len(wanted) * source.nbytes


@pytest.mark.parametrize("dtype", OPAQUE, ids=str)
def test_bits_are_never_converted(dtype: torch.dtype) -> None:
    stored = random_tensor(dtype, (4,))
    numbers = torch.zeros(4, dtype=torch.uint8)
    plain, bits = saved({"w": torch.ones(4)}), saved({"w": stored})
    error = mismatch({"w": zeros_like(stored)}, plain, cast=True)
    name = str(dtype).removeprefix("torch.")
    assert "torch does not convert" in error.conflicts[0]
    error = mismatch({"w": numbers}, bits, cast=True)
    assert error.conflicts == (
        f"w: dtype {name} is stored, uint8 is wanted, and torch does not convert between them",
    )
    assert not numbers.any()
    target = zeros_like(stored)
    remesh.load({"w": target}, bits)
    assert bits_of(target) == bits_of(stored)


def test_casts_into_parts_strides_and_arrays() -> None:
    whole = torch.arange(24.0).reshape(4, 6) / 7
    storage = saved({"a": whole, "b": whole, "c": whole})
    row = torch.zeros(2, 3, dtype=torch.float64)
    strided = torch.zeros(6, 8, dtype=torch.bfloat16)[:, ::2]
    array = np.zeros((4, 6), dtype=np.float16)
    state = {
        "a": ShardedTensor.at_offset("a", row, (4, 6), (1, 2)),
        "b": strided.T,
        "c": array,
    }
    remesh.load(state, storage, cast=True)
    assert torch.equal(row, whole[1:3, 2:5].double())
    assert torch.equal(strided.T, whole.bfloat16())
    np.testing.assert_array_equal(array, whole.half().numpy())


# ---------------------------------------------------------------------------------------------
# One rank of several
# ---------------------------------------------------------------------------------------------


def quarter(rank: int, fill: float) -> dict[str, Any]:
    """Two rows of a tensor, a module and a value."""
    rows = torch.full((2, 3), fill)
    return {
        "w": ShardedTensor.at_offset("w", rows, (8, 3), (2 * rank, 0)),
        "rows": remesh.sharding.LocalNonpersistentObject(rows),
        "m": nn.Linear(2, 2),
        "step": fill,
    }


def contents(state: dict[str, Any]) -> object:
    return bits_of(state["rows"].obj), bits_of_all(state["m"].state_dict()), state["step"]


def test_one_rank_that_does_not_fit_stops_all_before_anything_moves() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(2, 2)
    storage = saved_by(4, lambda rank: {**quarter(rank, 1.0), "m": shared})
    states = [quarter(rank, 0.0) for rank in range(4)]
    states[2]["m"] = nn.Linear(2, 3)
    states[2]["extra"] = torch.zeros(1)
    before = [contents(state) for state in states]
    errors = errors_of_load(states, storage)
    check_all_raise(errors, remesh.MismatchError, 2, "extra", "m.weight: shape (2, 2) is stored")
    for error in errors:
        assert isinstance(error, remesh.MismatchError)
        assert error.missing == ("extra",)
        assert error.conflicts == (
            "m.weight: shape (2, 2) is stored, (3, 2) is wanted",
            "m.bias: shape (2,) is stored, (3,) is wanted",
        )
    assert [contents(state) for state in states] == before


def test_of_several_ranks_that_do_not_fit_each_raises_its_own() -> None:
    storage = saved({"w": torch.ones(2)})
    states = [{"w": torch.zeros(2)}, {"a": torch.zeros(1)}, {"b": torch.zeros(1)}]
    errors = errors_of_load(states, storage)
    found = [
        (error.missing, error.rank) for error in errors if isinstance(error, remesh.MismatchError)
    ]
    assert found == [(("a",), 1), (("a",), None), (("b",), None)]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"unexpected": "error"}, remesh.MismatchError),
        ({"transform": {"v": "x"}}, remesh.errors.StateError),
        ({"share_reads": True}, remesh.errors.StateError),
    ],
    ids=str,
)
def test_an_option_that_one_rank_passes_counts_for_all_or_is_refused(
    options: dict[str, Any], kind: type[Exception]
) -> None:
    storage = saved({"w": torch.ones(2), "v": 1})

    def errors(exchange: Exchange) -> type[Exception]:
        mine = options if exchange.rank == 1 else {}
        with pytest.raises(remesh.RemeshError) as caught:
            remesh.load({"w": torch.zeros(2)}, storage, group=exchange, **mine)
        return caught.type

    assert run_ranks(3, errors) == [kind] * 3


def test_a_state_that_cannot_be_a_target_stops_all() -> None:
    storage = saved({"w": torch.ones(2)})
    states = [{"w": torch.zeros(2)}, {"w": torch.empty(2, device="meta")}, {"w": torch.zeros(2)}]
    errors = errors_of_load(states, storage)
    check_all_raise(errors, remesh.errors.UnsupportedValueError, 1, "w: a meta tensor", "to_empty")
    assert states[0]["w"].tolist() == states[2]["w"].tolist() == [0, 0]


class Stubborn:
    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        raise KeyError("no such thing")


class Willing(Stubborn):
    def load_state_dict(self, _state: dict[str, Any]) -> None:
        pass


def test_an_object_that_refuses_its_state_fails_all_ranks() -> None:
    storage = saved({"o": Stubborn(), "w": torch.ones(2)})
    states = [{"o": Willing(), "w": torch.zeros(2)}, {"o": Stubborn(), "w": torch.zeros(2)}]
    others, own = errors_of_load(states, storage)
    assert isinstance(own, KeyError)
    assert isinstance(others, remesh.errors.RankFailedError)
    assert others.rank == 1
    assert others.error_type == "builtins.KeyError"
    for error in (own, others):
        assert any("partly loaded" in note for note in error.__notes__)


# ---------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------


def test_the_report_says_what_was_done_with_each_name() -> None:
    weight = torch.arange(6.0)
    storage = saved(
        {"w": weight, "h": weight, "n": 1, "extra": torch.ones(3), "p": torch.ones(2, 2)}
    )
    tied = torch.zeros(6)
    target = {
        "w": tied,
        "other": tied,
        "h": torch.zeros(6, dtype=torch.float64),
        "n": 0,
        "new": torch.zeros(2),
        "p": ShardedTensor.whole("p", torch.zeros(3, 2), allow_shape_mismatch=True),
    }
    report = remesh.load(target, storage, cast=True, missing="keep")
    assert set(report.restored) == {"w", "n"}
    assert report.cast == {"h": "float32 → float64"}
    assert report.resized == {"p": "(2, 2) → (3, 2)"}
    assert report.derived == {"other": "w"}
    assert report.missing == ("new",)
    assert report.unexpected == ("extra",)
    assert report.bytes_needed == 24 + 24 + 16
    assert report.bytes_read >= 24 + 16
    assert report.num_reads >= 1
    fixed = dataclasses.replace(
        report, seconds=2.0, bytes_read=4_000_000_000, bytes_needed=3 * 10**9
    )
    assert str(fixed) == (
        "2 restored, 1 cast, 1 resized, 1 derived, 1 missing, 1 unexpected; "
        "read 4.0 GB for 3.0 GB wanted in 2.00 s (2.00 GB/s)"
    )
    empty = remesh.checkpoint.RestoreReport((), {}, {}, {}, (), (), (), 0, 0, 0, 0.0)
    assert str(empty) == "0 restored; read 0 B for 0 B wanted in 0.00 s (0.00 GB/s)"


# ---------------------------------------------------------------------------------------------
# Ranks whose states do not go together
# ---------------------------------------------------------------------------------------------


def test_equal_copies_that_are_not_numbers_agree() -> None:
    storage = saved_by(3, lambda _rank: {"w": torch.tensor([float("nan"), -0.0])})
    assert len(remesh.Checkpoint(storage).index.boxes) == 1


def one_element_differs(where: int) -> StateOf:
    def state_of(rank: int) -> dict[str, Any]:
        tensor = torch.zeros(1500)
        tensor[where] = float(rank == 1)
        return {"same": torch.ones(2), "shard": tensor}

    return state_of


def one_of(*tensors: Any) -> StateOf:
    return lambda rank: {"v": torch.ones(1), "w": tensors[rank]}


def on_rank_1(state: Any) -> StateOf:
    return lambda rank: {"state": state} if rank else {}


def rows(*spans: tuple[int, int], replicas: Sequence[Any] = (0,) * 4) -> StateOf:
    """Each rank has some of six rows of a tensor."""

    def state_of(rank: int) -> dict[str, Any]:
        start, stop = spans[rank]
        part, replica = torch.ones(stop - start, 2), replicas[rank]
        return {"x": ShardedTensor.at_offset("w", part, (6, 2), (start, 0), replica_id=replica)}

    return state_of


TIED = torch.ones(2)
DIVERGED, COVERAGE = remesh.errors.DivergedReplicaError, remesh.errors.CoverageError
COLLISION, STATE = remesh.errors.NameCollisionError, remesh.errors.StateError
UNDECLARED = ("shard", "ranks 0 and 1", "(1500,)", "DTensor", "remesh.sharding.ShardedObject")
REFUSED: dict[str, tuple[int, StateOf, type[remesh.RemeshError], int, tuple[str, ...]]] = {
    "plain values that differ": (
        3, lambda rank: {"w": torch.ones(1), "step": 5 + (rank == 2)}, DIVERGED, 0,
        ("step", "rank 0 has 5", "rank 2 has 6", "remesh.sharding.ShardedObject")),
    "undeclared shards, the first element": (3, one_element_differs(0), DIVERGED, 0, UNDECLARED),
    "undeclared shards, the middle": (3, one_element_differs(700), DIVERGED, 0, UNDECLARED),
    "undeclared shards, the last element": (3, one_element_differs(1499), DIVERGED, 0, UNDECLARED),
    "other extents": (
        2, one_of(torch.ones(2), torch.ones(3)), STATE, 0,
        ("w: ", "rank 1 says float32 (3,)", "rank 0 says float32 (2,)", "remesh.ShardedTensor")),
    "other dims": (
        2, one_of(torch.ones(4), torch.ones(2, 2)), STATE, 0, ("rank 1 says float32 (2, 2)",)),
    "another dtype": (
        2, one_of(torch.ones(2), torch.ones(2).int()), STATE, 0,
        ("rank 1 says int32 (2,)", "rank 0 says float32")),
    "one more dim": (
        2, one_of(torch.ones(4), torch.ones(4, 1)), STATE, 0, ("rank 1 says float32 (4, 1)",)),
    "another order of dims": (
        2, one_of(torch.ones(2, 4), torch.ones(4, 2)), STATE, 0, ("rank 1 says float32 (4, 2)",)),
    "a tensor and a value": (
        2, lambda rank: {"x": torch.ones(1) if rank else 1.0}, STATE, 0,
        ("x: a tensor", "a value on another")),
    "tied and apart": (
        2, lambda rank: {"a": TIED, "b": TIED if rank else TIED.clone()}, STATE, 0,
        ("b: a tensor", "a tied tensor on another")),
    "two entries of one name": (
        2, lambda rank: {"a": {"b": 1}} | ({"a.b": 2} if rank else {}), COLLISION, 1,
        ("'a.b'", "('a', 'b')", "Rename")),
    "one name for two places": (
        2, lambda rank: {"a.0": TIED} if rank else {"a": [TIED]}, COLLISION, 0,
        ("'a.0'", "rank 1")),
    "a number and a text as keys": (
        2, on_rank_1({"a": {1: torch.ones(1), "1": torch.ones(1)}}), COLLISION, 1, ("Rename",)),
    "an item of a list and a name": (
        2, on_rank_1({"a": [torch.ones(1)], "a.0": 3}), COLLISION, 1, ("Rename",)),
    "a tensor and a description": (
        2, on_rank_1({"w": TIED, "x": ShardedTensor.whole("state.w", torch.zeros(2))}), COLLISION,
        1, ("Rename",)),
    "two descriptions": (
        2, on_rank_1([ShardedTensor.whole("w", torch.full((2,), n)) for n in range(2)]), COLLISION,
        1, ("Rename",)),
    "two elements of an object": (
        2, on_rank_1([ShardedObject("rng", n, (2,), (0,)) for n in range(2)]), COLLISION, 1,
        ("Rename",)),
    "elements with two main replicas": (
        2, lambda rank: {"rng": ShardedObject("rng", rank, (2,), (0,))}, DIVERGED, 0,
        ("rng/shard_0_2", "rank 1")),
    "an element without a main replica": (
        2, lambda rank: {"rng": ShardedObject("rng", rank, (2,), (1,), replica_id=1)}, COVERAGE, 0,
        ("rng/shard_1_2",)),
    "a hole": (
        3, rows((0, 2), (2, 3), (5, 6)), COVERAGE, 0, ("w (6, 2)", "no rank holds [3:5, 0:2]")),
    "an overlap": (
        3, rows((0, 3), (2, 4), (4, 6)), COVERAGE, 0,
        ("overlap", "[0:3, 0:2] (rank 0)", "[2:4, 0:2] (rank 1)")),
    "a hole, and an overlap with replicas": (
        4, rows((0, 3), (0, 3), (1, 4), (5, 6), replicas=(0, 1, 0, 0)), COVERAGE, 0,
        ("no rank holds [4:5, 0:2]", "[0:3, 0:2] (ranks 0, 1)", "[1:4, 0:2] (rank 2)")),
    "several main replicas": (
        3, rows(*[(0, 6)] * 3, replicas=(0, 1, 0)), COVERAGE, 0,
        ("w: box [0:6, 0:2]", "several main", "ranks [0, 1, 2]")),
    "no main replica": (
        2, rows(*[(0, 6)] * 2, replicas=[(0, 1)] * 2), COVERAGE, 0,
        ("no main replica", "ranks [0, 1]")),
    "what cannot be stored": (
        3, lambda rank: {"fine": 1, "bad": print} if rank == 1 else {"fine": 1},
        remesh.errors.UnsupportedValueError, 1, ("bad: ", "LocalNonpersistentObject")),
}  # fmt: skip
"""Number of ranks, the state of each, what all raise, on which rank it arises, and its words."""


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_whose_states_do_not_go_together(case: str) -> None:
    num_ranks, state_of, kind, origin, words = REFUSED[case]
    check_all_raise(errors_of_save(num_ranks, state_of), kind, origin, *words)
