"""`reshard_sharded_state_dict` between live layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from remesh.compat.flex_checkpoint import (
    ShardedWeight,
    make_replicated_sharded_weight,
    reshard_sharded_state_dict,
)
from remesh.errors import (
    CoverageError,
    DivergedReplicaError,
    MismatchError,
    StateError,
    TransformError,
)
from remesh.exchange import Exchange
from tests.compat.flex_layouts import Weights, cut, emptied, flat, numbers
from tests.support import run_ranks


def reshard(exchange: Exchange, source: Weights, wanted: Weights, **options: Any) -> None:
    """Fill an empty copy of `wanted` from `source`, and compare."""
    target = {key: emptied(weight) for key, weight in wanted.items()}
    reshard_sharded_state_dict(source, target, exchange, **options)
    for key, weight in wanted.items():
        assert torch.equal(target[key].local_tensor, weight.local_tensor), key


def _documented(exchange: Exchange) -> None:
    """Four row shards of (1024, 512); two ranks want halves, the others nothing."""
    rank = exchange.rank
    full = numbers((1024, 512))
    source = {"linear.weight": cut("linear.weight", full, 0, rank, 4)}
    wanted = {"linear.weight": cut("linear.weight", full, 0, rank, 2)} if rank < 2 else {}
    reshard(exchange, source, wanted)


def _four_layouts(exchange: Exchange) -> None:
    """tp2 with copies, rows of four, whole, and flat ranges across rows: each into each."""
    rank, full = exchange.rank, numbers((4, 6, 2))
    whole = make_replicated_sharded_weight("w", full)
    bounds = [(0, 5), (5, 17), (17, 47), (47, 48)]
    layouts = [
        cut("w", full, 1, rank % 2, 2),
        cut("w", full, 0, rank, 4),
        make_replicated_sharded_weight("w", full.clone()),
        flat(whole, *bounds[rank]),
        flat(cut("w", full, 1, rank // 2, 2), 0, 11)
        if rank % 2
        else flat(cut("w", full, 1, rank // 2, 2), 11, 24),
    ]
    for source in layouts:
        for wanted in layouts:
            reshard(exchange, {"w": source}, {"w": wanted})


def test_the_documented_reshard() -> None:
    run_ranks(4, _documented)


def test_layouts_into_each_other() -> None:
    run_ranks(4, _four_layouts)


# ---------------------------------------------------------------------------------------------
# Configuration and faults
# ---------------------------------------------------------------------------------------------


def alone(key: str, *shape: int) -> Weights:
    return {key: make_replicated_sharded_weight(key, numbers(shape))}


def test_statements_forward_and_backward() -> None:
    joined = {"qk": make_replicated_sharded_weight("qk", numbers((4, 3)))}
    parts = {
        "q": make_replicated_sharded_weight("q", numbers((2, 3))),
        "k": make_replicated_sharded_weight("k", numbers((2, 3), 6)),
    }
    config = {"aoa_statements": ["q, k -> qk, axis=0"], "enable_traceback": True}
    target = {"qk": emptied(joined["qk"])}
    reshard_sharded_state_dict(parts, target, aoa_config=config)
    assert torch.equal(target["qk"].local_tensor, joined["qk"].local_tensor)
    back = {key: emptied(weight) for key, weight in parts.items()}
    reshard_sharded_state_dict(joined, back, aoa_config={**config, "aoa_config_reverse": True})
    assert all(torch.equal(back[key].local_tensor, parts[key].local_tensor) for key in parts)


@pytest.mark.parametrize("config", [None, {}, {"aoa_statements": []}])
def test_no_statements_are_no_transformation(config: dict[str, Any] | None) -> None:
    target = {"w": emptied(alone("w", 4)["w"])}
    reshard_sharded_state_dict(alone("w", 4), target, aoa_config=config)
    assert target["w"].local_tensor.tolist() == [0, 1, 2, 3]


def test_nothing_and_scalars() -> None:
    reshard_sharded_state_dict({}, {})
    target = {"s": make_replicated_sharded_weight("s", torch.tensor(0.0))}
    source = {"s": make_replicated_sharded_weight("s", torch.tensor(3.0))}
    reshard_sharded_state_dict(source, target)
    assert target["s"].local_tensor == 3


def test_a_faulty_configuration() -> None:
    with pytest.raises(StateError, match="aoa_config has no statements"):
        reshard_sharded_state_dict({}, {}, aoa_config={"statements": []})
    with pytest.raises(TransformError, match="statement 1"):
        reshard_sharded_state_dict({}, {}, aoa_config={"aoa_statements": ["a, b -> c, d"]})


@pytest.mark.parametrize("rank", [-1, 1])
def test_the_coordinator_must_be_a_rank(rank: int) -> None:
    with pytest.raises(StateError, match=f"coordinator_rank={rank}"):
        reshard_sharded_state_dict({}, {}, coordinator_rank=rank)


def _replaced(weight: ShardedWeight, **changes: Any) -> Weights:
    for name, value in changes.items():
        setattr(weight, name, value)
    return {"w": weight}


Make = Callable[[int], tuple[Weights, Weights]]

FAULTS: dict[str, tuple[type[Exception], str, Make]] = {
    "hole": (
        CoverageError,
        r"w \(4,\): no rank holds \[2:4\]",
        lambda rank: ({"w": cut("w", numbers((4,)), 0, 0, 2)}, {}),
    ),
    "missing": (
        MismatchError,
        r"1 name is not stored:\s+v\nLeave out what is not stored, or let .* aoa_config make it.\Z",
        lambda rank: (alone("w", 4), alone("v", 4) if rank else {}),
    ),
    "shape": (
        MismatchError,
        r"w: shape \(4,\) is stored, \(2, 2\) is wanted",
        lambda rank: (alone("w", 4), alone("w", 2, 2) if rank else {}),
    ),
    "source dtype": (
        StateError,
        r"w: ranks disagree .*\s+rank 1 says float32 \(4,\), rank 0 says int64 \(4,\)",
        lambda rank: (
            {
                "w": make_replicated_sharded_weight(
                    "w", torch.arange(4).to([torch.int64, torch.float32][rank])
                )
            },
            {},
        ),
    ),
    "target dtype": (
        MismatchError,
        r"dtype float32 is stored, float64 is wanted\Z",
        lambda rank: (
            alone("w", 4),
            {"w": make_replicated_sharded_weight("w", torch.zeros(4, dtype=torch.float64))},
        ),
    ),
    "undeclared shard": (
        DivergedReplicaError,
        "w",
        lambda rank: (
            {"w": make_replicated_sharded_weight("w", torch.full((4,), float(rank)))},
            {},
        ),
    ),
    "other name": (
        StateError,
        "w: the weight under this key calls itself 'v'",
        lambda rank: ({"w": alone("v", 4)["v"]} if rank else alone("w", 4), {}),
    ),
    "no weight": (
        StateError,
        "w: expected a ShardedWeight, got Tensor",
        lambda rank: ({"w": torch.zeros(4)} if rank else {}, {}),  # type: ignore[dict-item]
    ),
    "range": (
        StateError,
        "w: the range slice.0, 3, None. of a box of 4 elements does not fit",
        lambda rank: (
            _replaced(alone("w", 4)["w"], is_flattened=True, flattened_range=slice(0, 3)),
            {},
        ),
    ),
    "no range": (
        StateError,
        "w: a flattened weight needs its flattened_range",
        lambda rank: (_replaced(alone("w", 4)["w"], is_flattened=True), {}),
    ),
    "target bounds": (
        StateError,
        r"w: box \[1:5\] does not lie in shape \(4,\)",
        lambda rank: (alone("w", 4), _replaced(alone("w", 4)["w"], global_offset=(1,))),
    ),
}


def _faulty(exchange: Exchange, make: Make) -> tuple[type[BaseException], str]:
    source, target = make(exchange.rank)
    before = {key: weight.local_tensor.clone() for key, weight in target.items()}
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the test compares what it was
        reshard_sharded_state_dict(source, target, exchange)
    for key, old in before.items():
        assert torch.equal(target[key].local_tensor, old)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_raised_on_every_rank_before_anything_changes(name: str) -> None:
    kind, message, make = FAULTS[name]
    for raised, text in run_ranks(2, _faulty, make):
        assert issubclass(raised, kind)
        assert issubclass(raised, ValueError)
        assert re.search(message, text), text
