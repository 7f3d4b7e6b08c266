"""The formats that remesh reads, and which of them is at a place.

A format is one module that can tell whether a place holds a checkpoint of it, and read what it
holds into `Contents`: an index of byte ranges in the files as they are, and a values document.
Everything above (loading into any layout, transformations, inspection) works on these alone. The
next format is one more module and one more row below.

A place is asked for the marks of every format. None, or several, is an error that says what was
looked for; a `Source` that names the format settles it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from remesh._repr import short_repr
from remesh.core.index import Index
from remesh.errors import CheckpointNotFoundError, RemeshError, StateError
from remesh.formats import (
    deepspeed,
    flat_param,
    huggingface,
    megatron_legacy,
    native,
    native_writer,
    paddle,
    safetensors,
    torch_dcp,
    torch_dcp_writer,
    torch_file,
    zarr,
)
from remesh.formats.contents import Contents, Place
from remesh.formats.exported import EXPORTS
from remesh.formats.framing import Writer
from remesh.storage import Storage, ask_together, open_storage


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to load, with its format or the classes that its pickles may import.

    Pass it instead of the path to `remesh.load` and `remesh.Checkpoint`.
    """

    path: Any
    """A path, URL or storage, as everywhere."""
    format: str | None = None
    """Name of the format, if the place could be read as several."""
    allow: tuple[str, ...] = ()
    """Qualified names (`package.module.Class`) that a pickle in the checkpoint may import and call.
    A person who can write such a checkpoint can then do with this process what these names can
    do."""

    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table."""

    name: str  # what a user calls it
    looks_for: str  # what marks a place that holds it, for messages
    recognise: Callable[[Place], bool]
    """Whether a directory has the mark; of a format that `is_file`, also whether a file has it."""
    read: Callable[[Place], Contents]  # reads what a place holds
    lists: bool = False
    """Whether recognising it takes a listing; then it is asked only if all others fail."""
    writers: tuple[Writer, ...] = ()
    """How it is written: one writer, or several where files for several systems are read alike;
    none if it is only read."""
    is_file: bool = False
    """Whether one file is a checkpoint, so that several can lie in one directory."""

    def is_at(self, place: Place) -> bool:
        """True if a place has the mark of this format."""
        return (self.is_file or not place.file) and self.recognise(place)


def _is_safetensors(place: Place) -> bool:
    """True if files are safetensors, and not those of a format that is more than these files."""
    if place.file:
        return place.file.endswith(safetensors.SUFFIX)
    is_other = huggingface.recognise(place)
    return not is_other and safetensors.recognise(paddle.other_files(place.listing))


FORMATS: tuple[Format, ...] = (
    Format(
        native.FORMAT_NAME,
        f"{native.RECORD_NAME} (remesh)",
        lambda place: place.storage.exists(native.RECORD_NAME),
        lambda place: _native_contents(place.storage, native.read_small_files(place.storage)),
        writers=(native_writer.NATIVE,),
    ),
    Format(
        torch_dcp.NAME,
        torch_dcp.LOOKS_FOR,
        torch_dcp.recognise,
        torch_dcp.read,
        writers=(torch_dcp_writer.TORCH_DCP, torch_dcp_writer.TORCH_DIST),
    ),
    Format(zarr.NAME, zarr.LOOKS_FOR, zarr.recognise, zarr.read, writers=(zarr.ZARR,)),
    Format(
        huggingface.NAME,
        huggingface.LOOKS_FOR,
        huggingface.recognise,
        huggingface.read,
        lists=True,
        writers=(huggingface.HUGGINGFACE,),
    ),
    Format(
        safetensors.NAME,
        safetensors.LOOKS_FOR,
        _is_safetensors,
        safetensors.read,
        lists=True,
        writers=(huggingface.SAFETENSORS,),
        is_file=True,
    ),
    Format(
        torch_file.NAME,
        torch_file.LOOKS_FOR,
        torch_file.recognise,
        torch_file.read,
        lists=True,
        writers=(torch_file.TORCH_FILE,),
        is_file=True,
    ),
    Format(
        paddle.NAME,
        paddle.LOOKS_FOR,
        paddle.recognise,
        paddle.read,
        lists=True,
        writers=(paddle.PADDLE_SAFETENSORS,),
    ),
    Format(
        flat_param.NAME, flat_param.LOOKS_FOR, flat_param.recognise, flat_param.read, lists=True
    ),
    Format(deepspeed.NAME, deepspeed.LOOKS_FOR, deepspeed.recognise, deepspeed.read, lists=True),
    Format(
        megatron_legacy.NAME,
        megatron_legacy.LOOKS_FOR,
        megatron_legacy.recognise,
        megatron_legacy.read,
        lists=True,
    ),
)


WRITERS: Mapping[str, Writer] = {writer.name: writer for row in FORMATS for writer in row.writers}
"""How each format is written that can be, by name."""


def writer_of(name: str) -> Writer:
    """The writer of a format."""
    if name in EXPORTS:
        return EXPORTS[name]
    if name not in WRITERS:
        what = "is only read" if any(name == row.name for row in FORMATS) else "is not known"
        raise StateError(f"format {name!r} {what}; formats to write: {', '.join(WRITERS)}")
    return WRITERS[name]


_SINGLE_FILES = (*torch_file.SUFFIXES, safetensors.SUFFIX)
"""How the names of files end that are a checkpoint by themselves."""


def place_of(source: Any) -> Place:
    """Open what a caller named: a path, a URL, a storage or a `Source`."""
    if isinstance(source, Source):
        place = place_of(source.path)
        names = [row.name for row in FORMATS]
        if source.format is not None and source.format not in names:
            raise StateError(f"no format {source.format!r}; known are {', '.join(names)}")
        return Place(place.storage, source.format, tuple(source.allow), place.file)
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        folder, _, name = text.rpartition("/")
        folder = folder or ("/" if text.startswith("/") else ".")
        if name.endswith(_SINGLE_FILES) and not os.path.isdir(text):
            return Place(open_storage(folder), file=name)
        if paddle.METADATA_NAME.fullmatch(name):
            return Place(open_storage(folder), format=paddle.NAME, file=name)
    return Place(open_storage(source))


def formats_at(place: Place) -> list[Format]:
    """The formats whose marks are at a place; a listing is made only if no file is a mark."""
    return marked_formats(place) or listed_formats(place)


def marked_formats(place: Place) -> list[Format]:
    """The formats at a place that a file marks; nothing is listed."""
    marked = [row for row in FORMATS if not row.lists]
    answers = ask_together(place.storage, [partial(row.is_at, place) for row in marked])
    return [row for row, is_there in zip(marked, answers, strict=True) if is_there]


def listed_formats(place: Place) -> list[Format]:
    """The formats at a place that a listing shows."""
    return [row for row in FORMATS if row.lists and row.is_at(place)]


def format_at(place: Place) -> Format:
    """The format of what is at a place."""
    if place.format is not None:
        return next(row for row in FORMATS if row.name == place.format)
    found = formats_at(place)
    if not found:
        looked = "; ".join(row.looks_for for row in FORMATS)
        raise CheckpointNotFoundError(
            f"{place.storage.url}: no checkpoint there. Looked for: {looked}."
        )
    if len(found) > 1:
        marks = " and ".join(row.looks_for for row in found)
        raise StateError(
            f"{place.storage.url}: holds {marks}\nSay which to read, "
            f"{' or '.join(row.name for row in found)}: --format (of `remesh convert`: "
            "--source-format), or remesh.formats.Source(path, format=...)"
        )
    return found[0]


def read_contents(place: Place) -> Contents:
    """Read what a place holds, in whatever format; tensors stay where they are."""
    row, files = _opened(place)
    return row.read(place) if files is None else _native_contents(place.storage, files)


def _native_contents(storage: Storage, files: native.NativeFiles) -> Contents:
    record, where = files.record, storage.url
    return Contents(
        native.FORMAT_NAME,
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
