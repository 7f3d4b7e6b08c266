"""Reading pickles of other systems without running what they ask for.

A pickle is a program: it names functions and calls them. Here every name is looked up in a table of
stand-ins, and a name that is not in it is refused before anything is called. A stand-in for a class
is a `Record`: it keeps what it was called with and the state that it was given, and does nothing.
Stand-ins cannot be changed by the pickle either: their types refuse attributes, so that a program
cannot replace a method of one. When the program has ended, records are turned into the values that
they stand for. What needs torch becomes torch's own only in a program that has imported torch, as
everywhere in remesh.

A user may allow further names. Those are imported and called as the pickle says, so they must be as
trustworthy as the checkpoint.

The form of the pickles of numpy and torch was read off their own pickles; the idea of an unpickler
with a list of what is allowed is in Python's documentation of the `pickle` module.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import importlib
import io
import pathlib
import pickle
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from remesh.dtypes import BY_NAME
from remesh.errors import CheckpointError, CorruptCheckpointError, PickleRefusedError
from remesh.values import UnresolvedValue


class _Immutable(type):
    """The type of types whose attributes a pickle cannot set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__}.{name} cannot be set")


class Record(metaclass=_Immutable):
    """A stand-in for an object of a class: what it was made with, and its state.

    Attributes:
        type_name: Qualified name of the class.
        args: What the class was called with.
        state: What the object was given after that; None if nothing.
    """

    __slots__ = ("args", "state")

    type_name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Self:
        """An object of the class, whatever it is called with."""
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """An attribute of the object, by its state; None if it has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def resolve(self) -> object:
        """The value that this stands for."""
        return self


def record_type(type_name: str, base: type[Record] = Record) -> type[Record]:
    """A stand-in for a class."""
    made: Any = _Immutable(
        type_name.rpartition(".")[2], (base,), {"__slots__": (), "type_name": type_name}
    )
    found: type[Record] = made
    return found


def _refuse_state(self: object, _state: object) -> None:
    # Without this, frozen dataclasses take a state from a pickle and are no longer frozen.
    raise TypeError(f"{type(self).__name__} takes no state")


@dataclass(frozen=True, slots=True)
class Function:
    """A stand-in for a function, or for a class that is only ever called."""

    call: Callable[..., Any]
    __setstate__ = _refuse_state

    def __call__(self, *args: Any) -> Any:
        """What the function that is stood for would return, or a stand-in for it."""
        return self.call(*args)


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of torch storages: the dtype of their elements, or None for bytes."""

    dtype: str | None
    __setstate__ = _refuse_state


@dataclass(frozen=True, slots=True)
class ArchivedStorage:
    """A storage that lies beside the pickle in its archive.

    Attributes:
        key: Its name there.
        dtype: Its element type, or None for bytes.
    """

    key: str
    dtype: str | None
    __setstate__ = _refuse_state


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor whose elements lie in a storage of the archive.

    Attributes:
        key: The storage's name in the archive.
        dtype: Name of the element type.
        offset: Element of the storage at which the tensor begins.
        shape: Its shape.
        strides: Elements of the storage between neighbours, dim by dim.
    """

    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    __setstate__ = _refuse_state


class _Namespace(Record):
    __slots__ = ()

    def resolve(self) -> object:
        is_argparse = self.type_name == "argparse.Namespace"
        found = argparse.Namespace() if is_argparse else types.SimpleNamespace()
        vars(found).update({str(name): item for name, item in (self.state or {}).items()})
        return found


class _Stream(Record):
    """An `io.BytesIO`: its state is content, position and attributes."""

    __slots__ = ()

    def resolve(self) -> object:
        return io.BytesIO(_as_bytes(self.state[0] if self.state else b""))


class _NumpyDType(Record):
    """`numpy.dtype(text, align, copy)`, and a state whose second item is the byte order."""

    __slots__ = ()

    def resolve(self) -> np.dtype[Any]:
        text = self.args[0]
        order = self.state[1] if self.state else "|"
        found = np.dtype(text if isinstance(text, str) else "V0")
        if found.kind not in "biufcSU" or found.names or order not in {"<", ">", "|", "="}:
            raise PickleRefusedError(f"numpy elements of type {text!r}", f"numpy.dtype[{text}]")
        return found.newbyteorder(order)  # type: ignore[arg-type]


class _NumpyArray(Record):
    """What numpy reconstructs an array from: version, shape, dtype, order and bytes."""

    __slots__ = ()

    def resolve(self) -> object:
        if self.state is None:  # numpy's protocol 5 calls with everything at once
            data, dtype, shape, order = self.args
            is_fortran = order == "F"
        else:
            _, shape, dtype, is_fortran, data = self.state
        flat = np.frombuffer(_as_bytes(data), dtype.resolve())
        return flat.reshape(shape, order="F" if is_fortran else "C").copy()


def _as_bytes(data: object) -> bytes:
    if isinstance(data, bytes | bytearray):
        return bytes(data)
    raise PickleRefusedError("an array of objects", "numpy.ndarray")


class _NumpyScalar(Record):
    __slots__ = ()

    def resolve(self) -> object:
        dtype, data = self.args
        return np.frombuffer(_as_bytes(data), dtype.resolve())[0]


def _constant(kind: str, name: str) -> object:
    """A constant of torch, in the same form as a stored value of it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return UnresolvedValue(kind, kind, name)
    return vars(torch)[name.removeprefix("torch.")]


def _size(items: tuple[int, ...] = ()) -> object:
    torch = sys.modules.get("torch")
    if torch is None:
        return UnresolvedValue("torch.Size", "torch.Size", [int(n) for n in items])
    return torch.Size(items)


def _device(kind: str, number: int | None = None) -> object:
    torch = sys.modules.get("torch")
    text = kind if number is None else f"{kind}:{int(number)}"
    if torch is None:
        return UnresolvedValue("torch.device", "torch.device", text)
    return torch.device(text)


def _layout(name: str) -> object:
    if not name.startswith("torch.") or "." in name.removeprefix("torch."):
        raise ValueError(f"layout {name!r}")
    return _constant("torch.layout", name)


def _tensor(
    storage: object,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *more: Any,
) -> ArchivedTensor:
    """What torch rebuilds a tensor from; `more` has the dtype where the storage is of bytes."""
    if not isinstance(storage, ArchivedStorage):
        raise TypeError(f"a tensor over {storage!r}")
    dtype = storage.dtype or _dtype_name(more[2] if len(more) > 2 else None)
    return ArchivedTensor(
        storage.key,
        dtype,
        int(offset),
        tuple(int(n) for n in shape),
        tuple(int(n) for n in strides),
    )


def _dtype_name(dtype: object) -> str:
    text = dtype.payload if isinstance(dtype, UnresolvedValue) else dtype
    name = str(text).removeprefix("torch.")
    if name not in BY_NAME:
        raise PickleRefusedError(f"tensor elements of type {text}", str(text))
    return name


def _from_type(_function: object, _kind: object, args: tuple[Any, ...], _state: object) -> object:
    """A tensor with attributes of its own, or of a type derived from it: only the tensor."""
    return _tensor(*args)


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


class Refused(Record):
    """A stand-in for what may not be named, where the rest of the pickle is wanted all the same."""

    __slots__ = ()

    def append(self, item: object) -> None:
        """What a pickle does to a list."""

    def extend(self, items: object) -> None:
        """What a pickle does to a list."""

    def __setitem__(self, key: object, item: object) -> None:
        """What a pickle does to a dict."""


def _stand_ins() -> dict[str, object]:
    """What may be named without asking the user."""
    array = record_type("numpy.ndarray", _NumpyArray)
    scalar = record_type("numpy.generic", _NumpyScalar)
    table: dict[str, object] = {
        "collections.OrderedDict": collections.OrderedDict,
        "collections.defaultdict": collections.defaultdict,
        "_codecs.encode": Function(lambda text, encoding: text.encode(_latin1(encoding))),
        "argparse.Namespace": record_type("argparse.Namespace", _Namespace),
        "types.SimpleNamespace": record_type("types.SimpleNamespace", _Namespace),
        "_io.BytesIO": record_type("_io.BytesIO", _Stream),
        "numpy.dtype": record_type("numpy.dtype", _NumpyDType),
        "numpy.ndarray": array,
        "torch.Size": Function(_size),
        "torch.device": Function(_device),
        "torch.serialization._get_layout": Function(_layout),
        "torch.storage.UntypedStorage": StorageType(None),
        "torch.UntypedStorage": StorageType(None),
        "torch._utils._rebuild_tensor": Function(_tensor),
        "torch._utils._rebuild_tensor_v2": Function(_tensor),
        "torch._utils._rebuild_tensor_v3": Function(_tensor),
        "torch._utils._rebuild_parameter": Function(lambda data, *_: data),
        "torch._utils._rebuild_parameter_with_state": Function(lambda data, *_: data),
        "torch._tensor._rebuild_from_type_v2": Function(_from_type),
        "torch.Tensor": record_type("torch.Tensor"),
        "torch.nn.parameter.Parameter": record_type("torch.nn.parameter.Parameter"),
        "torch.nn.parameter.Buffer": record_type("torch.nn.parameter.Buffer"),
    }
    for kind in (set, frozenset, complex, slice, int, float, bool, str, list, tuple, dict):
        table[f"builtins.{kind.__name__}"] = table[f"__builtin__.{kind.__name__}"] = kind
    table["__builtin__.long"] = int
    for module in ("builtins", "__builtin__"):
        table[f"{module}.bytes"] = Function(_bytes)
        table[f"{module}.bytearray"] = Function(lambda *args: bytearray(_bytes(*args)))
    for moment in (dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone):
        table[f"datetime.{moment.__name__}"] = moment
    for path in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath"):
        table[f"pathlib.{path}"] = Function(lambda *parts: pathlib.Path(*map(str, parts)))
    for package in ("numpy.core", "numpy._core"):
        table[f"{package}.multiarray._reconstruct"] = Function(lambda *_: array())
        table[f"{package}.multiarray.scalar"] = scalar
        table[f"{package}.numeric._frombuffer"] = array
    for name, dtype in LEGACY_STORAGES.items():
        table[f"torch.{name}"] = StorageType(dtype)
    return table


def _bytes(data: bytes | str = b"", encoding: str = "latin1") -> bytes:
    return data.encode(_latin1(encoding)) if isinstance(data, str) else _as_bytes(data)


def _latin1(encoding: str) -> str:
    if encoding not in {"latin1", "latin-1"}:
        raise ValueError(f"encoding {encoding!r}")
    return encoding


_STAND_INS: Mapping[str, object] = types.MappingProxyType(_stand_ins())


class _Unpickler(pickle.Unpickler):
    """Python's own machine with our table of names."""

    def __init__(
        self, data: bytes, allow: Collection[str], also: Mapping[str, object], lenient: bool
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._allow = allow
        self._also = also
        self._lenient = lenient

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        for table in (self._also, _STAND_INS):
            if full in table:
                return table[full]
        if module == "torch" and name in BY_NAME:
            return _constant("torch.dtype", full)
        if full in self._allow:
            found: Any = importlib.import_module(module)
            for attribute in name.split("."):
                found = getattr(found, attribute)
            return found
        if self._lenient:
            return record_type(full, Refused)
        raise PickleRefusedError(f"the pickle asks for {full}", full)

    def persistent_load(self, pid: Any) -> ArchivedStorage:
        kind, storage_type, key, _location, _num_elements = pid
        if kind != "storage" or not isinstance(storage_type, StorageType):
            raise ValueError(f"persistent id {pid!r}")
        return ArchivedStorage(str(key), storage_type.dtype)


def loads(
    data: bytes,
    where: str,
    *,
    allow: Collection[str] = (),
    also: Mapping[str, object] = types.MappingProxyType({}),
    lenient: bool = False,
) -> Any:
    """Read a pickle.

    Args:
        data: The pickle.
        where: The file, for error messages.
        allow: Qualified names that are imported and used as the pickle says.
        also: Further stand-ins, by qualified name.
        lenient: Put a `Refused` in the place of what is not allowed, instead of an error.

    Returns:
        What was pickled, with `Record`s where stand-ins were made (see `resolved`).

    Raises:
        PickleRefusedError: If it asks for a name that is not allowed; nothing was called.
        CorruptCheckpointError: If it is not a pickle.
    """
    try:
        return _Unpickler(data, allow, also, lenient).load()
    except Exception as error:
        raise _explained(error, where) from error


def resolved(
    value: Any, where: str, tensor_of: Callable[[ArchivedTensor], object] | None = None
) -> Any:
    """What was pickled, with each record replaced by the value that it stands for.

    Args:
        value: What `loads` returned.
        where: The file, for error messages.
        tensor_of: What an archived tensor becomes; by default it stays as it is.

    Raises:
        PickleRefusedError: If a record stands for nothing that can be had.
        CorruptCheckpointError: If a record cannot be what it says.
    """
    try:
        return _Resolver(where, tensor_of, {}).resolve(value)
    except Exception as error:
        raise _explained(error, where) from error


def _explained(error: Exception, where: str) -> CheckpointError:
    """What to tell the user; a malformed program may raise anything."""
    if isinstance(error, PickleRefusedError):
        return refusal(error.type_name, where)
    if isinstance(error, CheckpointError):
        return error
    return CorruptCheckpointError(
        f"{where}: not a pickle that can be read ({error!r}). Load another checkpoint, or restore "
        "this file from a copy."
    )


def refusal(type_name: str, where: str) -> PickleRefusedError:
    """What to tell the user about a name that is not allowed."""
    return PickleRefusedError(
        f"{where}: a pickled {type_name} is not read. If you trust this checkpoint as much as your "
        f"own code, allow it: remesh.Source(path, allow=[{type_name!r}]).",
        type_name,
    )


@dataclass(frozen=True, slots=True)
class _Resolver:
    """One walk over what was pickled; containers that appear twice stay one."""

    where: str
    tensor_of: Callable[[ArchivedTensor], object] | None
    done: dict[int, object]

    def resolve(self, value: Any) -> Any:
        if isinstance(value, ArchivedTensor):
            return value if self.tensor_of is None else self.tensor_of(value)
        if isinstance(value, Refused) or (isinstance(value, type) and issubclass(value, Refused)):
            why = str(refusal(value.type_name, self.where))
            return UnresolvedValue("pickle", value.type_name, why)
        if isinstance(value, Record):
            found = self.done.get(id(value))
            if found is None:
                if isinstance(value.state, dict):
                    self._resolve_mapping(value.state)
                found = self.done[id(value)] = value.resolve()
            return found
        if isinstance(value, dict):
            return self._resolve_mapping(value)
        if type(value) is list:
            if id(value) not in self.done:
                self.done[id(value)] = value
                value[:] = [self.resolve(item) for item in value]
            return value
        if type(value) in {tuple, set, frozenset}:
            return type(value)(self.resolve(item) for item in value)
        return value

    def _resolve_mapping(self, value: dict[Any, Any]) -> dict[Any, Any]:
        if id(value) in self.done:
            return value
        self.done[id(value)] = value
        items = [(self.resolve(key), self.resolve(item)) for key, item in value.items()]
        value.clear()
        for item in items:  # not update(), which adds in a Counter
            value.__setitem__(*item)
        return value
