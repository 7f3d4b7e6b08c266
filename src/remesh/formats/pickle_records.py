"""What a pickle says, as data: the names, calls and objects in one, with nothing behind them.

`pickle_reader` makes these of a pickle, and `pickle_writer` makes a pickle of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Name:
    """A class, function or constant that a pickle names: the name, with nothing behind it."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full = full  # module and name, joined by a dot


class Record:
    """An object that a pickle describes: what makes it, and what it is given afterwards."""

    __slots__ = ("args", "is_new", "items", "kwargs", "name", "pairs", "state")

    def __init__(
        self, name: str, args: tuple[Any, ...] = (), is_new: bool = False, state: Any = None
    ) -> None:
        self.name = name  # qualified, of the class or function
        self.args = args
        self.is_new = is_new  # a class is made without being called (`__new__` alone)
        self.kwargs: dict[Any, Any] | None = None  # of `__new__`
        self.state = state
        self.items: list[Any] | None = None  # appended to it
        self.pairs: dict[Any, Any] | None = None  # set in it by key

    def field(self, name: str) -> Any:
        """An attribute of the object, by its state; None if it has none of this name."""
        return self.state.get(name) if type(self.state) is dict else None


class PersistentId:
    """Something outside the pickle, by its id."""

    __slots__ = ("pid",)

    def __init__(self, pid: Any) -> None:
        self.pid = pid


class Key:
    """A key of a dict that is not hashed before it is known to be harmless."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


class Items:
    """A set, as the list of what was added to it."""

    __slots__ = ("is_frozen", "items")

    def __init__(self, items: list[Any], is_frozen: bool) -> None:
        self.items = items
        self.is_frozen = is_frozen


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Like objects as columns (`RowForm`), in place of many items or many keys and values."""

    form: object  # what they are
    columns: list[list[Any]]  # the values of their fields
    count: int  # how many there are
    is_followed: bool  # whether the pickle has begun one more


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a pickle that were not read."""

    position: int  # byte of the file at which they begin
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Pickled:
    """The value that a pickle describes."""

    root: Any
    """None, booleans, numbers, text, bytes, lists, tuples, dicts, and the classes above. Parts that
    the pickle shares are shared here, and may hold themselves. `Rows` and `Span` are in it only
    where the caller of the reader has asked for them."""
    names: frozenset[str]  # all names in it
    num_bytes: int  # length of the pickle


class MalformedError(ValueError):
    """It is not a valid pickle."""


def describe(error: Exception) -> str:
    """An error in a few words, however much of a file it quotes."""
    text = str(error)
    return (
        text[:80] if isinstance(error, MalformedError) else f"{type(error).__name__}: {text[:60]}"
    )
