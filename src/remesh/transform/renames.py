"""Programs: what may be given as a transformation, and the statements that it becomes.

A dict of renames happens all at once, and statements run in order; so a name that is both old and
new is first read into a temporary name.

Prefixes and functions name no single tensor: they are a *rule*, which says nothing until names are
known. Then it becomes what a dict of renames is, old name to new name. A
rule is asked about every name. Optimizer state follows its parameter as it does anywhere, so a
state becomes part of the renames only if the rule changes the name of the state itself (another
name for the optimizer), or if its parameter may be either of two that the rule treats alike (a
model and its moving average).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from remesh.errors import TransformError
from remesh.transform.operators import Operand, Rename
from remesh.transform.optimizer_state import State, find_states, short_name
from remesh.transform.statements import Statement, Statements, parse
from remesh.transform.syntax import NOTHING, Name, Span, shorten
from remesh.transform.wildcards import Step

Rule = Callable[[str], str | None]
"""From an old name to a new one; None if what has the old name is not wanted."""

Program = str | Iterable[str] | Mapping[str, str] | Mapping[str, str | None] | Rule
"""A text of statements, several texts, a dict of renames, or a function from name to name."""

_PLAIN = re.compile("[A-Za-z0-9_.]+")


Renames = Mapping[str, str | None]
"""Old name to new name; None for what is not wanted."""


def read_program(program: Program) -> Statements | Renames | Rule:
    """A program as statements, as renames of plain names, or as a rule."""
    given: Any = program
    if isinstance(given, Mapping):
        return _read_dict(given)
    if callable(given):
        return given  # type: ignore[no-any-return]
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise TransformError(
            "a transformation is a Transform, statements as text, or a dict of renames\nThis is "
            f"of type {type(given).__name__}"
        )
    parsed: list[Statement] = []
    for text in given:
        if not isinstance(text, str):
            raise TransformError(
                f"a list of statements holds texts; {shorten(repr(text))} is of type "
                f"{type(text).__name__}"
            )
        parsed += parse(text, len(parsed) + 1)
    return tuple(parsed)


def _read_dict(renames: Mapping[object, object]) -> Statements | Renames | Rule:
    exact: dict[str, str | None] = {}
    prefixes: dict[str, str | None] = {}
    for old, new in renames.items():
        if not isinstance(old, str) or not (new is None or isinstance(new, str)):
            raise TransformError(
                "this is no dict of renames\n"
                f"It holds names or prefixes and what they become, not {old!r}: {new!r}\n"
                "For a regular expression, write a function: lambda name: pattern.sub(new, name)"
            )
        if old and not old.endswith("."):
            exact[old] = new
        elif new and not new.endswith("."):
            raise TransformError(
                f"{old!r} is a prefix, {new!r} is a name; write {old!r}: {new + '.'!r}"
            )
        else:
            prefixes[old] = new
    for name in (*exact, *exact.values()):
        if name and ("$" in name or "*" in name):
            raise TransformError(
                f"{name!r} has a wildcard, and a dict of renames has none\nWrite a statement or a "
                "function instead"
            )
    if prefixes or None in exact.values():
        return _rule(exact, prefixes)
    check_renames(exact)
    return exact


# ---------------------------------------------------------------------------------------------
# Renames as statements
# ---------------------------------------------------------------------------------------------


def rename_steps(renames: Renames) -> tuple[Step, ...]:
    """The steps of renames, which happen all at once as those of one statement do."""
    in_order = sorted(renames.items(), key=lambda pair: pair[1] is not None)
    steps = []
    for number, (old, new) in enumerate(in_order, 1):
        statement = _rename_statement(number, old, new)
        right = () if new is None else (Operand(new, statement.right[0]),)
        steps.append(Step((Operand(old, statement.left[0]),), right, statement, 0, ()))
    return tuple(steps)


def _rename_statement(number: int, old: str, new: str | None) -> Statement:
    """What a text would say for a rename, or for a deletion."""
    left, source = _written(old, 0)
    right, target = _written(new, len(left) + len(" -> "))
    text = f"{left} -> {right}"
    whole = Span(0, len(text))
    return Statement(number, text, whole, (source,), (target,), Rename(), whole)


def check_renames(renames: Renames) -> None:
    """Refuse names that no statement could write, and two names that become one."""
    old_of: dict[str, str] = {}
    for old, new in renames.items():
        for name in (old, new or ""):
            if ("'" in name and '"' in name) or "\n" in name:
                raise TransformError(
                    f"{name!r} cannot be renamed: it holds both kinds of quotes, or a line break"
                )
        if new is None:
            continue
        if not new:
            raise TransformError(f"{old!r} is renamed to '': a name cannot be empty")
        if new in old_of:
            raise TransformError(f"{old_of[new]!r} and {old!r} are both renamed to {new!r}")
        old_of[new] = old


def rename_statements(renames: Renames) -> Statements:
    """Renames, which happen all at once, as statements, which run in order.

    A name that is both old and new is first read into a temporary name.
    """
    old_of = {new: old for old, new in renames.items() if new is not None}
    reassigned = {old for old in old_of.values() if old_of.get(old, old) != old}
    sources = {old: f"_renamed.{old}" for old in renames if old in reassigned}
    pairs: list[tuple[str, str | None]] = [
        *((old, new) for old, new in renames.items() if new is None),
        *sources.items(),
        *((sources.get(old, old), new) for old, new in renames.items() if new is not None),
    ]
    return tuple(_rename_statement(number, *pair) for number, pair in enumerate(pairs, 1))


def _written(name: str | None, start: int) -> tuple[str, Name]:
    """A name as statements spell it, quoted if it must be, and the name in one, from `start` on."""
    is_quoted = name is not None and (
        not _PLAIN.fullmatch(name) or name.isdigit() or name == NOTHING
    )
    name = NOTHING if name is None else name
    quote = "" if not is_quoted else '"' if "'" in name else "'"
    text = f"{quote}{name}{quote}"
    return text, Name((name,), Span(start, start + len(text)), quoted=is_quoted)


# ---------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------


def _rule(exact: Mapping[str, str | None], prefixes: Mapping[str, str | None]) -> Rule:
    lengths = sorted({len(prefix) for prefix in prefixes}, reverse=True)

    def rename(name: str) -> str | None:
        if name in exact:
            return exact[name]
        for length in lengths:
            if name[:length] in prefixes:
                new = prefixes[name[:length]]
                return None if new is None else new + name[length:]
        return name

    return rename


def renames_among(
    rule: Rule, names: Iterable[str], owners: Mapping[str, str], called: Container[str] = ()
) -> dict[str, str | None]:
    """The names that a rule changes, and what they become; `called` as for `short_name`."""

    @functools.cache
    def renamed(name: str) -> str | None:
        new: object = rule(name)
        if new is None or (isinstance(new, str) and new):
            return new
        raise TransformError(f"{name!r} is renamed to {new!r}, which is no name; None drops it")

    names = list(names)
    states = find_states(names, (), owners)
    found: dict[str, str | None] = {}
    for name in dict.fromkeys([*names, *states.by_parameter]):
        new = renamed(name)
        known = states.by_name.get(name)
        maybe = states.undecided.get(name, ()) if known is None else (known,)
        if new == name and (
            known is not None or all(renamed(one.parameter) == one.parameter for one in maybe)
        ):
            continue
        own = {_state_name(new, renamed(one.parameter), one, called) for one in maybe} or {new}
        # If one owner is renamed and the other is not, the old name stays a source as well.
        changed = own - {name} if None not in own else own
        if len(changed or own) == 1:
            found[name] = (changed or own).pop()
    check_renames(found)
    return found


def _state_name(
    name: str | None, parameter: str | None, state: State, called: Container[str]
) -> str | None:
    """The new name of an optimizer state, which also repeats the new name of its parameter."""
    if name is None or parameter is None:
        return None
    short = state.parameter.removeprefix(state.owner)
    if not name.endswith(short + state.after):
        return name
    before = name[: len(name) - len(short + state.after)]
    new = short_name(state.owner, short, parameter, called) + state.after
    return name if f".{name}".endswith(f".{new}") else before + new
