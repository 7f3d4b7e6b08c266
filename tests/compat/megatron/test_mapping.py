"""The classes that describe shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remesh.compat.megatron import CheckpointingException
from remesh.compat.megatron.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from remesh.compat.megatron.serialization import load, save
from tests.compat.megatron.layouts import flat_shard, shard


def tensor(**changes: Any) -> ShardedTensor:
    fields: dict[str, Any] = {
        "key": "w",
        "data": torch.zeros(2, 3),
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (4, 6),
        "global_offset": (2, 3),
        "axis_fragmentations": (2, 2),
    }
    return ShardedTensor(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16},
        {"data": torch.zeros(3, 2)},
        {"global_offset": (2,)},
        {"prepend_axis_num": 1},
        {"global_offset": (1, 0)},
        {"flattened_range": slice(0, 4)},
        {"flattened_range": slice(0, 6, 2), "data": torch.zeros(3)},
        {"flattened_range": slice(4, 8), "data": torch.zeros(4)},
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointingException, match="key='w'"):
        tensor(**changes)


def test_integrity_is_checked_when_asked_after_a_change() -> None:
    changed = tensor()
    changed.dtype = torch.int64
    with pytest.raises(CheckpointingException):
        changed.validate_metadata_integrity()


def test_data_of_another_form_set_later_is_refused(tmp_path: Path) -> None:
    """What is not laid out as the shard would be stored elsewhere, or a copy of it be filled."""
    changed = shard("w", torch.zeros(2, 3))
    save({"w": changed}, tmp_path)
    changed.data = torch.zeros(2, 3).t()
    for use in (save, load):
        with pytest.raises(CheckpointingException, match=r"shape \(2, 3\), its array \(3, 2\)"):
            use({"w": changed}, tmp_path)


def test_from_rank_offsets_places_a_shard_in_its_grid() -> None:
    made = shard("w", torch.zeros(2, 3), (0, 4, 8), (2, 1, 2), replica_id=7, prepend_axis_num=1)
    assert (made.global_shape, made.global_offset) == ((8, 2, 6), (4, 0, 3))
    assert (made.local_shape, made.axis_fragmentations) == ((2, 3), (8, 1, 2))
    assert made.has_regular_grid
    assert made.replica_id == 7
    assert made.global_slice() == (4, slice(0, 2), slice(3, 6))
    assert made.local_chunk_offset_in_global() == (4, 0, 1)
    assert made.max_allowed_chunks() == (1, 2, 3)
    # The last word on an axis holds.
    last = shard("w", torch.zeros(2), (0, 0, 2), (0, 3, 4))
    assert (last.global_shape, last.global_offset) == ((8,), (6,))


@pytest.mark.parametrize("offset", [(0, 2, 2), (0, -1, 2), (-1, 0, 2), (2, 0, 2), (0, 0, 0)])
def test_rank_offsets_that_do_not_exist_are_refused(offset: tuple[int, int, int]) -> None:
    with pytest.raises(CheckpointingException, match="w: rank offset"):
        shard("w", torch.zeros(2, 3), offset)


def test_each_constructor_sends_a_flattened_range_to_the_right_one() -> None:
    flat: Any = slice(0, 2)
    with pytest.raises(ValueError, match="from_rank_offsets_flat"):
        shard("w", torch.zeros(2), flattened_range=flat)
    with pytest.raises(CheckpointingException, match="needs a flattened_range"):
        flat_shard("w", torch.zeros(2), (2,))
    with pytest.raises(CheckpointingException, match="data has shape"):
        flat_shard("w", torch.zeros(2), (4,), flattened_range=slice(0, 3))


def test_a_shard_without_extent_has_a_place_in_the_grid() -> None:
    empty = tensor(data=torch.zeros(0, 3), local_shape=(0, 3), global_offset=(0, 3))
    assert empty.local_chunk_offset_in_global() == (0, 1)


def test_an_irregular_shard_may_begin_anywhere_and_has_no_chunks() -> None:
    irregular = tensor(axis_fragmentations=None, global_offset=(1, 3))
    assert not irregular.has_regular_grid
    for ask in (irregular.local_chunk_offset_in_global, irregular.max_allowed_chunks):
        with pytest.raises(CheckpointingException, match="grid"):
            ask()


def test_chunks_that_do_not_divide_are_refused_unless_shapes_may_differ() -> None:
    with pytest.raises(CheckpointingException, match="5 cannot be cut into 2"):
        tensor(global_shape=(5, 6)).max_allowed_chunks()
    assert tensor(global_shape=(5, 6), allow_shape_mismatch=True).max_allowed_chunks() == (2, 3)


def test_narrow_shrinks_local_and_global_in_proportion() -> None:
    data = torch.arange(24).reshape(4, 6)
    (part,) = shard("w", data, (0, 1, 2), (1, 2, 4)).narrow(1, 2, 3)
    assert part.data is not None
    assert torch.equal(part.data, data[:, 2:5])
    assert part.local_shape == (4, 3)
    assert (part.global_shape, part.global_offset) == ((8, 12), (4, 6))


@pytest.mark.parametrize(
    ("start", "length", "left", "values"),
    [
        (0, 2, slice(2, 6), [0, 1, 2, 3]),
        (1, 2, slice(0, 5), [1, 2, 3, 4, 5]),
        (2, 2, slice(0, 2), [4, 5]),
    ],
)
def test_narrow_of_a_flattened_range(
    start: int, length: int, left: slice, values: list[int]
) -> None:
    # Elements 2 to 8 of four rows of three.
    made = flat_shard("w", torch.arange(6), (4, 3), (0, 1, 2), flattened_range=slice(2, 8))
    (part,) = made.narrow(0, start, length)
    assert part.data is not None
    assert part.data.tolist() == values
    assert part.flattened_range == left
    assert (part.local_shape, part.global_shape) == ((length, 3), (2 * length, 3))


def test_nothing_of_a_flattened_range_may_be_left() -> None:
    made = flat_shard("w", torch.arange(3), (4, 3), flattened_range=slice(0, 3))
    assert made.narrow(0, 2, 2) == []
    with pytest.raises(CheckpointingException, match="dim 0 only"):
        made.narrow(1, 0, 2)


def test_data_is_made_where_there_is_none() -> None:
    made = tensor().without_data()
    made.init_data("cpu", torch.ones)
    made.init_data("cpu", torch.zeros)  # there is some already
    assert made.data is not None
    assert torch.equal(made.data, torch.ones(2, 3))
    flat = tensor(data=None, flattened_range=slice(1, 5))
    flat.init_data("cpu", torch.ones)
    assert flat.data is not None
    assert flat.data.tolist() == [1.0] * 4


def test_the_unique_key_of_an_object_and_back() -> None:
    item = ShardedObject("layer.rng", {"a": 1}, (2, 3), (1, 0), replica_id=(0, 1))
    assert item.unique_key == "layer.rng/shard_1.0_2.3"
    assert item.without_data() == ShardedObject.empty_from_unique_key(item.unique_key, (0, 1))
    assert str(item) == "ShardedObject(key='layer.rng')"
    with pytest.raises(CheckpointingException, match="differ in length"):
        ShardedObject("o", None, (1, 2), (0,))


def test_keys_with_slashes_and_old_keys_can_be_read_back() -> None:
    item = ShardedObject.empty_from_unique_key("a/b/shard_1_4")
    assert (item.key, item.global_offset, item.global_shape) == ("a/b", (1,), (4,))
    assert ShardedObject.empty_from_unique_key("a/shard_1.2_4").global_shape == (4, -1)
    for wrong in ("a", "a/shard_1", "a/part_1_2", "/shard_0_1", "a/shard_x_1"):
        with pytest.raises(CheckpointingException, match="not of the form"):
            ShardedObject.empty_from_unique_key(wrong)


def test_local_objects_have_both_spellings() -> None:
    assert LocalNonpersitentObject is LocalNonpersistentObject
    assert LocalNonpersistentObject([1]).unwrap() == [1]


@pytest.mark.parametrize("num_ranges", [1, 2, 3, 7])
def test_ranges_of_a_factory_that_knows_no_ranges(tmp_path: Path, num_ranges: int) -> None:
    # Two ranks of tensor parallelism, each with its rows of two matrices, as in gated layers.
    gate, up = torch.arange(24).reshape(4, 6), torch.arange(24, 48).reshape(4, 6)
    ranks = [torch.cat([gate[:2], up[:2]]), torch.cat([gate[2:], up[2:]])]

    def ranges(*, values: bool) -> dict[str, Any]:
        found = {}
        for rank, weight in enumerate(ranks):

            def build(key: str, data: Any, replica_id: Any, _: Any, rank: int = rank) -> Any:
                return [
                    shard(key, half, (0, rank + 2 * number, 4), replica_id=replica_id)
                    for number, half in enumerate(data.chunk(2))
                ]

            of_weight = ShardedTensorFactory("weight", weight, build, torch.cat)
            size = -(-weight.numel() // num_ranges)
            for start in range(0, weight.numel(), size):
                part = slice(start, min(start + size, weight.numel()))
                data = weight.reshape(-1)[part].clone()
                found[f"{rank} {start}"] = replace(
                    of_weight,
                    key="moment",
                    data=data if values else torch.zeros_like(data),
                    flattened_range=part,
                )
        return found

    save(ranges(values=True), tmp_path)
    whole = {"all": shard("moment", torch.zeros(8, 6, dtype=torch.int64))}
    assert torch.equal(load(whole, tmp_path)["all"], torch.cat([gate, up]))
    loaded, expected = load(ranges(values=False), tmp_path), ranges(values=True)
    assert all(torch.equal(loaded[key], expected[key].data) for key in expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda key, data, *_: [shard(key, data.clone())],
        lambda key, data, *_: [shard(key, data.t())],
        lambda key, data, *_: [shard(key, data[:1])],
        lambda key, data, *_: [ShardedObject(key, data, (1,), (0,))],
    ],
    ids=["copied", "transposed", "incomplete", "object"],
)
def test_a_factory_that_cannot_store_a_range_is_refused(build: Any) -> None:
    factory = ShardedTensorFactory("weight", torch.ones(2, 3), build, torch.cat)
    part = replace(factory, data=torch.ones(3), flattened_range=slice(2, 5))
    with pytest.raises(CheckpointingException, match="cannot store a flattened range"):
        part.build()


def halves(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    assert flattened_range is None
    return [
        shard(f"{key}.{number}", half, replica_id=replica_id)
        for number, half in enumerate(data.chunk(2))
    ]


def test_factories_build_and_merge() -> None:
    factory = ShardedTensorFactory("f", torch.arange(4), halves, torch.cat, replica_id=3)
    state: Any = {"a": [factory, 1], "b": 2}
    apply_factories(state)
    assert [part.key for part in state["a"][0]] == ["f.0", "f.1"]
    assert state["a"][0][0].replica_id == 3
    loaded: Any = {"a": [[torch.zeros(2), torch.ones(2)], 1], "b": 2}
    merged = apply_factory_merges(loaded, {"a": {0: factory.without_data()}})
    assert merged is loaded
    assert merged["a"][0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "loaded", [{}, {"a": []}, {"a": 3}, {"a": {}}], ids=["key", "position", "leaf", "inner key"]
)
def test_merging_what_was_not_loaded_is_refused(loaded: Any) -> None:
    factory = ShardedTensorFactory("f", None, halves, torch.cat)
    with pytest.raises(ValueError, match="loaded"):
        apply_factory_merges(loaded, {"a": {0: factory}})
