"""Pickles as data: what a pickle says, without doing any of it.

A pickle is a program for a small stack machine. Python's own machine looks names up and calls what
it finds. The machine here knows the same opcodes, but has nothing to call: a name becomes a `Name`,
which is only text, a call becomes a `Record` of the name and the arguments, and a state, list items
or dict items that an object is given are kept in its record. Nothing is imported, looked up or
called, whatever the pickle says. `restricted_pickle` makes values of what this gives.

Time and memory follow from the length of the pickle. An opcode costs no more than the bytes that it
has and the stack entries that it takes away. In particular nothing here hashes or compares what a
pickle nested: equal hashes can be chosen, and the hash of a tuple that holds another tuple twice,
and so on, takes exponential time. Only text, names, records and small integers are keys as they
are; any other key is put into a `Key`, which is hashed by its identity. What is put away is kept
only if the pickle may take it again, and runs of like objects come as columns if asked for
(`pickle_rows`).

The opcodes are described in Python's `pickletools`.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from remesh.formats.checks import damaged
from remesh.formats.pickle_records import (
    MAX_DIGITS,
    Items,
    Key,
    MalformedError,
    Name,
    PersistentId,
    Pickled,
    Record,
    Rows,
    ascii_of,
    describe,
    integer,
    long_of,
    utf8,
)
from remesh.formats.pickle_rows import RowForm, RowReader, taken_again

_PLAIN_INT = range(-(2**60), 2**60)
"""Integers of which no many have one hash."""


def parse(data: bytes, where: str, rows: Sequence[RowForm] = ()) -> Pickled:
    """Read a pickle as data. Bytes after its end are not looked at."""
    machine = _Machine(data, rows)
    try:
        machine.run()
        return Pickled(machine.stack.pop(), frozenset(machine.names), len(data))
    except Exception as error:  # a malformed program may do anything
        raise damaged(where, f"not a pickle that can be read ({describe(error)})") from error


_RENAMED = {"long": "int", "unicode": "str", "xrange": "range"}


class _Machine:
    """A stack, the places of marks in it, and what was put away by number."""

    __slots__ = ("count", "data", "is_taken", "marks", "memo", "memoized", "names", "rows", "stack")

    def __init__(self, data: bytes, rows: Sequence[RowForm]) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}  # what was put away and may be taken again
        self.count = 0  # how many numbers were put away
        self.memoized = 0  # one past the last number that was put away by counting
        self.is_taken = taken_again(data)  # by number
        self.names: dict[str, Name] = {}
        self.rows = {  # readers of runs of like objects, by the class of the first one
            form.objects[0][0]: RowReader(form, data, self.memo, self.is_taken) for form in rows
        }

    def run(self) -> None:
        """Go from opcode to opcode until the end."""
        data, memo, stack, is_taken = self.data, self.memo, self.stack, self.is_taken
        steps, unpack, at = _STEPS, _UINT32.unpack_from, 0
        while True:
            opcode = data[at]
            # Three of four opcodes of a long pickle are among these.
            if opcode == _MEMOIZE:
                number = self.count
                if is_taken[number]:
                    memo[number] = stack[-1]
                self.count = self.memoized = number + 1
                at += 1
            elif opcode == _BINGET:
                stack.append(memo[data[at + 1]])
                at += 2
            elif opcode == _LONG_BINGET:
                stack.append(memo[unpack(data, at + 1)[0]])
                at += 5
            elif opcode == _STOP:
                return
            else:
                at = steps[opcode](self, at + 1)

    def name(self, module: str, name: str) -> Name:
        """The one `Name` of a name."""
        if module == "__builtin__":  # as in Python 2, and in protocols up to 2 still
            module, name = "builtins", _RENAMED.get(name, name)
        full = f"{module}.{name}"
        found = self.names.get(full)
        if found is None:
            full.encode()  # only text that can be shown and stored is a name
            found = self.names[full] = Name(full)
        return found

    def put(self, number: int) -> None:
        """Put away the top of the stack under a number."""
        if number not in self.memo:
            if number < self.memoized:  # what was there was not kept
                raise MalformedError("two values that are put away under one number")
            self.count += 1
        self.memo[number] = self.stack[-1]

    def popped(self) -> list[Any]:
        """Take off the stack what lies above the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def called(self, kind: Any, args: Any, is_new: bool) -> Record:
        """The record of a call."""
        if type(args) is not tuple:
            raise MalformedError("a call without a tuple of arguments")
        if type(kind) is Name:
            return Record(kind.full, args, is_new)
        if type(kind) is Record:
            return Record(self.name("what another call", "gives").full, args, is_new)
        raise MalformedError("a call of what is not a function")


Step = Callable[[_Machine, int], int]
"""What an opcode does; takes and gives a position, that after the opcode."""


def _bytes(data: bytes, at: int, stop: int) -> bytes:
    if stop > len(data):
        raise MalformedError("it ends in the middle")
    return data[at:stop]


def _line(machine: _Machine, at: int) -> tuple[bytes, int]:
    end = machine.data.find(b"\n", at)
    if end < 0:
        raise MalformedError("it ends in the middle")
    return machine.data[at:end], end + 1


# -- constants and numbers ------------------------------------------------------------------------


def _constant(value: object) -> Step:
    def step(machine: _Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return step


def _number(form: struct.Struct) -> Step:
    unpack, size = form.unpack_from, form.size

    def step(machine: _Machine, at: int) -> int:
        machine.stack.append(unpack(machine.data, at)[0])
        return at + size

    return step


def _bin_int1(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.data[at])
    return at + 1


def _decimal(machine: _Machine, at: int) -> int:
    line, after = _line(machine, at)
    if line in {b"00", b"01"}:
        machine.stack.append(line == b"01")
    else:
        machine.stack.append(integer(line))
    return after


def _float_line(machine: _Machine, at: int) -> int:
    line, after = _line(machine, at)
    machine.stack.append(float(line[:MAX_DIGITS]))
    return after


# -- text and bytes -------------------------------------------------------------------------------


def _short(made: Callable[[bytes], object]) -> Step:
    """A step for data that begins with its length in one byte."""

    def step(machine: _Machine, at: int) -> int:
        begin = at + 1
        stop = begin + machine.data[at]
        machine.stack.append(made(_bytes(machine.data, begin, stop)))
        return stop

    return step


def _sized(size: int, made: Callable[[bytes], object], signed: bool = False) -> Step:
    """A step for data that begins with its length."""

    def step(machine: _Machine, at: int) -> int:
        begin = at + size
        length = int.from_bytes(_bytes(machine.data, at, begin), "little", signed=signed)
        if length < 0:
            raise MalformedError("a negative length")
        machine.stack.append(made(_bytes(machine.data, begin, begin + length)))
        return begin + length

    return step


def _quoted(machine: _Machine, at: int) -> int:
    line, after = _line(machine, at)
    if len(line) < 2 or line[:1] not in {b"'", b'"'} or line[:1] != line[-1:]:
        raise MalformedError("a string without quotes")
    # The escapes of a bytes literal; there is no public function for them.
    found: tuple[bytes, int] = codecs.escape_decode(line[1:-1])
    machine.stack.append(ascii_of(found[0]))
    return after


def _text_line(machine: _Machine, at: int) -> int:
    line, after = _line(machine, at)
    # Not decode(), which imports a codec when it is first asked for one.
    machine.stack.append(codecs.raw_unicode_escape_decode(line)[0])
    return after


# -- containers -----------------------------------------------------------------------------------


def _empty(made: Callable[[], object]) -> Step:
    def step(machine: _Machine, at: int) -> int:
        machine.stack.append(made())
        return at

    return step


def _mark(machine: _Machine, at: int) -> int:
    machine.marks.append(len(machine.stack))
    return at


def _tuple_of(size: int) -> Step:
    def step(machine: _Machine, at: int) -> int:
        if len(machine.stack) < size:
            raise MalformedError("a tuple of more than the stack")
        machine.stack[-size:] = [tuple(machine.stack[-size:])]
        return at

    return step


def _from_mark(made: Callable[[list[Any]], object]) -> Step:
    def step(machine: _Machine, at: int) -> int:
        items = machine.popped()
        machine.stack.append(made(items))
        return at

    return step


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    _set_pairs(made, items)
    return made


def _append(machine: _Machine, at: int) -> int:
    item = machine.stack.pop()
    _list_at(machine.stack[-1]).append(item)
    return at


def _appends(machine: _Machine, at: int) -> int:
    items = machine.popped()
    _list_at(machine.stack[-1]).extend(items)
    return at


def _list_at(target: Any) -> list[Any]:
    if type(target) is list:
        return target
    if type(target) is not Record:
        raise MalformedError("an item for what is not a list")
    if target.items is None:
        target.items = []
    return target.items


def _set_item(machine: _Machine, at: int) -> int:
    item, key = machine.stack.pop(), machine.stack.pop()
    _set_pairs(_dict_at(machine.stack[-1]), [key, item])
    return at


def _set_items(machine: _Machine, at: int) -> int:
    items = machine.popped()
    _set_pairs(_dict_at(machine.stack[-1]), items)
    return at


def _dict_at(target: Any) -> dict[Any, Any]:
    if type(target) is dict:
        return target
    if type(target) is not Record:
        raise MalformedError("a key for what is not a dict")
    if target.pairs is None:
        target.pairs = {}
    return target.pairs


_HASHED = frozenset({str, Record, Name, Rows})
"""Types whose hash is stored, or seeded, or the identity."""


def _set_pairs(target: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise MalformedError("a key without a value")
    keys = items[::2]
    if not _HASHED.issuperset(map(type, keys)):
        keys = [_key(key) for key in keys]
    target.update(zip(keys, items[1::2], strict=True))


def _key(node: Any) -> Any:
    if type(node) in _HASHED or node is None or type(node) in {bool, bytes}:
        return node
    return node if type(node) is int and node in _PLAIN_INT else Key(node)


def _add_items(machine: _Machine, at: int) -> int:
    items = machine.popped()
    target = machine.stack[-1]
    if type(target) is not Items or target.is_frozen:
        raise MalformedError("an item for what is not a set")
    target.items.extend(items)
    return at


# -- the stack and the memo -----------------------------------------------------------------------


def _pop(machine: _Machine, at: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return at


def _pop_mark(machine: _Machine, at: int) -> int:
    machine.popped()
    return at


def _dup(machine: _Machine, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


def _get(machine: _Machine, at: int) -> int:
    line, after = _line(machine, at)
    machine.stack.append(machine.memo[integer(line)])
    return after


def _put(machine: _Machine, at: int) -> int:
    line, after = _line(machine, at)
    machine.put(integer(line))
    return after


def _bin_put(form: struct.Struct) -> Step:
    unpack, size = form.unpack_from, form.size

    def step(machine: _Machine, at: int) -> int:
        machine.put(unpack(machine.data, at)[0])
        return at + size

    return step


# -- names, calls and objects ---------------------------------------------------------------------


def _global(machine: _Machine, at: int) -> int:
    module, at = _line(machine, at)
    name, at = _line(machine, at)
    machine.stack.append(machine.name(utf8(module), utf8(name)))
    return at


def _stack_global(machine: _Machine, at: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise MalformedError("a name that is not text")
    machine.stack.append(machine.name(module, name))
    return at


def _reduce(machine: _Machine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = machine.called(machine.stack[-1], args, False)
    return at


def _new_object(machine: _Machine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = made = machine.called(machine.stack[-1], args, True)
    reader = machine.rows.get(made.name)
    return at if reader is None or args else _rows(machine, reader, at)


def _rows(machine: _Machine, reader: RowReader, at: int) -> int:
    """Read the run that an object begins which is new and lies on the stack, if it begins one."""
    at, count, rows = reader.read(at, machine.count)
    if rows is not None:
        machine.count = machine.memoized = count
        first = machine.stack.pop()
        machine.stack += [rows] * len(reader.form.objects)
        if rows.is_followed:
            machine.stack.append(Record(first.name, (), True))
    return at


def _new_object_ex(machine: _Machine, at: int) -> int:
    kwargs, args = machine.stack.pop(), machine.stack.pop()
    if type(kwargs) is not dict:
        raise MalformedError("a call without a dict of named arguments")
    made = machine.called(machine.stack[-1], args, True)
    made.kwargs = kwargs or None
    machine.stack[-1] = made
    return at


def _object(machine: _Machine, at: int) -> int:
    kind, *args = machine.popped()
    machine.stack.append(machine.called(kind, tuple(args), False))
    return at


def _instance(machine: _Machine, at: int) -> int:
    at = _global(machine, at)
    kind = machine.stack.pop()
    args = machine.popped()
    machine.stack.append(machine.called(kind, tuple(args), False))
    return at


def _build(machine: _Machine, at: int) -> int:
    state = machine.stack.pop()
    made = machine.stack[-1]
    if type(made) is not Record:
        raise MalformedError("a state for what takes none")
    made.state = state
    return at


def _persistent_id(machine: _Machine, at: int) -> int:
    machine.stack[-1] = PersistentId(machine.stack[-1])
    return at


def _persistent_line(machine: _Machine, at: int) -> int:
    line, after = _line(machine, at)
    machine.stack.append(PersistentId(ascii_of(line)))
    return after


def _unsupported(what: str) -> Step:
    def step(_machine: _Machine, _at: int) -> NoReturn:
        raise MalformedError(what)

    return step


def _skip(size: int) -> Step:
    def step(machine: _Machine, at: int) -> int:
        _bytes(machine.data, at, at + size)
        return at + size

    return step


_UINT32 = struct.Struct("<I")
_MEMOIZE, _BINGET, _LONG_BINGET, _STOP = b"\x94hj."
_EXTENSION = _unsupported("an extension code, which only its writer knows")
_BUFFER = _unsupported("a buffer outside the pickle")

_BY_OPCODE: dict[bytes, Step] = {
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"I": _decimal,
    b"L": _decimal,
    b"J": _number(struct.Struct("<i")),
    b"K": _bin_int1,
    b"M": _number(struct.Struct("<H")),
    b"\x8a": _short(long_of),
    b"\x8b": _sized(4, long_of, signed=True),
    b"F": _float_line,
    b"G": _number(struct.Struct(">d")),
    b"S": _quoted,
    b"T": _sized(4, ascii_of, signed=True),
    b"U": _short(ascii_of),
    b"V": _text_line,
    b"\x8c": _short(utf8),
    b"X": _sized(4, utf8),
    b"\x8d": _sized(8, utf8),
    b"C": _short(bytes),
    b"B": _sized(4, bytes),
    b"\x8e": _sized(8, bytes),
    b"\x96": _sized(8, bytearray),
    b"(": _mark,
    b"]": _empty(list),
    b"}": _empty(dict),
    b"\x8f": _empty(lambda: Items([], is_frozen=False)),
    b")": _constant(()),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"t": _from_mark(tuple),
    b"l": _from_mark(list),
    b"d": _from_mark(_dict_of),
    b"\x91": _from_mark(lambda items: Items(items, is_frozen=True)),
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": _set_items,
    b"\x90": _add_items,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _dup,
    b"g": _get,
    b"p": _put,
    b"q": _bin_put(struct.Struct("<B")),
    b"r": _bin_put(_UINT32),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _new_object,
    b"\x92": _new_object_ex,
    b"o": _object,
    b"i": _instance,
    b"b": _build,
    b"Q": _persistent_id,
    b"P": _persistent_line,
    b"\x80": _skip(1),
    b"\x95": _skip(8),
    b"\x82": _EXTENSION,
    b"\x83": _EXTENSION,
    b"\x84": _EXTENSION,
    b"\x97": _BUFFER,
    b"\x98": _BUFFER,
}
_UNKNOWN = _unsupported("an opcode that there is not")
_STEPS: list[Step] = [_BY_OPCODE.get(bytes([code]), _UNKNOWN) for code in range(256)]
