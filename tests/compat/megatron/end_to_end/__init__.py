"""Megatron's own layers, optimizer and schedules, saved and loaded through either package."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

import remesh

SOURCE = Path(remesh.__file__).parents[1]
ROOT = Path(__file__).parents[4]


class Run(msgspec.Struct, frozen=True):
    """One start of the job."""

    model: str  # `gpt` or `moe`
    tensor: int  # size of tensor parallelism
    pipeline: int  # size of pipeline parallelism
    expert: int  # size of expert parallelism
    world_size: int  # ranks; what the other axes leave is data parallelism
    optimizer_format: str  # what Megatron calls `distrib_optim_sharding_type`
    source: str = ""  # the checkpoint to load, or nothing
    target: str = ""  # where to save, or nothing
    steps: int = 2  # before the save, and as many after it


@dataclass
class Job:
    """The job with one of the packages, in a process that imports Megatron once."""

    package: str  # `remesh` or `own`
    sources: Path | None = None  # a checkout of Megatron-LM; None for the installed megatron-core

    def __enter__(self) -> Self:
        paths = [ROOT, SOURCE, *([self.sources] if self.sources else [])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_GLOO_LAZY_INIT": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.compat.megatron.end_to_end.job", self.package],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        # The writers that Megatron's package starts do not end with their ranks.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def run(self, run: Run) -> list[float]:
        """The losses of a run; `RuntimeError` if it failed, and the process has written why."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(run).decode() + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            # What else is printed is Megatron's.
            name, *losses = line.split()
            if name == "losses":
                return [float(loss) for loss in losses]
            if name == "failed":
                break
        raise RuntimeError(f"{run} failed with {self.package}")
