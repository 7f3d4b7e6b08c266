"""Names for optimizer state that other programs stored without them, or in another form.

remesh stores the state of an optimizer by the names of parameters: `state.<parameter>.<key>`,
`param_groups.<group>.<option>`, and the names in each group as a list. Others store

* what `optimizer.state_dict()` gives, with numbers for parameters: `state.0.exp_avg`, and
  `params = [0, 1]` in each group. Whole (`torch.save`) or taken apart (DCP);
* what `get_optimizer_state_dict` gives, with names, in one value (`torch.save`);
* the same flattened: `state.<parameter>.exp_avg` and `param_groups.<parameter>.lr`.

A number is the place of a parameter in the groups of the optimizer. The optimizer of the state that
is loaded into has the same groups, in the same order, and the model beside it has the names. So
numbers get the names that stand in their place. The stored state, seen by these names, is what is
then matched and loaded like any other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec

from remesh.checkpoint.local import describe_local
from remesh.checkpoint.stored import StoredState
from remesh.checkpoint.transformed import renamed_sequences
from remesh.core import values
from remesh.core.index import Index
from remesh.core.state import Description, Path, name_of
from remesh.errors import MismatchError
from remesh.exchange import Exchange, run_on_all

_GROUPS = "param_groups"
_NO_OPTIONS = frozenset({"params", "param_names"})


class LiveOptimizer(msgspec.Struct, frozen=True):
    """An optimizer of the state that is loaded into."""

    path: list[str | int]  # its place in the state
    groups: list[list[str]]  # names of the parameters of each group, in order
    shapes: dict[str, list[int]]  # shapes of the parameters, as far as they are known
    is_shared: bool = True  # whether all ranks that have it have these parameters

    @property
    def name(self) -> str:
        return name_of(tuple(self.path))


def with_parameter_names(
    exchange: Exchange, state: Any, stored: StoredState, *, is_transformed: bool
) -> StoredState:
    """The stored state, by the names that the optimizers of a state have for it. Collective.

    The state has the modules whose parameters are optimized. `is_transformed` says whether
    parameters may be stored under other names than the state has.

    A stored optimizer belongs to the one of its name; the only one that is left over, to the only
    one of the state that is left over, for a transformation may rename it.
    """
    lists = stored.document.lists
    roots = [root for root in _roots(stored) if _list_name(root) not in lists]
    if not roots:
        return stored
    replies = run_on_all(
        exchange, lambda: msgspec.msgpack.encode(live_optimizers(describe_local(state)))
    )
    live = _united([msgspec.msgpack.decode(reply, type=list[LiveOptimizer]) for reply in replies])
    if is_transformed:
        _refuse_other_names(stored, [live[root] for root in roots if root in live])
    rest = [root for root in roots if root not in live]
    others = [name for name in live if name not in roots and _list_name(name) not in lists]
    pairs = {root: root for root in roots if root in live}
    if len(rest) == len(others) == 1:
        pairs[rest[0]] = others[0]
    for root, name in pairs.items():
        stored = _Renaming(stored, root, live[name]).result()
    return stored


def _roots(stored: StoredState) -> list[str]:
    """The places of the optimizers of which something is stored that is no tensor."""
    cut = (f".{name}.".partition(f".{_GROUPS}.") for name in stored.document.values)
    return list(dict.fromkeys(root[1:] for root, groups, _ in cut if groups))


def _list_name(root: str) -> str:
    """The name of the first list of names of an optimizer, which has one if it has any."""
    return _below(root, f"{_GROUPS}.0.params")


def _refuse_other_names(stored: StoredState, optimizers: Sequence[LiveOptimizer]) -> None:
    """Refuse parameters that a transformation renames: their state would not follow."""
    known = {ending for name in stored.index for ending in _endings(name)}
    for one in optimizers:
        for name in (name for group in one.groups for name in group if name not in known):
            raise _misfit(
                stored,
                f"{one.name}: the transformation makes {name}, whose state has no name",
                "Load it without a transformation into the model that was saved, save that with "
                "remesh, and transform what was saved then",
            )


def _misfit(stored: StoredState, problem: str, remedy: str) -> MismatchError:
    return MismatchError(
        f"the optimizer in {stored.url} does not fit (nothing was changed)\n{problem}\n{remedy}.",
        conflicts=(problem,),
    )


def _endings(name: str) -> Iterator[str]:
    """A name without its first keys: all, one less, and so on."""
    keys = name.split(".")
    return (".".join(keys[start:]) for start in range(len(keys)))


def live_optimizers(description: Description) -> list[LiveOptimizer]:
    """The optimizers of a state."""
    shapes: dict[str, list[int]] = {}
    for entry in description.tensors:
        for ending in _endings(entry.name):
            shapes.setdefault(ending, list(entry.global_shape))
    groups: dict[Path, dict[int, list[str]]] = {}
    for name, items in description.merged_lists.items():
        *path, key, number, _ = description.paths[name]
        if key == _GROUPS and isinstance(number, int):
            groups.setdefault(tuple(path), {})[number] = items
    return [
        LiveOptimizer(
            list(path),
            [found[number] for number in sorted(found)],
            {name: shapes[name] for items in found.values() for name in items if name in shapes},
        )
        for path, found in groups.items()
    ]


def _united(found: Sequence[Sequence[LiveOptimizer]]) -> dict[str, LiveOptimizer]:
    """The optimizers of all ranks by name."""
    united: dict[str, LiveOptimizer] = {}
    for one in (one for of_rank in found for one in of_rank):
        known = united.setdefault(one.name, one)
        if known.groups != one.groups:
            pairs = zip_longest(known.groups, one.groups, fillvalue=())
            both = [list(dict.fromkeys([*a, *b])) for a, b in pairs]
            united[one.name] = LiveOptimizer(one.path, both, known.shapes | one.shapes, False)
    return united


@dataclass(slots=True)
class _Renaming:
    """One stored optimizer while it gets its names."""

    stored: StoredState  # what is stored
    root: str  # the stored name of the optimizer
    live: LiveOptimizer  # the optimizer of the state
    moved: dict[str, Path] = field(default_factory=dict)  # tensors and values → their new paths
    made: dict[Path, object] = field(default_factory=dict)  # new values
    lists: dict[Path, list[str]] = field(default_factory=dict)  # new lists
    dropped: set[str] = field(default_factory=set)  # values that stand in others

    def result(self) -> StoredState:
        """The stored state, by the names of the state."""
        groups, names = self._groups(), dict[str, str]()
        if groups is None:
            self._name_flattened()
        else:
            names = self._names_of(groups)
            self._add_groups(groups, names)
        sequences = self._name_states(names)
        old = self.stored.document
        new = {name: name_of(path) for name, path in self.moved.items()}
        kept = {name: raw for name, raw in old.values.items() if name not in self.dropped}
        raw = {new.get(name, name): value for name, value in kept.items()}
        for path, value in self.made.items():
            raw[name_of(path)] = msgspec.Raw(values.encode_read(value, name_of(path)))
        document = msgspec.structs.replace(
            old,
            values=raw,
            lists=old.lists | {name_of(path): names for path, names in self.lists.items()},
            paths={name: path for name, path in old.paths.items() if name not in self.moved},
            sequences=[
                *old.sequences,
                *((list(path), kind) for path, kind in sequences.items()),
                ([*self._path, _GROUPS], "list"),
            ],
            unchecked=[new.get(name, name) for name in old.unchecked_names] or msgspec.UNSET,
        )
        for path in (*self.moved.values(), *self.made, *self.lists):
            document.set_path(name_of(path), path)
        index = _with_names(self.stored.index, new)
        if len(index) + len(raw) != len({*index, *raw}):
            raise self._error("it is stored in two forms at once", "Remove one of them")
        return dataclasses.replace(self.stored, index=index, document=document)

    @property
    def _path(self) -> Path:
        """The place of the optimizer in what was stored."""
        return tuple(self.live.path if self.root == self.live.name else self.root.split("."))

    def _below(self, name: str) -> Iterator[tuple[str, str]]:
        """Stored names of tensors and values below an entry of the optimizer, whole and cut."""
        prefix = _below(self.root, f"{name}.")
        for full in (*self.stored.index, *self.stored.document.values):
            if full.startswith(prefix):
                yield full, full.removeprefix(prefix)

    def _groups(self) -> list[dict[str, Any]] | None:
        """The groups, if they have lists of parameters; only those if they are taken apart."""
        whole, stored = _below(self.root, _GROUPS), self.stored.document.values
        if whole in stored:
            self.dropped.add(whole)
            groups = self.stored.value(whole)
            if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
                return groups
            raise self._error("its groups of parameters are not a list of dicts")
        found: list[dict[str, Any]] = []
        while f"{whole}.{len(found)}.params" in stored:
            names = {key: f"{whole}.{len(found)}.{key}" for key in _NO_OPTIONS}
            self.dropped.update(names.values())
            found.append(
                {k: self.stored.value(name) for k, name in names.items() if name in stored}
            )
        return found or None

    def _names_of(self, groups: list[dict[str, Any]]) -> dict[str, str]:
        """The name of each parameter in stored groups, by what it is called there."""
        called = [list(group.get("params", ())) for group in groups]
        flat = [one for group in called for one in group]
        if all(isinstance(one, str) for one in flat):
            return {one: one for one in flat}
        own = [name for group in groups for name in group.get("param_names") or ()]
        live = [name for group in self.live.groups for name in group]
        if len(own) == len(flat) and set(own) == set(live):
            return {str(one): name for one, name in zip(flat, own, strict=True)}
        sizes, wanted = [len(g) for g in called], [len(g) for g in self.live.groups]
        if not self.live.is_shared:
            raise self._error(
                "it numbers parameters, and ranks of the state optimize different ones",
                "Load it with ranks that all have the whole model, and save it again",
            )
        if sizes != wanted or len(set(map(str, flat))) != len(flat):
            raise self._error(
                f"it has {_counted(sizes)}, the optimizer of the state has {_counted(wanted)}",
                "Numbers get their names from the model and the optimizer that are loaded with "
                "them. Pass the model that was trained, and an optimizer over its parameters with "
                "the groups that the saved one had, in their order",
            )
        names = {str(one): name for one, name in zip(flat, live, strict=True)}
        self._check_order(names)
        return names

    def _check_order(self, names: Mapping[str, str]) -> None:
        """Compare shapes of state with those of parameters, where state has such shapes."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for full, rest in self._below("state"):
            number, _, key = rest.partition(".")
            tensor = self.stored.tensor(full)
            if tensor is not None and names.get(number) in self.live.shapes:
                shapes.setdefault(key, {})[number] = tensor[1]
        for key, found in shapes.items():
            wanted = {number: tuple(self.live.shapes[names[number]]) for number in found}
            if found != wanted and Counter(found.values()) == Counter(wanted.values()):
                number = next(one for one in found if found[one] != wanted[one])
                raise self._error(
                    f"its parameter {number} has {key} of shape {found[number]}, "
                    f"{names[number]} has {wanted[number]}",
                    "The parameters come in another order. Construct the optimizer over them in "
                    "the order in which they were saved",
                )

    def _add_groups(self, groups: list[dict[str, Any]], names: Mapping[str, str]) -> None:
        """Add the list of names of each group, and options that were not taken apart."""
        for number, group in enumerate(groups):
            path = (*self._path, _GROUPS, number)
            self.lists[*path, "params"] = [names[str(one)] for one in group.get("params", ())]
            for option, value in group.items():
                if option not in _NO_OPTIONS:
                    self.made[*path, option] = value

    def _name_flattened(self) -> None:
        """Give each group the options of its parameters, which must be the same."""
        options: dict[str, dict[str, str]] = {}
        for full, rest in self._below(_GROUPS):
            owner, _, option = rest.rpartition(".")
            options.setdefault(owner, {})[option] = full
        raw = self.stored.document.values
        for number, group in enumerate(self.live.groups):
            path = (*self._path, _GROUPS, number)
            members = [name for name in group if name in options]
            self.lists[*path, "params"] = members
            for option, first in options[members[0]].items() if members else ():
                self.moved[first] = (*path, option)
                others = [options[name].get(option, "") for name in members[1:]]
                for other in (one for one in others if first in raw and one in raw):
                    if bytes(raw[first]) != bytes(raw[other]):
                        raise self._error(
                            f"{first} and {other} differ",
                            f"One group of the optimizer has one {option}. Split the group as it "
                            "was saved",
                        )
                    self.dropped.add(other)

    def _name_states(self, names: Mapping[str, str]) -> dict[Path, str]:
        """Name each state by its parameter, as one key; returns the lists and tuples in them."""
        known = {name: name for group in self.live.groups for name in group} | dict(names)
        paths: dict[Path, Path] = {}
        for full, rest in self._below("state"):
            keys, old = rest.split("."), self.stored.document.path_of(full)
            for end in range(len(keys) - 1, 0, -1):
                name = known.get(".".join(keys[:end]))
                if name is not None:
                    tail = old[end - len(keys) :]  # where items of lists have numbers
                    is_same = name_of(tail) == ".".join(keys[end:])
                    paths[old] = (*self._path, "state", name, *(tail if is_same else keys[end:]))
                    self.moved[full] = paths[old]
                    break
        return renamed_sequences(paths, self.stored.sequences.items())

    def _error(
        self, problem: str, remedy: str = "Load the state without the optimizer"
    ) -> MismatchError:
        return _misfit(self.stored, f"{self.root}: {problem}", remedy)


def _with_names(index: Index, renamed: Mapping[str, str]) -> Index:
    """An index with other names."""
    names = tuple(renamed.get(name, name) for name in index.tensors.names)
    aliases = {renamed.get(a, a): renamed.get(name, name) for a, name in index.aliases.items()}
    tensors = dataclasses.replace(index.tensors, names=names)
    return dataclasses.replace(index, tensors=tensors, aliases=aliases)


def _below(root: str, name: str) -> str:
    return f"{root}.{name}" if root else name


def _counted(sizes: Sequence[int]) -> str:
    """`groups of 2 and 3 parameters`."""
    if len(sizes) == 1:
        return f"one group of {sizes[0]} parameters"
    return f"groups of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} parameters"
