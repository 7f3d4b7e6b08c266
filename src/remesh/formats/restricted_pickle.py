"""What foreign pickles stand for: values of a closed set of types, and nothing that runs.

`pickle_reader` gives a pickle as data, with a `Record` for each call and each object. Here records
become values. The name of a record is looked up in one closed table (`pickle_values.MAKERS`) of
functions of our own, each of which builds one kind of value from arguments that are values
themselves. No name of a file is imported, or looked up in a module, and what a file names is never
called. What a maker gives is checked against the closed set of types of values. A name that is not
in the table gives an `UnresolvedValue` that says why, unless it is that of an enum in a module that
the program has imported already: then it is the member of the value that the pickle has.

A user may allow further names. Those are imported and called as the pickle says: that is running
code by the user's decision, so the checkpoint must be as trustworthy as the user's own code.

Pickles share parts, so a few hundred bytes can describe a value that has more parts than there is
memory. Therefore the parts of each node are counted first, as often as they appear, each node of
the pickle being visited once and without recursion. What has too many parts for the length of its
pickle, is nested too deeply or holds itself becomes an `UnresolvedValue` as well. What is left is
built, from the inside out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from remesh.core.values import MAX_NESTING, UnresolvedValue, enum_member
from remesh.errors import CheckpointError, PickleRefusedError
from remesh.formats.checks import damaged
from remesh.formats.pickle_reader import parse
from remesh.formats.pickle_records import Items, Key, Name, PersistentId, Pickled, Record
from remesh.formats.pickle_records import describe as describe_error
from remesh.formats.pickle_rows import RowForm
from remesh.formats.pickle_values import (
    ATOMS,
    KNOWN,
    MAKERS,
    ArchivedTensor,
    archived_storage,
    checked_keys,
    constant,
    is_value,
)

MIN_PARTS = 1 << 16
PARTS_PER_BYTE = 8
_TEXT_PART = 16
"""Characters that count as one part."""
_REBUILDS = "torch._utils._rebuild_"
_CONTAINERS = frozenset({list, tuple, dict, Record, Items, Key})


def loads(
    data: bytes,
    where: str,
    *,
    also: Collection[str] = (),
    allow: Collection[str] = (),
    rows: Sequence[RowForm] = (),
) -> Pickled:
    """Read a pickle that only names plain values, tensors, arrays, and what is allowed."""
    pickled = parse(data, where, rows)
    for name in sorted(pickled.names):
        if not (name in KNOWN or name in also or name in allow):
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


def max_parts(num_bytes: int) -> int:
    """How many parts may come of a pickle of so many bytes."""
    return MIN_PARTS + PARTS_PER_BYTE * num_bytes


def refusal(type_name: str, where: str) -> PickleRefusedError:
    """The error for a name that is not allowed."""
    remedy = (
        "If you trust this checkpoint as much as your own code, allow it: "
        f"remesh.formats.Source(path, allow=[{type_name[:200]!r}])."
    )
    if type_name.startswith(_REBUILDS):  # with that name alone it would lack its class and parts
        remedy = (
            "It makes a tensor of another kind (quantized, sparse, of a subclass). Load the file "
            "by torch.load into the objects that it was saved from, and save those by remesh.save."
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
        most = max_parts(self.num_bytes)
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
        if kind in ATOMS:
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
        if not is_value(made):
            raise TypeError(f"{node.name} gave a {type(made).__qualname__}")
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
