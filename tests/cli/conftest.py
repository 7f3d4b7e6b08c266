"""Checkpoints to look at, and a way to run commands in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

import remesh
from remesh.cli import cli
from remesh.formats import native
from remesh.storage import open_storage
from tests.support import run_ranks

Run = Callable[..., Result]
RunJson = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    """Runs `remesh ...` in this process; the result has stdout, stderr and exit_code."""

    def run_command(*args: object) -> Result:
        result = CliRunner().invoke(cli, [str(arg) for arg in args], terminal_width=80)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run_command


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    def run_command(*args: object, exit_code: int = 0) -> Any:
        result = run(*args, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    return run_command


def save_two_ranks(path: Path, step: int = 1) -> None:
    """Save on two ranks: a tensor cut in two, one of each rank, a tie, values and objects."""

    def job(exchange: Any) -> None:
        rank = exchange.rank
        rows = np.arange(24, dtype=np.float32).reshape(4, 6) + 24 * rank
        head = np.arange(6, dtype=np.int64)
        state = {
            "embed": remesh.ShardedTensor.from_rank_offsets("model.embed", rows, (0, rank, 2)),
            "model": {"head": head, "tied": head, "half": np.full((2, 3), 0.5, np.float16)},
            "layers": {f"{n}": np.full(4, n, np.int32) for n in (10, 9)},
            "rng": remesh.sharding.ShardedObject(
                "rng", {"seed": rank, "raw": b"\x01\xff"}, (2,), (rank,)
            ),
            "step": step,
            "betas": (0.9, 0.95),
            "worst": float("nan"),
        }
        remesh.save(state, path, group=exchange, metadata={"git": "abc"})

    run_ranks(2, job)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step_1"
    save_two_ranks(path)
    return path


def save_runs(root: Path) -> Path:
    """Save the checkpoints 9, 10 and 100, and leave what an interrupted save of 200 does."""
    for step in (100, 9, 10):
        remesh.save({"w": np.zeros(10, np.float32), "step": step}, root / f"step_{step}")
    remesh.save({"w": np.zeros(10, np.float32)}, root / "step_200")
    (root / "step_200" / "remesh.json").unlink()
    (root / "notes").mkdir()
    (root / "README").write_text("not a checkpoint")
    return root


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return save_runs(tmp_path / "runs")


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Places that no test changes."""
    root = tmp_path_factory.mktemp("places")
    names = ("one", "runs", "nowhere", "empty", "foreign", "file", "plain")
    found = {name: root / name for name in names}
    save_two_ranks(found["one"])
    save_runs(found["runs"])
    for folder in ("empty", "foreign"):
        found[folder].mkdir()
    (found["foreign"] / "model.gguf").touch()
    found["file"].touch()
    remesh.save({"w": np.zeros(3)}, found["plain"])
    return found


def change_record(checkpoint: Path, **changes: Any) -> None:
    """Replace fields of a commit record, with a digest that fits."""
    record = native.read_record(open_storage(checkpoint))
    changed = msgspec.structs.replace(record, **changes)
    (checkpoint / "remesh.json").write_bytes(native.encode_record(changed))


def data_files(checkpoint: Path) -> list[Path]:
    """The files with tensors, in rank order."""
    return sorted(checkpoint.glob("data-*/0*.safetensors"))
