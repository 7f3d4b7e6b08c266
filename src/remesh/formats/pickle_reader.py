"""Pickles as data: what a pickle says, without doing any of it.

A pickle is a program for a small stack machine. Python's own machine looks names up and calls what
it finds. The machine here knows the same opcodes, but has nothing to call: a name becomes a `Name`,
which is only text, a call becomes a `Record` of the name and the arguments, and a state, list items
or dict items that an object is given are kept in its record. Nothing is imported, looked up or
called, whatever the pickle says. `restricted_pickle` makes values of what this gives.

Python's `pickletools` decodes the arguments of opcodes; those of protocols 0 and 1 alone are
refused, for no system writes its checkpoints in these. Runs of like objects come as columns if
asked for (`RowForm`): one match of a pattern for each object.

Time and memory follow from the length of the pickle. An opcode costs no more than the bytes that it
has and the stack entries that it takes away. In particular nothing here hashes or compares what a
pickle nested: equal hashes can be chosen, and the hash of a tuple that holds another tuple twice,
and so on, takes exponential time. Only text, names, records and small integers are keys as they
are; any other key is put into a `Key`, which is hashed by its identity. What is put away is kept
only if the pickle may take it again.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any, Literal

import numpy as np

from remesh.errors import RemeshError
from remesh.formats.checks import damaged
from remesh.formats.pickle_records import (
    Items,
    Key,
    MalformedError,
    Name,
    PersistentId,
    Pickled,
    Record,
    Rows,
    Span,
    describe,
)

MAX_INT_BYTES = 1024
"""Bytes of the longest integer that is read; longer ones Python does not even show in decimal."""
_PLAIN_INT = range(-(2**60), 2**60)
"""Integers of which no many have one hash."""


def parse(data: bytes, where: str, rows: Sequence[RowForm] = ()) -> Pickled:
    """Read a pickle as data. Bytes after its end are not looked at.

    Runs of like objects come as columns if `rows` has their form.
    """
    is_taken = taken_again(data)
    machine = _Machine(is_taken)
    readers = {  # by the class of the first object of a run
        form.objects[0][0]: RowReader(form, data, machine.memo, is_taken) for form in rows
    }
    return _parsed(machine, io.BytesIO(data), where, readers)


def parse_file(file: IO[bytes], where: str) -> Pickled:
    """Read a pickle, but skip its byte strings: each is a `Span`."""
    return _parsed(_Machine(), file, where, {}, skips=True)


def _parsed(
    machine: _Machine,
    file: IO[bytes],
    where: str,
    readers: Mapping[str, RowReader],
    *,
    skips: bool = False,
) -> Pickled:
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        while (code := file.read(1)) != b".":
            if not code:
                raise MalformedError("it ends in the middle")
            read, step = _STEPS[code[0]]
            if skips and code in _BYTES:
                step(machine, _skipped(file, _BYTES[code], size))
            else:
                step(machine, None if read is None else read(file))
            if readers and code == b"\x81":
                machine.read_rows(readers, file)
        return Pickled(machine.stack.pop(), frozenset(machine.names), file.tell())
    except RemeshError:
        raise
    except Exception as error:  # a malformed program may do anything
        raise damaged(where, f"not a pickle that can be read ({describe(error)})") from error


def _skipped(file: IO[bytes], num_digits: int, size: int) -> Span:
    """A byte string that is not read."""
    length = int.from_bytes(file.read(num_digits), "little")
    position = file.tell()
    if position + length > size:
        raise MalformedError("it ends in the middle")
    file.seek(position + length)
    return Span(position, length)


_RENAMED = {"long": "int", "unicode": "str", "xrange": "range"}


class _Machine:
    """A stack, the places of marks in it, and what was put away by number."""

    __slots__ = ("count", "is_taken", "marks", "memo", "memoized", "names", "stack")

    def __init__(self, is_taken: bytearray | None = None) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}  # what was put away and may be taken again
        self.is_taken = is_taken  # for each number, whether it may be taken again; None if all may
        self.count = 0  # how many numbers were put away
        self.memoized = 0  # one past the last number that was put away by counting
        self.names: dict[str, Name] = {}

    def read_rows(self, readers: Mapping[str, RowReader], file: IO[bytes]) -> None:
        """Read the run that a new object on the stack begins, if it begins one."""
        first = self.stack[-1]
        if first.args or first.name not in readers:
            return
        reader = readers[first.name]
        at, count, rows = reader.read(file.tell(), self.count)
        if rows is not None:
            file.seek(at)
            self.count = self.memoized = count
            self.stack[-1:] = [rows] * len(reader.form.objects)
            if rows.is_followed:
                self.stack.append(Record(first.name, (), True))

    def push(self, value: Any) -> None:
        self.stack.append(value)

    # -- the memo -----------------------------------------------------------------------------

    def memoize(self, _: None) -> None:
        if self.is_taken is None or self.is_taken[self.count]:
            self.memo[self.count] = self.stack[-1]
        self.count += 1
        self.memoized = self.count

    def put(self, number: int) -> None:
        if number not in self.memo:
            if number < self.memoized:  # what was there was not kept
                raise MalformedError("two values that are put away under one number")
            self.count += 1
        self.memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self.memo[number])

    # -- the stack ----------------------------------------------------------------------------

    def mark(self, _: None) -> None:
        self.marks.append(len(self.stack))

    def popped(self) -> list[Any]:
        """Take off the stack what lies above the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop(self, _: None) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def pop_mark(self, _: None) -> None:
        self.popped()

    # -- containers ---------------------------------------------------------------------------

    def append(self, _: None) -> None:
        item = self.stack.pop()
        self.list_to_extend().append(item)

    def appends(self, _: None) -> None:
        items = self.popped()
        self.list_to_extend().extend(items)

    def list_to_extend(self) -> list[Any]:
        target = self.stack[-1]
        if type(target) is list:
            return target
        if type(target) is not Record:
            raise MalformedError("an item for what is not a list")
        if target.items is None:
            target.items = []
        return target.items

    def set_item(self, _: None) -> None:
        item, key = self.stack.pop(), self.stack.pop()
        self.set_pairs([key, item])

    def set_items(self, _: None) -> None:
        self.set_pairs(self.popped())

    def set_pairs(self, items: list[Any]) -> None:
        """Set keys and values, which alternate, in the dict or object on the stack."""
        target = self.stack[-1]
        if type(target) is Record:
            if target.pairs is None:
                target.pairs = {}
            target = target.pairs
        elif type(target) is not dict:
            raise MalformedError("a key for what is not a dict")
        if len(items) % 2:
            raise MalformedError("a key without a value")
        keys = items[::2]
        if not _HASHED.issuperset(map(type, keys)):
            keys = [_key(key) for key in keys]
        target.update(zip(keys, items[1::2], strict=True))

    def add_items(self, _: None) -> None:
        items = self.popped()
        target = self.stack[-1]
        if type(target) is not Items or target.is_frozen:
            raise MalformedError("an item for what is not a set")
        target.items.extend(items)

    # -- names, calls and objects -------------------------------------------------------------

    def name(self, module: str, name: str) -> None:
        """Push the one `Name` of a name."""
        if module == "__builtin__":  # as in Python 2, and in protocols up to 2 still
            module, name = "builtins", _RENAMED.get(name, name)
        full = f"{module}.{name}"
        found = self.names.get(full)
        if found is None:
            full.encode()  # only text that can be shown and stored is a name
            found = self.names[full] = Name(full)
        self.stack.append(found)

    def global_name(self, pair: str) -> None:
        module, _, name = pair.partition(" ")
        if " " in name:
            raise MalformedError("a name with spaces")
        self.name(module, name)

    def stack_global(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise MalformedError("a name that is not text")
        self.name(module, name)

    def call(self, args: Any, is_new: bool) -> Record:
        """Replace what lies on the stack by its call."""
        kind = self.stack[-1]
        if type(args) is not tuple:
            raise MalformedError("a call without a tuple of arguments")
        if type(kind) is Record:
            self.name("what another call", "gives")
            kind = self.stack.pop()
        if type(kind) is not Name:
            raise MalformedError("a call of what is not a function")
        self.stack[-1] = made = Record(kind.full, args, is_new)
        return made

    def reduce(self, _: None) -> None:
        self.call(self.stack.pop(), False)

    def new_object(self, _: None) -> None:
        self.call(self.stack.pop(), True)

    def new_object_ex(self, _: None) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        if type(kwargs) is not dict:
            raise MalformedError("a call without a dict of named arguments")
        self.call(args, True).kwargs = kwargs or None

    def build(self, _: None) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) is not Record:
            raise MalformedError("a state for what takes none")
        made.state = state

    def persistent_id(self, _: None) -> None:
        self.stack[-1] = PersistentId(self.stack[-1])


_HASHED = frozenset({str, Record, Name, Rows})
"""Types whose hash is stored, or seeded, or the identity."""


def _key(node: Any) -> Any:
    if type(node) in _HASHED or node is None or type(node) in {bool, bytes}:
        return node
    return node if type(node) is int and node in _PLAIN_INT else Key(node)


# -- what each opcode does ------------------------------------------------------------------------


Step = Callable[[_Machine, Any], None]
"""What an opcode does, given its argument; None if it has none."""


def _pushed(made: Callable[[], object]) -> Step:
    return lambda machine, _: machine.stack.append(made())


def _from_mark(made: Callable[[list[Any]], object]) -> Step:
    return lambda machine, _: machine.stack.append(made(machine.popped()))


def _tuple_of(size: int) -> Step:
    def step(machine: _Machine, _: None) -> None:
        if len(machine.stack) < size:
            raise MalformedError("a tuple of more than the stack")
        machine.stack[-size:] = [tuple(machine.stack[-size:])]

    return step


def _push_long(machine: _Machine, number: int) -> None:
    if number.bit_length() > 8 * MAX_INT_BYTES:
        raise MalformedError(f"an integer of {number.bit_length()} bits")
    machine.push(number)


def _refuse(what: str) -> Step:
    def step(_machine: _Machine, _: Any) -> None:
        raise MalformedError(what)

    return step


def _ignore(_machine: _Machine, _: Any) -> None:
    """What says nothing about the value."""


_BYTES = {b"C": 1, b"B": 4, b"\x8e": 8}
"""SHORT_BINBYTES, BINBYTES and BINBYTES8: how many bytes the length of each has."""
_BY_NAME: dict[str, Step] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), _Machine.push),
    **dict.fromkeys(("LONG1", "LONG4"), _push_long),
    "NONE": _Machine.push,
    "NEWTRUE": _pushed(lambda: True),
    "NEWFALSE": _pushed(lambda: False),
    "EMPTY_TUPLE": _pushed(tuple),
    "EMPTY_LIST": _pushed(list),
    "EMPTY_DICT": _pushed(dict),
    "EMPTY_SET": _pushed(lambda: Items([], is_frozen=False)),
    "MARK": _Machine.mark,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": _from_mark(tuple),
    "FROZENSET": _from_mark(lambda items: Items(items, is_frozen=True)),
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "ADDITEMS": _Machine.add_items,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": _Machine.global_name,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new_object,
    "NEWOBJ_EX": _Machine.new_object_ex,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent_id,
    **dict.fromkeys(("PROTO", "FRAME"), _ignore),
}

Reader = Callable[[IO[bytes]], Any]
_STEPS: list[tuple[Reader | None, Step]] = [
    (None, _refuse("an opcode that checkpoints do not have")) for _ in range(256)
]
"""What decodes the argument of an opcode, if it has one, and what it does, by its byte."""
for _opcode in pickletools.opcodes:
    if _opcode.name in _BY_NAME:
        _reader = None if _opcode.arg is None else _opcode.arg.reader
        _STEPS[ord(_opcode.code)] = _reader, _BY_NAME[_opcode.name]


# -- runs of like objects --------------------------------------------------------------------------
#
# The metadata of a large checkpoint is millions of objects of three classes, with the same fields
# in the same order. Python's pickler writes each of them with the same opcodes, and only numbers
# and texts differ. A `RowForm` says which fields the objects of a run have. The opcodes between
# them follow from the numbers under which the pickler has put away the class and the names of the
# fields, so `RowReader` makes one regular expression of them, and takes from each match what
# differs. What does not match is left to the machine; both ways give the same. That is so of all
# pickles of protocols before 4, whose writers number what they put away themselves.
#
# A pattern has no two choices that begin alike and no repetition without a limit, so a match takes
# time in proportion to the bytes that it covers.

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


@dataclass(frozen=True, eq=False)
class RowForm:
    """Which objects follow each other in a run: one of a class, or a key and a value by turns."""

    objects: tuple[tuple[str, tuple[tuple[str, FieldKind], ...]], ...]
    """The classes, each with its fields."""

    @cached_property
    def columns(self) -> list[FieldKind]:
        """The kinds of the fields that are kept."""
        kinds = [kind for _, fields in self.objects for _, kind in fields]
        return [kind for kind in kinds if kind != "ignored"]

    @cached_property
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

    @cached_property
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
        match, data, num_put_away = self._pattern.match, self.data, self.form.num_put_away
        texts = self.form.texts
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
        for kind, column in zip(self.form.columns, zip(*rows, strict=True), strict=True):
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
        at = np.flatnonzero(part[:-4] == ord("j"))  # LONG_BINGET
        digits = part[at[:, None] + np.arange(1, 5)]
        numbers = np.ascontiguousarray(digits).view("<u4")[:, 0]
        flags[numbers[numbers < len(found)]] = 1
    return found


_MIN_SCANNED, _SCANNED = 1 << 10, 1 << 22
