"""The formats that remesh reads, and which of them is at a place.

A format is one module: `NAME` is what a user calls it, `MARKER` says in messages what marks a
place that holds it, `is_at(place)` looks for the mark in a folder, and `read(place, builder)` adds
what the place holds to an `IndexBuilder`, in any order and unchecked. `Format` has what a module
may say besides. The index is built and checked here, the same way for all; everything above
(loading into any layout, transformations, inspection) works on it alone. Another package brings a
format by an entry point of the group `remesh.formats`.

A place is asked for the marks of every format. None, or several, is an error that says what was
looked for; a caller that names the format settles it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from remesh.core.index import Index
from remesh.errors import CheckpointNotFoundError, RemeshError, StateError
from remesh.formats import (
    deepspeed,
    flat_param,
    huggingface,
    native,
    native_writer,
    paddle,
    safetensors,
    torch_dcp,
    torch_file,
    zarr,
)
from remesh.formats.building import IndexBuilder
from remesh.formats.place import Place
from remesh.formats.writer import Writer
from remesh.storage import ask_together, open_storage


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """A checkpoint whose tensors have not been read yet."""

    format: str  # name of its format
    index: Index  # its tensors
    document: native.ValuesDocument  # everything else
    record: native.CommitRecord | None = None
    """Its commit record, which remesh's own format alone has."""


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table: what a module says of its format."""

    name: str  # what a user calls it
    marker: str  # what marks a place that holds it, for messages
    module: ModuleType  # defines `is_at` and, but for `native`, `read`
    needs_listing: bool
    """Whether recognising it takes a listing; then it is asked only if all others fail."""
    files: re.Pattern[str] | None
    """Names of files that are a checkpoint by themselves, so that one folder holds several."""
    writers: tuple[Writer, ...]
    """How it is written: one writer, or several where files for several systems are read alike;
    none if it is only read."""

    @classmethod
    def of(cls, module: ModuleType, writer: ModuleType | None = None) -> Format:
        """The row of a module; its `WRITERS` may be in another one."""
        said, writers = vars(module), vars(writer or module).get("WRITERS", ())
        needs_listing, files = said.get("NEEDS_LISTING", True), said.get("FILES")
        return cls(said["NAME"], said["MARKER"], module, needs_listing, files, writers)

    def is_at(self, place: Place) -> bool:
        """True if a place has the mark of this format."""
        if place.file:
            return self.files is not None and self.files.fullmatch(place.file) is not None
        return self.module.is_at(place)  # type: ignore[no-any-return]

    def read(self, place: Place) -> Contents:
        """Read what a place holds; its tensors stay where they are."""
        builder = IndexBuilder(place)
        self.module.read(place, builder)
        return Contents(self.name, builder.build(), builder.document)


ENTRY_POINTS = "remesh.formats"
"""Group of the entry points by which other packages bring formats: each names a module."""

FORMATS: tuple[Format, ...] = (
    Format.of(native, native_writer),
    *map(Format.of, (torch_dcp, zarr, huggingface, safetensors, torch_file, paddle)),
    *map(Format.of, (flat_param, deepspeed)),
    *(Format.of(point.load()) for point in entry_points(group=ENTRY_POINTS)),
)


def _by_name(writers: Iterable[Writer]) -> dict[str, Writer]:
    """Writers by name; one that comes later replaces none."""
    found: dict[str, Writer] = {}
    for writer in writers:
        found.setdefault(writer.name, writer)
    return found


WRITERS: Mapping[str, Writer] = _by_name(writer for row in FORMATS for writer in row.writers)
"""How each format is written that can be, by name."""


def writer_of(name: object, *, exports: bool = True) -> Writer:
    """The writer of a format, or of an export."""
    known = _by_name([*WRITERS.values(), *huggingface.EXPORTS]) if exports else WRITERS
    found = known.get(name) if isinstance(name, str) else None
    if found is None:
        what = "is only read" if any(name == row.name for row in FORMATS) else "is not known"
        raise StateError(f"format {name!r} {what}; formats to write: {', '.join(WRITERS)}")
    return found


def place_of(source: Any, name: str | None = None, allow: Iterable[str] = ()) -> Place:
    """Open a path, a URL or a storage; of a place that has been opened the format may be named.

    Args:
        source: What a caller named.
        name: Name of the format that is read or written, if the place could be read as several.
        allow: See `Place`.
    """
    known = None if name is None else _read_as(name).name
    if isinstance(source, Place):
        return source if known is None else replace(source, format=known)
    storage, file = source, ""
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        folder, _, last = text.rpartition("/")
        is_file = any(one.files is not None and one.files.fullmatch(last) for one in FORMATS)
        if is_file and not os.path.isdir(text):
            storage, file = folder or ("/" if text.startswith("/") else "."), last
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    return Place(open_storage(storage), known, allowed, file)


def _read_as(name: str) -> Format:
    """The format of a name; that of a writer is the one that reads what it has written."""
    for row in FORMATS:
        if name == row.name or any(name == writer.name for writer in row.writers):
            return row
    raise StateError(f"no format {name!r}; known are {', '.join(row.name for row in FORMATS)}")


def formats_at(place: Place) -> list[Format]:
    """The formats whose marks are at a place; a listing is made only if no file is a mark."""
    return marked_formats(place) or listed_formats(place)


def marked_formats(place: Place) -> list[Format]:
    """The formats at a place that a file marks; nothing is listed."""
    marked = [row for row in FORMATS if not row.needs_listing]
    answers = ask_together(place.storage, [partial(row.is_at, place) for row in marked])
    return [row for row, is_there in zip(marked, answers, strict=True) if is_there]


def listed_formats(place: Place) -> list[Format]:
    """The formats at a place that a listing shows."""
    return [row for row in FORMATS if row.needs_listing and row.is_at(place)]


def format_at(place: Place) -> Format:
    """The format of what is at a place."""
    if place.format is not None:
        return next(row for row in FORMATS if row.name == place.format)
    found = formats_at(place)
    if not found:
        looked = "; ".join(row.marker for row in FORMATS)
        raise CheckpointNotFoundError(
            f"{place.storage.url}: no checkpoint there. Looked for: {looked}."
        )
    if len(found) > 1:
        marks = " and ".join(row.marker for row in found)
        raise StateError(
            f"{place.storage.url}: holds {marks}\nSay which to read, "
            f"{' or '.join(row.name for row in found)}: format=..., or --format; for a "
            "conversion source_format=..., or --source-format"
        )
    return found[0]


def read_contents(place: Place) -> Contents:
    """Read what a place holds, in whatever format; tensors stay where they are."""
    row, files = _opened(place)
    if files is None:
        return row.read(place)
    record, where = files.record, place.storage.url
    return Contents(
        row.name,
        Index.decode(files.index_bytes, f"{where}/{record.index.path}"),
        native.ValuesDocument.decode(files.values_bytes, f"{where}/{record.values.path}"),
        record,
    )


def _opened(place: Place) -> tuple[Format, native.NativeFiles | None]:
    """The format at a place, and native small files; a far storage is asked for both at once."""
    storage, rows, files = place.storage, list[Format](), list[native.NativeFiles]()

    def read_native() -> None:
        if place.file or place.format not in {None, native.FORMAT_NAME}:
            return
        with suppress(RemeshError):  # read again below, if there is any
            files.append(native.read_small_files(storage))

    questions = [lambda: rows.append(format_at(place))]
    ask_together(storage, [*questions, read_native] if storage.is_remote else questions)
    if rows[0].name != native.FORMAT_NAME:
        return rows[0], None
    return rows[0], files[0] if files else native.read_small_files(storage)


def read_encoded(place: Place) -> tuple[bytes, bytes, str]:
    """Index, values and identity ("" if there is no commit record) of a place, to be sent."""
    row, files = _opened(place)
    if files is not None:
        return files.index_bytes, files.values_bytes, native.identity_of(files.record)
    contents = row.read(place)
    return contents.index.encode(), contents.document.encode(), ""
