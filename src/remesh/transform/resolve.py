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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from remesh.errors import TransformError
from remesh.transform import messages, syntax
from remesh.transform.execute import Bindings
from remesh.transform.expand import Expander, Operand, Step
from remesh.transform.expressions import (
    Leaf,
    Node,
    convert,
    leaves,
    made_of,
    tied,
    without_conversions,
)
from remesh.transform.inverse import COPY
from remesh.transform.layout import Layout, Sources, info_from_states
from remesh.transform.optimizer_state import SCALAR_SLOTS, State, States, find_states
from remesh.transform.patterns import Binding
from remesh.transform.rearrange import Shape
from remesh.transform.resolved import Plan, Resolved
from remesh.transform.syntax import Name, Statement
from remesh.transform.tensor_info import Infos, TensorInfo

_MAX_HINTS = 10


def resolve(
    statements: Sequence[Statement],
    sources: Infos,
    targets: Infos | None,
    *,
    owners: Mapping[str, str],
    aliases: Mapping[str, str],
    original: Sequence[Statement] | None = None,
    cast: bool = False,
    with_outputs: bool = False,
    resizes: bool = False,
) -> Resolved:
    """See `Transform.resolve`.

    `original` are the statements that `statements` undo, if they do.
    """
    undone = _Undone(
        None
        if original is None or targets is None
        else lambda: _Resolver(
            original, targets, sources, owners, {}, _Undone(None), options=_Options()
        ).execute()
    )
    options = _Options(cast, with_outputs, resizes)
    return _Resolver(statements, sources, targets, owners, aliases, undone, options=options).run()


_Groups = list[tuple[Step, ...]]


@dataclass(frozen=True, slots=True)
class _Options:
    """Arguments of `Transform.resolve`."""

    cast: bool = False
    with_outputs: bool = False
    resizes: bool = False


class _Undone:
    """A program that is undone, executed on what it shall restore.

    Statements that undo others leave out what these knew: the sizes of tensors that were joined,
    and which names a star had stood for. Mostly the targets tell. For what never is a target, the
    original program is executed in its usual direction, which for names and shapes costs little,
    and only when the first such question comes.
    """

    def __init__(self, execute: Callable[[], tuple[Bindings, _Groups]] | None) -> None:
        self._execute = execute
        self._executed: tuple[Bindings, dict[tuple[int, Binding], Step]] | None = None

    def _result(self) -> tuple[Bindings, dict[tuple[int, Binding], Step]] | None:
        if self._executed is None and self._execute is not None:
            bindings, groups = self._execute()
            steps = {(s.statement.number, s.binding): s for steps in groups for s in steps}
            self._executed = bindings, steps
        return self._executed

    def shape(self, step: Step, operand: Operand) -> Shape | None:
        """The shape of a result, as the statement that is undone had read it."""
        result = self._result()
        if result is None:
            return None
        name = COPY.sub("", operand.name, count=1)
        return result[0].read_shapes.get((step.statement.number, name))

    def names(self, draft: Step, name: Name) -> list[str]:
        """The names that a name with a star matched in the statement that is undone."""
        result = self._result()
        step = result[1].get((draft.statement.number, draft.binding)) if result else None
        return [operand.name for operand in step.left if operand.origin == name] if step else []


class _Resolver:
    def __init__(
        self,
        statements: Sequence[Statement],
        sources: Infos,
        targets: Infos | None,
        owners: Mapping[str, str],
        aliases: Mapping[str, str],
        undone: _Undone,
        *,
        options: _Options,
    ) -> None:
        self.statements = statements
        self.undone = undone
        self.options = options
        self.resized: dict[str, str] = {}
        self.owners = owners
        self.given_targets = targets
        literal = _literal_names(name for s in statements for name in s.left)
        states = find_states(sources, literal, owners)
        self.sources = Sources(sources, states, aliases)
        self.bindings: Bindings
        self.targets: Infos = {}
        self.target_states = States()
        self.plans: dict[str, Plan] = {}
        self.kept: dict[str, str] = {}
        self.untouched: dict[str, None] = {}
        self.missing: dict[str, str] = {}
        self.conflicts: dict[str, str] = {}
        self.leaves: dict[str, tuple[Leaf, ...]] = {}
        self.maybe_owned = {
            state.parameter: name for name, maybe in states.undecided.items() for state in maybe
        }

    def run(self) -> Resolved:
        self.bindings, _ = self.execute()
        given = self.given_targets
        outputs = self.outputs() if self.options.with_outputs or given is None else {}
        self.targets = {**outputs, **(given or {})}
        self.target_states = find_states(self.targets, self.bindings.values, self.owners)
        for name, info in self.targets.items():
            self.plan(name, info)
        deleted = tuple(name for name in self.sources.infos if self.is_deleted(name))
        used = {name for plan in self.plans.values() for name in plan.sources}
        used.update(deleted, self.untouched)
        return Resolved(
            self.sources.infos,
            self.targets,
            plans=self.plans,
            resized=self.resized,
            kept=self.kept,
            untouched=frozenset(self.untouched),
            missing=self.missing_with_hints(),
            conflicts=self.conflicts,
            deleted=deleted,
            unused_results=tuple(n for n in self.bindings.unread if not self.is_wanted(n)),
            unused=tuple(name for name in self.sources.infos if name not in used),
        )

    # -----------------------------------------------------------------------------------------
    # Statements
    # -----------------------------------------------------------------------------------------

    def execute(self) -> tuple[Bindings, _Groups]:
        """Expand and execute all statements; the steps of each, too."""
        states = self.sources.states
        plain = (name for name in self.sources.infos if name not in states.by_name)
        expander = Expander(
            dict.fromkeys([*plain, *states.by_parameter]),
            states.by_name,
            None if self.given_targets is None else self.parameter_targets,
            self.undone.names,
        )
        groups = [expander.expand(statement) for statement in self.statements]
        targets: dict[str, TensorInfo] | None = None
        if self.given_targets is not None and any(
            s.operator.needs_targets for s in self.statements
        ):
            targets = self.parameter_targets()
        bindings = Bindings(Layout(self.sources, targets, groups, self.undone.shape))
        for steps in groups:
            bindings.execute(steps)
        return bindings, groups

    def parameter_targets(self) -> dict[str, TensorInfo]:
        """The targets, and the parameters of which only optimizer states are targets."""
        assert self.given_targets is not None
        literal = _literal_names(name for s in self.statements for name in s.right)
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
        self.untouched[name] = None
        source = name if name in self.sources.infos else None
        if source is None and state is not None:
            source = self.state_source(state.parameter, state)
        if source is None:
            self.missing[name] = "there is no source of that name"
            return
        if source != name:
            del self.untouched[name]
        self.plan_whole(name, info, (source,))

    def keep(self, name: str, touched: str) -> bool:
        """True if a target keeps its value because a statement added or deleted something."""
        for steps, verb in ((self.bindings.added, "added"), (self.bindings.deleted, "deleted")):
            step = steps.get(touched)
            if step is not None:
                self.kept[name] = f"{touched!r} is {verb} by statement {step.statement.number}"
                return True
        return False

    def plan_made(self, name: str, info: TensorInfo | None) -> None:
        step = self.bindings.made_by[name]
        node = self.bindings.values[name].node
        sources = self.sources.infos
        lacking = next((leaf for leaf in self.leaves_of(name) if leaf.name not in sources), None)
        if lacking is not None:
            self.missing[name] = f"it is made of {lacking.name!r}, which the sources lack"
            return
        if self.options.resizes and isinstance(node, Leaf) and info and node.shape != info.shape:
            self.resized[name] = node.name
        elif info is not None:
            self.check_shape(step, name, node, info)
            if node.dtype != info.dtype and self.options.cast and node.dtype is not None:
                node = convert(node, info.dtype)
            elif node.dtype != info.dtype:
                raise step.error(
                    f"target {name!r} is {info.dtype}, but this makes it {node.dtype}",
                    self.right_span(step, name),
                    [f"to convert it, add a statement {name} -> {name}, dtype={info.dtype}"],
                )
        self.plans[name] = Plan(tuple(leaf.name for leaf in self.leaves_of(name)), node)

    def leaves_of(self, name: str) -> tuple[Leaf, ...]:
        if name not in self.leaves:
            self.leaves[name] = leaves(self.bindings.values[name].node)
        return self.leaves[name]

    def right_span(self, step: Step, name: str) -> syntax.Span | None:
        return next((o.origin.span for o in step.right if o.name == name), None)

    def check_shape(self, step: Step, name: str, node: Node, info: TensorInfo) -> None:
        if node.shape != info.shape:
            raise step.error(
                f"target {name!r} has shape {info.shape}, but this makes it {node.shape}",
                self.right_span(step, name),
            )

    def plan_whole(self, name: str, info: TensorInfo | None, sources: tuple[str, ...]) -> None:
        """A target that is what all of these sources hold, if dtype and shape agree."""
        for source in sources:
            found = self.sources.infos[source]
            if info is None or found is None:
                agree = info is found
            else:
                same_dtype = self.options.cast or info.dtype == found.dtype
                agree = same_dtype and info.shape == found.shape
                if self.options.resizes and len(sources) == 1 and info.shape != found.shape:
                    self.resized[name], agree = source, True
            if not agree:
                self.conflicts[name] = (
                    f"is {_described(info)}, but {source!r} is {_described(found)}"
                )
                return
        if info is None:
            self.plans[name] = Plan(sources, None)
            return
        nodes = [leaf for source in sources if (leaf := self.sources.leaf(source)) is not None]
        self.plans[name] = Plan(sources, tied([convert(leaf, info.dtype) for leaf in nodes]))

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
        optimizer = candidates[0].before.partition("state.")[0]
        if self.given_targets is not None and not any(
            target.startswith(optimizer) for target in self.given_targets
        ):
            return  # the target has no such optimizer
        for touched in (bindings.values, bindings.added, bindings.deleted):
            if any(state.parameter in touched for state in candidates):
                raise _undecided(name, self.target_states)

    def plan_following(self, name: str, info: TensorInfo | None, state: State) -> None:
        parameter = state.parameter
        step = self.bindings.made_by[parameter]
        whole = without_conversions(self.bindings.values[parameter].node)
        found: dict[str, str] = {}
        for leaf in self.leaves_of(parameter):
            source = self.state_source(leaf.name, state)
            if source is not None:
                self.check_not_assigned(step, name, source)
                found[leaf.name] = source
        is_complete = len(found) == len(self.leaves_of(parameter))
        node = whole if is_complete else made_of(whole, found)
        if node is None:
            lacking = [o.name for o in self.leaves_of(parameter) if o.name not in found]
            self.missing[name] = (
                f"it follows {parameter!r}, which is made of {messages.listing(lacking)}, of which "
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
            self.check_elementwise(step, name, info, leaf_name, source)
        if info is not None:
            self.check_shape(step, name, node, info)
        dtype = None if info is None else info.dtype
        self.plans[name] = Plan(tuple(found.values()), node, found, dtype)

    def check_not_assigned(self, step: Step, name: str, source: str) -> None:
        """A state that has statements of its own is not silently taken from the source."""
        bindings = self.bindings
        other = bindings.made_by.get(source) if source in bindings.values else None
        other = other or bindings.deleted.get(source) or bindings.added.get(source)
        if other is not None:
            raise step.error(
                f"target {name!r} would follow its parameter and read {source!r}\n"
                f"Statement {other.statement.number} says otherwise of that",
                hints=[f"say in a statement what {name} is made of"],
            )

    def is_count(self, state: State, found: Mapping[str, str]) -> bool:
        """True if a state is one value for a whole parameter, and not one for each element."""
        for leaf_name, source in found.items():
            info = self.sources.infos[source]
            if info is None:
                return True
            is_other_shape = info.shape != self.sources.info(leaf_name).shape
            if math.prod(info.shape) == 1 and (state.slot in SCALAR_SLOTS or is_other_shape):
                return True
        return False

    def check_elementwise(
        self, step: Step, name: str, info: TensorInfo | None, leaf_name: str, source: str
    ) -> None:
        found = self.sources.infos[source]
        parameter = self.sources.info(leaf_name)
        assert found is not None
        if found.shape != parameter.shape:
            raise step.error(
                f"target {name!r} cannot follow its parameter\n"
                f"Its source {source!r} has shape {found.shape}, the parameter {leaf_name!r} has "
                f"{parameter.shape}",
                hints=[f"say in a statement what {name} is made of, or write _ -> {name}"],
            )
        if info is not None and info.dtype != found.dtype and not self.options.cast:
            raise step.error(
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
        bound = (bindings.values, bindings.deleted, bindings.added)
        found: dict[str, TensorInfo | None] = {}
        for name, info in self.sources.infos.items():
            names = {name, self.sources.states.parameter_of(name)}
            if any(touched in group for touched in names for group in bound):
                continue
            if targets.keys().isdisjoint(names) and not bindings.read.keys().isdisjoint(names):
                continue
            found[name] = info
        results = [name for name in targets if name in bindings.values]
        for name in dict.fromkeys([*bindings.unread, *results]):
            node = bindings.values[name].node
            if all(leaf.name in self.sources.infos for leaf in self.leaves_of(name)):
                info = self.sources.infos.get(node.name) if isinstance(node, Leaf) else None
                found[name] = TensorInfo(node.dtype, node.shape) if node.dtype else info
            found.update(
                (state_name, info)
                for state_name, info in self.output_states(name)
                if state_name not in bindings.values and state_name not in bindings.deleted
            )
        return found

    def output_states(self, name: str) -> Iterable[tuple[str, TensorInfo | None]]:
        """The optimizer states that the result `name` has, if it is a parameter."""
        states = self.sources.states
        node = self.bindings.values[name].node
        like: dict[str, State] = {}
        for leaf in self.leaves_of(name):
            if leaf.name in states.by_name:
                return
            for base in self.sources.names_of(leaf.name):
                for names in states.by_parameter.get(base, {}).values():
                    for state_name in names:
                        state = states.by_name[state_name]
                        like.setdefault(state.name_for(name), state)
        for state_name, state in like.items():
            found = {
                leaf.name: source
                for leaf in self.leaves_of(name)
                if (source := self.state_source(leaf.name, state)) is not None
            }
            if all(source in self.bindings.read for source in found.values()):
                continue  # statements say what becomes of it
            info = self.sources.infos[next(iter(found.values()))]
            is_single = isinstance(without_conversions(node), Leaf) or self.is_count(state, found)
            if info is not None and not is_single:
                info = TensorInfo(info.dtype, node.shape)
            yield state_name, info

    # -----------------------------------------------------------------------------------------
    # For the result
    # -----------------------------------------------------------------------------------------

    def is_deleted(self, name: str) -> bool:
        deleted = self.bindings.deleted
        return name in deleted or self.sources.states.parameter_of(name) in deleted

    def is_wanted(self, name: str) -> bool:
        return name in self.targets or name in self.target_states.by_parameter

    def missing_with_hints(self) -> dict[str, str]:
        """Why targets are missing, with similar names for the first: finding these takes time."""
        return {
            name: "; ".join([reason, *(self.sources.nearest(name) if n < _MAX_HINTS else ())])
            for n, (name, reason) in enumerate(self.missing.items())
        }


def _literal_names(names: Iterable[syntax.Name]) -> list[str]:
    return [name.literal for name in names if name.literal is not None and not name.is_nothing]


def _described(info: TensorInfo | None) -> str:
    return "a plain value" if info is None else f"{info.dtype} of shape {info.shape}"


def _undecided(name: str, states: States) -> TransformError:
    candidates = [state.parameter for state in states.undecided[name]]
    return TransformError(
        f"{name!r} may be optimizer state of {' or of '.join(map(repr, candidates))}, and a "
        "statement touches one of them; say which: Transform(..., "
        "owners={'optimizer.state.': 'model.'})"
    )
