"""Paths and transformations that users give to commands."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from remesh import catalog
from remesh._repr import format_bytes
from remesh.checkpoint import Checkpoint
from remesh.core.index import Index
from remesh.core.integrity import Finding
from remesh.errors import StateError
from remesh.formats import native
from remesh.formats.table import FORMATS, formats_at, place_of
from remesh.storage import open_storage, shown_url
from remesh.transform import Transform

_Command = TypeVar("_Command", bound=Callable[..., Any])


def transform_option(what: str) -> Callable[[_Command], _Command]:
    """The option, with what its help begins with."""
    return click.option(
        "--transform",
        metavar="FILE|TEXT",
        callback=lambda _ctx, _parameter, text: None if text is None else read_transform(text),
        help=f"{what}: statements (docs/transform.md); or, in JSON, old names or prefixes to new "
        "ones or null.",
    )


def read_transform(text: str) -> Transform:
    """The transformation in a text, or in the file that it names."""
    where, is_renames = "--transform", text.lstrip().startswith("{")
    if not is_renames and "->" not in text:
        where, is_renames = text, text.endswith(".json")
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise StateError(
                f"{where}: no statement such as 'a -> b', no renames such as "
                f'\'{{"model.": ""}}\'\nThere is no file with them: {error}'
            ) from error
    return Transform(json_object(text, where) if is_renames else text)


def json_object(text: str | bytes, where: str) -> Mapping[str, object]:
    """The object in a text of JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise StateError(f"{where}: must hold a JSON object, not {type(found).__name__}")
    return found


_FORMAT = f"{__name__}.format"


def _keep(ctx: click.Context, _parameter: click.Parameter, name: str | None) -> None:
    ctx.meta[_FORMAT] = name


def format_option(flag: str = "--format") -> Callable[[_Command], _Command]:
    """The option of commands that read checkpoints; `format_of` takes what it says."""
    return click.option(
        flag,
        type=click.Choice([row.name for row in FORMATS]),
        metavar="NAME",
        callback=_keep,
        expose_value=False,
        help="Which to read where a path holds checkpoints of several formats.",
    )


def format_of(path: str) -> str | None:
    """The format that the user named, if a path holds checkpoints of several."""
    command = click.get_current_context(silent=True)
    name = None if command is None else command.meta.get(_FORMAT)
    return None if name is None or len(formats_at(place_of(path))) < 2 else name


def open_checkpoint(path: str) -> Checkpoint:
    """Open the checkpoint at a path, anew if it is replaced meanwhile."""
    return native.retry_if_replaced(lambda: Checkpoint(path, format=format_of(path)))


def is_checkpoint(path: str) -> bool:
    """True if a path holds one checkpoint; errors are those of `catalog.is_checkpoint`."""
    return catalog.is_checkpoint(place_of(path, format_of(path)))


def record_of(checkpoint: Checkpoint) -> native.CommitRecord | None:
    """The commit record; checkpoints of other systems have none."""
    return checkpoint.record if checkpoint.format == native.FORMAT_NAME else None


def findings_of(path: str, checkpoint: Checkpoint) -> list[Finding]:
    """Files that are missing or have another size; other systems record no sizes."""
    known = record_of(checkpoint)
    if known is None:
        return []
    storage = open_storage(path)
    record, findings = catalog.read_record_and_sizes(storage)
    if record != known:
        native.check_current(storage, native.identity_of(known))
    return findings


def num_file_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all files that a checkpoint is known to have."""
    record = record_of(checkpoint)
    files = checkpoint.index.files if record is None else catalog.files_of(record)
    return sum(file.num_bytes for file in files)


def shown_compression(index: Index) -> str:
    """The compression of the files of tensors, to stand after their size; mostly nothing."""
    if not index.is_compressed:
        return ""
    content = sum(file.num_bytes for file in index.files)
    share = sum(index.stored_sizes) / max(content, 1)
    return f", compressed to {100 * share:.0f} % of {format_bytes(content)}"


def no_such_name(path: str, name: str, names: Sequence[str]) -> str:
    """The error about a name under which nothing is stored."""
    near = difflib.get_close_matches(name, names, n=3)
    hint = (
        f"near are {', '.join(near)}"
        if near
        else f"remesh ls {shown_url(path)} --values lists the names"
    )
    return f"{name}: nothing is stored under this name; {hint}"
