"""Checks of what a caller passes, before anything collective begins.

State and place stand in the order of `torch.save`. Swapped, they would fail deep in a storage, or
save a path as the state.
"""

from __future__ import annotations

import os

from remesh.errors import StateError
from remesh.formats import Source
from remesh.storage import Storage


def is_place(value: object) -> bool:
    """Whether a value names a place: a path, a URL, a storage or a `Source`."""
    return isinstance(value, str | os.PathLike | Source | Storage)


def check_order(call: str, state: object, path: object) -> None:
    """Refuse a state where the path is to stand and a path where the state is to stand.

    Args:
        call: The function as the caller knows it, such as `save`.
        state: What was passed as the state.
        path: What was passed as the place.

    Raises:
        StateError: If they are swapped.
    """
    if is_place(state) and not is_place(path):
        raise StateError(
            f"{call}: state and path are swapped; write {call}(state, path). The first argument is "
            f"a {type(state).__name__}, which names a place, and the second a "
            f"{type(path).__name__}, which does not."
        )
