"""How a state and a checkpoint differ, in words; and the error that says so."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from remesh import values
from remesh.checkpoint.report import Findings
from remesh.checkpoint.stored import StoredState
from remesh.errors import MismatchError

MAX_LISTED = 10
"""How many names of a kind an error message lists; the exception carries all."""


def listed(names: Iterable[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = list(names)
    more = f", ... and {len(shown) - MAX_LISTED} more" if len(shown) > MAX_LISTED else ""
    return ", ".join(shown[:MAX_LISTED]) + more


def kind_of(record: object) -> str:
    """What the record of a tensor that is made of others says of it."""
    kind = record.get("class") if isinstance(record, Mapping) else None
    return f"{kind or 'tensor'} made of other tensors"


def difference(stored: object, wanted: object) -> str:
    """In what two records of tensors that are made of others differ."""
    if not isinstance(stored, Mapping) or not isinstance(wanted, Mapping):
        return "what is stored of how it is made of other tensors cannot be read"
    # As they are encoded: 1 is not True.
    known, own = (
        {key: values.encode(item) for key, item in record.items()} for record in (stored, wanted)
    )
    keys = [key for key in {**wanted, **stored} if known.get(key) != own.get(key)]
    if "class" in keys:
        keys = ["class"]
    told = [f"{key} {stored.get(key)} is stored, {wanted.get(key)} is wanted" for key in keys]
    return "; ".join(told)


def untied(name: str, other: str, what: str) -> str:
    """What to say of stored tensors that differ and cannot both fill one tied tensor."""
    return (
        f"{name} and {other} are tied in the state, but the checkpoint has different {what} for "
        "them; untie them, or load one of the two"
    )


def refuse(stored: StoredState, found: Findings, *, keep_missing: bool = False) -> None:
    """Refuse a state if names differ from what is stored, or are missing that may not.

    Raises:
        MismatchError: If they do.
    """
    # What is stored of a tensor that is something else need not be told one by one.
    missing = tuple(name for name in found.missing if not name.startswith(found.others))
    conflicts = tuple(told for told in found.conflicts if not told.startswith(found.others))
    if not conflicts and (keep_missing or not missing):
        return
    lines = [f"the state does not fit the checkpoint {stored.url} (nothing was changed)"]
    if missing:
        names = list(stored.names())
        lines.append(f"{len(missing)} names are not stored:")
        for name in missing[:MAX_LISTED]:
            near = difflib.get_close_matches(name, names, n=1)
            lines.append(f"  {name}" + (f" (stored is {near[0]})" if near else ""))
        if len(missing) > MAX_LISTED:
            lines.append(f"  ... and {len(missing) - MAX_LISTED} more")
        lines.append('missing="keep" leaves them as they are.')
        if found.new_parameters:
            lines.append(
                "Parameters that are new to an optimizer then begin without its state. If the "
                "checkpoint has them under other names, rename those with transform= instead."
            )
    if conflicts:
        lines.append(f"{len(conflicts)} names differ:")
        lines += [f"  {conflict}" for conflict in conflicts[:MAX_LISTED]]
        if len(conflicts) > MAX_LISTED:
            lines.append(f"  ... and {len(conflicts) - MAX_LISTED} more")
    raise MismatchError("\n".join(lines), missing=missing, conflicts=conflicts)
