"""Tables and JSON of measurements."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = (
    "remesh", "torch", "numpy", "safetensors", "transformers", "megatron-core", "torchsnapshot"
)  # fmt: skip

LOAD_BEFORE = os.getloadavg()
"""What other work there was when a benchmark began; later its own ranks are part of it."""


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def write_json(name: str, result: object, folder: Path = Path("bench-output")) -> None:
    """Keep a result with what it was measured on."""
    folder.mkdir(exist_ok=True)
    document = {
        "measured": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "num_cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_before": LOAD_BEFORE,
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "result": result,
    }
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def _versions() -> dict[str, str]:
    """Versions of what was measured, as far as it is installed."""
    installed = {found.metadata["Name"].lower() for found in metadata.distributions()}
    return {name: metadata.version(name) for name in PACKAGES if name in installed}
