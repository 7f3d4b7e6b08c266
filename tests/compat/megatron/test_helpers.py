"""Nested dicts and lists, prefixes of keys, optimizer state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from remesh.compat.megatron import CheckpointingException
from remesh.compat.megatron.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    diff,
    extract_matching_values,
    merge,
    nested_items_iter,
    nested_values,
)
from remesh.compat.megatron.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
)
from remesh.compat.megatron.optimizer import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from remesh.compat.megatron.utils import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors,
    extract_sharded_tensors_and_factories,
    extract_sharded_tensors_or_nonpersistent,
    replace_prefix_for_sharding,
)
from tests.compat.megatron.layouts import shard


def test_taking_apart_closes_lists_up_or_keeps_positions() -> None:
    nested = {"a": [0, 1, {"b": 2, "c": []}], "d": {"e": 5}, "f": 6, "g": {}}

    def is_even(leaf: Any) -> bool:
        return bool(leaf % 2 == 0)

    even, odd = extract_matching_values(nested, is_even)
    assert even == {"a": [0, {"b": 2}], "f": 6}
    assert odd == {"a": [1, {"c": []}], "d": {"e": 5}, "g": {}}
    even, odd = extract_matching_values(nested, is_even, return_lists_as_dicts=True)
    assert even == {"a": {0: 0, 2: {"b": 2}}, "f": 6}
    assert odd["a"] == {1: 1, 2: {"c": {}}}
    wrong: Any = 3
    with pytest.raises(ValueError, match="not a int"):
        extract_matching_values(wrong, is_even)


def test_leaves_and_maps() -> None:
    state: Any = {"a": [1, {"b": 2}], "c": 3, "t": (1, 2)}
    assert list(nested_values(state)) == [1, 2, 3, (1, 2)]
    assert [(key, leaf) for _, key, leaf in nested_items_iter(state)][:2] == [(0, 1), ("b", 2)]
    copied = dict_list_map_outplace(lambda leaf: (leaf,), state)
    assert copied["a"] == [(1,), {"b": (2,)}]
    assert state["a"] == [1, {"b": 2}]
    assert dict_list_map_inplace(str, state) is state
    assert state["a"] == ["1", {"b": "2"}]
    assert dict_list_map_inplace(str, 7) == "7"


def test_merging() -> None:
    left = {"a": {"b": 1}, "l": [{"x": 1}, {}]}
    assert merge(left, {"a": {"c": 2}, "l": [{}, {"y": 2}], "d": 3}) is left
    assert left == {"a": {"b": 1, "c": 2}, "l": [{"x": 1}, {"y": 2}], "d": 3}
    with pytest.raises(ValueError, match=r"two values meet at \('a', 'b'\)"):
        merge(left, {"a": {"b": 5}})
    with pytest.raises(ValueError, match="lengths 2 and 1"):
        merge(left, {"l": [1]})


def test_differences() -> None:
    left = {"a": 1, "t": torch.tensor([1, 2]), "l": [1, 2, 3], "n": np.array([1]), "same": "x"}
    right = {"b": 1, "t": torch.tensor([1, 3]), "l": [1, 9], "n": np.array([1]), "same": "x"}
    only_left, only_right, mismatch = diff(left, right)
    assert (only_left, only_right) == ([("a",), ("l", 2)], [("b",)])
    assert [item[:3] for item in mismatch] == [
        (("t",), torch.Tensor, torch.Tensor),
        (("l", 1), int, int),
    ]
    assert mismatch[0][-1] == [[1]]
    assert diff(left, left) == ([], [], [])
    assert len(diff(torch.zeros(2), torch.zeros(3))[2]) == 1
    one, other = ShardedObject("k", 1, (1,), (0,)), ShardedObject("k", 2, (1,), (0,))
    assert diff({"o": one}, {"o": other})[2] == [(("o", ShardedObject), int, int)]


def leaves() -> dict[str, Any]:
    return {
        "t": shard("old.t", torch.zeros(1)),
        "o": [ShardedObject("old.o", 1, (1,), (0,))],
        "f": ShardedTensorFactory("old.f", torch.zeros(1), lambda *_: {}, lambda _: None),
        "n": LocalNonpersistentObject(1),
        "c": 5,
    }


@pytest.mark.parametrize(
    ("extract", "taken"),
    [
        (extract_sharded_tensors, "t"),
        (extract_sharded_tensors_and_factories, "tf"),
        (extract_sharded_tensors_or_nonpersistent, "tfn"),
        (extract_sharded_base, "tof"),
        (extract_nonpersistent, "n"),
    ],
)
def test_kinds_of_leaves_are_taken_out(extract: Any, taken: str) -> None:
    found, rest = extract(leaves())
    assert set(found) == set(taken)
    assert set(rest) == set("tofnc") - set(taken)


def test_prefixes_change_in_place() -> None:
    state = leaves()
    add_prefix_for_sharding(state, "x.")
    assert [state["t"].key, state["o"][0].key, state["f"].key] == ["x.old.t", "x.old.o", "x.old.f"]
    replace_prefix_for_sharding(state, "x.old.", "new.")
    assert state["o"][0].key == "new.o"
    apply_prefix_mapping(state, {"new.t": "a", "new.": "b.", "n": "never"})
    assert [state["t"].key, state["o"][0].key] == ["a", "b.o"]
    with pytest.raises(ValueError, match="does not begin with 'zz'"):
        replace_prefix_for_sharding(state, "zz", "")


def trained() -> tuple[list[torch.nn.Parameter], torch.optim.Adam, dict[str, Any]]:
    """Parameters, their optimizer after a step, and the model's sharded state dict."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = model.state_dict(keep_vars=True)
    sharded = {name: shard(f"model.{name}", param, (0, 1, 2)) for name, param in state.items()}
    return list(model.parameters()), optimizer, sharded


def test_optimizer_state_is_sharded_like_its_parameters() -> None:
    params, optimizer, sharded = trained()
    assert get_optim_param_to_id_map([*params, params[0]]) == {id(params[0]): 0, id(params[1]): 1}
    state = optimizer.state_dict()
    groups = state["param_groups"]
    optim_state_to_sharding_state(
        state, get_param_id_to_sharded_param_map(sharded, params), exclude_keys=("step",)
    )
    moment = state["state"][0]["exp_avg_sq"]
    assert moment.key == "optimizer.state.exp_avg_sq.model.weight"
    assert (moment.global_shape, moment.global_offset) == ((4, 3), (2, 0))
    assert moment.data is optimizer.state[params[0]]["exp_avg_sq"]
    assert set(state["state"][1]) == {"exp_avg", "exp_avg_sq"}
    assert state["param_groups"][0]["params"].unwrap() == [0, 1]
    assert groups[0]["params"] == [0, 1]


def test_optimizer_state_of_unknown_or_other_shape_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params, optimizer, sharded = trained()
    with pytest.raises(ValueError, match="parameter 0 of the optimizer"):
        optim_state_to_sharding_state(optimizer.state_dict(), {})
    of_params = get_param_id_to_sharded_param_map(sharded, params)
    with pytest.raises(CheckpointingException, match="exclude_keys"):
        optim_state_to_sharding_state(optimizer.state_dict(), of_params)
    assert "keep_vars=True" not in caplog.text
    copies = {name: shard(name, one.data.detach()) for name, one in sharded.items()}
    assert get_param_id_to_sharded_param_map(copies, params) == {}
    assert "keep_vars=True" in caplog.text


def test_a_factory_makes_optimizer_state_too() -> None:
    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        return {"t": shard(key, data.t().contiguous())}

    factory = ShardedTensorFactory("w", torch.zeros(2, 3), build, lambda found: found["t"].t())
    moment = torch.arange(6.0).reshape(2, 3)
    made = make_sharded_optimizer_tensor(factory, moment, "optimizer.state.exp_avg")
    assert isinstance(made, ShardedTensorFactory)
    assert torch.equal(made.build()["t"].data, moment.t())
    assert made.build()["t"].key == "optimizer.state.exp_avg.w"
