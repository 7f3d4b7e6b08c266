"""A format of another package: one module, found by an entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

FORMAT = """
from remesh.sharding import Box

NAME = "raw"
MARKER = "a file shape.txt (raw)"


def is_at(place):
    return "shape.txt" in place.listing


def read(place, builder):
    shape = tuple(map(int, place.storage.read("shape.txt").split()))
    row = builder.add_tensor("w", "float32", shape)
    builder.add_piece(row, Box.whole(shape), "w.bin", 0)
    builder.add_value("step", 7)
"""

SCRIPT = """
import remesh
from remesh.errors import CorruptCheckpointError

checkpoint = remesh.Checkpoint("here")
assert checkpoint.format == "raw"
assert checkpoint.read_array("w").tolist() == [[0, 1, 2], [3, 4, 5]]
assert checkpoint.values["step"] == 7
with open("here/w.bin", "r+b") as file:
    file.truncate(20)
try:
    remesh.Checkpoint("here")
except CorruptCheckpointError as error:
    assert "here/w.bin: w: bytes 0:24 do not lie in the file" in str(error), error
else:
    raise AssertionError
"""


def test_an_installed_distribution_brings_a_format(tmp_path: Path) -> None:
    (tmp_path / "raw_format.py").write_text(FORMAT)
    facts = tmp_path / "raw_format-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: raw-format\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[remesh.formats]\nraw = raw_format\n")
    here = tmp_path / "here"
    here.mkdir()
    (here / "shape.txt").write_text("2 3")
    (here / "w.bin").write_bytes(np.arange(6, dtype="<f4").tobytes())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, check=True)
