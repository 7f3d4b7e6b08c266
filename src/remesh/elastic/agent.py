"""The agent of `remesh run`: torch's agent, controlled by the master.

torch's agent starts, watches and stops the processes of its node. This one reports failures to the
master, which charges only the node at fault, and follows the master while the processes are
healthy: it restarts them when the world changes, has them save before, and sends their stacks when
the job hangs. Nodes that finish wait for the others, and start again with them if those have to.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
)

from remesh.elastic import child, guard
from remesh.elastic.directories import BEATS, agent_directory
from remesh.elastic.failures import MAX_MESSAGE, FailureAction, ProcessFailure
from remesh.elastic.handler import Handler
from remesh.elastic.node import LEAVE_PATIENCE, NodeClient, NodeRejectedError
from remesh.elastic.protocol import BeatReply, Drain, ReportFailures, ReportStacks
from remesh.elastic.rendezvous import Change, Outcome
from remesh.elastic.stacks import stacks_of
from remesh.errors import MasterError
from remesh.heartbeat import Heartbeat, clear_request, read_heartbeat, request
from remesh.script import done_note

log = logging.getLogger(__name__)

EXIT_REPLACE = 75
"""How the agent ends when another node should take the place of this one."""
EXIT_JOB_FAILED = 1
"""How it ends when the job has failed on another node."""
EXIT_DRAINED = 143
"""How it ends after SIGTERM, as other programs do."""
EXIT_UNSAVED = 1
"""How it ends after SIGTERM when the ranks could not save in time."""
LAST_LINES = 40


class Agent(LocalElasticAgent):
    """The agent of a node.

    Args:
        spec: What to run; its rendezvous handler is a remesh `Handler`.
        drain_seconds: How long a node that drains waits for a last checkpoint.
        snapshots: Directory for the snapshots of the ranks; empty for none.
        **options: What torch's agent takes.
    """

    def __init__(
        self, spec: WorkerSpec, *, drain_seconds: float, snapshots: str = "", **options: Any
    ) -> None:
        self._resources = ExitStack()
        directory = self._resources.enter_context(agent_directory(tempfile.gettempdir(), BEATS))
        self._resources.enter_context(_guard(directory))
        self._directory = Path(directory)
        own = ("-I", "-S", child.__file__, str(os.getpid()), str(self._directory), snapshots)
        spec.args = (*own, spec.entrypoint, *spec.args)
        spec.entrypoint = sys.executable
        super().__init__(spec, **options)
        assert isinstance(spec.rdzv_handler, Handler)
        self._node: NodeClient = spec.rdzv_handler.node
        self._drain_seconds = drain_seconds
        self._draining_since: float | None = None
        self._is_announced = False
        self._exits_on_sigterm = False
        self._dumped = 0
        self._files: dict[int, str] = {}
        self._holds = False
        self._held_since = 0.0

    def on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """Begin to drain, or exit at once if no process runs.

        Raises:
            SystemExit: While the node waits for a round, or for its master after its processes
                have ended.
        """
        if self._exits_on_sigterm:
            raise SystemExit(EXIT_DRAINED)
        if self._draining_since is None:
            self._draining_since = time.monotonic()

    # What torch's agent calls -------------------------------------------------------------

    def _assign_worker_ranks(
        self,
        store: object,  # noqa: ARG002 - torch's signature
        group_rank: int,  # noqa: ARG002
        group_world_size: int,  # noqa: ARG002
        spec: WorkerSpec,
    ) -> list[Worker]:
        """The ranks follow from the assignment, without an exchange among the nodes."""
        assignment = self._node.assignment
        assert assignment is not None
        return [
            Worker(
                local_rank=number,
                global_rank=assignment.first_rank + number,
                role_rank=assignment.first_rank + number,
                world_size=assignment.world_size,
                role_world_size=assignment.world_size,
            )
            for number in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        first = worker_group.workers[0].global_rank
        self._files = {
            first + worker.local_rank: str(self._directory / f"{worker.local_rank}.json")
            for worker in worker_group.workers
        }
        for leftover in self._directory.iterdir():
            leftover.unlink()  # written by the processes of an earlier round
        self._holds = False
        # torch subtracts this for TORCHELASTIC_RESTART_COUNT, which is the same on all ranks of a
        # round: the number of worlds before it.
        assert self._node.assignment is not None
        num_worlds = self._node.assignment.round - 1
        self._remaining_restarts = worker_group.spec.max_restarts - num_worlds
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert isinstance(self._context, SubprocessContext)
        for handler in self._context.subprocess_handlers.values():
            process = _Process(handler.proc, str(self._directory))
            handler.proc = cast("subprocess.Popen[bytes]", process)
        self._node.watch(self._files)
        return pids

    def close(self) -> None:
        """End what is left of the processes, and remove the agent's directory."""
        self._resources.close()

    def _invoke_run(
        self,
        role: str = "default",  # noqa: ARG002 - torch's signature
    ) -> RunResult:
        group = self._worker_group
        self._begin(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            # In this order: if others had to stop because a process of this node died, the master
            # must receive that failure, and would not if the process were stopped like the others.
            reply = self._node.reply
            result: RunResult = self._monitor_workers(group)
            group.state = result.state
            match result.state:
                case WorkerState.HEALTHY:
                    self._follow(group, reply)
                case WorkerState.SUCCEEDED:
                    if self._all_finish():
                        return result
                    self._restart(group)
                case WorkerState.FAILED | WorkerState.UNHEALTHY:
                    action = self._report(result)
                    if action is FailureAction.FAIL:
                        return result
                    if action is FailureAction.REPLACE:
                        self._go(Outcome.FAILED, "the machine is broken", EXIT_REPLACE)
                    self._restart(group)
                case _:
                    raise RuntimeError(f"the processes are in state {result.state}")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's signature
        self._stop(signal.SIGTERM)

    # -------------------------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        """Stop the processes, and what they have started in their process groups."""
        self._shutdown(number, timeout=self._shutdown_timeout)
        left = guard.kill_groups(str(self._directory), self._shutdown_timeout)
        if left:
            log.error("SIGKILL has not ended processes %s; they may be stuck in the kernel", left)

    def _begin(self, group: WorkerGroup) -> None:
        """Join the next round and start the processes.

        Raises:
            SystemExit: If the job has ended, rejects this node, or cannot be joined.
        """
        self._exits_on_sigterm = True
        try:
            self._initialize_workers(group)
        except RendezvousClosedError as closed:
            log.error("%s", closed)
            rejected = isinstance(closed.__cause__, NodeRejectedError)
            raise SystemExit(EXIT_REPLACE if rejected else 1) from closed
        except RendezvousConnectionError as error:
            log.error("%s", error)
            reason = str(error)
            self._try(lambda: self._node.leave(Outcome.FAILED, reason))
            raise SystemExit(EXIT_JOB_FAILED) from error
        finally:
            self._exits_on_sigterm = False

    def _restart(self, group: WorkerGroup, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the processes by a signal, join the next round, and start again."""
        self._stop(number)
        group.state = WorkerState.STOPPED
        if self._draining_since is not None:
            self._go(Outcome.DRAINED, "its processes had stopped already", EXIT_DRAINED)
        self._begin(group)

    def _go(self, outcome: Outcome, reason: str, exit_code: int) -> None:
        """Leave the job.

        Raises:
            SystemExit: Always.
        """
        self._stop_workers(self._worker_group)
        self._try(lambda: self._node.leave(outcome, reason))
        raise SystemExit(exit_code)

    def _try(self, send: Callable[[], object]) -> None:
        """Send a request; this node goes on if the master does not answer."""
        try:
            send()
        except MasterError as error:
            log.warning("%s", error)

    def _follow(self, group: WorkerGroup, reply: BeatReply) -> None:
        """Do what the reply to the last heartbeat says, while the processes are healthy."""
        if self._draining_since is not None:
            self._drain(self._draining_since)
        if reply.dump > self._dumped:
            self._dumped = reply.dump
            self._send_stacks(reply.dump)
        if self._draining_since is None and reply.restart in {None, Change.GROW}:
            self._hold(reply.save or reply.restart is not None)
        if reply.restart is Change.GROW and not self._is_saved():
            return  # the other nodes wait as well
        if reply.restart is not None:
            log.info("the processes start again: %s", reply.reason)
            # Processes that hang do not react to SIGTERM.
            hang = reply.restart is Change.HANG
            self._restart(group, signal.SIGKILL if hang else signal.SIGTERM)
        if reply.outcome is not None:
            log.info("the job has %s: %s", reply.outcome, reply.reason)
            self._go(
                Outcome.FAILED,
                reply.reason,
                0 if reply.outcome is Outcome.SUCCEEDED else EXIT_JOB_FAILED,
            )

    def _drain(self, since: float) -> None:
        """Have the ranks save, then leave."""
        if not self._is_announced:
            self._is_announced = True
            sender, seconds = self._node.sender(), self._drain_seconds
            request = Drain(**sender, seconds=seconds, reason="SIGTERM")
            self._try(lambda: self._node.client.ask(request, patience=LEAVE_PATIENCE))
            self._hold(True)
        if not self._is_saved():
            return
        beats = self._beats()
        if not beats:
            self._go(Outcome.DRAINED, "SIGTERM, no rank reports to a manager", EXIT_DRAINED)
        if all(beat.waits for beat in beats):
            state = f"SIGTERM, saved at step {beats[0].saved_step}"
            self._go(Outcome.DRAINED, state, EXIT_DRAINED)
        state = f"SIGTERM, no checkpoint within {time.monotonic() - since:.0f} s"
        self._go(Outcome.DRAINED, state, EXIT_UNSAVED)

    def _hold(self, wanted: bool) -> None:
        """Have the ranks save and wait, so that no step is repeated later; or let them continue."""
        if wanted is self._holds:
            return
        self._holds = wanted
        self._held_since = time.monotonic()
        for file in self._files.values():
            if wanted:
                request(file, "save-and-hold")
            else:
                clear_request(file)

    def _is_saved(self) -> bool:
        """Whether the ranks have saved and wait, or the time limit for that has passed.

        Ranks that report nothing have no manager that could save.
        """
        beats = self._beats()
        waits = len(beats) == len(self._files) and all(beat.waits for beat in beats)
        is_late = time.monotonic() - self._held_since > self._drain_seconds
        return waits or not beats or is_late

    def _beats(self) -> list[Heartbeat]:
        """What the ranks reported last."""
        beats = [read_heartbeat(file) for file in self._files.values()]
        return [beat for beat in beats if beat is not None]

    def _send_stacks(self, dump: int) -> None:
        pids = self._context.pids()
        stacks = {
            worker.global_rank: stacks_of(pids[worker.local_rank], self._files[worker.global_rank])
            for worker in self._worker_group.workers
        }
        request = ReportStacks(**self._node.sender(), dump=dump, stacks=stacks)
        self._try(lambda: self._node.client.ask(request, patience=LEAVE_PATIENCE))

    @property
    def _context(self) -> PContext:
        assert self._pcontext is not None, "no processes were started"
        return self._pcontext

    def _all_finish(self) -> bool:
        """Wait for the other nodes; False if the processes have to start again with them."""
        self._exits_on_sigterm = True
        try:
            self._try(lambda: self._node.leave(Outcome.SUCCEEDED, "its processes ended"))
        finally:
            self._exits_on_sigterm = False
        deadline = time.monotonic() + self._exit_barrier_timeout
        while time.monotonic() < deadline:
            reply = self._node.reply
            if reply.outcome is not None:
                break
            if reply.restart is not None:
                log.info("the processes start again: %s", reply.reason)
                return False
            time.sleep(self._worker_group.spec.monitor_interval)
        return True

    def _report(self, result: RunResult) -> FailureAction:
        """Report the failed processes to the master; what this node has to do."""
        failures = tuple(
            self._describe(rank, failure) for rank, failure in sorted(result.failures.items())
        )
        self._exits_on_sigterm = True
        try:
            request = ReportFailures(**self._node.sender(), failures=failures)
            decision = self._node.client.ask(request)
        except MasterError as error:
            log.warning("the failure is not reported, the processes start again: %s", error)
            return FailureAction.RESTART
        finally:
            self._exits_on_sigterm = False
        log.warning("%s: %s", decision.action, decision.reason)
        return decision.action

    def _describe(self, rank: int, failure: Any) -> ProcessFailure:
        assignment = self._node.assignment
        assert assignment is not None
        beat = read_heartbeat(self._files[rank]) if rank in self._files else None
        return ProcessFailure(
            node_id=assignment.node_id,
            round=assignment.round,
            rank=rank,
            local_rank=failure.local_rank,
            exit_code=failure.exitcode,
            time=float(failure.timestamp),
            message=_message_of(failure)[-MAX_MESSAGE:],
            log_tail=_tail(self._logs_of(failure.local_rank)),
            step=None if beat is None else beat.step,
        )

    def _logs_of(self, local_rank: int) -> list[str]:
        context = self._context
        files: list[Mapping[int, str]] = [context.stdouts, context.stderrs]
        return [paths[local_rank] for paths in files if paths.get(local_rank)]


class _Process:
    """A training process as torch sees it: one that dies after its work was done has succeeded.

    A crash at exit must not cost a restart, nor stop processes that still work: a finished job
    would run again.

    Args:
        process: The process.
        directory: Where it leaves the note that its work is done.
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
            "process %d died by signal %d at exit, after its work was done: no failure%s",
            self.pid,
            -code,
            _KNOWN_CAUSE if code == -signal.SIGABRT else "",
        )
        return 0


_KNOWN_CAUSE = (
    "; a known cause is a thread of torch (gloo) that needs Python while Python ends; see "
    "docs/how-to/torchrun.md"
)


@contextmanager
def _guard(directory: str) -> Iterator[None]:
    """Run a guard, which ends the training when this process has ended (`guard.py`)."""
    command = (sys.executable, "-I", "-S", guard.__file__, directory)
    # It reads until the agent's end of the pipe is closed; a session of its own keeps it from
    # signals to the agent's process group.
    process = subprocess.Popen(  # noqa: S603 - our own file
        command, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        process.communicate()


def _message_of(failure: Any) -> str:
    """The message in the error file of a process; empty if there is none."""
    data = failure.error_file_data
    message = data.get("message", "") if isinstance(data, Mapping) else ""
    if isinstance(message, Mapping):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
        return str(stack or message.get("message", ""))
    return "" if failure.error_file == "<N/A>" else str(message)


def _tail(paths: list[str]) -> str:
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


def handle_sigterm(agent: Agent) -> None:
    """Let SIGTERM drain the node. torch's agent must be told not to handle it."""
    signal.signal(signal.SIGTERM, agent.on_sigterm)
