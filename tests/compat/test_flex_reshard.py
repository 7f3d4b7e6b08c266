"""`reshard_sharded_state_dict` between live layouts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from remesh.compat.flex_checkpoint import reshard_sharded_state_dict
from remesh.errors import MismatchError, StateError, TransformError
from remesh.exchange import Alone, Exchange
from tests.compat.flex_layouts import Weights, cut, filled, flat, numbers, whole
from tests.support import run_ranks


def reshard(exchange: Exchange, source: Weights, wanted: Weights, **options: Any) -> None:
    """Fill an empty copy of `wanted` from `source`, and compare."""
    call = functools.partial(reshard_sharded_state_dict, source, process_group=exchange)
    filled(lambda target: call(target, **options), wanted)


def _four_layouts(exchange: Exchange) -> None:
    """tp2 with copies, rows of four, whole, and flat ranges across rows: each into each."""
    rank, full = exchange.rank, numbers((4, 6, 2))
    halves = cut("w", full, 1, rank // 2, 2)
    bounds = [(0, 5), (5, 17), (17, 47), (47, 48)]
    layouts = [
        cut("w", full, 1, rank % 2, 2),
        cut("w", full, 0, rank, 4),
        whole({"w": full.clone()})["w"],
        flat(whole({"w": full})["w"], *bounds[rank]),
        flat(halves, 0, 11) if rank % 2 else flat(halves, 11, 24),
    ]
    for source in layouts:
        for wanted in layouts:
            reshard(exchange, {"w": source}, {"w": wanted})
    # Two ranks want halves, the others nothing.
    some = {"w": cut("w", full, 0, rank, 2)} if rank < 2 else {}
    reshard(exchange, {"w": layouts[1]}, some)


def test_layouts_into_each_other() -> None:
    run_ranks(4, _four_layouts)


# ---------------------------------------------------------------------------------------------
# Configuration and faults
# ---------------------------------------------------------------------------------------------


def test_statements_forward_and_backward() -> None:
    joined = whole({"qk": numbers((4, 3))})
    parts = whole({"q": numbers((2, 3)), "k": numbers((2, 3), 6)})
    config = {"aoa_statements": ["q, k -> qk, axis=0"], "enable_traceback": True}
    reshard(Alone(), parts, joined, aoa_config=config)
    reshard(Alone(), joined, parts, aoa_config={**config, "aoa_config_reverse": True})


@pytest.mark.parametrize("config", [None, {}, {"aoa_statements": []}])
def test_no_statements_are_no_transformation(config: dict[str, Any] | None) -> None:
    wanted = whole({"w": numbers((4,)), "scalar": torch.tensor(3.0)})
    reshard(Alone(), wanted, wanted, aoa_config=config)
    reshard(Alone(), {}, {}, aoa_config=config)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"statements": []}, StateError, "aoa_config has no statements"),
        ({"aoa_statements": ["a, b -> c, d"]}, TransformError, "statement 1"),
    ],
)
def test_a_faulty_configuration(
    config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        reshard_sharded_state_dict({}, {}, aoa_config=config)


def four(**changes: Any) -> Weights:
    """A weight of four numbers, some of its fields changed."""
    return {"w": replace(whole({"w": numbers((4,))})["w"], **changes)}


Make = Callable[[int], tuple[Any, Any]]

FAULTS: dict[str, tuple[type[Exception], str, Make]] = {
    "missing": (
        MismatchError,
        r"1 name is not stored:\s+v\nLeave out what is not stored, or let .* aoa_config make it.\Z",
        lambda rank: (four(), whole({"v": torch.zeros(4)}) if rank else {}),
    ),
    "shape": (
        MismatchError,
        r"w: shape \(4,\) is stored, \(2, 2\) is wanted",
        lambda rank: (four(), whole({"w": torch.zeros(2, 2)}) if rank else {}),
    ),
    "dtype": (
        MismatchError,
        r"dtype float32 is stored, float64 is wanted\Z",
        lambda _: (four(), whole({"w": torch.zeros(4, dtype=torch.float64)})),
    ),
    "other name": (
        StateError,
        "w: the weight under this key calls itself 'v'",
        lambda rank: (four(key="v") if rank else four(), {}),
    ),
    "range": (
        StateError,
        "w: the range slice.0, 3, None. of a box of 4 elements does not fit",
        lambda _: (four(is_flattened=True, flattened_range=slice(0, 3)), {}),
    ),
    "no range": (
        StateError,
        "w: a flattened weight needs its flattened_range",
        lambda _: (four(is_flattened=True), {}),
    ),
    "bounds": (
        StateError,
        r"w: box \[1:5\] does not lie in shape \(4,\)",
        lambda _: (four(), four(global_offset=(1,))),
    ),
    "dims": (
        StateError,
        r"w: offset \(0, 0\), local shape \(4,\) and global shape \(4,\) do not fit",
        lambda _: (four(), four(global_offset=(0, 0))),
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
