"""Tensors by their bits: any dtype filled with any bits, and comparison without rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from remesh.core.dtypes import DTYPES

TORCH_DTYPES: list[torch.dtype] = [getattr(torch, dtype.name) for dtype in DTYPES]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits: NaNs with payloads, infinities, subnormal numbers; for bool 0 or 1.

    Made from bytes, because torch cannot fill every dtype.
    """
    tensor = torch.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=torch.uint8)
    high = 2 if dtype == torch.bool else 256
    tensor.numpy()[:] = np.random.default_rng(seed).integers(high, size=len(tensor))
    return tensor.view(dtype).reshape(shape)


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of zero bits of the same dtype and shape."""
    num_bytes = tensor.numel() * tensor.itemsize
    return torch.zeros(num_bytes, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def bits_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and row-major bytes; equal only for tensors that differ in no bit."""
    # torch copies integers of any strides, but not every dtype, and warns about some.
    integers = tensor.detach().view(_INTEGERS[tensor.itemsize])
    return str(tensor.dtype), tuple(tensor.shape), integers.numpy().tobytes()


def bits_of_all(tensors: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: bits_of(torch.as_tensor(tensor)) for name, tensor in tensors.items()}
