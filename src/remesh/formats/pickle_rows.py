"""Runs of like objects in a pickle, read as columns: one match of a pattern for each object.

The metadata of a large checkpoint is millions of objects of three classes, with the same fields in
the same order. Python's pickler writes each of them with the same opcodes, and only numbers and
texts differ. A `RowForm` says which fields the objects of a run have. The opcodes between them
follow from the numbers under which the pickler has put away the class and the names of the fields,
so `RowReader` makes one regular expression of them, and takes from each match what differs. What
does not match is left to the machine of `pickle_reader`, opcode by opcode; both ways give the same.

A pattern has no two choices that begin alike and no repetition without a limit, so a match takes
time in proportion to the bytes that it covers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from remesh.formats.pickle_records import Name, Rows

FieldKind = Literal["size", "text", "number", "ignored"]
"""A `torch.Size` of one dim or more, a text, a number, or a number or None that is not kept."""

_SIZE = "torch.Size"
_NUMBER = rb"(?:K.|M..|J.{4}|\x8a(?:\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}))"
_VALUES: Mapping[FieldKind, bytes] = {
    "number": b"(%b)" % _NUMBER,
    "ignored": b"(?:%b|N)" % _NUMBER,
    "text": rb"(h.|j.{4}|\x8c.[^\x94]{0,255}\x94)",
    "size": b"((?:%b\x85|%b{2}\x86|%b{3}\x87|\\(%b{4,64}t)\x94)\x85\x94R\x94" % ((_NUMBER,) * 4),
}
_PUT_AWAY: Mapping[FieldKind, int] = {"number": 0, "ignored": 0, "text": 0, "size": 3}
"""How many values the opcodes of a field put away, besides a text that stands there itself."""
_MAX_REFERENCES = 8
"""Numbers under which one text may have been put away."""
_MAX_CACHED = 1 << 16


@dataclass(frozen=True, slots=True)
class RowForm:
    """Which objects follow each other in a run: one of a class, or a key and a value by turns."""

    objects: tuple[tuple[str, tuple[tuple[str, FieldKind], ...]], ...]
    """The classes, each with its fields."""

    def columns(self) -> list[FieldKind]:
        """The kinds of the fields that are kept."""
        kinds = [kind for _, fields in self.objects for _, kind in fields]
        return [kind for kind in kinds if kind != "ignored"]

    def texts(self) -> list[tuple[int, int]]:
        """The columns of texts, each with how many values a row has put away before."""
        found, num_before, column = [], 0, 0
        for _, fields in self.objects:
            num_before += 2  # the object and its dict
            for _, kind in fields:
                if kind == "text":
                    found.append((column, num_before))
                num_before += _PUT_AWAY[kind]
                column += kind != "ignored"
        return found

    def num_put_away(self) -> int:
        """How many values a row puts away, besides texts."""
        fields = [item for _, fields in self.objects for item in fields]
        return 2 * len(self.objects) + sum(_PUT_AWAY[kind] for _, kind in fields)


class _Sizes(dict[bytes, tuple[int, ...]]):
    """The numbers of a tuple, by the opcodes that make it."""

    def __missing__(self, opcodes: bytes) -> tuple[int, ...]:
        if len(self) > _MAX_CACHED:
            self.clear()
        found = tuple(map(_number, _ONE_NUMBER.findall(opcodes)))
        self[opcodes] = found
        return found


_UINT32 = struct.Struct("<I")
_BININT1, _BININT2, _LONG1, _SHORT_BINUNICODE = b"KM\x8a\x8c"
_ONE_NUMBER = re.compile(_NUMBER, re.DOTALL)


def _number(opcode: bytes) -> int:
    first = opcode[0]
    if first == _BININT1:
        return opcode[1]
    digits = opcode[2:] if first == _LONG1 else opcode[1:]
    return int.from_bytes(digits, "little", signed=first != _BININT2)


def _reference(number: int) -> bytes:
    """The opcode that takes what was put away under a number."""
    return b"h%c" % number if number < 256 else b"j" + _UINT32.pack(number)


@dataclass(slots=True)
class RowReader:
    """One form in one pickle."""

    form: RowForm  # what a row is
    data: bytes  # the pickle
    memo: dict[int, Any]  # what it has put away, by number, as far as it may be taken again
    is_taken: bytearray  # for each number, whether it may be taken again
    _num_seen: int = 0
    _taken: int = -1  # the number that `_next_taken` has found
    _pattern: re.Pattern[bytes] | None = None
    _sizes: dict[bytes, tuple[int, ...]] = field(default_factory=_Sizes)

    def read(self, at: int, count: int) -> tuple[int, int, Rows | None]:
        """Read a run whose first object has been made, and has not been put away yet.

        `at` is the position after the opcode that made it, `count` how many values have been put
        away. Returns both after the run, and its rows; None if there is not one row. The first
        object after them has been made if `Rows.is_followed`.
        """
        self._num_seen += 1
        if self._pattern is None and self._num_seen & (self._num_seen - 1) == 0:
            # The pattern can be made when the names of all fields have been put away.
            self._pattern = self._compiled()
        if self._pattern is None:
            return at, count, None
        match, data, num_put_away = self._pattern.match, self.data, self.form.num_put_away()
        texts = self.form.texts()
        rows: list[list[Any]] = []
        is_followed = True
        while is_followed and (found := match(data, at)) is not None:
            *row, follows = found.groups()
            new = self._set_texts(row, texts, count) if texts else {}
            stop = count + num_put_away + len(new or ())
            if new is None or not self._put_away(new, count, stop):
                break
            rows.append(row)
            at, count, is_followed = found.end(), stop, follows is not None
        return at, count, self._columns(rows, is_followed) if rows else None

    def _set_texts(
        self, row: list[Any], texts: list[tuple[int, int]], count: int
    ) -> dict[int, str] | None:
        """Put the texts of a row in the place of their opcodes."""
        new: dict[int, str] = {}
        for column, num_before in texts:
            opcode: bytes = row[column]
            if opcode[0] == _SHORT_BINUNICODE:
                if opcode[1] != len(opcode) - 3:
                    return None
                text = opcode[2:-1].decode("utf-8", "surrogatepass")
                new[count + num_before + len(new)] = row[column] = text
                continue
            number = opcode[1] if len(opcode) == 2 else _UINT32.unpack_from(opcode, 1)[0]
            row[column] = found = self.memo.get(number)
            if type(found) is not str:
                return None
        return new

    def _put_away(self, new: dict[int, str], count: int, stop: int) -> bool:
        """Put away the texts of a row that may be taken again; False if more of it may be."""
        taken = self._next_taken(count)
        if taken >= stop:
            return True
        while taken < stop:
            if taken not in new:
                return False
            taken = self._next_taken(taken + 1)
        self.memo.update(new)
        return True

    def _next_taken(self, number: int) -> int:
        """The first number from an ascending one on that may be taken again, searched once."""
        if self._taken < number:
            found = self.is_taken.find(1, number)
            self._taken = len(self.is_taken) if found < 0 else found
        return self._taken

    def _columns(self, rows: list[list[Any]], is_followed: bool) -> Rows:
        """The values of the opcodes of some rows."""
        columns: list[list[Any]] = []
        for kind, column in zip(self.form.columns(), zip(*rows, strict=True), strict=True):
            if kind == "size":
                columns.append(list(map(self._sizes.__getitem__, column)))
            elif kind == "number":
                columns.append(list(map(_number, column)))
            else:
                columns.append(list(column))
        return Rows(self.form, columns, len(rows), is_followed)

    def _compiled(self) -> re.Pattern[bytes] | None:
        """The pattern of a row after the opcode that makes its first object."""
        references: dict[tuple[type, str], list[bytes]] = {}
        for number, found in self.memo.items():
            if type(found) is str:
                references.setdefault((str, found), []).append(_reference(number))
            elif type(found) is Name:
                references.setdefault((Name, found.full), []).append(_reference(number))

        def one_of(kind: type, text: str) -> bytes:
            known = references.get((kind, text), ())
            if not 0 < len(known) <= _MAX_REFERENCES:
                raise LookupError(text)
            return b"(?:%b)" % b"|".join(map(re.escape, known))

        try:
            made = [b"%b\\)\x81" % one_of(Name, name) for name, _ in self.form.objects]
            states = [
                b"\x94}\x94\\(%bub" % b"".join(self._field(one_of, *item) for item in fields)
                for _, fields in self.form.objects
            ]
        except LookupError:
            return None
        row = states[0] + b"".join(a + b for a, b in zip(made[1:], states[1:], strict=True))
        return re.compile(b"%b(%b)?" % (row, made[0]), re.DOTALL)

    @staticmethod
    def _field(one_of: Callable[[type, str], bytes], name: str, kind: FieldKind) -> bytes:
        size = one_of(Name, _SIZE) if kind == "size" else b""
        return b"%b%b%b" % (one_of(str, name), size, _VALUES[kind])


def taken_again(data: bytes) -> bytearray:
    """For each number of the memo, whether a pickle may take what is put away under it.

    Any byte counts as an opcode here, so these are some numbers too many, and none too few.
    """
    if len(data) < _MIN_SCANNED:
        return bytearray(b"\1") * (len(data) + 256)
    found = bytearray(len(data) + 256)
    found[:256] = b"\1" * 256
    flags, whole = np.frombuffer(found, np.uint8), np.frombuffer(data, np.uint8)
    for start in range(0, len(data), _SCANNED):
        part = whole[start : start + _SCANNED + 4]
        at = np.flatnonzero(part[:-4] == _LONG_BINGET)
        digits = part[at[:, None] + np.arange(1, 5)]
        numbers = np.ascontiguousarray(digits).view("<u4")[:, 0]
        flags[numbers[numbers < len(found)]] = 1
    return found


_LONG_BINGET = ord("j")
_MIN_SCANNED, _SCANNED = 1 << 10, 1 << 22
