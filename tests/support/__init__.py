"""What tests of remesh, and of things built on it, are made of. Only tests import this.

* `run_ranks` plays the ranks of a job as threads, `run_processes` as processes with a real gloo
  process group; the `_outcomes` forms report on each rank instead of raising.
* `FaultInjector` makes a chosen rank fail, die or stall at a named point; `FaultyStorage` makes
  a storage fail.
"""

from tests.support.faults import FaultInjector, InjectedError
from tests.support.faulty_storage import Fail, FaultyStorage
from tests.support.outcomes import (
    Died,
    Outcome,
    Raised,
    RankDiedError,
    Returned,
    TimedOut,
    returned_values,
)
from tests.support.processes import run_processes, run_processes_outcomes
from tests.support.ranks import run_ranks, run_ranks_outcomes

__all__ = [
    "Died",
    "Fail",
    "FaultInjector",
    "FaultyStorage",
    "InjectedError",
    "Outcome",
    "Raised",
    "RankDiedError",
    "Returned",
    "TimedOut",
    "returned_values",
    "run_processes",
    "run_processes_outcomes",
    "run_ranks",
    "run_ranks_outcomes",
]
