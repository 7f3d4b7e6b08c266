"""Looking at checkpoints: `remesh ls`, `remesh show` and `remesh verify`. Nothing needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import click
import numpy as np
from rich.console import Console

from remesh import catalog
from remesh.checkpoint import Checkpoint
from remesh.cli import output, places, summary
from remesh.cli.boxes import BoxText, parse_box
from remesh.cli.checking import Verdict, check
from remesh.dtypes import BY_NAME
from remesh.errors import CorruptCheckpointError, StateError
from remesh.formats import native
from remesh.geometry import Box
from remesh.index import Piece
from remesh.integrity import repair_advice
from remesh.state import TENSOR_RECORD
from remesh.storage import open_storage, shown_url

NUM_FIRST_ELEMENTS = 10
NUM_BOX_ELEMENTS = 1000
"""How many elements are shown of a box that was asked for."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


# ---------------------------------------------------------------------------------------------
# ls
# ---------------------------------------------------------------------------------------------


@click.command(
    epilog=output.example("remesh ls runs", "remesh ls runs/step_00001000 'model.*' --pieces")
)
@click.argument("path")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--values", "with_values", is_flag=True, help="List plain values and objects too.")
@click.option("--pieces", "with_pieces", is_flag=True, help="List the pieces of each tensor.")
@json_option
def ls(
    *, path: str, patterns: tuple[str, ...], with_values: bool, with_pieces: bool, as_json: bool
) -> None:
    """List what a checkpoint holds, or the checkpoints in a directory.

    PATTERNs choose names (* any text, ? any character, [ab] one of these); quote them.

    Of a directory of checkpoints, each is listed with its status: committed (the newest has a *),
    unfinished (no commit record), damaged (files are missing or have another size), or unreadable.
    Only `remesh verify` reads everything.
    """
    storage = open_storage(path)
    if places.is_checkpoint(path):
        listing = native.begin_anew(lambda: _Listing.of(path, patterns))
        _list_checkpoint(listing, with_values, with_pieces, as_json)
        return
    steps = catalog.scan(storage)
    if not steps:
        raise catalog.nothing_at(storage)
    found = [step for step in steps if _matches(step.name, patterns)]
    if not found:
        raise StateError(f"no checkpoint in {shown_url(path)} matches {' '.join(patterns)}")
    newest = catalog.newest_entry(steps)
    if as_json:
        checkpoints = [{**asdict(step), "newest": step is newest} for step in found]
        output.print_json(
            {"kind": "directory", "path": shown_url(path), "checkpoints": checkpoints}
        )
    else:
        _print_steps(found, newest)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _print_steps(steps: Sequence[catalog.Entry], newest: catalog.Entry | None) -> None:
    console = output.stdout_console()
    columns = ("<status", "<committed", ">ranks", ">size", "<name")
    rows = [
        (
            step.status,
            output.format_time(step.created) if step.created else "-",
            str(step.world_size) if step.world_size else "-",
            output.format_bytes(step.num_bytes),
            output.printable(step.name) + (" *" if step is newest else ""),
        )
        for step in steps
    ]
    titles, *lines = output.table_lines(columns, rows)
    console.out(titles, style="bold", highlight=False)
    styles = {"committed": None, "unfinished": "dim", "damaged": "red", "unreadable": "red"}
    for step, line in zip(steps, lines, strict=True):
        style = "bold green" if step is newest else styles[step.status]
        console.out(line, style=style, highlight=False)
    reasons = [step for step in steps if step.reason]
    if reasons:
        console.out("")
    for step in reasons:
        console.out(output.printable(f"{step.name}: {step.reason}"), highlight=False)
    broken = [step for step in steps if step.status in {"damaged", "unfinished"}]
    if broken:
        console.out(output.printable(repair_advice(broken[-1].path)), highlight=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Listing:
    """A checkpoint, and the names in it that were asked for.

    Attributes:
        path: What the user called it.
        patterns: What chose the names; empty if all are chosen.
        checkpoint: The checkpoint.
        findings: Files that are missing or have another size.
        totals: Counts over the whole checkpoint, whatever was chosen.
        tensors: Chosen names of tensors, ties included.
        values: Chosen values, lists of names included.
        objects: Chosen elements of sharded objects.
    """

    path: str
    patterns: tuple[str, ...]
    checkpoint: Checkpoint
    findings: list[catalog.Finding]
    totals: dict[str, int]
    tensors: list[str]
    values: dict[str, object]
    objects: dict[str, object]

    @classmethod
    def of(cls, path: str, patterns: tuple[str, ...]) -> _Listing:
        """Open a checkpoint and choose.

        Raises:
            StateError: If no name matches.
            CheckpointError: If there is no sound checkpoint, or it was replaced meanwhile.
        """
        checkpoint = Checkpoint(path)
        values, objects = {**checkpoint.values, **checkpoint.lists}, checkpoint.objects
        listing = cls(
            shown_url(path),
            patterns,
            checkpoint,
            places.findings_of(open_storage(path), checkpoint),
            _totals(checkpoint, values, objects),
            _chosen(checkpoint.index, patterns),
            {name: values[name] for name in _chosen(values, patterns)},
            {name: objects[name] for name in _chosen(objects, patterns)},
        )
        if patterns and not (listing.tensors or listing.values or listing.objects):
            raise StateError(f"no name in {shown_url(path)} matches {' '.join(patterns)}")
        return listing


def _totals(
    checkpoint: Checkpoint, values: Mapping[str, object], objects: Mapping[str, object]
) -> dict[str, int]:
    """Counts over a whole checkpoint."""
    index = checkpoint.index
    return {
        "num_tensors": len(index.boxes.tensors),
        "num_ties": len(index.aliases),
        "num_pieces": len(index.boxes),
        "num_tensor_bytes": int(index.boxes.num_bytes.sum()),
        "num_values": len(values),
        "num_objects": len(objects),
        "num_files": len(index.files),
        "num_file_bytes": _num_file_bytes(checkpoint),
    }


def _num_file_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all files that a checkpoint is known to have."""
    if checkpoint.format != native.FORMAT_NAME:
        return sum(file.num_bytes for file in checkpoint.index.files)
    return sum(file.num_bytes for file in catalog.files_of(checkpoint.record))


def _chosen(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match, in natural order."""
    return sorted((name for name in names if _matches(name, patterns)), key=catalog.natural_key)


def _list_checkpoint(
    listing: _Listing, with_values: bool, with_pieces: bool, as_json: bool
) -> None:
    """Print a checkpoint.

    Raises:
        CorruptCheckpointError: After printing, if files are missing or have another size.
    """
    if as_json:
        output.print_json(_listing_document(listing, with_values, with_pieces))
    else:
        console = output.stdout_console()
        # What a pattern chose is shown; by default there may be too many.
        shows_values = with_values or bool(listing.patterns)
        _print_head(console, listing, shows_values)
        _print_tensors(console, listing, with_pieces)
        if shows_values:
            _print_values(console, "value", listing.values)
            _print_values(console, "object", listing.objects)
    if listing.findings:
        raise CorruptCheckpointError(
            f"{listing.path}: damaged: {catalog.describe_findings(listing.findings)}. "
            f"{repair_advice(listing.path)}"
        )


def _listing_document(listing: _Listing, with_values: bool, with_pieces: bool) -> dict[str, object]:
    index = listing.checkpoint.index
    tensors = []
    for name in listing.tensors:
        stored = index[name]
        entry: dict[str, object] = {
            "name": name,
            "tied_to": index.aliases.get(name),
            "dtype": stored.dtype,
            "shape": stored.shape,
            "num_pieces": stored.num_pieces,
            "num_bytes": stored.num_bytes,
        }
        if with_pieces:
            entry["pieces"] = [_piece_document(piece) for piece in index.pieces(name)]
        tensors.append(entry)

    def listed(values: Mapping[str, object]) -> list[dict[str, object]]:
        return [
            {"name": name, "type": output.type_name(value)}
            | ({"value": value} if with_values else {})
            for name, value in values.items()
        ]

    return {
        "kind": "checkpoint",
        "path": listing.path,
        "status": "damaged" if listing.findings else "committed",
        "damages": [asdict(finding) for finding in listing.findings],
        "format": listing.checkpoint.format,
        **_record_document(listing.checkpoint),
        "totals": listing.totals,
        "tensors": tensors,
        "values": listed(listing.values),
        "objects": listed(listing.objects),
    }


def _record_document(checkpoint: Checkpoint) -> dict[str, object]:
    """What the commit record says; nothing for other systems' checkpoints, which have none."""
    if checkpoint.format != native.FORMAT_NAME:
        return {}
    record = checkpoint.record
    return {
        "created": record.created,
        "world_size": record.world_size,
        "remesh_version": record.remesh_version,
        "format_version": record.version,
        "metadata": record.metadata,
    }


def _piece_document(piece: Piece) -> dict[str, object]:
    return {
        "offset": piece.box.offset,
        "shape": piece.box.shape,
        "file": piece.path,
        "start": piece.position,
        "num_bytes": piece.num_bytes,
    }


def _print_head(console: Console, listing: _Listing, shows_values: bool) -> None:
    """Where, when, by whom, and how much."""
    checkpoint, totals = listing.checkpoint, listing.totals
    tensors = output.plural(totals["num_tensors"], "tensor")
    pieces = output.plural(totals["num_pieces"], "piece")
    files = output.plural(totals["num_files"], "file")
    ties = f", {output.plural(totals['num_ties'], 'tie')}" if totals["num_ties"] else ""
    others = (
        f"{output.plural(totals['num_values'], 'value')}, "
        f"{output.plural(totals['num_objects'], 'object')}"
    )
    num_others = totals["num_values"] + totals["num_objects"]
    hint = " (--values lists them)" if num_others and not shows_values else ""
    size = output.format_bytes(totals["num_tensor_bytes"])
    facts = [
        _origin(checkpoint),
        ("tensors", f"{tensors} in {pieces}, {size}{ties}"),
        ("values", others + hint),
        ("files", f"{files} with tensors, {output.format_bytes(totals['num_file_bytes'])} in all"),
    ]
    if checkpoint.metadata:
        facts.append(("metadata", output.format_value_short(dict(checkpoint.metadata), 200)))
    console.out(output.printable(listing.path), style="bold", highlight=False)
    output.print_facts(console, facts)


def _origin(checkpoint: Checkpoint) -> tuple[str, str]:
    """Who saved it, as far as it says."""
    if checkpoint.format != native.FORMAT_NAME:
        return "format", f"{checkpoint.format}, without digests"
    record = checkpoint.record
    ranks = output.plural(record.world_size, "rank")
    version = f"remesh {record.remesh_version}, format {record.version}"
    return "saved", f"{output.format_time(record.created)} by {ranks}, {version}"


def _print_tensors(console: Console, listing: _Listing, with_pieces: bool) -> None:
    """The chosen tensors, a line each, with their pieces below."""
    if not listing.tensors:
        return
    index = listing.checkpoint.index
    rows = []
    for name in listing.tensors:
        stored, tied_to = index[name], index.aliases.get(name)
        shown = output.printable(name) + (f" -> {output.printable(tied_to)}" if tied_to else "")
        size = output.format_bytes(stored.num_bytes)
        shape = output.format_shape(stored.shape)
        rows.append((stored.dtype, shape, str(stored.num_pieces), size, shown))
    console.out("")
    columns = ("<dtype", "<shape", ">pieces", ">size", "<name")
    if not with_pieces:
        output.print_table(console, columns, rows)
        return
    titles, *lines = output.table_lines(columns, rows)
    console.out(titles, style="bold", highlight=False)
    shown_lines = []
    for name, line in zip(listing.tensors, lines, strict=True):
        shown_lines.append(line)
        if name not in index.aliases:
            shown_lines += _piece_lines(index.pieces(name), "    ")[1:]
    console.out("\n".join(shown_lines), highlight=False)


def _piece_lines(pieces: Sequence[Piece], indent: str) -> list[str]:
    """A line of titles and one for each piece."""
    rows = [
        (
            str(piece.box),
            output.format_bytes(piece.num_bytes),
            f"{piece.position}:{piece.position + piece.num_bytes}",
            output.printable(piece.path),
        )
        for piece in pieces
    ]
    return output.table_lines(("<box", ">size", "<bytes", "<file"), rows, indent)


def _print_values(console: Console, kind: str, values: Mapping[str, object]) -> None:
    if not values:
        return
    rows = [
        (output.type_name(value), output.printable(name), output.format_value_short(value))
        for name, value in values.items()
    ]
    console.out("")
    output.print_table(console, ("<type", f"<{kind}", "<content"), rows)


# ---------------------------------------------------------------------------------------------
# show
# ---------------------------------------------------------------------------------------------


@click.command(
    epilog=output.example("remesh show runs/step_00001000 model.embed.weight --box 0:10,5:7")
)
@click.argument("path")
@click.argument("name")
@click.option(
    "--box",
    "box_text",
    callback=parse_box,
    help="A region to look at, such as 0:10,5:7. A single number is one index, an empty side the "
    "end of the dim; dims that are not given are whole.",
)
@json_option
def show(*, path: str, name: str, box_text: BoxText | None, as_json: bool) -> None:
    """Show one tensor or value of a checkpoint.

    Of a tensor: type, shape, pieces, statistics and first elements; of a --box with up to 1000
    elements, all of them. Statistics are over the finite elements; std divides by their number.
    Complex tensors have none. The tensor is read in chunks, so it may be larger than memory.
    Of a tensor that is made of others, it shows their names and what they make.
    """
    checkpoint, looked = native.begin_anew(lambda: _open_and_look(path, name, box_text))
    if looked is not None:
        if as_json:
            output.print_json(_tensor_document(path, looked))
        else:
            _print_tensor(output.stdout_console(), looked)
        return
    values, objects = {**checkpoint.values, **checkpoint.lists}, checkpoint.objects
    if f"{name}.{TENSOR_RECORD}" in values:
        name = f"{name}.{TENSOR_RECORD}"
    if name not in values and name not in objects:
        raise StateError(places.no_such_name(path, name, [*checkpoint.index, *values, *objects]))
    if box_text is not None:
        raise StateError(f"{name} is not a tensor, so it has no --box")
    kind, value = ("value", values[name]) if name in values else ("object", objects[name])
    if as_json:
        shown = {"type": output.type_name(value), "value": value}
        output.print_json({"kind": kind, "path": shown_url(path), "name": name, **shown})
    else:
        output.stdout_console().out(output.format_value(value), highlight=False)


def _open_and_look(
    path: str, name: str, box_text: BoxText | None
) -> tuple[Checkpoint, _Looked | None]:
    """A checkpoint, and what is found in it if the name is that of a tensor."""
    checkpoint = Checkpoint(path)
    is_tensor = name in checkpoint.index
    return checkpoint, _look_at(checkpoint, name, box_text) if is_tensor else None


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    """A tensor, and what was found in a region of it; `statistics` is None if its type has none."""

    checkpoint: Checkpoint
    name: str
    box: Box
    statistics: summary.Statistics | None
    elements: summary.Array


def _look_at(checkpoint: Checkpoint, name: str, box_text: BoxText | None) -> _Looked:
    stored = checkpoint.tensor(name)
    box = Box.whole(stored.shape) if box_text is None else box_text.in_shape(name, stored.shape)
    statistics = None
    if summary.is_summarised(stored.dtype):
        num_bytes = stored.num_bytes // max(Box.whole(stored.shape).size, 1) * box.size
        with output.progress(name, num_bytes) as on_read:
            statistics = summary.statistics_of(checkpoint, name, box, on_read)
    whole_box = box_text is not None and box.size <= NUM_BOX_ELEMENTS
    count = NUM_BOX_ELEMENTS if whole_box else NUM_FIRST_ELEMENTS
    elements = summary.first_elements(checkpoint, name, box, count)
    return _Looked(checkpoint, name, box, statistics, elements)


def _tensor_document(path: str, looked: _Looked) -> dict[str, object]:
    index = looked.checkpoint.index
    stored = index[looked.name]
    return {
        "kind": "tensor",
        "path": shown_url(path),
        "name": looked.name,
        "tied_to": index.aliases.get(looked.name),
        "dtype": stored.dtype,
        "shape": stored.shape,
        "num_bytes": stored.num_bytes,
        "box": {"offset": looked.box.offset, "shape": looked.box.shape},
        "pieces": [_piece_document(piece) for piece in _pieces_in(looked)],
        "statistics": None if looked.statistics is None else asdict(looked.statistics),
        "elements": looked.elements,
    }


def _pieces_in(looked: _Looked) -> list[Piece]:
    """The pieces that hold something of the region."""
    pieces = looked.checkpoint.index.pieces(looked.name)
    if looked.box == Box.whole(looked.checkpoint.index[looked.name].shape):
        return pieces
    return [piece for piece in pieces if piece.box.intersect(looked.box) is not None]


def _print_tensor(console: Console, looked: _Looked) -> None:
    index, box = looked.checkpoint.index, looked.box
    stored, tied_to = index[looked.name], index.aliases.get(looked.name)
    facts = [
        ("dtype", stored.dtype),
        ("shape", output.format_shape(stored.shape)),
        ("size", output.format_bytes(stored.num_bytes)),
    ]
    if tied_to is not None:
        facts.append(("tied to", output.printable(tied_to)))
    if box != Box.whole(stored.shape):
        facts.append(("box", f"{box}, {output.plural(box.size, 'element')}"))
    console.out(output.printable(looked.name), style="bold", highlight=False)
    output.print_facts(console, facts)
    pieces = _pieces_in(looked)
    if pieces:
        console.out("")
        titles, *lines = _piece_lines(pieces, "  ")
        console.out(titles, style="bold", highlight=False)
        console.out("\n".join(lines), highlight=False)
    console.out("")
    if looked.statistics is None:
        reason = "only its bits are known" if BY_NAME[stored.dtype].is_opaque else "it has no order"
        console.out(f"  statistics of {stored.dtype} are not given: {reason}")
    else:
        output.print_facts(console, _statistics_facts(looked.statistics))
    _print_elements(console, looked)


def _statistics_facts(statistics: summary.Statistics) -> list[tuple[str, str]]:
    def shown(number: float | None, absent: str) -> str:
        if number is None:
            return absent
        return str(number) if isinstance(number, int) else f"{number:.6g}"

    none_finite = "- (no finite element)"
    absent = none_finite if statistics.minimum is None else "- (beyond float64)"
    return [
        ("min", shown(statistics.minimum, none_finite)),
        ("max", shown(statistics.maximum, none_finite)),
        ("mean", shown(statistics.mean, absent)),
        ("std", shown(statistics.std, absent)),
        ("zeros", f"{statistics.num_zero} of {statistics.num_elements}"),
        ("NaN", str(statistics.num_nan)),
        ("inf", str(statistics.num_inf)),
    ]


def _print_elements(console: Console, looked: _Looked) -> None:
    elements, box = looked.elements, looked.box
    if not elements.size:
        return
    if elements.size == box.size:
        title, shown = "elements", elements.reshape(box.shape)
    else:
        title, shown = f"first {elements.size} of {box.size} elements", elements
    text = np.array2string(shown, max_line_width=78, threshold=NUM_BOX_ELEMENTS + 1, precision=6)
    console.out(f"\n  {title}", style="bold", highlight=False)
    console.out("\n".join(f"  {line}" for line in text.splitlines()), highlight=False)


# ---------------------------------------------------------------------------------------------
# verify
# ---------------------------------------------------------------------------------------------


@click.command(epilog=output.example("remesh verify runs/step_00001000 runs/step_00002000"))
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@json_option
@click.pass_context
def verify(ctx: click.Context, *, paths: tuple[str, ...], as_json: bool) -> None:
    """Read everything and compare it with its digests.

    Lists all damage: file, range of bytes, and the tensors that lie there. The exit code is 1 if a
    checkpoint is damaged, else 2 if there is none at one of the PATHs or it cannot be read, else 0.
    """
    verdicts = []
    console = output.stdout_console()
    for path in paths:
        verdict = check(path)
        verdicts.append(verdict)
        if not as_json:
            _print_verdict(console, verdict)
    if as_json:
        output.print_json({"checkpoints": [asdict(verdict) for verdict in verdicts]})
    statuses = {verdict.status for verdict in verdicts}
    if "damaged" in statuses:
        ctx.exit(output.EXIT_DAMAGED)
    if statuses != {"sound"}:
        ctx.exit(output.EXIT_USAGE)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    path = output.printable(verdict.path)
    if verdict.status == "sound":
        files = output.plural(verdict.num_files, "file")
        size = output.format_bytes(verdict.num_bytes)
        # What cannot be compared is not called sound.
        word = "sound" if verdict.has_digests else "readable, no digests to compare with"
        console.out(f"{path}: {word}, {files} with tensors, {size}", highlight=False)
        if verdict.unchecked:
            names = output.printable(", ".join(verdict.unchecked))
            text = f"  repaired; no digest proves that these are what was saved: {names}"
            console.out(text, style="yellow", highlight=False)
        return
    if verdict.status != "damaged":
        output.print_error(verdict.error)
        return
    console.out(f"{path}: damaged", style="red", highlight=False)
    words = {"missing": "missing", "size": "wrong size", "content": "wrong bytes"}
    rows = [
        (
            words[finding.problem],
            f"{finding.start}:{finding.stop}",
            output.printable(finding.file),
            output.printable(", ".join(finding.tensors)) or "-",
        )
        for finding in verdict.damages
    ]
    if rows:
        output.print_table(console, ("<problem", "<bytes", "<file", "<tensors"), rows, "  ")
    texts = [f"incomplete: elements of {name} are stored nowhere" for name in verdict.incomplete]
    # An error may say the same.
    advice = "" if "remesh repair" in verdict.error else verdict.advice
    for text in [*texts, *filter(None, [verdict.error, advice])]:
        console.out(f"  {output.printable(text)}", highlight=False)
