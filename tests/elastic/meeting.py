"""An exchange of ranks that are processes, without torch: each has a connection to rank 0.

A process that uses it starts in a fraction of the time that importing torch takes, which is most of
what the processes of a scenario would do. It is for tests of what goes on around the ranks: what
torch's own process groups do is tested with those.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener

from remesh.errors import ExchangeError
from remesh.exchange import ThreadExchange, ThreadGroup

CONNECT_SECONDS = 300.0
"""How long a rank looks for rank 0, which may have died: its agent then ends it much sooner."""


class Meeting(ThreadGroup):
    """A group whose ranks are processes, and meet as threads do; they alone know its name."""

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        super().__init__(world_size)
        self._others: list[Connection]
        with _lost_partners(rank):
            if rank > 0:
                self._others = [_connect(name)]
                self._others[0].send(rank)
                return
            with Listener(f"\0{name}", "AF_UNIX", backlog=world_size) as listener:
                arrived = [listener.accept() for _ in range(world_size - 1)]
            by_rank = {connection.recv(): connection for connection in arrived}
            self._others = [by_rank[other] for other in range(1, world_size)]

    def meet(self, rank: int, operation: str, contribution: list[bytes]) -> list[list[bytes]]:
        with _lost_partners(rank):
            if rank > 0:
                self._others[0].send((operation, contribution))
                everything: list[list[bytes]] = self._others[0].recv()
                return everything
            brought = [(operation, contribution), *(other.recv() for other in self._others)]
            assert {name for name, _ in brought} == {operation}, brought
            everything = [items for _, items in brought]
            for other in self._others:
                other.send(everything)
            return everything


def meet(name: str, rank: int, world_size: int) -> ThreadExchange:
    return Meeting(name, rank, world_size).exchange(rank)


def _connect(name: str) -> Connection:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return Client(f"\0{name}", "AF_UNIX")
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextmanager
def _lost_partners(rank: int) -> Iterator[None]:
    """Errors of sockets are what they are with gloo: a peer has gone."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise ExchangeError(f"rank {rank}: Connection closed by peer: {error!r}") from error
