"""`remesh report`: one page about a checkpoint, in one file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence

import click

from remesh import catalog
from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.cli.drawing import columns_of, largest, write_page
from remesh.core.index import Index
from remesh.demo import picture
from remesh.formats import native
from remesh.storage import shown_url

MAX_DRAWN = 8
MAX_USAGES = 40
MAX_VALUES = 200


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
def report(*, path: str, with_statistics: bool, target: str | None) -> None:
    """Write an HTML page about a checkpoint: one file, which needs nothing else.

    Tree of names, sizes, layout, statistics, values, digests and provenance. For programs,
    `remesh ls --json` has the same numbers.
    """
    write_page(native.begin_anew(lambda: _page(path, with_statistics=with_statistics)), target)


def _page(path: str, *, with_statistics: bool) -> str:
    checkpoint = Checkpoint(places.source(path))
    index, record = checkpoint.index, places.record_of(checkpoint)
    facts = summary.facts_of(checkpoint)
    if record is not None:
        findings = catalog.describe_findings(places.findings_of(path, checkpoint))
        facts += [("save id", record.save_id), ("state", findings or "all files, sizes as saved")]
    usages = summary.usage_rows(summary.usages_of(index, 2))[:MAX_USAGES]
    sections: list[tuple[str, Sequence[str]]] = [
        ("", [picture.table(("", ""), facts)]),
        ("Where the bytes are", [picture.table(_titles(summary.USAGE_COLUMNS), usages)]),
        ("Tensors", [_tree(index)]),
    ]
    if drawn := [name for name in index.tensors.names if index[name].shape]:
        columns = columns_of(index, largest(index, drawn, MAX_DRAWN), None)
        sections.append(("How the largest tensors lie in files", [picture.layout(columns)]))
    if with_statistics:
        found = summary.statistics_of(path, checkpoint, index.tensors.names)
        rows = summary.statistics_rows(dict(sorted(found.items(), key=_natural)), index)
        table = picture.table(_titles(summary.STATISTICS_COLUMNS), rows)
        sections.append(("Statistics", [table]))
    values = {**checkpoint.values, **checkpoint.lists, **checkpoint.objects}
    if values:
        shown = [
            (name, output.type_name(value), output.format_value_short(value, 120))
            for name, value in sorted(values.items(), key=_natural)[:MAX_VALUES]
        ]
        pieces = [picture.table(("name", "type", "content"), shown)]
        if len(values) > MAX_VALUES:
            pieces.append(picture.paragraph(f"and {len(values) - MAX_VALUES} more"))
        sections.append(("Values", pieces))
    if record is not None:
        sections.append(("Provenance", [picture.table(("", ""), _provenance(path, record))]))
    files = [
        (file, format_bytes(size), digest or "-")
        for file, size, digest in places.files_of(checkpoint)
    ]
    sections.append(("Files and digests", [picture.table(("file", "size", "digest"), files)]))
    return picture.page(shown_url(path), sections)


def _titles(columns: Sequence[str]) -> list[str]:
    return [column[1:] for column in columns]


def _natural(one: tuple[str, object]) -> object:
    return catalog.natural_key(one[0])


def _provenance(path: str, record: native.CommitRecord) -> list[tuple[str, str]]:
    """Where it comes from, as its manager noted."""
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
