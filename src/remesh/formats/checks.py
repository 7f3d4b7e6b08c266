"""What comes out of a foreign file is checked where it comes in.

A file may hold any number, text or nesting where its format wants a shape, an offset or a name.
These functions take what was found and return what the format wants, or raise an error that names
the file and what is wrong in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from remesh._repr import shown
from remesh.core.geometry import MAX_DIMS, MAX_ELEMENTS
from remesh.core.state import MAX_PATH, Path
from remesh.core.values import UnresolvedValue
from remesh.errors import CorruptCheckpointError, FormatVersionError
from remesh.formats.pickle_records import Record

T = TypeVar("T")

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what was asked for."""


_BUDGET = {
    "nodes": (1 << 15, 8),  # parts of the value of a pickle, for each byte of the pickle
    "characters": (1 << 24, 16),  # of the names in such a value, likewise
    "pieces": (1 << 16, 1),  # with those of strided tensors, for each byte of all files
    "decoded bytes": (1 << 20, 2),  # of tensors in an opaque value, for each byte of the value
}


def budget(kind: str, num_bytes: int) -> int:
    """How much of a kind may come of so many bytes of input: some, and a share for each byte.

    A few bytes can repeat others without end, so what they stand for may have no bound.
    """
    least, share = _BUDGET[kind]
    return least + share * num_bytes


def damaged(where: str, what: str) -> CorruptCheckpointError:
    """The error for a file that is not what its format wants."""
    return CorruptCheckpointError(
        f"{where}: {what}. Load another checkpoint, or restore this file from a copy."
    )


def decode_json(data: bytes, where: str, wanted: type[T]) -> T:
    """Decode a JSON file."""
    try:
        return msgspec.json.decode(data, type=wanted)
    except MALFORMED as error:
        raise damaged(where, f"not the JSON that it should be ({error})") from error


def integers(value: Any, where: str, what: str) -> tuple[int, ...]:
    """A shape or an offset: no negative numbers, none too large for 64 bits."""
    if type(value) is Record and value.name == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    elif isinstance(value, UnresolvedValue):  # a torch.Size where torch is not loaded
        value = value.payload
    is_sequence = isinstance(value, list | tuple) and len(value) <= MAX_DIMS
    # Not isinstance: True is no extent.
    if is_sequence and all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value):
        return tuple(value)
    raise damaged(where, f"{shown(value)} is not {what}")


def mapping(value: object, where: str, what: str) -> Mapping[Any, Any]:
    """A value that has to be a dict."""
    if not isinstance(value, Mapping):
        raise damaged(where, f"{what} is {shown(value)}, which is no dict")
    return value


def sequence(value: object, where: str, what: str) -> Sequence[Any]:
    """A value that has to be a list."""
    if not isinstance(value, list | tuple):
        raise damaged(where, f"{what} is {shown(value)}, which is no list")
    return value


def check_shape(shape: Sequence[int], itemsize: int, where: str) -> None:
    """Check that a tensor of a shape can exist."""
    integers(shape[:MAX_DIMS], where, "a shape")
    if len(shape) > MAX_DIMS:
        raise FormatVersionError(f"{where}: {len(shape)} dims; arrays have at most {MAX_DIMS}")
    # Arrays are refused by the extents that are not 0, though one that is 0 makes them empty.
    if math.prod(n for n in shape if n) * itemsize > MAX_ELEMENTS:
        raise damaged(where, f"a tensor of shape {shown(tuple(shape))} is too large to exist")


def check_name(name: object, where: str) -> str:
    """A name of a tensor or value."""
    if isinstance(name, str) and is_unicode(name):
        return name
    raise damaged(where, f"{shown(name)} is not a name")


def is_unicode(text: str) -> bool:
    """True if a text can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_path(value: object, where: str) -> Path:
    """The keys that lead to something in a nested state: at least one text or whole number."""
    if isinstance(value, list | tuple) and 0 < len(value) <= MAX_PATH:
        for key in value:
            if type(key) is not int or abs(key) > MAX_ELEMENTS:
                check_name(key, where)
        return tuple(value)
    raise damaged(where, f"{shown(value)} is not a path in a state")
