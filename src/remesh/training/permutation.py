"""A shuffle that is computed place by place: which sample stands at a place of an epoch's order.

The order of an epoch must be the same on every rank and after every restart, in any version of
numpy and torch, and a rank that resumes in the middle should not have to draw everything before.
So it is not drawn at all. It is a keyed bijection of the numbers below n, a function of seed,
epoch and place alone: a Feistel network over the smallest even number of bits that holds n - 1. A
result that is not below n is put in again until one is ("cycle walking"), which takes less than
four tries on average. The method is that of Black and Rogaway, Ciphers with Arbitrary Finite
Domains (2002); nothing here is meant to be secret, so the round function is only a good mixer, the
finaliser of SplitMix64 (Steele, Lea and Flood, 2014).

Stored positions mean something only as long as this function never changes. A test holds values
of it; another order needs another name (see `remesh.training.sampling`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInts = npt.NDArray[np.uint64]

NUM_ROUNDS = 8
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def shuffled(places: npt.NDArray[np.int64], num_samples: int, key: int) -> npt.NDArray[np.int64]:
    """The samples at some places of a shuffled order.

    Places are numbers in [0, num_samples); different places have different samples.
    """
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    keys = [_mix_one(key + number * _STEP) for number in range(1, NUM_ROUNDS + 1)]
    found = _feistel(places.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(found >= num_samples)
    while len(outside):
        found[outside] = _feistel(found[outside], half_bits, keys)
        outside = outside[found[outside] >= num_samples]
    return found.astype(np.int64)


def key_of(seed: int, epoch: int) -> int:
    """The key of an epoch: 64 bits in which all of seed and epoch are mixed."""
    return _mix_one(_mix_one(seed + _STEP) + epoch)


def _feistel(numbers: UInts, half_bits: int, keys: list[int]) -> UInts:
    """Swap the halves again and again, each time changing one by a function of the other."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(numbers: UInts) -> UInts:
    """Every bit of the result depends on every bit of the number; wraps around at 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _mix_one(number: int) -> int:
    return int(_mix(np.array([number & _MASK], dtype=np.uint64))[0])
