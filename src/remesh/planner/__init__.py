"""Plans: who writes which box, and which bytes a load reads. Pure functions over tables.

Everything is columns of integers (see `remesh.index`): a job of a thousand ranks with a thousand
tensors each is a million rows, which numpy handles in a second and objects would not.
"""

from remesh.planner.loading import (
    LoadPlan,
    ReadLimits,
    files_of_windows,
    longest_gaps,
    plan_load,
    plan_regions,
    windows_of,
)
from remesh.planner.saving import (
    Copies,
    LocalBoxes,
    SavePlan,
    choose_writers,
    merge_tensors,
    plan_save,
)

__all__ = [
    "Copies",
    "LoadPlan",
    "LocalBoxes",
    "ReadLimits",
    "SavePlan",
    "choose_writers",
    "files_of_windows",
    "longest_gaps",
    "merge_tensors",
    "plan_load",
    "plan_regions",
    "plan_save",
    "windows_of",
]
