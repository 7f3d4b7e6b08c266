"""`remesh report`: one page about a checkpoint, in one file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import click

from remesh import catalog
from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.cli.plan import columns_of, largest, write_page
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

    Names, sizes, layout, statistics, values, digests and provenance. For programs,
    `remesh ls --json` has the same numbers, but no digests.
    """
    write_page(native.begin_anew(lambda: _page(path, with_statistics=with_statistics)), target)


def _page(path: str, *, with_statistics: bool) -> str:
    checkpoint = Checkpoint(places.source(path))
    index, record = checkpoint.index, places.record_of(checkpoint)
    facts = summary.facts_of(checkpoint)
    if record is not None:
        findings = catalog.describe_findings(places.findings_of(path, checkpoint))
        facts += [("save id", record.save_id), ("state", findings or "all files, sizes as saved")]
    names = index.tensors.names if with_statistics else ()
    statistics = summary.statistics_of(path, checkpoint, names)
    titles = [column[1:] for column in summary.USAGE_COLUMNS]
    usages = summary.usage_rows(summary.usages_of(index, 2))[:MAX_USAGES]
    sections: list[tuple[str, Sequence[str]]] = [
        ("", [picture.table(("", ""), facts)]),
        ("Where the bytes are", [picture.table(titles, usages)]),
        ("Tensors", _tensors(index, statistics)),
    ]
    if drawn := [name for name in index.tensors.names if index[name].shape]:
        columns = columns_of(index, largest(index, drawn, MAX_DRAWN), None)
        sections.append(("How the largest tensors lie in files", [picture.layout(columns)]))
    values = {**checkpoint.values, **checkpoint.lists, **checkpoint.objects}
    natural = sorted(values.items(), key=lambda one: catalog.natural_key(one[0]))
    if values:
        shown = [
            (name, output.type_name(value), output.format_value_short(value, 120))
            for name, value in natural[:MAX_VALUES]
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


def _tensors(index: Index, statistics: Mapping[str, summary.Statistics | None]) -> list[str]:
    """Tables of the tensors by the first two parts of their names; each opens."""
    groups: dict[str, list[str]] = {}
    for name in sorted(index, key=catalog.natural_key):
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
    pieces = []
    for prefix, names in groups.items():
        rows = []
        for name in names:
            stored, tied = index[name], index.aliases.get(name)
            shown = f"{name} -> {tied}" if tied else name
            row = (shown, stored.dtype, picture.times(stored.shape), format_bytes(stored.num_bytes))
            rows.append((*row, *summary.statistics_cells(statistics.get(name))))
        size = format_bytes(sum(index[name].num_bytes for name in names))
        title = html.escape(f"{prefix} ({output.plural(len(names), 'tensor')}, {size})")
        head = ("name", "dtype", "shape", "size", *summary.STATISTICS)
        table = picture.table(head, rows)
        pieces.append(f"<details><summary>{title}</summary>\n{table}</details>")
    return pieces
