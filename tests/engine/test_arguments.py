"""Arguments in the wrong order are refused by name, before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import remesh
from remesh.errors import OptionError, StateError
from remesh.exchange import Alone
from remesh.storage import MemoryStorage

STATE = {"step": 1}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (remesh.save, "save"),
        (remesh.load, "load"),
        (remesh.save_async, "save_async"),
        (remesh.Saver().save, "save"),
        (remesh.Saver().save_async, "save_async"),
    ],
)
@pytest.mark.parametrize("place", [str, Path])
def test_state_and_path_are_swapped(
    call: Callable[..., Any], name: str, place: Callable[[Path], Any], tmp_path: Path
) -> None:
    with pytest.raises(StateError, match=rf"(?s){name}: .*swapped; write {name}\(state, path\)"):
        call(place(tmp_path / "checkpoint"), STATE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", [(np.zeros(2), {}), MappingProxyType({"step": 0})])
def test_a_target_that_cannot_be_filled_in_place(state: Any) -> None:
    storage = MemoryStorage()
    remesh.save(state, storage)
    with pytest.raises(StateError, match=r"load: .*cannot be filled in place\n.*a dict or a list"):
        remesh.load(state, storage)
    with pytest.raises(StateError, match=r"reshard: .*cannot be filled in place"):
        remesh.reshard({}, state)


def test_a_storage_is_a_place() -> None:
    with pytest.raises(StateError, match="swapped"):
        remesh.save(MemoryStorage(), STATE)
    with pytest.raises(StateError, match="swapped"):
        remesh.load(MemoryStorage(), STATE)


@pytest.mark.parametrize("call", ["save", "step"])
def test_step_and_state_are_swapped(call: str, tmp_path: Path) -> None:
    with remesh.Manager(tmp_path) as manager:
        with pytest.raises(StateError, match=rf"swapped; write manager.{call}\(step, state\)"):
            getattr(manager, call)(STATE, 1)
        with pytest.raises(StateError, match="the step is a number of steps, and not a str"):
            getattr(manager, call)("one", STATE)
        with pytest.raises(StateError, match=r'a dict or a module, and not a list\n.*"model"'):
            getattr(manager, call)(1, [STATE])
        with pytest.raises(
            StateError, match=r"(?s)got the place 'run'.*\n.*remesh.load\(state, path\)"
        ):
            getattr(manager, call)(1, "run")
    assert list(tmp_path.iterdir()) == []


def test_a_path_in_place_of_the_state_to_resume(tmp_path: Path) -> None:
    with (
        remesh.Manager(tmp_path) as manager,
        pytest.raises(StateError, match=r"(?s)Manager.resume: got the place .*step_00000001"),
    ):
        manager.resume(tmp_path / "step_00000001")


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    remesh.save({"a": 1}, "~/run/step_00000001")
    assert (tmp_path / "run" / "step_00000001" / "remesh.json").exists()
    assert remesh.Checkpoint(Path("~/run/step_00000001")).values == {"a": 1}
    with remesh.Manager("~/run", group=Alone()) as manager:
        assert [info.step for info in manager.checkpoints] == [1]


@pytest.mark.parametrize(
    ("call", "options", "problem"),
    [
        (partial(remesh.save, {}, "x"), {"overwrite": "no"}, "save: overwrite= must be True or"),
        (partial(remesh.save, {}, "x"), {"compress": "gzip"}, "compress= must be 'zstd'"),
        (lambda **own: remesh.Saver(**own).save({}, "x"), {"compress": "gzip"}, "compress= must"),
        (
            partial(remesh.save, {}, "x"),
            {"buffers": "median"},
            "must be 'rank0' or 'per_rank', not",
        ),
        (remesh.Saver, {"buffers": "median"}, "buffers= must be 'rank0' or "),
        (
            partial(remesh.reshard, {}, {}),
            {"buffers": "median"},
            ": buffers= must be 'rank0' or ",
        ),
        (partial(remesh.load, {}, "x"), {"missing": "skip"}, "must be 'error' or 'keep', not"),
        (partial(remesh.load, {}, "x"), {"unexpected": True}, "must be 'ignore' or 'error'"),
        (partial(remesh.load, {}, "x"), {"cast": "float32"}, "cast= must be True or False"),
        (partial(remesh.load, {}, "x"), {"share_reads": "no"}, "share_reads= must be True or "),
        (partial(remesh.load, {}, "x"), {"timeout": "60"}, "timeout= must be a number of seconds"),
        (partial(remesh.reshard, {}, {}), {"missing": "kep"}, ": missing= must be "),
        (partial(remesh.reshard, {}, {}), {"unexpected": "eror"}, ": unexpected= must be "),
        (partial(remesh.reshard, {}, {}), {"cast": "false"}, ": cast= must be "),
        (remesh.Saver, {"arena_bytes": "1 GB"}, ": arena_bytes= must be "),
        (remesh.Saver, {"deadline": 0}, ": deadline= must be "),
    ],
)
def test_options_of_a_wrong_type_are_errors_at_once(
    call: Callable[..., object], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        call(**options)
