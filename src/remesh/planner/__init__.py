"""Plans: who writes which box, which bytes a load reads, and what moves between ranks.

Pure functions over tables. Everything is columns of integers (see `remesh.core.index`): a job of a
thousand ranks with a thousand tensors each is a million rows, which numpy handles in a second and
objects would not.
"""

from remesh.planner.assignment import Assign as Assign
from remesh.planner.loading import LoadPlan as LoadPlan
from remesh.planner.loading import ReadLimits as ReadLimits
from remesh.planner.loading import Regions as Regions
from remesh.planner.loading import plan_load as plan_load
from remesh.planner.saving import LocalBoxes as LocalBoxes
from remesh.planner.saving import SavePlan as SavePlan
from remesh.planner.saving import plan_save as plan_save
from remesh.planner.transfer import TransferPlan as TransferPlan
