"""Boxes of DTensors, from integers alone, against plain `torch.chunk` on arrays of indices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from remesh.adapters.dtensor import (
    AxisPlacement,
    Sharded,
    boxes_of_segments,
    local_segments,
)
from tests.support.torch_versions import needs

Coordinate = tuple[int, ...]


def coordinates(mesh: Coordinate) -> list[Coordinate]:
    return list(itertools.product(*(range(n) for n in mesh)))


def chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """`torch.chunk`, with the empty chunks that it leaves out."""
    chunks = list(tensor.chunk(num_chunks, dim))
    empty = tensor.narrow(dim, 0, 0)
    return chunks + [empty] * (num_chunks - len(chunks))


def numbered(shape: Coordinate) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def gathered(
    shape: Coordinate, mesh: Coordinate, coordinate: Coordinate, placements: list[AxisPlacement]
) -> torch.Tensor:
    """The local tensor that the boxes describe."""
    full = numbered(shape)
    segments = local_segments(shape, mesh, coordinate, tuple(placements))
    local = torch.full([sum(n for _, n in of_dim) for of_dim in segments], -1)
    for box, offset in boxes_of_segments(segments):
        place = tuple(slice(o, o + n) for o, n in zip(offset, box.shape, strict=True))
        assert (local[place] == -1).all(), "boxes overlap in the local tensor"
        local[place] = full[box.slices]
    assert (local >= 0).all(), "boxes leave a hole in the local tensor"
    return local


def as_torch(placements: list[AxisPlacement]) -> list[Placement]:
    result: list[Placement] = []
    for placement in placements:
        match placement:
            case None:
                result.append(Replicate())
            case Sharded(dim, 1):
                result.append(Shard(dim))
            case Sharded(dim, split_factor):
                result.append(_StridedShard(dim, split_factor=split_factor))
    return result


shapes = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def worlds(draw: st.DrawFn, *, strided: bool) -> tuple[Coordinate, Coordinate, list[AxisPlacement]]:
    shape, mesh = draw(shapes), draw(meshes)
    dims = st.integers(0, len(shape) - 1)
    kinds: list[st.SearchStrategy[AxisPlacement]] = [
        st.just(None),
        st.builds(Sharded, dims),
    ]
    if strided:
        kinds.append(st.builds(Sharded, dims, st.integers(1, 4)))
    placements = draw(st.lists(st.one_of(kinds), min_size=len(mesh), max_size=len(mesh)))
    return shape, mesh, placements


@given(worlds(strided=True))
def test_ranks_partition_the_tensor(
    world: tuple[Coordinate, Coordinate, list[AxisPlacement]],
) -> None:
    shape, mesh, placements = world
    count = np.zeros(shape, int)
    for coordinate in coordinates(mesh):
        boxes = boxes_of_segments(local_segments(shape, mesh, coordinate, tuple(placements)))
        own = np.zeros(shape, int)
        for box, _ in boxes:
            assert box.size > 0
            own[box.slices] += 1
        assert own.max(initial=0) <= 1
        count += own
    replicas = math.prod(
        n for n, placement in zip(mesh, placements, strict=True) if placement is None
    )
    assert (count == replicas).all()


@given(worlds(strided=False))
def test_plain_shards_are_chunks_of_chunks(
    world: tuple[Coordinate, Coordinate, list[AxisPlacement]],
) -> None:
    shape, mesh, placements = world
    for coordinate in coordinates(mesh):
        expected = numbered(shape)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Sharded):
                expected = chunk(expected, mesh[axis], placement.dim)[coordinate[axis]]
        actual = gathered(shape, mesh, coordinate, placements)
        assert actual.shape == expected.shape or actual.numel() + expected.numel() == 0
        assert actual.flatten().tolist() == expected.flatten().tolist()


@given(st.permutations(range(4)), st.integers(0, 40), st.data())
def test_axes_may_cut_in_any_order(order: list[int], extent: int, data: st.DataObject) -> None:
    """Whoever cuts after axes to its right says so by its split factor; no matter how uneven."""
    mesh = tuple(data.draw(st.integers(1, 3)) for _ in order)
    placements: list[AxisPlacement] = []
    for axis in range(len(mesh)):
        before = order[: order.index(axis)]
        split_factor = math.prod(mesh[other] for other in before if other > axis)
        placements.append(Sharded(0, split_factor))
    for coordinate in coordinates(mesh):
        expected = numbered((extent,))
        for axis in order:
            expected = chunk(expected, mesh[axis], 0)[coordinate[axis]]
        assert gathered((extent,), mesh, coordinate, placements).tolist() == expected.tolist()


@needs("sizes of strided shards")
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_blocks_of_a_packed_dim_are_cut_each(extent: int, num_ranks: int, num_blocks: int) -> None:
    placement = Sharded(0, num_blocks)
    for rank in range(num_ranks):
        expected = torch.cat(
            [
                chunk(block, num_ranks, 0)[rank]
                for block in chunk(numbered((extent,)), num_blocks, 0)
            ]
        )
        actual = gathered((extent,), (num_ranks,), (rank,), [placement])
        assert actual.tolist() == expected.tolist()
        torch_says = _StridedShard(0, split_factor=num_blocks)
        size, _ = torch_says.local_shard_size_and_offset(extent, num_ranks, rank)
        assert size == len(expected)


@needs("strided shards")
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_even_strided_shards_agree_with_torch(
    rows: int, data: int, tensor: int, blocks: int, packed: bool
) -> None:
    """Where everything divides evenly, the order of the cuts makes no difference to torch."""
    shape, mesh = (rows * data * tensor * blocks, 3), (data, tensor)
    right: AxisPlacement = Sharded(0, blocks if packed else 1)
    placements: list[AxisPlacement] = [Sharded(0, tensor), right]
    for coordinate in coordinates(mesh):
        local_shape, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), as_torch(placements)
        )
        local = gathered(shape, mesh, coordinate, placements)
        assert tuple(local.shape) == tuple(local_shape)
        if not packed:
            assert divmod(int(local[0, 0]), 3) == offset


def test_fsdp_over_tensor_parallelism_where_torch_reads_placements_otherwise() -> None:
    """7 rows, 2 tensor-parallel shards (4 and 3 rows), each cut for 3 data-parallel ranks."""
    placements: list[AxisPlacement] = [Sharded(0, 2), Sharded(0)]
    held = {
        (data, tensor): gathered((7,), (3, 2), (data, tensor), placements).tolist()
        for data, tensor in coordinates((3, 2))
    }
    assert held == {
        (0, 0): [0, 1],
        (1, 0): [2, 3],
        (2, 0): [],
        (0, 1): [4],
        (1, 1): [5],
        (2, 1): [6],
    }


@pytest.mark.parametrize("mesh", [(), (1,), (2, 2)])
def test_a_scalar_is_one_box(mesh: Coordinate) -> None:
    boxes = boxes_of_segments(local_segments((), mesh, (0,) * len(mesh), (None,) * len(mesh)))
    assert [(box.shape, offset) for box, offset in boxes] == [((), ())]
