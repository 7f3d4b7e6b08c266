"""What a training script uses: when to save, what to keep, how to resume as the same run.

`manager` is the place to begin: `Manager` wires the rest together. `integrations` has a module for
each training framework that needs one. The names that scripts use are imported from here, `Manager`
itself from `remesh`. Those that need torch are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remesh.catalog import TrackerRun
from remesh.training.policies import (
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    OnRequest,
    OnSignals,
    RetentionDecision,
)
from remesh.training.resuming import Resumed
from remesh.training.rng import Randomness, derived_seed, role_in
from remesh.training.trackers import resume_arguments, run_id_of

if TYPE_CHECKING:
    from remesh.training.export import ExportReport, export_weights
    from remesh.training.sampling import (
        ResumableBatchSampler,
        ResumableSampler,
        SampleOrder,
        SkipBatchSampler,
        convert_step,
    )
else:
    from remesh._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "remesh.training.export": ("ExportReport", "export_weights"),
            "remesh.training.sampling": (
                "ResumableBatchSampler",
                "ResumableSampler",
                "SampleOrder",
                "SkipBatchSampler",
                "convert_step",
            ),
        },
    )

__all__ = [
    "EverySeconds",
    "EverySteps",
    "ExportReport",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "OnRequest",
    "OnSignals",
    "Randomness",
    "ResumableBatchSampler",
    "ResumableSampler",
    "Resumed",
    "RetentionDecision",
    "SampleOrder",
    "SkipBatchSampler",
    "TrackerRun",
    "convert_step",
    "derived_seed",
    "export_weights",
    "resume_arguments",
    "role_in",
    "run_id_of",
]
