"""Plain values on resume: what is stored comes back whole, whatever the fresh script has there."""

from __future__ import annotations

import collections
import copy
import enum
import logging
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import remesh
from remesh.exchange import Exchange
from tests.engine.scenes import saved, saved_by
from tests.support import run_ranks

INF = float("inf")


def resumed(stored: Any, fresh: Any, **options: Any) -> tuple[Any, remesh.checkpoint.RestoreReport]:
    """An entry of a state after loading, with the report."""
    state = {"e": fresh, "step": 0}
    storage = saved({"e": stored, "step": 3})
    report = remesh.load(state, storage, unexpected="error", **options)
    assert state["step"] == 3
    assert report.missing == report.unexpected == ()
    return state["e"], report


def test_a_key_that_is_not_stored_goes_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    odd = {0.5: 1, 1: 2}  # is stored whole
    fresh = {"loss": INF, "old": 1, "deep": {"a": 1, "b": {"c": 2}}, "flat": {"x": 1}, "odd": odd}
    with caplog.at_level(logging.WARNING, "remesh"):
        found, report = resumed({"loss": 0.1, "deep": {"a": 2}, "flat": 5, "odd": odd}, fresh)
    assert found == {"loss": 0.1, "deep": {"a": 2}, "flat": 5, "odd": odd}
    assert set(report.dropped) == {"e.old", "e.deep.b", "e.flat.x"}
    assert "3 dropped" in str(report)
    assert "e.old" in caplog.text


PLAIN: list[Any] = [
    None, 7, "text", [], {}, (), [1, 2], (1, None), {"a": 1}, {"a": {"b": {}}}, {0.5: 1},
    {"a": [1, {"b": 2}], "c": None}, {3: {"x": (1, 2)}}, [{"a": 1}, []], Counter("abba"),
]  # fmt: skip


@pytest.mark.parametrize("stored", PLAIN, ids=repr)
def test_any_plain_value_comes_back_in_the_place_of_any_other(stored: Any) -> None:
    # In a list, for that is not one unit: it holds a tensor. Copies, because dicts are filled.
    fresh = [copy.deepcopy(one) for one in PLAIN]
    found, _ = resumed([stored] * len(PLAIN) + [torch.ones(1)], [*fresh, torch.zeros(1)])
    assert found[:-1] == [stored] * len(PLAIN)


plain = st.recursive(
    st.none() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain, plain)
def test_what_is_loaded_is_what_was_stored(stored: Any, fresh: Any) -> None:
    assert resumed(stored, fresh)[0] == stored


def test_containers_stay_the_same_objects_of_the_same_types() -> None:
    inner: Any = collections.defaultdict(list)
    counts = Counter("aab")
    live = {"inner": inner, "counts": counts}
    found, _ = resumed({"inner": {"k": [1]}, "counts": Counter("xx"), "new": 1}, live)
    assert found is live
    assert live["inner"] is inner
    assert live["counts"] is counts
    assert counts == Counter("xx")
    assert inner["other"] == []


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Kind(str, enum.Enum):  # noqa: UP042 - it prints as Kind.A, where a StrEnum prints as a
    A = "a"
    B = "b"


@pytest.mark.parametrize("kind", [Level, Kind])
def test_members_of_enums_are_keys_by_their_values(kind: Any) -> None:
    stored = {member: {"w": torch.full((2,), number)} for number, member in enumerate(kind)}
    fresh = {member: {"w": torch.full((2,), -1)} for member in kind}
    for live in (fresh, {member.value: node for member, node in fresh.items()}, None):
        assert same(resumed(stored, live)[0], stored)
    assert resumed(dict.fromkeys(kind, 5), dict.fromkeys(kind, 0))[0] == dict.fromkeys(kind, 5)


@pytest.mark.parametrize("fresh", [None, {"books": 0}, OrderedDict(a=1)], ids=repr)
@pytest.mark.parametrize("entry", [0.5, torch.ones(2)], ids=["values", "tensors"])
def test_dicts_keep_the_order_of_their_keys(entry: Any, fresh: Any) -> None:
    keys: list[Any] = ["web", "code", 10, 9, "books"]
    if isinstance(entry, torch.Tensor):
        fresh = type(fresh)() if fresh else fresh  # a placeholder
    found, _ = resumed({key: copy.deepcopy(entry) for key in keys}, copy.copy(fresh))
    assert list(found) == keys
    assert type(found) is (dict if fresh is None else type(fresh))


def test_ranks_may_have_keys_in_any_order() -> None:
    words = ["b", "a", "c"]
    storage = saved_by(3, lambda rank: {"e": dict.fromkeys(words[rank:] + words[:rank], 1)})
    state: dict[str, Any] = {"e": None}
    remesh.load(state, storage)
    assert list(state["e"]) == words


TENSORS: dict[str, Any] = {
    "dict": {"a": torch.arange(3), "n": 1, "deep": {"b": torch.ones(2, 2)}},
    "list": [torch.ones(1), "x", (torch.zeros(2), None)],
    "tensor": torch.arange(4.0),
}


@pytest.mark.parametrize("placeholder", [None, {}, [], ()], ids=repr)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_placeholder_takes_tensors_too(kind: str, placeholder: Any) -> None:
    found, _ = resumed(TENSORS[kind], placeholder)
    assert same(found, TENSORS[kind])


def same(one: Any, other: Any) -> bool:
    """Equal in structure, types and every element."""
    if isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_dict_that_holds_tensors_is_matched_entry_by_entry() -> None:
    storage = saved({"part": {"w": torch.ones(2), "n": 5, "best": {"a": 1, "b": 2}}, "other": 1})
    # Stored with a tensor beside, the plain dict of the state is no copy of it.
    state: dict[str, Any] = {"part": {"n": 0, "best": {"a": 0}}}
    report = remesh.load(state, storage)
    assert state == {"part": {"n": 5, "best": {"a": 1, "b": 2}}}
    assert set(report.unexpected) == {"part.w", "other"}
    mixed = {"part": {"w": torch.zeros(2), "best": None, "extra": 1}}
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load(mixed, storage)
    assert caught.value.missing == ("part.extra",)


def test_a_plain_value_takes_no_tensor() -> None:
    for fresh in (7, "x", {"a": 1}, [1]):
        with pytest.raises(remesh.MismatchError, match="e"):
            resumed(torch.ones(1), fresh)
        with pytest.raises(remesh.MismatchError, match="e"):
            resumed([torch.ones(1)], fresh)


def test_nothing_is_stored_in_the_place() -> None:
    storage = saved({"step": 1})
    for fresh in (None, {}, {"a": {"b": 1}}):
        with pytest.raises(remesh.MismatchError) as caught:
            remesh.load({"e": fresh}, storage)
        assert caught.value.missing == ("e.a.b" if fresh else "e",)
        state = {"e": fresh}
        remesh.load(state, storage, missing="keep")
        assert state == {"e": fresh}


def test_transformed_and_live() -> None:
    source = {"a": torch.ones(2), "best": {"loss": 0.1, "step": 7}}
    transform = remesh.Transform("a -> b")
    state: dict[str, Any] = {"b": torch.zeros(2), "best": {"loss": INF}}
    remesh.load(state, saved(source), transform=transform)
    assert state["best"] == source["best"]
    assert state["b"].tolist() == [1, 1]

    def run(exchange: Exchange) -> dict[str, Any]:
        target: dict[str, Any] = {"best": None, "a": None}
        remesh.reshard({} if exchange.rank else source, target, group=exchange)
        return target

    for target in run_ranks(2, run):
        assert target["best"] == source["best"]
        assert target["a"].tolist() == [1, 1]
