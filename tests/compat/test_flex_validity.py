"""The checks that a reshard makes of its source, its target and the two together."""

from __future__ import annotations

import re
from typing import Any

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
FLAT = ShardInfo((0, 0), (3, 4), "float32", (3, 4), True)
FLAT_RANGES = [FLAT._replace(flattened_range=(0, 5)), FLAT._replace(flattened_range=(5, 12))]


def test_the_documented_layout_is_a_valid_source_and_target() -> None:
    check_src_state_dict_validity(DOCUMENTED)
    check_dst_state_dict_validity(DOCUMENTED)
    check_src_dst_state_dict_validity(DOCUMENTED, DOCUMENTED)


@pytest.mark.parametrize(
    "infos",
    [
        [((0,), (4,), "float32", (4,), False)],
        [
            *[ShardInfo((0, 0), (4, 2), "float32", (4, 4), False)] * 2,
            *(ShardInfo((row, 2), (2, 2), "float32", (4, 4), False) for row in (0, 2)),
        ],
        FLAT_RANGES,
    ],
    ids=["plain tuples", "copies, and no grid", "flat ranges"],
)
def test_valid_sources_and_targets(infos: Any) -> None:
    check_src_state_dict_validity({"w": infos})
    check_dst_state_dict_validity({"w": infos})


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        (
            [rows(0, 512), rows(512, 512, "bfloat16")],
            "w: shards differ in dtype: bfloat16, float32",
        ),
        ([FLAT], "w: a flattened shard without its range"),
        (
            [ShardInfo((0,), (4, 4), "float32", (4, 4), False)],
            r"(?s)w: .* differ in their number of axes",
        ),
    ],
)
def test_infos_that_are_not_sound(infos: list[ShardInfo], message: str) -> None:
    for check in (check_src_state_dict_validity, check_dst_state_dict_validity):
        with pytest.raises(StateError, match=message):
            check({"w": infos})


@pytest.mark.parametrize(
    ("infos", "error", "message"),
    [
        (
            [rows(0, 512), rows(512, 512, num_rows=2048)],
            StateError,
            "w: shards disagree about the global shape",
        ),
        (
            [rows(0, 256), rows(512, 512)],
            CoverageError,
            r"w: no shard holds \[256:512, 0:512\]",
        ),
        (
            [rows(0, 512), rows(512, 1024)],
            CoverageError,
            r"w: a shard holds \[512:1536, 0:512\]",
        ),
        (FLAT_RANGES[1:], CoverageError, r"w: no shard holds \[0:1, 0:4\], \[1:2, 0:1\]"),
    ],
    ids=["shapes", "hole", "out of bounds", "hole between flat ranges"],
)
def test_faulty_sources(infos: list[ShardInfo], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_src_state_dict_validity({"w": infos})


@pytest.mark.parametrize(("offset", "extent"), [(-1, 2), (8, 2), (0, 0), (6, 3), (0, -1)])
def test_targets_out_of_bounds(offset: int, extent: int) -> None:
    info = ShardInfo((offset,), (extent,), "float32", (8,), False)
    wanted = re.escape(f"w: a shard of shape ({extent},) at ({offset},)")
    with pytest.raises(StateError, match=wanted):
        check_dst_state_dict_validity({"w": [info]})


def test_a_target_that_does_not_fit_its_source() -> None:
    with pytest.raises(MismatchError, match="bias, other") as caught:
        check_src_dst_state_dict_validity(
            DOCUMENTED, {**DOCUMENTED, "other": [rows(0, 4)], "bias": [rows(0, 4)]}
        )
    assert caught.value.missing == ("bias", "other")
    target = {"linear.weight": [rows(0, 1024, num_rows=2048)]}
    with pytest.raises(MismatchError, match=r"(?s)linear.weight: .*\(1024, 512\).*\(2048, 512\)"):
        check_src_dst_state_dict_validity(DOCUMENTED, target)
