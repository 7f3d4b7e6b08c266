"""Finding what lies in the places of nodes while something of it goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from remesh.checkpoint.agree import PlanCache
from remesh.checkpoint.scattered import find_scattered, nodes_of, save_scattered
from remesh.events import emitter, ignore
from remesh.exchange import Alone
from remesh.storage import LocalStorage


def test_a_snapshot_that_goes_while_it_is_looked_for(tmp_path: Path) -> None:
    class Going(LocalStorage):
        """The directory of the first snapshot is removed when it has been listed."""

        def list_sizes(self, prefix: str = "") -> dict[str, int]:
            sizes = super().list_sizes(prefix)
            shutil.rmtree(tmp_path / "1", ignore_errors=True)
            return sizes

    nodes, alone = nodes_of(["here"]), Alone()
    for name in "12":
        save_scattered(
            {"w": np.ones(3)},
            LocalStorage(tmp_path / name),
            nodes,
            alone,
            metadata={},
            num_replicas=0,
            cache=PlanCache(),
            emit=emitter(ignore, 0),
        )
    assert [found.name for found in find_scattered(LocalStorage(tmp_path), nodes, alone)] == [
        "1",
        "2",
    ]
    assert [found.name for found in find_scattered(Going(tmp_path), nodes, alone)] == ["2"]
