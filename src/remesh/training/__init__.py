"""What a training script uses: when to save, what to keep, how to resume as the same run.

`manager` is the place to begin: `Manager` wires the rest together. `policies` and `retention`
decide when to save and what to keep, `catalog` lists, marks and removes checkpoints, `resuming`
loads the newest that can be loaded, `rng` keeps random numbers by role, `provenance` says where a
checkpoint comes from, `watch` hears signals and requests. `sampling`, `steps`, `scaling`,
`export` and `trackers` are for the script itself: which samples come next, what a step means on
another number of ranks, which learning rate then, weights for inference, and which curves to go on
with. `integrations` has a module for each training framework that needs one.

The names that scripts use can be imported from here. They are resolved on first use, so whoever
needs a policy does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.catalog import CheckpointInfo as CheckpointInfo
    from remesh.catalog import TrackerRun as TrackerRun
    from remesh.catalog import hold as hold
    from remesh.catalog import pin as pin
    from remesh.catalog import unpin as unpin
    from remesh.training.export import ExportReport as ExportReport
    from remesh.training.export import export_weights as export_weights
    from remesh.training.manager import Manager as Manager
    from remesh.training.policies import EverySeconds as EverySeconds
    from remesh.training.policies import EverySteps as EverySteps
    from remesh.training.policies import OnRequest as OnRequest
    from remesh.training.policies import OnSignals as OnSignals
    from remesh.training.resuming import Resumed as Resumed
    from remesh.training.retention import KeepBest as KeepBest
    from remesh.training.retention import KeepEvery as KeepEvery
    from remesh.training.retention import KeepLast as KeepLast
    from remesh.training.rng import Randomness as Randomness
    from remesh.training.rng import role_in as role_in
    from remesh.training.sampling import ResumableBatchSampler as ResumableBatchSampler
    from remesh.training.sampling import ResumableSampler as ResumableSampler
    from remesh.training.sampling import SampleOrder as SampleOrder
    from remesh.training.sampling import SkipBatchSampler as SkipBatchSampler
    from remesh.training.scaling import ScalingDecision as ScalingDecision
    from remesh.training.scaling import apply_scaling as apply_scaling
    from remesh.training.scaling import decide_scaling as decide_scaling
    from remesh.training.steps import GlobalBatch as GlobalBatch
    from remesh.training.steps import convert_step as convert_step
    from remesh.training.trackers import resume_arguments as resume_arguments
    from remesh.training.trackers import run_id_of as run_id_of
    from remesh.training.wrapping import PerRankState as PerRankState
    from remesh.training.wrapping import resumable as resumable

_HOMES = {
    "remesh.catalog": ("CheckpointInfo", "TrackerRun", "hold", "pin", "unpin"),
    "remesh.training.export": ("ExportReport", "export_weights"),
    "remesh.training.manager": ("Manager",),
    "remesh.training.policies": ("EverySeconds", "EverySteps", "OnRequest", "OnSignals"),
    "remesh.training.resuming": ("Resumed",),
    "remesh.training.retention": ("KeepBest", "KeepEvery", "KeepLast"),
    "remesh.training.rng": ("Randomness", "role_in"),
    "remesh.training.sampling": (
        "ResumableBatchSampler",
        "ResumableSampler",
        "SampleOrder",
        "SkipBatchSampler",
    ),
    "remesh.training.scaling": ("ScalingDecision", "apply_scaling", "decide_scaling"),
    "remesh.training.steps": ("GlobalBatch", "convert_step"),
    "remesh.training.trackers": ("resume_arguments", "run_id_of"),
    "remesh.training.wrapping": ("PerRankState", "resumable"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - the names are in the table above


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
