"""What a transformation makes of all names, given what it makes of some of each kind.

See `remesh.transform.numbered`. Plans are made when they are asked for: that of the name that
stands for a target, with the numbers of the target put back into the names of sources.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from remesh.geometry import IntArray
from remesh.transform.numbered import Sample, may_be_numbered
from remesh.transform.renames import Renames
from remesh.transform.resolved import Plan, Resolved
from remesh.transform.tensor_info import Infos

_MAX_RECENT = 256


@dataclass(frozen=True, slots=True, eq=False)
class Plans(Mapping[str, Plan]):
    """The plans of all targets; a few that were asked for last are remembered.

    Attributes:
        sample: The names that stand for all.
        few: Their plans.
        targets: All targets.
        kept: Targets without a plan.
    """

    sample: Sample
    few: Mapping[str, Plan]
    targets: Infos
    kept: Collection[str]
    _recent: dict[str, Plan] = field(init=False, repr=False, default_factory=dict)

    def __getitem__(self, name: str) -> Plan:
        plan = self._recent.get(name)
        if plan is None:
            if name not in self:
                raise KeyError(name)
            if len(self._recent) >= _MAX_RECENT:
                self._recent.clear()
            plan = self._recent[name] = self._plan(name)
        return plan

    def _plan(self, name: str) -> Plan:
        first, own = self.sample.stand_in_of(name)
        plan = self.few[first]
        if first == name:
            return plan
        renamed = {source: self.sample.own_name(source, own) for source in plan.sources}
        return Plan(tuple(renamed.values()), plan.node, plan.states, plan.dtype, renamed)

    def __contains__(self, name: object) -> bool:
        return name in self.targets and name not in self.kept

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.targets if name not in self.kept)

    def __len__(self) -> int:
        return len(self.targets) - len(self.kept)


def expanded(
    found: Resolved,
    kept: Mapping[str, tuple[str, str]],
    sample: Sample,
    sources: Infos,
    targets: Infos,
    *,
    renames: Renames,
    order: Iterable[str],
) -> Resolved | None:
    """A transformation of all names; None if names of different numbers turn out to be related.

    Args:
        found: The transformation of the sample.
        kept: Targets of the sample that keep their initial value: what a statement touches, and
            how it does.
        sample: The names that stand for all.
        sources: All sources.
        targets: All targets that are given.
        renames: What becomes of sources of the sample, if each source has a statement of its own.
        order: All sources, in the order of these statements.
    """
    if found.missing or found.conflicts or not _is_sound(found, kept, sample):
        return None
    names = _Names([*sources, *targets], sample.stand_in)
    sides = range(len(sources)), range(len(sources), len(names.all))
    outputs = {name: info for name, info in found.targets.items() if name not in sample.targets}
    left = {own: outputs[first] for own, first in names.of(outputs, sides[0])}
    made = {
        own: info
        for name, info in outputs.items()
        if name not in sources and sample.is_stand_in(name)
        for own in sample.all_names(name)
    }
    whole: Infos = {**left, **made, **targets}
    deletions = names.deletions(renames, order, sides[0]) if kept and renames else {}
    all_kept = {}
    for name, (touched, how) in kept.items():
        for own in sample.all_names(name) if sample.is_stand_in(name) else ():
            own_touched = sample.own_name(touched, dict(_numbers(sample, own)))
            all_kept[own] = f"{own_touched!r} is {deletions.get(own_touched, how)}"
    return Resolved(
        sources,
        whole,
        plans=Plans(sample, found.plans, whole, all_kept),
        resized={
            own: sample.own_name(source, dict(_numbers(sample, own)))
            for name, source in found.resized.items()
            if sample.is_stand_in(name)
            for own in sample.all_names(name)
        },
        kept=all_kept,
        untouched=frozenset(own for side in sides for own, _ in names.of(found.untouched, side)),
        missing={},
        conflicts={},
        deleted=tuple(own for own, _ in names.of(set(found.deleted), sides[0])),
        unused_results=tuple(
            own
            for name in found.unused_results
            if sample.is_stand_in(name)
            for own in sample.all_names(name)
        ),
        unused=tuple(own for own, _ in names.of(set(found.unused), sides[0])),
    )


def _numbers(sample: Sample, name: str) -> Iterator[tuple[str, str]]:
    return ((axis, number) for _, axis, number in sample.numbers_of(name))


def _is_sound(found: Resolved, kept: Mapping[str, tuple[str, str]], sample: Sample) -> bool:
    """Whether names of a sample have to do with names of the same numbers alone."""
    related = [(source, name) for name, plan in found.plans.items() for source in plan.sources]
    related += [(source, name) for name, source in found.resized.items()]
    related += [(touched, name) for name, (touched, _) in kept.items()]
    made = [*(n for n in found.targets if n not in sample.sources), *found.unused_results]
    return all(sample.is_among(*pair) for pair in related) and all(map(may_be_numbered, made))


@dataclass(frozen=True, slots=True, eq=False)
class _Names:
    """All names, sources before targets, and the row of the one that stands for each."""

    all: Sequence[str]
    stand_in: IntArray

    def of(self, some: Collection[str], rows: range) -> Iterator[tuple[str, str]]:
        """Names that some of the sample stand for, and which, among rows of one side."""
        own = self.stand_in[rows.start : rows.stop]
        first, of = np.unique(own, return_inverse=True)
        flags = [self.all[row] in some for row in first.tolist()]
        chosen = np.flatnonzero(np.array(flags, dtype=np.bool_)[of])
        for row, stand_in in zip(chosen.tolist(), own[chosen].tolist(), strict=True):
            yield self.all[rows.start + row], self.all[stand_in]

    def deletions(self, renames: Renames, order: Iterable[str], rows: range) -> dict[str, str]:
        """Sources that are deleted by statements of their own, and by which; see `expanded`."""
        new_names = set(renames.values())
        # See `rename_statements`: names that are also new ones are read first.
        first = {old for old, new in renames.items() if old in new_names and new not in (old, None)}
        num_first = sum(1 for _ in self.of(first, rows))
        deleted = {own for own, _ in self.of({old for old in renames if not renames[old]}, rows)}
        ordered = (name for name in order if name in deleted)
        return {
            name: f"deleted by statement {number}"
            for number, name in enumerate(ordered, num_first + 1)
        }
