"""Directories of stores: listing one, and what commands make of them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from obstore.store import MemoryStore

import remesh
from remesh import catalog
from remesh.maintenance import orphans
from remesh.storage import Storage, open_storage
from remesh.storage.object_store import ObjectStorage
from tests.storage.object_servers import BUCKET, S3Server

HOUR = 3600.0
DEAD = "data-0123456789ab"


@pytest.fixture
def place(request: pytest.FixtureRequest, server: S3Server) -> Storage:
    """An empty place in a bucket."""
    return open_storage(f"s3://{BUCKET}/{request.function.__name__}")


def fill(place: Storage) -> None:
    """A checkpoint, what a dead save left, and much that has nothing to do with it."""
    remesh.save({"a": np.arange(1000.0)}, f"{place.url}/step_1")
    place.put(f"step_2/{DEAD}/00000.safetensors", bytes(1500), overwrite=False)
    place.put(f"step_2/{DEAD}/part-00001.msgpack", bytes(10), overwrite=False)
    for number in range(3):
        place.put(f"images/cats/{number}.png", b"meow", overwrite=False)


def test_leftovers_are_found_and_removed_by_age(place: Storage) -> None:
    fill(place)
    young = orphans.find_orphans(place, now=time.time(), older_than=HOUR)
    assert [one.path for one in young] == [f"{place.url}/step_2/{DEAD}"]
    assert young[0].kept == "changed not long ago; a save may be running"
    later = time.time() + 2 * HOUR
    (dead,) = orphans.find_orphans(place, now=later, older_than=HOUR)
    assert (dead.num_bytes, dead.kept) == (1510, "")
    assert not orphans.remove_orphan(dead, place, now=time.time(), older_than=HOUR)
    assert orphans.remove_orphan(dead, place, now=later, older_than=HOUR)
    assert not any(path.startswith("step_2/") for path in place.list())
    assert remesh.Checkpoint(f"{place.url}/step_1").verify().ok
    assert not orphans.remove_orphan(dead, place, now=later, older_than=HOUR)
    assert len(place.list("images/")) == 3


def test_ls_does_not_list_what_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ObjectStorage("s3://bucket", MemoryStore())
    for path in ("images/a", "images/b/c", f"step_1/{DEAD}/00000.safetensors"):
        storage.put(path, b"12", overwrite=False)
    listed: list[str] = []
    list_sizes = ObjectStorage.list_sizes

    def spy(self: Any, prefix: str = "") -> Any:
        listed.append(prefix)
        return list_sizes(self, prefix)

    monkeypatch.setattr(ObjectStorage, "list_sizes", spy)
    (step,) = catalog.list_checkpoints(storage, with_others=True)
    assert (step.name, step.status, step.num_bytes) == ("step_1", "unfinished", 2)
    assert listed == [f"step_1/{DEAD}/"]
