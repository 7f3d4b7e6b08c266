"""The training processes of a node, started as torchrun starts them: variables, logs, error files.

A process is forked by an interpreter that has imported its modules (`warm`), if there is one. Else
it is a command of its own (`child`). Either way it leads a session, is a child of the agent, and
ends with it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template
from typing import Any, TextIO

from torch.distributed.elastic.multiprocessing import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig

from remesh.elastic import child, guard
from remesh.elastic.failures import MAX_MESSAGE
from remesh.elastic.process_socket import ProcessSockets
from remesh.elastic.warm import Forked, Warm

log = logging.getLogger(__name__)

LAST_LINES = 40
"""Lines of the logs of a process that are part of the report of its failure."""
LOOK_SECONDS = 0.01


class Process:
    """A training process."""

    def __init__(
        self,
        started: subprocess.Popen[bytes] | Forked,
        local_rank: int = 0,
        error_file: str = "",
    ) -> None:
        self._started = started
        self._local_rank = local_rank
        self._error_file = error_file
        self._code: int | None = None
        self._sent: signal.Signals | None = None  # the last signal of the agent
        self.pid = started.pid
        self.failure: ProcessFailure | None = None  # unless a signal of the agent has ended it
        self.logs: list[str] = []
        self.shown = contextlib.ExitStack()  # what shows its logs

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        code = self._started.poll()
        if code and self._sent is None:  # what handles a signal may end with any code
            self.failure = ProcessFailure(self._local_rank, self.pid, code, self._error_file)
        self._code = code
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group, which may have ended."""
        if self.poll() is None:  # a death before the signal is a failure
            self._sent = number
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end_group(self) -> None:
        """Kill what a process that has ended has left in its group, whatever its environment."""
        # As long as the group has members, no new process gets its id.
        if self.poll() is not None and not Path("/proc", str(self.pid)).exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Give back what belongs to a process that has ended."""
        self.shown.close()

    def give_up(self) -> None:
        """Count a process that SIGKILL does not end as ended: it does nothing any more."""
        self._code = -signal.SIGKILL


_OPTIONS = {
    "shutdown_timeout": 30,
    "virtual_local_rank": False,
    "numa_options": None,
    "duplicate_stdout_filters": None,
    "duplicate_stderr_filters": None,
}
"""Options that torchrun of torch 2.13 has and older ones lack, as it has them by default."""


def completed(config: LaunchConfig) -> LaunchConfig:
    """The config, with the options that that of an older torch lacks."""
    for name, default in _OPTIONS.items():
        if not hasattr(config, name):
            setattr(config, name, default)
    return config


class Processes:
    """The processes of a node, by local rank."""

    def __init__(
        self,
        config: LaunchConfig,
        command: Sequence[str],
        *,
        sockets: ProcessSockets,
        snapshots: str = "",
        warm: Warm,
    ) -> None:
        self._config = completed(config)
        self._command = list(command)
        self.name = command[0]
        self._sockets = sockets
        self._snapshots = snapshots
        self._warm = warm
        self._shutdown_timeout = config.shutdown_timeout or 0.0
        self._all: dict[int, Process] = {}

    @property
    def living(self) -> dict[int, int]:
        """The ids of the processes that live."""
        return {rank: one.pid for rank, one in self._all.items() if one.poll() is None}

    @property
    def failed(self) -> dict[int, ProcessFailure]:
        """The processes that have failed, since they were seen to have."""
        return {rank: one.failure for rank, one in self._all.items() if one.failure is not None}

    def start(self, ranks: Collection[int], worlds: Mapping[int, Mapping[str, str]]) -> None:
        """Start processes, in place of those that have ended.

        `worlds` are the variables of the world, for all processes of the node.
        """
        if not ranks:
            return
        environments = {rank: {**self._variables(rank), **world} for rank, world in worlds.items()}
        logs = self._config.logs_specs.reify(environments)  # type: ignore[union-attr] # torch's own default
        old = [self._all[rank] for rank in ranks if rank in self._all]
        try:
            for rank in sorted(ranks):
                self._all[rank] = self._start(rank, environments[rank], logs)
        finally:
            _release(old)  # this takes a moment, for which the new ones do not wait

    def _variables(self, rank: int) -> dict[str, str]:
        """The variables of a process that are the same in all worlds."""
        config = self._config
        found = {
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(config.nproc_per_node),
            "ROLE_NAME": config.role,
            "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
            "TORCHELASTIC_RUN_ID": config.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
            "REMESH_AGENT_SOCKET": self._sockets.path_of(rank),
            "REMESH_SNAPSHOT_DIR": self._snapshots,
        }
        if config.virtual_local_rank:  # each process sees one GPU alone
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = range(rank + 1) if visible is None else visible.split(",")
            if rank >= len(gpus):
                raise ValueError(f"process {rank} has no GPU in CUDA_VISIBLE_DEVICES={visible}")
            found |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(gpus[rank]).strip()}
        return found

    def _start(self, rank: int, environment: dict[str, str], logs: LogsDest) -> Process:
        outputs = logs.stdouts[rank], logs.stderrs[rank]
        command = macros.substitute(self._command, str(rank))
        numa = self._config.numa_options
        words = ("-I", "-S", child.__file__, str(os.getpid()), *outputs, *command)
        started: subprocess.Popen[bytes] | Forked
        if numa is None:
            variables = {**os.environ, **environment}
            started = self._warm.fork(command, variables, outputs) or subprocess.Popen(  # noqa: S603
                [sys.executable, *words], env=variables, start_new_session=True
            )
        else:  # a process that is bound to memory is started by another command
            started = SubprocessHandler(
                entrypoint=sys.executable,
                args=words,
                env=environment,
                stdout=None,
                stderr=None,
                local_rank_id=rank,
                numa_options=numa,
            ).proc
        process = Process(started, rank, logs.error_files[rank])
        process.logs = [path for path in outputs if path]
        self._show(process, rank, environment, logs)
        return process

    def _show(
        self, process: Process, rank: int, environment: Mapping[str, str], logs: LogsDest
    ) -> None:
        """Show what a process writes, if the user wants that."""
        config = self._config
        prefixes = None
        if config.log_line_prefix_template:
            prefix = Template(config.log_line_prefix_template).safe_substitute(
                role_name=config.role, rank=environment["RANK"], local_rank=rank
            )
            prefixes = {rank: prefix}

        def show(files: Mapping[int, str], stream: TextIO, **wanted: Callable[[str], bool]) -> None:
            paths = {rank: files[rank]} if rank in files else {}
            tail = TailLog(config.role, paths, stream, prefixes, **wanted)  # type: ignore[arg-type]
            process.shown.callback(tail.start().stop)

        for files, stream, needles, copy in (
            (logs.tee_stdouts, sys.stdout, config.duplicate_stdout_filters, "filtered_stdout"),
            (logs.tee_stderrs, sys.stderr, config.duplicate_stderr_filters, "filtered_stderr"),
        ):
            show(files, stream)
            if needles:
                path = getattr(logs, copy)
                file = open(path, "a", errors="replace", buffering=1)  # noqa: SIM115
                process.shown.enter_context(file)
                show(files, file, log_line_filter=functools.partial(_has_any, needles))

    def end(self, ranks: Collection[int], number: signal.Signals) -> None:
        """Send processes a signal; after SIGKILL, wait until they have ended."""
        for rank in ranks:
            self._all[rank].send(number)
        if number is signal.SIGKILL:
            self._wait(ranks)
            for rank in ranks & self.living.keys():
                self._all[rank].give_up()

    def _wait(self, ranks: Collection[int]) -> None:
        deadline = time.monotonic() + self._shutdown_timeout
        while self.living.keys() & ranks and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def end_all(self, number: signal.Signals) -> None:
        """End all processes, by SIGKILL if a signal does not, and whatever they have started."""
        self.end(self.living.keys(), number)
        self._wait(self.living.keys())
        self.end(self.living.keys(), signal.SIGKILL)
        self.end_started(range(self._config.nproc_per_node))
        _release(self._all.values())

    def end_started(self, ranks: Collection[int]) -> None:
        """Kill what processes have started, and what is left of them: it would train besides."""
        for rank in self._all.keys() & ranks:
            self._all[rank].end_group()
        names = {os.path.basename(self._sockets.path_of(rank)) for rank in ranks}
        left = guard.kill(self._sockets.directory, self._shutdown_timeout, names)
        if left:
            log.error("SIGKILL has not ended processes %s; they may be stuck in the kernel", left)

    def logs(self, rank: int) -> list[str]:
        return self._all[rank].logs


def _release(processes: Iterable[Process]) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(Process.release, processes))


def _has_any(needles: Sequence[str], line: str) -> bool:
    return any(needle in line for needle in needles)


def message_of(failure: Any) -> str:
    """The message in the error file of a process; empty if there is none."""
    data = failure.error_file_data
    message = data.get("message", "") if isinstance(data, Mapping) else ""
    if isinstance(message, Mapping):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
        message = stack or message.get("message", "")
    elif failure.error_file == "<N/A>":
        message = ""
    return str(message).encode(errors="replace").decode()  # JSON may have halves of characters


def tail_of(paths: list[str]) -> str:
    """The last lines of log files."""
    lines: list[str] = []
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 4 * MAX_MESSAGE, 0))
                text = file.read().decode(errors="replace")
        except OSError as error:
            text = f"{path}: {error}"
        lines += text.splitlines()[-LAST_LINES:]
    return "\n".join(lines)[-MAX_MESSAGE:]
