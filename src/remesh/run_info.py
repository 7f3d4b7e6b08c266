"""What the launcher says about this process: the only module that reads the environment.

The names are torchrun's, which Slurm scripts and other launchers set as well; `remesh run` adds its
own, which begin with `REMESH_`. Other modules take a `RunInfo` as an argument or call `run_info`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from remesh._repr import short_repr

__all__ = ["RunInfo", "run_info"]

AGENT_VARIABLE = "REMESH_AGENT_SOCKET"
SNAPSHOT_VARIABLE = "REMESH_SNAPSHOT_DIR"
PROGRESS_VARIABLE = "REMESH_PROGRESS"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """This process among the processes of its job."""

    run_id: str = ""
    """Names the job; the same on all its ranks and across restarts."""
    rank: int = 0
    """Number of this process in the job."""
    local_rank: int = 0
    """Its number on this node."""
    world_size: int = 1
    """Number of processes of the job."""
    local_world_size: int = 1
    """Number of them on this node."""
    restart_count: int = 0
    """How often the launcher has restarted the processes."""
    agent_socket: str = ""
    """Where the agent listens to this process; empty if there is none."""
    snapshot_dir: str = ""
    """Where memory that outlives this process is to be kept; empty if nowhere."""
    progress: str = ""
    """When a terminal shows progress bars: `off`, `on` for at once, or empty for work that takes
    longer than a second."""

    __repr__ = short_repr


def outliving_environment() -> dict[str, str]:
    """The variables for a process that is to outlive this one, without what marks a training.

    The agent ends the processes that have its mark before it starts the next ones.
    """
    return {name: value for name, value in os.environ.items() if name != AGENT_VARIABLE}


def run_info(environment: Mapping[str, str] | None = None) -> RunInfo:
    """Read the `RunInfo` from environment variables, by default those of this process.

    Raises:
        ValueError: If a variable that should be a number is not; the message names it.
    """
    variables = os.environ if environment is None else environment

    def number(name: str, default: int) -> int:
        text = variables.get(name, "")
        if not text:
            return default
        try:
            return int(text)
        except ValueError:
            raise ValueError(
                f"environment variable {name} should be a whole number, but is {text!r}"
            ) from None

    return RunInfo(
        run_id=variables.get("TORCHELASTIC_RUN_ID", ""),
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
        agent_socket=variables.get(AGENT_VARIABLE, ""),
        snapshot_dir=variables.get(SNAPSHOT_VARIABLE, ""),
        progress=variables.get(PROGRESS_VARIABLE, ""),
    )
