"""Jobs whose ranks are threads: they hold, save and load what real ones do, and do not train."""

from __future__ import annotations

from typing import Any

import torch

import remesh
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.conversions.jobs import Job
from tests.conversions.layouts import Layout, put_together
from tests.conversions.model import Shape
from tests.support import run_ranks


def filled(layout: Layout, shape: Shape, whole: dict[str, torch.Tensor]) -> list[Job]:
    """The ranks of a job in a layout that holds given whole tensors."""
    jobs = [Job(layout, shape, rank, step=7) for rank in range(layout.world_size)]
    for job in jobs:
        job.fill(whole)
    return jobs


def save(jobs: list[Job]) -> MemoryStorage:
    storage = MemoryStorage()

    def rank(exchange: Exchange) -> None:
        remesh.save(jobs[exchange.rank].state(), storage, group=exchange)

    run_ranks(len(jobs), rank)
    return storage


def load(layout: Layout, shape: Shape, storage: MemoryStorage, **options: Any) -> list[Job]:
    """Fresh ranks of a job in a layout, loaded from a checkpoint with options of `remesh.load`."""
    options = {"unexpected": "error", **options}

    def rank(exchange: Exchange) -> Job:
        job = Job(layout, shape, exchange.rank)
        state = job.state()
        job.report = remesh.load(state, storage, group=exchange, **options)
        job.step = state["step"]
        return job

    return run_ranks(layout.world_size, rank)


def check(jobs: list[Job], whole: dict[str, torch.Tensor]) -> None:
    """The ranks hold the whole tensors, and what is not a tensor."""
    found = put_together([job.held() for job in jobs], whole)
    for key, expected in whole.items():
        assert torch.equal(found[key], expected), key
    for job in jobs:
        assert job.step == 7
        expected = torch.Generator().manual_seed(107).get_state()
        assert torch.equal(job.generator.get_state(), expected)
