"""`remesh report`: one page about a checkpoint, in one file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import click

from remesh import catalog
from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.cli.drawing import columns_of, drawing, largest, write_page
from remesh.cli.summary import (
    USAGE_COLUMNS,
    Usage,
    statistics_cells,
    statistics_of,
    usage_rows,
    usages_of,
)
from remesh.core.index import Index
from remesh.demo import picture
from remesh.formats import native
from remesh.storage import shown_url

MAX_DRAWN = 8
MAX_USAGES = 40
MAX_VALUES = 200


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of the page."""

    path: str  # the checkpoint
    facts: tuple[tuple[str, str], ...]  # names of facts, and what they are
    usages: tuple[Usage, ...]  # where the bytes are
    statistics: Mapping[str, summary.Statistics | None]
    """Those of each tensor, or None where its type has none; empty if not asked for."""
    files: tuple[tuple[str, int, str], ...]
    """Path, size and digest of each file; the digest is empty where there is none."""
    provenance: tuple[tuple[str, str], ...]  # where it comes from, as its manager noted
    values: tuple[tuple[str, str, str], ...]  # name, type and content of plain values and objects


@click.command(epilog=output.example("remesh report runs/step_00001000 -o report.html"))
@click.argument("path", metavar="CKPT")
@click.option(
    "--stats/--no-stats",
    "with_statistics",
    default=True,
    help="Read all tensors for their statistics.",
)
@click.option(
    "-o", "--output", "target", metavar="FILE", help="Write the page here instead of to stdout."
)
@places.format_option()
@output.json_option
def report(*, path: str, with_statistics: bool, target: str | None, as_json: bool) -> None:
    """Write an HTML page about a checkpoint: one file, which needs nothing else.

    Tree of names, sizes, layout, statistics, values, digests and provenance.
    """

    def collect() -> tuple[Checkpoint, Report]:
        checkpoint = Checkpoint(places.source(path))
        return checkpoint, _collect(path, checkpoint, with_statistics=with_statistics)

    checkpoint, found = native.begin_anew(collect)
    if as_json:
        output.print_json({"kind": "report", **asdict(found)})
        return
    write_page(_page(found, checkpoint.index), target)


def _collect(path: str, checkpoint: Checkpoint, *, with_statistics: bool) -> Report:
    index = checkpoint.index
    names = index.tensors.names if with_statistics else ()
    values = {**checkpoint.values, **checkpoint.lists, **checkpoint.objects}
    return Report(
        shown_url(path),
        tuple(_facts(path, checkpoint, len(values))),
        tuple(usages_of(index, 2)),
        statistics_of(path, checkpoint, names),
        tuple(places.files_of(checkpoint)),
        tuple(_provenance(path, checkpoint)),
        tuple(
            (name, output.type_name(value), output.format_value_short(value, 120))
            for name, value in sorted(values.items(), key=lambda one: catalog.natural_key(one[0]))
        ),
    )


def _facts(path: str, checkpoint: Checkpoint, num_values: int) -> list[tuple[str, str]]:
    index = checkpoint.index
    parts = summary.elements_by_part(index)
    in_files = format_bytes(places.num_file_bytes(checkpoint)) + places.shown_compression(index)
    facts = [
        ("format", checkpoint.format),
        ("tensors", f"{len(index.tensors)} in {index.num_pieces} pieces"),
        ("tied names", str(len(index.aliases))),
        ("elements", f"{sum(parts.values()):,}"),
        ("bytes of tensors", format_bytes(index.num_bytes)),
        ("bytes of files", in_files),
        ("plain values", str(num_values)),
    ]
    record = places.record_of(checkpoint)
    if record is not None:
        facts += [
            ("saved", output.format_time(record.created)),
            ("ranks", str(record.world_size)),
            ("remesh", f"{record.remesh_version}, format {record.version}"),
            ("save id", record.save_id),
        ]
        findings = places.findings_of(path, checkpoint)
        facts.append(("files", catalog.describe_findings(findings) or "all there, sizes as saved"))
    return facts


def _provenance(path: str, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    record = places.record_of(checkpoint)
    if record is None:
        return []
    facts = [
        (name, output.format_value_short(value, 200))
        for name, value in record.metadata.items()
        if name != catalog.NOTE_KEY
    ]
    note = catalog.note_of(record, path)
    if note is not None:
        facts += [("step", str(note.step)), ("run", note.run)]
        facts += [(f"metric {name}", str(value)) for name, value in note.metrics.items()]
        origin = note.provenance
        names = ("revision", "config_digest", "parent", "host", "platform")
        facts += [(name, getattr(origin, name)) for name in names if getattr(origin, name)]
        facts += [(f"version of {name}", version) for name, version in origin.versions.items()]
    return facts


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


def _page(found: Report, index: Index) -> str:
    drawn = [name for name in index.tensors.names if index[name].shape]
    titles = [column[1:] for column in USAGE_COLUMNS]
    sections: list[tuple[str, Sequence[str]]] = [
        ("", [picture.table(("", ""), found.facts)]),
        ("Where the bytes are", [picture.table(titles, usage_rows(found.usages)[:MAX_USAGES])]),
        ("Tensors", [_tree(index)]),
    ]
    if drawn:
        columns = columns_of(index, largest(index, drawn, MAX_DRAWN), None)
        sections.append(("How the largest tensors lie in files", drawing(columns)))
    if found.statistics:
        sections.append(("Statistics", [_statistics_table(found.statistics)]))
    if found.values:
        shown = found.values[:MAX_VALUES]
        pieces = [picture.table(("name", "type", "content"), shown)]
        if len(found.values) > MAX_VALUES:
            pieces.append(picture.paragraph(f"and {len(found.values) - MAX_VALUES} more"))
        sections.append(("Values", pieces))
    if found.provenance:
        sections.append(("Provenance", [picture.table(("", ""), found.provenance)]))
    rows = [(path, format_bytes(size), digest or "-") for path, size, digest in found.files]
    sections.append(("Files and digests", [picture.table(("file", "size", "digest"), rows)]))
    return picture.page(found.path, sections)


def _statistics_table(statistics: Mapping[str, summary.Statistics | None]) -> str:
    names = sorted(statistics, key=catalog.natural_key)
    rows = [(name, *statistics_cells(statistics[name])) for name in names]
    return picture.table(("name", "min", "max", "mean", "std", "zeros", "NaN", "inf"), rows)


def _tree(index: Index) -> str:
    """The names as a tree that opens; the first level is open."""
    root: dict[str, object] = {}
    for name in sorted(index, key=catalog.natural_key):
        node = root
        *parents, _ = name.split(".")
        for parent in parents:
            below = node.setdefault(f"{parent}.", {})
            assert isinstance(below, dict)
            node = below
        node[name] = index[name].num_bytes
    return "".join(_branch(label, node, index, depth=0) for label, node in root.items())


def _branch(label: str, node: object, index: Index, *, depth: int) -> str:
    if not isinstance(node, dict):
        stored, tied = index[label], index.aliases.get(label)
        last = label.rpartition(".")[2]
        shape = picture.times(stored.shape)
        text = f"{last}: {stored.dtype}, {shape}, {format_bytes(stored.num_bytes)}"
        text += f", tied to {tied}" if tied else ""
        return f"<p>{html.escape(text)}</p>"
    inner = "".join(_branch(name, below, index, depth=depth + 1) for name, below in node.items())
    title = f"{label[:-1]} ({format_bytes(_num_bytes(node))})"
    is_open = ' open="open"' if depth == 0 else ""
    return (
        f'<details{is_open} style="margin-left:{min(depth, 1) * 18}px">'
        f"<summary>{html.escape(title)}</summary>"
        f'<div style="margin-left:18px">{inner}</div></details>'
    )


def _num_bytes(node: object) -> int:
    if isinstance(node, dict):
        return sum(_num_bytes(below) for below in node.values())
    return node if isinstance(node, int) else 0
