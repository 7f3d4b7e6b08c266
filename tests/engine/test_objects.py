"""Sharded objects across ranks."""

from __future__ import annotations

import fractions
import io
from collections.abc import Callable

import pytest
import torch

import remesh
from remesh.core.values import UnresolvedValue
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.support import Raised, run_ranks_outcomes


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
    remesh.save({"enum": shard("enum", [UnresolvedValue("enum", "a.Color", "RED")])}, place)
    state = {"enum": shard("enum", None)}
    with pytest.raises(remesh.MismatchError) as caught:
        remesh.load(state, place)
    (unknown,) = caught.value.conflicts
    assert unknown.startswith("enum/shard_0_1: the stored value is a a.Color")
    assert state["enum"].data is None


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: shard("x", value)])
def test_what_a_reader_did_not_read_is_not_saved(wrap: Callable[[object], object]) -> None:
    torch.save({"x": fractions.Fraction(1, 3)}, file := io.BytesIO())
    source = MemoryStorage()
    source.put("a.pt", file.getvalue(), overwrite=False)
    found = remesh.Checkpoint(source).values["x"]
    place = MemoryStorage()
    with pytest.raises(
        remesh.errors.UnsupportedValueError, match=r"^x(\.0)?: its content was not read"
    ):
        remesh.save({"x": wrap([found])}, place)
    assert not place.list("")


def shard(name: str, value: object) -> remesh.sharding.ShardedObject:
    return remesh.sharding.ShardedObject(name, value, (1,), (0,))
