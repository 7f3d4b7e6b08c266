"""Sharded objects across ranks."""

from __future__ import annotations

import remesh
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from remesh.testing import Raised, run_ranks_outcomes


def test_an_object_without_a_main_replica_is_refused() -> None:
    def save(exchange: Exchange) -> None:
        element = remesh.ShardedObject("rng", exchange.rank, (2,), (1,), replica_id=1)
        remesh.save({"rng": element}, MemoryStorage(), group=exchange)

    for outcome in run_ranks_outcomes(2, save):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, remesh.CoverageError)
        assert "rng/shard_1_2" in str(outcome.error)
