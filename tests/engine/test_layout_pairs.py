"""Every layout to every layout, from memory to memory; ranks are threads.

`tests/conversions` has them from storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import remesh
from remesh.exchange import Exchange
from remesh.pipeline import transfer
from remesh.pipeline.transfer import Offer, map_buffers
from remesh.storage import Buffer
from tests.engine.layouts import ALL, LAYOUTS, SOME, Layout, targets_of
from tests.support import run_ranks

WORLD_SIZE = 8
"""Of live layouts; ranks that a layout has no use for hold nothing of it."""


def live(source: Layout, shifts: Iterable[int]) -> None:
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


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_becomes_some_others(source: Layout) -> None:
    live(source, SOME)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["shared", "sent", "mixed"])
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_becomes_any_other(
    source: Layout, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_by(way, monkeypatch)
    live(source, ALL)


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_no_byte_travels_that_is_there_already_and_none_twice(source: Layout) -> None:
    target = next(layout for layout in LAYOUTS if layout.name == "mesh2x2x2")

    def run(exchange: Exchange) -> tuple[int, int, remesh.checkpoint.ReshardReport]:
        rank = exchange.rank
        held: Any = source.state(rank, fill=True) if rank < source.world_size else {}
        wanted = target.state(rank, fill=False)
        report = remesh.Resharder(held, wanted, group=exchange).push()
        lacking = whole = 0
        for name, tensor in wanted.items():
            here = np.zeros(tensor.global_shape, bool)
            for part in held[name].parts if held else ():
                here[part.box.slices] = True
            for part in tensor.parts:
                lacking += int((~here[part.box.slices]).sum()) * int(np.asarray(part.data).itemsize)
                whole += int(np.asarray(part.data).nbytes)
        return lacking, whole, report

    found = run_ranks(WORLD_SIZE, run)
    for lacking, whole, report in found:
        assert report.bytes_received == lacking
        assert report.bytes_local == whole - lacking
        assert report.group_bytes_sent == sum(one.bytes_sent for *_, one in found)
        assert report.group_bytes_sent == sum(one.bytes_received for *_, one in found)
        assert not report.buffer_bytes or report.bytes_sent + report.bytes_received
