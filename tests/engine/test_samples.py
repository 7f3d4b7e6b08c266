"""Where copies that are only assumed to be equal are compared."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import remesh
from remesh.checkpoint.copies import SAMPLE_BLOCK_BYTES, SAMPLE_BLOCKS, sample_ranges
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.support import Raised, run_ranks_outcomes


@given(st.lists(st.integers(0, 400), max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
def test_samples_are_small_and_spread_from_end_to_end(shape: list[int], itemsize: int) -> None:
    size = math.prod(shape)
    ranges = sample_ranges(tuple(shape), itemsize)
    most = SAMPLE_BLOCKS * SAMPLE_BLOCK_BYTES // itemsize
    assert sum(stop - start for start, stop in ranges) <= most
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    if size <= most:
        assert ranges == [(0, size)]
        return
    gaps = [right[0] - left[1] for left, right in itertools.pairwise(ranges)]
    assert min(gaps) >= 0
    row = shape[-1] if shape[-1] * itemsize <= SAMPLE_BLOCK_BYTES else 1
    assert max(gaps) - min(gaps) <= row
    assert all(start % row == stop % row == 0 for start, stop in ranges)


@pytest.mark.parametrize("kind", ["array", "strided", "tensor"])
def test_shards_that_differ_in_the_middle_only_are_found(kind: str) -> None:
    """Most of them is zeros, as in moments of an optimizer that has hardly begun."""
    storage = MemoryStorage()

    def save(exchange: Exchange) -> None:
        part = np.zeros((500, 300), np.float32)
        part[200:300] = exchange.rank
        value: Any = part
        if kind == "strided":
            value = np.stack([part, part], axis=-1)[..., 0]
        elif kind == "tensor":
            value = torch.from_numpy(part)
        remesh.save({"w": value}, storage, group=exchange)

    for outcome in run_ranks_outcomes(2, save):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, remesh.errors.DivergedReplicaError)
        assert "w: ranks 0 and 1 hold different values" in str(outcome.error)


@pytest.mark.parametrize("kind", ["array", "strided"])
def test_copies_in_other_memory_are_equal(kind: str) -> None:
    storage = MemoryStorage()

    def save(exchange: Exchange) -> None:
        part = np.arange(150_000, dtype=np.float32).reshape(500, 300)
        if kind == "strided" and exchange.rank:
            part = np.stack([part, part], axis=-1)[..., 0]
        remesh.save({"w": part}, storage, group=exchange)

    assert len(run_ranks_outcomes(2, save)) == 2
    assert remesh.Checkpoint(storage).index["w"].num_bytes == 600_000
