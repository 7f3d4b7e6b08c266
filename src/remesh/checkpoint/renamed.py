"""What a checkpoint says about names, after a transformation has changed them.

An optimizer stores the names of the parameters of each of its groups, without the prefix that they
have in the state. A transformation that renames, joins or splits parameters changes these names as
it changes those of their states.

The path of a name says where the state has it. A new name has the keys of the old path at its end
and at its beginning, as far as they fit; what is new lies between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from remesh.core.index import Index
from remesh.core.state import Path, cut_name, name_of
from remesh.errors import StateError
from remesh.transform import Resolved, find_states, short_name


def renamed_lists(
    lists: Mapping[str, Sequence[str]],
    index: Index,
    resolved: Resolved,
    owners: Mapping[str, str],
) -> dict[str, list[str]]:
    """The lists of a checkpoint with the names that its tensors have after a transformation.

    A joined parameter stands where the first of its parts stood, parts of one that is split follow
    each other, and a deleted one is left out. If that cannot be told, or parameters of several
    groups are joined, that is a StateError.
    """
    states = find_states(index, (), owners)
    made: dict[str, list[str]] = {}
    sources: dict[str, set[str]] = {}
    for target, info in resolved.targets.items():
        if info is not None:
            sources[target] = set(resolved.sources_of(target))
            for source in sources[target]:
                made.setdefault(source, []).append(target)
    own = {state.before: state.owner for state in states.by_name.values()}
    found = {}
    for name, shorts in lists.items():
        root = name.partition("param_groups.")[0]
        candidates = {owner for before, owner in own.items() if before.startswith(root)}
        owner = candidates.pop() if len(candidates) == 1 else _owner_of(name, shorts, index)
        members = {owner + short for short in shorts}
        new: dict[str, None] = {}
        for short in shorts:
            for target in made.get(owner + short, ()):
                if not sources[target] <= members:
                    other = min(sources[target] - members)
                    raise StateError(
                        f"{name}: {target} is made of {owner + short} and of {other}\n"
                        "The optimizer has them in different groups"
                    )
                new[short_name(owner, short, target)] = None
        found[name] = list(new)
    return found


def renamed_path(name: str, old: Path) -> Path:
    """The path of a new name, of which the old one had a path."""
    head, tail = _common_keys(name, old)
    keys = old[len(old) - tail :]
    text = name[: len(name) - len(name_of(keys))].rstrip(".") if keys else name
    text = f"{text}."[len(name_of((*old[:head], ""))) if head else 0 :].rstrip(".")
    between = old[head : len(old) - tail]
    if not text:
        return (*old[:head], *keys)
    is_key = any("." in key for key in between if isinstance(key, str))
    return (*old[:head], *((text,) if is_key else cut_name(text)), *keys)


def renamed_sequences(
    paths: Mapping[Path, Path], sequences: Iterable[tuple[Path, str]]
) -> dict[Path, str]:
    """The lists and tuples of a state under their new paths, given old path → new path."""
    kinds = dict(sequences)
    found = {}
    for old, new in paths.items():
        for length in range(len(old)):
            kind = kinds.get(old[:length])
            rest = old[length:]
            if kind is not None and new[len(new) - len(rest) :] == rest:
                found[new[: len(new) - len(rest)]] = kind
            elif kind is not None and new[:length] == old[:length]:
                found[new[:length]] = kind
    return found


def _common_keys(name: str, path: Path) -> tuple[int, int]:
    """How many keys at the beginning and at the end of a path a name has as well."""
    tail = 0
    while tail < len(path) and f".{name}".endswith(name_of(("", *path[len(path) - tail - 1 :]))):
        tail += 1
    rest = name[: len(name) - len(name_of(path[len(path) - tail :]))] if tail else f"{name}."
    head = 0
    while head < len(path) - tail and rest.startswith(name_of((*path[: head + 1], ""))):
        head += 1
    return head, tail


def _owner_of(name: str, shorts: Iterable[str], index: Index) -> str:
    """The prefix of the names of a list, of an optimizer that has no state yet."""
    found = {
        stored.removesuffix(short)
        for short in shorts
        for stored in index
        if stored == short or stored.endswith(f".{short}")
    }
    if len(found) == 1:
        return found.pop()
    raise StateError(
        f"{name}: a list of parameters that the transformation changes\n"
        "Which they are is not known. Delete the optimizer, or load the checkpoint with "
        "the transformation and save it again."
    )
