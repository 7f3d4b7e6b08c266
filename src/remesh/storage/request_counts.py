"""How many requests went to an object store, in the two classes that stores charge for.

Stores charge for requests beside bytes: a class of those that write or list (PUT, COPY, POST, LIST;
S3 charges for each part of an upload, and for its beginning and end), and one of those that read
(GET, HEAD). Removing is free. What the client library repeats after a failure is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from remesh._repr import format_bytes, short_repr
from remesh.storage.protocol import Storage
from remesh.storage.view import without_views

USD_PER_1000_PUTS = 0.005
"""A list price of S3 Standard in us-east-1, in US dollars; prices change."""

USD_PER_1000_GETS = 0.0004
"""The same for requests that read."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to an object store, and the bytes of files that they moved.

    Attributes:
        puts: Requests that write or list: PUT, COPY, POST and LIST.
        gets: Requests that read: GET and HEAD.
        deletes: Requests that remove; one may remove many files.
        bytes_sent: Bytes of files that were written.
        bytes_received: Bytes of files that were read.
    """

    puts: int = 0
    gets: int = 0
    deletes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    __repr__ = short_repr

    def __add__(self, other: Requests) -> Requests:
        return Requests(
            self.puts + other.puts,
            self.gets + other.gets,
            self.deletes + other.deletes,
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
        )

    def __sub__(self, other: Requests) -> Requests:
        return self + Requests(
            -other.puts, -other.gets, -other.deletes, -other.bytes_sent, -other.bytes_received
        )

    def __bool__(self) -> bool:
        return self.puts + self.gets + self.deletes > 0

    def price(
        self,
        *,
        per_1000_puts: float = USD_PER_1000_PUTS,
        per_1000_gets: float = USD_PER_1000_GETS,
    ) -> float:
        """What the requests cost, without storage and traffic.

        Args:
            per_1000_puts: Price of 1000 requests that write or list; by default the list price of
                S3 Standard in us-east-1, in US dollars.
            per_1000_gets: Price of 1000 requests that read.
        """
        return (self.puts * per_1000_puts + self.gets * per_1000_gets) / 1000

    def __str__(self) -> str:
        return (
            f"{self.puts} PUT, {self.gets} GET and {self.deletes} DELETE requests "
            f"({format_bytes(self.bytes_sent)} out, {format_bytes(self.bytes_received)} in)"
        )


@runtime_checkable
class CountedRequests(Protocol):
    """What storages may have besides the methods of `Storage`."""

    @property
    def requests(self) -> Requests:
        """The requests of this storage so far, those of this process alone."""
        ...


def requests_since(storage: Storage) -> Callable[[], Requests]:
    """What tells the requests of a storage from now on; none if it does not count them."""
    storage = without_views(storage)
    if not isinstance(storage, CountedRequests):
        return Requests
    before = storage.requests
    return lambda: storage.requests - before
