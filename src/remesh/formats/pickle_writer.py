"""Writing pickles that other systems expect, without having their classes.

A pickle names classes and functions as text, so one that torch reads can be written where there is
no torch. What is written is what `pickle_reader` gives: plain containers, numbers and text, names,
records of calls and objects, and persistent ids. `described` makes that of a plain value of any
other type, by what the type says of itself to Python's own pickler. This is the only place where
remesh writes pickles, and none of them names anything of remesh.

The opcodes are those of protocol 2, which every reader knows; they are described in Python's
`pickletools`. In protocol 4 all is put away that Python's own pickler puts away, so long runs of
like objects can be read as columns (`pickle_reader.RowForm`).
"""

from __future__ import annotations

import copyreg
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from remesh.formats.pickle_records import Name, PersistentId, Record


def dumps(value: Any, protocol: Literal[2, 4] = 2) -> bytes:
    """Write a pickle; TypeError for a value of another type."""
    writer = _Writer(protocol, bytearray(b"\x80%c" % protocol))
    writer.write(value)
    return bytes(writer.data + b".")


@dataclass(slots=True)
class _Writer:
    """The pickle so far; what is written once more is fetched by its number."""

    protocol: int
    data: bytearray
    numbers: dict[object, int] = field(default_factory=dict)
    """Of texts, of names (each in a tuple), and of calls, by their ids."""
    count: int = 0  # how many numbers there are

    def write(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind is bool:
            self.data += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif kind is int:
            self.data += _integer(value)
        elif kind is float:
            self.data += b"G" + struct.pack(">d", value)
        elif kind is str:
            self._write_once(value, self._write_text, value)
        elif kind is Name:
            self._write_once((value.full,), self._write_name, value)
        elif kind is Record and value.state is None and not value.is_new:
            self._write_once(id(value), self._write_record, value)
        elif kind is Record:
            self._write_record(value)
        elif kind is tuple:
            self._write_tuple(value)
        elif kind is list:
            self.data += b"]"
            self._put_away()
            self._write_items(value)
        elif isinstance(value, Mapping):
            self.data += b"}"
            self._put_away()
            self._write_pairs(value)
        elif kind is PersistentId:
            self.write(value.pid)
            self.data += b"Q"
        else:
            raise TypeError(f"no pickle of {kind.__qualname__} is written")

    def _write_tuple(self, items: tuple[Any, ...]) -> None:
        if not items:
            self.data += b")"
            return
        if len(items) > 3:
            self._write_marked(items, b"t")
        else:
            for item in items:
                self.write(item)
            self.data.append(0x84 + len(items))  # TUPLE1 and so on
        self._put_away()

    def _write_items(self, items: list[Any]) -> None:
        if items:
            self._write_marked(items, b"e")

    def _write_pairs(self, pairs: Mapping[Any, Any]) -> None:
        if pairs:
            self._write_marked([part for item in pairs.items() for part in item], b"u")

    def _write_marked(self, items: list[Any] | tuple[Any, ...], end: bytes) -> None:
        self.data += b"("
        for item in items:
            self.write(item)
        self.data += end

    def _write_once(self, key: object, write: Callable[[Any], None], value: Any) -> None:
        number = self.numbers.get(key)
        if number is not None:
            self.data += b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
            return
        write(value)
        self.numbers[key] = self.count
        self._put_away(is_fetched=True)

    def _put_away(self, is_fetched: bool = False) -> None:
        """Give a number to what was written; in protocol 2 only if it may be fetched by that."""
        number = self.count
        if self.protocol == 4:
            self.data += b"\x94"
        elif is_fetched:
            self.data += b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number)
        else:
            return
        self.count += 1

    def _write_text(self, text: str) -> None:
        data = text.encode()
        is_short = self.protocol == 4 and len(data) < 256
        self.data += b"\x8c%c" % len(data) if is_short else b"X" + struct.pack("<I", len(data))
        self.data += data

    def _write_name(self, name: Name) -> None:
        module, _, own = name.full.rpartition(".")
        if module == "builtins" and self.protocol == 2:
            module = "__builtin__"  # as in Python 2
        self.data += f"c{module}\n{own}\n".encode()

    def _write_record(self, record: Record) -> None:
        assert record.kwargs is None, "named arguments are not written"
        self.write(Name(record.name))
        self._write_tuple(record.args)
        self.data += b"\x81" if record.is_new else b"R"
        if record.is_new or record.state is not None:
            self._put_away()
        if record.state is not None:
            self.write(record.state)
            self.data += b"b"
        self._write_items(record.items or [])
        self._write_pairs(record.pairs or {})


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    text = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(text) < 256:
        return b"\x8a" + bytes([len(text)]) + text
    return b"\x8b" + struct.pack("<I", len(text)) + text


_PLAIN = frozenset({type(None), bool, int, float, str, Name, Record, PersistentId})


def described(value: Any, tensor_of: Callable[[Any], Record] | None = None) -> Any:
    """A plain value as `dumps` takes it; `tensor_of` describes tensors of torch."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return kind(described(item, tensor_of) for item in value)
    if kind is dict:
        pairs = (part for item in value.items() for part in item)
        made = [described(part, tensor_of) for part in pairs]
        return dict(zip(made[::2], made[1::2], strict=True))
    if kind is bytes:  # protocol 2 has none
        return Record("_codecs.encode", (value.decode("latin1"), "latin1"))
    if isinstance(value, type):
        return Name(_name_of(value))
    if tensor_of is not None and kind.__module__ == "torch" and kind.__name__ == "Tensor":
        return tensor_of(value)
    reduce = copyreg.dispatch_table.get(kind)
    found = value.__reduce_ex__(2) if reduce is None else reduce(value)
    if isinstance(found, str):
        # Some types give the name alone, some with the module before it.
        return Name(f"{kind.__module__}.{found.removeprefix(f'{kind.__module__}.')}")
    function, args, state, items, pairs = (*found, None, None, None)[:5]
    is_new = function is copyreg.__newobj__  # type: ignore[attr-defined]
    if is_new:
        function, *args = args
    args, state, items, pairs = (
        described(part, tensor_of)
        for part in (tuple(args), state, items and list(items), pairs and dict(pairs))
    )
    record = Record(_name_of(function), args, is_new, state)
    record.items, record.pairs = items, pairs
    return record


def _name_of(kind: Any) -> str:
    if "." in kind.__qualname__:
        raise TypeError(f"{kind.__qualname__} is not at the top of its module, so it has no name")
    return f"{kind.__module__}.{kind.__qualname__}"
