"""The engine: save a state, open a checkpoint, load it into another layout. Start reading here.

`saving` and `loading` each hold one function that reads from top to bottom as a save or a load
happens; `resharding` is both with the disk left out, and `opened` is a checkpoint that is looked at
without a state to load it into. They only wire together what lies below: the state is described
(`state`, `adapters`), planned (`planner`), moved (`pipeline`) and named on disk (`formats`), and
errors reach every rank (`exchange`).

`__all__` is what documentation names here; `save`, `load`, `reshard` and `Checkpoint`, which
scripts type, it names at the top level. Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.checkpoint.buffers import Buffers as Buffers
    from remesh.checkpoint.converting import ConversionReport as ConversionReport
    from remesh.checkpoint.converting import convert as convert
    from remesh.checkpoint.loading import load as load
    from remesh.checkpoint.opened import Checkpoint as Checkpoint
    from remesh.checkpoint.opened import VerifyReport as VerifyReport
    from remesh.checkpoint.report import RestoreReport as RestoreReport
    from remesh.checkpoint.report import SaveReport as SaveReport
    from remesh.checkpoint.resharding import Resharder as Resharder
    from remesh.checkpoint.resharding import ReshardReport as ReshardReport
    from remesh.checkpoint.resharding import reshard as reshard
    from remesh.checkpoint.saving import save as save
else:
    from remesh._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "remesh.checkpoint.buffers": ("Buffers",),
            "remesh.checkpoint.converting": ("ConversionReport", "convert"),
            "remesh.checkpoint.loading": ("load",),
            "remesh.checkpoint.opened": ("Checkpoint", "VerifyReport"),
            "remesh.checkpoint.report": ("RestoreReport", "SaveReport"),
            "remesh.checkpoint.resharding": ("ReshardReport", "Resharder", "reshard"),
            "remesh.checkpoint.saving": ("save",),
        },
    )

__all__ = [
    "Buffers",
    "ConversionReport",
    "ReshardReport",
    "RestoreReport",
    "SaveReport",
    "VerifyReport",
    "convert",
]
