"""Transfers out of files: what several ranks need, one of them reads and sends to the others.

Data-parallel replicas need the same bytes, and ranks that load columns of what was saved as rows
need different parts of the same blocks. If each reads for itself, each reads everything it touches.
Together, the ranks read every block once: rank 0 assigns the windows that several ranks touch to
readers (`remesh.planner.assignment`), every rank asks the readers for its regions, and the transfer
is executed (`remesh.pipeline.transfer`). A task is a run of a load plan: it is read once, its
digests are checked, and its regions go to all that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from remesh.core.geometry import IntArray
from remesh.core.index import Index
from remesh.exchange import Exchange, run_joined
from remesh.formats.native import unless_replaced
from remesh.pipeline.read import Destination, RunReader
from remesh.pipeline.source import TensorSource
from remesh.pipeline.task_pool import Tasks
from remesh.pipeline.transfer import execute, message_buffers, request_regions
from remesh.planner import Assign, LoadPlan, TransferPlan
from remesh.planner.assignment import ReadAssignment, touched_windows
from remesh.planner.loading import plan_regions

NUM_SHARING_THREADS = 3
"""Threads that read from this machine for several ranks: fewer than those of a rank that reads for
itself, for others send and unpack messages."""

NUM_FAR_SHARING_THREADS = 16
"""The same for storages that are a network away, at most: each holds what it has read until the
messages that it goes into can be packed."""


def read_together(
    exchange: Exchange,
    source: TensorSource,
    plan: LoadPlan,
    destinations: Sequence[Destination],
    on_read: Callable[[int], None],
    *,
    assign: Assign | None,
    timeout: float | None = None,
) -> bool:
    """Execute the load plans of all ranks; true if ranks read for each other. Collective.

    `assign` is called on rank 0 with the windows that ranks touch; without it, every rank reads for
    itself. `on_read` is called after each run that this rank reads, with its size in bytes.
    `timeout` is in seconds.

    Raises:
        CorruptCheckpointError: As `read_runs`, on the rank that read it.
        StorageError: If the storage fails, on the rank that read.
        CheckpointReplacedError: If another checkpoint is there by now.
        ExchangeError: If a rank died, or did not finish in time.
    """
    storage, index = source.storage, source.index
    found = None if assign is None else _plan_transfer(exchange, index, plan, assign)
    transfer = TransferPlan.alone(index) if found is None else found
    turn, num_threads = np.zeros(plan.num_runs, dtype=np.int64), plan.limits.num_reads
    if found is not None:
        regions, turns = found.taken(len(destinations))
        plan = plan_regions(index, regions, plan.limits)
        turn = _turns_of_runs(plan, turns)
        most = NUM_FAR_SHARING_THREADS if storage.is_remote else NUM_SHARING_THREADS
        num_threads = min(num_threads, most)
    order = np.argsort(turn, kind="stable")
    is_remote = storage.is_remote
    reader = RunReader(storage, index, plan, order, in_place=not (is_remote or index.block_size))
    size = reader.buffer_bytes
    tasks = Tasks(turn[order], plan.bytes_read, num_threads, size, reader.read, is_remote)
    buffers = message_buffers(exchange, index, transfer)
    with unless_replaced(storage, source.identity):
        execute(
            exchange,
            transfer,
            tasks,
            destinations,
            on_read=on_read,
            buffers=buffers,
            timeout=timeout,
        )
    return found is not None


def _plan_transfer(
    exchange: Exchange, index: Index, plan: LoadPlan, assign: Assign
) -> TransferPlan | None:
    """Agree on what each rank reads for which others; None if each reads for itself. Collective."""

    def join(replies: list[bytes]) -> list[bytes]:
        touched = [np.frombuffer(reply, dtype="<i8").reshape(-1, 3) for reply in replies]
        assignments = assign(touched, plan.limits)
        if assignments is None:
            return [b""] * exchange.world_size
        return [assignment.encode() for assignment in assignments]

    reply = run_joined(exchange, lambda: touched_windows(index, plan).astype("<i8").tobytes(), join)
    if not reply:
        return None
    assignment = ReadAssignment.decode(reply)
    row = assignment.rows_of(plan.windows(index))
    reader = np.where(row < 0, exchange.rank, np.append(assignment.reader, -1)[row])
    turn = np.append(assignment.turn, 0)[row]
    wanted = {}
    for rank in np.unique(reader).tolist():
        runs = np.flatnonzero(reader == rank)
        wanted[rank] = plan.taken(runs)[0], np.repeat(turn[runs], plan.num_regions(runs))
    local, _ = wanted.pop(exchange.rank, (plan.taken(row[:0])[0], row))
    messages = request_regions(exchange, index, wanted, assignment.asked_by.tolist())
    return TransferPlan(local, *messages, assignment.num_turns)


def _turns_of_runs(plan: LoadPlan, turns: IntArray) -> IntArray:
    """The turn of each run: the first of its regions'."""
    if not plan.num_runs:
        return plan.run_start
    return np.minimum.reduceat(turns[plan.regions.want], plan.run_first[:-1])
