"""`ShardedWeight` and what makes, describes and copies it, by the documentation's examples."""

from __future__ import annotations

import pytest
import torch

from remesh.compat import flex_checkpoint as flex
from remesh.compat.flex_checkpoint import ShardedWeight, ShardedWeightDesc
from remesh.errors import MismatchError, StateError
from remesh.exchange import Exchange
from tests.support import run_ranks


def whole(key: str, tensor: torch.Tensor) -> ShardedWeight:
    return flex.make_replicated_sharded_weight(key, tensor)


def test_fields_and_text() -> None:
    weight = ShardedWeight("w", torch.zeros(5), (2, 4), (4, 4), (2, 0), True, slice(1, 6))
    assert flex.ShardedTensor is ShardedWeight
    assert (weight.is_flattened, weight.flattened_range) == (True, slice(1, 6))
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
    plain = whole("w", torch.zeros(2))
    assert (plain.is_flattened, plain.flattened_range) == (False, None)
    plain.key = "stage1.w"
    assert plain.key == "stage1.w"


def test_documented_description() -> None:
    weight = ShardedWeight(
        "linear.weight", torch.zeros(1024, 512), (1024, 512), (1024, 2048), (0, 0)
    )
    assert flex.build_shard_desc(weight) == ShardedWeightDesc(
        key="linear.weight",
        local_shape=(1024, 512),
        global_shape=(1024, 2048),
        global_offset=(0, 0),
    )


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
    weight = whole("w", torch.zeros(2))
    assert flex.is_sharded_state_dict({"weight": weight, "bias": weight})
    assert not flex.is_sharded_state_dict({"weight": torch.zeros(2)})
    assert not flex.is_sharded_state_dict({})
    assert not flex.is_sharded_state_dict([weight])
    with pytest.raises(TypeError, match="'bias'"):
        flex.is_sharded_state_dict({"weight": weight, "bias": torch.zeros(2)})


def _shards(exchange: Exchange) -> list[tuple[object, ...]]:
    """A layer with a column-parallel weight, as one of its tensor-parallel ranks describes it."""
    layer = {"weight": torch.zeros(4, 6), "bias": torch.zeros(6), "scale": torch.zeros(())}
    rules = {"weight": 1, "bias": 0, "absent": 0}
    weights = flex.build_sharded_state_dict(layer, rules, "block.", group=exchange)
    assert weights["block.weight"].local_tensor is layer["weight"]
    return [
        (key, w.key, w.local_shape, w.global_shape, w.global_offset) for key, w in weights.items()
    ]


def test_build_sharded_state_dict() -> None:
    first, second = run_ranks(2, _shards)
    assert first == [
        ("block.weight", "block.weight", (4, 6), (4, 12), (0, 0)),
        ("block.bias", "block.bias", (6,), (12,), (0,)),
        ("block.scale", "block.scale", (), (), ()),
    ]
    assert second == [
        ("block.weight", "block.weight", (4, 6), (4, 12), (0, 6)),
        ("block.bias", "block.bias", (6,), (12,), (6,)),
        ("block.scale", "block.scale", (), (), ()),
    ]


def _documented_layers(exchange: Exchange) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Global shape and offset of what a rank of each parallel layer holds; shapes only."""
    hidden, rows = 1024, 250_000
    layers: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, int]]] = {
        "embedding": ({"weight": (rows, hidden)}, {"weight": 0}),
        "column": ({"weight": (hidden, 64), "bias": (64,)}, {"weight": 1, "bias": 0}),
        "row": ({"weight": (64, hidden), "bias": (hidden,)}, {"weight": 0}),
        "head": ({"weight": (hidden, rows)}, {"weight": 1}),
        "tied_head": ({"weight": (rows, hidden)}, {"weight": 0}),
        "linear": ({"weight": (256, 512)}, {"weight": 0}),
    }
    found = {}
    for name, (shapes, rules) in layers.items():
        state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        for weight in flex.build_sharded_state_dict(
            state, rules, f"{name}.", group=exchange
        ).values():
            found[weight.key] = (weight.global_shape, weight.global_offset)
    return found


def test_documented_layers() -> None:
    found = run_ranks(4, _documented_layers)
    for rank in range(4):
        first = 250_000 * rank
        assert found[rank] == {
            "embedding.weight": ((1_000_000, 1024), (first, 0)),
            "column.weight": ((1024, 256), (0, 64 * rank)),
            "column.bias": ((256,), (64 * rank,)),
            "row.weight": ((256, 1024), (64 * rank, 0)),
            "row.bias": ((1024,), (0,)),
            "head.weight": ((1024, 1_000_000), (0, first)),
            "tied_head.weight": ((1_000_000, 1024), (first, 0)),
            "linear.weight": ((1024, 512), (256 * rank, 0)),
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


def test_assign_maps_one_region_onto_another() -> None:
    source = whole("w", torch.arange(6.0))
    target = ShardedWeight("v", torch.zeros(3), (3,), (9,), (3,))
    flex.assign_sharded_slice(
        ShardedWeightDesc("w", (2,), (6,), (3,)),
        source,
        ShardedWeightDesc("v", (2,), (9,), (4,)),
        target,
    )
    assert target.local_tensor.tolist() == [0, 3, 4]


def test_assign_refuses_what_does_not_correspond() -> None:
    source, target = whole("w", torch.zeros(4)), whole("v", torch.zeros(4))

    def region(offset: int, size: int) -> ShardedWeightDesc:
        return ShardedWeightDesc("w", (size,), (9,), (offset,))

    with pytest.raises(StateError, match=r"(?s)w: the shard at .* holds nothing"):
        flex.assign_sharded_slice(region(5, 2), source, region(0, 2), target)
    with pytest.raises(StateError, match=r"(?s)holds \[2\] elements .* \[1\]"):
        flex.assign_sharded_slice(region(0, 2), source, region(3, 2), target)
    with pytest.raises(MismatchError, match=r"torch.float32 does not fit into torch.float16"):
        flex.assign_sharded_slice(
            region(0, 2), source, region(0, 2), whole("v", torch.zeros(4, dtype=torch.float16))
        )
    flat = ShardedWeight("w", torch.zeros(2), (4,), (4,), (0,), True, slice(0, 2))
    with pytest.raises(StateError, match="a flattened shard has no slices"):
        flex.assign_sharded_slice(region(0, 2), flat, region(0, 2), target)
