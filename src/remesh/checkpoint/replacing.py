"""What is where a checkpoint is to be saved: nothing, or a checkpoint that the save would replace.

A checkpoint of another format counts, too: the new one would hide it, or make it unclear which of
the two is to be read. With `overwrite` it is replaced like one of the same format: when the new one
is committed, its files are removed, the one that makes it exist first. Only what lies directly in
the directory is looked at, so that no tree is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from remesh.errors import CheckpointError, CheckpointExistsError, StateError
from remesh.formats.place import Place
from remesh.formats.table import Format, listed_formats, marked_formats, writer_of
from remesh.formats.writer import Existing, Writer
from remesh.storage import Storage, ask_together


def existing_checkpoint(
    storage: Storage, format_name: str, options: Mapping[str, object], *, overwrite: bool
) -> Existing | None:
    """The checkpoint that a save replaces, if there is one.

    If it is not to be overwritten, that is a CheckpointExistsError; if it cannot be, a StateError.
    """
    writer = writer_of(format_name)
    rows, found = _look(storage, writer, options)
    for row in rows:
        if writer not in row.writers:
            other = _of_another(storage, row, format_name, overwrite=overwrite)
            if other is not None:
                return other
    if isinstance(found, CheckpointError):
        # A damaged record is replaced like any other, but what it refers to is unknown.
        if not overwrite:
            raise found
        return None
    if found is not None and not overwrite:
        raise CheckpointExistsError(
            f"{storage.url}: there is a checkpoint already ({found.what})\nSave to another path, "
            "or replace it with overwrite=True (on the command line --overwrite)."
        )
    return found


def _look(
    storage: Storage, writer: Writer, options: Mapping[str, object]
) -> tuple[Sequence[Format], Existing | CheckpointError | None]:
    """The formats of what is there, and the checkpoint that the writer replaces, or its damage.

    A far storage is asked for everything at the same time.
    """

    def look() -> Existing | CheckpointError | None:
        try:
            return writer.existing(storage, options)
        except CheckpointError as error:
            return error

    if writer.is_beside_others:
        return (), look()
    marks = partial(marked_formats, Place(storage))
    questions: list[Callable[[], Any]] = [storage.list_directory, marks, look]
    listing, rows, same = ask_together(storage, questions)
    files = {name: facts.num_bytes for name, facts in listing.files.items()}
    return rows or listed_formats(Place(storage, known=files)), same


def _of_another(
    storage: Storage, row: Format, format_name: str, *, overwrite: bool
) -> Existing | None:
    """The checkpoint of another format that a save replaces; None if both can be there."""
    found = None
    for writer in row.writers:
        try:
            found = found or writer.existing(storage, {})
        except CheckpointError:
            found = Existing(row.marker)  # its files are not known
    if found is None and row.writers and row.files is not None:
        return None
    if not overwrite:
        raise CheckpointExistsError(
            f"{storage.url}: there is a checkpoint of another format already, {row.name!r}\nSave "
            f"the {format_name!r} checkpoint to another path, or replace what is there with "
            "overwrite=True (on the command line --overwrite)."
        )
    if found is None or not (found.save_id or found.paths):
        raise StateError(
            f"{storage.url}: the {row.name!r} checkpoint there cannot be replaced by one of "
            f"{format_name!r}\n"
            "Which files belong to it is not known; move it away, or save to another path"
        )
    return found
