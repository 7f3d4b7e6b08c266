"""Checks of what a caller passes, before anything collective begins.

State and place stand in the order of `torch.save`. Swapped, they would fail deep in a storage, or
save a path as the state.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress

import numpy as np

from remesh._repr import shown
from remesh.errors import OptionError, StateError
from remesh.storage import Storage


def is_place(value: object) -> bool:
    """True if a value names a place: a path, a URL or a storage."""
    return isinstance(value, str | os.PathLike | Storage)


def check_order(call: str, state: object, path: object) -> None:
    """Refuse a state where the path is to stand and a path where the state is to stand."""
    if is_place(state) and not is_place(path):
        raise StateError(
            f"{call}: state and path are swapped; write {call}(state, path)\nThe first argument is "
            f"a {type(state).__name__}, which names a place, and the second a "
            f"{type(path).__name__}, which does not."
        )


def check_target(call: str, state: object) -> None:
    """Refuse a state to fill that cannot be changed: its new content would be lost."""
    if isinstance(state, tuple | Mapping) and not isinstance(state, MutableMapping):
        raise StateError(
            f"{call}: a state of type {type(state).__name__} cannot be filled in place\n"
            'Put it into a dict or a list, here and where it is saved: {"state": ...}'
        )


def check_flag(call: str, name: str, value: object) -> None:
    """Refuse anything but True and False, such as the text "false" of a configuration file."""
    if not isinstance(value, bool | np.bool_):
        raise OptionError(f"{call}: {name}= must be True or False, not {shown(value)}.")


def check_choice(call: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse anything but one of some words."""
    if value not in choices:
        known = " or ".join(repr(choice) for choice in choices)
        raise OptionError(f"{call}: {name}= must be {known}, not {shown(value)}.")


def check_count(call: str, name: str, value: object, least: int) -> int:
    """A whole number; refuse one that is too small, and anything else."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            count = operator.index(value)  # type: ignore[arg-type]
            if count >= least:
                return count
    raise OptionError(
        f"{call}: {name}= must be a whole number, {least} or more, not {shown(value)}."
    )


def check_seconds(call: str, name: str, value: object) -> None:
    """Refuse anything but a positive number."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not value > 0:  # type: ignore[operator]
        raise OptionError(
            f"{call}: {name}= must be a number of seconds, more than 0, not {shown(value)}."
        )


def check_same_options(options: Sequence[tuple[str | None, ...]]) -> None:
    """Check that the ranks treat copies alike; others would wait for each other.

    Options are given in rank order.
    """
    other = next((rank for rank, one in enumerate(options) if one != options[0]), None)
    if other is not None:
        raise StateError(
            f"ranks 0 and {other} disagree about buffers, verify_replicas, format or compress\n"
            f"They are {options[0]} and {options[other]}; pass the same on all ranks"
        )
