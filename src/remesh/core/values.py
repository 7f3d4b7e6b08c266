"""Plain values of a training state, and their one encoding: msgpack with tags, never pickle.

None, bool, 64-bit int, float, str, bytes, lists and dicts with string keys are what msgpack knows.
Everything else that is accepted is a two-key map `{"$": kind, "v": payload}`; a dict that could be
mistaken for such a map is itself written as `{"$": "dict", "v": [[key, value], ...]}`.

Decoding never imports a module and never calls what the file names. An enum member or the type of
a namedtuple is looked up in modules that the program has imported already, and torch's own values
need a program that has imported torch. What cannot be resolved comes back as an `UnresolvedValue`,
so that a checkpoint can always be inspected. It is stored again as it was, except where it stands
for what a reader of foreign pickles did not read (kind `pickle`): its content is not there, so
`encode` refuses it. Only readers keep such a stand-in, by `encode_read`.

Arrays are not plain: in a state they are tensors with names of their own. Only inside an opaque
object (`remesh.sharding.ShardedObject`, or what another system pickled) do they travel as values;
`encode_object` takes such objects.
"""

from __future__ import annotations

import argparse
import datetime as dt
import enum
import io
import math
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import msgspec
import numpy as np

from remesh._repr import shown
from remesh.core.dtypes import BY_NAME
from remesh.errors import CorruptCheckpointError, UnsupportedValueError

INT64 = range(-(2**63), 2**63)
"""Whole numbers that are stored as such, and may be keys of a path."""
MAX_NESTING = 100
"""How deep values and states may be nested: each level takes a few calls, and Python's stack has
room for a thousand, of which the caller has taken some."""
_NUMPY_SCALAR = re.compile(r"[<>|=][biufcSU][0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class UnresolvedValue:
    """A stored value whose type this process does not know."""

    kind: str  # what sort of value it is (`enum`, `torch.dtype`, ...)
    type_name: str  # qualified name of its type where it was saved
    payload: object  # its stored content; of kind `pickle` the reason why it was not read

    def __repr__(self) -> str:
        """As it was called: `torch.bfloat16`, `train.Mode('FAST')`."""
        if self.kind.startswith("torch.") and str(self.payload).startswith("torch."):
            return str(self.payload)
        return f"{self.type_name}({self.payload!r})"


def is_plain(value: object) -> bool:
    """True if `encode` accepts the value."""
    try:
        encode(value)
    except UnsupportedValueError:
        return False
    return True


def encode(value: object, where: str = "value") -> bytes:
    """Encode a plain value, whose path is `where`; UnsupportedValueError if it has no safe form."""
    encoded = _pack(value, where)
    # Stand-ins are rare, and their encoding is found faster than all parts of a value are visited.
    missing = next(unread(value), None) if _UNREAD in encoded else None
    if missing is not None:
        raise UnsupportedValueError(
            f"{where}: its content was not read, so it cannot be stored\n{missing.payload}"
        )
    return encoded


def _pack(value: object, where: str) -> bytes:
    try:
        return msgspec.msgpack.encode(_encode(value, where))
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            f"{where}: the text {error.object!r} is not valid Unicode; store it as bytes"
        ) from error
    except RecursionError as error:
        raise UnsupportedValueError(
            f"{where}: a value of type {_type_name(value)} is nested too deeply or holds itself"
        ) from error


def in_order(encoded: bytes) -> bytes:
    """The encoding of a value that is equal but for the order in its dicts, which has one here."""

    def ordered(node: Any) -> Any:
        if isinstance(node, list):
            return [ordered(item) for item in node]
        if not isinstance(node, dict):
            return node
        found = {key: ordered(item) for key, item in node.items()}
        if found.get("$") == "dict":
            found["v"].sort(key=msgspec.msgpack.encode)
        return found

    return msgspec.msgpack.encode(ordered(msgspec.msgpack.decode(encoded)), order="deterministic")


def encode_object(value: object, where: str = "value") -> bytes:
    """Encode an opaque object: a plain value in which numpy arrays and torch tensors may stand."""
    return encode(with_arrays(value), where)


def encode_read(value: object, where: str) -> bytes:
    """Encode an opaque object for the readers: what could not be read keeps its stand-in."""
    return _pack(with_arrays(value), where)


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """True if a value is an array of numpy whose elements are all of it: one without a mask."""
    return isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)


def with_arrays(value: object, depth: int = 0) -> object:
    """The value with arrays in the form in which they are stored."""
    if depth > MAX_NESTING:
        return value  # `encode` says what is wrong with it
    if is_array(value) and value.dtype.name in BY_NAME and value.dtype.isnative:
        return UnresolvedValue(
            "numpy.ndarray", "numpy.ndarray", [value.dtype.name, [*value.shape], value.tobytes()]
        )
    torch = sys.modules.get("torch")
    # A subclass may have content that its elements do not tell.
    if torch is not None and type(value) in {torch.Tensor, torch.nn.Parameter}:
        assert isinstance(value, torch.Tensor)
        name = str(value.dtype).removeprefix("torch.")
        is_dense = value.layout == torch.strided and not (value.is_meta or value.is_nested)
        if name in BY_NAME and is_dense:
            tensor = value.detach().resolve_conj().resolve_neg()
            if BY_NAME[name].is_opaque:
                tensor = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.uint16)
            flat = tensor.cpu().contiguous().reshape(-1)
            payload = [name, [*value.shape], flat.view(torch.uint8).numpy().tobytes()]
            return UnresolvedValue("torch.Tensor", "torch.Tensor", payload)
    if type(value) is list:
        return [with_arrays(item, depth + 1) for item in value]
    if type(value) is tuple:
        return tuple(with_arrays(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        return {key: with_arrays(item, depth + 1) for key, item in value.items()}
    return value


def decode(data: bytes) -> object:
    """Decode what `encode` wrote."""
    try:
        return _decode(msgspec.msgpack.decode(data))
    except _MALFORMED as error:
        raise CorruptCheckpointError(f"a stored value cannot be decoded: {error!r}") from error


# What Python, numpy and torch raise for a payload of the wrong type or content; nesting without
# end is a RuntimeError too.
_MALFORMED = (
    msgspec.MsgspecError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


def unresolved(value: object) -> Iterator[UnresolvedValue]:
    """The values inside a decoded one that this process could not resolve."""
    if isinstance(value, UnresolvedValue):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from unresolved(key)
            yield from unresolved(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from unresolved(item)
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        yield from unresolved(vars(value))


def unread(value: object) -> Iterator[UnresolvedValue]:
    """The stand-ins inside a value for what was not read."""
    return (one for one in unresolved(value) if one.kind == "pickle")


def _tagged(kind: str, payload: object) -> dict[str, object]:
    return {"$": kind, "v": payload}


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _encode(value: object, where: str) -> object:
    """The value as msgpack's own types."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, where)
    if isinstance(value, enum.Enum) and value.name in type(value).__members__:
        return _tagged("enum", [_type_name(value), value.name])
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        # The empty numpy string has no size, but gives bytes all the same.
        return _tagged("numpy", [value.dtype.str, value.tobytes()[: value.dtype.itemsize]])
    if isinstance(value, pathlib.PurePath):
        return _tagged("path", str(value))
    if type(value).__module__ == "torch" and type(value).__name__ in _TORCH_KINDS:
        return _TORCH_KINDS[type(value).__name__](value)
    if isinstance(value, UnresolvedValue):
        return _encode_unresolved(value, where)
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _tagged("namedtuple", [_type_name(value), _encode_items(value, where)])
    raise UnsupportedValueError(
        f"{where}: a value of type {_type_name(value)} has no safe encoding\nGive it state_dict() "
        "and load_state_dict(), turn it into plain values (for instance dataclasses.asdict), or "
        "wrap it in remesh.sharding.LocalNonpersistentObject to leave it out of the checkpoint."
    )


def _encode_unresolved(value: UnresolvedValue, where: str) -> object:
    """An unresolved value is stored again as it was."""
    if value.kind == "namedtuple":
        assert isinstance(value.payload, list)
        return _tagged(
            value.kind, [value.type_name, [_encode(item, where) for item in value.payload]]
        )
    if value.kind in {"enum", "pickle"}:
        return _tagged(value.kind, [value.type_name, value.payload])
    return _tagged(value.kind, value.payload)


def _label(key: object) -> str:
    return key[:80] if type(key) is str else shown(key)


def _encode_mapping(value: Mapping[Any, object], where: str) -> object:
    if all(type(key) is str for key in value) and "$" not in value:
        return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [
        [_encode(key, f"{where}, key {shown(key)}"), _encode(item, f"{where}.{_label(key)}")]
        for key, item in value.items()
    ]
    return _tagged("dict", pairs)


def _encode_items(value: Sequence[object], where: str) -> list[object]:
    return [_encode(item, f"{where}.{i}") for i, item in enumerate(value)]


def _encode_set(kind: str, value: Iterable[object], where: str) -> object:
    items = [_encode(item, where) for item in value]
    # Sets have no order of their own; equal sets must have equal bytes on every rank.
    return _tagged(kind, sorted(items, key=msgspec.msgpack.encode))


def _encode_namespace(kind: str, value: object, where: str) -> object:
    return _tagged(kind, _encode_mapping(vars(value), where))


def _encode_time(kind: str, value: dt.datetime | dt.time, _where: str) -> object:
    """ISO 8601 has no word for the second of two equal times, when clocks are put back."""
    return _tagged(f"{kind}.fold" if value.fold else kind, value.isoformat())


def _itself(value: object, _where: str) -> object:
    return value


_ENCODERS: dict[type, Callable[[Any, str], object]] = {
    type(None): _itself,
    bool: _itself,
    float: _itself,
    str: _itself,
    bytes: _itself,
    int: lambda value, _: value if value in INT64 else _tagged("int", hex(value)),
    list: _encode_items,
    tuple: lambda value, where: _tagged("tuple", _encode_items(value, where)),
    dict: _encode_mapping,
    set: partial(_encode_set, "set"),
    frozenset: partial(_encode_set, "frozenset"),
    complex: lambda value, _: _tagged("complex", [value.real, value.imag]),
    io.BytesIO: lambda value, _: _tagged("io.BytesIO", value.getvalue()),
    dt.datetime: partial(_encode_time, "datetime"),
    dt.date: lambda value, _: _tagged("date", value.isoformat()),
    dt.time: partial(_encode_time, "time"),
    dt.timedelta: lambda value, _: _tagged(
        "timedelta", [value.days, value.seconds, value.microseconds]
    ),
    argparse.Namespace: partial(_encode_namespace, "argparse.Namespace"),
    types.SimpleNamespace: partial(_encode_namespace, "types.SimpleNamespace"),
}

_UNREAD = msgspec.msgpack.encode(_tagged("pickle", []))[:-1]
"""What the encoding of each stand-in of kind `pickle` begins with."""

_TORCH_KINDS: dict[str, Callable[[object], object]] = {
    "dtype": lambda value: _tagged("torch.dtype", str(value)),
    "device": lambda value: _tagged("torch.device", str(value)),
    "Size": lambda value: _tagged("torch.Size", [int(n) for n in value]),  # type: ignore[attr-defined]
    "layout": lambda value: _tagged("torch.layout", str(value)),
    "memory_format": lambda value: _tagged("torch.memory_format", str(value)),
}


def _decode(node: object) -> object:
    """The value of decoded msgpack."""
    if isinstance(node, list):
        return [_decode(item) for item in node]
    if not isinstance(node, dict):
        if node is None or isinstance(node, bool | int | float | str | bytes):
            return node
        raise ValueError(f"msgpack type {type(node).__name__} is not used")
    if "$" not in node:
        return {key: _decode(item) for key, item in node.items()}
    kind, payload = node["$"], node["v"]
    if not isinstance(kind, str):
        raise TypeError(f"kind {kind!r}")
    if kind.startswith("torch."):
        return _decode_torch(kind, payload)
    decoder = _DECODERS.get(kind)
    return UnresolvedValue(kind, kind, payload) if decoder is None else decoder(payload)


def _decode_numpy(payload: tuple[str, bytes]) -> object:
    text, data = payload
    if _NUMPY_SCALAR.fullmatch(text) is None:
        raise ValueError(f"numpy type {text!r}")
    dtype = np.dtype(text)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for numpy type {text!r}")
    return np.frombuffer(data, dtype=dtype)[0] if data else dtype.type()


def _decode_array(payload: tuple[str, list[int], bytes]) -> object:
    name, shape, data = payload
    return np.frombuffer(data, BY_NAME[name].carrier).reshape(shape).copy()


def _decode_tensor(torch: Any, payload: object) -> object:
    if not isinstance(payload, list):
        raise TypeError(f"torch.Tensor of {payload!r}")
    name, shape, data = payload
    dtype = getattr(torch, BY_NAME[name].name)
    if len(data) != math.prod(shape) * BY_NAME[name].itemsize:
        raise ValueError(f"{len(data)} bytes for a tensor {name} of shape {shape}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    # Not torch.frombuffer: where that fails, it leaves the buffer locked.
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype).reshape(shape)


def _known_type(name: str) -> object:
    """The type of a qualified name, if its module is imported already; else None."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:cut]))
        if found is not None:
            for attribute in parts[cut:]:
                # Not getattr: asked for an attribute, a module may import others.
                found = getattr(found, "__dict__", {}).get(attribute)
            return found
    return None


def _decode_enum(payload: tuple[str, str]) -> object:
    type_name, member = payload
    found = _known_type(type_name)
    if isinstance(found, type) and issubclass(found, enum.Enum) and member in found.__members__:
        return found.__members__[member]
    return UnresolvedValue("enum", type_name, member)


def enum_member(type_name: str, value: object) -> object:
    """The member with a value of an enum that this program has imported; None if there is none."""
    found = _known_type(type_name)
    if isinstance(found, type) and issubclass(found, enum.Enum) and type(value) in {int, str}:
        for member in found.__members__.values():
            known = member.__dict__.get("_value_")
            if type(known) is type(value) and known == value:
                return member
    return None


def _decode_namedtuple(payload: tuple[str, list[object]]) -> object:
    type_name, items = payload
    found = _known_type(type_name)
    values = [_decode(item) for item in items]
    # What is no type is asked for nothing: an attribute may be made, or imported, when it is asked.
    if isinstance(found, type) and issubclass(found, tuple):
        fields = found.__dict__.get("_fields", ())
        if isinstance(fields, tuple) and len(fields) == len(values):
            return tuple.__new__(found, values)
    return UnresolvedValue("namedtuple", type_name, values)


def _decode_torch(kind: str, payload: object) -> object:
    torch = sys.modules.get("torch")
    if torch is None:
        return UnresolvedValue(kind, kind, payload)
    if kind == "torch.Tensor":
        return _decode_tensor(torch, payload)
    if kind == "torch.Size":
        if not isinstance(payload, list):
            raise TypeError(f"torch.Size of {payload!r}")
        return torch.Size(payload)
    if not isinstance(payload, str):
        raise TypeError(f"{kind} {payload!r}")
    if kind == "torch.device":
        return torch.device(payload)
    found = vars(torch).get(payload.removeprefix("torch."))
    is_constant = kind in _TORCH_CONSTANTS and type(found).__name__ == kind.removeprefix("torch.")
    return found if is_constant else UnresolvedValue(kind, kind, payload)


_TORCH_CONSTANTS = ("torch.dtype", "torch.layout", "torch.memory_format")

_DECODERS: dict[str, Callable[..., object]] = {
    "dict": lambda payload: {_decode(key): _decode(item) for key, item in payload},
    "int": lambda payload: int(payload, 16),
    "tuple": lambda payload: tuple(_decode(item) for item in payload),
    "set": lambda payload: {_decode(item) for item in payload},
    "frozenset": lambda payload: frozenset(_decode(item) for item in payload),
    "complex": lambda payload: complex(*payload),
    "io.BytesIO": io.BytesIO,
    "path": pathlib.Path,
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "datetime.fold": lambda payload: dt.datetime.fromisoformat(payload).replace(fold=1),
    "time.fold": lambda payload: dt.time.fromisoformat(payload).replace(fold=1),
    "timedelta": lambda payload: dt.timedelta(*payload),
    "numpy": _decode_numpy,
    "numpy.ndarray": _decode_array,
    "pickle": lambda payload: UnresolvedValue("pickle", payload[0], payload[1]),
    "enum": _decode_enum,
    "namedtuple": _decode_namedtuple,
    "argparse.Namespace": lambda payload: _with_attributes(argparse.Namespace(), payload),
    "types.SimpleNamespace": lambda payload: _with_attributes(types.SimpleNamespace(), payload),
}


def _with_attributes(namespace: object, payload: object) -> object:
    attributes = _decode(payload)
    if not isinstance(attributes, dict) or not all(type(name) is str for name in attributes):
        raise TypeError(f"attributes {attributes!r}")
    vars(namespace).update(attributes)
    return namespace
