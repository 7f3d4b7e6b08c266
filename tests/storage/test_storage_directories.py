"""Directories of stores: listing one, and what commands make of them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from obstore.store import MemoryStore

import remesh
from remesh import catalog
from remesh.cli import cli
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


def invoke(*args: object) -> Any:
    result = CliRunner().invoke(cli, [str(arg) for arg in args], terminal_width=80)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


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


def test_the_commands(place: Storage) -> None:
    fill(place)
    remesh.save({"a": np.arange(10.0)}, f"{place.url}/step_3")
    place.delete(next(path for path in place.list("step_3/data-") if "/0" in path))
    listed = invoke("ls", place.url).stdout
    statuses = [line.split()[0] for line in listed.splitlines()[1:4]]
    assert statuses == ["committed", "unfinished", "damaged"]
    assert "images" not in listed
    kept = invoke("prune", place.url, "--incomplete", "--yes").stdout
    assert "changed not long ago" in kept
    result = invoke("verify", f"{place.url}/step_1")
    assert result.exit_code == 0
    assert ": sound, 1 file with tensors" in result.stdout
    assert invoke("verify", f"{place.url}/step_3").exit_code != 0
    assert "1000" in invoke("show", f"{place.url}/step_1", "a").stdout


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
