"""States that are saved into memory, and loaded from there."""

from __future__ import annotations

from typing import Any

import torch

import remesh
from remesh.checkpoint.report import RestoreReport
from remesh.storage import MemoryStorage


def saved(state: Any) -> MemoryStorage:
    storage = MemoryStorage()
    remesh.save(state, storage)
    return storage


def transfer(source: Any, target: Any, **options: Any) -> RestoreReport:
    """Load what one state holds into another; an error if names are missing or left over."""
    return remesh.load(target, saved(source), **{"unexpected": "error", **options})


def check_equal(path: Any, expected: Any) -> None:
    """Check that two checkpoints hold the same, in whatever order groups have their parameters."""
    found, wanted = remesh.Checkpoint(path), remesh.Checkpoint(expected)
    assert set(found.index) == set(wanted.index), path
    assert found.values == wanted.values, path
    lists = [{name: sorted(of.lists[name]) for name in of.lists} for of in (found, wanted)]
    assert lists[0] == lists[1], path
    for name in wanted.index:
        assert torch.equal(found.read(name), wanted.read(name)), f"{path}: {name}"
