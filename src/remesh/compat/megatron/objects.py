"""Common state and sharded objects as values that are stored without pickle.

What Megatron pickles (arguments, RNG states, extra state of layers) are plain values with tensors,
numpy arrays and byte streams in between. `remesh.values` encodes all but the streams; this module
replaces those by named tuples that it encodes as well, and back. A value that neither knows is
refused, with its place and type.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

from remesh import values
from remesh.compat.megatron.core import CheckpointingException
from remesh.compat.megatron.dict_utils import dict_list_map_outplace


class PackedStream(NamedTuple):
    """The content of an `io.BytesIO`, in which layers keep extra state."""

    data: bytes


def pack(value: Any) -> Any:
    """The value with byte streams replaced by what can be encoded."""
    return dict_list_map_outplace(
        lambda leaf: PackedStream(leaf.getvalue()) if isinstance(leaf, io.BytesIO) else leaf, value
    )


def unpack(value: Any, where: str) -> Any:
    """The inverse of `pack`.

    Args:
        value: What was stored, decoded.
        where: Names it in errors.

    Raises:
        CheckpointingException: If something in it is of a type that this program does not know, or
            that may not be unpickled; the message has the type and what to do.
    """
    unknown = next(values.unresolved(value), None)
    if unknown is not None:
        why = (
            unknown.payload
            if unknown.kind == "pickle"
            else f"this program does not know {unknown.type_name}; import its module first"
        )
        raise CheckpointingException(f"{where}: {why}")
    return dict_list_map_outplace(
        lambda leaf: io.BytesIO(leaf.data) if isinstance(leaf, PackedStream) else leaf, value
    )


def encode_object(value: Any, where: str) -> bytes:
    """Encode a value without pickle.

    Raises:
        UnsupportedValueError: If something in it has no safe encoding.
    """
    return values.encode_object(pack(value), where)


def decode_object(data: bytes, where: str) -> Any:
    """The value of its encoding; errors are those of `unpack`."""
    return unpack(values.decode(data), where)
