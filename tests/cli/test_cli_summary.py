"""Element types and chunks, against numpy and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import remesh
from remesh.cli import summary
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box

CODES: dict[int, npt.NDArray[Any]] = {
    1: np.arange(256, dtype=np.uint8),
    2: np.arange(65536).astype(np.uint16),
}


@pytest.mark.parametrize(
    "name",
    [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ],
)
def test_every_code_has_the_value_that_torch_gives_it(name: str) -> None:
    codes = CODES[BY_NAME[name].itemsize]
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    expected = torch.from_numpy(codes).view(getattr(torch, name)).to(torch.float32).numpy()

    found = summary.true_values(codes.view(BY_NAME[name].carrier), name)

    np.testing.assert_array_equal(found.astype(np.float32), expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(found)[finite], np.signbit(expected)[finite])


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_elements_of_every_type(name: str, tmp_path: Path) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    raw = torch.arange(1, 1 + 6 * BY_NAME[name].itemsize, dtype=torch.uint8)
    tensor = (raw % 2 == 0)[:6] if name == "bool" else raw.view(getattr(torch, name))
    remesh.save({"w": tensor}, tmp_path / "ck")
    checkpoint = remesh.Checkpoint(tmp_path / "ck")
    elements = summary.first_elements(checkpoint, "w", 10)

    if name.startswith("complex"):
        np.testing.assert_array_equal(elements, tensor.to(torch.complex128).numpy())
        return
    if BY_NAME[name].is_opaque:
        assert elements.tobytes() == raw.numpy().tobytes()
        return
    expected = tensor.numpy() if BY_NAME[name].is_native else tensor.to(torch.float32).numpy()
    np.testing.assert_array_equal(elements, expected)


@settings(deadline=None)
@given(
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=9),
    max_elements=st.integers(1, 50),
    data=st.data(),
)
def test_chunks_cover_a_box_once_in_order(
    shape: tuple[int, ...], max_elements: int, data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, 5)) for _ in shape)
    box = Box(offset, shape)
    numbers = np.arange(box.size).reshape(shape)

    chunks = list(summary.chunks_of(box, max_elements))

    seen = [numbers[chunk.relative_to(box).slices].reshape(-1) for chunk in chunks]
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(box.size))
    assert max(chunk.size for chunk in chunks) <= max_elements
