"""Every layout to every layout, from storage and live; ranks are threads, the storage is memory.

Every second layout is saved in compressed files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import remesh
from remesh.exchange import Exchange
from remesh.pipeline import Compress, transfer
from remesh.pipeline.transfer import Offer, map_buffers
from remesh.storage import Buffer, MemoryStorage
from tests.engine.layouts import ALL, LAYOUTS, SHAPES, SOME, Layout, targets_of, truth
from tests.engine.scenes import saved_by
from tests.support import run_ranks

WORLD_SIZE = 8
"""Of live layouts; ranks that a layout has no use for hold nothing of it."""


def load_rank(
    exchange: Exchange, layout: Layout, storage: MemoryStorage, share_reads: bool
) -> remesh.checkpoint.RestoreReport:
    state = layout.state(exchange.rank, fill=False)
    report = remesh.load(
        state, storage, group=exchange, unexpected="error", share_reads=share_reads
    )
    layout.check(exchange.rank, state)
    return report


def from_storage(source: Layout, shifts: Iterable[int]) -> None:
    """Save, and load in other layouts, each rank for itself and all together."""
    compress: Compress | None = "zstd" if LAYOUTS.index(source) % 2 else None
    world_size = source.world_size
    storage = saved_by(world_size, lambda rank: source.state(rank, fill=True), compress=compress)
    checkpoint = remesh.Checkpoint(storage)
    assert checkpoint.record.world_size == world_size
    assert set(checkpoint.index) == set(SHAPES)
    for name, (shape, _) in SHAPES.items():
        assert checkpoint.read_array(name).tobytes() == truth(name).tobytes()
        counts = np.zeros(shape, int)
        for piece in checkpoint.index.pieces(name):
            counts[piece.box.slices] += 1
        assert (counts == 1).all(), "an element is stored once"
    whole = sum(checkpoint.index[name].num_bytes for name in checkpoint.index)
    stored = sum(file.num_bytes for file in checkpoint.index.files)
    for target in targets_of(source, shifts):
        for shares in (False, True):
            reports = run_ranks(target.world_size, load_rank, target, storage, shares)
            assert sum(report.bytes_needed for report in reports) >= whole
            assert {name for report in reports for name in report.restored} == set(SHAPES)
            assert not shares or sum(report.bytes_read for report in reports) <= stored


def live(source: Layout, shifts: Iterable[int]) -> None:
    """Move the state from memory to memory."""

    def run(exchange: Exchange) -> None:
        rank = exchange.rank
        for target in targets_of(source, shifts):
            held: Any = source.state(rank, fill=True) if rank < source.world_size else {}
            wanted: Any = target.state(rank, fill=False) if rank < target.world_size else {}
            report = remesh.reshard(held, wanted, group=exchange)
            target.check(rank, wanted)
            assert report.restored.unexpected == ()

    run_ranks(WORLD_SIZE, run)


def live_by(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages go through memory that both ranks see, through the exchange, or either way."""

    def look(offer: Offer, *of_buffers: int) -> list[Buffer] | None:
        is_seen = way != "sent" and (way != "mixed" or offer.token[0] % 2)
        return map_buffers(offer, *of_buffers) if is_seen else None

    monkeypatch.setattr(transfer, "map_buffers", look)


@pytest.mark.parametrize("move", [from_storage, live])
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_becomes_some_others(source: Layout, move: Any) -> None:
    move(source, SOME)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["from storage", "shared", "sent", "mixed"])
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_becomes_any_other(
    source: Layout, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "from storage":
        from_storage(source, ALL)
    else:
        live_by(way, monkeypatch)
        live(source, ALL)


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_no_byte_travels_that_is_there_already_and_none_twice(source: Layout) -> None:
    target = next(layout for layout in LAYOUTS if layout.name == "mesh2x2x2")

    def run(exchange: Exchange) -> tuple[int, remesh.checkpoint.ReshardReport]:
        rank = exchange.rank
        held: Any = source.state(rank, fill=True) if rank < source.world_size else {}
        wanted = target.state(rank, fill=False)
        report = remesh.Resharder(held, wanted, group=exchange).push()
        lacking = 0
        for name, tensor in wanted.items():
            here = np.zeros(tensor.global_shape, bool)
            for part in held[name].parts if held else ():
                here[part.box.slices] = True
            for part in tensor.parts:
                lacking += int((~here[part.box.slices]).sum()) * int(np.asarray(part.data).itemsize)
        return lacking, report

    found = run_ranks(WORLD_SIZE, run)
    for lacking, report in found:
        assert report.bytes_received == lacking
        assert report.group_bytes_sent == sum(one.bytes_sent for _, one in found)
        assert report.group_bytes_sent == sum(one.bytes_received for _, one in found)
