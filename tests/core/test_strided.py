"""Which strided arrays share memory: compared with a list of all addresses."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from remesh.core.strided import Layout, shared_pairs

BASE = 1 << 40


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dims = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(dims))
    strides = tuple(draw(st.integers(-25, 25)) for _ in range(dims))
    device = draw(st.sampled_from(["cpu", "cpu", "cpu", "cuda:0"]))
    address = BASE + draw(st.integers(-40, 40))
    return Layout(device, address, shape, strides, draw(st.sampled_from([1, 2, 4])))


def addresses(layout: Layout) -> list[range]:
    """The bytes of each element, by brute force."""
    found = []
    for position in itertools.product(*map(range, layout.shape)):
        steps = zip(position, layout.strides, strict=True)
        start = layout.address + sum(number * stride for number, stride in steps)
        found.append(range(start, start + layout.itemsize))
    return found


def all_bytes(layout: Layout) -> set[tuple[str, int]]:
    return {(layout.device, byte) for element in addresses(layout) for byte in element}


@given(layouts())
def test_an_array_overlaps_itself_if_a_byte_is_in_two_elements(layout: Layout) -> None:
    counts = Counter(byte for element in addresses(layout) for byte in element)
    assert layout.overlaps_itself() == (max(counts.values()) > 1)
    assert layout.span == (min(counts), max(counts) + 1)


@given(st.lists(layouts(), max_size=5))
def test_pairs_that_share_a_byte(found: list[Layout]) -> None:
    bytes_of = [all_bytes(layout) for layout in found]
    expected = {
        (first, second)
        for first, second in itertools.combinations(range(len(found)), 2)
        if bytes_of[first] & bytes_of[second]
    }
    pairs = list(shared_pairs(found))
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    assert set(shared_pairs(found, lambda first, _second: first == 0)) == {
        pair for pair in expected if pair[0] != 0
    }


def layout_of(array: npt.NDArray[Any]) -> Layout:
    address = array.__array_interface__["data"][0]
    return Layout("cpu", address, array.shape, array.strides, array.itemsize)


def test_the_columns_of_a_matrix_share_nothing() -> None:
    matrix = np.zeros((64, 300))
    assert not list(shared_pairs([layout_of(matrix[:, column]) for column in range(300)]))
    cut = [matrix[:, :100], matrix[:, 100:200], matrix[:, 199:], matrix[::2, :3], matrix[1::2, :3]]
    assert set(shared_pairs(list(map(layout_of, cut)))) == {(1, 2), (0, 3), (0, 4)}
