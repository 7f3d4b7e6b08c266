"""Which connections are shut down to wake a process from a collective."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remesh.elastic.collectives import break_collectives, leave_groups

pytestmark = pytest.mark.timeout(300)

EPOLL_CTL_ADD = 1


class Event(ctypes.Structure):
    """`struct epoll_event`, which is packed on x86."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _layout_ = "ms" if os.uname().machine == "x86_64" else "gcc-sysv"
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


@pytest.fixture
def other_library() -> Iterator[socket.socket]:
    """A connection for which the event loop of another library keeps a pointer, as gRPC's does."""
    kept = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None, use_errno=True)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        near = stack.enter_context(socket.create_connection(listener.getsockname()))
        far = stack.enter_context(listener.accept()[0])
        loop = libc.epoll_create1(0)
        stack.callback(os.close, loop)
        event = Event(0, ctypes.addressof(kept))
        assert libc.epoll_ctl(loop, EPOLL_CTL_ADD, near.fileno(), ctypes.byref(event)) == 0
        far.sendall(b"x")
        yield near


def test_a_collective_raises_and_other_connections_stay(other_library: socket.socket) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined] # not said to be exported
    inside = threading.Event()
    groups: list[Any] = []
    errors: list[BaseException] = []

    def rank_1() -> None:
        groups.append(dist.ProcessGroupGloo(store, 1, 2, timedelta(minutes=4)))

    def wait() -> None:
        work = groups[1].allreduce(torch.ones(1))
        inside.set()
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(error)

    other = threading.Thread(target=rank_1)
    other.start()
    mine = dist.ProcessGroupGloo(store, 0, 2, timedelta(minutes=4))
    other.join()
    groups.append(mine)
    waiting = threading.Thread(target=wait)
    waiting.start()
    inside.wait()
    assert break_collectives(0) >= 2  # both ends are in this process
    waiting.join()
    assert len(errors) == 1
    assert other_library.recv(8) == b"x"
    other_library.setblocking(False)
    with pytest.raises(BlockingIOError):  # it would be the end of the stream
        other_library.recv(8)


def test_a_group_whose_making_was_interrupted_takes_no_number() -> None:
    """New processes call their first group by the first number, and wait for one of that name."""
    with pytest.raises(RuntimeError, match="No rendezvous handler"):
        dist.init_process_group("gloo", "nowhere://", rank=1, world_size=2)
    leave_groups()
    store = dist.HashStore()  # type: ignore[attr-defined] # not said to be exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.distributed_c10d._get_default_group().group_name == "0"
    finally:
        leave_groups()
