"""Every layout to every layout, in one process: ranks are threads over one in-memory storage."""

from __future__ import annotations

from typing import Any

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
    exchange: Exchange, layout: Layout, storage: MemoryStorage, share_reads: bool = False
) -> Any:
    state = layout.state(exchange.rank, fill=False)
    report = remesh.load(
        state, storage, group=exchange, unexpected="error", share_reads=share_reads
    )
    layout.check(exchange.rank, state)
    return report


def load_in(source: Layout, targets: list[Layout]) -> None:
    storage = MemoryStorage()
    run_ranks(source.world_size, save_rank, source, storage)
    checkpoint = remesh.Checkpoint(storage)
    assert checkpoint.record.world_size == source.world_size
    assert set(checkpoint.index) == set(SHAPES)
    for name in SHAPES:
        assert checkpoint.read_array(name).tobytes() == truth(name).tobytes()
    for target in targets:
        reports = run_ranks(target.world_size, load_rank, target, storage)
        needed = sum(report.bytes_needed for report in reports)
        assert needed >= checkpoint_bytes(checkpoint)
        assert {name for report in reports for name in report.restored} == set(SHAPES)


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_loads_in_some_others(source: Layout) -> None:
    load_in(source, targets_of(source, SOME))


@pytest.mark.nightly
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_loads_in_any_other(source: Layout) -> None:
    load_in(source, targets_of(source, ALL))


def checkpoint_bytes(checkpoint: remesh.Checkpoint) -> int:
    return sum(checkpoint.index[name].num_bytes for name in checkpoint.index)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_element_is_stored_once(layout: Layout) -> None:
    storage = MemoryStorage()
    run_ranks(layout.world_size, save_rank, layout, storage)
    index = remesh.Checkpoint(storage).index
    for name, (shape, _) in SHAPES.items():
        counts = np.zeros(shape, int)
        for piece in index.pieces(name):
            counts[piece.box.slices] += 1
        assert (counts == 1).all(), (name, shape)


def load_together_in(source: Layout, targets: list[Layout]) -> None:
    storage = MemoryStorage()
    run_ranks(source.world_size, save_rank, source, storage)
    stored = sum(file.num_bytes for file in remesh.Checkpoint(storage).index.files)
    for target in targets:
        reports = run_ranks(target.world_size, load_rank, target, storage, True)
        assert sum(report.bytes_read for report in reports) <= stored


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_loads_in_some_others_reading_together(source: Layout) -> None:
    load_together_in(source, targets_of(source, SOME))


@pytest.mark.nightly
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_loads_in_any_other_reading_together(source: Layout) -> None:
    load_together_in(source, targets_of(source, ALL))
