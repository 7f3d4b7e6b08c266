"""The result of a transformation of known sources and targets: regions of sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remesh._repr import short_repr
from remesh.core.geometry import Box
from remesh.errors import MismatchError
from remesh.transform.expressions import EXACT_CASTS, Leaf, Node, Origin
from remesh.transform.rearrange import Rearrangement, shape_after, trace
from remesh.transform.tensor_info import Infos

_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a source, and the box of a target that its elements make up."""

    source: str
    """Name of the source."""
    source_box: Box
    """Box of the source."""
    steps: Rearrangement
    """Permutations of axes and reshapes that bring the block into its new shape, in this order.
    Mostly none or one permutation."""
    target_box: Box
    """Where the block goes, in the target's global coordinates."""
    dtypes: tuple[str, ...] = ()
    """Element types that the elements are converted to, in this order; may be empty."""

    __repr__ = short_repr

    def restrict(self, source_box: Box) -> tuple[Region, ...]:
        """The disjoint regions that cover a part of the source's box, and nothing else."""
        part = source_box.intersect(self.source_box)
        if part is None:
            return ()
        if part == self.source_box:
            return (self,)
        inner = part.relative_to(self.source_box)
        shape = shape_after(self.source_box.shape, self.steps)
        assert shape == self.target_box.shape
        return tuple(
            Region(
                self.source,
                begin.shift(self.source_box.offset),
                path,
                end.shift(self.target_box.offset),
                self.dtypes,
            )
            for begin, end, path in trace(inner, self.source_box.shape, self.steps)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How a target is made."""

    sources: tuple[str, ...]  # names of the sources that it is made of or must agree with
    node: Node | None  # its expression; None for a plain value, which is that of any of the sources
    states: Mapping[str, str] | None = None
    """For optimizer state, which is made as `node` says of its parameter: the source of the state
    by the source of the parameter. None if `node` is made of the sources."""
    dtype: str | None = None
    """Element type that such state is converted to; None if it is not converted."""


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """A transformation of given sources into given targets."""

    sources: Infos
    """The sources by name; None for a plain value."""
    targets: Infos
    """The targets by name, likewise; where none were given, the outputs."""
    kept: dict[str, str] = field(default_factory=dict)
    """Targets that keep their initial value, and why."""
    untouched: set[str] = field(default_factory=set)
    """Targets that no statement touches: what becomes of them is what would without a
    transformation."""
    missing: dict[str, str] = field(default_factory=dict)
    """Targets for which there is no source, and why."""
    conflicts: dict[str, str] = field(default_factory=dict)
    """Targets that are taken over as they are from a source of another shape or dtype, and how
    these differ."""
    deleted: tuple[str, ...] = ()
    """Sources that statements deleted, with their optimizer states."""
    unused_results: tuple[str, ...] = ()
    """Names that statements assigned, which are no targets and were not read."""
    plans: dict[str, Plan] = field(default_factory=dict, repr=False)
    """The plan of each target."""
    resized: dict[str, str] = field(default_factory=dict)
    """Targets that are one source in another size, where this is allowed, and the source."""
    unused: tuple[str, ...] = ()
    """Sources that no target reads and no statement deleted."""

    __repr__ = short_repr

    def sources_of(self, target: str) -> tuple[str, ...]:
        """Names of the sources that a target is made of or must agree with; none if it is kept."""
        plan = self.plans.get(target)
        return () if plan is None else plan.sources

    def is_whole(self, target: str) -> bool:
        """True if a target is one source as it is, with every element at its place."""
        plan = self.plans[target]
        return len(plan.sources) == 1 and isinstance(plan.node, Leaf | None)

    def check(self) -> None:
        """Refuse targets that cannot be filled.

        Raises:
            MismatchError: If there are any; it lists them.
        """
        problems = [f"{name}: missing, {reason}" for name, reason in self.missing.items()]
        problems += [f"{name}: {conflict}" for name, conflict in self.conflicts.items()]
        if not problems:
            return
        lines = [f"{len(problems)} targets cannot be filled:", *problems[:_MAX_SHOWN]]
        if len(problems) > _MAX_SHOWN:
            lines.append(f"and {len(problems) - _MAX_SHOWN} more")
        if self.missing:
            lines.append(f"to keep the initial value of a target, write: _ -> {min(self.missing)}")
        conflicts = tuple(f"{name}: {conflict}" for name, conflict in self.conflicts.items())
        raise MismatchError("\n  ".join(lines), tuple(self.missing), (), conflicts)

    def regions(self, target: str, box: Box | None = None) -> tuple[Region, ...]:
        """Where the elements of a box of a target come from.

        Args:
            target: Name of a target.
            box: The wanted box, in global coordinates; the whole target if not given.

        Returns:
            Regions whose target boxes are disjoint and cover the box exactly; none if the target
            keeps its initial value.

        Raises:
            KeyError: If there is no such target, or it is missing or in conflict.
            ValueError: If the box does not lie in the target, or the target is a plain value.
        """
        return self._regions(target, box, checks=False)

    def checks(self, target: str, box: Box | None = None) -> tuple[Region, ...]:
        """Regions that `regions` left out because others fill their place, and must equal them.

        They come from tied tensors and from counts of parameters that are merged.
        """
        return self._regions(target, box, checks=True)

    def _regions(self, target: str, box: Box | None, *, checks: bool) -> tuple[Region, ...]:
        info = self.targets[target]
        if info is None:
            raise ValueError(f"{target!r} is a plain value, which has no regions")
        box = Box.whole(info.shape) if box is None else box
        if box.ndim != len(info.shape) or any(
            end > extent for end, extent in zip(box.end, info.shape, strict=True)
        ):
            raise ValueError(f"{target}: box {box} does not lie in shape {info.shape}")
        if target in self.kept or box.size == 0:
            return ()
        plan = self.plans[target]
        assert plan.node is not None
        if checks and isinstance(plan.node, Leaf):
            return ()
        origins = [origin for origin in plan.node.origins(box) if origin.is_check == checks]
        regions = []
        for origin in origins:
            name = origin.leaf.name if plan.states is None else plan.states[origin.leaf.name]
            dtypes = _shortest(origin) if plan.states is None else self._dtypes(name, plan.dtype)
            regions.append(Region(name, origin.source_box, origin.steps, origin.box, dtypes))
        return tuple(regions)

    def _dtypes(self, source: str, wanted: str | None) -> tuple[str, ...]:
        info = self.sources[source]
        assert info is not None
        return () if wanted is None or wanted == info.dtype else (wanted,)


def _shortest(origin: Origin) -> tuple[str, ...]:
    """Conversions without those that are exact and converted again: f16 to f32 to bf16."""
    if not origin.dtypes:
        return ()
    dtypes: list[str] = []
    for number, wanted in enumerate(origin.dtypes):
        before = dtypes[-1] if dtypes else origin.leaf.dtype
        is_last = number == len(origin.dtypes) - 1
        if before == wanted or (not is_last and (before, wanted) in EXACT_CASTS):
            continue
        dtypes.append(wanted)
    return tuple(dtypes)
