"""The core works where calls of Linux are missing, as on macOS; what needs Linux says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import builtins, ctypes, io, os, sys

import numpy as np
import msgspec, xxhash, click  # what they do when they are imported is their affair

for name in ("O_DIRECT", "memfd_create", "pidfd_open", "fdatasync", "posix_fallocate", "eventfd",
             "sched_getaffinity", "posix_fadvise", "copy_file_range", "splice"):
    if hasattr(os, name):
        delattr(os, name)
import mmap
del mmap.MADV_HUGEPAGE
library = ctypes.CDLL
class Library:
    def __init__(self, *arguments, **options):
        self._library = library(*arguments, **options)
    def __getattr__(self, name):
        if name in ("fallocate", "prctl"):
            raise AttributeError(name)
        return getattr(self._library, name)
ctypes.CDLL = Library

def without_proc(function):
    def call(path, *arguments, **options):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "no such file", str(path))
        return function(path, *arguments, **options)
    return call
io.open = builtins.open = without_proc(builtins.open)
os.open, os.listdir = without_proc(os.open), without_proc(os.listdir)
sys.platform = "darwin"

import remesh
from remesh.cli import cli
from remesh.errors import OptionError
from remesh.core.host_memory import available_memory
from click.testing import CliRunner

state = {"w": np.arange(1 << 20, dtype=np.float32), "step": 1}
remesh.save(state, "a")
with remesh.Saver() as saver:
    saver.save_async(state, "b").result()
with remesh.Manager("run", every=1) as manager:
    manager.step(1, state)
for place in ("a", "b", "run/step_00000001"):
    loaded = {"w": np.zeros(1 << 20, np.float32), "step": 0}
    remesh.load(loaded, place)
    assert loaded["step"] == 1 and (loaded["w"] == state["w"]).all(), place
assert available_memory() > 0
try:
    remesh.Saver(writer="process")
except OptionError as error:
    assert "needs Linux" in str(error)
else:
    raise AssertionError
for command, code, expected in (
    ("ls a", 0, "w"),
    ("verify a b run", 0, "sound"),
    ("convert a c --format torch_file", 0, "torch_file"),
    ("doctor .", 0, "a small file is written and synced"),
    ("run train.py", 2, "remesh run needs Linux"),
):
    done = CliRunner().invoke(cli, command.split())
    assert (done.exit_code, expected in done.output) == (code, True), (command, done.output)
"""


def test_the_core_works_without_calls_of_linux(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
