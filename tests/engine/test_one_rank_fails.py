"""What fails on one rank alone, between two collectives, fails on all, and none waits for it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remesh
from remesh.checkpoint import convert, match
from remesh.errors import CheckpointNotFoundError, RankFailedError
from remesh.events import Event
from remesh.exchange import Exchange
from tests.engine.scenes import share_of
from tests.support import run_ranks

FAILURES = (ZeroDivisionError, RankFailedError)


def rows(rank: int, value: float = 0.0, num_rows: int = 4) -> dict[str, Any]:
    return {"w": share_of("w", np.full((num_rows, 3), value), rank, 2)}


class Listener:
    """Fails on rank 1 at a moment, once it is armed."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.is_armed = True

    def __call__(self, event: Event) -> None:
        if self.is_armed and event.rank == 1 and event.point == self.point:
            raise ZeroDivisionError(self.point)


@pytest.mark.parametrize("point", ["load.opened", "load.planned", "load.run_read", "load.read"])
def test_a_listener_of_a_load(point: str, tmp_path: Path) -> None:
    def main(exchange: Exchange) -> None:
        remesh.save(rows(exchange.rank, 1.0), tmp_path, group=exchange)
        with pytest.raises(FAILURES, match=point):
            remesh.load(rows(exchange.rank), tmp_path, group=exchange, on_event=Listener(point))

    run_ranks(2, main)


@pytest.mark.parametrize("point", ["save.described", "load.planned"])
def test_a_listener_of_a_push_that_is_made_again(point: str) -> None:
    def main(exchange: Exchange) -> None:
        listener, target = Listener(point), rows(exchange.rank)
        listener.is_armed = False
        pushes = remesh.Resharder(
            rows(exchange.rank, 1.0), target, group=exchange, on_event=listener
        )
        pushes.push()
        assert pushes.push().plan_reused
        listener.is_armed = True
        with pytest.raises(FAILURES, match=point):
            pushes.push()
        listener.is_armed = False
        pushes.push()
        assert (target["w"].parts[0].data == 1.0).all()

    run_ranks(2, main)


def test_new_elements_that_cannot_be_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(exchange: Exchange) -> None:
        remesh.save(rows(exchange.rank, 1.0), tmp_path, group=exchange)
        # Of the larger tensor, rank 1 alone has what is new.
        larger = rows(exchange.rank, num_rows=8)["w"]
        target = dataclasses.replace(larger, allow_shape_mismatch=True)
        with pytest.raises(FAILURES):
            remesh.load([target], tmp_path, group=exchange)

    monkeypatch.setattr(match, "fill_with_zeros", lambda *_: 1 / 0)
    run_ranks(2, main)


def test_a_source_that_one_rank_does_not_see(tmp_path: Path) -> None:
    remesh.save({"w": np.ones(3)}, tmp_path / "source")

    def main(exchange: Exchange) -> None:
        source = tmp_path / ("source" if exchange.rank == 0 else "elsewhere")
        with pytest.raises(CheckpointNotFoundError, match="elsewhere"):
            convert(source, tmp_path / "new", format="safetensors", group=exchange)

    run_ranks(2, main)


def test_a_path_that_one_rank_gets_wrong(tmp_path: Path) -> None:
    remesh.save({"w": np.ones(3)}, tmp_path / "c")

    def main(exchange: Exchange) -> None:
        state: Any = {"w": np.zeros(3)}
        with remesh.Saver(group=exchange) as saver:
            for call in (saver.save, saver.save_async, partial(remesh.load, group=exchange)):
                place: Any = tmp_path / "c" if exchange.rank == 0 else 7
                with pytest.raises(
                    remesh.RemeshError, match="rank 1" if exchange.rank == 0 else None
                ):
                    call(state, place)

    run_ranks(2, main)
