"""The engine: save a state, open a checkpoint, load it into another layout. Start reading here.

`saving` and `loading` each hold one function that reads from top to bottom as a save or a load
happens; `saver` saves beside the training; `opened` is a checkpoint that is looked at without a
state to load it into; `repair` makes a new checkpoint of what is whole in a damaged one. They only
wire together what lies below: the state is described (`state`, `adapters`), planned (`planner`),
moved (`pipeline`) and named on disk (`formats`), and errors reach every rank (`exchange`).

Names are resolved on first use, so that a writer process, which needs few of these modules, is
there soon.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.checkpoint.buffers import Buffers as Buffers
    from remesh.checkpoint.loading import load as load
    from remesh.checkpoint.opened import Checkpoint as Checkpoint
    from remesh.checkpoint.opened import VerifyReport as VerifyReport
    from remesh.checkpoint.report import RestoreReport as RestoreReport
    from remesh.checkpoint.saver import Progress as Progress
    from remesh.checkpoint.saver import SaveHandle as SaveHandle
    from remesh.checkpoint.saver import Saver as Saver
    from remesh.checkpoint.saver import save_async as save_async
    from remesh.checkpoint.saving import save as save

_HOME_OF = {
    "Buffers": "buffers",
    "Checkpoint": "opened",
    "Progress": "saver",
    "RestoreReport": "report",
    "SaveHandle": "saver",
    "Saver": "saver",
    "VerifyReport": "opened",
    "load": "loading",
    "save": "saving",
    "save_async": "saver",
}

__all__ = [*sorted(_HOME_OF)]  # noqa: PLE0604 - the names are in the table above


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
