"""Common state and sharded objects as plain values.

What Megatron pickles (arguments, RNG states, extra state of layers) are plain values with tensors,
numpy arrays and byte streams in between. `remesh.values` encodes plain values without pickle; this
module replaces the rest by named tuples that it encodes as well, and back. A value that neither
knows is refused, with its place and type.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import torch

from remesh import values
from remesh.errors import CorruptCheckpointError, UnsupportedValueError


class PackedTensor(NamedTuple):
    """A torch tensor: name of its dtype, shape, row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class PackedArray(NamedTuple):
    """A numpy array: dtype string, shape, row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class PackedStream(NamedTuple):
    """The content of an `io.BytesIO`."""

    data: bytes


def encode_object(value: Any, where: str) -> bytes:
    """Encode a value, without pickle.

    Args:
        value: Plain values, tensors, arrays and byte streams, nested in dicts, lists and tuples.
        where: Names the value in errors.

    Raises:
        UnsupportedValueError: If something in it has no safe encoding.
    """
    return values.encode(pack(value, where), where)


def pack(value: Any, where: str) -> Any:
    """The value with tensors, arrays and streams replaced by named tuples."""
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return PackedArray(value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, io.BytesIO):
        return PackedStream(value.getvalue())
    if isinstance(value, dict):
        return {key: pack(item, f"{where}.{key}") for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(pack(item, f"{where}.{i}") for i, item in enumerate(value))
    return value


def unpack(value: Any) -> Any:
    """The inverse of `pack`.

    Raises:
        CorruptCheckpointError: If a packed tensor or array contradicts itself.
    """
    if isinstance(value, PackedTensor | PackedArray):
        try:
            return (
                _unpack_tensor(value) if isinstance(value, PackedTensor) else _unpack_array(value)
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise CorruptCheckpointError(f"a stored array cannot be decoded: {error}") from error
    if isinstance(value, PackedStream):
        return io.BytesIO(value.data)
    if isinstance(value, dict):
        return {key: unpack(item) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(unpack(item) for item in value)
    return value


def _pack_tensor(tensor: torch.Tensor, where: str) -> PackedTensor:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UnsupportedValueError(
            f"{where}: a {tensor.layout} tensor on {tensor.device} cannot be stored as it is"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _unpack_tensor(packed: PackedTensor) -> torch.Tensor:
    dtype = getattr(torch, packed.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {packed.dtype!r}")
    flat = torch.from_numpy(np.frombuffer(bytearray(packed.data), np.uint8))
    return flat.view(dtype).reshape(packed.shape)


def _unpack_array(packed: PackedArray) -> Any:
    dtype = np.dtype(packed.dtype)
    if dtype.hasobject:
        raise TypeError(f"numpy dtype {packed.dtype!r}")
    return np.frombuffer(bytearray(packed.data), dtype).reshape(packed.shape)
