"""The element types that remesh stores, without torch.

Bytes travel through remesh in *carrier* arrays: numpy has no bfloat16 or float8, so an array of
such elements is an array of unsigned integers of the same size. Copying, slicing and hashing are
the same for a carrier as for the real thing; only casts and statistics need to know the truth,
and those live where torch is.

safetensors has no code for complex128 and complex32. A piece of such a type is written as its
real counterpart with one more dim of size 2 at the end, which has the same bytes.

torch has types that are names for bytes: packed pairs of 4-bit floats, integers of fewer than 8
bits, bits. torch does not convert them, and does not copy all of them. An element is one or two
bytes, which remesh keeps without a view on the values in them. safetensors has no code for these
types: their pieces are written as unsigned integers, and the index says the type.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CarrierDType = np.dtype[Any]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str  # the name that torch and numpy users know (`bfloat16`, `int64`)
    itemsize: int  # bytes of an element
    carrier: CarrierDType  # the numpy dtype of arrays that carry such elements
    safetensors: str  # the code in a safetensors header
    pairs: bool  # True if a safetensors file holds an element as two of `safetensors`
    is_native: bool  # whether numpy itself knows this type, so that the carrier shows true values
    is_opaque: bool = False
    """Whether the type is a name for bytes, with values that torch does not convert; `safetensors`
    is then the code of the carrier, and does not tell the type."""


def _dtype(name: str, carrier: npt.DTypeLike, code: str, pairs: bool = False) -> DType:
    carrier = np.dtype(carrier)
    return DType(name, carrier.itemsize, carrier, code, pairs, carrier.name == name)


def _opaque(name: str, carrier: npt.DTypeLike = "u1", code: str = "U8") -> DType:
    return dataclasses.replace(_dtype(name, carrier, code), is_opaque=True)


# The order is part of the native format: a tensor's dtype is stored as its number in this list.
DTYPES: tuple[DType, ...] = (
    _dtype("float64", "<f8", "F64"),
    _dtype("float32", "<f4", "F32"),
    _dtype("float16", "<f2", "F16"),
    _dtype("bfloat16", "<u2", "BF16"),
    _dtype("float8_e4m3fn", "u1", "F8_E4M3"),
    _dtype("float8_e5m2", "u1", "F8_E5M2"),
    _dtype("float8_e8m0fnu", "u1", "F8_E8M0"),
    _dtype("float8_e4m3fnuz", "u1", "F8_E4M3FNUZ"),
    _dtype("float8_e5m2fnuz", "u1", "F8_E5M2FNUZ"),
    _dtype("int64", "<i8", "I64"),
    _dtype("int32", "<i4", "I32"),
    _dtype("int16", "<i2", "I16"),
    _dtype("int8", "i1", "I8"),
    _dtype("uint64", "<u8", "U64"),
    _dtype("uint32", "<u4", "U32"),
    _dtype("uint16", "<u2", "U16"),
    _dtype("uint8", "u1", "U8"),
    _dtype("bool", "?", "BOOL"),
    _dtype("complex64", "<c8", "C64"),
    _dtype("complex128", "<c16", "F64", pairs=True),
    _dtype("complex32", "<u4", "F16", pairs=True),
    _opaque("float4_e2m1fn_x2"),
    *(_opaque(f"int{bits}") for bits in range(1, 8)),
    *(_opaque(f"uint{bits}") for bits in range(1, 8)),
    *(_opaque(name) for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")),
    _opaque("bits16", "<u2", "U16"),
)

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}
CODE: dict[str, int] = {dtype.name: number for number, dtype in enumerate(DTYPES)}
ITEMSIZES: npt.NDArray[np.int64] = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)
