"""An environment that has what the wheel brings, and nothing of the repository.

The source archive is built from the repository and the wheel from that archive, so a file that the
archive lacks is missed. The wheel is installed into a new virtual environment with what it depends
on. torch and other packages, which take long to install, come from the environment of the tests:
its directory of packages is searched after the new one's own, and nothing in it leads to the
sources of remesh.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Environment:
    """An environment in which the wheel is installed."""

    path: Path  # its directory
    with_torch: bool  # whether the packages of the tests' own environment can be imported there

    def variables(self, home: Path) -> dict[str, str]:
        """What its processes get: nothing of the tests' own settings."""
        system = {name: os.environ[name] for name in ("TMPDIR", "LANG") if name in os.environ}
        path = f"{self.path / 'bin'}:{os.defpath}"
        packages = {"PYTHONPATH": sysconfig.get_paths()["purelib"]} if self.with_torch else {}
        return {**system, **packages, "PATH": path, "HOME": str(home), "OMP_NUM_THREADS": "1"}


def build(place: Path) -> Path:
    """Build the source archive and the wheel as `make dist` does, the latter from the former."""
    _run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", place], ROOT)
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    sources = place / archive.name.removesuffix(".tar.gz")
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place], sources)
    (wheel,) = place.glob("*.whl")
    return wheel


def make(place: Path) -> Path:
    """The directory of an environment with the wheel, made by the first that asks."""
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = place / "environment"
        if not (place / "ready").exists():
            wheel = build(place)
            _run([sys.executable, "-m", "venv", "--without-pip", path], place)
            pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", path, "--quiet"]
            options: list[str | Path] = ["--no-compile", "--constraint", ROOT / "constraints.txt"]
            _run([*pip, "install", "--disable-pip-version-check", *options, wheel], place)
            (place / "ready").touch()
    return path


def _run(command: Sequence[str | Path], directory: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, check=False, cwd=directory, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
