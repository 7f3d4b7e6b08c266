"""Pickles as data: what a pickle says, without doing any of it.

A pickle is a program for a small stack machine. Python's own machine looks names up and calls what
it finds. The machine here knows the same opcodes, but has nothing to call: a name becomes a `Name`,
which is only text, a call becomes a `Record` of the name and the arguments, and a state, list items
or dict items that an object is given are kept in its record. Nothing is imported, looked up or
called, whatever the pickle says. `restricted_pickle` makes values of what this gives.

Python's `pickletools` decodes the arguments of opcodes. A pickle in memory is gone through by
position (`_Machine.run`): the opcodes of which long pickles consist are decoded there, which takes
half the time, and runs of like objects come as columns if asked for (`pickle_rows`).

Time and memory follow from the length of the pickle. An opcode costs no more than the bytes that it
has and the stack entries that it takes away. In particular nothing here hashes or compares what a
pickle nested: equal hashes can be chosen, and the hash of a tuple that holds another tuple twice,
and so on, takes exponential time. Only text, names, records and small integers are keys as they
are; any other key is put into a `Key`, which is hashed by its identity. What is put away is kept
only if the pickle may take it again.
"""

from __future__ import annotations

import codecs
import io
import pickletools
import struct
from collections.abc import Callable, Sequence
from typing import IO, Any

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
from remesh.formats.pickle_rows import RowForm, RowReader, taken_again

MAX_INT_BYTES = 1024
"""Bytes of the longest integer that is read; longer ones Python does not even show in decimal."""
MAX_DIGITS = 2400
_PLAIN_INT = range(-(2**60), 2**60)
"""Integers of which no many have one hash."""
# pickletools imports this codec when a file first has such a text; no file causes an import.
codecs.lookup("raw_unicode_escape")


def parse(data: bytes, where: str, rows: Sequence[RowForm] = ()) -> Pickled:
    """Read a pickle as data. Bytes after its end are not looked at."""
    machine = _Machine()
    try:
        machine.run(data, rows)
        return machine.result(len(data))
    except Exception as error:  # a malformed program may do anything
        raise _not_a_pickle(where, error) from error


def parse_file(file: IO[bytes], where: str) -> Pickled:
    """Read a pickle, but skip its byte strings: each is a `Span`."""
    machine = _Machine()
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        while (code := file.read(1)) != b".":
            if not code:
                raise MalformedError("it ends in the middle")
            read, step = _STEPS[code[0]]
            if code in _BYTES:
                length = int.from_bytes(file.read(_BYTES[code]), "little")
                position = file.tell()
                if position + length > size:
                    raise MalformedError("it ends in the middle")
                file.seek(position + length)
                step(machine, Span(position, length))
            else:
                step(machine, None if read is None else read(file))
        return machine.result(file.tell())
    except RemeshError:
        raise
    except Exception as error:
        raise _not_a_pickle(where, error) from error


def _not_a_pickle(where: str, error: Exception) -> RemeshError:
    return damaged(where, f"not a pickle that can be read ({describe(error)})")


_RENAMED = {"long": "int", "unicode": "str", "xrange": "range"}


class _Machine:
    """A stack, the places of marks in it, and what was put away by number."""

    __slots__ = ("count", "marks", "memo", "memoized", "names", "stack")

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}  # what was put away and may be taken again
        self.count = 0  # how many numbers were put away
        self.memoized = 0  # one past the last number that was put away by counting
        self.names: dict[str, Name] = {}

    def run(self, data: bytes, forms: Sequence[RowForm]) -> None:
        """Go through a pickle until its end."""
        memo, stack, is_taken = self.memo, self.stack, taken_again(data)
        readers = {  # of runs of like objects, by the class of the first one
            form.objects[0][0]: RowReader(form, data, memo, is_taken) for form in forms
        }
        steps, numbers, texts, uint32 = _STEPS, _NUMBERS, _TEXTS, _UINT32.unpack_from
        file, at = io.BytesIO(data), 0
        while True:
            opcode = data[at]
            if opcode == _MEMOIZE:
                number = self.count
                if is_taken[number]:
                    memo[number] = stack[-1]
                self.count = self.memoized = number + 1
                at += 1
                continue
            if opcode == _BINGET:
                stack.append(memo[data[at + 1]])
                at += 2
                continue
            if opcode == _LONG_BINGET:
                stack.append(memo[uint32(data, at + 1)[0]])
                at += 5
                continue
            read, step = steps[opcode]
            at += 1
            if read is None:
                if opcode == _STOP:
                    return
                step(self, None)
                if opcode == _NEWOBJ and stack[-1].name in readers and not stack[-1].args:
                    at = self.read_rows(readers[stack[-1].name], at)
            elif opcode in numbers:
                form = numbers[opcode]
                step(self, form.unpack_from(data, at)[0])
                at += form.size
            elif opcode in texts:
                form = texts[opcode]
                begin = at + form.size
                at = begin + form.unpack_from(data, at)[0]
                if at > len(data):
                    raise MalformedError("it ends in the middle")
                stack.append(str(data[begin:at], "utf-8", "surrogatepass"))
            else:
                file.seek(at)
                step(self, read(file))
                at = file.tell()

    def read_rows(self, reader: RowReader, at: int) -> int:
        """Read the run that a new object on the stack begins, if it begins one."""
        at, count, rows = reader.read(at, self.count)
        if rows is not None:
            self.count = self.memoized = count
            first = self.stack.pop()
            self.stack += [rows] * len(reader.form.objects)
            if rows.is_followed:
                self.stack.append(Record(first.name, (), True))
        return at

    def result(self, num_bytes: int) -> Pickled:
        """What the pickle leaves on the stack."""
        return Pickled(self.stack.pop(), frozenset(self.names), num_bytes)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    # -- the memo -----------------------------------------------------------------------------

    def memoize(self, _: None) -> None:
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

    def dup(self, _: None) -> None:
        self.stack.append(self.stack[-1])

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

    def dict_from_mark(self, _: None) -> None:
        pairs = self.popped()
        self.stack.append({})
        self.set_pairs(pairs)

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

    def object(self, _: None) -> None:
        kind, *args = self.popped()
        self.stack.append(kind)
        self.call(tuple(args), False)

    def instance(self, pair: str) -> None:
        args = self.popped()
        self.global_name(pair)
        self.call(tuple(args), False)

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


def _push_ascii(machine: _Machine, text: str) -> None:
    if not text.isascii():
        raise MalformedError("text of Python 2 that is not ASCII")
    machine.push(text)


def _refuse(what: str) -> Step:
    def step(_machine: _Machine, _: Any) -> None:
        raise MalformedError(what)

    return step


def _ignore(_machine: _Machine, _: Any) -> None:
    """What says nothing about the value."""


def _decimal(file: IO[bytes]) -> int | bool:
    """The number in a line of digits, of which `pickletools` would take any many."""
    line = file.readline(MAX_DIGITS)
    if not line.endswith(b"\n"):
        raise MalformedError("an integer of too many digits, or none")
    if line in {b"00\n", b"01\n"}:
        return line == b"01\n"
    return int(line[:-1].removesuffix(b"L"))


_EXTENSION = _refuse("an extension code, which only its writer knows")
_BUFFER = _refuse("a buffer outside the pickle")
_BYTES = {b"C": 1, b"B": 4, b"\x8e": 8}
"""SHORT_BINBYTES, BINBYTES and BINBYTES8: how many bytes the length of each has."""
_BY_NAME: dict[str, Step] = {
    **dict.fromkeys(("INT", "LONG", "BININT", "BININT1", "BININT2"), _Machine.push),
    **dict.fromkeys(("FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "BINUNICODE8", "BYTEARRAY8"), _Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _Machine.push),
    **dict.fromkeys(("LONG1", "LONG4"), _push_long),
    **dict.fromkeys(("STRING", "SHORT_BINSTRING", "BINSTRING"), _push_ascii),
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
    "LIST": _from_mark(list),
    "FROZENSET": _from_mark(lambda items: Items(items, is_frozen=True)),
    "DICT": _Machine.dict_from_mark,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "ADDITEMS": _Machine.add_items,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.dup,
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": _Machine.global_name,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new_object,
    "NEWOBJ_EX": _Machine.new_object_ex,
    "OBJ": _Machine.object,
    "INST": _Machine.instance,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent_id,
    "PERSID": lambda machine, text: machine.push(PersistentId(text)),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _ignore),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), _EXTENSION),
    **dict.fromkeys(("NEXT_BUFFER", "READONLY_BUFFER"), _BUFFER),
}

Reader = Callable[[IO[bytes]], Any]
_STEPS: list[tuple[Reader | None, Step]] = [
    (None, _refuse("an opcode that there is not")) for _ in range(256)
]
"""What decodes the argument of an opcode, if it has one, and what it does, by its byte."""
for _opcode in pickletools.opcodes:
    _reader = None if _opcode.arg is None else _opcode.arg.reader
    if _opcode.name in {"INT", "LONG", "GET", "PUT"}:
        _reader = _decimal
    _STEPS[ord(_opcode.code)] = _reader, _BY_NAME[_opcode.name]

_MEMOIZE, _BINGET, _LONG_BINGET, _NEWOBJ, _STOP = b"\x94hj\x81."
_UINT32 = struct.Struct("<I")
_NUMBERS = {
    **{code: struct.Struct("<B") for code in b"Kq"},  # BININT1, BINPUT
    **{code: struct.Struct(form) for code, form in zip(b"MJG", ("<H", "<i", ">d"), strict=True)},
    ord("r"): _UINT32,  # LONG_BINPUT
}
"""Opcodes with a number of a fixed size, decoded in place: BININT2, BININT and BINFLOAT too."""
_TEXTS = {0x8C: struct.Struct("<B"), ord("X"): _UINT32}
"""SHORT_BINUNICODE and BINUNICODE: what the length of their text looks like."""
