"""Tensors of another size than what is stored: what becomes of the elements that are new.

A load fills the box that the stored tensor and the target have in common. What the target has
beyond that box is new, and a policy decides about it; what is stored beyond it is not read. Each
rank acts on its own boxes.

A policy is given by the caller (`resize=`), or declared by a `ShardedTensor`. Optimizer state
follows its parameter: where that may be resized, so may its state, and new elements of it are zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from remesh.core.geometry import Box
from remesh.core.memory import CarrierArray, Memory
from remesh.core.state import TensorEntry
from remesh.errors import StateError

Policy = Literal["keep", "zeros", "mean"]
"""What becomes of new elements."""

_ROWS_AT_ONCE = 4096
"""How many rows are converted for a sum at once."""


def check_patterns(unfitting: Sequence[Iterable[str]]) -> None:
    """Refuse patterns that fit no tensor of any rank, given those that fit none of each."""
    unknown = sorted(set(unfitting[0]).intersection(*unfitting))
    if unknown:
        raise StateError(
            f"resize= fits no tensor of the state: {', '.join(unknown)}\n"
            "Nothing was changed. Give names of tensors of the state, such as "
            "'model.embed.weight', or patterns for them, such as '*.embed.weight'."
        )


def policies_of(
    entries: Sequence[tuple[TensorEntry, list[str]]], resize: Mapping[str, str]
) -> dict[str, str]:
    """The policy of each tensor of a state that may be resized, by name.

    A whole name comes before a pattern, and patterns come in their order. A tied tensor may be
    called by any of its names.
    """
    found: dict[str, str] = {}
    for entry, names in entries:
        policy = entry.resize if entry.follows else _given(names, resize) or entry.resize
        if policy is not None:
            found.update(dict.fromkeys(names, policy))
    for entry, names in entries:
        if entry.follows is not None and entry.name not in found:
            follows = entry.follows in found or _given([entry.follows], resize)
            policy = "zeros" if follows else _given(names, resize)
            if policy is not None:
                found.update(dict.fromkeys(names, policy))
    return found


def _given(names: Sequence[str], resize: Mapping[str, str]) -> str | None:
    """The policy that the caller gives a tensor, if any."""
    exact = next((resize[name] for name in names if name in resize), None)
    patterns = (policy for pattern, policy in resize.items() if _fits(pattern, names))
    return exact or next(patterns, None)


def _fits(pattern: str, names: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def unfitting_patterns(
    entries: Sequence[tuple[TensorEntry, list[str]]], resize: Mapping[str, str]
) -> list[str]:
    """The names and patterns that fit no tensor of this rank's state."""
    names = [name for _, own in entries for name in own]
    return [pattern for pattern in resize if not _fits(pattern, names)]


def refusal(
    stored: tuple[int, ...], wanted: tuple[int, ...], policy: str | None, *, is_real: bool
) -> str | None:
    """Why a tensor of a stored shape cannot be resized to a wanted one; None if it can."""
    told = f"shape {stored} is stored, {wanted} is wanted"
    if policy is None or len(stored) != len(wanted):
        return told
    if policy == "mean" and (stored[1:] != wanted[1:] or not stored[0]):
        return f'{told}; "mean" makes rows of stored rows, so that only dim 0 may differ'
    if policy == "mean" and not is_real:
        return f'{told}; "mean" is for floating-point tensors'
    return None


def has_size_of(state: tuple[int, ...], stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """True if optimizer state is as long as its parameter was in a dim that is resized.

    Arguments are the shape of the state, and the stored and the new shape of the parameter.
    """
    if len(state) == len(stored):
        changed = zip(state, stored, wanted, strict=True)
        return any(extent == old != new and extent > 1 for extent, old, new in changed)
    lengths = {old for old, new in zip(stored, wanted, strict=True) if old != new and old > 1}
    return not lengths.isdisjoint(state)


def fill_with_zeros(memory: Memory, shape: tuple[int, ...]) -> None:
    """Fill memory of a shape."""
    memory.copy_in(Box.whole(shape), np.broadcast_to(np.zeros((), memory.carrier), shape))


def fill_with_mean(memory: Memory, box: Box, stored: str, rows: CarrierArray) -> None:
    """Fill each row of a box with the mean of rows that were read, of a stored dtype."""
    import torch

    dtype: torch.dtype = getattr(torch, stored)
    # A tensor of one dim has rows of one element.
    columns = torch.from_numpy(rows.reshape(len(rows), -1).view(np.uint8)).view(dtype)
    total = torch.zeros(columns.shape[1], dtype=torch.float64)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        total += columns[start : start + _ROWS_AT_ONCE].to(torch.float64).sum(0)
    mean = (total / len(rows)).to(dtype)
    carried = mean.view(torch.uint8).numpy().view(rows.dtype)
    memory.copy_in(box, np.broadcast_to(carried.reshape(box.shape[1:]), box.shape))
