"""Converting a checkpoint of any readable format to any format that can be written.

A conversion is a save whose tensors lie in another checkpoint: each is a memory that reads boxes of
it (`remesh.pipeline.source`), and everything else is what that checkpoint says. So plans, files,
commit and errors are those of a save, tensors pass through a few buffers of some MiB, and digests
of the source are checked while it is read. A conversion that is cut short leaves no checkpoint.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from remesh._repr import listed, short_repr
from remesh.checkpoint.agree import SaveOptions
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.opened import Checkpoint, VerifyReport, open_source
from remesh.checkpoint.saving import save_agreed
from remesh.checkpoint.transformed import renamed_lists, renamed_path, renamed_sequences
from remesh.core import values
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box
from remesh.core.sharded import ArrayLike, Part, ShardedObject
from remesh.core.state import Description, Path, Role, TensorEntry, whole_sequences
from remesh.errors import CorruptCheckpointError, StateError
from remesh.events import OnEvent, ignore
from remesh.exchange import Alone, Exchange, run_each, run_on_one
from remesh.formats import native
from remesh.formats.table import Contents, place_of, writer_of
from remesh.formats.writer import Writer
from remesh.pipeline import Compress
from remesh.pipeline.source import StoredMemory, TensorSource, converted
from remesh.storage import Storage, open_storage
from remesh.transform import Program, Resolved, Transform, arranged, as_transform, infos_of
from remesh.transform.tensor_info import Described

MAX_COMPARED = 64 << 20
"""Bytes of a tensor that are compared with another one: it is read whole for that."""

_log = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The result of a conversion."""

    source_format: str
    """Name of the format of the source."""
    format: str
    """Name of the format that was written."""
    num_tensors: int
    """Tensors that were written; tied ones count once."""
    num_values: int
    """Plain values, lists and elements of sharded objects."""
    num_bytes: int
    """Bytes of the tensors."""
    verified: VerifyReport
    """What reading the new checkpoint again has found."""
    unchecked: tuple[str, ...]
    """Names in the new checkpoint of what a repair had put into the source without a digest that
    proves it, or is made of that. Only remesh's own format marks them."""
    seconds: float
    """Wall time."""

    __repr__ = short_repr


def convert(  # noqa: PLR0913 - each option stands for itself
    source: Any,
    path: Any,
    *,
    format: str,  # noqa: A002 - as in `save`
    source_format: str | None = None,
    allow: Sequence[str] = (),
    transform: Transform | Program | None = None,
    only: str | Sequence[str] = "*",
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
    format_options: Mapping[str, object] | None = None,
    compress: Compress | None = None,
    group: Any = None,
    on_event: OnEvent = ignore,
) -> ConversionReport:
    """Write a checkpoint in another format. One process converts, or all of a group.

    Tensors are read and written a few MiB at a time. All other entries of the checkpoint are
    copied unchanged, if the format takes them. The new checkpoint is committed last, then read once
    more and compared with its digests, if its format has any. A conversion that is killed leaves
    what a killed `remesh.save` leaves: no checkpoint.

    Args:
        source: The checkpoint to convert: a path, URL or storage.
        path: Directory of the new checkpoint; it need not exist.
        format: As of `remesh.save`.
        source_format: That of the source, as `format` of `remesh.load`.
        allow: As of `remesh.load`.
        transform: What becomes of the tensors and the names: a `Transform`, or what makes one.
        only: Which stored names take part, as patterns of a shell; others are left out.
        overwrite: Replace a checkpoint of the format that is there.
        metadata: As of `remesh.save`. None for that of the source, if both are of remesh.
        format_options: As of `remesh.save`.
        compress: As of `remesh.save`.
        group: A torch process group or an `Exchange` whose ranks share the work; all of them call
            it. None for this process alone.
        on_event: Called at the points in `remesh.events.SAVE_POINTS`.

    Raises:
        CheckpointNotFoundError: If there is no checkpoint at the source.
        StateError: If the format does not take what the checkpoint holds, a value of it cannot be
            read, or source and destination are one place.
        TransformError: If the transformation does not fit.
        CheckpointExistsError: If there is a checkpoint and `overwrite` is false.
        CorruptCheckpointError: If the source is damaged, or the new checkpoint is not what was
            written.
        CoverageError: If a part of a tensor is stored nowhere in the source.
        NoSpaceError: If there is too little room.
        StorageError: If a storage fails.
    """
    started = time.monotonic()
    writer, program = writer_of(format, exports=False), as_transform(transform)
    target = open_storage(path)
    exchange = Alone() if group is None else exchange_of(group)

    def describe() -> tuple[Contents, Description]:
        contents, stored, url = open_source(place_of(source, source_format, allow))
        contents = _chosen(contents, only)
        if url == target.url:
            raise StateError(f"{url}: source and destination are one place; convert to another")
        resolved = None if program is None else _resolve(contents, program)
        stored = dataclasses.replace(stored, index=contents.index, resolved=resolved)
        owners = None if program is None else program.owners
        description = describe_stored(contents, stored, owners)
        if format != native.FORMAT_NAME:
            _import_torch_for(description)
            _warn_of_unchecked(description, url, format)
        return contents, description

    contents, description = run_each(exchange, describe)
    if metadata is None and contents.record is not None and format == native.FORMAT_NAME:
        metadata = contents.record.metadata
    num_values = len(description.values) + len(description.merged_lists) + len(description.objects)
    options = SaveOptions(
        overwrite=overwrite,
        metadata=metadata or {},
        # All ranks have equal copies of everything, so a plan shares the work; none is compared.
        compares="sampled",
        format=format,
        format_options=format_options or {},
        compress=compress,
    )
    save_agreed(description, target, options, group=exchange, on_event=on_event, is_shown=True)
    num_tensors, num_bytes, verified = _read_again(target, writer, exchange)
    return ConversionReport(
        contents.format,
        format,
        num_tensors,
        num_values,
        num_bytes,
        verified,
        tuple(description.unchecked),
        time.monotonic() - started,
    )


def _read_again(
    target: Storage, writer: Writer, exchange: Exchange
) -> tuple[int, int, VerifyReport]:
    """Read a new checkpoint again on rank 0: its tensors, their bytes, and what was found."""

    def read() -> bytes:
        written = Checkpoint(target, format=writer.name)
        report, index = written.verify(), written.index
        if not report.ok:
            raise CorruptCheckpointError(
                f"{written}: what was read again is not what was written; remesh verify lists the "
                "damage\nThe source is as it was: convert it again, or to another disk."
            )
        num_bytes = sum(index[name].num_bytes for name in index)
        return msgspec.json.encode((len(index.tensors), num_bytes, report))

    return msgspec.json.decode(run_on_one(exchange, read), type=tuple[int, int, VerifyReport])


def _refuse_unread(description: Description) -> None:
    """Refuse what the reader of the source did not read, since its content would be lost."""
    plain = description.values | {one.unique_name: one.data for one in description.objects}
    unread = {name: one for name, value in plain.items() for one in islice(values.unread(value), 1)}
    if unread:
        first = min(unread)
        raise StateError(
            f"{first}: was not read, so it cannot be converted\n{unread[first].payload}\n"
            f"Not read: {listed(sorted(unread))}\n"
            f'To leave it out, delete it in the transformation: "{first}" -> _'
        )


def _warn_of_unchecked(description: Description, url: str, format_name: str) -> None:
    """Warn that a format has no mark for what a repair has taken over without a digest."""
    if description.unchecked:
        _log.warning(
            "%s: no digest proves %s\nA repair has taken over that, and the format %r has no mark "
            "for it; convert to 'remesh' to keep it",
            url,
            listed(description.unchecked),
            format_name,
        )


def _chosen(contents: Contents, only: str | Sequence[str]) -> Contents:
    """The stored entries under names that one of some patterns fits."""
    patterns = [only] if isinstance(only, str) else list(only)
    if "*" in patterns:
        return contents
    if not patterns:
        raise StateError("only= names nothing to convert; leave it away to convert everything")
    index, document = contents.index, contents.document
    names = [*index, *document.values, *document.lists, *document.objects]
    known, chosen = set(names), set[str]()
    for pattern in patterns:
        found = [pattern] if pattern in known else fnmatch.filter(names, pattern)
        if not found:
            raise StateError(f"no stored name fits {pattern!r}; remesh ls lists the names")
        chosen.update(found)
    for name in sorted(chosen & index.aliases.keys()):
        if index.aliases[name] not in chosen:
            raise StateError(
                f"{name}: is tied to {index.aliases[name]}, which is not chosen\n"
                "Choose both names, or the other one"
            )
    sequences = whole_sequences(
        {tuple(path): kind for path, kind in document.sequences},
        [document.path_of(name) for name in chosen],
        [document.path_of(name) for name in known - chosen],
    )
    own = replace(
        document,
        sequences=[(list(path), kind) for path, kind in sequences.items()],
        values={name: value for name, value in document.values.items() if name in chosen},
        lists={name: names for name, names in document.lists.items() if name in chosen},
        objects={name: one for name, one in document.objects.items() if name in chosen},
    )
    left = index.without(lambda name: name not in chosen)
    return dataclasses.replace(contents, index=left, document=own)


def _import_torch_for(description: Description) -> None:
    """Import torch, if it is installed, to store values of its types in another system's format."""
    plain = [*description.values.values(), *(element.data for element in description.objects)]
    kinds = {one.type_name for value in plain for one in values.unresolved(value)}
    if any(kind.startswith("torch.") for kind in kinds):
        with suppress(ModuleNotFoundError):  # the writer says what it cannot store
            importlib.import_module("torch")


def _resolve(contents: Contents, program: Transform) -> Resolved:
    """The transformation of what is stored; names of values and lists take part."""
    document = contents.document
    others = dict.fromkeys([*document.values, *document.lists, *document.objects])
    index = contents.index
    resolved = program.resolve({**infos_of(index), **others}, aliases=index.aliases)
    resolved.check()
    if resolved.kept:
        raise StateError(
            f"{min(resolved.kept)}: keeps its initial value, and a conversion has none; leave the "
            "statement out"
        )
    if resolved.unused:
        text = "the transformation leaves out %s\nTo keep what it replaces, rename that as well"
        _log.warning(text, listed(resolved.unused))
    return resolved


def describe_stored(
    contents: Contents, source: TensorSource, owners: Mapping[str, str] | None = None
) -> Description:
    """All that a checkpoint holds, described as a state whose tensors are read from `source`."""
    index, document, resolved = contents.index, contents.document, source.resolved
    description = Description()
    if resolved is None:
        tensors: Mapping[str, Described] = dict(index)
        plain = {name: name for name in (*document.values, *document.lists, *document.objects)}
    else:
        tensors = {name: info for name, info in resolved.targets.items() if info is not None}
        plain = {n: _source_of_value(resolved, n) for n in resolved.targets if n not in tensors}
        _check_equal(source, resolved)
        lists = {name: document.lists[old] for name, old in plain.items() if old in document.lists}
        if lists and {n: resolved.sources_of(n) for n in tensors} != {n: (n,) for n in index}:
            description.merged_lists = renamed_lists(lists, index, resolved, owners or {})
    # Those that others are tied to come first, so that they keep the tensor.
    for name in sorted(tensors, key=lambda name: name in index.aliases):
        dtype, shape = tensors[name].dtype, tensors[name].shape
        key = None
        if resolved is None or resolved.is_whole(name):
            copied = name if resolved is None else resolved.sources_of(name)[0]
            key = index.aliases.get(copied, copied)
        memory = cast("ArrayLike", StoredMemory(source, name, dtype, Box.whole(shape)))
        parts = (Part(Box.whole(shape), memory),)
        description.tensors.append(
            TensorEntry(name, dtype, shape, parts, Role.EQUAL, alias_key=key)
        )
    for name, old in plain.items():
        if name not in description.merged_lists:
            _add_plain(description, document, name, old)
    _refuse_unread(description)
    unchecked = {*document.unchecked_names}
    moved: dict[Path, Path] = {}
    for name in (*tensors, *plain):
        made_of = (name,) if resolved is None else resolved.sources_of(name)
        if not unchecked.isdisjoint(made_of):
            description.unchecked.append(name)
        at = document.path_of(made_of[0])
        moved[at] = description.paths[name] = at if name == made_of[0] else renamed_path(name, at)
    sequences = [(tuple(at), kind) for at, kind in document.sequences]
    description.sequences = renamed_sequences(moved, sequences)
    return description


def _source_of_value(resolved: Resolved, name: str) -> str:
    """The name under which a plain value of the new checkpoint is stored in the source."""
    sources = resolved.sources_of(name)
    if len(sources) != 1:
        raise StateError(
            f"{name}: a plain value that is to be that of {', '.join(sources)}\nName one of them, "
            "and delete the others with '-> _'"
        )
    return sources[0]


def _check_equal(source: TensorSource, resolved: Resolved) -> None:
    """Compare what a transformation takes of one source with others that must hold the same."""
    for name, info in resolved.targets.items():
        for check in () if info is None else resolved.checks(name):
            itemsize = BY_NAME[source.index[check.source].dtype].itemsize
            if check.source_box.size * itemsize > MAX_COMPARED:
                raise StateError(
                    f"{name}: {check.source!r} would have to hold the same values, which a "
                    "conversion does not compare\nDelete it with '-> _'"
                )
            as_stored = dataclasses.replace(source, resolved=None)
            [taken] = source.read([(name, check.target_box)])
            [read] = as_stored.read([(check.source, check.source_box)])
            other = converted(arranged(read, check), source.index[check.source].dtype, check.dtypes)
            if taken.tobytes() != other.tobytes():
                raise StateError(
                    f"{name}: {check.source!r} does not hold the same values; delete it with '-> _'"
                )


def _add_plain(
    description: Description, document: native.ValuesDocument, name: str, old: str
) -> None:
    """Add a value, a list of names or an element of an object."""
    if old in document.values:
        # What other systems store as a value may hold arrays.
        value = values.with_arrays(values.decode(bytes(document.values[old])))
        description.values[name] = value
    elif old in document.lists:
        description.merged_lists[name] = list(document.lists[old])
    else:
        element = document.objects[old]
        data = values.decode(bytes(element.value))
        shard = ShardedObject(element.name, data, element.shape, element.offset)
        if shard.unique_name != name:
            raise StateError(f"{old}: an element of a sharded object cannot be renamed to {name}")
        description.objects.append(shard)
