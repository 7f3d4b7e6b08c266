"""Commands about checkpoints in an object store: an S3 server of the test process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remesh
from remesh.checkpoint import RestoreReport
from remesh.pipeline import read
from remesh.storage.object_store import ObjectStorage
from tests.storage.object_servers import BUCKET


@pytest.mark.usefixtures("server")
def test_a_plan_has_the_figures_of_the_load(
    run_json: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a far store, in the windows for its latency, as small as a test wants them."""
    monkeypatch.setattr(ObjectStorage, "latency", property(lambda _self: 0.1))
    monkeypatch.setattr(read, "REMOTE_WINDOWS", (1 << 20, 4 << 20))
    far, near = f"s3://{BUCKET}/plan", tmp_path / "plan"
    reports: list[RestoreReport] = []
    for place in (far, near):
        remesh.save({"w": np.ones(1 << 20, np.float32)}, place)
        reports.append(remesh.load({"w": np.zeros(1 << 20, np.float32)}, place))
    plans = [run_json("plan", place)["ranks"][0] for place in (far, near)]
    for plan, report in zip(plans, reports, strict=True):
        assert plan["num_reads"] == report.num_reads
        assert plan["bytes_read"] == report.bytes_read
    assert plans[0]["num_reads"] > plans[1]["num_reads"]
