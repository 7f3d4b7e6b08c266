"""One user's first hour: commands and scripts in an empty directory, and the surprises they gave.

A surprise is what a user would not expect: another exit code, a traceback of a command, a warning,
an error whose first line is long or does not say what to do, or the lack of what should be shown.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remesh.storage.local import IN_MEMORY, mount_of
from tests.first_hour.environment import Environment

MAX_LINE = 100
_PROBLEM = re.compile(r"^(?:error: |[\w.]*(?:Error|Warning)\b:? ?)(.*)$", re.MULTILINE)


@dataclass
class Hour:
    """Runs the commands of a user."""

    environment: Environment  # where remesh is installed
    directory: Path  # where the user works; empty at first
    surprises: list[str] = field(default_factory=list)  # what the user would not have expected

    @property
    def is_in_memory(self) -> bool:
        """Whether the directory is lost at a restart of the machine, which the doctor calls bad."""
        return mount_of(self.directory.stat().st_dev)[0] in IN_MEMORY

    def run(
        self,
        command: str,
        *,
        ends: int = 0,
        shows: Sequence[str] = (),
        says: Sequence[str] = (),
    ) -> str:
        """What a command writes to stdout; a user expects an exit code and words on the streams."""
        done = subprocess.run(
            shlex.split(command),
            check=False,
            cwd=self.directory,
            env=self.environment.variables(self.directory),
            capture_output=True,
            text=True,
            timeout=300,
        )
        found = []
        if done.returncode != ends:
            found.append(f"exit code {done.returncode} and not {ends}: {done.stderr}")
        found += [
            f"does not show {text!r}: {done.stdout}" for text in shows if text not in done.stdout
        ]
        found += [
            f"does not say {text!r}: {done.stderr}" for text in says if text not in done.stderr
        ]
        if done.stderr and not says:
            found.append(f"says {done.stderr!r}")
        if "Traceback" in done.stderr and not command.startswith("python "):
            found.append("ends with a traceback")
        for line in _PROBLEM.findall(done.stderr):
            # How long the path of this test is says nothing of the message.
            if len(line.replace(str(self.directory), "~")) > MAX_LINE:
                found.append(f"a first line of {len(line)} characters: {line}")
        self.surprises += [f"$ {command}\n{one}" for one in found]
        return done.stdout

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)
