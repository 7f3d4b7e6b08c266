"""What a training script uses: when to save, what to keep, how to resume as the same run.

`manager` is the place to begin: `Manager` wires the rest together. `policies` and `retention`
decide when to save and what to keep (`remesh.catalog` lists, marks and removes), `resuming`
loads the newest that can be loaded, `rng` keeps random numbers by role, `provenance` says where a
checkpoint comes from, `watch` hears signals and requests. `sampling`, `steps`, `scaling`,
`export` and `trackers` are for the script itself: which samples come next, what a step means on
another number of ranks, which learning rate then, weights for inference, and which curves to go on
with. `integrations` has a module for each training framework that needs one.

The names that scripts use are imported from here, `Manager` itself from `remesh`. They are resolved
on first use, so a script that needs a policy does not import torch for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.catalog import TrackerRun as TrackerRun
    from remesh.training.export import ExportReport as ExportReport
    from remesh.training.export import export_weights as export_weights
    from remesh.training.policies import EverySeconds as EverySeconds
    from remesh.training.policies import EverySteps as EverySteps
    from remesh.training.policies import OnRequest as OnRequest
    from remesh.training.policies import OnSignals as OnSignals
    from remesh.training.resuming import Resumed as Resumed
    from remesh.training.retention import KeepBest as KeepBest
    from remesh.training.retention import KeepEvery as KeepEvery
    from remesh.training.retention import KeepLast as KeepLast
    from remesh.training.retention import RetentionDecision as RetentionDecision
    from remesh.training.rng import Randomness as Randomness
    from remesh.training.rng import derived_seed as derived_seed
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
else:
    from remesh._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "remesh.catalog": ("TrackerRun",),
            "remesh.training.export": (
                "ExportReport",
                "export_weights",
            ),
            "remesh.training.policies": (
                "EverySeconds",
                "EverySteps",
                "OnRequest",
                "OnSignals",
            ),
            "remesh.training.resuming": ("Resumed",),
            "remesh.training.retention": (
                "RetentionDecision",
                "KeepBest",
                "KeepEvery",
                "KeepLast",
            ),
            "remesh.training.rng": (
                "Randomness",
                "derived_seed",
                "role_in",
            ),
            "remesh.training.sampling": (
                "ResumableBatchSampler",
                "ResumableSampler",
                "SampleOrder",
                "SkipBatchSampler",
            ),
            "remesh.training.scaling": (
                "ScalingDecision",
                "apply_scaling",
                "decide_scaling",
            ),
            "remesh.training.steps": (
                "GlobalBatch",
                "convert_step",
            ),
            "remesh.training.trackers": (
                "resume_arguments",
                "run_id_of",
            ),
            "remesh.training.wrapping": (
                "PerRankState",
                "resumable",
            ),
        },
    )

__all__ = [
    "EverySeconds",
    "EverySteps",
    "ExportReport",
    "GlobalBatch",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "OnRequest",
    "OnSignals",
    "PerRankState",
    "Randomness",
    "ResumableBatchSampler",
    "ResumableSampler",
    "Resumed",
    "RetentionDecision",
    "SampleOrder",
    "ScalingDecision",
    "SkipBatchSampler",
    "TrackerRun",
    "apply_scaling",
    "convert_step",
    "decide_scaling",
    "derived_seed",
    "export_weights",
    "resumable",
    "resume_arguments",
    "role_in",
    "run_id_of",
]
