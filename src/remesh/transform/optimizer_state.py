"""Tensors that are optimizer state, and the parameters that they belong to.

Statements name parameters; what an optimizer keeps of a parameter follows it. That a name is such
a state is seen from the name alone, in one of four styles:

- `<parameter>.moment1_0`: a known suffix (Paddle, and plain dictionaries);
- `<...>state.<parameter>.exp_avg`: as PyTorch nests optimizer state, with any slot name, provided
  that the optimizer also has one that is known (nearly all have a `step`);
- `<...>state.<parameter>.exp_avg.codes`: the same, of state that is made of other tensors;
- `<...>state.exp_avg.<parameter>`: as Megatron Core does, with a known slot name.

Slots that mean the same in different systems count as one: Paddle's `moment1_0` is `exp_avg`.

In all but the first style the parameter often lies elsewhere in the state: an optimizer of
`model.layer.weight` says `optimizer.state.layer.weight.exp_avg`. The prefix before the parameter
(`model.`) is found by looking for the parameters that the optimizer names. Where two sets of
parameters fit equally well (a model and its moving average), nothing is guessed: the owner must be
stated if a statement touches such a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from remesh.core.state import TENSOR_RECORD

MASTER = "master"
SLOTS: dict[str, str] = {
    "w_0": MASTER,
    "master_weight": MASTER,
    "master_param": MASTER,
    "fp32_param": MASTER,
    "moment1_0": "exp_avg",
    "exp_avg": "exp_avg",
    "moment2_0": "exp_avg_sq",
    "exp_avg_sq": "exp_avg_sq",
    "moment2_max_0": "max_exp_avg_sq",
    "max_exp_avg_sq": "max_exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
    "beta1_pow_acc_0": "beta1_pow_acc_0",
    "beta2_pow_acc_0": "beta2_pow_acc_0",
    "step": "step",
}
_KNOWN_SLOTS = frozenset(SLOTS.values())
SCALAR_SLOTS = frozenset({"step", "beta1_pow_acc_0", "beta2_pow_acc_0", "mu_product", "eta", "mu"})

_STATE = re.compile(r"(?<![^.])state\.")
_MAX_TRIED = 16
_MAX_OWNERS = 1000


class State(NamedTuple):
    """One optimizer state of one parameter."""

    parameter: str  # the parameter's name
    slot: str  # which state it is, by the name that all systems' names of it share
    before: str  # part of its name before the parameter
    after: str  # part of its name after the parameter
    owner: str  # part of the parameter's name before the part that the state's name repeats

    def name_for(self, parameter: str, called: Container[str] = ()) -> str:
        """The name of the same state of another parameter; `called` as for `short_name`."""
        short = short_name(self.owner, self.parameter.removeprefix(self.owner), parameter, called)
        return f"{self.before}{short}{self.after}"


def short_name(owner: str, short: str, new: str, called: Container[str] = ()) -> str:
    """How an optimizer calls a parameter `owner + short`, which has a new name.

    A new prefix may be one of the parameter in its module, or a new place of the module in the
    state. `called` has the names that optimizers are known to use, which tell the two apart.
    """
    kept = new[len(owner) :] if new.startswith(owner) else None
    if new == short or new.endswith(f".{short}"):
        is_moved = short in called if owner else True
        if kept is None:
            longer = "" if is_moved else ending_in(called, new)
            return longer if longer.endswith(f".{short}") else short
        if is_moved and kept not in called:
            return short
    if kept is not None:
        return kept
    if short.endswith(f".{new}"):
        return new
    return ".".join(new.split(".")[owner.count(".") :])


def ending_in(known: Container[str], name: str) -> str:
    """The longest ending of a name, of whole keys, that is known; empty if there is none."""
    keys = name.split(".")
    return next((one for n in range(len(keys)) if (one := ".".join(keys[n:])) in known), "")


@dataclass(slots=True)
class States:
    """The optimizer states among some names."""

    by_name: dict[str, State] = field(default_factory=dict)  # the state that a name stands for
    by_parameter: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """The names of the states of a parameter, by slot."""
    undecided: dict[str, tuple[State, ...]] = field(default_factory=dict)
    """The possible states of each name whose parameter may be any of several."""

    def add(self, name: str, state: State) -> None:
        self.by_name[name] = state
        slots = self.by_parameter.setdefault(state.parameter, {})
        slots.setdefault(state.slot, []).append(name)

    def parameter_of(self, name: str) -> str:
        """The parameter that a name belongs to: its own, unless it is a state."""
        state = self.by_name.get(name)
        return name if state is None else state.parameter

    def find(self, parameter: str, like: State) -> str | None:
        """A parameter's state of the slot of `like`; of several, that named in the same way."""
        names = self.by_parameter.get(parameter, {}).get(like.slot, [])
        if len(names) == 1:
            return names[0]
        same = [
            name
            for name in names
            if (self.by_name[name].before, self.by_name[name].after) == (like.before, like.after)
        ]
        return same[0] if len(same) == 1 else None


def find_states(
    names: Iterable[str], further_parameters: Iterable[str], owners: Mapping[str, str]
) -> States:
    """Find the optimizer states among names; `owners` as in `Transform`."""
    names = list(names)
    homes = {name[:at] for name in names if (at := f".{name}".find(".param_groups.")) >= 0}
    made = {name.rpartition(".")[0] for name in names if name.endswith(f".{TENSOR_RECORD}")}
    states = States()
    parameters: dict[str, None] = dict.fromkeys(further_parameters)
    by_root: dict[str, list[_Nested]] = {}
    suffixed: list[tuple[str, State]] = []
    for name in names:
        root = _root_of(name, homes)
        nested = _parse(name, root, made) if root else None
        if nested is not None:
            by_root.setdefault(root, []).append(nested)
            continue
        head, _, tail = name.rpartition(".")
        if head and tail in SLOTS:
            suffixed.append((name, State(head, SLOTS[tail], "", f".{tail}", "")))
        else:
            parameters[name] = None
    # A parameter that is called like a slot has states of its own.
    shorts = tuple(
        f".{short}"
        for group in by_root.values()
        for _, short, slot, *_ in group
        if slot in _KNOWN_SLOTS and short.rpartition(".")[2] in SLOTS
    )
    for name, state in suffixed:
        if f".{name}".endswith(shorts):
            parameters[name] = None
        else:
            states.add(name, state)
    for root in [root for root in by_root if root not in owners]:
        if not any(slot in _KNOWN_SLOTS for _, _, slot, _, _ in by_root[root]):
            # A module called `state`, or an entry of a state.
            parameters |= dict.fromkeys(name for name, *_ in by_root.pop(root))
    for root, group in by_root.items():
        _add_nested(states, group, parameters, owners.get(root))
    return states


def _root_of(name: str, homes: Collection[str]) -> str:
    """The beginning of a name up to `state.`: that of an optimizer with groups, else the first."""
    ends = [found.end() for found in _STATE.finditer(name)] if "state." in name else []
    own = (end for end in ends if name[: end - len("state.")] in homes)
    return name[: next(own, ends[0] if ends else 0)]


_Nested = tuple[str, str, str, str, str]
"""A name in a style with `state.`, and its parameter without the owner, slot, before, after."""


def _parse(name: str, root: str, made: Collection[str]) -> _Nested | None:
    """A name that begins with `...state.`, the root; None if it is no state."""
    rest = name[len(root) :]
    first, _, behind = rest.partition(".")
    if behind and first in SLOTS:
        return name, behind, SLOTS[first], f"{root}{first}.", ""
    head, _, inner = rest.rpartition(".")
    # Of a state that is made of several tensors, each is a slot of its own.
    is_inner = root + head in made
    parameter, _, slot = (head if is_inner else rest).rpartition(".")
    if not parameter:
        return None
    known = SLOTS.get(slot, slot)
    if is_inner:
        return name, parameter, f"{known}.{inner}", root, f".{slot}.{inner}"
    return name, parameter, known, root, f".{slot}"


def _add_nested(
    states: States,
    group: Iterable[_Nested],
    parameters: Mapping[str, None],
    stated_owner: str | None,
) -> None:
    own = []
    for nested in group:
        head, _, tail = nested[0].rpartition(".")
        if tail in SLOTS and head in parameters:
            # A parameter that has `state.` in its own name.
            states.add(nested[0], State(head, SLOTS[tail], "", f".{tail}", ""))
        else:
            own.append(nested)
    found = [stated_owner] if stated_owner is not None else _owners(own, parameters)
    for name, short, slot, before, after in own:
        if len(found) > 1:
            states.undecided[name] = tuple(
                State(owner + short, slot, before, after, owner) for owner in found
            )
        elif found or slot in _KNOWN_SLOTS:
            # If nothing is known of the parameters, only names that can be nothing else count.
            owner = found[0] if found else ""
            states.add(name, State(owner + short, slot, before, after, owner))


def _owners(group: Iterable[_Nested], parameters: Mapping[str, None]) -> list[str]:
    """The best prefixes for the parameters of an optimizer; none if nothing fits.

    The longest short name says most. Every parameter that ends in it is a proposal, and the
    proposals that are right for most of the names are kept.
    """
    shorts = list(dict.fromkeys(short for _, short, _, _, _ in group))
    shorts.sort(key=lambda short: (-short.count("."), -len(short)))
    proposals: list[str] = []
    for short in shorts[:_MAX_TRIED]:
        ending = f".{short}"
        proposals = [
            name[: len(name) - len(short)]
            for name in parameters
            if name == short or name.endswith(ending)
        ][:_MAX_OWNERS]
        if proposals:
            break
    scores = {
        proposal: sum(proposal + short in parameters for short in shorts) for proposal in proposals
    }
    best = max(scores.values(), default=0)
    return [proposal for proposal, score in scores.items() if score == best]
