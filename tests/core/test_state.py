"""The walk over a state: what it finds, what it calls it, and how it puts things back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.core.geometry import Box
from remesh.core.sharded import (
    Part,
    ShardedObject,
    ShardedTensor,
)
from remesh.core.state import (
    Description,
    Path,
    Role,
    assemble,
    describe,
)
from remesh.errors import NameCollisionError, StateError
from tests.strategies import Shape, shapes

Array = npt.NDArray[Any]


def arange(*shape: int) -> Array:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


@dataclass
class Read:
    """What has been loaded, by name."""

    values: dict[str, object] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)

    def value(self, name: str) -> object:
        return self.values[name]

    def object(self, unique_name: str) -> object:
        return self.objects[unique_name]


def the_same(description: Description) -> Read:
    """As if what was described had been saved and loaded."""
    objects = {element.unique_name: element.data for element in description.objects}
    return Read(dict(description.values), objects)


class Pair(NamedTuple):
    left: Any
    right: Any


# ---------------------------------------------------------------------------------------------
# Names and leaves
# ---------------------------------------------------------------------------------------------


def test_arrays_of_one_memory_have_one_alias_key() -> None:
    array = arange(4, 4)
    entries = describe(
        {"a": array, "b": array[:], "c": array[:2], "d": array.T, "e": array.copy()}
    ).tensors
    keys = {entry.name: entry.alias_key for entry in entries}
    assert keys["a"] == keys["b"]
    assert len({keys[name] for name in "acde"}) == 4


def test_empty_arrays_are_not_the_same_memory() -> None:
    empty = np.zeros((0, 3), np.int8)
    assert [e.alias_key for e in describe({"a": empty, "b": empty}).tensors] == [None, None]


# ---------------------------------------------------------------------------------------------
# Putting things back
# ---------------------------------------------------------------------------------------------


def test_a_tuple_that_did_not_change_is_not_made_anew() -> None:
    state = {"pair": Pair(arange(1), None), "plain": (arange(1), arange(2))}
    pair, plain = state["pair"], state["plain"]
    found = describe(state)
    found.rebuild(the_same(found))
    assert state["pair"] is pair
    assert state["plain"] is plain


# ---------------------------------------------------------------------------------------------
# describe and assemble
# ---------------------------------------------------------------------------------------------

KEYS = st.one_of(st.text("abc", min_size=1, max_size=2), st.integers(0, 3))
LEAVES = st.one_of(
    shapes(max_dims=3, min_extent=0, max_extent=2).map(lambda shape: arange(*shape)),
    st.integers(),
    st.none(),
    st.just({}),
    st.just([]),
    st.just({1.5: {"x": [1]}}),
    st.just(("plain", [1, 2])),
)


def unique_names(node: dict[Any, Any]) -> bool:
    return len({str(key) for key in node}) == len(node)


NESTS = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, max_size=3).filter(unique_names),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
        ),
        max_leaves=10,
    ),
    max_size=4,
).filter(unique_names)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Mapping):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert a is b
    else:
        assert a == b


def leaves_of(description: Description) -> dict[Path, object]:
    leaves: dict[Path, object] = {
        description.paths[name]: value for name, value in description.values.items()
    }
    for entry in description.tensors:
        leaves[description.paths[entry.name]] = entry.parts[0].data
    # As they stand in the state: both kinds of leaves are recorded in its order.
    return {path: leaves[path] for path in description.paths.values()}


@given(NESTS)
def test_assemble_builds_what_describe_took_apart(state: dict[Any, Any]) -> None:
    found = describe(state)
    assert_same(assemble(leaves_of(found), found.sequences), state)


@given(NESTS)
def test_rebuilding_with_the_same_values_changes_nothing(state: dict[Any, Any]) -> None:
    found = describe(state)
    expected = assemble(leaves_of(found), found.sequences)
    back = found.rebuild(the_same(found))
    assert back is state
    assert_same(back, expected)


def test_a_leaf_cannot_lie_where_others_have_their_container() -> None:
    # A sharded description has a name of its own, which may be that of a container beside it.
    for paths in ([("a",), ("a", "b")], [("a", "b"), ("a",)]):
        leaves: dict[Path, object] = {path: {"x": 1} for path in paths}
        with pytest.raises(NameCollisionError, match=r"^'a' is both an entry and a container"):
            assemble(leaves, {})


def test_assemble_a_part_of_a_state() -> None:
    leaves: dict[Path, object] = {
        ("opt", "state", 0): "a",
        ("opt", "state", 10): "b",
        ("opt", "state", 2): "c",
    }
    assert assemble(leaves, {("opt", "state"): "list"}, ("opt",)) == {"state": ["a", "c", "b"]}
    assert assemble(leaves, {("opt", "state"): "tuple"}, ("opt", "state")) == ("a", "c", "b")


# ---------------------------------------------------------------------------------------------
# Sharded tensors
# ---------------------------------------------------------------------------------------------


def test_a_sharded_tensor_has_its_own_name_and_no_path() -> None:
    data = arange(2, 3)
    state = {"anywhere": [ShardedTensor.at_offset("decoder.w", data, (8, 3), (4, 0))]}
    found = describe(state)
    [entry] = found.tensors
    assert (entry.name, entry.dtype, entry.global_shape) == ("decoder.w", "float32", (8, 3))
    assert entry.role is Role.MAIN
    assert [(part.box, part.data) for part in entry.parts] == [(Box((4, 0), (2, 3)), data)]
    assert found.paths == {}
    assert found.rebuild(Read())["anywhere"][0] is state["anywhere"][0]


@pytest.mark.parametrize(
    ("replica_id", "role"),
    [
        (0, Role.MAIN),
        ((0, 0), Role.MAIN),
        ((), Role.MAIN),
        (1, Role.REPLICA),
        ((0, 2), Role.REPLICA),
    ],
)
def test_the_main_replica_has_zeros(replica_id: int | tuple[int, ...], role: Role) -> None:
    tensor = ShardedTensor.whole("w", arange(2), replica_id=replica_id)
    assert tensor.is_main_replica == (role is Role.MAIN)
    assert describe({"w": tensor}).tensors[0].role is role
    element = ShardedObject("o", 1, (2,), (0,), replica_id)
    assert element.is_main_replica == (role is Role.MAIN)


def test_a_sharded_tensor_without_boxes_is_not_held() -> None:
    assert describe({"w": ShardedTensor("w", (4,), ())}).tensors == []


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(Box((3,), (2,)), arange(2))], r"w: box \[3:5\] does not lie in shape \(4,\)"),
        ([(Box((0, 0), (1, 1)), arange(1, 1))], r"w: box \[0:1, 0:1\] does not lie in shape"),
        ([(Box((0,), (2,)), arange(3))], r"w: box \[0:2\] has shape \(2,\), its array \(3,\)"),
        ([(Box((0,), (2,)), arange(1, 2))], r"has shape \(2,\), its array \(1, 2\)"),
        (
            [(Box((0,), (2,)), arange(2)), (Box((1,), (2,)), arange(2))],
            r"w: boxes \[0:2\] and \[1:3\] overlap",
        ),
    ],
)
def test_boxes_that_cannot_be_are_refused(parts: list[tuple[Box, Array]], message: str) -> None:
    with pytest.raises(StateError, match=message):
        ShardedTensor("w", (4,), tuple(Part(box, data) for box, data in parts))


def test_from_rank_offsets_with_dims_in_front() -> None:
    data = arange(2, 3)
    tensor = ShardedTensor.from_rank_offsets(
        "w", data, (0, 5, 8), (2, 1, 2), prepend_axis_num=2, replica_id=1
    )
    assert tensor.global_shape == (8, 1, 4, 3)
    [part] = tensor.parts
    assert part.box == Box((5, 0, 2, 0), (1, 1, 2, 3))
    assert np.shares_memory(np.asarray(part.data), data)
    assert not tensor.is_main_replica


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([(2, 0, 2)], "w: dim 2 is named twice or does not exist"),
        ([(-1, 0, 2)], "w: dim -1 is named twice or does not exist"),
        ([(0, 0, 2), (0, 1, 2)], "w: dim 0 is named twice"),
        ([(0, 2, 2)], "w: shard 2 of 2 in dim 0 does not exist"),
        ([(0, -1, 2)], "w: shard -1 of 2 in dim 0 does not exist"),
        ([(0, 0, 0)], "w: shard 0 of 0 in dim 0 does not exist"),
    ],
)
def test_rank_offsets_that_cannot_be_are_refused(
    offsets: list[tuple[int, int, int]], message: str
) -> None:
    with pytest.raises(StateError, match=message):
        ShardedTensor.from_rank_offsets("w", arange(2, 3), *offsets)
    with pytest.raises(StateError, match=message):
        ShardedTensor.from_rank_offsets_flat(
            "w", arange(6), (2, 3), *offsets, flattened_range=slice(0, 6)
        )


@st.composite
def flat_shards(
    draw: st.DrawFn,
) -> tuple[Shape, list[tuple[int, int, int]], int, list[slice]]:
    """Local shape, rank offsets, number of dims in front, and ranges that cut the shard."""
    prepended = draw(st.integers(0, 2))
    local = draw(shapes(min_dims=1, max_dims=3, max_extent=4))
    offsets = []
    for dim in range(prepended + len(local)):
        if draw(st.booleans()):
            num = draw(st.integers(1, 3))
            offsets.append((dim, draw(st.integers(0, num - 1)), num))
    size = math.prod(local)
    cuts = sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=3))})
    ranges = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    return local, offsets, prepended, ranges


@given(flat_shards())
def test_flattened_ranges_are_the_shard(
    drawn: tuple[Shape, list[tuple[int, int, int]], int, list[slice]],
) -> None:
    local, offsets, prepended, ranges = drawn
    shard = arange(*local)
    whole = ShardedTensor.from_rank_offsets("w", shard, *offsets, prepend_axis_num=prepended)
    expected = np.full(whole.global_shape, -1, np.float32)
    expected[whole.parts[0].box.slices] = np.asarray(whole.parts[0].data)
    found = np.full(whole.global_shape, -1, np.float32)
    flat = shard.reshape(-1)
    for one in ranges:
        tensor = ShardedTensor.from_rank_offsets_flat(
            "w",
            flat[one],
            local,
            *offsets,
            flattened_range=one,
            prepend_axis_num=prepended,
            replica_id=(0, 1),
        )
        assert tensor.global_shape == whole.global_shape
        assert not tensor.is_main_replica
        assert len(tensor.parts) <= 2 * len(local) - 1
        for part in tensor.parts:
            assert np.shares_memory(np.asarray(part.data), flat)
            assert (found[part.box.slices] == -1).all()
            found[part.box.slices] = np.asarray(part.data)
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("num", "flat"),
    [(5, slice(0, 6)), (6, slice(0, 12, 2)), (6, slice(0, 5)), (3, slice(4, 9)), (1, slice(3, 2))],
)
def test_a_flattened_range_that_does_not_fit_is_refused(num: int, flat: slice) -> None:
    with pytest.raises(
        StateError, match=r"w: flattened range \d+:\d+:\d\nIt is of a shard of shape"
    ):
        ShardedTensor.from_rank_offsets_flat("w", arange(num), (2, 3), flattened_range=flat)


def test_a_flattened_array_of_two_dims_is_refused() -> None:
    with pytest.raises(StateError, match=r"does not fit an array of shape \(2, 3\)"):
        ShardedTensor.from_rank_offsets_flat("w", arange(2, 3), (2, 3), flattened_range=slice(0, 6))


def test_an_empty_flattened_range_holds_nothing() -> None:
    tensor = ShardedTensor.from_rank_offsets_flat(
        "w", arange(0), (2, 3), (0, 1, 2), flattened_range=slice(6, 6)
    )
    assert tensor.parts == ()
    assert tensor.global_shape == (4, 3)
