"""`remesh du`: where the bytes of a checkpoint are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
from rich.console import Console

from remesh import catalog
from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places
from remesh.index import Index
from remesh.storage import open_storage, shown_url


@dataclass(frozen=True, slots=True)
class Usage:
    """The tensors whose names begin alike.

    Attributes:
        prefix: What their names begin with.
        num_bytes: Bytes of the tensors; tied ones count once.
        num_elements: Their elements.
        num_tensors: How many there are.
    """

    prefix: str
    num_bytes: int
    num_elements: int
    num_tensors: int


@click.command(epilog=output.example("remesh du runs/step_00001000 --depth 3", "remesh du runs"))
@click.argument("path")
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Unite tensors whose names have these first parts in common.",
)
@output.all_option
@places.format_option()
@output.json_option
def du(*, path: str, depth: int, show_all: bool, as_json: bool) -> None:
    """Show which parts of a state take how many bytes, the largest first.

    Of a directory of checkpoints, show the size of each. Sizes are those of tensors, so a tensor
    that several ranks hold counts once; the last line has the bytes of the files.
    """
    if places.is_checkpoint(path):
        checkpoint = places.open_checkpoint(path)
        _show_checkpoint(path, checkpoint, depth, show_all=show_all, as_json=as_json)
        return
    entries = catalog.scan(open_storage(path))
    if not entries:
        raise catalog.nothing_at(open_storage(path))
    entries.sort(key=lambda entry: -entry.num_bytes)
    total = sum(entry.num_bytes for entry in entries)
    if as_json:
        found = [
            {"name": entry.name, "status": entry.status, "num_bytes": entry.num_bytes}
            for entry in entries
        ]
        output.print_json({"kind": "directory", "path": shown_url(path), "checkpoints": found})
        return
    rows = [
        (*_size(entry.num_bytes, total), entry.status, output.printable(entry.name))
        for entry in entries
    ]
    console = output.stdout_console()
    output.print_table(console, (">size", ">share", "<status", "<name"), rows)
    console.out(f"{format_bytes(total)} in all", highlight=False)


def _show_checkpoint(
    path: str, checkpoint: Checkpoint, depth: int, *, show_all: bool, as_json: bool
) -> None:
    usages = usages_of(checkpoint.index, depth)
    total = sum(usage.num_bytes for usage in usages)
    num_file_bytes = places.num_file_bytes(checkpoint)
    if as_json:
        output.print_json(
            {
                "kind": "checkpoint",
                "path": shown_url(path),
                "num_tensor_bytes": total,
                "num_file_bytes": num_file_bytes,
                "parts": [asdict(usage) for usage in usages],
            }
        )
        return
    console = output.stdout_console()
    _print_usages(console, usages, total, show_all=show_all)
    text = f"{format_bytes(total)} of tensors, {format_bytes(num_file_bytes)} of files"
    console.out(text, highlight=False)


def _print_usages(console: Console, usages: Sequence[Usage], total: int, *, show_all: bool) -> None:
    rows = [
        (
            *_size(usage.num_bytes, total),
            output.format_count(usage.num_elements),
            str(usage.num_tensors),
            output.printable(usage.prefix),
        )
        for usage in output.capped(usages, show_all=show_all)
    ]
    output.print_table(console, (">size", ">share", ">elements", ">tensors", "<name"), rows)
    output.print_rest(console, len(usages), show_all=show_all)


def _size(num_bytes: int, total: int) -> tuple[str, str]:
    return format_bytes(num_bytes), f"{100 * num_bytes / total if total else 0:.1f} %"


def usages_of(index: Index, depth: int) -> list[Usage]:
    """What the tensors with common beginnings of names take, the largest first.

    Args:
        index: The tensors.
        depth: Parts of a name that are compared.
    """
    tensors = index.tensors
    sizes = tensors.shapes.prod(axis=1)
    found: dict[str, list[int]] = {}
    for name, size, num_bytes in zip(
        tensors.names, sizes.tolist(), (sizes * tensors.itemsizes).tolist(), strict=True
    ):
        parts = name.split(".")
        prefix = ".".join(parts[:depth]) + (".*" if len(parts) > depth else "")
        counts = found.setdefault(prefix, [0, 0, 0])
        counts[0] += num_bytes
        counts[1] += size
        counts[2] += 1
    usages = [Usage(prefix, *counts) for prefix, counts in found.items()]
    return sorted(usages, key=lambda usage: (-usage.num_bytes, catalog.natural_key(usage.prefix)))
