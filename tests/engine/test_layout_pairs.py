"""Every layout to every layout, in one process: ranks are threads over one in-memory storage."""

from __future__ import annotations

import numpy as np
import pytest

import remesh
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.engine.layouts import ALL, LAYOUTS, SHAPES, SOME, Layout, targets_of, truth
from tests.support import run_ranks


def save_rank(exchange: Exchange, layout: Layout, storage: MemoryStorage) -> None:
    remesh.save(layout.state(exchange.rank, fill=True), storage, group=exchange)


def load_rank(
    exchange: Exchange, layout: Layout, storage: MemoryStorage, share_reads: bool
) -> remesh.checkpoint.RestoreReport:
    state = layout.state(exchange.rank, fill=False)
    report = remesh.load(
        state, storage, group=exchange, unexpected="error", share_reads=share_reads
    )
    layout.check(exchange.rank, state)
    return report


def load_in(source: Layout, targets: list[Layout]) -> None:
    """Load in other layouts, each rank for itself and all together."""
    storage = MemoryStorage()
    run_ranks(source.world_size, save_rank, source, storage)
    checkpoint = remesh.Checkpoint(storage)
    assert checkpoint.record.world_size == source.world_size
    assert set(checkpoint.index) == set(SHAPES)
    for name, (shape, _) in SHAPES.items():
        assert checkpoint.read_array(name).tobytes() == truth(name).tobytes()
        counts = np.zeros(shape, int)
        for piece in checkpoint.index.pieces(name):
            counts[piece.box.slices] += 1
        assert (counts == 1).all(), "an element is stored once"
    whole = sum(checkpoint.index[name].num_bytes for name in checkpoint.index)
    stored = sum(file.num_bytes for file in checkpoint.index.files)
    for target in targets:
        for shares in (False, True):
            reports = run_ranks(target.world_size, load_rank, target, storage, shares)
            assert sum(report.bytes_needed for report in reports) >= whole
            assert {name for report in reports for name in report.restored} == set(SHAPES)
            assert not shares or sum(report.bytes_read for report in reports) <= stored


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_loads_in_some_others(source: Layout) -> None:
    load_in(source, targets_of(source, SOME))


@pytest.mark.nightly
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_loads_in_any_other(source: Layout) -> None:
    load_in(source, targets_of(source, ALL))
