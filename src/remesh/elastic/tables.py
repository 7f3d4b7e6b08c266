"""Mappings that are never changed, whose changed copies share nearly everything.

The state machines return a new state for each event. A copy of a whole dict for each node that
joins would make a world of 100,000 nodes cost 100,000 squared. A `Table` lies in buckets, and a
changed copy has one new bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import GenericAlias
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec

NUM_BUCKETS = 256
"""A change copies one bucket, and the list of so many."""

K = TypeVar("K")
V = TypeVar("V")


class Table(Mapping[K, V], Generic[K, V]):
    """A mapping that is never changed."""

    __slots__ = ("_buckets", "_size")

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        self._buckets: list[dict[K, V]] = [{}] * NUM_BUCKETS
        self._size = 0 if items is None else len(items)
        if items:
            self._buckets = [{} for _ in range(NUM_BUCKETS)]
            for key, value in items.items():
                self._buckets[hash(key) % NUM_BUCKETS][key] = value

    def __getitem__(self, key: K) -> V:
        return self._buckets[hash(key) % NUM_BUCKETS][key]

    def __iter__(self) -> Iterator[K]:
        for bucket in self._buckets:
            yield from bucket

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Table({dict(self)!r})"

    def plus(self, key: K, value: V) -> Table[K, V]:
        """A copy in which a key has a value."""
        number = hash(key) % NUM_BUCKETS
        return self._changed(number, {**self._buckets[number], key: value})

    def minus(self, key: K) -> Table[K, V]:
        """A copy without a key; this table if it has none such."""
        if key not in self:
            return self
        number = hash(key) % NUM_BUCKETS
        bucket = dict(self._buckets[number])
        del bucket[key]
        return self._changed(number, bucket)

    def _changed(self, number: int, bucket: dict[K, V]) -> Table[K, V]:
        changed: Table[K, V] = Table.__new__(Table)
        changed._buckets = self._buckets.copy()
        changed._buckets[number] = bucket
        changed._size = self._size - len(self._buckets[number]) + len(bucket)
        return changed


def encode_hook(value: object) -> object:
    """A table as what msgspec can encode."""
    if isinstance(value, Table):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def decode_hook(kind: Any, value: object) -> object:
    """A table of what `encode_hook` made of it."""
    if get_origin(kind) is Table:
        return Table(msgspec.convert(value, GenericAlias(dict, get_args(kind)), str_keys=True))
    raise NotImplementedError(f"{kind} cannot be decoded")
