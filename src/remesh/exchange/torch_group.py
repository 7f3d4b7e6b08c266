"""The exchange of ranks that are processes of a torch process group.

Bytes travel as plain `uint8` tensors, sizes first, so that no rank guesses how much comes. Short
ones go along with their size, in one collective. Longer ones of an all-gather are padded to the
largest and go in a second collective; if one is large, the rank of each broadcasts it, which never
pads. Gathering and scattering are messages between rank 0 and each other rank, in rank order: no
rank gets long bytes that are not for it, and rank 0 holds one block in flight. Whatever the length
of a message, it moves in blocks, so no count of bytes overflows in a backend and no device has to
hold a whole message.

The tensors are on the CPU if the group has a backend for it (gloo does), else on the device of
the group's backend that is current when the group is made. Use a group that has gloo
(`cpu:gloo,cuda:nccl`) where possible: NCCL takes device memory and stands in the queue behind the
trainer's kernels.

Every wait has a deadline. Collectives are waited for in slices, between which the rank looks who is
late (see `remesh.exchange.lateness`); a message between two ranks is waited for at once, since gloo
closes the connection if such a wait ends without it. Under NCCL the host polls, for NCCL's own wait
holds up the stream and not the host; only the first call of an NCCL group, which connects it, is
bounded by the group's timeout alone.

Ranks here are ranks in the group. Torch's own calls name peers by global rank; the translation is
made once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from remesh.errors import ExchangeError
from remesh.exchange.lateness import LateRanks
from remesh.exchange.protocol import Buffers, Exchange

__all__ = ["TorchGroup"]

_BLOCK = 64 << 20
"""Bytes of a message that move at a time."""

_PADDED = 64 << 10
"""Largest contribution, in bytes, to an all-gather that pads."""

_SHORT = 248
"""Bytes of a message that go with its size."""

_LONGEST_WAIT = 3600.0
"""Seconds that a call waits if the caller gives no limit and the group's own is longer."""

_HOST_BACKENDS = frozenset({"gloo", "mpi"})
"""Backends that torch also names for devices, but that need not send memory of a device."""

_LONGEST_POLL = 0.01
"""Seconds between two looks at a device's work."""


class TorchGroup(Exchange):
    """An exchange over a torch process group that this process belongs to.

    After an `ExchangeError` the group cannot be used any more: its ranks no longer agree on which
    message comes next.

    Args:
        group: The group, or None for the default group.
        timeout: Seconds that a call waits for other ranks before it fails, naming those that have
            not come. By default the group's own timeout, at most an hour. A longer limit than the
            group's has no effect on most calls.
        warn_after: Seconds after which one of the waiting ranks logs a warning with the ranks that
            have not come.

    Raises:
        ExchangeError: If there is no default group, or this process is not in the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | None = None,
        warn_after: float = 10.0,
    ) -> None:
        if not dist.is_initialized():
            raise ExchangeError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group "
                "first"
            )
        group = dist.group.WORLD if group is None else group
        assert group is not None
        self._group = group
        self.rank = dist.get_rank(self._group)
        if self.rank < 0:
            raise ExchangeError(
                f"global rank {dist.get_rank()} is not in the process group that was given\nCall "
                "this on the group's own ranks only"
            )
        self._global_ranks = dist.get_process_group_ranks(self._group)
        self.world_size = len(self._global_ranks)
        self._device = _message_device(self._group)
        seconds = _default_timeout(self._group, self._device) if timeout is None else timeout
        self.patience = min(seconds, warn_after)
        # The one over which the ranks of the group have met, with a prefix of its own.
        store = distributed_c10d._get_process_group_store(self._group)  # noqa: SLF001
        self._late = LateRanks(store, self.rank, self._global_ranks, seconds, warn_after)
        self._operation = ""

    def all_gather(self, data: bytes) -> list[bytes]:
        with self._explained("all-gather"):
            sizes, heads = self._gather_heads(data)
            if _SHORT < max(sizes) <= _PADDED:
                padded = self._all_gather_equal(data.ljust(max(sizes), b"\0"))
                return [item[:size] for item, size in zip(padded, sizes, strict=True)]
            return [
                head if size <= _SHORT else self._broadcast(data, size, source)
                for source, (size, head) in enumerate(zip(sizes, heads, strict=True))
            ]

    def gather(self, data: bytes) -> list[bytes] | None:
        with self._explained("gather"):
            sizes, heads = self._gather_heads(data)
            if self.rank == 0:
                others = list(zip(range(1, self.world_size), sizes[1:], heads[1:], strict=True))
                return [data] + [
                    head if size <= _SHORT else self._receive(size, source=rank)
                    for rank, size, head in others
                ]
            if len(data) > _SHORT:
                self._send(data, target=0)
        return None

    def scatter(self, data: list[bytes] | None) -> bytes:
        assert (data is not None) == (self.rank == 0)
        sizes = np.array([*map(len, data)] if data else [0] * self.world_size, "<i8")
        with self._explained("scatter"):
            known = self._broadcast(sizes.tobytes(), sizes.nbytes, source=0)
            if data is None:
                return self._receive(int(np.frombuffer(known, "<i8")[self.rank]), source=0)
            for rank in range(1, self.world_size):
                self._send(data[rank], target=rank)
            return data[0]

    def broadcast(self, data: bytes | None) -> bytes:
        assert (data is not None) == (self.rank == 0)
        own = b"" if data is None else data
        with self._explained("broadcast"):
            size, head = _decode_head(self._broadcast(_head_of(own), 8 + _SHORT, source=0))
            return head if size <= _SHORT else self._broadcast(own, size, source=0)

    def swap(self, outgoing: Sequence[Buffers], incoming: Sequence[Buffers]) -> None:
        assert len(outgoing) == len(incoming) == self.world_size
        for buffer, own in zip(incoming[self.rank], outgoing[self.rank], strict=True):
            buffer[:] = own
        leaving, arriving = list(outgoing), list(incoming)
        leaving[self.rank] = arriving[self.rank] = ()
        sent, received = (
            [[torch.from_numpy(one).to(self._device) for one in some] for some in side]
            for side in (leaving, arriving)
        )
        self.begin_swap(sent, received)()
        if self._device.type != "cpu":
            for buffers, tensors in zip(arriving, received, strict=True):
                for buffer, tensor in zip(buffers, tensors, strict=True):
                    buffer[:] = tensor.cpu().numpy()

    def connect(self, device: str) -> bool:
        backends = dict(
            item.split(":", 1) for item in dist.get_backend_config(self._group).split(",")
        )
        if backends.get(torch.device(device).type, "gloo") in _HOST_BACKENDS:
            return False
        with self._explained("connecting devices"):
            # The first call of a group that connects its ranks is one that all of them make.
            number = torch.zeros(1, device=device)
            work = dist.all_reduce(number, group=self._group, async_op=True)
            assert work is not None  # this process is in the group
            if not _poll(work, self._late.timeout):
                raise RuntimeError(f"it did not end within {self._late.timeout:g} s")
        return True

    def begin_swap(
        self,
        outgoing: Sequence[Sequence[torch.Tensor]],
        incoming: Sequence[Sequence[torch.Tensor]],
    ) -> Callable[[], None]:
        messages = [
            self._message(direction, rank, tensor)
            for direction, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
            for rank in range(self.world_size)
            for tensor in tensors[rank]
            if rank != self.rank and tensor.numel()
        ]
        with self._explained("swap"):
            works = self._begin(messages)

        def finish() -> None:
            with self._explained("swap"):
                self._end(messages, works)

        return finish

    def _message(self, direction: Any, rank: int, tensor: torch.Tensor) -> dist.P2POp:
        """A tensor that is sent to, or received from, a rank of the group."""
        return dist.P2POp(direction, tensor, self._global_ranks[rank], self._group)

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        self._operation = operation
        try:
            yield
        except RuntimeError as error:
            self._late.report_failure(f"rank {self.rank}: {error}")
            raise ExchangeError(
                f"{operation} failed on rank {self.rank} of {self.world_size} (global rank "
                f"{self._global_ranks[self.rank]}): a rank does not answer\n{error}\n"
                "Look for the first rank that died or stopped, its own log has the cause, and "
                "start the job again. A save that was under way is committed as a whole or not at "
                "all: open it to see."
            ) from error

    def _gather_heads(self, data: bytes) -> tuple[list[int], list[bytes]]:
        """The size of what each rank has, and the first bytes of it."""
        heads = map(_decode_head, self._all_gather_equal(_head_of(data)))
        sizes, firsts = zip(*heads, strict=True)
        return list(sizes), list(firsts)

    def _all_gather_equal(self, data: bytes) -> list[bytes]:
        """The contributions of all ranks, which are equally long."""
        own = self._to_tensor(data)
        items = [torch.empty_like(own) for _ in range(self.world_size)]
        self._finish(dist.all_gather(items, own, group=self._group, async_op=True))
        return [_to_bytes(item) for item in items]

    def _broadcast(self, data: bytes, size: int, source: int) -> bytes:
        """The bytes of one rank on all; what the others give is not used."""
        blocks = []
        for start, stop in _blocks(size):
            if self.rank == source:
                message = self._to_tensor(data[start:stop])
            else:
                message = torch.empty(stop - start, dtype=torch.uint8, device=self._device)
            root = self._global_ranks[source]
            work = dist.broadcast(message, root, group=self._group, async_op=True)
            self._finish(work, None if self.rank == source else [source])
            if self.rank != source:
                blocks.append(_to_bytes(message))
        return data if self.rank == source else b"".join(blocks)

    def _send(self, data: bytes, *, target: int) -> None:
        for start, stop in _blocks(len(data)):
            messages = [self._message(dist.isend, target, self._to_tensor(data[start:stop]))]
            self._end(messages, self._begin(messages))

    def _receive(self, size: int, *, source: int) -> bytes:
        blocks = []
        for start, stop in _blocks(size):
            message = torch.empty(stop - start, dtype=torch.uint8, device=self._device)
            messages = [self._message(dist.irecv, source, message)]
            self._end(messages, self._begin(messages))
            blocks.append(_to_bytes(message))
        return b"".join(blocks)

    def _begin(self, messages: list[dist.P2POp]) -> list[dist.Work]:
        """Begin to send and receive messages."""
        # A batch even of one: under NCCL a batch uses the group's own connections, where a single
        # send would build a new pair of ranks for each peer.
        return dist.batch_isend_irecv(messages) if messages else []

    def _end(self, messages: list[dist.P2POp], works: list[dist.Work]) -> None:
        """Wait until messages are sent and received."""
        until = time.monotonic() + self._late.timeout
        try:
            for index, work in enumerate(works):
                left = until - time.monotonic()
                try:
                    if messages[0].tensor.device.type == "cpu":
                        work.wait(_milliseconds(left))
                    elif not _poll(work, left):
                        raise RuntimeError(f"it did not end within {self._late.timeout:g} s")
                except RuntimeError as error:
                    if len(works) != len(messages):  # NCCL makes one piece of work of a batch
                        raise
                    rank = self._global_ranks.index(messages[index].peer)
                    raise RuntimeError(f"message to or from rank {rank}: {error}") from error
        finally:
            # With its work, what gloo still waits for loses its memory: after a failure, nothing
            # that comes late is written into a buffer of the caller.
            works.clear()

    def _finish(self, work: dist.Work | None, awaited: Sequence[int] | None = None) -> None:
        """Wait for a collective, within the limits; for all ranks unless some are named."""
        assert work is not None  # this process is in the group
        began = time.monotonic()
        if self._is_done(work, self._late.mark_after):
            return
        self._late.begin(self._operation, awaited or range(self.world_size))
        while not self._is_done(work, self._late.look(time.monotonic() - began)):
            pass
        self._late.end()

    def _is_done(self, work: dist.Work, seconds: float) -> bool:
        """True if a collective ends within some seconds."""
        if self._device.type != "cpu":
            return _poll(work, seconds)
        try:
            work.wait(_milliseconds(seconds))
        except RuntimeError:
            # A wait whose time is up raises the same as a collective that failed.
            if not work.is_completed():
                return False
            work.wait()
        return True

    def _to_tensor(self, data: bytes) -> torch.Tensor:
        # The copy is what torch asks for: a tensor over immutable bytes is not allowed.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)


def _head_of(data: bytes) -> bytes:
    """The size of a message, and its first bytes."""
    return len(data).to_bytes(8, "little") + data[:_SHORT].ljust(_SHORT, b"\0")


def _decode_head(head: bytes) -> tuple[int, bytes]:
    size = int.from_bytes(head[:8], "little")
    return size, head[8 : 8 + size]


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device whose tensors the group can move: the CPU if it can."""
    # The form is "cpu:gloo,cuda:nccl".
    devices = [item.partition(":")[0] for item in dist.get_backend_config(group).split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    # Which device is current differs between threads, so it is asked here, in the thread where
    # the user chose it, and not when a message is sent.
    module = torch.get_device_module(devices[0])
    return torch.device(devices[0], module.current_device())


def _default_timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that a call waits if the caller does not say."""
    options = getattr(group._get_backend(device), "options", None)  # noqa: SLF001 - no other way
    timeout = getattr(options, "_timeout", None)
    if timeout is None:
        return _LONGEST_WAIT
    # A little less than the group's, for the error that names the ranks is better than torch's.
    return min(0.95 * float(timeout.total_seconds()), _LONGEST_WAIT)


def _milliseconds(seconds: float) -> timedelta:
    """A time limit as torch takes it, in whole milliseconds; zero would mean none."""
    return timedelta(milliseconds=max(1, math.ceil(1000 * seconds)))


def _poll(work: dist.Work, seconds: float) -> bool:
    """True if the work of a device ends within some seconds; raises its error if it failed."""
    until = time.monotonic() + seconds
    pause = 20e-6
    while not work.is_completed():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL)
    work.wait()
    return True


def _to_bytes(message: torch.Tensor) -> bytes:
    return bytes(message.cpu().numpy())


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK))
