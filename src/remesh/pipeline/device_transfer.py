"""The transfer between ranks that send each other memory of their devices as it is.

Messages are packed on the device, sent from there by the group's backend (NCCL, which goes over
NVLink within a machine), and unpacked on the device: the host queues this and moves no tensor data,
but for tensors that lie in its own memory. It does so in the caller's thread, so all copies come
after what the caller has queued itself, on the stream that is current for it. While messages of one
turn are under way, those of the next are packed, and those of the turn before are unpacked; what a
rank has itself is copied beside the first.

A rank that fails goes through its turns all the same, and sends what its buffers happen to hold. As
after any failure of a transfer, the caller makes it known to all, and no rank uses what it got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from remesh.core.index import Index
from remesh.core.memory import Device
from remesh.exchange import Exchange, run_on_all
from remesh.pipeline.read import Destination
from remesh.pipeline.task_pool import Tasks
from remesh.pipeline.transfer import MessageBuffers, carried_by
from remesh.planner import TransferPlan

DEVICE_MESSAGE_BYTES = 32 << 20
"""A message ends with the region that makes it as long or longer: long enough for a link of some
hundred GB/s, and two that leave and two that arrive take little of the memory of a device."""

_NUM_BUFFERS = 2
"""Turns of which messages are in memory: those under way, and those that are packed or unpacked."""


def device_buffers(
    exchange: Exchange, device: Device, index: Index, plan: TransferPlan
) -> MessageBuffers:
    """Memory for the messages of a plan. Collective: if it is refused anywhere, all ranks raise."""
    made: list[MessageBuffers] = []

    def make() -> bytes:
        leaving = device.buffers(_NUM_BUFFERS, plan.outgoing.buffer_bytes)
        arriving = device.buffers(_NUM_BUFFERS, plan.incoming.buffer_bytes)
        carried = carried_by(index, plan.outgoing), carried_by(index, plan.incoming)
        made.append(MessageBuffers(*carried, leaving, arriving, device=device))
        return b""

    run_on_all(exchange, make)
    return made[0]


def execute_on_device(
    exchange: Exchange,
    plan: TransferPlan,
    tasks: Tasks,
    destinations: Sequence[Destination],
    *,
    on_read: Callable[[int], None],
    buffers: MessageBuffers,
) -> None:
    """Execute the transfer plans of all ranks. Collective.

    The devices are connected if there are messages. `on_read` is called after each task,
    which may be queued only, with what that read.
    """
    problems: list[Exception] = []

    def attempt(action: Callable[[], object]) -> None:
        """Do something unless this rank has failed."""
        if not problems:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - raised when all turns are through
                problems.append(error)

    place = buffers.place_in(destinations)
    begins = np.searchsorted(tasks.turn, np.arange(plan.num_turns + 1))
    bounds = [*begins.tolist(), len(tasks.turn)]
    no_buffer = np.empty(0, np.uint8)

    def take(turn: int) -> None:
        """Perform the tasks of a turn; after the last come those for this rank only."""
        for task in range(bounds[turn], bounds[turn + 1]):
            on_read(tasks.perform(task, no_buffer, place, nullcontext()))

    def unpack(turn: int) -> None:
        """Fill this rank's memory from the messages of a turn."""
        for number in plan.incoming.in_turn(turn):
            rows = plan.incoming.rows(number)
            buffers.unpack(rows, buffers.arriving[turn % _NUM_BUFFERS], 0, destinations)

    swapped: Callable[[], None] | None = None
    for turn in range(plan.num_turns):
        attempt(lambda: take(turn))  # noqa: B023 - called at once
        swapping = exchange.begin_swap(*_tensors(exchange.world_size, plan, buffers, turn))
        if turn == 0:
            attempt(lambda: take(plan.num_turns))
        if swapped is not None:
            swapped()
            attempt(lambda: unpack(turn - 1))  # noqa: B023 - called at once
        swapped = swapping
    if swapped is None:
        attempt(lambda: take(plan.num_turns))
    else:
        swapped()
        attempt(lambda: unpack(plan.num_turns - 1))
    assert buffers.device is not None
    attempt(buffers.device.finish)
    if problems:
        raise problems[0]


def _tensors(
    world_size: int, plan: TransferPlan, buffers: MessageBuffers, turn: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """The tensors that each rank is sent in a turn, and those that each sends."""
    found: list[list[list[Any]]] = []
    for messages, of_turns in ((plan.outgoing, buffers.leaving), (plan.incoming, buffers.arriving)):
        tensors: list[list[Any]] = [[] for _ in range(world_size)]
        for number in messages.in_turn(turn):
            message = of_turns[turn % _NUM_BUFFERS].part(*messages.span(number))
            for rank in messages.peers[number]:
                tensors[rank].append(message)
        found.append(tensors)
    outgoing, incoming = found
    return outgoing, incoming
