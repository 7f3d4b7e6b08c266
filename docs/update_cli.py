# ruff: noqa: INP001 - a script, not a package
"""Bring the outputs in docs/cli.md up to date: `python docs/update_cli.py`.

Each block of that page that begins with `$ remesh ...` is the output of that command, run in a
directory with a few small checkpoints that this script saves. What differs from one save to the
next (save ids, times) is replaced by something fixed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from click.testing import CliRunner

import remesh
from remesh.cli import cli
from remesh.exchange import ThreadExchange
from remesh.testing import run_ranks

PAGE = Path(__file__).with_name("cli.md")
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
    # Binary fractions, so that statistics are the same on every machine.
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


def output_of(command: str) -> str:
    """What a command prints, results and errors, as in a terminal of 80 columns."""
    _, *args = shlex.split(command)
    runner = CliRunner(env={"COLUMNS": "80"})  # for help that is not click's
    return runner.invoke(cli, args, prog_name="remesh", terminal_width=80).output


def updated(page: str) -> str:
    """The page with the outputs of its commands as they are now."""
    with _examples() as replaced:

        def block(found: re.Match[str]) -> str:
            output = TIME.sub(r"2026-01-31\g<1>12:00:00", output_of(found[1]))
            for old, new in replaced.items():
                output = output.replace(old, new)
            return f"```console\n$ {found[1]}\n{output.rstrip()}\n```"

        return BLOCK.sub(block, page)


@contextlib.contextmanager
def _examples() -> Iterator[dict[str, str]]:
    """A working directory with the example checkpoints; yields what to replace in outputs."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        yield save_examples(Path.cwd())


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
