"""How a process is woken that waits in a collective, or for the store."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from remesh.elastic.collectives import break_collectives, leave_groups

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backends of two ranks, of which the first belongs to a group of this process."""
    store = dist.HashStore()  # type: ignore[attr-defined] # not said to be exported

    def make(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(minutes=4))

    with ThreadPoolExecutor() as pool:
        backends = list(pool.map(make, range(2)))
    group = dist.ProcessGroup(store, 0, 2)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backends[0])
    monkeypatch.setitem(dist.distributed_c10d._world.pg_names, group, "of the test")
    return backends


def test_a_collective_raises_on_both_sides(groups: list[Any]) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(groups[0].allreduce([torch.ones(1)]).wait)
        peer = pool.submit(groups[1].recv([torch.ones(1)], 0, 1).wait)
        break_collectives(0)
        for one in (waiting, peer):
            with pytest.raises(RuntimeError, match=r"closure|closed"):
                one.result(60)


def test_a_message_for_a_receive_that_has_failed_keeps_no_collective_waiting(
    groups: list[Any],
) -> None:
    """gloo does not read it, nor what comes after it, which is the end of the connection."""
    groups[0].recv([torch.ones(1)], 1, 1)  # the work ends here, and its buffer with it
    sent = groups[1].send([torch.ones(1)], 0, 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(groups[0].allreduce([torch.ones(1)]).wait)
        sent.wait()
        break_collectives(0)
        with pytest.raises(RuntimeError, match=r"closure|closed"):
            waiting.result(60)


def test_what_waits_for_the_store_raises_and_other_connections_stay() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)  # type: ignore[attr-defined] # not said to be exported
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        near = stack.enter_context(socket.create_connection(listener.getsockname()))
        far = stack.enter_context(listener.accept()[0])
        pool = stack.enter_context(ThreadPoolExecutor())
        waiting = pool.submit(store.get, "what nobody sets")
        while not waiting.running():
            time.sleep(0.01)
        break_collectives(store.port)
        with pytest.raises(RuntimeError):
            waiting.result(60)
        far.sendall(b"x")
        assert near.recv(8) == b"x"


class Dying(dist.Store):  # type: ignore[misc, name-defined] # not said to be exported
    """The store as a rank sees it that dies when it has said where it listens."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        raise ConnectionResetError(key)


@pytest.mark.parametrize("number", range(8))  # who waits for the other is a matter of chance
def test_what_makes_a_group_with_a_dead_rank_goes_on(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = dist.HashStore()  # type: ignore[attr-defined] # not said to be exported
    rank_0 = dist.PrefixStore("0//cpu/", store)  # type: ignore[attr-defined] # as above
    with pytest.raises(RuntimeError):
        dist.ProcessGroupGloo(Dying(rank_0), 1, 2, timedelta(minutes=4))
    left = threading.Event()

    def leave() -> None:
        while not left.wait(0.1):
            break_collectives(0)

    with ThreadPoolExecutor() as pool, contextlib.suppress(RuntimeError):
        pool.submit(leave)
        try:
            dist.init_process_group("gloo", store=store, rank=0, world_size=2)
        finally:
            left.set()
            leave_groups()


def test_a_listener_that_takes_no_connections_keeps_the_rest_waiting_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "40")

    def _new_process_group_helper() -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(break_collectives, 0).result(10)

    with socket.create_server(("127.0.0.1", 0), backlog=1):
        _new_process_group_helper()


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
