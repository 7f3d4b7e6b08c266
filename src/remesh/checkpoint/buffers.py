"""Buffers of modules that differ between ranks, such as the running statistics of BatchNorm.

Frameworks shard parameters and leave buffers alone, so every rank has statistics of its own
samples. The caller says which of them a checkpoint gets:

* `rank0`: those of the lowest rank that has them.
* `per_rank`: those of the lowest rank and, under names of their own, those of every rank. A load
  gives each rank those of the rank with its number. A rank that had no counterpart gets those of
  the lowest rank.

The state itself is not changed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal

from remesh.core.state import Role, Stored, TensorEntry

Buffers = Literal["rank0", "per_rank"]
"""Whose buffers a checkpoint gets."""

_OF_RANK = re.compile(r"(.*)@rank_\d{5,}", re.DOTALL)


def name_on_rank(name: str, rank: int) -> str:
    """The stored name of a rank's own copy of a buffer."""
    return f"{name}@rank_{rank:05d}"


def choose_buffers(
    entries: Iterable[TensorEntry], buffers: Buffers | None, rank: int
) -> list[TensorEntry]:
    """The tensors of this rank as an option says that they are stored."""
    if buffers is None:
        return list(entries)
    chosen = []
    for entry in entries:
        if not entry.is_buffer:
            chosen.append(entry)
            continue
        chosen.append(dataclasses.replace(entry, role=Role.FIRST))
        if buffers == "per_rank":
            chosen.append(
                dataclasses.replace(
                    entry, name=name_on_rank(entry.name, rank), role=Role.MAIN, alias_key=None
                )
            )
    return chosen


def own_buffers(entries: Iterable[TensorEntry], stored: Stored, rank: int) -> list[TensorEntry]:
    """The tensors that a rank loads: its own buffers, where they are stored."""
    return [
        dataclasses.replace(entry, name=name_on_rank(entry.name, rank))
        if entry.is_buffer and stored.tensor(name_on_rank(entry.name, rank)) is not None
        else entry
        for entry in entries
    ]


def without_buffers_of_ranks(names: Iterable[str], extra: Iterable[str]) -> list[str]:
    """Those of `extra` that are not of buffers which are stored for each rank.

    Not every copy of such a buffer is asked for in every world size.
    """
    bases = {match[1] for match in map(_OF_RANK.fullmatch, names) if match is not None}
    copies = {name_on_rank(base, 0)[:-5] for base in bases}
    return [
        name for name in extra if name not in bases and name[: name.rfind("_") + 1] not in copies
    ]
