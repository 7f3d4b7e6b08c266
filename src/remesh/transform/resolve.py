"""Statements meet tensors: for every target, where its elements come from.

A target is looked up in this order:

1. A statement assigned its very name: it is what the name stands for at the end. A statement that
   added the name, or deleted the source of that name: it keeps its initial value.
2. It is optimizer state, and a statement assigned, added or deleted its parameter: it follows the
   parameter. Elementwise state goes the parameter's way, conversions of dtype excepted. State of
   one element (a step count) is that of all parameters involved, which must agree.
3. Nothing touches it: it is the source of the same name; failing that, if it is optimizer state,
   the same state of the same parameter under another system's name.
4. None of these: it is missing.

What is wrong with a statement is raised at once. Targets that are missing, or that no statement
touches and whose source differs, are collected: `Resolved.check` raises an error that lists them,
and a caller with a policy of its own for them, such as `load`, applies that instead.

Everything that can be known from names, shapes and dtypes is checked here; only the values of
tensors that must agree are left for later.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from remesh._repr import listed, short_repr
from remesh.core.geometry import Box
from remesh.errors import MismatchError, TransformError
from remesh.transform.execute import Bindings, Sources, ends_of_results, info_from_states
from remesh.transform.expressions import (
    Leaf,
    Node,
    convert,
    leaves,
    made_of,
    tied,
    without_conversions,
)
from remesh.transform.optimizer_state import SCALAR_SLOTS, State, States, find_states
from remesh.transform.rearrange import Rearrangement, shape_after, trace
from remesh.transform.renames import Renames, rename_steps
from remesh.transform.statements import Statements
from remesh.transform.syntax import Name
from remesh.transform.tensor_info import PLAIN, Infos, TensorInfo
from remesh.transform.wildcards import Expander, Step

_MAX_HINTS = _MAX_SHOWN = 10


# ---------------------------------------------------------------------------------------------
# The result: regions of sources
# ---------------------------------------------------------------------------------------------


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
            dtypes = origin.dtypes if plan.states is None else self._dtypes(name, plan.dtype)
            regions.append(Region(name, origin.source_box, origin.steps, origin.box, dtypes))
        return tuple(regions)

    def _dtypes(self, source: str, wanted: str | None) -> tuple[str, ...]:
        info = self.sources[source]
        assert info is not None
        return () if wanted is None or wanted == info.dtype else (wanted,)


# ---------------------------------------------------------------------------------------------
# Finding it
# ---------------------------------------------------------------------------------------------


@dataclass
class Resolver:
    """One call of `Transform.resolve`, whose arguments it has."""

    program: Statements | Renames
    infos: Infos  # of the sources
    given_targets: Infos | None
    owners: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    cast: bool = False
    with_outputs: bool = False
    called: Container[str] = ()

    def __post_init__(self) -> None:
        program = self.program
        self.statements = program if isinstance(program, tuple) else ()
        read = _literal_names(statement.left for statement in self.statements)
        read += () if isinstance(program, tuple) else program
        states = find_states(self.infos, read, self.owners)
        self.sources = Sources(self.infos, states, self.aliases)
        self.bindings: Bindings
        self.result: Resolved
        self.target_states = States()
        self.leaves: dict[str, tuple[Leaf, ...]] = {}
        self.maybe_owned = {
            state.parameter: name for name, maybe in states.undecided.items() for state in maybe
        }

    def run(self) -> Resolved:
        self.bindings = self.execute()
        given = self.given_targets
        outputs = self.outputs() if self.with_outputs or given is None else {}
        found = self.result = Resolved(self.infos, {**outputs, **(given or {})})
        self.target_states = find_states(found.targets, self.bindings.values, self.owners)
        for name, info in found.targets.items():
            self.plan(name, info)
        parameter_of, gone = self.sources.states.parameter_of, self.bindings.deleted
        deleted = tuple(n for n in self.infos if n in gone or parameter_of(n) in gone)
        used = {name for plan in found.plans.values() for name in plan.sources}
        used.update(deleted, found.untouched)
        wanted = found.targets.keys() | self.target_states.by_parameter.keys()
        for name in list(found.missing)[:_MAX_HINTS]:
            # Similar names take time to find.
            found.missing[name] = "; ".join([found.missing[name], *self.sources.nearest(name)])
        return replace(
            found,
            deleted=deleted,
            unused_results=tuple(name for name in self.bindings.unread if name not in wanted),
            unused=tuple(name for name in self.infos if name not in used),
        )

    # -----------------------------------------------------------------------------------------
    # Statements
    # -----------------------------------------------------------------------------------------

    def execute(self) -> Bindings:
        """Expand and execute all statements."""
        if isinstance(self.program, tuple):
            states = self.sources.states
            expander = Expander(
                dict.fromkeys([*self.infos, *states.by_parameter]),
                None if self.given_targets is None else self.parameter_targets,
            )
            groups = [expander.expand(statement) for statement in self.program]
        else:
            groups = [rename_steps(self.program)]
        bindings = Bindings(self.sources, self.ends_of(groups))
        for steps in groups:
            bindings.execute(steps)
        return bindings

    def ends_of(self, groups: Sequence[Sequence[Step]]) -> dict[tuple[int, str], TensorInfo]:
        """Where results end up, as far as operators ask for it: see `ends_of_results`."""
        is_asked = any(s.statement.operator.needs_ends for steps in groups for s in steps)
        if not is_asked or self.given_targets is None:
            return {}
        return ends_of_results(groups, self.parameter_targets())

    def parameter_targets(self) -> dict[str, TensorInfo]:
        """The targets, and the parameters of which only optimizer states are targets."""
        assert self.given_targets is not None
        literal = _literal_names(statement.right for statement in self.statements)
        states = find_states(self.given_targets, literal, self.owners)
        found = {name: info for name, info in self.given_targets.items() if info is not None}
        for parameter in states.by_parameter:
            info = info_from_states(parameter, states, self.given_targets)
            if info is not None:
                found.setdefault(parameter, info)
        return found

    # -----------------------------------------------------------------------------------------
    # Targets
    # -----------------------------------------------------------------------------------------

    def plan(self, name: str, info: TensorInfo | None) -> None:
        bindings = self.bindings
        if name in bindings.values:
            self.plan_made(name, info)
            return
        if self.keep(name, name):
            return
        self.refuse_undecided(name)
        state = self.target_states.by_name.get(name)
        if state is not None:
            if state.parameter in bindings.values:
                self.plan_following(name, info, state)
                return
            if self.keep(name, state.parameter):
                return
        source: str | None = name
        if name not in self.infos:
            source = None if state is None else self.state_source(state.parameter, state)
        if source is None or source == name:
            self.result.untouched.add(name)
        if source is None:
            self.result.missing[name] = "there is no source of that name"
        else:
            self.plan_whole(name, info, (source,))

    def keep(self, name: str, touched: str) -> bool:
        """True if a target keeps its value because a statement added or deleted something."""
        for numbers, verb in ((self.bindings.added, "added"), (self.bindings.deleted, "deleted")):
            if touched in numbers:
                self.result.kept[name] = f"{touched!r} is {verb} by statement {numbers[touched]}"
                return True
        return False

    def plan_made(self, name: str, info: TensorInfo | None) -> None:
        node = self.bindings.values[name]
        sources = self.infos
        lacking = next((leaf for leaf in self.leaves_of(name) if leaf.name not in sources), None)
        if lacking is not None:
            self.result.missing[name] = f"it is made of {lacking.name!r}, which the sources lack"
            return
        wanted = PLAIN if info is None else info.dtype
        if info is not None:
            self.check_shape(name, name, node, info)
        are_tensors = PLAIN not in (wanted, node.dtype)
        if node.dtype != wanted and self.cast and are_tensors:
            node = convert(node, wanted)
        elif node.dtype != wanted:
            hint = f"to convert it, add a statement {name} -> {name}, dtype={wanted}"
            raise self.bindings.error(
                name,
                f"target {name!r} is {wanted}, but this makes it {node.dtype}",
                [hint] if are_tensors else [],
            )
        self.result.plans[name] = Plan(tuple(leaf.name for leaf in self.leaves_of(name)), node)

    def leaves_of(self, name: str) -> tuple[Leaf, ...]:
        if name not in self.leaves:
            self.leaves[name] = leaves(self.bindings.values[name])
        return self.leaves[name]

    def check_shape(self, name: str, made: str, node: Node, info: TensorInfo) -> None:
        """Refuse a target of another shape than what was made, of itself or of its parameter."""
        if node.shape != info.shape:
            raise self.bindings.error(
                made, f"target {name!r} has shape {info.shape}, but this makes it {node.shape}"
            )

    def plan_whole(self, name: str, info: TensorInfo | None, sources: tuple[str, ...]) -> None:
        """A target that is what all of these sources hold, if dtype and shape agree."""
        for source in sources:
            found = self.infos[source]
            if info is None or found is None:
                agree = info is found
            else:
                same_dtype = self.cast or info.dtype == found.dtype
                agree = same_dtype and info.shape == found.shape
            if not agree:
                self.result.conflicts[name] = (
                    f"is {_described(info)}, but {source!r} is {_described(found)}"
                )
                return
        if info is None:
            self.result.plans[name] = Plan(sources, None)
            return
        nodes = [leaf for source in sources if (leaf := self.sources.leaf(source)) is not None]
        self.result.plans[name] = Plan(sources, tied([convert(leaf, info.dtype) for leaf in nodes]))

    # -----------------------------------------------------------------------------------------
    # Optimizer state
    # -----------------------------------------------------------------------------------------

    def state_source(self, parameter: str, like: State) -> str | None:
        """The source that is a given state of a parameter, under any of the parameter's names."""
        for name in self.sources.names_of(self.sources.states.parameter_of(parameter)):
            if name in self.maybe_owned:
                raise _undecided(self.maybe_owned[name], self.sources.states)
            found = self.sources.states.find(name, like)
            if found is not None:
                return found
        return None

    def refuse_undecided(self, name: str) -> None:
        """A state that may belong to several parameters must not be touched by a statement."""
        candidates = self.target_states.undecided.get(name)
        if candidates is None:
            return
        bindings = self.bindings
        optimizer = candidates[0].before.rpartition("state.")[0]
        if self.given_targets is not None and not any(
            target.startswith(optimizer) for target in self.given_targets
        ):
            return  # the target has no such optimizer
        for touched in (bindings.values, bindings.added, bindings.deleted):
            if any(state.parameter in touched for state in candidates):
                raise _undecided(name, self.target_states)

    def plan_following(self, name: str, info: TensorInfo | None, state: State) -> None:
        parameter = state.parameter
        whole = without_conversions(self.bindings.values[parameter])
        found: dict[str, str] = {}
        for leaf in self.leaves_of(parameter):
            source = self.state_source(leaf.name, state)
            if source is not None:
                self.check_not_assigned(parameter, name, source)
                found[leaf.name] = source
        is_complete = len(found) == len(self.leaves_of(parameter))
        node = whole if is_complete else made_of(whole, found)
        if node is None:
            lacking = [repr(o.name) for o in self.leaves_of(parameter) if o.name not in found]
            self.result.missing[name] = (
                f"it follows {parameter!r}, which is made of {listed(lacking, 5)}, of which "
                f"the sources have no {state.slot}"
            )
            return
        if isinstance(whole, Leaf):
            self.plan_whole(name, info, (found[whole.name],))
            return
        if self.is_count(state, found):
            self.plan_whole(name, info, tuple(dict.fromkeys(found.values())))
            return
        for leaf_name, source in found.items():
            self.check_elementwise(parameter, name, info, leaf_name, source)
        if info is not None:
            self.check_shape(name, parameter, node, info)
        dtype = None if info is None else info.dtype
        self.result.plans[name] = Plan(tuple(found.values()), node, found, dtype)

    def check_not_assigned(self, parameter: str, name: str, source: str) -> None:
        """A state that has statements of its own is not silently taken from the source."""
        bindings = self.bindings
        number = bindings.added.get(source) or bindings.deleted.get(source)
        if source in bindings.values:
            number = bindings.made_by[source].statement.number
        if number is not None:
            raise bindings.error(
                parameter,
                f"target {name!r} would follow its parameter and read {source!r}\n"
                f"Statement {number} says otherwise of that",
                [f"say in a statement what {name} is made of"],
            )

    def is_count(self, state: State, found: Mapping[str, str]) -> bool:
        """True if a state is one value for a whole parameter, and not one for each element."""
        for leaf_name, source in found.items():
            info = self.infos[source]
            if info is None:
                return True
            is_other_shape = info.shape != self.sources.info(leaf_name).shape
            if math.prod(info.shape) == 1 and (state.slot in SCALAR_SLOTS or is_other_shape):
                return True
        return False

    def check_elementwise(
        self, made: str, name: str, info: TensorInfo | None, leaf_name: str, source: str
    ) -> None:
        """Refuse a state that cannot go the way of its parameter `made`."""
        found = self.infos[source]
        parameter = self.sources.info(leaf_name)
        assert found is not None
        if found.shape != parameter.shape:
            raise self.bindings.error(
                made,
                f"target {name!r} cannot follow its parameter\n"
                f"Its source {source!r} has shape {found.shape}, the parameter {leaf_name!r} has "
                f"{parameter.shape}",
                [f"say in a statement what {name} is made of, or write _ -> {name}"],
            )
        if info is not None and info.dtype != found.dtype and not self.cast:
            raise self.bindings.error(
                made,
                f"target {name!r} is {info.dtype}, but follows {source!r}, which is {found.dtype}\n"
                "Optimizer state is not converted on the way",
            )

    # -----------------------------------------------------------------------------------------
    # Without targets
    # -----------------------------------------------------------------------------------------

    def outputs(self) -> dict[str, TensorInfo | None]:
        """All outputs, targets or not.

        These are sources and results that no statement read, those that were read but are targets,
        and the optimizer states of all of these.
        """
        bindings, targets = self.bindings, self.given_targets or {}
        bound = {*bindings.values, *bindings.deleted, *bindings.added}
        states = self.sources.states
        found: dict[str, TensorInfo | None] = {}
        for name, info in self.infos.items():
            parameter = states.parameter_of(name)
            names = {name, parameter}
            if parameter in bindings.deleted and name not in bound:
                # Another name of a tied weight may be left, and has the state then.
                for other in sorted({*self.sources.names_of(parameter)} - bound)[:1]:
                    found[states.by_name[name].name_for(other, self.called)] = info
            if not bound.isdisjoint(names):
                continue
            if targets.keys().isdisjoint(names) and not bindings.read.keys().isdisjoint(names):
                continue
            found[name] = info
        results = [name for name in targets if name in bindings.values]
        for name in dict.fromkeys([*bindings.unread, *results]):
            node = bindings.values[name]
            if all(leaf.name in self.infos for leaf in self.leaves_of(name)):
                is_tensor = node.dtype and node.dtype != PLAIN
                found[name] = TensorInfo(node.dtype or "", node.shape) if is_tensor else None
            found.update(
                (state_name, info)
                for state_name, info in self.output_states(name)
                if state_name not in bindings.values and state_name not in bindings.deleted
            )
        return found

    def output_states(self, name: str) -> Iterable[tuple[str, TensorInfo | None]]:
        """The optimizer states that the result `name` has, if it is a parameter."""
        states = self.sources.states
        node = self.bindings.values[name]
        like: dict[str, State] = {}
        for leaf in self.leaves_of(name):
            if leaf.name in states.by_name:
                return
            for base in self.sources.names_of(leaf.name):
                for names in states.by_parameter.get(base, {}).values():
                    for state_name in names:
                        state = states.by_name[state_name]
                        like.setdefault(state.name_for(name, self.called), state)
        for state_name, state in like.items():
            found = {
                leaf.name: source
                for leaf in self.leaves_of(name)
                if (source := self.state_source(leaf.name, state)) is not None
            }
            if all(source in self.bindings.read for source in found.values()):
                continue  # statements say what becomes of it
            info = self.infos[next(iter(found.values()))]
            is_single = isinstance(without_conversions(node), Leaf) or self.is_count(state, found)
            if info is not None and not is_single:
                info = TensorInfo(info.dtype, node.shape)
            yield state_name, info


def _literal_names(sides: Iterable[Sequence[Name]]) -> list[str]:
    names = (name for side in sides for name in side if not name.is_nothing)
    return [literal for name in names if (literal := name.literal) is not None]


def _described(info: TensorInfo | None) -> str:
    return "a plain value" if info is None else f"{info.dtype} of shape {info.shape}"


def _undecided(name: str, states: States) -> TransformError:
    candidates = [state.parameter for state in states.undecided[name]]
    return TransformError(
        f"{name!r} may be optimizer state of {' or of '.join(map(repr, candidates))}, and a "
        "statement touches one of them; say which: Transform(..., "
        "owners={'optimizer.state.': 'model.'})"
    )
