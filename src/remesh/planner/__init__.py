"""Plans: who writes which box, which bytes a load reads, and what moves between ranks.

Pure functions over tables. Everything is columns of integers (see `remesh.core.index`): a job of a
thousand ranks with a thousand tensors each is a million rows, which numpy handles in a second and
objects would not.
"""

from remesh.planner.assignment import (
    LOCAL_EXCHANGE_COST,
    REMOTE_EXCHANGE_COST,
    Assign,
    ReadAssignment,
    assign_readers,
    assign_readers_if_cheaper,
    assign_to_owners,
    touched_windows,
)
from remesh.planner.loading import (
    LoadPlan,
    ReadLimits,
    Regions,
    files_of_windows,
    longest_gaps,
    plan_load,
    plan_regions,
)
from remesh.planner.saving import (
    Copies,
    LocalBoxes,
    SavePlan,
    choose_writers,
    merge_tensors,
    plan_save,
)
from remesh.planner.transfer import (
    Messages,
    TransferPlan,
    decode_request,
    encode_request,
    numbers_of_messages,
    turns_of_distances,
)

__all__ = [
    "LOCAL_EXCHANGE_COST",
    "REMOTE_EXCHANGE_COST",
    "Assign",
    "Copies",
    "LoadPlan",
    "LocalBoxes",
    "Messages",
    "ReadAssignment",
    "ReadLimits",
    "Regions",
    "SavePlan",
    "TransferPlan",
    "assign_readers",
    "assign_readers_if_cheaper",
    "assign_to_owners",
    "choose_writers",
    "decode_request",
    "encode_request",
    "files_of_windows",
    "longest_gaps",
    "merge_tensors",
    "numbers_of_messages",
    "plan_load",
    "plan_regions",
    "plan_save",
    "touched_windows",
    "turns_of_distances",
]
