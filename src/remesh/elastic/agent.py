"""The agent of `remesh run`: torch's, except in what follows when something happens.

torch's agent starts, watches and stops the processes of its node. This one asks the master what a
failure means, so that only the node at fault is charged, and obeys it while the processes are well:
it restarts them when the world changes, has them save before, and sends their stacks when the job
hangs. Nodes that finish wait for the others, and start again with them if those have to.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from remesh.elastic import child
from remesh.elastic.failures import MAX_MESSAGE, Decision, ProcessFailure
from remesh.elastic.handler import Handler
from remesh.elastic.node import Node, NodeBarredError
from remesh.elastic.protocol import BeatReply
from remesh.elastic.rendezvous import Outcome
from remesh.elastic.stacks import stacks_of
from remesh.errors import MasterError
from remesh.heartbeat import clear_request, read_heartbeat, request

log = logging.getLogger(__name__)

EXIT_REPLACE = 75
"""How the agent ends when another node should take the place of this one."""
EXIT_JOB_FAILED = 1
"""How it ends when the job has failed on another node."""
EXIT_DRAINED = 143
"""How it ends after SIGTERM, as other programs do."""
LAST_LINES = 40


class Agent(LocalElasticAgent):
    """See the module.

    Args:
        spec: What to run; its rendezvous handler is a remesh `Handler`.
        drain_seconds: How long a node that has to go waits for a last checkpoint.
        snapshots: Where the ranks keep snapshots in memory; empty if nowhere.
        **options: What torch's agent takes.
    """

    def __init__(
        self, spec: WorkerSpec, *, drain_seconds: float, snapshots: str = "", **options: Any
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="remesh-beats-"))
        own = ("-I", "-S", child.__file__, str(os.getpid()), str(self._directory), snapshots)
        spec.args = (*own, spec.entrypoint, *spec.args)
        spec.entrypoint = sys.executable
        super().__init__(spec, **options)
        assert isinstance(spec.rdzv_handler, Handler)
        self._node: Node = spec.rdzv_handler.node
        self._drain_seconds = drain_seconds
        self._draining_since: float | None = None
        self._saved_before: int | None = None
        self._joining = False
        self._dumped = 0
        self._files: dict[int, str] = {}

    def on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """Begin to drain, or go at once if no processes run.

        Raises:
            SystemExit: While the node waits for a round.
        """
        if self._joining:
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
        """The master has said where this node's ranks begin: no need to ask the other nodes."""
        placed = self._node.placed
        assert placed is not None
        return [
            Worker(
                local_rank=number,
                global_rank=placed.first_process + number,
                role_rank=placed.first_process + number,
                world_size=placed.num_processes,
                role_world_size=placed.num_processes,
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
            leftover.unlink()  # what the processes of an earlier round said
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._node.watch(self._files)
        return pids

    def close(self) -> None:
        """Remove what the agent has put on the disk."""
        shutil.rmtree(self._directory)

    def _invoke_run(
        self,
        role: str = "default",  # noqa: ARG002 - torch's signature
    ) -> RunResult:
        group = self._worker_group
        self._begin(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            # In this order: if others had to stop because a process of this node died, the master
            # must hear of that process, and would not if it were stopped like one that is well.
            reply = self._node.reply
            result: RunResult = self._monitor_workers(group)
            group.state = result.state
            match result.state:
                case WorkerState.HEALTHY:
                    self._obey(group, reply)
                case WorkerState.SUCCEEDED:
                    if self._all_finish():
                        return result
                    self._restart(group)
                case WorkerState.FAILED | WorkerState.UNHEALTHY:
                    decision = self._report(result)
                    if decision is Decision.GIVE_UP:
                        return result
                    if decision is Decision.REPLACE:
                        self._go(Outcome.FAILED, "the machine is broken", EXIT_REPLACE)
                    self._restart(group)
                case _:
                    raise RuntimeError(f"the processes are in state {result.state}")

    # -------------------------------------------------------------------------------------

    def _begin(self, group: WorkerGroup) -> None:
        """Meet the other nodes and start the processes.

        Raises:
            SystemExit: If the job has ended, or does not want this node.
        """
        self._joining = True
        try:
            self._initialize_workers(group)
        except RendezvousClosedError as closed:
            log.error("%s", closed)
            barred = isinstance(closed.__cause__, NodeBarredError)
            raise SystemExit(EXIT_REPLACE if barred else 1) from closed
        finally:
            self._joining = False

    def _restart(self, group: WorkerGroup) -> None:
        """Stop the processes, meet the other nodes, and start again."""
        self._stop_workers(group)
        group.state = WorkerState.STOPPED
        self._remaining_restarts -= 1  # what the processes see as TORCHELASTIC_RESTART_COUNT
        if self._draining_since is not None:
            self._go(Outcome.DRAINED, "its processes had stopped already", EXIT_DRAINED)
        self._begin(group)

    def _go(self, outcome: Outcome, reason: str, exit_code: int) -> None:
        """Leave the job.

        Raises:
            SystemExit: Always.
        """
        self._stop_workers(self._worker_group)
        self._tell(lambda: self._node.leave(outcome, reason))
        raise SystemExit(exit_code)

    def _tell(self, what: Any) -> None:
        """Tell the master something that must not stop this node if it cannot be told."""
        try:
            what()
        except MasterError as error:
            log.warning("%s", error)

    def _obey(self, group: WorkerGroup, reply: BeatReply) -> None:
        """Do what the master wants while the processes are well."""
        if self._draining_since is not None:
            self._drain(self._draining_since)
        if reply.dump > self._dumped:
            self._dumped = reply.dump
            self._send_stacks(reply.dump)
        if reply.save:
            for file in self._files.values():
                request(file, "save")
        if reply.restart is not None:
            log.info("the processes start again: %s", reply.reason)
            for file in self._files.values():
                clear_request(file)
            self._restart(group)
        if reply.over is not None:
            log.info("the job has %s: %s", reply.over, reply.reason)
            self._go(
                Outcome.FAILED,
                reply.reason,
                0 if reply.over is Outcome.SUCCEEDED else EXIT_JOB_FAILED,
            )

    def _drain(self, since: float) -> None:
        """Have the ranks save, then go."""
        saved = self._saved_step()
        if self._saved_before is None:
            self._saved_before = -1 if saved is None else saved
            reason = "SIGTERM"
            self._tell(lambda: self._node.drain(self._drain_seconds, reason))
            for file in self._files.values():
                request(file, "save")
        made = saved is not None and saved > self._saved_before
        reports = any(read_heartbeat(file) is not None for file in self._files.values())
        waited = time.monotonic() - since
        if made or not reports or waited > self._drain_seconds:
            state = f"saved at step {saved}" if made else f"no checkpoint within {waited:.0f} s"
            self._go(Outcome.DRAINED, f"SIGTERM, {state}", EXIT_DRAINED)

    def _saved_step(self) -> int | None:
        """The newest checkpoint that all processes of the node know."""
        beats = [read_heartbeat(file) for file in self._files.values()]
        steps = [beat.saved_step for beat in beats if beat is not None]
        known = [step for step in steps if step is not None]
        return min(known) if known and len(known) == len(steps) else None

    def _send_stacks(self, dump: int) -> None:
        pids = self._context.pids()
        stacks = {
            worker.global_rank: stacks_of(pids[worker.local_rank], self._files[worker.global_rank])
            for worker in self._worker_group.workers
        }
        self._tell(lambda: self._node.send_stacks(dump, stacks))

    @property
    def _context(self) -> PContext:
        assert self._pcontext is not None, "no processes were started"
        return self._pcontext

    def _all_finish(self) -> bool:
        """Wait for the other nodes; False if the processes have to start again with them."""
        self._tell(lambda: self._node.leave(Outcome.SUCCEEDED, "its processes ended"))
        deadline = time.monotonic() + self._exit_barrier_timeout
        while time.monotonic() < deadline:
            reply = self._node.reply
            if reply.over is not None:
                break
            if reply.restart is not None:
                log.info("the processes start again: %s", reply.reason)
                return False
            time.sleep(self._worker_group.spec.monitor_interval)
        return True

    def _report(self, result: RunResult) -> Decision:
        """Tell the master which processes failed; what it rules."""
        failures = tuple(
            self._describe(rank, failure) for rank, failure in sorted(result.failures.items())
        )
        try:
            ruling = self._node.failed(failures)
        except MasterError as error:
            log.warning("the failure is not reported, the processes start again: %s", error)
            return Decision.RESTART
        log.warning("%s: %s", ruling.decision, ruling.reason)
        return ruling.decision

    def _describe(self, rank: int, failure: Any) -> ProcessFailure:
        placed = self._node.placed
        assert placed is not None
        beat = read_heartbeat(self._files[rank]) if rank in self._files else None
        return ProcessFailure(
            node_id=placed.node_id,
            round=placed.round,
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


def _message_of(failure: Any) -> str:
    """What a process recorded in its error file; nothing if it recorded nothing."""
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
