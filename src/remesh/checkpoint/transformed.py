"""Loading through a transformation.

The state is compared with what the stored tensors become, not with what they are. Two things make
that work:

* The state is walked twice. First as it is, which tells the parameters; then it is shown the
  outputs of the transformation as if they were stored (`TransformedState`), from which an
  optimizer without state learns which states there will be.
* The transformation is resolved against the targets of all ranks, for wildcards and fused layouts
  depend on all of them. For each box that this rank holds it names regions of stored tensors
  (`remesh.checkpoint.match`).

Names that no statement touches are treated as without a transformation.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from remesh.checkpoint.local import describe_local
from remesh.checkpoint.local_boxes import BoxesMessage, decode_local_boxes, encode_local_boxes
from remesh.checkpoint.stored import StoredState
from remesh.core.index import Index
from remesh.core.state import Description, Path, cut_name, name_of
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import MismatchError, StateError
from remesh.exchange import Exchange, run_each, run_on_all
from remesh.planner.saving import merge_tensors, widen
from remesh.transform import (
    Resolved,
    TensorInfo,
    Transform,
    find_states,
    infos_of,
    infos_of_boxes,
    short_name,
)
from remesh.transform.optimizer_state import SLOTS, ending_in

Infos = Mapping[str, TensorInfo | None]
_Table = tuple[BoxesMessage, list[str], list[str]]


@dataclass(slots=True, eq=False)
class TransformedState:
    """The stored state as a transformation makes it, by the names of its outputs."""

    stored: StoredState  # what is really stored
    transform: Transform
    """The transformation. What it renames by a rule, it renames also where no statement can name
    it: lists of names and containers."""
    outputs: Resolved  # what it makes and leaves over
    resolved: Resolved  # the transformation, resolved against the targets of all ranks
    called: Container[str]  # what the optimizers of all ranks call their parameters
    sequences: Mapping[Path, str] = field(init=False)
    _lists: dict[str, str] = field(init=False)
    _made: list[str] = field(init=False)
    _members: dict[str, list[str]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        untouched, rename = self.outputs.untouched, self.transform.rename or str
        self._made = sorted(name for name in self.outputs.targets if name not in untouched)
        lists = self.stored.document.lists
        self._lists = {new: name for name in lists if (new := rename(name))}
        self.sequences = {
            renamed_path(new, path): kind
            for path, kind in self.stored.sequences.items()
            if (new := rename(name_of(path)))
        }

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        info = self.outputs.targets.get(name)
        if info is None:
            return None
        # A target that no statement touches may have another shape than what is stored.
        found = self.stored.tensor(name) if name in self.outputs.untouched else None
        return info.dtype, info.shape if found is None else found[1]

    def has_value(self, name: str) -> bool:
        holder = self.stored.holder_of(name)
        if holder != name:
            return holder in self.outputs.untouched
        is_value = name in self.outputs.targets and self.outputs.targets[name] is None
        has_source = name not in self.outputs.missing and name not in self.outputs.kept
        return (is_value and has_source) or name in self.stored.document.lists

    def value(self, name: str) -> object:
        """The value that is made or stored under a name."""
        sources = self.resolved.sources_of(name) or (name,)
        found = [self.stored.value(source) for source in sources]
        if any(value != found[0] for value in found[1:]):
            raise MismatchError(f"{name}: {', '.join(sources)} must hold one value, but differ")
        return found[0]

    def read_for(self, names: Iterable[str]) -> set[str]:
        """The stored names that some names of a state stand for, and those that are deleted.

        What is stored under a name that is made of others is not among them.
        """
        plans, read = self.resolved.plans, set(self.resolved.deleted)
        for name in names:
            read.update(plans[name].sources if name in plans else [self._lists.get(name, name)])
        return read

    def merged_list(self, name: str) -> list[str] | None:
        """See `Stored.merged_list`; a made parameter is in the group of what it is made of."""
        if self._members is None:
            self._members = self._all_members()
        return self._members.get(name)

    def _all_members(self) -> dict[str, list[str]]:
        """The names in each list. A stored name stays in its list unless something else is made."""
        homes: dict[tuple[str, ...], dict[str, str]] = {}  # of each optimizer: list of each name
        for new, old in self._lists.items():
            roots = tuple(f"{one.partition('.param_groups.')[0]}.state." for one in (new, old))
            homes.setdefault(roots, {}).update(dict.fromkeys(self.stored.document.lists[old], new))
        members: dict[str, list[str]] = {name: [] for name in self._lists}
        for (new_root, old_root), home in homes.items():
            lists: dict[str, set[str]] = {short: set() for short in home}
            for made in self._made:
                sources = self.outputs.sources_of(made)
                if made.startswith(new_root):
                    owners = {one.removeprefix(old_root).rpartition(".")[0] for one in sources}
                    name = made.removeprefix(new_root).rpartition(".")[0]
                else:  # also a parameter without state, which is frozen or was not stepped yet
                    owners = {ending_in(home, source) for source in sources}
                    owner = ending_in(home, sources[0]) if sources else ""
                    prefix = sources[0].removesuffix(owner) if owner else ""
                    name = short_name(prefix, owner, made, self.called)
                for place in (home[o] for o in owners if o in home and "" not in owners):
                    lists.setdefault(name, set()).add(place)
            for short, found in lists.items():
                for name in found or {home[short]}:
                    members[name].append(short)
        return members

    def under(self, path: Path) -> list[tuple[Path, str]]:
        """See `Stored.under`; of a made name only the part up to `path` has a known path."""
        found = [
            (full, name)
            for full, name in self.stored.under(path)
            if self.stored.holder_of(name) in self.outputs.untouched
            or self._lists.get(name) == name
        ]
        found += [
            (renamed_path(new, self.stored.document.path_of(name)), new)
            for new, name in self._lists.items()
            if new != name and new.startswith(name_of((*path, "")))
        ]
        prefix = name_of(path) + "." if path else ""
        for place in range(bisect_left(self._made, prefix), len(self._made)):
            name = self._made[place]
            if not name.startswith(prefix):
                break
            found.append(((*path, *name.removeprefix(prefix).split(".")), name))
        return found


def describe_transformed(
    exchange: Exchange,
    state: Any,
    stored: StoredState,
    transform: Transform,
    *,
    cast: bool,
) -> tuple[Description, TransformedState]:
    """Describe this rank's state as the target of a load through a transformation. Collective.

    Returns the description, and what the transformation makes, resolved against the targets of all
    ranks.
    """
    described: list[tuple[Description, TransformedState]] = []

    def resolve(bound: Transform, *, with_outputs: bool) -> Resolved:
        return bound.resolve(
            {**infos_of(stored.index), **dict.fromkeys(stored.document.values)},
            _targets(tables),
            aliases=stored.index.aliases,
            cast=cast,
            with_outputs=with_outputs,
            called=called,
        )

    def describe_again() -> bytes:
        """Optimizers now get the states that are made for them."""
        bound = transform.bind([*stored.index, *stored.document.values], called=called)
        outputs = resolve(bound, with_outputs=True)
        names = TransformedState(stored, bound, outputs, outputs, called)
        described.append((describe_local(state, names, stored.rank), names))
        return _table_of(described[0][0])

    tables = run_on_all(exchange, lambda: _table_of(describe_local(state)))
    listed = (msgspec.msgpack.decode(table, type=_Table)[2] for table in tables)
    called = frozenset(name for names in listed for name in names)
    tables = run_on_all(exchange, describe_again)
    [(description, names)] = described
    resolved = run_each(exchange, lambda: resolve(names.transform, with_outputs=False))
    return description, dataclasses.replace(names, resolved=resolved)


def _table_of(description: Description) -> bytes:
    """The tensors, boxes, values and listed names of a description, for the two that follow."""
    tensors = {e.name: (e.name, e.dtype, e.global_shape) for e in description.tensors}
    rows = {name: row for row, name in enumerate(tensors)}
    boxes = [(rows[entry.name], part.box) for entry in description.tensors for part in entry.parts]
    table = BoxTable.of(TensorTable.of(list(tensors.values())), boxes)
    listed = [name for names in description.merged_lists.values() for name in names]
    boxes_of_rank = encode_local_boxes(table, np.zeros(len(table), np.int64))
    return msgspec.msgpack.encode((boxes_of_rank, list(description.values), listed))


def _targets(replies: list[bytes]) -> Infos:
    """The targets of all ranks, with how they are cut."""
    found = [msgspec.msgpack.decode(reply, type=_Table) for reply in replies]
    names = [name for _, values, _ in found for name in values]
    tables = [held.boxes for held in decode_local_boxes([boxes for boxes, *_ in found])]
    tensors, renumber = merge_tensors([table.tensors for table in tables])
    num_dims = tensors.shapes.shape[1]
    tensor = [to_new[table.tensor] for table, to_new in zip(tables, renumber, strict=True)]
    offsets = [widen(table.offsets, num_dims, 0) for table in tables]
    infos = infos_of_boxes(tensors, np.concatenate(tensor), np.concatenate(offsets))
    return {**dict.fromkeys(names), **dict(zip(tensors.names, infos, strict=True))}


# ---------------------------------------------------------------------------------------------
# Names and paths of what is not a tensor
# ---------------------------------------------------------------------------------------------
#
# An optimizer stores the names of the parameters of each of its groups, without the prefix that
# they have in the state. A transformation that renames, joins or splits parameters changes these
# names as it changes those of their states.
#
# The path of a name says where the state has it. A new name has the keys of the old path at its end
# and at its beginning, as far as they fit; what is new lies between.


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
    states = find_states([*index, *lists], (), owners)
    made: dict[str, list[str]] = {}
    sources: dict[str, set[str]] = {}
    for target, info in resolved.targets.items():
        if info is not None:
            # A tied weight is in the groups under the first of its names.
            sources[target] = {index.aliases.get(n, n) for n in resolved.sources_of(target)}
            for source in sources[target]:
                made.setdefault(source, []).append(target)
    own = {state.before: state.owner for state in states.by_name.values()}
    found = {}
    for name, shorts in lists.items():
        root = name.partition("param_groups.")[0]
        candidates = {owner for before, owner in own.items() if before.startswith(root)}
        owner = candidates.pop() if len(candidates) == 1 else _owner_of(name, shorts, index)
        members = {short: index.aliases.get(owner + short, owner + short) for short in shorts}
        root += "state."
        has_state = {
            target.removeprefix(root).rpartition(".")[0]
            for target in resolved.targets
            if target.startswith(root)
        }
        new: dict[str, None] = {}
        for short, source in members.items():
            targets = made.get(source, [])
            tied = [target for target in targets if resolved.is_whole(target)]
            first = min(tied, key=lambda one: one in index.aliases, default="")
            copied = resolved.sources_of(first)  # of it, others are copies and no ties
            for target in targets:
                is_tied = target in tied and resolved.sources_of(target) != copied
                if is_tied and short_name(owner, short, target) not in has_state:
                    continue  # the optimizer knows a tied weight by one name
                others = sources[target].difference(members.values())
                if others:
                    raise StateError(
                        f"{name}: {target} is made of {source} and of {min(others)}\n"
                        "The optimizer has them in different groups"
                    )
                new[short_name(owner, short, target)] = None
        found[name] = list(new)
    return found


def renamed_path(name: str, old: Path) -> Path:
    """The path of a new name, of which the old one had a path."""
    head, tail = _common_keys(name, old)
    at = max((n for n, key in enumerate(old[:-2], 1) if key == "state"), default=0)
    start, place = name_of((*old[:at], "")), old[:at]
    if at and ".state." in name and not name.startswith(start):  # the optimizer has a new place
        start = name[: name.index(".state.") + len(".state.")]
        place = cut_name(start[:-1])
    if at and tail and name.startswith(start) and str(old[at]) not in SLOTS:
        # What an optimizer calls a parameter is one key, whatever dots it has.
        keys = old[max(len(old) - tail, at + 1) :]
        return (*place, name[len(start) : len(name) - len(name_of(("", *keys)))], *keys)
    keys = old[len(old) - tail :]
    text = name[: len(name) - len(name_of(keys))].rstrip(".") if keys else name
    text = f"{text}."[len(name_of((*old[:head], ""))) if head else 0 :].rstrip(".")
    between = old[head : len(old) - tail]
    if not text:
        return (*old[:head], *keys)
    if head and not between and "." in name_of(keys[:1]):
        return (*old[:head], f"{text}.{keys[0]}", *keys[1:])
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
    fitting = [
        {stored.removesuffix(short) for stored in index if f".{stored}".endswith(f".{short}")}
        for short in shorts
    ]
    found = set.intersection(*filter(None, fitting)) if any(fitting) else set()
    if len(found) == 1:
        return found.pop()
    raise StateError(
        f"{name}: a list of parameters that the transformation changes\n"
        "Which they are is not known. Delete the optimizer, or load the checkpoint with "
        "the transformation and save it again."
    )
