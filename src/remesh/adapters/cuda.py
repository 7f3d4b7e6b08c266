"""CUDA: copies beside the trainer's work, into host memory that the device writes by itself.

A device copies into pinned memory without the CPU. So a save stages through streams of its own:
copies are queued, and while they run the thread that queued them takes the next chunk. Before the
first of them, the trainer's thread waits for what it has queued itself (`finish_work`), so what is
copied is the state as the trainer sees it; and the save returns to the trainer only when all of
them are done. Nothing that is queued later can be mixed in on either side.

What is current (device and stream) belongs to each thread, and the current device of a new thread
is the first one, where it must not start anything. Everything here therefore names its devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import numpy as np
import numpy.typing as npt
import torch

_LOGGER = logging.getLogger("remesh")

_PORTABLE = 1
"""Pinned for all devices of the process: `cudaHostRegisterPortable`."""


def finish_work(devices: Sequence[str]) -> None:
    """Wait until what the caller's thread has queued on its current streams is done."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


class CudaCopies:
    """Copies out of devices on streams of their own; a `remesh.core.memory.CopyQueue`."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._streams = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for stream in self._streams:
                entered.enter_context(torch.cuda.stream(stream))
            self._entered = entered.pop_all()

    def __exit__(self, *_error: object) -> None:
        self._entered.close()

    def mark(self) -> Callable[[], None]:
        # Waiting for a blocking event sleeps; waiting for another one spins.
        events = []
        for stream in self._streams:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
            events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


def pin(buffer: npt.NDArray[np.uint8], device: str) -> Callable[[], None] | None:
    """Pin host memory that begins at a page boundary, whichever way it was allocated.

    Returns what undoes it; None if the system refuses, which is logged: copies then take longer.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = buffer.ctypes.data
    with torch.cuda.device(device):
        status = int(runtime.cudaHostRegister(address, buffer.size, _PORTABLE))
    if status != 0:
        _take_last_error(device)
        _LOGGER.warning(
            "cannot pin %d bytes of host memory (CUDA error %d)\n"
            "Saving from %s goes on, slower. See `ulimit -l` and how much memory is free.",
            buffer.size,
            status,
            device,
        )
        return None

    def unpin() -> None:
        # The closure keeps the buffer mapped until it is not pinned any more.
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(buffer.ctypes.data)

    return unpin


def _take_last_error(device: str) -> None:
    """Have a kernel that does nothing raise the error of a call that failed.

    The runtime keeps such an error for the thread's next call, and torch looks after each
    kernel that it starts: what comes after would fail for something that is dealt with.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)
