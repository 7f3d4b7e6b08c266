"""Commands of tests that need torch, started without the seconds that each import of torch takes.

A command such as `remesh run` is run by a child of a fork server that has imported what the command
imports anyhow. Otherwise it is as it would be: a process of its own, with its own environment,
working directory and output, whose exit status is the command's, and which starts other processes
as it always does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_PRELOAD = ("torch.distributed.run", "torch._dynamo", "remesh.elastic.launch", "pytest", __name__)


class Command:
    """A Python script that runs, with what tests use of a `Popen`; output is appended to a file."""

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        variables.update(environment or {})
        self._process = context.Process(
            target=_run,
            args=(list(command), str(output), variables, str(directory or Path.cwd())),
            name=" ".join(command[:2]),
            daemon=True,  # killed at the latest when the tests end
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, seconds or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(command: list[str], output: str, environment: dict[str, str], directory: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = command
    # What the interpreter would have done with it, had it begun with this environment.
    extra = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in extra if path not in sys.path]
    tempfile.tempdir = None  # what the fork server has found
    runpy.run_path(command[0], run_name="__main__")
