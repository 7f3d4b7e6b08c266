"""What commands say and do about paths that users give."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from remesh import catalog
from remesh.catalog import Finding
from remesh.checkpoint import Checkpoint
from remesh.formats import native
from remesh.formats.table import place_of
from remesh.storage import Storage, shown_url


def is_checkpoint(path: str) -> bool:
    """Whether a path holds one checkpoint; errors are those of `catalog.is_checkpoint`."""
    return catalog.is_checkpoint(place_of(path))


def findings_of(storage: Storage, checkpoint: Checkpoint) -> list[Finding]:
    """Files that are missing or have another size; other systems record no sizes."""
    is_native = checkpoint.format == native.FORMAT_NAME
    return catalog.check_sizes(storage, checkpoint.record) if is_native else []


def num_file_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all files that a checkpoint is known to have."""
    if checkpoint.format != native.FORMAT_NAME:
        return sum(file.num_bytes for file in checkpoint.index.files)
    return sum(file.num_bytes for file in catalog.files_of(checkpoint.record))


def no_such_name(path: str, name: str, names: Sequence[str]) -> str:
    """What to say about a name under which nothing is stored."""
    near = difflib.get_close_matches(name, names, n=3)
    hint = (
        f"near are {', '.join(near)}"
        if near
        else f"remesh ls {shown_url(path)} --values lists the names"
    )
    return f"{name}: nothing is stored under this name; {hint}"
