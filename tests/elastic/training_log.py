"""What the processes of `train.py` wrote, each to a file of its own in one directory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

Entry = dict[str, Any]


class TrainingLog:
    """The files of a directory, read as they grow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._num_read: Counter[Path] = Counter()
        self._entries: list[Entry] = []

    def said(self, kind: str = "") -> list[Entry]:
        """What all processes wrote (of a kind), in the order of time."""
        for file in self.directory.glob("*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._num_read[file])
                whole = lines.read().rpartition(b"\n")[0].splitlines()
            self._num_read[file] += sum(len(line) + 1 for line in whole)
            self._entries += [json.loads(line) | {"pid": int(file.stem)} for line in whole]
        self._entries.sort(key=lambda entry: entry["time"])  # mostly in order: it takes no time
        return [entry for entry in self._entries if kind in ("", entry["kind"])]

    @property
    def step(self) -> int:
        return max((entry["step"] for entry in self.said("step")), default=-1)

    def size(self) -> int:
        """The number of ranks of the newest step."""
        steps = self.said("step")
        return steps[-1]["size"] if steps else 0

    def losses(self) -> dict[int, list[float]]:
        """The losses of each step, once for each time that rank 0 made it."""
        losses: dict[int, list[float]] = {}
        for entry in self.said("step"):
            if entry["rank"] == 0:
                losses.setdefault(entry["step"], []).append(entry["loss"])
        return losses

    def assert_losses(self, expected: list[float], rel: float = 1e-4) -> None:
        """No step is missing, and each had the expected loss whenever it was made."""
        losses = self.losses()
        assert sorted(losses) == list(range(len(expected)))
        for step, values in losses.items():
            assert values == pytest.approx([expected[step]] * len(values), rel=rel), step
