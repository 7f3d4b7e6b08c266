"""Blocks are encoded and decoded without loss; what cannot be decoded is told."""

from __future__ import annotations

import numpy as np
import zstandard

from remesh.core.compression import decode_block, encode_block
from remesh.core.integrity import BLOCK_SIZE


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
