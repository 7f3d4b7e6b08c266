"""Sharded objects across ranks."""

from __future__ import annotations

import pytest

import remesh
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from remesh.testing import Raised, run_ranks_outcomes
from remesh.values import UnresolvedValue


def test_an_object_without_a_main_replica_is_refused() -> None:
    storage = MemoryStorage()

    def save(exchange: Exchange) -> None:
        element = remesh.sharding.ShardedObject("rng", exchange.rank, (2,), (1,), replica_id=1)
        remesh.save({"rng": element}, storage, group=exchange)

    for outcome in run_ranks_outcomes(2, save):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, remesh.errors.CoverageError)
        assert "rng/shard_1_2" in str(outcome.error)


def test_an_object_that_this_program_cannot_have_is_refused() -> None:
    place = MemoryStorage()
    advice = "a pickled a.B is not read; allow it"
    refused = {
        "pickle": UnresolvedValue("pickle", "a.B", advice),
        "enum": [UnresolvedValue("enum", "a.Color", "RED")],
    }
    remesh.save({kind: shard(kind, value) for kind, value in refused.items()}, place)
    state = {kind: shard(kind, None) for kind in refused}
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load(state, place)
    known, unknown = caught.value.conflicts
    assert known == f"pickle/shard_0_1: {advice}"
    assert unknown.startswith("enum/shard_0_1: the stored value is a a.Color")
    assert all(element.data is None for element in state.values())


def shard(name: str, value: object) -> remesh.sharding.ShardedObject:
    return remesh.sharding.ShardedObject(name, value, (1,), (0,))
