"""Writing pickles that other systems expect, without having their classes.

A pickle names classes and functions as text, so one that torch reads can be written where there is
no torch. Only what foreign metadata needs can be written: plain containers, numbers and text, names
(`Global`), calls (`Call`), objects with a state (`New`) and persistent ids. This is the only place
where remesh writes pickles, and none of them names anything of remesh.

The opcodes are those of protocol 2, which every reader knows; they are described in Python's
`pickletools`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Global:
    """Something that is found by its name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function."""

    function: Global
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class New:
    """An object of a class that is made without a call and given a state; None for no state."""

    kind: Global
    state: Any = None


@dataclass(frozen=True, slots=True)
class PersistentId:
    """Something outside the pickle, by its id."""

    pid: tuple[Any, ...]


def dumps(value: Any) -> bytes:
    """Write a pickle."""
    writer = _Writer(bytearray(b"\x80\x02"), {})
    writer.write(value)
    return bytes(writer.data + b".")


@dataclass(slots=True)
class _Writer:
    """The pickle so far; what is written once more is fetched by its number."""

    data: bytearray
    numbers: dict[Any, int]

    def write(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind is bool:
            self.data += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif kind is int:
            self.data += _integer(value)
        elif kind is float:
            self.data += b"G" + struct.pack(">d", value)
        elif kind in {str, Global, Call}:
            self._write_once(value)
        elif kind is tuple:
            self._write_tuple(value)
        elif kind is list:
            self.data += b"]"
            if value:
                self._write_marked(value, b"e")
        elif isinstance(value, Mapping):
            self.data += b"}"
            if value:
                self._write_marked([part for item in value.items() for part in item], b"u")
        elif kind is New:
            self._write_once(value.kind)
            self.data += b")\x81"
            if value.state is not None:
                self.write(value.state)
                self.data += b"b"
        elif kind is PersistentId:
            self._write_tuple(value.pid)
            self.data += b"Q"
        else:
            raise TypeError(f"no pickle of {kind.__qualname__} is written")

    def _write_tuple(self, items: tuple[Any, ...]) -> None:
        if items:
            self._write_marked(items, b"t")
        else:
            self.data += b")"

    def _write_marked(self, items: list[Any] | tuple[Any, ...], end: bytes) -> None:
        self.data += b"("
        for item in items:
            self.write(item)
        self.data += end

    def _write_once(self, value: str | Global | Call) -> None:
        number = self.numbers.get(value)
        if number is not None:
            self.data += b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
            return
        if isinstance(value, str):
            text = value.encode()
            self.data += b"X" + struct.pack("<I", len(text)) + text
        elif isinstance(value, Global):
            self.data += b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
        else:
            self._write_once(value.function)
            self._write_tuple(value.args)
            self.data += b"R"
        number = self.numbers[value] = len(self.numbers)
        self.data += b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number)


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    text = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(text)]) + text
