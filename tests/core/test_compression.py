"""Blocks are encoded and decoded without loss; what cannot be decoded is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from remesh.core.compression import decode_block, encode_block
from remesh.core.integrity import BLOCK_SIZE

BLOCKS = arrays(np.uint8, st.integers(1, 300), elements=st.integers(0, 3))


@given(block=BLOCKS, at=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_the_content(
    block: np.ndarray[Any, np.dtype[np.uint8]], at: int, value: int
) -> None:
    stored = encode_block(block, 2).copy()
    stored[at % len(stored)] = value
    found = np.zeros_like(block)
    assert decode_block(stored, found, "file") in {True, False}


def test_weights_get_smaller_and_noise_does_not() -> None:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(BLOCK_SIZE // 4) * 0.02).astype("<f4").view(np.uint8)
    assert len(encode_block(weights, 4)) < 0.9 * len(weights)
    assert len(encode_block(weights, 4)) < len(encode_block(weights, 1))
    noise = rng.integers(0, 256, BLOCK_SIZE, np.uint8)
    assert encode_block(noise, 4) is noise


def test_a_frame_of_another_size_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    stored = np.frombuffer(b"\x01" + bomb, np.uint8)
    assert not decode_block(stored, np.zeros(BLOCK_SIZE, np.uint8), "file")
