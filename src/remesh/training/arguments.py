"""Checks of what a script passes to a `Manager`, before anything collective begins."""

from __future__ import annotations

import operator
from collections.abc import MutableMapping

from remesh.checkpoint.arguments import check_count, check_flag, check_seconds, is_place
from remesh.errors import StateError


def check_step(call: str, step: object, state: object) -> None:
    """Refuse anything but a number of steps and a state, in this order."""
    if not _is_integer(step):
        if _is_integer(state):
            problem = f"step and state are swapped; write manager.{call}(step, state)"
        else:
            problem = f"the step is a number of steps, and not a {type(step).__name__}"
        raise StateError(f"Manager.{call}: {problem}.")
    check_state(call, state)


def check_state(call: str, state: object) -> None:
    """Refuse what is no state of a job."""
    if is_place(state):
        raise StateError(
            f"Manager.{call}: got the place {state!r} where the state is expected\nA manager finds "
            "the checkpoints below its root by itself; remesh.load(state, path) loads a given one."
        )
    has_state_dict = hasattr(state, "state_dict") and hasattr(state, "load_state_dict")
    if not has_state_dict and not isinstance(state, MutableMapping):
        raise StateError(
            f"Manager.{call}: the state is a dict or a module, and not a {type(state).__name__}\n"
            'Name its parts: {"model": model, "optimizer": optimizer}.'
        )


def _is_integer(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def check_options(
    background: object,
    save_at_end: object,
    verify_replicas: object,
    deadline: object,
    arena_bytes: object,
) -> None:
    """Refuse options of a manager that have a wrong type, as from a configuration file."""
    check_flag("Manager", "background", background)
    check_flag("Manager", "save_at_end", save_at_end)
    check_flag("Manager", "verify_replicas", verify_replicas)
    check_seconds("Manager", "deadline", deadline)
    if arena_bytes is not None:
        check_count("Manager", "arena_bytes", arena_bytes, 1)
