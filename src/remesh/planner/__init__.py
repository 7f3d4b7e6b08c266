"""Plans: who writes which box, which bytes a load reads, and what moves between ranks.

Pure functions over tables. Everything is columns of integers (see `remesh.core.index`): a job of a
thousand ranks with a thousand tensors each is a million rows, which numpy handles in a second and
objects would not.
"""

from remesh.planner.assignment import LOCAL_EXCHANGE_COST as LOCAL_EXCHANGE_COST
from remesh.planner.assignment import REMOTE_EXCHANGE_COST as REMOTE_EXCHANGE_COST
from remesh.planner.assignment import Assign as Assign
from remesh.planner.assignment import ReadAssignment as ReadAssignment
from remesh.planner.assignment import assign_readers as assign_readers
from remesh.planner.assignment import assign_readers_if_cheaper as assign_readers_if_cheaper
from remesh.planner.assignment import assign_to_owners as assign_to_owners
from remesh.planner.assignment import touched_windows as touched_windows
from remesh.planner.loading import LoadPlan as LoadPlan
from remesh.planner.loading import ReadLimits as ReadLimits
from remesh.planner.loading import Regions as Regions
from remesh.planner.loading import files_of_windows as files_of_windows
from remesh.planner.loading import longest_gaps as longest_gaps
from remesh.planner.loading import plan_load as plan_load
from remesh.planner.loading import plan_regions as plan_regions
from remesh.planner.saving import Copies as Copies
from remesh.planner.saving import LocalBoxes as LocalBoxes
from remesh.planner.saving import SavePlan as SavePlan
from remesh.planner.saving import choose_writers as choose_writers
from remesh.planner.saving import merge_tensors as merge_tensors
from remesh.planner.saving import plan_save as plan_save
from remesh.planner.transfer import Messages as Messages
from remesh.planner.transfer import TransferPlan as TransferPlan
from remesh.planner.transfer import decode_request as decode_request
from remesh.planner.transfer import encode_request as encode_request
from remesh.planner.transfer import numbers_of_messages as numbers_of_messages
from remesh.planner.transfer import turns_of_distances as turns_of_distances
