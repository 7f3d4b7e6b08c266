# ruff: noqa: INP001 - a script, not a package
"""Bring figures of the pages up to date: `python docs/update_figures.py [RESULT.json ...]`.

What lies between `<!-- figures: NAME -->` and `<!-- end of figures -->` is made of the stored
result `docs/results/NAME.json` (`NAME.part` too), with the date, the machine and the versions that
are stored with it; so is the chart `docs/save_load.svg`. Results that are given, as benchmarks
leave them in `bench-output/`, replace the stored ones first. A test compares the pages with what
this script would write.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.chart import bar_chart, group_rows  # noqa: E402 - found by the line above

RESULTS = ROOT / "docs" / "results"
CHART = ROOT / "docs" / "save_load.svg"
BLOCK = re.compile(r"(<!-- figures: ([\w.]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def of_reshard(result: Any) -> Iterator[str]:
    """Seconds and CPU of what moves live state, as multiples of the limit."""
    yield (
        f"{result['gibibytes']} GiB of state, medians of {result['rounds']} interleaved rounds, as "
        "multiples of the limit; in parentheses CPU seconds of all ranks, as multiples of those of "
        "the limit."
    )
    yield ""
    cases = dict.fromkeys((row["ranks"], row["case"]) for row in result["rows"])
    of = {(row["ranks"], row["case"], row["contestant"]): row for row in result["rows"]}
    names = list(dict.fromkeys(row["contestant"] for row in result["rows"]))
    names.remove("limit")
    yield f"| | limit | {' | '.join(names)} |"
    yield "|---" * (2 + len(names)) + "|"
    for case in cases:
        found = [of.get((*case, name)) for name in names]
        limit = of[*case, "limit"]
        cells = (
            "" if row is None else f"{row['times_limit']:.1f} ({row['cpu_times_limit']:.1f})"
            for row in found
        )
        seconds = f"{limit['seconds']:.2f} s ({limit['cpu_seconds']:.2f} s)"
        yield f"| {case[0]} ranks, {case[1]} | {seconds} | {' | '.join(cells)} |"


def of_save_load(rows: Any) -> Iterator[str]:
    """Saves and loads: a table for each task, a column for each number of ranks."""
    of = {(row["task"].split(", ", 1)[1], row["contestant"], row["ranks"]): row for row in rows}
    worlds = sorted({ranks for _, _, ranks in of})
    for task in dict.fromkeys(task for task, _, _ in of):
        yield f"| {task} | {' | '.join(f'{n} rank' + 's' * (n > 1) for n in worlds)} |"
        yield "|---" * (1 + len(worlds)) + "|"
        for name in dict.fromkeys(name for t, name, _ in of if (t, name) != (task, "limit")):
            found = [of.get((task, name, ranks)) for ranks in worlds]
            cells = (
                "" if row is None else f"{row['times_limit']:.1f} ({row['cpu_seconds']:.1f} s)"
                for row in found
            )
            if any(found):
                yield f"| {name} | {' | '.join(cells)} |"
        yield ""


SUMMARY = ("remesh", "torch DCP", "megatron-core", "torch.save")
"""Contestants of the README."""


def of_save_load_summary(rows: Any) -> Iterator[str]:
    """Saves and loads on 2 ranks."""
    of = {(row["task"], row["contestant"]): row for row in rows if row["ranks"] == 2}
    yield f"| | {' | '.join(SUMMARY)} |"
    yield "|---" * (1 + len(SUMMARY)) + "|"
    for task in ("save", "load, same layout", "load, rows to columns"):
        found = [of.get((f"2 ranks, {task}", name)) for name in SUMMARY]
        cells = ("" if row is None else f"{row['times_limit']:.1f}" for row in found)
        yield f"| {task} | {' | '.join(cells)} |"
    cells = (f"{of['2 ranks, save', name]['cpu_seconds']:.1f} s" for name in SUMMARY)
    yield f"| CPU of the save | {' | '.join(cells)} |"


def chart() -> str:
    """The chart of saves and loads."""
    rows = json.loads((RESULTS / "save_load.json").read_text())["result"]
    groups = group_rows([row for row in rows if row["ranks"] > 1], "times_limit")
    return bar_chart("Seconds, as multiples of the limit", groups, limit=1, longest=6)


def of_short(rows: Any) -> Iterator[str]:
    """The table of `make bench-short`."""
    yield "| | limit | remesh, times the limit | DCP, times the limit | CPU seconds of remesh |"
    yield "|---|---|---|---|---|"
    for row in rows:
        limit, cpu = row.get("limit_seconds"), row.get("cpu")
        times = (row.get(name) for name in ("remesh", "dcp"))
        cells = [
            "" if limit is None else f"{limit:.2f} s",
            *("" if one is None else f"{one:.1f}" for one in times),
            "" if cpu is None else f"{cpu:.2f}",
        ]
        yield f"| {row['what']} | {' | '.join(cells)} |"


def of_foreign(result: Any) -> Iterator[str]:
    """Reading and converting checkpoints of other systems, and commands on many pieces."""
    yield "| | | seconds | times the limit | CPU | memory | read | from the disk |"
    yield "|---" * 8 + "|"
    for row in result["bytes"]:
        shares = (f"{row[key] / row['bytes']:.2f}" for key in ("peak", "read", "disk"))
        figures = (f"{row['seconds']:.2f}", f"{row['times_limit']:.1f}", f"{row['cpu']:.2f} s")
        yield f"| {' | '.join((row['task'], row['contestant'], *figures, *shares))} |"
    yield ""
    yield "| command | seconds | CPU | peak memory |"
    yield "|---" * 4 + "|"
    for row in result["commands"]:
        seconds = f"{row['seconds']:.1f} | {row['cpu']:.1f} s"
        yield f"| `{row['command']}` | {seconds} | {row['peak'] / 1e6:.0f} MB |"


def of_recovery(result: Any) -> Iterator[str]:
    """Seconds from a failure to the next new step, and where they go."""
    yield "Medians of seconds, and of the steps that were made again."
    yield ""
    stages = ["left", "entered", "group", "made", "resumed", "step", "again"]
    yield f"| | came back | failure to next new step | {' | '.join(stages)} |"
    yield "|---" * (3 + len(stages)) + "|"
    for name, runs in result["results"].items():
        back = [one for one in runs if one is not None]
        cells = [f"{len(back)} of {len(runs)}"]
        for stage in ("seconds", *stages):
            values = [one[stage] for one in back if stage in one]
            digits = 0 if stage == "again" else 2
            cells.append(f"{statistics.median(values):.{digits}f}" if values else "")
        yield f"| {name} | {' | '.join(cells)} |"


def of_master(rows: Any) -> Iterator[str]:
    """What nodes cost the master."""
    yield (
        "| nodes | by | all meet | master's CPU for it | again | CPU | CPU of a heartbeat | "
        "heartbeats a second of a core | peak memory | status | page |"
    )
    yield "|---" * 11 + "|"
    for row in rows:
        cells = [
            f"{row['nodes']:,}",
            {"http": "HTTP", "frames": "frames"}[row["encoding"]],
            f"{row['rendezvous_seconds']:.1f} s",
            f"{row['rendezvous_processor_seconds']:.1f} s",
            f"{row['again_seconds']:.1f} s",
            f"{row['again_processor_seconds']:.1f} s",
            f"{row['beat_processor_seconds'] * 1e6:.0f} µs",
            f"{row['beats_per_second_of_a_core']:,.0f}",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
            f"{row['status_bytes'] / 1e6:.1f} MB",
            f"{row['page_bytes'] / 1e3:.0f} kB",
        ]
        yield f"| {' | '.join(cells)} |"


def of_compression(result: Any) -> Iterator[str]:
    """How small states get, how fast, and where that pays."""
    first, last = result["losses"]
    yield f"A state after {result['steps']} steps; the loss went from {first:.1f} to {last:.1f}:"
    yield ""
    yield "| part | stored | without planes | encode | decode | copy |"
    yield "|---" * 6 + "|"
    for name, row in result["kinds"].items():
        rates = (row["bytes_per_second"][key] for key in ("encode", "decode", "copy"))
        cells = [f"{row[key]:.0%}" for key in ("ratio", "ratio_without_planes")]
        yield f"| {' | '.join([name, *cells, *(f'{rate / 1e9:.1f} GB/s' for rate in rates)])} |"
    yield ""
    yield f"Saves of {result['num_bytes'] / 1e6:.0f} MB of it to the local disk:"
    yield ""
    yield "| | stored | seconds | CPU seconds |"
    yield "|---" * 4 + "|"
    for row in result["systems"]:
        share = row["num_bytes"] / result["num_bytes"]
        figures = f"{share:.0%} | {row['seconds']:.2f} | {row['cpu_seconds']:.2f}"
        yield f"| {row['contestant']} | {figures} |"
    yield ""
    yield "Saves and loads of it behind a link:"
    yield ""
    yield "| link | `compress` | save | load | stored |"
    yield "|---" * 5 + "|"
    for row in result["links"]:
        figures = f"{row['save']:.2f} | {row['load']:.2f} | {row['stored']:.0%}"
        yield f"| {row['bytes_per_second'] / 1e6:.0f} MB/s | `{row['compress']}` | {figures} |"


TABLES: dict[str, Callable[[Any], Iterator[str]]] = {
    "compression": of_compression,
    "foreign": of_foreign,
    "master": of_master,
    "recovery": of_recovery,
    "reshard": of_reshard,
    "save_load": of_save_load,
    "save_load.summary": of_save_load_summary,
    "short": of_short,
}


def measured(document: Any) -> str:
    """When, on what and with what a result was measured."""
    machine, versions = document["machine"], document["versions"]
    names = ("torch", "numpy", "megatron-core", "python")
    used = [f"{name} {versions[name]}" for name in names if name in versions]
    text = (
        f"Measured {document['measured'][:10]} with {', '.join(used[:-1])} and "
        f"{used[-1].capitalize()} on a machine of {machine['num_cores']} cores"
    )
    if "memory_bytes" in machine:
        text += f" and {machine['memory_bytes'] / 2**30:.0f} GiB"
    if "system" in machine:
        text += f" ({machine['system'].split('-with')[0]})"
    if "load" in machine:
        text += f"; load average at the end {machine['load'][0]:.0f}"
    return text + "."


def figures(name: str) -> str:
    """The text of a block."""
    document = json.loads((RESULTS / f"{name.partition('.')[0]}.json").read_text())
    text = "\n".join([*TABLES[name](document["result"]), "", measured(document), ""])
    # A number and its unit stay on one line.
    text = re.sub(r"(?<=\d) (s|GiB|MB)(?= |\)|;|$)", "\u00a0\\1", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text)


def updated(text: str) -> str:
    """A page with the figures of the stored results."""
    return BLOCK.sub(lambda found: found[1] + "\n" + figures(found[2]) + "\n" + found[3], text)


def pages() -> list[Path]:
    """All pages that may have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(given: list[str]) -> None:
    """Store results, and write the pages that this changes."""
    for path in map(Path, given):
        shutil.copyfile(path, RESULTS / path.name)
    for page in pages():
        page.write_text(updated(page.read_text()))
    CHART.write_text(chart())


if __name__ == "__main__":
    main(sys.argv[1:])
