"""The `repr` of everything public fits on a line or two, whatever it holds."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remesh
from remesh._repr import short_repr
from remesh.core.index import Index
from remesh.events import Timeline
from remesh.sharding import Box, NamedModule, Part, ShardedObject
from remesh.transform import TensorInfo

API: dict[str, Any] = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "update_api.py"))

OF_FEW_NUMBERS = {
    "Block",
    "Box",
    "Event",
    "EverySeconds",
    "EverySteps",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "OnRequest",
    "OnSignals",
    "Progress",
    "SampleOrder",
    "TensorInfo",
    "TrackerRun",
}
"""Records whose fields are a few numbers or names, which are shown in full."""


def test_records_have_a_short_repr() -> None:
    """The public classes whose `repr` lists their fields."""
    public = {
        name: getattr(importlib.import_module(module), name)
        for module in API["MODULES"]
        if ".integrations" not in module
        for name in API["names_of"](module)
        if name not in OF_FEW_NUMBERS
    }
    records = {
        name: value
        for name, value in public.items()
        if inspect.isclass(value)
        and (dataclasses.is_dataclass(value) or hasattr(value, "__struct_fields__"))
    }
    long = [name for name, one in records.items() if vars(one).get("__repr__") is not short_repr]
    assert long == [Index.__name__]


def large_state() -> dict[str, Any]:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)])
    return {"model": model, "step": 1}


def test_what_is_met_in_a_session_is_short(tmp_path: Path) -> None:
    state, timeline = large_state(), Timeline()
    with remesh.Manager(tmp_path / "run") as manager:
        manager.save(1, state)
        manager.wait()
        resumed, info = manager.resume(state), manager.latest
        decisions = manager.retention_decisions()
    path = tmp_path / "run" / "step_00000001"
    report = remesh.load(state, path, on_event=timeline)
    checkpoint = remesh.Checkpoint(path)
    rules = remesh.Transform({f"model.{n}.weight": f"net.{n}.weight" for n in range(40)})
    names = {f"model.{n}.weight": TensorInfo("float32", (8, 8)) for n in range(40)}
    tensor = remesh.ShardedTensor.whole("w", torch.zeros(64, 64))
    objects = [
        manager,
        resumed,
        info,
        info and info.note,
        *decisions,
        report,
        timeline,
        timeline.moments[0],
        checkpoint,
        checkpoint.index,
        checkpoint.index["model.0.weight"],
        checkpoint.verify(),
        remesh.Saver(),
        remesh.Resharder({"model": state["model"]}, {"model": large_state()["model"]}).push(),
        rules,
        rules.resolve(names),
        tensor,
        Part(Box((0,), (9999,)), torch.zeros(9999)),
        ShardedObject("rng", list(range(9999)), (1,), (0,)),
        NamedModule(state["model"], {str(n): f"layers.{n}" for n in range(40)}),
    ]
    for one in objects:
        assert len(repr(one)) <= 200, repr(one)
        assert "\n" not in repr(one)
    assert "restored=<" in repr(report)
    assert "<torch.float32 (9999,)>" in repr(Part(Box((0,), (9999,)), torch.zeros(9999)))
    assert repr(checkpoint.index) == f"Index({len(checkpoint.index)} tensors, 83 pieces, 1 files)"
