"""`ShardedWeight` and what makes, describes and copies it, by the documentation's examples."""

from __future__ import annotations

import pytest
import torch

from remesh.compat import flex_checkpoint as flex
from remesh.compat.flex_checkpoint import ShardedWeight, ShardedWeightDesc
from remesh.errors import MismatchError, StateError
from remesh.exchange import Exchange
from tests.compat.flex_layouts import Weights, whole
from tests.support import run_ranks


def test_fields_and_text() -> None:
    weight = ShardedWeight("w", torch.zeros(5), (2, 4), (4, 4), (2, 0), True, slice(1, 6))
    assert flex.ShardedTensor is ShardedWeight
    assert str(weight).splitlines() == [
        "ShardedWeight(",
        "  key=w,",
        "  local_tensor=Tensor(shape=[5]),",
        "  local_shape=(2, 4),",
        "  global_shape=(4, 4),",
        "  global_offset=(2, 0),",
        "  flattened_range=slice(1, 6, None)",
        ")",
    ]
    plain = flex.make_replicated_sharded_tensor("w", torch.zeros(2))
    assert (plain.is_flattened, plain.flattened_range) == (False, None)
    plain.key = "stage1.w"
    assert flex.build_shard_desc(plain) == ShardedWeightDesc("stage1.w", (2,), (2,), (0,))


def test_documented_merge() -> None:
    merged = flex.merge_shard_info_list(
        [
            {"param1": ["info1", "info2"]},
            {"param1": ["info3"], "param2": ["info4"]},
            {"param2": ["info5", "info6"]},
        ]
    )
    assert merged == {
        "param1": ["info1", "info2", "info3"],
        "param2": ["info4", "info5", "info6"],
    }


def test_is_sharded_state_dict() -> None:
    weights = whole({"weight": torch.zeros(2), "bias": torch.zeros(2)})
    assert flex.is_sharded_state_dict(weights)
    assert not flex.is_sharded_state_dict({"weight": torch.zeros(2)})
    assert not flex.is_sharded_state_dict({})
    assert not flex.is_sharded_state_dict([weights["bias"]])
    with pytest.raises(TypeError, match="'bias'"):
        flex.is_sharded_state_dict({**weights, "bias": torch.zeros(2)})


Layers = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def _documented_layers(exchange: Exchange) -> Layers:
    """Global shape and offset of what a rank of each parallel layer holds; shapes only."""
    hidden, rows = 1024, 250_000
    layers: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, int]]] = {
        "embedding": ({"weight": (rows, hidden)}, {"weight": 0}),
        "column": ({"weight": (hidden, 64), "bias": (64,)}, {"weight": 1, "bias": 0, "absent": 0}),
        "row": ({"weight": (64, hidden), "bias": (hidden,), "scale": ()}, {"weight": 0}),
        "head": ({"weight": (hidden, rows)}, {"weight": 1}),
    }
    found = {}
    for name, (shapes, rules) in layers.items():
        state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        weights = flex.build_sharded_state_dict(state, rules, f"{name}.", group=exchange)
        for key, weight in weights.items():
            tensor = state[key.removeprefix(f"{name}.")]
            assert weight.local_tensor is tensor
            assert (weight.key, weight.local_shape) == (key, tensor.shape)
            found[key] = (weight.global_shape, weight.global_offset)
    return found


def test_documented_layers() -> None:
    for rank, found in enumerate(run_ranks(4, _documented_layers)):
        first = 250_000 * rank
        assert found == {
            "embedding.weight": ((1_000_000, 1024), (first, 0)),
            "column.weight": ((1024, 256), (0, 64 * rank)),
            "column.bias": ((256,), (64 * rank,)),
            "row.weight": ((256, 1024), (64 * rank, 0)),
            "row.bias": ((1024,), (0,)),
            "row.scale": ((), ()),
            "head.weight": ((1024, 1_000_000), (0, first)),
        }


def test_one_rank_alone_has_everything() -> None:
    weight = flex.make_tp_sharded_tensor_for_checkpoint("w", torch.zeros(4, 6), 1)
    assert (weight.global_shape, weight.global_offset) == ((4, 6), (0, 0))


@pytest.mark.parametrize("axis", [-1, 2])
def test_an_axis_that_does_not_exist(axis: int) -> None:
    with pytest.raises(ValueError, match=f"w: there is no axis {axis}"):
        flex.shard_weight("w", torch.zeros(4, 6), axis)


def test_assign_between_two_layouts() -> None:
    """From two column shards into four row shards, region by region."""
    full = torch.arange(32.0).reshape(4, 8)
    sources = [
        ShardedWeight("w", full[:, 4 * n : 4 * n + 4].clone(), (4, 4), (4, 8), (0, 4 * n))
        for n in range(2)
    ]
    targets = [
        ShardedWeight("v", torch.full((1, 8), -1.0), (1, 8), (4, 8), (n, 0)) for n in range(4)
    ]
    for source in sources:
        for target in targets:
            found, offset, shape, _, _ = flex.get_overlap_region(
                source.global_offset, source.local_shape, target.global_offset, target.local_shape
            )
            assert found
            assert offset is not None
            assert shape is not None
            region = ShardedWeightDesc("w", tuple(shape), (4, 8), tuple(offset))
            flex.assign_sharded_slice(region, source, region, target)
    assert torch.equal(torch.cat([target.local_tensor for target in targets]), full)


def region(offset: int, size: int) -> ShardedWeightDesc:
    return ShardedWeightDesc("w", (size,), (9,), (offset,))


def test_assign_maps_one_region_onto_another() -> None:
    source = whole({"w": torch.arange(6.0)})["w"]
    target = ShardedWeight("v", torch.zeros(3), (3,), (9,), (3,))
    flex.assign_sharded_slice(region(3, 2), source, region(4, 2), target)
    assert target.local_tensor.tolist() == [0, 3, 4]


WEIGHTS: Weights = {
    **whole({"four": torch.zeros(4), "half": torch.zeros(4, dtype=torch.float16)}),
    "flat": ShardedWeight("flat", torch.zeros(2), (4,), (4,), (0,), True, slice(0, 2)),
}


@pytest.mark.parametrize(
    ("source_region", "source", "target_region", "target", "error", "message"),
    [
        ((5, 2), "four", (0, 2), "four", StateError, r"(?s)four: the shard at .* holds nothing"),
        ((0, 2), "four", (3, 2), "four", StateError, r"(?s)holds \[2\] elements .* \[1\]"),
        ((0, 2), "four", (0, 2), "half", MismatchError, "float32 does not fit into torch.float16"),
        ((0, 2), "flat", (0, 2), "four", StateError, "a flattened shard has no slices"),
    ],
)
def test_assign_refuses_what_does_not_correspond(
    source_region: tuple[int, int],
    source: str,
    target_region: tuple[int, int],
    target: str,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        flex.assign_sharded_slice(
            region(*source_region), WEIGHTS[source], region(*target_region), WEIGHTS[target]
        )
