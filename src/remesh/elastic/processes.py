"""The training processes of a node, as torch's agent holds them.

torch starts all processes of a node together and stops all when one fails. Where the others go on
in the next world, only what is missing is started: in the context of the others, with the variables
that torch gave its predecessor and those of the new world, and with log files of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from remesh.elastic.failures import MAX_MESSAGE
from remesh.elastic.script import done_note

log = logging.getLogger(__name__)

LAST_LINES = 40
"""Lines of the logs of a process that are part of the report of its failure."""
_KNOWN_CAUSE = (
    "; a known cause is a thread of torch (gloo) that needs Python while Python ends; see "
    "docs/how-to/torchrun.md"
)


class Process:
    """A training process as torch sees it: one that dies after its work was done has succeeded.

    A crash at exit must not cost a restart, nor stop processes that still work: a finished job
    would run again.
    """

    def __init__(self, process: subprocess.Popen[bytes], directory: str) -> None:
        self._process = process
        self._note = done_note(directory, process.pid)
        self._has_succeeded = False
        self.pid = process.pid

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._exit_code(self._process.poll())

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end; the exit code."""
        return self._exit_code(self._process.wait(timeout))

    def _exit_code(self, code: int | None) -> int | None:
        if self._has_succeeded:
            return 0
        if code is None or code >= 0 or not self._note.exists():
            return code
        self._has_succeeded = True
        log.warning(
            "process %d died by signal %d at exit after its work: no failure%s",
            self.pid,
            -code,
            _KNOWN_CAUSE if code == -signal.SIGABRT else "",
        )
        return 0


def look_after(context: SubprocessContext, directory: str) -> None:
    """Take a process that dies after its work was done for one that has succeeded.

    Those that were seen before stay as they are.
    """
    for handler in context.subprocess_handlers.values():
        if not isinstance(handler.proc, Process):
            process = Process(handler.proc, directory)
            handler.proc = cast("subprocess.Popen[bytes]", process)


def exit_codes(context: SubprocessContext) -> dict[int, int | None]:
    """How each process has ended, by local rank; None for those that live."""
    return {rank: one.proc.poll() for rank, one in context.subprocess_handlers.items()}


def failures(context: SubprocessContext) -> dict[int, ProcessFailure]:
    """The processes that have failed, by local rank. The others are left alone."""
    return {
        rank: ProcessFailure(
            local_rank=rank,
            pid=context.subprocess_handlers[rank].proc.pid,
            exitcode=code,
            error_file=context.error_files[rank],
        )
        for rank, code in exit_codes(context).items()
        if code
    }


def kill(context: SubprocessContext, local_rank: int) -> None:
    """SIGKILL a process and its group, and wait for its end."""
    handler = context.subprocess_handlers[local_rank]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(handler.proc.pid, signal.SIGKILL)
    handler.proc.wait()


def start_missing(
    context: SubprocessContext,
    environments: Mapping[int, Mapping[str, str]],
    name: str,
    start: Callable[..., SubprocessHandler],
) -> None:
    """Start processes in place of those that have ended.

    `environments` are the variables of the new world, by local rank of what is missing.
    """
    assert isinstance(context.entrypoint, str)
    for rank, environment in environments.items():
        context.envs[rank] = {**context.envs[rank], **environment}
        Path(context.error_files[rank]).unlink(missing_ok=True)
        logs = _new_logs(context, rank, name)
        old = context.subprocess_handlers[rank]
        context.subprocess_handlers[rank] = start(
            entrypoint=context.entrypoint,
            args=context.args[rank],
            env=context.envs[rank],
            stdout=logs[0],
            stderr=logs[1],
            local_rank_id=rank,
            numa_options=context._numa_options,  # noqa: SLF001 - not public, and needed
        )
        _release(old)
    # What torch keeps for itself of processes that have ended.
    context._running_local_ranks = set(range(context.nprocs))  # noqa: SLF001
    context._failures.clear()  # noqa: SLF001


def _release(old: SubprocessHandler) -> None:
    """Kill what a process that has ended left in its group, and close its log files."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(old.proc.pid, signal.SIGKILL)
    for stream in (old._stdout, old._stderr):  # noqa: SLF001 - `close` does not if no group is left
        if stream is not None:
            stream.close()


def _new_logs(context: SubprocessContext, rank: int, name: str) -> list[str]:
    """New log files of a process, shown where the old ones were; empty for none."""
    found = []
    streams = ((context.stdouts, sys.stdout), (context.stderrs, sys.stderr))
    for number, (paths, stream) in enumerate(streams):
        old = paths.get(rank, "")
        if old in ("", os.devnull):
            found.append(old)
            continue
        # Of the same attempt, and before the end by which people find them.
        file = Path(old)
        paths[rank] = str(file.with_name(f"{file.name.split('.')[0]}.{name}{file.suffix}"))
        found.append(paths[rank])
        tail = context._tail_logs[number]  # noqa: SLF001 - what shows the logs of the others
        if rank not in tail._log_files:  # noqa: SLF001
            continue
        shown = TailLog(context.name, {rank: paths[rank]}, stream, tail._log_line_prefixes)  # noqa: SLF001
        shown.start()
        context._tail_logs.append(shown)  # noqa: SLF001
    return found


def message_of(failure: Any) -> str:
    """The message in the error file of a process; empty if there is none."""
    data = failure.error_file_data
    message = data.get("message", "") if isinstance(data, Mapping) else ""
    if isinstance(message, Mapping):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
        return str(stack or message.get("message", ""))
    return "" if failure.error_file == "<N/A>" else str(message)


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
