# ruff: noqa: INP001 - a script, not a package
"""Bring figures of the pages up to date: `python docs/update_figures.py [RESULT.json ...]`.

What lies between `<!-- figures: NAME -->` and `<!-- end of figures -->` is made of the stored
result `docs/results/NAME.json` (`NAME.part` too), with the date, the machine and the versions that
are stored with it; so are the charts `docs/save_load.svg` and `docs/goodput.svg`. Results that are
given, as benchmarks leave them in `bench-output/`, replace the stored ones first. A test compares
the pages with what this script would write.
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

from benchmarks import goodput, planning  # noqa: E402 - found by the line above
from benchmarks.chart import bar_chart, group_rows  # noqa: E402

RESULTS = ROOT / "docs" / "results"
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
    yield (
        f"{size_of(rows)}. GB/s are bytes of the whole state per second; then the time as a "
        "multiple of the limit, and in parentheses CPU seconds of all ranks."
    )
    yield ""
    of = {(task_of(row), row["contestant"], row["ranks"]): row for row in rows}
    worlds = sorted({ranks for _, _, ranks in of})
    tasks = list(dict.fromkeys(task for task, _, _ in of))
    columns = " | ".join(f"{n} rank" + "s" * (n > 1) for n in worlds)

    def line(task: str, name: str, cell: str) -> str:
        found = [of.get((task, name, ranks)) for ranks in worlds]
        cells = ("" if row is None else cell.format(**row, rate=rate_of(row)) for row in found)
        return f"{' | '.join(cells)} |"

    for task in tasks:
        yield f"| {task} | {columns} |"
        yield "|---" * (1 + len(worlds)) + "|"
        yield f"| limit | {line(task, 'limit', '{rate}, {seconds:.2f} s')}"
        for name in dict.fromkeys(name for t, name, _ in of if t == task and name != "limit"):
            cell = "{rate}, {times_limit:.1f} ({cpu_seconds:.1f} s)"
            yield f"| {name} | {line(task, name, cell)}"
        yield ""
    yield f"| remesh's memory at the peak, share of the state | {columns} |"
    yield "|---" * (1 + len(worlds)) + "|"
    for task in tasks:
        yield f"| {task} | {line(task, 'remesh', '{peak_per_state:.2f}')}"
    yield ""
    task = "load, rows to columns"
    yield f"| bytes read for each needed byte, rows to columns | {columns} |"
    yield "|---" * (1 + len(worlds)) + "|"
    for name in dict.fromkeys(name for t, name, _ in of if t == task and name != "limit"):
        yield f"| {name} | {line(task, name, '{read_per_needed:.1f}')}"


def task_of(row: Any) -> str:
    """The task of a row of `save_load` without the number of ranks."""
    return re.sub(r"what \d+ ranks", "what 4 or 2 ranks", row["task"].split(", ", 1)[1])


def rate_of(row: Any) -> str:
    """Bytes of a state for each second of a row."""
    return f"{row['bytes'] / row['seconds'] / 1e9:.2f} GB/s"


def size_of(rows: Any) -> str:
    """The size of a state and the number of rounds, of rows that have both."""
    rounds = len(rows[0]["all_seconds"])
    return f"{rows[0]['bytes'] / 2**30:.2g} GiB of state, medians of {rounds} interleaved rounds"


SUMMARY = ("remesh", "torch DCP", "megatron-core", "torch.save")
"""Contestants of the README."""


def of_save_load_summary(rows: Any) -> Iterator[str]:
    """Saves and loads on 2 ranks."""
    yield f"{size_of(rows)} on 2 ranks; in parentheses multiples of the limit."
    yield ""
    of = {(row["task"], row["contestant"]): row for row in rows if row["ranks"] == 2}
    yield f"| | limit | {' | '.join(SUMMARY)} |"
    yield "|---" * (2 + len(SUMMARY)) + "|"
    for task in ("save", "load, same layout", "load, rows to columns"):
        found = [of.get((f"2 ranks, {task}", name)) for name in SUMMARY]
        cells = (
            "" if row is None else f"{rate_of(row)} ({row['times_limit']:.1f})" for row in found
        )
        yield f"| {task} | {rate_of(of[f'2 ranks, {task}', 'limit'])} | {' | '.join(cells)} |"
    cells = (f"{of['2 ranks, save', name]['cpu_seconds']:.1f} s" for name in SUMMARY)
    yield f"| CPU of the save | | {' | '.join(cells)} |"


def save_load_chart(rows: Any) -> str:
    """The chart of saves and loads."""
    groups = group_rows([row for row in rows if row["ranks"] > 1], "times_limit")
    return bar_chart("Seconds, as multiples of the limit", groups, limit=1, longest=6)


CHARTS: dict[str, Callable[[Any], str]] = {
    "save_load": save_load_chart,
    "goodput": lambda result: goodput.draw(result["ways"]),
}


def chart(name: str) -> str:
    """The text of a chart."""
    return CHARTS[name](json.loads((RESULTS / f"{name}.json").read_text())["result"])


def of_async_save(result: Any) -> Iterator[str]:
    """How long background saves block, and steps beside them."""
    yield (
        f"{result['gibibytes']:g} GiB of state in one process, {result['rounds']} interleaved "
        "rounds. `blocked` is in multiples of one copy of the state, `durable` in multiples of the "
        "limit of a save."
    )
    yield ""
    of: dict[str, list[Any]] = {}
    for row in result["results"]:
        of.setdefault(row["contestant"], []).append(row)
    yield "| | blocked, first save | blocked, later saves | durable after, later |"
    yield "|---|---|---|---|"
    for name, (first, later) in of.items():
        blocked = (row["blocked"] / result["copy_seconds"] for row in (first, later))
        durable = later["durable"] / result["limit_seconds"]
        times = " | ".join(f"{one:.1f}" for one in (*blocked, durable))
        yield f"| {SAVERS.get(name, f'`{name}`')} | {times} |"
    yield ""
    yield "| a training step beside | seconds, as multiples of a step alone |"
    yield "|---|---|"
    steps = result["step_seconds"]
    for key, name in BESIDE.items():
        yield f"| {name} | {steps[key] / steps['nothing']:.1f} |"


SAVERS = {"DCP async_save": "DCP `async_save`"}
"""Contestants whose names are not all code."""
BESIDE = {
    "raw": "another process that writes the same bytes",
    "thread": "a save by a thread",
    "process": "a save by a process",
}


def of_async_save_summary(result: Any) -> Iterator[str]:
    """How long a background save blocks."""
    yield f"{result['gibibytes']:g} GiB of state, medians of {result['rounds'] - 1} later saves."
    yield ""
    of = {row["contestant"]: row for row in result["results"] if row["when"] == "later saves"}
    names = ("Saver(state)", "DCP async_save")
    yield f"| | {' | '.join(SAVERS.get(name, f'`{name}`') for name in names)} |"
    yield "|---|---|---|"
    cells = (f"{of[name]['blocked'] / result['copy_seconds']:.1f}" for name in names)
    yield f"| blocked, as a multiple of one copy of the state | {' | '.join(cells)} |"


def of_snapshots(rows: Any) -> Iterator[str]:
    """How long snapshots block, and the memory that they hold."""
    yield f"{size_of(rows)}; times are multiples of one copy of the state."
    yield ""
    yield "| | one copy | contestant | blocked, first | blocked, later | CPU | memory held |"
    yield "|---" * 7 + "|"
    limits = {row["ranks"]: row for row in rows if row["contestant"] == "limit"}
    for row in rows:
        if row["contestant"] == "limit":
            continue
        cells = [
            f"{row['ranks']} node{'s' * (row['ranks'] > 1)}",
            f"{limits[row['ranks']]['seconds']:.2f} s",
            row["contestant"],
            f"{row['first']:.1f}",
            f"{row['times_limit']:.1f}",
            f"{row['cpu_seconds']:.2f} s",
            "" if row["held"] is None else f"{row['held']:.1f} x state",
        ]
        yield f"| {' | '.join(cells)} |"


RUNS = {
    "adapter": "frozen model, adapters of rank 4 with AdamW",
    "full": "everything changes",
}
"""What `benchmarks.incremental` saves."""


def of_incremental(result: Any) -> Iterator[str]:
    """What saves cost where not everything changes."""
    yield (
        f"{result['gibibytes']:g} GiB of model. Times are multiples of the time in which all bytes "
        "are written raw."
    )
    yield ""
    yield (
        "| | bytes that a save writes | limit | blocked | durable | CPU | "
        "DCP `async_save`: blocked | durable | CPU |"
    )
    yield "|---" * 9 + "|"
    for name, run in result["runs"].items():
        share = f"{run['written'] * 100:.{0 if run['written'] > 0.1 else 1}f} %"
        cells = [RUNS[name], share, f"{run['limit_seconds']:.2f} s"]
        for prefix in ("", "dcp_"):
            cells += [f"{run[f'{prefix}{key}']:.1f}" for key in ("blocked", "durable")]
            cells.append(f"{run[f'{prefix}cpu_seconds']:.1f} s")
        yield f"| {' | '.join(cells)} |"


def of_megatron(rows: Any) -> Iterator[str]:
    """Megatron's names here and in megatron-core."""
    yield f"{size_of(rows)}, as multiples of the limit."
    yield ""
    of = {(row["ranks"], row["task"], row["contestant"]): row for row in rows}
    names = ("remesh", "remesh, torch_dist", "megatron-core")
    yield "| | limit | `remesh` format | `torch_dist` by remesh | megatron-core |"
    yield "|---" * 5 + "|"
    for ranks, task in dict.fromkeys((ranks, task) for ranks, task, _ in of):
        cells = [f"{of[ranks, task, name]['times_limit']:.1f}" for name in names]
        limit = f"{of[ranks, task, 'limit']['seconds']:.2f} s"
        what = f"{ranks} rank{'s' * (ranks > 1)}, {task}"
        yield f"| {what} | {limit} | {' | '.join(cells)} |"
    yield ""
    most = max(ranks for ranks, _, _ in of)
    shown = ", ".join(
        f"{of[most, 'load, rows to columns', name]['read_per_needed']:.1f} ({name})"
        for name in names
    )
    yield (
        "Bytes read for each byte that was needed, rows to columns on "
        f"{most} rank{'s' * (most > 1)}: {shown}."
    )


def of_operator(row: Any) -> Iterator[str]:
    """What many jobs cost the operator."""
    yield (
        "| jobs | workers of each | all pods created | operator's CPU for it | requests | "
        "peak memory | lost worker to replacement, median | 99th percentile |"
    )
    yield "|---" * 8 + "|"
    cells = [
        f"{row['jobs']:,}",
        f"{row['workers']}",
        f"{row['start, s']:.1f} s",
        f"{row['its CPU, s']:.1f} s",
        f"{row['requests']:,}",
        f"{row['MB']:.0f} MB",
        f"{row['react, ms'] / 1e3:.2f} s",
        f"{row['p99, ms'] / 1e3:.2f} s",
    ]
    yield f"| {' | '.join(cells)} |"


def of_goodput(result: Any) -> Iterator[str]:
    """The simulation of a large job."""
    yield f"{result['jobs']} jobs of {result['days']:g} days for each way and each interval."
    yield ""
    yield f"| {' | '.join(goodput.HEAD)} |"
    yield "|---" * len(goodput.HEAD) + "|"
    for cells in goodput.cells_of(result["ways"]):
        yield f"| {' | '.join(cells)} |"


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
    sizes = {row["task"].partition(",")[0]: row["bytes"] / 2**30 for row in result["bytes"]}
    yield (
        f"{sizes['dcp']:.2f} GiB of state in DCP's format, {sizes['huggingface']:.2f} GiB of "
        f"weights; medians of {len(result['bytes'][0]['all_seconds'])} interleaved rounds."
    )
    yield ""
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


def of_elastic(result: Any) -> Iterator[str]:
    """Seconds from a kill to the next step, beside torchrun."""
    yield f"Three nodes of one rank; each job had {result['limit']:g} s to make a new step."
    yield ""
    yield "| | came back | kill to the first new step, median |"
    yield "|---|---|---|"
    for name, times in result["results"].items():
        back = [seconds for seconds in times if seconds is not None]
        seconds = f"{statistics.median(back):.1f} s" if back else ""
        yield f"| {name} | {len(back)} of {len(times)} | {seconds} |"


def of_recovery(result: Any) -> Iterator[str]:
    """Seconds from a failure to the next new step, and where they go."""
    yield (
        "Medians of seconds, and of the steps that were made again. Each job had "
        f"{result['limit']:g} s to make a new step."
    )
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
    yield ""
    yield "| until all processes have entered the next world | measured | simulated |"
    yield "|---|---|---|"
    for name, formed in result["formed"].items():
        yield f"| {name} | {formed['measured']:.2f} | {formed['simulated']:.2f} |"


def of_master(rows: Any) -> Iterator[str]:
    """What nodes cost the master."""
    yield (
        "| nodes | all meet | master's CPU for it | again | CPU | CPU of a heartbeat | "
        "heartbeats a second of a core | peak memory | status | page |"
    )
    yield "|---" * 10 + "|"
    for row in rows:
        cells = [
            f"{row['nodes']:,}",
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


def of_planning(result: Any) -> Iterator[str]:
    """What it takes to plan for simulated worlds, beside the goals."""
    yield (
        "| ranks | pieces | save: rank 0 | its peak | save: sent by a rank | index | open | "
        "load: rows | load: columns | peak |"
    )
    yield "|---" * 10 + "|"
    for world in result["worlds"]:
        cells = [
            f"{world['ranks']:,}",
            f"{world['pieces']:,}",
            f"{world['save_seconds_rank_0']:.2g} s",
            f"{world['peak_save_bytes'] / 1e9:.2f} GB",
            f"{world['bytes_sent_a_rank']} bytes",
            f"{world['index_bytes'] / 1e6:.1f} MB",
            f"{world['open_seconds_a_rank']:.3f} s",
            f"{world['load_rows_seconds_a_rank']:.2g} s",
            f"{world['load_seconds_a_rank']:.2g} s",
            f"{world['peak_bytes'] / 1e9:.2f} GB",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| | measured | goal |"
    yield "|---" * 3 + "|"
    for one in result["goals"]:
        value, goal = (planning.shown(one[key], one["unit"]) for key in ("value", "goal"))
        yield f"| {one['figure']} | {value} | {goal} |"
    random = result["random"]
    yield ""
    yield (
        f"Random cuts are {random['pieces']:,} pieces without a pattern, whose index has "
        f"{random['index_bytes'] / 1e6:.0f} MB."
    )


def of_object_store(result: Any) -> Iterator[str]:
    """Saves to and loads from a store, a column for each distance."""
    rows = result["rows"]
    of = {(row["ranks"], row["task"], row["contestant"], row["delay_ms"]): row for row in rows}
    delays = sorted({row["delay_ms"] for row in rows})
    yield (
        f"{result['gibibytes']:.2g} GiB of state, medians of {result['rounds']} interleaved rounds."
        " For each round trip: seconds of the limit, and the contestants as multiples of it."
    )
    yield ""
    known = dict.fromkeys(row["contestant"] for row in rows)
    names = sorted(known.keys() - {"limit"}, key=lambda name: (name != "limit, copied", name))
    heads = [f"{delay} ms: limit | {' | '.join(names)}" for delay in delays]
    yield f"| | {' | '.join(heads)} | bytes asked for | requests | memory |"
    yield "|---" * (4 + len(delays) * (1 + len(names))) + "|"
    for ranks, task in dict.fromkeys((row["ranks"], row["task"]) for row in rows):
        cells = []
        for delay in delays:
            cells.append(f"{of[ranks, task, 'limit', delay]['seconds']:.2f} s")
            found = (of.get((ranks, task, name, delay)) for name in names)
            cells += ["" if row is None else f"{row['times_limit']:.2f}" for row in found]
        ours = of[ranks, task, "remesh", delays[-1]]
        asked = f"{ours['asked']:.2f}" if "load" in task else ""
        cells += [asked, f"{ours['requests']:.0f}", f"{ours['peak'] / 1e6:.0f} MB"]
        yield f"| {ranks} rank{'s' * (ranks > 1)}, {task} | {' | '.join(cells)} |"


TABLES: dict[str, Callable[[Any], Iterator[str]]] = {
    "async_save": of_async_save,
    "async_save.summary": of_async_save_summary,
    "compression": of_compression,
    "elastic": of_elastic,
    "foreign": of_foreign,
    "goodput": of_goodput,
    "incremental": of_incremental,
    "master": of_master,
    "megatron": of_megatron,
    "operator": of_operator,
    "planning": of_planning,
    "object_store": of_object_store,
    "recovery": of_recovery,
    "reshard": of_reshard,
    "save_load": of_save_load,
    "save_load.summary": of_save_load_summary,
    "save_load_4gib.summary": of_save_load_summary,
    "short": of_short,
    "snapshots": of_snapshots,
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
    if "load_before" in machine:
        text += f"; load average before {machine['load_before'][0]:.1f}"
    elif "load" in machine:
        text += f"; load average at the end {machine['load'][0]:.0f}"
    return text + "."


def figures(name: str) -> str:
    """The text of a block."""
    document = json.loads((RESULTS / f"{name.partition('.')[0]}.json").read_text())
    text = "\n".join([*TABLES[name](document["result"]), "", measured(document), ""])
    # A number and its unit stay on one line.
    text = re.sub(r"(?<=\d) (s|GiB|MB|GB/s)(?= |\)|;|$)", "\u00a0\\1", text, flags=re.MULTILINE)
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
    for name in CHARTS:
        (ROOT / "docs" / f"{name}.svg").write_text(chart(name))


if __name__ == "__main__":
    main(sys.argv[1:])
