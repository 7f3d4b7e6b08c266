"""The closed table of what foreign pickles may make: functions of our own, one for each name.

A maker takes a record whose parts are values already and gives a value, of one of the types that
`is_value` knows. It reads what it is given as data: numbers are checked, texts are looked up in
sets or tables that stand here, and an error is raised for all that cannot be. Nothing here calls,
or returns, what a text of the file names. Values of torch become torch's own only in a program
that has imported torch, as everywhere in remesh, by the tables of `remesh.core.values`.

The form of the pickles of numpy, torch and Python's own types was read off their own pickles.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import io
import math
import pathlib
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import MAX_DIMS, MAX_ELEMENTS
from remesh.core.values import UnresolvedValue, decode, encode
from remesh.errors import CorruptCheckpointError, PickleRefusedError
from remesh.formats.pickle_records import Name, Record

_EQUAL_HASHES = 64
"""Keys of one dict that may have one hash: with chosen keys, time grows with the square."""


@dataclass(frozen=True, slots=True)
class ArchivedStorage:
    """A storage that lies beside the pickle in its archive."""

    key: str  # its name there
    dtype: str | None  # its element type, or None for bytes


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor whose elements lie in a storage of the archive."""

    key: str  # the storage's name in the archive
    dtype: str  # name of the element type
    offset: int  # element of the storage at which the tensor begins
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements of the storage between neighbours, dim by dim


LEGACY_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_STORAGES: Mapping[str, str | None] = {
    "torch.storage.UntypedStorage": None,
    "torch.UntypedStorage": None,
    **{f"torch.{name}": dtype for name, dtype in LEGACY_STORAGES.items()},
}
_MEMORY_FORMATS = frozenset(
    f"torch.{name}"
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
)
_LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "jagged", "_mkldnn", "sparse_coo", "sparse_csr", "sparse_csc")
) | {"torch.sparse_bsr", "torch.sparse_bsc"}
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")


def constant(name: str) -> object:
    """The dtype or memory format of a name; None if it is neither."""
    if name.startswith("torch.") and name.removeprefix("torch.") in BY_NAME:
        return _of_torch("torch.dtype", name)
    return _of_torch("torch.memory_format", name) if name in _MEMORY_FORMATS else None


def _of_torch(kind: str, payload: object) -> object:
    """A value of torch in the form of a stored one; unresolved if this torch does not know it."""
    found = UnresolvedValue(kind, kind, payload)
    try:
        return decode(encode(found))
    except CorruptCheckpointError:  # a device of another build of torch, for instance
        return found


def archived_storage(pid: object) -> ArchivedStorage:
    """The storage that a persistent id of torch means."""
    if type(pid) is tuple and len(pid) == 5 and pid[0] == "storage":
        _, kind, key, *_ = pid
        if type(kind) is Name and kind.full in _STORAGES and type(key) in {str, int}:
            return ArchivedStorage(str(key), _STORAGES[kind.full])
    raise ValueError("a persistent id that is not one of torch")


Maker = Callable[[Record], object]

# -- checks of arguments --------------------------------------------------------------------------


def _one(record: Record, *kinds: type) -> Any:
    """The only argument, of one of some types."""
    (found,) = record.args
    if type(found) not in kinds:
        raise TypeError(f"{record.name} of a {type(found).__name__}")
    return found


def _all_of(record: Record, *kinds: type) -> tuple[Any, ...]:
    """The arguments, all of some types."""
    for item in record.args:
        if type(item) not in kinds:
            raise TypeError(f"{record.name} of a {type(item).__name__}")
    return record.args


def numbers(value: object) -> tuple[int, ...]:
    """The extents or strides of a tensor."""
    items = value.payload if isinstance(value, UnresolvedValue) else value
    if not isinstance(items, tuple | list) or len(items) > MAX_DIMS:
        raise ValueError("a shape that is none")
    return tuple(_extent(item) for item in items)


def _extent(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_ELEMENTS:
        raise ValueError("a number of elements that is none")
    return value


def checked_keys(keys: Iterable[Any]) -> list[Any]:
    """The keys, if they can be those of a dict or set; else ValueError, TypeError."""
    found = list(keys)
    hashes = collections.Counter(hash(key) for key in found if type(key) is not str)
    if hashes and hashes.most_common(1)[0][1] > _EQUAL_HASHES:
        # Equal keys have equal hashes too, but writers do not repeat a key.
        raise ValueError("keys that were chosen to have one hash")
    return found


# -- Python's own types ---------------------------------------------------------------------------


def _encoded(record: Record) -> bytes:
    text, encoding = record.args
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in another encoding than latin1")
    return text.encode("latin1")


def _bytes(record: Record) -> bytes:
    if len(record.args) == 2:
        return _encoded(record)
    return bytes(_one(record, bytes, bytearray)) if record.args else b""


def _mapping(record: Record) -> dict[Any, Any]:
    """A dict, from pairs and from what is set afterwards."""
    made: dict[Any, Any] = {}
    if record.args:
        found = _one(record, dict, collections.OrderedDict, list, tuple)
        pairs = [(key, item) for key, item in (found.items() if isinstance(found, dict) else found)]
        checked_keys(key for key, _ in pairs)
        made.update(pairs)
    return made | (record.pairs or {})


def _default_dict(record: Record) -> dict[Any, Any]:
    """Only the content: what makes a missing item is code."""
    return dict(record.pairs or {})


def _attributes(record: Record) -> dict[str, Any]:
    state = {} if record.state is None else record.state
    if record.args or type(state) is not dict or not all(type(name) is str for name in state):
        raise ValueError("a namespace whose attributes are not a dict")
    return state


def _namespace(kind: type[argparse.Namespace | types.SimpleNamespace]) -> Maker:
    def make(record: Record) -> object:
        made = kind()
        vars(made).update(_attributes(record))
        return made

    return make


def _stream(record: Record) -> io.BytesIO:
    """Its state is content, position and attributes."""
    return io.BytesIO(_raw(record.state[0]) if record.state else b"")


def _set(record: Record) -> set[Any]:
    return set(checked_keys(_one(record, list, tuple))) if record.args else set()


def _of(made: Callable[..., object], *kinds: type) -> Maker:
    """Make something of arguments of some types."""
    return lambda record: made(*_all_of(record, *kinds))


_MOMENT_PARTS = (bytes, str, int, type(None), dt.timezone)


# -- numpy ----------------------------------------------------------------------------------------

_NUMPY_TYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c(?:8|16)|[SU][0-9]{1,9})")


def numpy_dtype(record: object) -> np.dtype[Any]:
    """The element type that a record describes: a text, and a state with the byte order."""
    if isinstance(record, np.dtype):
        return record
    if isinstance(record, UnresolvedValue):
        raise PickleRefusedError("numpy elements of another type", record.type_name)
    if type(record) is not Record or record.name != "numpy.dtype" or not record.args:
        raise TypeError("an array without an element type")
    text, state = record.args[0], record.state
    order = state[1] if type(state) is tuple and len(state) > 1 else "|"
    match = _NUMPY_TYPE.fullmatch(text) if type(text) is str else None
    if match is None or order not in ("<", ">", "|", "="):
        raise PickleRefusedError("numpy elements of another type", f"numpy.dtype[{text!s:.40}]")
    # numpy is asked for one of the types of the pattern, so only a size is taken from the file.
    found: np.dtype[Any] = np.dtype(match[1])
    return found.newbyteorder("<" if order in ("|", "=") else order)  # type: ignore[arg-type]


def _array(record: Record) -> object:
    """Arguments of `_reconstruct` and a state; in numpy's protocol 5 arguments alone."""
    if record.state is None:
        data, dtype, shape, order = record.args
        is_fortran = order == "F"
    else:
        _, shape, dtype, is_fortran, data = record.state
    extents, element = numbers(shape), numpy_dtype(dtype)
    raw = _raw(data)
    if math.prod(extents) * element.itemsize != len(raw):
        raise ValueError("an array of other than its bytes")
    if not raw:
        return np.zeros(extents, element)
    flat = np.frombuffer(raw, element)
    return flat.reshape(extents, order="F" if is_fortran else "C").copy()


def _scalar(record: Record) -> object:
    dtype, data = record.args
    element, raw = numpy_dtype(dtype), _raw(data)
    if len(raw) != element.itemsize:
        raise ValueError("a number of other than its bytes")
    return np.frombuffer(raw, element)[0] if raw else element.type()


def _raw(data: object) -> bytes:
    if type(data) in {bytes, bytearray}:
        return bytes(data)  # type: ignore[call-overload, no-any-return]
    raise PickleRefusedError("an array of objects", "numpy.ndarray")


# -- torch ----------------------------------------------------------------------------------------


def _size(record: Record) -> object:
    items = list(_one(record, tuple, list)) if record.args else []
    if not all(type(item) is int and abs(item) < MAX_ELEMENTS for item in items):
        raise ValueError("a size that is none")
    return _of_torch("torch.Size", items)


def _device(record: Record) -> object:
    text = ":".join(map(str, _all_of(record, str, int)))
    if _DEVICE.fullmatch(text) is None:
        raise ValueError("a device that is none")
    return _of_torch("torch.device", text)


def _layout(record: Record) -> object:
    name = _one(record, str)
    if name not in _LAYOUTS:
        raise ValueError("a layout that is none")
    return _of_torch("torch.layout", name)


def _tensor(record: Record) -> ArchivedTensor | UnresolvedValue:
    """A tensor as torch rebuilds it; refused if its elements are stored without their sign."""
    storage, offset, shape, strides, *more = record.args
    if not isinstance(storage, ArchivedStorage):
        raise TypeError("a tensor without a storage")
    for metadata in more[2:]:
        if isinstance(metadata, dict) and any(metadata.values()):
            why = (
                f"a tensor whose elements are stored without their sign ({', '.join(metadata)})\n"
                "Save it after resolve_conj() and resolve_neg()."
            )
            return UnresolvedValue("pickle", "torch.Tensor", why)
    dtype = storage.dtype or _dtype_name(more[2] if len(more) > 2 else None)
    return ArchivedTensor(storage.key, dtype, _extent(offset), numbers(shape), numbers(strides))


def _dtype_name(dtype: object) -> str:
    text = str(dtype)
    if isinstance(dtype, UnresolvedValue):
        text = dtype.type_name if dtype.kind == "pickle" else str(dtype.payload)
    name = text.removeprefix("torch.")
    if name not in BY_NAME:
        raise PickleRefusedError(f"tensor elements of type {text}", text)
    return name


def _from_type(record: Record) -> ArchivedTensor | UnresolvedValue:
    """A tensor with attributes of its own, or of a type derived from it: only the tensor."""
    function, _kind, args, *_state = record.args
    name = function.type_name if isinstance(function, UnresolvedValue) else ""
    if name not in _REBUILDERS:
        raise PickleRefusedError("a tensor of another kind", name or "torch.Tensor")
    return _tensor(Record(name, args))


def _parameter(record: Record) -> ArchivedTensor | UnresolvedValue:
    if not isinstance(record.args[0], ArchivedTensor | UnresolvedValue):
        raise PickleRefusedError("a parameter of another kind", "torch.nn.parameter.Parameter")
    return record.args[0]


_REBUILDERS = tuple(
    f"torch._utils.{name}"
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
)

# -- the table ------------------------------------------------------------------------------------


def _makers() -> dict[str, Maker]:
    table: dict[str, Maker] = {
        "collections.OrderedDict": lambda record: collections.OrderedDict(_mapping(record)),
        "collections.defaultdict": _default_dict,
        "collections.Counter": _mapping,
        "_codecs.encode": _encoded,
        "argparse.Namespace": _namespace(argparse.Namespace),
        "types.SimpleNamespace": _namespace(types.SimpleNamespace),
        "_io.BytesIO": _stream,
        "datetime.datetime": _of(dt.datetime, *_MOMENT_PARTS),
        "datetime.date": _of(dt.date, *_MOMENT_PARTS),
        "datetime.time": _of(dt.time, *_MOMENT_PARTS),
        "datetime.timedelta": _of(dt.timedelta, int, float),
        "datetime.timezone": _of(dt.timezone, dt.timedelta, str),
        "numpy.dtype": numpy_dtype,
        "torch.Size": _size,
        "torch.device": _device,
        "torch.serialization._get_layout": _layout,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        **dict.fromkeys(_REBUILDERS, _tensor),
    }
    table |= {
        "builtins.set": _set,
        "builtins.frozenset": lambda record: frozenset(_set(record)),
        "builtins.complex": _of(complex, float, int),
        "builtins.slice": _of(slice, int, type(None)),
        "builtins.bytes": _bytes,
        "builtins.bytearray": lambda record: bytearray(_bytes(record)),
        "builtins.dict": _mapping,
        "builtins.list": lambda record: list(_one(record, list, tuple)),
        "builtins.tuple": lambda record: tuple(_one(record, list, tuple)),
    }
    for package in ("pathlib", "pathlib._local"):  # the latter in Python 3.13
        for kind in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath"):
            table[f"{package}.{kind}"] = _of(pathlib.Path, str)
    for package in ("numpy.core", "numpy._core"):  # the latter since numpy 2
        table[f"{package}.multiarray._reconstruct"] = _array
        table[f"{package}.multiarray.scalar"] = _scalar
        table[f"{package}.numeric._frombuffer"] = _array
    return table


MAKERS: Mapping[str, Maker] = types.MappingProxyType(_makers())

_ONLY_NAMED = (
    *_STORAGES,
    *_MEMORY_FORMATS,
    *(f"torch.{name}" for name in BY_NAME),
    *(f"builtins.{kind}" for kind in ("int", "float", "str", "bool")),
    "numpy.ndarray",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
)
"""What is an argument of what the table makes, and not made itself."""
KNOWN = frozenset((*MAKERS, *_ONLY_NAMED))
"""All names that a pickle of plain values, tensors and numpy arrays has."""

ATOMS = frozenset({type(None), bool, int, float, str, bytes, bytearray})
_NUMPY_TYPES = [np.dtype(code) for code in (*"?bBhHiIlLqQefdFD", "S1", "U1")]
_VALUE_TYPES = ATOMS | {
    *(list, tuple, dict, set, frozenset, complex, slice, collections.OrderedDict),
    *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
    *(argparse.Namespace, types.SimpleNamespace, io.BytesIO, type(pathlib.Path())),
    *(ArchivedTensor, UnresolvedValue, np.ndarray),
    *(type(dtype) for dtype in _NUMPY_TYPES),
    *(dtype.type for dtype in _NUMPY_TYPES),
}
_TORCH_TYPES = frozenset({"Size", "dtype", "device", "layout", "memory_format"})


def is_value(value: object) -> bool:
    """True if something is of one of the types that a pickle may make."""
    kind = type(value)
    return kind in _VALUE_TYPES or (kind.__module__ == "torch" and kind.__name__ in _TORCH_TYPES)
