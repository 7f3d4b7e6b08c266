"""Tables and JSON of measurements."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


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
    folder.mkdir(exist_ok=True)
    document = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "result": result,
    }
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
