"""What foreign pickles stand for: values of a closed set of types, and nothing that runs.

`pickle_reader` gives a pickle as data, with a `Record` for each call and each object. Here records
become values. The name of a record is looked up in one closed table (`MAKERS`) of functions of our
own, one for each name, which build a value from arguments that are values themselves. They read
what they are given as data: numbers are checked, texts are looked up in sets or tables that stand
here, and an error is raised for all that cannot be. No name of a file is imported, or looked up in
a module, and what a file names is never called. A name that is not in the table gives an
`UnresolvedValue` that says why, unless it is that of an enum in a module that the program has
imported already: then it is the member of the value that the pickle has. Values of torch become
torch's own only in a program that has imported torch, as everywhere in remesh, by the tables of
`remesh.core.values`.

The form of the pickles of numpy, torch and Python's own types was read off their own pickles.

A user may allow further names. Those are imported and called as the pickle says: that is running
code by the user's decision, so the checkpoint must be as trustworthy as the user's own code.

Pickles share parts, so a few hundred bytes can describe a value that has more parts than there is
memory. Therefore the parts of each node are counted first, as often as they appear, each node of
the pickle being visited once and without recursion. What has too many parts for the length of its
pickle, is nested too deeply or holds itself becomes an `UnresolvedValue` as well. What is left is
built, from the inside out.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import functools
import importlib
import io
import math
import pathlib
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import MAX_DIMS, MAX_ELEMENTS
from remesh.core.values import MAX_NESTING, UnresolvedValue, decode, encode, enum_member
from remesh.errors import CheckpointError, CorruptCheckpointError, PickleRefusedError
from remesh.formats.checks import budget, damaged
from remesh.formats.pickle_reader import RowForm, parse
from remesh.formats.pickle_records import Items, Key, Name, PersistentId, Pickled, Record
from remesh.formats.pickle_records import describe as describe_error

_TEXT_PART = 16
"""Characters that count as one part."""
_OTHER_KINDS = "torch._utils._rebuild_", "torch.q", "numpy.dtype[", "numpy.ndarray"
_CONTAINERS = frozenset({list, tuple, dict, Record, Items, Key})
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, bytearray})


def loads(
    data: bytes,
    where: str,
    *,
    also: tuple[str, ...] = (),
    allow: Collection[str] = (),
    rows: Sequence[RowForm] = (),
) -> Pickled:
    """Read a pickle that only names plain values, tensors, arrays, and what is allowed.

    Names that begin as those in `also` are allowed, too.
    """
    return check_names(parse(data, where, rows), where, also=also, allow=allow)


def check_names(
    pickled: Pickled, where: str, *, also: tuple[str, ...] = (), allow: Collection[str] = ()
) -> Pickled:
    """The same pickle, if it only names plain values, tensors, arrays, and what is allowed."""
    for name in sorted(pickled.names):
        if not (name in KNOWN or name in allow or name.startswith(also)):
            raise refusal(name, where)
    return pickled


def resolved(
    pickled: Pickled,
    where: str,
    *,
    allow: Collection[str] = (),
    tensor_of: Callable[[ArchivedTensor], object] | None = None,
) -> Any:
    """The value that a pickle describes; what appears in it twice is made once.

    Names in `allow` are imported and called as the pickle says. There is an `UnresolvedValue` of
    kind `pickle` for each part that cannot be had. Tensors stay as they are without `tensor_of`.
    """
    resolver = _Resolver(where, frozenset(allow), tensor_of, pickled.num_bytes)
    try:
        return resolver.value_of(pickled.root)
    except CheckpointError:
        raise
    except Exception as error:  # a malformed record may raise anything
        raise damaged(where, f"its pickle is malformed ({describe_error(error)})") from error


def refusal(type_name: str, where: str) -> PickleRefusedError:
    """The error for a name that is not allowed."""
    remedy = (
        "If you trust this checkpoint as much as your own code, allow it: open or load it with "
        f"allow=[{type_name[:200]!r}]."
    )
    if type_name.startswith(_OTHER_KINDS):  # the name alone would lack class and parts
        remedy = (
            "It makes a tensor or array of another kind (quantized, sparse, of a subclass, of "
            "objects). Load the file by torch.load, and save what was made of it by remesh.save."
        )
    return PickleRefusedError(
        f"{where}: a pickled {type_name[:80]} is not read. {remedy}", type_name
    )


@dataclass(slots=True)
class _Resolver:
    """One pickle while its value is built."""

    where: str  # the file
    allow: frozenset[str]  # names that the user allows
    tensor_of: Callable[[ArchivedTensor], object] | None  # what an archived tensor becomes
    num_bytes: int  # length of the pickle
    refused: dict[int, UnresolvedValue] = field(default_factory=dict)
    """Why a node has no value, by its id."""
    made: dict[int, object] = field(default_factory=dict)  # the values of nodes, by id
    unknown: dict[str, UnresolvedValue] = field(default_factory=dict)
    """The stand-in for names that are not known."""

    def value_of(self, root: Any) -> object:
        """The value of a node and all that is in it."""
        self._measure(root)
        for node in _post_order(root, self._children):
            self.made[id(node)] = self._make(node)
        return self._of(root)

    def _children(self, node: Any) -> Iterable[Any]:
        """The parts of a node; nothing if it has no value."""
        if id(node) in self.refused:
            return ()
        kind = type(node)
        if kind is list or kind is tuple:
            return node  # type: ignore[no-any-return]
        if kind is dict:
            return (*node, *node.values())
        if kind is Items:
            return node.items  # type: ignore[no-any-return]
        if kind is Key:
            return (node.node,)
        if node.name in MAKERS or node.name in self.allow:
            return (node.args, node.state, node.items, node.pairs, node.kwargs)
        return ()

    def _measure(self, root: Any) -> None:
        """Find what is too large, too deep or holds itself."""
        sizes: dict[int, tuple[int, int]] = {}
        most = budget("nodes", self.num_bytes)
        for node in _post_order(root, self._children):
            parts, depth = 1, 0
            for child in self._children(node):
                kind = type(child)
                if kind not in _CONTAINERS:
                    is_text = kind is str or kind is bytes or kind is bytearray
                    parts += 1 + len(child) // _TEXT_PART if is_text else 1
                    continue
                inner = sizes.get(id(child))
                if inner is None:  # it comes later, so it is on the way to this node
                    self._refuse(node, "it holds itself")
                    break
                parts += inner[0]
                depth = max(depth, inner[1])
            depth += 1
            if parts > most:
                self._refuse(node, f"it has more than {most} parts, which its file only repeats")
            if depth > MAX_NESTING:  # calls and their arguments are levels, too
                self._refuse(node, f"it is nested more than {MAX_NESTING} deep")
            sizes[id(node)] = (1, 0) if id(node) in self.refused else (parts, depth)

    def _refuse(self, node: Any, why: str) -> None:
        name = node.name if type(node) is Record else type(node).__name__.lower()
        self.refused[id(node)] = UnresolvedValue("pickle", name, f"{self.where}: {why}")

    def _of(self, node: Any) -> Any:
        """The value of a node whose parts are made."""
        kind = type(node)
        if kind in _ATOMS:
            return node
        if kind in _CONTAINERS:
            return self.made[id(node)]
        if kind is Name:
            found = constant(node.full)
            if found is None and node.full in self.allow:
                return imported(node.full)
            return self._unknown(node.full) if found is None else found
        if kind is PersistentId:
            return archived_storage(node.pid)
        raise TypeError(f"a {kind.__name__} in a pickle")

    def _unknown(self, name: str) -> UnresolvedValue:
        if name not in self.unknown:
            why = str(refusal(name, self.where))
            self.unknown[name] = UnresolvedValue("pickle", name, why)
        return self.unknown[name]

    def _make(self, node: Any) -> object:
        """The value of a container, from the values of what is in it."""
        if id(node) in self.refused:
            return self.refused[id(node)]
        kind = type(node)
        if kind is list:
            return [self._of(item) for item in node]
        if kind is tuple:
            return tuple([self._of(item) for item in node])
        if kind is Key:
            return self._of(node.node)
        if kind is Record:
            return self._make_record(node)
        try:
            if kind is dict:
                items = [self._of(item) for item in node.values()]
                return dict(zip(checked_keys(map(self._of, node)), items, strict=True))
            found = checked_keys(map(self._of, node.items))
        except TypeError:  # the stand-in of a value that cannot be built need not have a hash
            self._refuse(node, "it has keys that cannot be had here")
            return self.refused[id(node)]
        return frozenset(found) if node.is_frozen else set(found)

    def _make_record(self, node: Record) -> object:
        maker = MAKERS.get(node.name)
        if maker is None:
            if node.name in self.allow:
                return called(self._with_values(node))
            member = enum_member(node.name, node.args[0]) if len(node.args) == 1 else None
            return self._unknown(node.name) if member is None else member
        record = self._with_values(node)
        try:
            made = maker(record)
        except PickleRefusedError as error:
            return self._unknown(error.type_name)
        except Exception:
            # What is made of something that cannot be had cannot be had either.
            missing = next(filter(_is_missing, (*record.args, *_items(record.state))), None)
            if missing is None:
                raise
            return missing
        if isinstance(made, ArchivedTensor) and self.tensor_of is not None:
            return self.tensor_of(made)
        return made

    def _with_values(self, node: Record) -> Record:
        """A record with values in the place of nodes."""
        found = Record(node.name, self._of(node.args), node.is_new)
        found.state, found.kwargs = self._of(node.state), self._of(node.kwargs)
        found.items, found.pairs = self._of(node.items), self._of(node.pairs)
        return found


def _post_order(root: Any, children: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Containers below a node and itself, after those in them; the first of a cycle is last."""
    if type(root) not in _CONTAINERS:
        return
    seen = {id(root)}
    stack = [(root, iter(children(root)))]
    while stack:
        node, left = stack[-1]
        for child in left:
            if type(child) in _CONTAINERS and id(child) not in seen:
                seen.add(id(child))
                stack.append((child, iter(children(child))))
                break
        else:
            stack.pop()
            yield node


def _items(state: object) -> tuple[Any, ...]:
    return state if type(state) is tuple else (state,)


def _is_missing(value: object) -> bool:
    return isinstance(value, UnresolvedValue) and value.kind == "pickle"


# -- what a user allows: this runs code of the user's choice --------------------------------------


def imported(name: str) -> Any:
    """The class or function of a name that the user allows."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:cut]))
            return functools.reduce(getattr, parts[cut:], module)
        except (ImportError, AttributeError):
            continue
    raise PickleRefusedError(f"{name} is allowed, but it cannot be imported here", name)


def called(record: Record) -> object:
    """The result of the call of a record. Only for names that the user allows."""
    made = imported(record.name)
    if record.is_new:
        made = made.__new__(made, *record.args, **(record.kwargs or {}))
    else:
        made = made(*record.args)
    if record.state is not None:
        _set_state(made, record.state)
    if record.items is not None:
        made.extend(record.items)
    for key, item in (record.pairs or {}).items():
        made[key] = item
    return made


def _set_state(made: Any, state: Any) -> None:
    """Apply a pickle's state to an object (see `object.__reduce__` in Python's docs)."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    vars(made).update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(made, name, value)


# -- archived tensors -----------------------------------------------------------------------------

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


def constant(name: str) -> object:
    """The dtype or memory format of a name; None if it is neither."""
    if name.startswith("torch.") and name.removeprefix("torch.") in BY_NAME:
        return _of_torch("torch.dtype", name)
    return _of_torch("torch.memory_format", name) if name in _MEMORY_FORMATS else None


def _of_torch(kind: str, payload: object) -> object:
    """A value of torch in the form of a stored one; unresolved if torch knows none such."""
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
    axes: list[Any] = []
    if record.state is None:
        data, dtype, shape, order, *axes = record.args
        is_fortran = order == "F"
    else:
        _, shape, dtype, is_fortran, data = record.state
    extents, element = numbers(shape), numpy_dtype(dtype)
    raw = _raw(data)
    if math.prod(extents) * element.itemsize != len(raw):
        raise ValueError("an array of other than its bytes")
    if not raw:
        return np.zeros(extents, element.newbyteorder("="))
    flat = np.frombuffer(raw, element).astype(element.newbyteorder("="))
    array = flat.reshape(extents, order="F" if is_fortran else "C").copy()
    return array.transpose(numbers(axes[0])) if axes else array


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
    return _of_torch("torch.device", ":".join(map(str, _all_of(record, str, int))))


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


def _parameter(record: Record) -> object:
    """Its tensor, which `tensor_of` may have made one of torch already."""
    if type(record.args[0]).__name__ not in {"ArchivedTensor", "UnresolvedValue", "Tensor"}:
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
        # Only the content: what makes a missing item is code.
        "collections.defaultdict": lambda record: dict(record.pairs or {}),
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
        "torch.serialization._get_layout": lambda r: _of_torch("torch.layout", _one(r, str)),
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
