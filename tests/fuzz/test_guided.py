"""Inputs that reach new code of a parser are kept and changed further, by atheris.

    REMESH_CAMPAIGN=10 make test-nightly TESTS=tests/fuzz/test_guided.py

plays a tenth. `pip install atheris` into the environment first: the tests do not require it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaigns.settings import seed, share

PARSERS = {
    "safetensors": ("safetensors", "shard-0.safetensors"),
    "pickle in an archive": ("torch.save", "model.pt"),
    "DCP metadata": ("torch_dcp", ".metadata"),
    "native record": ("native", "remesh.json"),
    "native index": ("native", "index.safetensors"),
    "native compressed": ("native compressed", "00000.safetensors"),
    "native compressed index": ("native compressed", "index.safetensors"),
    "native values": ("native", "values.msgpack"),
    "zarr 2": ("zarr by zarr", "a/.zarray"),
}
"""Which checkpoint, and the end of the path of the file that is fuzzed."""
NUM_INPUTS = 20_000


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed here"
)
@pytest.mark.parametrize("parser", PARSERS)
def test_inputs_that_reach_new_code(
    parser: str, tmp_path: Path, covered: Callable[[str], None]
) -> None:
    writer, file = PARSERS[parser]
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    command = [sys.executable, "-m", "tests.fuzz.guided", writer, file, str(inputs)]
    found = tmp_path / "found-"
    options = {
        "runs": NUM_INPUTS * share() // 100,
        "seed": seed(),
        "max_len": 1 << 16,
        "timeout": 120,
        "artifact_prefix": found,
    }
    done = subprocess.run(
        [*command, *(f"-{name}={value}" for name, value in options.items())],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    said = done.stderr + done.stdout
    assert done.returncode == 0, f"{sorted(tmp_path.glob('found-*'))}\n{said[-5000:]}"
    last = re.findall(r"^#(\d+)\s.*cov: (\d+)", said, re.MULTILINE)[-1]
    covered(f"seed {seed()}: {last[0]} inputs, {last[1]} places reached")
