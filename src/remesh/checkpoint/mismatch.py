"""How a state and a checkpoint differ, in words; and the error that says so."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from remesh._repr import listed
from remesh.checkpoint.report import Findings
from remesh.checkpoint.stored import LIVE, StoredState
from remesh.core import values
from remesh.errors import MismatchError
from remesh.recipes.hub import suggested_call, suggested_ties

MAX_LISTED = 10
"""How many names of a kind an error message lists; the exception carries all."""

MAX_EXAMPLES = 2
"""How many of the names with another beginning are listed."""

MAX_COMPARED = 5000
"""How many names are looked at for one that is near."""


def _lines(texts: Sequence[str], limit: int = MAX_LISTED, more: str = "") -> list[str]:
    """The first of some texts, a line each, and how many more there are."""
    rest = [f"... and {len(texts) - limit} more{more}"] if len(texts) > limit else []
    return [f"  {text}" for text in [*texts[:limit], *rest]]


def counted(number: int, one: str, many: str) -> str:
    """A number of names with the verb that it takes."""
    return f"1 name {one}" if number == 1 else f"{number} names {many}"


def _nearest(name: str, names: list[str]) -> str:
    """The nearest of some names as a question; empty if none is near."""
    if len(names) > MAX_COMPARED:
        last = name.rpartition(".")[2]
        names = [other for other in names if other.rpartition(".")[2] == last][:MAX_COMPARED]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    # An item that a list lacks comes with the name of the list.
    return f" (did you mean {near[0]}?)" if near and not name.startswith(f"{near[0]} (") else ""


def _common_rename(missing: Sequence[str], names: Sequence[str]) -> tuple[str, str] | None:
    """A beginning of stored names, and the one that missing names have instead; None if none has.

    It is taken from a missing name and the stored one with the longest common end, and holds for
    all missing names with that beginning, two or more. The beginning of missing names may be empty:
    a model alone, which is stored with others. Leaves of one module, which are called `weight` in
    all others as well, say nothing unless that module is at the top; nor do states of parameters,
    which follow those.
    """
    known = set(names)
    for name in missing[:MAX_LISTED]:
        wanted = name.split(".")
        ends = [other.split(".") for other in names if other.endswith(f".{wanted[-1]}")]
        stored = max(ends, key=lambda other: _common_end(other, wanted), default=wanted)
        num_common = min(_common_end(stored, wanted), len(stored) - 1)
        before = wanted[: len(wanted) - num_common]
        if num_common == 0 or (num_common == 1 and len(before) > 1):
            continue
        old, new = ".".join((*stored[:-num_common], "")), ".".join((*before, ""))
        those = [other for other in missing if other.startswith(new) and ".state." not in new]
        if len(those) > 1 and all(old + other.removeprefix(new) in known for other in those):
            return old, new
    return None


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    """How many of the last parts are equal."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _following(others: Sequence[str], names: Sequence[str], rename: tuple[str, str]) -> set[str]:
    """Missing names of optimizers that are stored under the names of renamed parameters."""
    known = set(names)
    old, new = (text.partition(".")[2] for text in rename)
    found = set()
    for name in others:
        optimizer, _, key = name.partition(".state.")
        if key.startswith(new) and f"{optimizer}.state.{old}{key.removeprefix(new)}" in known:
            found.add(name)
    groups = tuple({f"{name.partition('.state.')[0]}.param_groups." for name in found})
    return found | {name for name in others if name.startswith(groups)}


def _missing_lines(missing: Sequence[str], names: Sequence[str]) -> list[str]:
    """Lines about names that are not stored, and stored ones that may be meant."""
    lines = [f"{counted(len(missing), 'is', 'are')} not stored:"]
    others, rename = list(missing), _common_rename(missing, names)
    if rename is not None:
        renamed = [name for name in missing if name.startswith(rename[1])]
        others = [name for name in missing if not name.startswith(rename[1])]
        following = _following(others, names, rename)
        others = [name for name in others if name not in following]
        lines += _lines(renamed, MAX_EXAMPLES, f" under {rename[1]}" if rename[1] else "")
        if following:
            lines.append(f"  ... and {len(following)} of their optimizers")
        lines.append(
            f'If they are what is stored under "{rename[0]}", to load them: '
            f'transform={{"{rename[0]}": "{rename[1]}"}}'
        )
    near = [_nearest(name, list(names)) for name in others[:MAX_LISTED]]
    lines += _lines([name + text for name, text in zip_longest(others, near, fillvalue="")])
    them = "it as it is" if len(missing) == 1 else "them as they are"
    lines.append(f'missing="keep" leaves {them}.')
    if any(near) and rename is None:
        lines.append(
            "What is stored under another name is renamed on its way by transform=, such as "
            '{"model.": "net."}.'
        )
    return lines


def _peft_lines(missing: Sequence[str], names: Sequence[str]) -> list[str]:
    """What to do if only one of state and checkpoint is of a model of peft."""
    wanted, stored = (
        any(".base_layer." in name or ".lora_" in name for name in some)
        for some in (missing, names)
    )
    if wanted == stored:
        return []
    if wanted:
        return [
            "If it is of the base model, load it before peft.get_peft_model wraps that:",
            'missing="keep" would leave the weights under .base_layer as they are.',
        ]
    return ["It is of a peft model: load it into what peft.get_peft_model returns."]


def _state_lines(missing: Sequence[str], names: Iterable[str]) -> list[str]:
    """What to do if a parameter has state in the checkpoint, and some that a step needs is not."""
    for name in missing[:MAX_LISTED]:
        state, groups = f"{name.rpartition('.')[0]}.", f"{name.partition('state.')[0]}param_groups."
        own = (other.removeprefix(state) for other in names if other.startswith(state))
        kept = dict.fromkeys(key.partition(".")[0] for key in own)
        if kept and any(other.startswith(groups) for other in names):
            return [
                f"Another optimizer was saved, or one with other options: it kept {listed(kept)}.",
                'Construct that one; or let the missing state begin anew, by missing="keep".',
            ]
    return []


def _tied_lines(missing: Sequence[str], stored: StoredState) -> list[str]:
    """What to do if an optimizer has one state for tied parameters that are not tied here."""
    keys = [name.partition(".params (")[2].removesuffix(")") for name in missing]
    for alias, name in stored.index.aliases.items():
        if any(key and f".{alias}".endswith(f".{key}") for key in keys):
            return [
                f"{alias} is stored as tied to {name}, with one state for both. To copy it:",
                f'  transform="{name} -> {name}, {alias}, untie"',
            ]
    return []


def kind_of(record: object) -> str:
    """The kind that the record of a tensor that is made of others says."""
    kind = record.get("class") if isinstance(record, Mapping) else None
    return f"{kind or 'tensor'} made of other tensors"


def difference(stored: object, wanted: object) -> str:
    """In what two records of tensors that are made of others differ."""
    if not isinstance(stored, Mapping) or not isinstance(wanted, Mapping):
        return "what is stored of how it is made of other tensors cannot be read"
    # As they are encoded: 1 is not True.
    known, own = (
        {key: values.encode_read(item, str(key)) for key, item in record.items()}
        for record in (stored, wanted)
    )
    keys = [key for key in {**wanted, **stored} if known.get(key) != own.get(key)]
    if "class" in keys:
        keys = ["class"]
    texts = [f"{key} {stored.get(key)} is stored, {wanted.get(key)} is wanted" for key in keys]
    return "; ".join(texts)


def untied(name: str, other: str, what: str) -> str:
    """A line about stored tensors that differ and cannot both fill one tied tensor."""
    return (
        f"{name} and {other} are tied in the state, but the checkpoint has different {what} for "
        "them; untie them, or load one of the two"
    )


def refuse(stored: StoredState, found: Findings, *, keep_missing: bool = False) -> None:
    """Refuse a state if names differ from what is stored, or are missing that may not."""
    # What is stored of a tensor that is something else need not be told one by one.
    missing = tuple(name for name in found.missing if not name.startswith(found.others))
    conflicts = tuple(text for text in found.conflicts if not text.startswith(found.others))
    if not conflicts and (keep_missing or not missing):
        return
    other = stored.url if stored.url == LIVE else "the checkpoint"
    lines = [f"the state does not fit {other} (nothing was changed)\n{_place(stored)}"]
    if missing:
        taken = {*found.restored, *found.renamed.values(), *found.cast, *found.resized}
        names = [name for name in stored if name not in taken]
        lines += [*_missing_lines(missing, names), *_peft_lines(missing, names)]
        lines += _state_lines(missing, stored)
        tied = _tied_lines(missing, stored)
        lines += tied
        if found.new_parameters and not tied:
            lines.append(
                "Parameters that are new to an optimizer then begin without its state. If the "
                "checkpoint has them under other names, rename those with transform= instead."
            )
    if conflicts:
        lines.append(f"{counted(len(conflicts), 'differs', 'differ')}:")
        lines += _lines(conflicts)
    if found.other_sizes:
        lines.append(
            "A tensor is loaded in the size in which it is stored; change its size afterwards "
            "(docs/how-to/load-a-part.md)."
        )
    raise MismatchError("\n".join(lines), missing=missing, conflicts=conflicts)


def _place(stored: StoredState) -> str:
    """Where what is stored lies: a checkpoint, or other live state."""
    return f"in {LIVE}:" if stored.url == LIVE else f"checkpoint: {stored.url}"


def unasked(names: Sequence[str], stored: StoredState) -> MismatchError:
    """The error about names that are stored and that no rank asks for."""
    return MismatchError(
        f"{counted(len(names), 'is', 'are')} stored that no rank asks for (nothing was changed)\n"
        f"{_place(stored)}\n  {listed(names)}\n"
        'unexpected="ignore" leaves them out.',
        unexpected=tuple(names),
    )


def with_recipe(error: MismatchError, state: object, stored: StoredState) -> MismatchError:
    """The error, in other words if a model of transformers has other tensors than its files."""
    found = suggested_call(state, stored.index, error.missing)
    if found is None:
        ties = suggested_ties(state, stored.index, error.missing)
        if not ties:
            return error
        text = f"{error}\nThe model does not tie these weights. To fill both: transform={ties!r}"
        return MismatchError(text, missing=error.missing, conflicts=error.conflicts)
    kind, call = found
    shown = ", ".join(error.missing[:MAX_EXAMPLES])
    lines = [
        f"{kind} has other tensors than its files (nothing was changed)",
        f"checkpoint: {stored.url}",
        f"{counted(len(error.missing), 'is', 'are')} not stored, such as {shown}",
        *_lines(error.conflicts),
        "Make them of what is stored, as transformers does:",
        "  from remesh.recipes import huggingface_to_module",
        f"  remesh.load(..., transform={call})",
    ]
    return MismatchError("\n".join(lines), missing=error.missing, conflicts=error.conflicts)
