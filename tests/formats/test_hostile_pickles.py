"""Foreign pickles that attack their reader: nothing runs, and cost follows from their length."""

from __future__ import annotations

import argparse
import builtins
import datetime as dt
import io
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh.checkpoint import convert
from remesh.core.values import UnresolvedValue
from remesh.errors import CheckpointError, CorruptCheckpointError, RemeshError
from remesh.formats import table
from remesh.formats.checks import budget
from remesh.formats.pickle_reader import parse
from remesh.formats.place import Place
from remesh.formats.restricted_pickle import (
    KNOWN,
    ArchivedStorage,
    ArchivedTensor,
    resolved,
)
from tests.formats import hostile
from tests.formats.auditing import audited
from tests.formats.hostile import CHECKPOINTS, archive, call, name, text
from tests.fuzz.files import in_memory

VALUE_TYPES = (
    *(type(None), bool, int, float, str, bytes, bytearray, complex, slice),
    *(dt.datetime, dt.date, dt.time, dt.timedelta, dt.timezone),
    *(pathlib.PurePath, argparse.Namespace, types.SimpleNamespace, io.BytesIO),
    *(np.ndarray, np.generic, np.dtype, ArchivedStorage, ArchivedTensor, UnresolvedValue),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Tensor),
)


def check_plain(value: Any) -> int:
    """Check that a value has nothing in it that could run; returns its parts."""
    if isinstance(value, Mapping):
        return 1 + sum(check_plain(part) for item in value.items() for part in item)
    if type(value) in {list, tuple, set, frozenset}:
        return 1 + sum(map(check_plain, value))
    assert isinstance(value, VALUE_TYPES), type(value)
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return 1 + check_plain(vars(value))
    return 1


def read(data: bytes) -> Any:
    """What a pickle stands for; None if it is an error of ours."""
    try:
        return resolved(parse(data, "file"), "file")
    except CheckpointError:
        return None


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    hostile.warm_up()


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("attack", hostile.attacks(""))
def test_attacks_do_nothing_in_any_format(kind: str, attack: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    data = b"\x80\x04" + hostile.attacks(f"touch {mark}")[attack] + b"."
    folder = tmp_path / "checkpoint"
    for path, content in CHECKPOINTS[kind](data).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    place = folder / "x.pt" if kind == "torch_file" else folder
    before = (set(vars(os)), set(vars(builtins)), set(vars(torch)), set(np.ndarray.__dict__))
    with audited() as found:
        try:
            checkpoint = remesh.Checkpoint(place)
            checkpoint.verify()
            for value in checkpoint.values.values():
                check_plain(value)
            check_plain(checkpoint.state())
        except RemeshError:
            pass
    assert found == []
    with pytest.raises(RemeshError):  # nothing of this name is stored
        remesh.load({"not there": torch.zeros(4)}, place)
    assert not mark.exists()
    assert before == (
        set(vars(os)),
        set(vars(builtins)),
        set(vars(torch)),
        set(np.ndarray.__dict__),
    )


MODULES = (builtins, os, np, sys, subprocess)
DANGEROUS = (
    *("torch.load", "torch.save", "torch._import_dotted_name", "torch.os", "torch.sys"),
    *("torch.__builtins__", "torch.hub", "torch.jit", "torch.utils", "torch.ops", "torch._C"),
    *("builtins.eval", "builtins.exec", "builtins.open", "builtins.getattr", "builtins.type"),
    *("builtins.__import__", "builtins.object", "builtins.compile", "os.system", "os.environ"),
    *("os.execv", "os.remove", "os.sys", "numpy.load", "numpy.save", "numpy.fromfile"),
    *("numpy.memmap", "numpy.vectorize", "numpy.ctypeslib", "sys.modules", "sys.settrace"),
    *("sys.exit", "sys._getframe", "subprocess.Popen", "subprocess.run", "subprocess.os"),
)


def _cross(names: list[str]) -> None:
    """Give every name that is known a name as its argument, as text and as what it names."""
    with audited() as found:
        for full in names:
            _, _, short = full.rpartition(".")
            args = [name(full), text(full), text(short), text(f"torch.{short}")]
            for known in sorted(KNOWN):
                for arg in args:
                    check_plain(read(call(name(known), arg) + b"."))
                check_plain(read(name(known) + hostile.items(args[0]) + b"\x81" + args[1] + b"b."))
    assert found == []


def test_no_known_name_gives_what_a_file_names() -> None:
    _cross([*DANGEROUS])


@pytest.mark.parametrize(
    "module",
    [pytest.param(torch, marks=pytest.mark.nightly), *MODULES],
    ids=lambda module: module.__name__,
)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_known_name_gives_any_attribute(module: types.ModuleType) -> None:
    _cross([f"{module.__name__}.{attribute}" for attribute in dir(module)])


@pytest.mark.parametrize("burden", hostile.burdens())
def test_cost_follows_from_the_length(burden: str) -> None:
    data = b"\x80\x04" + hostile.burdens()[burden] + b"."
    found = read(data)
    # A few more: what cannot be had is one part, and the arguments of a call are none of its value.
    assert check_plain(found) <= budget("nodes", len(data)) + len(data)
    for kind in ("torch_file", "dcp_value", "atorch"):
        hostile.open_all(CHECKPOINTS[kind](data))


def test_strided_tensors_have_no_more_pieces_than_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"t": torch.ones(1).expand(1 << 17)}, path)
    with pytest.raises(
        remesh.errors.FormatVersionError, match="more pieces than its files have bytes"
    ):
        remesh.Checkpoint(path)
    torch.save({"t": torch.ones(1 << 16).expand(1 << 16, 1 << 16)}, path)
    with pytest.raises(CheckpointError, match=r"memory|contiguous"):
        remesh.Checkpoint(path)
    torch.save({"t": torch.ones(1).expand(100), "u": torch.arange(4.0).reshape(2, 2).t()}, path)
    checkpoint = remesh.Checkpoint(path)
    assert checkpoint.read("t").tolist() == [1] * 100
    assert checkpoint.read("u").tolist() == [[0, 2], [1, 3]]


def test_values_in_the_same_bytes_are_not_read_again_and_again() -> None:
    hostile.open_all(hostile.dcp_value(b"\x80\x04N."))
    storage = in_memory(hostile.dcp_value(b"\x80\x04N.", "vw"))
    with pytest.raises(CorruptCheckpointError, match="in the same bytes"):
        table.read_contents(Place(storage))


KEYS = [0.5, 7, None, True, (1, "a"), b"bytes", torch.float32, 2**70, "\ud800", frozenset({1})]


@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_keys_that_are_no_text(key: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({key: torch.ones(2), "a": 1, "plain": {key: 2}}, path)
    checkpoint = remesh.Checkpoint(path)
    shown = str(key) if type(key) is int and key < 2**63 else repr(key)
    assert checkpoint.read(shown).tolist() == [1, 1]
    assert checkpoint.values["a"] == 1
    target = {"a": 0}
    remesh.load(target, path, unexpected="ignore")
    assert target["a"] == 1
    state = checkpoint.state()
    assert state["plain"] == {key: 2} or key == "\ud800"


def test_keys_that_look_alike(tmp_path: Path) -> None:
    torch.save({0.5: torch.ones(1), "0.5": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(remesh.errors.NameCollisionError, match="two entries have one name"):
        remesh.Checkpoint(tmp_path / "x.pt")


DATA = Path(__file__).parents[1] / "data" / "torch"


@pytest.mark.parametrize("written", ["py311-torch2.6", "py313-torch2.13"])
def test_checkpoints_of_other_pythons_and_torches(written: str) -> None:
    checkpoint = remesh.Checkpoint(DATA / written / "training.pt")
    state = checkpoint.state()
    assert list(state["model"]) == [
        *("0.weight", "0.bias", "1.weight", "1.bias"),
        *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
    ]
    assert state["model"]["0.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert state["optimizer"]["state"][0]["step"] == 2
    assert state["args"] == argparse.Namespace(lr=0.1, path=Path("runs/a"), pure=Path("b"))
    assert (state["path"], state["step"]) == (Path("runs/ckpt"), 2)
    assert state["when"] == dt.datetime(2024, 5, 6, 7, 8)  # noqa: DTZ001
    assert (state["dtype"], state["size"]) == (torch.bfloat16, torch.Size([2, 3]))
    assert state["bf16"].tolist() == [0, 1, 2, 3]
    assert state["uint16"].dtype == torch.uint16
    assert state["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (state["scalar"], state["int8"]) == (2.5, -3)
    np.testing.assert_array_equal(state["array"], np.arange(4.0))

    sharded = remesh.Checkpoint(DATA / written / "dcp")
    assert sharded.format == "torch_dcp"
    assert torch.equal(sharded.read("model.0.weight"), state["model"]["0.weight"])
    assert (sharded.values["step"], sharded.values["when"]) == (2, [1, 2])
    target = {"model": torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))}
    remesh.load(target, DATA / written / "dcp", unexpected="ignore")
    assert torch.equal(target["model"].state_dict()["0.weight"], state["model"]["0.weight"])


def test_allowed_names_run_by_the_users_decision(tmp_path: Path) -> None:
    torch.save({"counts": __import__("collections").ChainMap({"a": 2})}, tmp_path / "x.pt")
    allow = ["collections.ChainMap"]
    assert remesh.Checkpoint(tmp_path / "x.pt", allow=allow).values == {"counts.a": 2}
    state = {"counts": {"a": 0}}
    remesh.load(state, tmp_path / "x.pt", allow=allow)
    assert state == {"counts": {"a": 2}}
    convert(tmp_path / "x.pt", tmp_path / "converted", format="remesh", allow=allow)
    assert remesh.Checkpoint(tmp_path / "converted").values == {"counts.a": 2}
    # What an allowed call gives is not called in turn.
    data = call(call(name("builtins.getattr"), name("os.system"), text("x")), text("y")) + b"."
    (tmp_path / "y.pt").write_bytes(archive(data))
    found = remesh.Checkpoint(tmp_path / "y.pt", allow="builtins.getattr").values["value"]
    assert isinstance(found, UnresolvedValue)
    assert "what another call" in found.type_name
