"""The engine: save a state, open a checkpoint, load it into another layout. Start reading here.

`saving` and `loading` each hold one function that reads from top to bottom as a save or a load
happens; `saver` saves beside the training; `opened` is a checkpoint that is looked at without a
state to load it into; `repair` makes a new checkpoint of what is whole in a damaged one. They only
wire together what lies below: the state is described (`state`, `adapters`), planned (`planner`),
moved (`pipeline`) and named on disk (`formats`), and errors reach every rank (`exchange`).
"""

from remesh.checkpoint.loading import load
from remesh.checkpoint.opened import Checkpoint, VerifyReport
from remesh.checkpoint.repair import RepairReport, repair
from remesh.checkpoint.report import RestoreReport
from remesh.checkpoint.saver import Progress, SaveHandle, Saver, save_async
from remesh.checkpoint.saving import save

__all__ = [
    "Checkpoint",
    "Progress",
    "RepairReport",
    "RestoreReport",
    "SaveHandle",
    "Saver",
    "VerifyReport",
    "load",
    "repair",
    "save",
    "save_async",
]
