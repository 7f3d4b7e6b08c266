"""The agent of `remesh run`: it starts the processes of its node, and follows the master.

What it does follows from what it sees, by a pure function (`lifecycle`); here are the processes,
the master, signals and the clock. Failures are reported to the master, which charges only the node
at fault. Nodes that finish wait for the others, and start again with them if those have to.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from msgspec.structs import replace
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure as Failure
from torch.distributed.elastic.rendezvous import RendezvousInfo

from remesh.elastic import guard, lifecycle
from remesh.elastic.failures import MAX_MESSAGE, ProcessFailure
from remesh.elastic.handler import Handler
from remesh.elastic.lifecycle import Action, Limits, Phase, Seen, Tell
from remesh.elastic.nodes import Outcome
from remesh.elastic.process_socket import Instruction, Order, ProcessSockets
from remesh.elastic.processes import Processes, message_of, tail_of
from remesh.elastic.protocol import Assignment, Drain, Leave, ReportFailures, ReportStacks, Stop
from remesh.elastic.stacks import stacks_file, take_stacks
from remesh.elastic.warm import Warm
from remesh.errors import MasterError

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.005
"""Time between two looks whether the processes have left their training function."""
LOOK_SECONDS = 1.0
"""Time between two looks while they train, at most."""


class Agent:
    """The agent of a node, which looks at its processes after each `pause`, in seconds."""

    def __init__(
        self,
        handler: Handler,
        processes: Processes,
        sockets: ProcessSockets,
        warm: Warm,
        limits: Limits,
        pause: float,
    ) -> None:
        self._handler = handler
        self._node = handler.node
        self._processes = processes
        self._sockets = sockets
        self._warm = warm
        self._pause = pause
        self._state, self._actions = lifecycle.begin(limits)
        self._ranks = range(limits.num_processes)
        self._failures: dict[int, Failure] = {}
        self._world: RendezvousInfo
        self._drains = False
        self._exits_on_sigterm = False

    @property
    def _assignment(self) -> Assignment:
        assert self._node.assignment is not None, "there are no processes before the first"
        return self._node.assignment

    def on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """Begin to drain, or exit at once while the agent waits for the master."""
        self._drains = True
        if self._exits_on_sigterm:
            raise SystemExit(lifecycle.EXIT_DRAINED)

    def run(self) -> NoReturn:
        """Run the processes until the job has ended, or the node leaves it.

        Raises:
            SystemExit: If it has; with the exit code of the agent.
            ChildFailedError: If processes have failed, and with them the job.
        """
        number = signal.SIGTERM
        try:
            with self._waiting():
                self._warm.wait()  # a node that joins keeps no world waiting for its imports
            while True:
                for action in self._actions:
                    self._do(action)
                is_short = self._state.phase is Phase.CHANGE
                # Heartbeats tell what was seen last, however rarely the user wants looks.
                self._sockets.take(SETTLE_SECONDS if is_short else min(self._pause, LOOK_SECONDS))
                self._warm.look_after()
                seen = self._look()
                if self._state.phase is Phase.TRAIN:
                    self._inform(seen)
                self._state, self._actions = lifecycle.step(self._state, seen, time.monotonic())
        except SignalException as error:
            number = error.sigval
            raise
        finally:
            self._processes.end_all(number)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let SIGTERM end the agent at once: it waits."""
        self._exits_on_sigterm = True
        try:
            yield
        finally:
            self._exits_on_sigterm = False

    def _look(self) -> Seen:
        node = self._node
        # In this order: if others had to stop because a process of this node died, the master must
        # receive that failure, and would not if the process were stopped like the others.
        content = node.content
        living = self._processes.living
        found = {rank: self._sockets.report(rank, pid) for rank, pid in living.items()}
        return Seen(
            living=frozenset(living),
            has_failed=bool(self._processes.failed),
            reports={rank: report for rank, report in found.items() if report is not None},
            progress=self._sockets.progress(),
            content=content,
            drains=self._drains,
            silence=node.silence,
        )

    def _do(self, action: Action) -> None:
        match action:
            case lifecycle.OrderToLeave(order, ranks):
                self._sockets.order(ranks, Order(order))
            case lifecycle.End(ranks, number, why):
                if why:
                    log.warning("local ranks %s: %s", sorted(ranks), why)
                self._processes.end(ranks, number)
            case lifecycle.JoinRound(pause):
                self._join(pause)
            case lifecycle.Enter(order, out):
                self._enter(order, out)
            case lifecycle.Hold(wanted):
                self._sockets.request(wanted)
            case Tell.FAILURES:
                self._report()
            case lifecycle.Exit():
                self._exit(action)
            case Tell.STACKS:
                self._send_stacks()
            case Tell.DRAIN:
                self._node.say(Drain, seconds=self._state.limits.drain, reason="SIGTERM")
            case Tell.FINISH:
                ended = "its processes ended"
                self._node.say(Leave, outcome=Outcome.SUCCEEDED, reason=ended)

    def _join(self, pause: float) -> None:
        content = self._node.content
        if isinstance(content, Stop):
            level = logging.WARNING if self._failures else logging.INFO
            log.log(level, "the processes start again: %s", content.reason)
        if pause:
            log.warning("starts keep failing, the next one follows in %g s", pause)
        try:
            with self._waiting():
                if self._drains:  # it came just before
                    raise SystemExit(lifecycle.EXIT_DRAINED)
                time.sleep(pause)
                found = self._handler.enter()
        except MasterError as error:
            self._exit(lifecycle.Exit(lifecycle.EXIT_JOB_FAILED, str(error), Outcome.FAILED))
        except SystemExit:  # SIGTERM
            why = "SIGTERM, it waited for a round"
            self._exit(lifecycle.Exit(lifecycle.EXIT_DRAINED, why, Outcome.DRAINED))
        if not isinstance(found, RendezvousInfo):
            self._exit(lifecycle.exit_of(found))
        self._world = found

    def _enter(self, order: int, out: frozenset[int]) -> None:
        """Let the processes that are out into the new world, and start those that are missing."""
        missing = set(self._ranks) - out
        if missing:
            self._processes.end_started(missing)
        self._sockets.begin(missing, Instruction())
        worlds = {rank: self._variables(rank) for rank in self._ranks}
        self._processes.start(missing, worlds)
        for rank in out:
            self._sockets.order([rank], Order(order, worlds[rank]))
        self._failures = {}
        if out:
            log.info("%d processes go on in the new world, %d are started", len(out), len(missing))

    def _variables(self, local_rank: int) -> dict[str, str]:
        """The variables of a process that differ from world to world."""
        assignment, met = self._assignment, self._world.bootstrap_store_info
        assert met is not None
        rank, size = str(assignment.first_rank + local_rank), str(assignment.world_size)
        return {
            "RANK": rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": str(assignment.node_rank),
            "WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": str(assignment.num_nodes),
            "MASTER_ADDR": met.master_addr,
            "MASTER_PORT": str(met.master_port),
            # The number of worlds before this one, which is the same on all ranks.
            "TORCHELASTIC_RESTART_COUNT": str(assignment.round - 1),
        }

    def _exit(self, action: lifecycle.Exit) -> NoReturn:
        """End the processes, tell the master, and end the agent."""
        if action.code == lifecycle.EXIT_DRAINED:
            log.warning("the node is drained: %s", action.reason)
        else:
            log.log(logging.ERROR if action.code else logging.INFO, "%s", action.reason)
        self._processes.end_all(signal.SIGTERM)
        if action.outcome is not None:
            try:
                self._node.leave(action.outcome, action.reason)
            except MasterError as error:
                log.warning("%s", error)
        if action.code == lifecycle.EXIT_JOB_FAILED and action.outcome is None and self._failures:
            raise ChildFailedError(name=self._processes.name, failures=self._failures)
        raise SystemExit(action.code)

    def _inform(self, seen: Seen) -> None:
        """Tell the master how far the processes are."""
        first, wanted = self._assignment.first_rank, self._state.hold
        ranks = {
            first + rank: replace(one, waits=lifecycle.has_done(wanted, one))
            for rank, one in seen.progress.items()
        }
        lost_peer = seen.stop is None and any(report.error for report in seen.reports.values())
        self._node.show(ranks, lost_peer=lost_peer)

    def _send_stacks(self) -> None:
        first = self._assignment.first_rank
        processes = {
            first + rank: (pid, stacks_file(self._sockets.path_of(rank)))
            for rank, pid in self._processes.living.items()
        }
        self._node.say(ReportStacks, stacks=take_stacks(processes))

    def _report(self) -> None:
        failed = self._processes.failed
        self._failures = {self._assignment.first_rank + rank: one for rank, one in failed.items()}
        failures = tuple(self._describe(rank, one) for rank, one in failed.items())
        self._node.say(ReportFailures, failures=failures)

    def _describe(self, local_rank: int, failure: Failure) -> ProcessFailure:
        assignment = self._assignment
        progress = self._sockets.progress().get(local_rank)
        return ProcessFailure(
            node_id=self._node.sender()["node_id"],
            round=assignment.round,
            rank=assignment.first_rank + local_rank,
            local_rank=local_rank,
            exit_code=failure.exitcode,
            time=float(failure.timestamp),
            message=message_of(failure)[-MAX_MESSAGE:],
            log_tail=tail_of(self._processes.logs(local_rank)),
            step=None if progress is None else progress.step,
        )


@contextmanager
def guarded(directory: str) -> Iterator[None]:
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
