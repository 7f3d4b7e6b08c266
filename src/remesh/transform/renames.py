"""Renames that name no single tensor: prefixes, regular expressions and functions.

They say nothing until names are known. Then they become what a dict of renames is, old name to new
name, and so statements (`parser.rename_statements`).

A rule is asked about every name. Optimizer state follows its parameter as it does anywhere, so a
state becomes part of the renames only if the rule changes the name of the state itself (another
name for the optimizer), or if its parameter may be either of two that the rule treats alike (a
model and its moving average).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from remesh.errors import TransformError
from remesh.transform.optimizer_state import State, find_states, short_name

Rename = Callable[[str], str | None]
"""From an old name to a new one; None if what has the old name is not wanted."""


def rename_of(program: object) -> Rename | None:
    """The rule that a program is; None if it is statements or a dict of single names."""
    if isinstance(program, Mapping):
        return _rename_of_dict(program)
    return program if callable(program) else None


def _rename_of_dict(renames: Mapping[object, object]) -> Rename | None:
    exact: dict[str, str | None] = {}
    prefixes: dict[str, str | None] = {}
    patterns: list[tuple[re.Pattern[str], str]] = []
    for old, new in renames.items():
        if isinstance(old, re.Pattern) and isinstance(old.pattern, str) and isinstance(new, str):
            patterns.append((old, new))
        elif not isinstance(old, str) or not (new is None or isinstance(new, str)):
            raise TransformError(
                "this is no dict of renames\n"
                "It holds names, prefixes or regular expressions and what they become, not "
                f"{old!r}: {new!r}"
            )
        elif old and not old.endswith("."):
            exact[old] = new
        elif new and not new.endswith("."):
            raise TransformError(
                f"{old!r} is a prefix, {new!r} is a name; write {old!r}: {new + '.'!r}"
            )
        else:
            prefixes[old] = new
    if not prefixes and not patterns and None not in exact.values():
        return None
    for old in exact:
        if "$" in old:
            raise TransformError(
                f"{old!r} has a placeholder, which stands in no dict with prefixes, regular "
                "expressions or None\nWrite a regular expression instead"
            )
    return _rule(exact, prefixes, patterns)


def _rule(
    exact: Mapping[str, str | None],
    prefixes: Mapping[str, str | None],
    patterns: Sequence[tuple[re.Pattern[str], str]],
) -> Rename:
    lengths = sorted({len(prefix) for prefix in prefixes}, reverse=True)

    def rename(name: str) -> str | None:
        if name in exact:
            return exact[name]
        for length in lengths:
            if name[:length] in prefixes:
                new = prefixes[name[:length]]
                return None if new is None else new + name[length:]
        for pattern, replacement in patterns:
            renamed, count = pattern.subn(replacement, name)
            if count:
                return renamed
        return name

    return rename


def renames_among(
    rename: Rename, names: Iterable[str], owners: Mapping[str, str]
) -> dict[str, str | None]:
    """The names that a rule changes, and what they become."""
    names = list(names)
    states = find_states(names, (), owners)
    found: dict[str, str | None] = {}
    for name in dict.fromkeys([*names, *states.by_parameter]):
        new = _renamed(rename, name)
        known = states.by_name.get(name)
        maybe = states.undecided.get(name, ()) if known is None else (known,)
        if not maybe:
            if new != name:
                found[name] = new
            continue
        is_touched = any(_renamed(rename, state.parameter) != state.parameter for state in maybe)
        if new != name or (known is None and is_touched):
            own = {_state_name(rename, new, state) for state in maybe}
            # If one owner is renamed and the other is not, the old name stays a source as well.
            changed = own - {name} if None not in own else own
            if len(changed or own) == 1:
                found[name] = (changed or own).pop()
    return found


def _renamed(rename: Rename, name: str) -> str | None:
    new: object = rename(name)
    if new is None or (isinstance(new, str) and new):
        return new
    raise TransformError(f"{name!r} is renamed to {new!r}, which is no name; None drops it")


def _state_name(rename: Rename, name: str | None, state: State) -> str | None:
    """The new name of an optimizer state, which also repeats the new name of its parameter."""
    parameter = _renamed(rename, state.parameter)
    if name is None or parameter is None:
        return None
    short = state.parameter.removeprefix(state.owner)
    if not name.endswith(short + state.after):
        return name
    before = name[: len(name) - len(short + state.after)]
    return before + short_name(state.owner, short, parameter) + state.after
