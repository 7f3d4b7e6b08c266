# ruff: noqa: INP001 - a script, not a package
"""Bring the outputs in docs/cli.md and docs/how-to/broken-checkpoint.md up to date.

Run `python docs/update_cli.py`. Each block of these pages that begins with `$ remesh ...` is the
output of that command, run in a directory with a few small checkpoints that this script saves. What
differs from one save to the next (save ids, times) is replaced by something fixed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from click.testing import CliRunner

import remesh
from remesh.cli import cli
from remesh.exchange import ThreadExchange

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support import run_ranks

BLOCK = re.compile(r"```console\n\$ (remesh[^\n]*)\n.*?```", re.DOTALL)
TIME = re.compile(r"\b\d{4}-\d\d-\d\d([T ])\d\d:\d\d:\d\d\b")


def save_examples(directory: Path) -> dict[str, str]:
    """Save the checkpoints of the page; returns what to replace in outputs."""
    for step in (900, 1000, 1100):
        run_ranks(2, _save, directory / f"runs/step_{step:08d}", step)
    damaged, unfinished = (directory / f"runs/step_{step:08d}" for step in (1100, 1200))
    replaced = {
        remesh.Checkpoint(path).record.save_id: f"{0x5F3A9C1E07B2 + number:012x}"
        for number, path in enumerate(sorted((directory / "runs").iterdir()))
    }
    file = next(damaged.glob("data-*/00001.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (unfinished / "data-5f3a9c1e07c0").mkdir(parents=True)
    (unfinished / "data-5f3a9c1e07c0/00000.safetensors").write_bytes(bytes(2048))
    for entry in unfinished.rglob("*"):
        os.utime(entry, (time.time() - 5.5 * 3600,) * 2)
    return {**replaced, str(directory): "/scratch"}


def _save(exchange: ThreadExchange, path: Path, step: int) -> None:
    """Save a state of which each of two ranks holds the half of one tensor."""
    rank, world_size = exchange.rank, exchange.world_size
    rows = (np.arange(24, dtype=np.float32).reshape(4, 6) + 24 * rank) / 8 - 3
    embed = remesh.ShardedTensor.from_rank_offsets(
        "model.embed.weight", rows, (0, rank, world_size)
    )
    norm = np.ones(6, np.float16)
    state = {
        "model": {"embed": embed, "norm": {"weight": norm}, "head": {"weight": norm}},
        "step": step,
        "rng": remesh.sharding.ShardedObject("rng", {"seed": rank}, (world_size,), (rank,)),
    }
    remesh.save(state, path, group=exchange, metadata={"git": "2f0c1d7"})


DAMAGES = {
    "lost-record": ["remesh.json"],
    "lost-index": ["data-*/index.safetensors"],
    "lost-values": ["data-*/values.msgpack"],
    "lost-file": ["data-*/00001.safetensors"],
    "lost-both": ["remesh.json", "data-*/index.safetensors"],
}
"""Directory of the second page → the files that are lost there."""


def save_broken(directory: Path) -> dict[str, str]:
    """Save the checkpoints of the second page, and damage them; returns what to replace."""
    replaced = {str(directory): "/scratch"}
    names = [*DAMAGES, "empty-record", "cut-short", "wrong-bytes", "two-saves"]
    for number, name in enumerate(names):
        path = directory / name / "step_00001000"
        run_ranks(2, _save, path, 1000)
        replaced[remesh.Checkpoint(path).record.save_id] = f"{0x5F3A9C1E0700 + number:012x}"
        for pattern in DAMAGES.get(name, []):
            next(path.glob(pattern)).unlink()
    run_ranks(2, _save, directory / "lost-record/step_00000900", 900)

    def file(name: str, pattern: str) -> Path:
        return next((directory / name / "step_00001000").glob(pattern))

    file("empty-record", "remesh.json").write_bytes(b"")
    short = file("cut-short", "data-*/00001.safetensors")
    os.truncate(short, short.stat().st_size - 8)
    wrong = file("wrong-bytes", "data-*/00001.safetensors")
    wrong.write_bytes(wrong.read_bytes()[:-1] + b"\xff")
    # A second save into the same directory was interrupted, and the record was lost.
    path = directory / "two-saves/step_00001000"
    (path / "data-000000000001").mkdir()
    (path / "data-000000000001/00000.safetensors").write_bytes(bytes(64))
    (path / "remesh.json").unlink()
    return replaced


PAGES = {"cli.md": save_examples, "how-to/broken-checkpoint.md": save_broken}
"""The pages with outputs of commands → what saves their checkpoints."""


def output_of(command: str) -> str:
    """What a command prints, results and errors, as in a terminal of 80 columns."""
    _, *args = shlex.split(command)
    runner = CliRunner(env={"COLUMNS": "80"})  # for help that is not click's
    return runner.invoke(cli, args, prog_name="remesh", terminal_width=80).output


def updated(name: str) -> str:
    """A page with the outputs of its commands as they are now.

    Args:
        name: The page, as in `PAGES`.
    """
    page = (Path(__file__).parent / name).read_text()
    with _examples(PAGES[name]) as replaced:

        def block(found: re.Match[str]) -> str:
            command = found[1]
            for old, new in replaced.items():
                command = command.replace(new, old)
            output = TIME.sub(r"2026-01-31\g<1>12:00:00", output_of(command))
            for old, new in replaced.items():
                output = output.replace(old, new)
            return f"```console\n$ {found[1]}\n{output.rstrip()}\n```"

        return BLOCK.sub(block, page)


@contextlib.contextmanager
def _examples(save: Callable[[Path], dict[str, str]]) -> Iterator[dict[str, str]]:
    """A working directory with the example checkpoints; yields what to replace in outputs."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        yield save(Path.cwd())


if __name__ == "__main__":
    for name in PAGES:
        (Path(__file__).parent / name).write_text(updated(name))
