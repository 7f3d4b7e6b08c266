"""Common state and sharded objects as values that are stored without pickle.

What Megatron pickles (arguments, RNG states, extra state of layers) are plain values with tensors,
numpy arrays and byte streams in between, which `remesh.core.values` encodes. A value of any other
type is refused when it is saved, with its place and type. One that a program cannot have (its class
is unknown here, or may not be unpickled) is refused when it is loaded, with what to do about it.
"""

from __future__ import annotations

from typing import Any

from remesh.compat.megatron.core import CheckpointingException
from remesh.core import values


def require_known(value: Any, where: str) -> Any:
    """The decoded value; an error that names `where` if a type in it is not known here."""
    unknown = next(values.unresolved(value), None)
    if unknown is None:
        return value
    if unknown.kind == "pickle":
        raise CheckpointingException(f"{where}: {unknown.payload}")
    raise CheckpointingException(
        f"{where}: this program does not know {unknown.type_name}\nImport the module that defines "
        "it before loading"
    )


def decode_object(data: bytes, where: str) -> Any:
    """The value of its encoding by `remesh.core.values`; errors are those of `require_known`."""
    return require_known(values.decode(data), where)
