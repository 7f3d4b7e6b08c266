"""The agent of `remesh run`: torch's agent, controlled by the master.

torch's agent starts, watches and stops the processes of its node. This one reports failures to the
master, which charges only the node at fault, and follows the master while the processes are
healthy: it restarts them when the world changes, has them save before, and sends their stacks when
the job hangs. Nodes that finish wait for the others, and start again with them if those have to.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined] # not said to be exported
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
)

from remesh.elastic import child, guard, processes, reentry
from remesh.elastic.directories import BEATS, agent_directory
from remesh.elastic.failures import MAX_MESSAGE, FailureAction, ProcessFailure, restart_pause
from remesh.elastic.handler import Handler
from remesh.elastic.heartbeat import Heartbeat, Request, clear_request, request
from remesh.elastic.node import NodeClient, NodeRejectedError
from remesh.elastic.orders import read_report, send_order
from remesh.elastic.orders import remove as remove_orders
from remesh.elastic.protocol import Assignment, Content, JobEnded, Stop
from remesh.elastic.reentry import Enter, Leave, Recovery, Report
from remesh.elastic.rendezvous import Change, Outcome
from remesh.elastic.stacks import Stacks
from remesh.elastic.warm import Warm
from remesh.errors import MasterError

log = logging.getLogger(__name__)

EXIT_REPLACE = 75
"""How the agent ends when another node should take the place of this one."""
EXIT_JOB_FAILED = 1
"""How it ends when the job has failed on another node, or its end cannot be learned."""
EXIT_DRAINED = 143
"""How it ends after SIGTERM, as other programs do."""
EXIT_UNSAVED = 1
"""How it ends after SIGTERM when the ranks could not save in time."""
REENTRY_SECONDS = 10.0
SETTLE_SECONDS = 0.005
"""Time between two looks whether the processes have left their training function."""
PREPARE_LOOK_SECONDS = 0.1
"""The same where they prepare, which takes longer and holds nothing up."""


class Agent(LocalElasticAgent):
    """The agent of a node.

    Without `snapshots` there are none, without modules in `preload` processes start cold.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        drain_seconds: float,
        reentry_timeout: float = REENTRY_SECONDS,
        snapshots: str = "",
        preload: Sequence[str] = (),
        prepares: bool = False,
        **options: Any,
    ) -> None:
        self._resources = ExitStack()
        directory = self._resources.enter_context(agent_directory(tempfile.gettempdir(), BEATS))
        self._resources.enter_context(_guard(directory))
        self._directory = Path(directory)
        own = ("-I", "-S", child.__file__, str(os.getpid()), str(self._directory), snapshots)
        # The command is that of `script.py`, after the interpreter, `-u` and the path of that file.
        words = [str(word) for word in spec.args[2:]] if preload else []
        self._warm = Warm(str(spec.entrypoint), preload, (str(self._directory), snapshots), words)
        self._resources.callback(self._warm.close)
        self._warm.look_after()
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
        self._context: SubprocessContext
        self._reentry_timeout = reentry_timeout
        self._prepares = prepares
        self._recovery: Recovery | None = None
        self._number = 0  # of the last order
        self._num_in_vain = 0  # starts in a row that failed without a step

    def on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """Begin to drain, or exit at once if no process runs."""
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
        self._files = {
            worker.global_rank: self._file_of(worker.local_rank) for worker in worker_group.workers
        }
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery = self._settle(recovery)
            if recovery.out:
                return self._enter_again(worker_group, recovery)
            self._stop(signal.SIGKILL)
        self._clear_directory()
        self._holds = False
        # torch subtracts this for TORCHELASTIC_RESTART_COUNT, which is the same on all ranks of a
        # round: the number of worlds before it.
        assert self._node.assignment is not None
        num_worlds = self._node.assignment.round - 1
        self._remaining_restarts = worker_group.spec.max_restarts - num_worlds
        pids = self._start_all(worker_group)
        self._node.watch(self._files)
        return pids

    def _clear_directory(self) -> None:
        """Remove what the processes of an earlier round have written."""
        for leftover in self._directory.iterdir():
            leftover.unlink()

    def _start_all(self, group: WorkerGroup) -> dict[int, Any]:
        """Start all processes; their ids."""
        with self._warm.for_torch():
            pids: dict[int, Any] = super()._start_workers(group)
        assert isinstance(self._pcontext, SubprocessContext)
        self._context = self._pcontext
        processes.look_after(self._context, str(self._directory))
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
            content, stop, dump = self._node.content, self._node.stop, self._node.dump
            self._warm.look_after()
            result: RunResult = self._monitor_workers(group)
            group.state = result.state
            match result.state:
                case WorkerState.HEALTHY:
                    self._send_stacks(dump)
                    self._follow(group, content, stop)
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
                    self._restart(group, pause=self._pause_after_failure())
                case _:
                    raise RuntimeError(f"the processes are in state {result.state}")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's signature
        self._stop(signal.SIGTERM)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of the processes; torch's would stop those that can go on."""
        if not self._reports():
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        failed = processes.failures(self._context)
        if failed:
            ranks = {one.local_rank: one.global_rank for one in worker_group.workers}
            failures = {ranks[local_rank]: failure for local_rank, failure in failed.items()}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        return RunResult(state=WorkerState.HEALTHY)

    # Entering again -----------------------------------------------------------------------

    def _file_of(self, local_rank: int) -> str:
        """The heartbeat file of a process, beside which its orders and reports lie."""
        return str(self._directory / f"{local_rank}.json")

    def _reports(self) -> dict[int, Report]:
        """The reports of the processes that can be entered again, by local rank."""
        found = {}
        for local_rank, pid in self._living().items():
            report = read_report(self._file_of(local_rank))
            if report is not None and report.pid == pid:
                found[local_rank] = report
        return found

    def _living(self) -> dict[int, int]:
        """Process ids of the processes that live, by local rank."""
        pids = self._context.pids()
        codes = processes.exit_codes(self._context)
        return {rank: pids[rank] for rank, code in codes.items() if code is None}

    def _call_out(self) -> Recovery | None:
        """Order the processes to leave the training; None if none can be entered again."""
        self._number += 1
        recovery = reentry.begin(
            self._number,
            self._living(),
            self._reports(),
            num_processes=len(self._files),
            deadline=time.monotonic() + self._reentry_timeout,
        )
        if recovery is not None:
            for local_rank in recovery.leaving:
                send_order(self._file_of(local_rank), Leave(self._number))
        return recovery

    def _prepare(self, group: WorkerGroup) -> Recovery:
        """Start the processes before the node joins, and wait until they have prepared.

        They are ordered to leave the training function before they enter it first: then they are
        in the state of processes that go on in the next world.
        """
        self._clear_directory()
        self._number += 1
        # What a rendezvous sets; the ranks are -1 until then.
        nowhere: Any = {"store": HashStore(), "group_rank": -1, "group_world_size": -1}
        for name, value in (nowhere | {"master_addr": "", "master_port": 0}).items():
            setattr(group, name, value)
        self._files = {rank: self._file_of(rank) for rank in range(len(group.workers))}
        for file in self._files.values():
            send_order(file, Leave(self._number))
        log.info("the processes prepare before this node joins")
        pids = self._start_all(group)
        return self._settle(
            Recovery(number=self._number, deadline=math.inf, leaving=pids), PREPARE_LOOK_SECONDS
        )

    def _settle(self, recovery: Recovery, pause: float = SETTLE_SECONDS) -> Recovery:
        """Wait until each process is out or has ended; kill those that are not in time."""
        while True:
            for local_rank, report in self._reports().items():
                recovery = reentry.hear(recovery, local_rank, report)
            for local_rank in (recovery.leaving.keys() | recovery.out) - self._living().keys():
                recovery = reentry.end(recovery, local_rank)
            for local_rank, pid in reentry.overdue(recovery, time.monotonic()).items():
                log.warning(
                    "process %d has not left the training function within %g s\n"
                    "It is killed and started again",
                    pid,
                    self._reentry_timeout,
                )
                processes.kill(self._context, local_rank)
                recovery = reentry.end(recovery, local_rank)
            if recovery.is_settled:
                return recovery
            time.sleep(pause)

    def _enter_again(self, group: WorkerGroup, recovery: Recovery) -> dict[int, Any]:
        """Let the processes that are out into the new world, and start those that are missing."""
        self._number += 1
        self._holds = False
        for local_rank in recovery.missing:
            if local_rank in self._living():  # it cannot be entered again
                processes.kill(self._context, local_rank)
            remove_orders(self._file_of(local_rank))
        if recovery.missing:
            self._end_started(recovery.missing)
        for file in self._files.values():
            Path(file).unlink(missing_ok=True)  # a heartbeat of the last world
            clear_request(file)
        worlds = {one.local_rank: self._world_of(group, one) for one in group.workers}
        missing = {local_rank: worlds[local_rank] for local_rank in sorted(recovery.missing)}
        processes.start_missing(self._context, missing, f"{self._number}", self._warm.handler)
        processes.look_after(self._context, str(self._directory))
        for local_rank in recovery.out:
            send_order(self._file_of(local_rank), Enter(self._number, worlds[local_rank]))
        self._node.watch(self._files)
        log.info(
            "%d processes go on in the new world, %d are started",
            len(recovery.out),
            len(recovery.missing),
        )
        return dict(self._context.pids())

    def _world_of(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """The variables of a process that differ from world to world."""
        assignment = self._node.assignment
        assert assignment is not None
        return {
            "RANK": str(worker.global_rank),
            "ROLE_RANK": str(worker.role_rank),
            "GROUP_RANK": str(group.group_rank),
            "WORLD_SIZE": str(worker.world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(assignment.round - 1),
        }

    # -------------------------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        """Stop the processes, and whatever they have started."""
        self._shutdown(number, timeout=self._shutdown_timeout)
        self._end_started(range(self._worker_group.spec.local_world_size))

    def _end_started(self, local_ranks: Iterable[int]) -> None:
        """Kill what processes have started, and what is left of them: it would train besides."""
        names = {f"{local_rank}.json" for local_rank in local_ranks}
        left = guard.kill(str(self._directory), self._shutdown_timeout, names)
        if left:
            log.error("SIGKILL has not ended processes %s; they may be stuck in the kernel", left)

    def _begin(self, group: WorkerGroup, pause: float = 0.0) -> None:
        """Join the next round, after a pause of some seconds, and start the processes."""
        self._exits_on_sigterm = True
        try:
            time.sleep(pause)
            if self._node.assignment is None:
                self._warm.wait()  # a node that joins keeps no world waiting for its imports
                if self._prepares:
                    self._recovery = self._prepare(group)
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

    def _pause_after_failure(self) -> float:
        """Seconds before the processes start again; more, the more starts made no step."""
        self._num_in_vain = 0 if self._beats() else self._num_in_vain + 1
        return restart_pause(self._num_in_vain)

    def _restart(
        self, group: WorkerGroup, number: signal.Signals = signal.SIGTERM, *, pause: float = 0.0
    ) -> None:
        """Get the processes out of the world, join the next round, and go on.

        Processes that can be entered again stay; the others are stopped by a signal.
        """
        self._recovery = self._call_out()
        if self._recovery is None:
            self._stop(number)
        group.state = WorkerState.STOPPED
        if self._draining_since is not None:
            self._go(Outcome.DRAINED, "its processes had stopped already", EXIT_DRAINED)
        if pause:
            log.warning("starts keep failing, the next one follows in %g s", pause)
        self._begin(group, pause)

    def _go(self, outcome: Outcome, reason: str, exit_code: int) -> None:
        """Leave the job."""
        self._stop_workers(self._worker_group)
        self._try(lambda: self._node.leave(outcome, reason))
        raise SystemExit(exit_code)

    def _try(self, send: Callable[[], object]) -> None:
        """Send a request; this node goes on if the master does not answer."""
        try:
            send()
        except MasterError as error:
            log.warning("%s", error)

    def _follow(self, group: WorkerGroup, content: Content | None, stop: Stop | None) -> None:
        """Do what the newest instruction says, while the processes are healthy."""
        if self._draining_since is not None:
            self._drain(self._draining_since)
        if stop is None and any(report.error for report in self._reports().values()):
            self._node.beat_now(lost_peer=True)  # the master may know more
        grows = stop is not None and stop.change is Change.GROW
        if self._draining_since is None and (grows or stop is None):
            world = content if isinstance(content, Assignment) and stop is None else None
            may_grow = world is not None and world.grow
            in_memory = (may_grow or grows) and len(self._reports()) == len(self._files)
            wanted = grows or (world is not None and world.save)
            self._hold(wanted, "hold" if in_memory else "save-and-hold")
            if may_grow and self._is_saved():
                self._node.beat_now()  # the other ranks wait as well, or will soon
        if grows and not self._is_saved():
            return  # the other nodes wait as well
        if stop is not None:
            log.info("the processes start again: %s", stop.reason)
            # Processes that hang do not react to SIGTERM.
            hang = stop.change is Change.HANG
            self._restart(group, signal.SIGKILL if hang else signal.SIGTERM)
        if isinstance(content, JobEnded):
            log.info("the job has %s: %s", content.outcome, content.reason)
            self._go(
                Outcome.FAILED,
                content.reason,
                0 if content.outcome is Outcome.SUCCEEDED else EXIT_JOB_FAILED,
            )

    def _drain(self, since: float) -> None:
        """Have the ranks save, then leave."""
        if not self._is_announced:
            self._is_announced = True
            self._node.drain(self._drain_seconds, "SIGTERM")
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

    def _hold(self, wanted: bool, what: Request = "save-and-hold") -> None:
        """Have the ranks save and wait, so that no step is repeated later; or let them continue."""
        if wanted is self._holds:
            return
        self._holds = wanted
        self._held_since = time.monotonic()
        for file in self._files.values():
            if wanted:
                request(file, what)
            else:
                clear_request(file)

    def _is_saved(self) -> bool:
        """True if the ranks have saved and wait, or the time limit for that has passed.

        Ranks that report nothing have no manager that could save.
        """
        beats = self._beats()
        waits = len(beats) == len(self._files) and all(beat.waits for beat in beats)
        is_late = time.monotonic() - self._held_since > self._drain_seconds
        return waits or not beats or is_late

    def _beats(self) -> list[Heartbeat]:
        """The last heartbeats of the ranks."""
        beats = map(self._node.beats.read, self._files.values())
        return [beat for beat in beats if beat is not None]

    def _send_stacks(self, dump: int) -> None:
        """Send the stacks if they are requested, from a thread: no restart waits for them."""
        if dump <= self._dumped:
            return
        self._dumped = dump
        living = self._living()
        stacks = Stacks(
            {
                worker.global_rank: (
                    living[worker.local_rank],
                    self._files[worker.global_rank],
                )
                for worker in self._worker_group.workers
                if worker.local_rank in living
            }
        )

        def send() -> None:
            self._node.send_stacks(dump, stacks.take())

        threading.Thread(target=send, name="remesh-stacks", daemon=True).start()

    def _all_finish(self) -> bool:
        """Stay until the job has ended; False if the processes have to start again with others."""
        self._exits_on_sigterm = True
        try:
            self._node.finish("its processes ended")
            return self._await_end()
        except MasterError as error:
            log.error(
                "the processes of this node have succeeded, how the job ends is not known: %s\n"
                "Ask the job's master once it answers (remesh status URL)",
                error,
            )
            raise SystemExit(EXIT_JOB_FAILED) from error
        finally:
            self._exits_on_sigterm = False

    def _await_end(self) -> bool:
        """Wait until the job has succeeded; False if the processes have to start again."""
        node = self._node
        while True:
            content, stop = node.content, node.stop
            if isinstance(content, JobEnded):
                log.info("the job has %s: %s", content.outcome, content.reason)
                if content.outcome is Outcome.SUCCEEDED:
                    return True
                raise SystemExit(EXIT_JOB_FAILED)
            if stop is not None:
                log.info("the processes start again: %s", stop.reason)
                return False
            if node.silence > node.client.patience:
                raise MasterError(f"{node.client.url} has not answered for {node.silence:.0f} s")
            time.sleep(self._worker_group.spec.monitor_interval)

    def _report(self, result: RunResult) -> FailureAction:
        """Report the failed processes to the master; what this node has to do."""
        failures = tuple(
            self._describe(rank, failure) for rank, failure in sorted(result.failures.items())
        )
        self._exits_on_sigterm = True
        try:
            decision = self._node.report(failures)
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
        beat = self._node.beats.read(self._files[rank]) if rank in self._files else None
        return ProcessFailure(
            node_id=assignment.node_id,
            round=assignment.round,
            rank=rank,
            local_rank=failure.local_rank,
            exit_code=failure.exitcode,
            time=float(failure.timestamp),
            message=processes.message_of(failure)[-MAX_MESSAGE:],
            log_tail=processes.tail_of(self._logs_of(failure.local_rank)),
            step=None if beat is None else beat.step,
        )

    def _logs_of(self, local_rank: int) -> list[str]:
        context = self._context
        files: list[Mapping[int, str]] = [context.stdouts, context.stderrs]
        return [paths[local_rank] for paths in files if paths.get(local_rank)]


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
