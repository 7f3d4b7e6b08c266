"""The checks that a reshard makes of its source, its target and the two together."""

from __future__ import annotations

import re

import pytest

from remesh.compat.flex_checkpoint import (
    ShardInfo,
    check_dst_state_dict_validity,
    check_src_dst_state_dict_validity,
    check_src_state_dict_validity,
)
from remesh.errors import CoverageError, MismatchError, StateError


def rows(first: int, count: int, dtype: str = "float32", num_rows: int = 1024) -> ShardInfo:
    return ShardInfo((first, 0), (count, 512), dtype, (num_rows, 512), False)


DOCUMENTED = {"linear.weight": [rows(256 * rank, 256) for rank in range(4)]}


def test_the_documented_layout_is_a_valid_source_and_target() -> None:
    check_src_state_dict_validity(DOCUMENTED)
    check_dst_state_dict_validity(DOCUMENTED)
    check_src_dst_state_dict_validity(DOCUMENTED, DOCUMENTED)


def test_plain_tuples_will_do() -> None:
    plain = {"w": [((0,), (4,), "float32", (4,), False)]}
    check_src_state_dict_validity(plain)  # type: ignore[arg-type]
    check_dst_state_dict_validity(plain)  # type: ignore[arg-type]


def test_copies_and_layouts_that_are_no_grid_are_valid_sources() -> None:
    halves = [ShardInfo((0, 0), (4, 2), "float32", (4, 4), False)] * 2
    quarters = [ShardInfo((row, 2), (2, 2), "float32", (4, 4), False) for row in (0, 2)]
    check_src_state_dict_validity({"w": [*halves, *quarters]})


def test_shards_that_differ_in_dtype() -> None:
    mixed = {"w": [rows(0, 512), rows(512, 512, "bfloat16")]}
    for check in (check_src_state_dict_validity, check_dst_state_dict_validity):
        with pytest.raises(StateError, match="w: shards differ in dtype: bfloat16, float32"):
            check(mixed)


def test_shards_that_disagree_about_the_global_shape() -> None:
    infos = {"w": [rows(0, 512), rows(512, 512, num_rows=2048)]}
    with pytest.raises(StateError, match="w: shards disagree about the global shape"):
        check_src_state_dict_validity(infos)


def test_a_source_with_a_hole() -> None:
    infos = {"w": [rows(0, 256), rows(512, 512)]}
    with pytest.raises(CoverageError, match=r"w: no shard holds \[256:512, 0:512\]"):
        check_src_state_dict_validity(infos)


def test_a_source_that_leaves_its_tensor() -> None:
    with pytest.raises(CoverageError, match=r"w: a shard holds \[512:1536, 0:512\]"):
        check_src_state_dict_validity({"w": [rows(0, 512), rows(512, 1024)]})


def test_flattened_shards_need_a_known_range() -> None:
    flat = ShardInfo((0, 0), (3, 4), "float32", (3, 4), True)
    for check in (check_src_state_dict_validity, check_dst_state_dict_validity):
        with pytest.raises(StateError, match="w: a flattened shard without its range"):
            check({"w": [flat]})
    known = [flat._replace(flattened_range=(0, 5)), flat._replace(flattened_range=(5, 12))]
    check_src_state_dict_validity({"w": known})
    with pytest.raises(CoverageError, match=r"w: no shard holds \[0:1, 0:4\], \[1:2, 0:1\]"):
        check_src_state_dict_validity({"w": known[1:]})


@pytest.mark.parametrize(("offset", "extent"), [(-1, 2), (8, 2), (0, 0), (6, 3), (0, -1)])
def test_targets_out_of_bounds(offset: int, extent: int) -> None:
    info = ShardInfo((offset,), (extent,), "float32", (8,), False)
    wanted = re.escape(f"w: a shard of shape ({extent},) at ({offset},)")
    with pytest.raises(StateError, match=wanted):
        check_dst_state_dict_validity({"w": [info]})


def test_numbers_of_axes_must_agree() -> None:
    info = ShardInfo((0,), (4, 4), "float32", (4, 4), False)
    for check in (check_src_state_dict_validity, check_dst_state_dict_validity):
        with pytest.raises(StateError, match=r"(?s)w: .* differ in their number of axes"):
            check({"w": [info]})


def test_a_target_that_the_source_lacks() -> None:
    with pytest.raises(MismatchError, match="bias, other") as caught:
        check_src_dst_state_dict_validity(
            DOCUMENTED, {**DOCUMENTED, "other": [rows(0, 4)], "bias": [rows(0, 4)]}
        )
    assert caught.value.missing == ("bias", "other")


def test_a_target_of_another_shape() -> None:
    target = {"linear.weight": [rows(0, 1024, num_rows=2048)]}
    with pytest.raises(MismatchError, match=r"(?s)linear.weight: .*\(1024, 512\).*\(2048, 512\)"):
        check_src_dst_state_dict_validity(DOCUMENTED, target)
