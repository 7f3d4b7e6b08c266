"""The scripts in `examples/`, as modules, and what it takes to interrupt them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import remesh
from remesh.catalog import CheckpointInfo

EXAMPLES = Path(__file__).parents[2] / "examples"


class PowerCutError(Exception):
    """The power went out."""


def wait_for_last_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a manager that an exception ends wait for its last save, however slow the disk is.

    By default it waits for some seconds, so the save on which a test counts might be missing.
    """
    monkeypatch.setattr("remesh.training.manager.EXIT_SECONDS", 120.0)


def load_example(name: str) -> ModuleType:
    """The script as a module, executed once."""
    full_name = f"example_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module  # where dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[full_name]


def latest(directory: Path) -> CheckpointInfo:
    below = directory / "checkpoints"  # that of Hugging Face has files of its own beside them
    with remesh.Manager(below if below.exists() else directory) as manager:
        assert manager.latest is not None
        return manager.latest
