"""Python's garbage collector, which costs more than the work where many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Let Python's garbage collector rest while many objects are made that are all needed.

    It would look through all objects of the process each time that their number has grown by some
    share, which costs a state of many small tensors as much as describing it does.
    """
    is_mine = gc.isenabled()
    # Who finds it resting leaves it alone: another thread may wake it up at this moment, and a rest
    # that begins after that would not be ended.
    if is_mine:
        gc.disable()
    try:
        yield
    finally:
        if is_mine:
            gc.enable()
