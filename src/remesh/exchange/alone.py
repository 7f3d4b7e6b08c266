"""The exchange of a job that is one process."""

from __future__ import annotations

from collections.abc import Sequence

from remesh.exchange.protocol import Buffers, Exchange


class Alone(Exchange):
    """A group of one rank, which receives its own messages."""

    rank = 0
    world_size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def gather(self, data: bytes) -> list[bytes] | None:
        return [data]

    def scatter(self, data: list[bytes] | None) -> bytes:
        assert data is not None
        return data[0]

    def broadcast(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def swap(self, outgoing: Sequence[Buffers], incoming: Sequence[Buffers]) -> None:
        for leaving, arriving in zip(outgoing[0], incoming[0], strict=True):
            arriving[:] = leaving
