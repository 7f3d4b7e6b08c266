"""Converting a checkpoint of any readable format to any format that can be written.

A conversion is a save whose tensors lie in another checkpoint: each is a memory that reads boxes of
it (`stored_memory`), and everything else is what that checkpoint says. So plans, files, commit and
errors are those of a save, tensors pass through a few buffers of some MiB, and digests of the
source are checked while it is read. A conversion that is cut short leaves no checkpoint.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import replace

from remesh import values
from remesh._repr import short_repr
from remesh.catalog import explained_absence
from remesh.checkpoint.arguments import is_place
from remesh.checkpoint.mismatch import listed
from remesh.checkpoint.opened import Checkpoint, VerifyReport
from remesh.checkpoint.save_plan import PlanCache
from remesh.checkpoint.saving import options_of, save_agreed
from remesh.checkpoint.stored_memory import StoredMemory, StoredSource
from remesh.errors import CorruptCheckpointError, StateError
from remesh.events import OnEvent, ignore
from remesh.exchange import Alone
from remesh.formats import native
from remesh.formats.contents import Contents
from remesh.formats.decoding import decoded
from remesh.formats.table import FORMATS, Source, place_of, read_contents, writer_of
from remesh.geometry import Box
from remesh.index import Index
from remesh.sharded import ArrayLike, Part, ShardedObject
from remesh.state import Description, Path, Role, TensorEntry
from remesh.storage import open_storage
from remesh.transform import Program, Resolved, Transform, as_transform

_log = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion has written.

    Attributes:
        source_format: Name of the format of the source.
        format: Name of the format that was written.
        num_tensors: Tensors that were written; tied ones count once.
        num_values: Plain values, lists and elements of sharded objects.
        num_bytes: Bytes of the tensors.
        verified: What reading the new checkpoint again has found.
        unchecked: Names in the new checkpoint of what a repair had put into the source without a
            digest that proves it, or is made of that. Only remesh's own format marks them.
    """

    source_format: str
    format: str
    num_tensors: int
    num_values: int
    num_bytes: int
    verified: VerifyReport
    unchecked: tuple[str, ...]

    __repr__ = short_repr


def convert(
    source: Any,
    path: Any,
    *,
    format: str,  # noqa: A002 - as in `save`
    transform: Transform | Program | None = None,
    only: str | Sequence[str] = "*",
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
    format_options: Mapping[str, object] | None = None,
    on_event: OnEvent = ignore,
) -> ConversionReport:
    """Write a checkpoint in another format. Not collective: one process converts.

    Tensors are read and written a few MiB at a time. What the checkpoint holds besides is carried
    over as it is, where the format takes it. The new checkpoint is committed last, so a conversion
    that is killed leaves none; a second attempt begins anew. When it is committed it is read once
    more and compared with its digests, if its format has any.

    Args:
        source: What to convert: a path, URL or storage, or a `remesh.formats.Source`.
        path: Directory of the new checkpoint; it need not exist.
        format: As of `remesh.save`.
        transform: What becomes of the tensors and the names: a `Transform`, or what makes one.
        only: Which stored names take part, as patterns of a shell; others are left out.
        overwrite: Replace a checkpoint of the format that is there.
        metadata: As of `remesh.save`. None for that of the source, if both are of remesh.
        format_options: As of `remesh.save`.
        on_event: Told of the moments in `remesh.events.SAVE_POINTS`.

    Raises:
        CheckpointNotFoundError: If there is no checkpoint at the source.
        StateError: If the format does not take what the checkpoint holds, or source and
            destination are one place.
        TransformError: If the transformation does not fit.
        CheckpointExistsError: If there is a checkpoint and `overwrite` is false.
        CorruptCheckpointError: If the source is damaged, or the new checkpoint is not what was
            written.
        CoverageError: If a part of a tensor is stored nowhere in the source.
        NoSpaceError: If there is too little room.
        StorageError: If a storage fails.
    """
    if not is_place(path):
        raise StateError(f"convert: path must name a place, not {type(path).__name__}")
    writer, program = writer_of(format), as_transform(transform)
    place = place_of(source)
    with explained_absence(place):
        contents = _chosen(read_contents(place), only)
    if place.storage.url == open_storage(path).url and not place.file:
        raise StateError(
            f"{place.storage.url}: source and destination are one place; convert to another"
        )
    record = contents.record
    if metadata is None and record is not None and format == native.FORMAT_NAME:
        metadata = record.metadata
    resolved = None if program is None else _resolve(contents, program)
    identity = "" if record is None else native.identity_of(record)
    stored = StoredSource(
        decoded(place.storage, contents.index), contents.index, identity, resolved
    )
    description = describe_stored(contents, stored)
    if description.unchecked and format != native.FORMAT_NAME:
        _log.warning(
            "%s: no digest proves %s, which a repair has taken over, and the format %r has no mark "
            "for that; convert to 'remesh' to keep it",
            place.storage.url,
            listed(description.unchecked),
            format,
        )
    if format != native.FORMAT_NAME:
        _import_torch_for(description)
    options = options_of(overwrite, metadata, None, False, format, format_options)
    save_agreed(description, path, options, group=Alone(), cache=PlanCache(), on_event=on_event)
    row = next(row for row in FORMATS if writer in row.writers)
    written = Checkpoint(Source(path, format=row.name))
    verified = written.verify()
    if not verified.ok:
        raise CorruptCheckpointError(
            f"{written}: what was read again is not what was written; remesh verify lists the "
            "damage. The source is as it was: convert it again, or to another disk."
        )
    return ConversionReport(
        contents.format,
        format,
        len(written.index.boxes.tensors),
        len(description.values) + len(description.merged_lists) + len(description.objects),
        sum(entry.num_bytes for entry in map(written.index.__getitem__, written.index)),
        verified,
        tuple(description.unchecked),
    )


def _chosen(contents: Contents, only: str | Sequence[str]) -> Contents:
    """What is stored under names that one of some patterns fits.

    Raises:
        StateError: If a pattern fits no name.
    """
    patterns = [only] if isinstance(only, str) else list(only)
    if "*" in patterns:
        return contents
    index, document = contents.index, contents.document
    names = [*index, *document.values, *document.lists, *document.objects]
    known, chosen = set(names), set[str]()
    for pattern in patterns:
        is_name = pattern in known
        found = [pattern] if is_name else fnmatch.filter(names, pattern)
        if not found:
            raise StateError(f"no stored name fits {pattern!r}; remesh ls lists the names")
        chosen.update(found)
    own = replace(
        document,
        values={name: value for name, value in document.values.items() if name in chosen},
        lists={name: names for name, names in document.lists.items() if name in chosen},
        objects={name: one for name, one in document.objects.items() if name in chosen},
    )
    left = index.without(lambda name: name not in chosen)
    return dataclasses.replace(contents, index=left, document=own)


def _import_torch_for(description: Description) -> None:
    """Import torch, if it is installed and there are values of its types.

    Only remesh's own format stores such values without it.
    """
    plain = [*description.values.values(), *(element.data for element in description.objects)]
    kinds = {one.type_name for value in plain for one in values.unresolved(value)}
    if any(kind.startswith("torch.") for kind in kinds):
        with suppress(ModuleNotFoundError):  # the writer says what it cannot store
            importlib.import_module("torch")


def _resolve(contents: Contents, program: Transform) -> Resolved:
    """The transformation of what is stored; names of values and lists take part.

    Raises:
        TransformError: If it does not fit.
        MismatchError: If it makes something of what is not there.
        StateError: If something is to keep a value that it does not have.
    """
    document = contents.document
    others = dict.fromkeys([*document.values, *document.lists, *document.objects])
    resolved = program.resolve({**contents.index, **others})
    resolved.check()
    if resolved.kept:
        raise StateError(
            f"{min(resolved.kept)}: keeps its initial value, and a conversion has none; leave the "
            "statement out"
        )
    return resolved


def describe_stored(contents: Contents, source: StoredSource) -> Description:
    """What a checkpoint holds, described as a state whose tensors are read from it.

    Raises:
        StateError: If the transformation makes something that cannot be stored.
    """
    index, document, resolved = contents.index, contents.document, source.resolved
    others = [*document.values, *document.lists, *document.objects]
    description = Description()
    tensors: dict[str, tuple[str, tuple[int, ...], str | None]]
    if resolved is None:
        tensors = {name: (one.dtype, one.shape, name) for name, one in index.items()}
        plain = {name: name for name in others}
    else:
        made = {name: info for name, info in resolved.targets.items() if info is not None}
        tensors = {
            name: (info.dtype, info.shape, resolved.sources_of(name)[0] if is_copy else None)
            for name, info in made.items()
            for is_copy in [resolved.is_whole(name)]
        }
        plain = {
            name: _source_of_value(resolved, name) for name in resolved.targets if name not in made
        }
        _check_unread(resolved)
        _check_lists(document, tensors, index, plain)
    # Those that others are tied to come first, so that they keep the tensor.
    for name in sorted(tensors, key=lambda name: name in index.aliases):
        dtype, shape, copied = tensors[name]
        key = None if copied is None else index.aliases.get(copied, copied)
        memory = cast("ArrayLike", StoredMemory(source, name, dtype, shape))
        parts = (Part(Box.whole(shape), memory),)
        description.tensors.append(TensorEntry(name, dtype, shape, parts, Role.MAIN, alias_key=key))
    for name, old in plain.items():
        _add_plain(description, document, name, old)
    unchecked = {*document.unchecked_names}
    if unchecked:
        made_of = {
            name: {name} if resolved is None else {*resolved.sources_of(name)}
            for name in (*tensors, *plain)
        }
        description.unchecked = [name for name, read in made_of.items() if read & unchecked]
    description.paths = {name: document.path_of(name) for name in (*tensors, *plain)}
    description.sequences = _sequences_around(description.paths.values(), document)
    return description


def _source_of_value(resolved: Resolved, name: str) -> str:
    """The name under which a plain value of the new checkpoint is stored in the source.

    Raises:
        StateError: If it is made of several.
    """
    sources = resolved.sources_of(name)
    if len(sources) != 1:
        raise StateError(
            f"{name}: a plain value that is to be that of {', '.join(sources)}; name one of them, "
            "and delete the others with '-> _'"
        )
    return sources[0]


def _check_unread(resolved: Resolved) -> None:
    """Refuse a transformation that takes a tensor of one source and wants others to equal it.

    Raises:
        StateError: If it does.
    """
    for name, info in resolved.targets.items():
        checks = () if info is None else resolved.checks(name)
        if checks:
            raise StateError(
                f"{name}: {checks[0].source!r} would have to hold the same values, which a "
                "conversion does not compare; delete it with '-> _'"
            )


def _check_lists(
    document: native.ValuesDocument,
    tensors: Mapping[str, object],
    index: Index,
    plain: Mapping[str, str],
) -> None:
    """Refuse to carry over lists of names, an optimizer's parameters, where names change.

    Raises:
        StateError: If there are any.
    """
    kept = sorted(name for name, old in plain.items() if old in document.lists)
    if kept and tensors.keys() != set(index):
        raise StateError(
            f"{kept[0]}: a list of parameters, whose names the transformation changes. Delete the "
            "optimizer, or load the checkpoint with the transformation and save it again."
        )


def _add_plain(
    description: Description, document: native.ValuesDocument, name: str, old: str
) -> None:
    """Add a value, a list of names or an element of an object.

    Raises:
        StateError: If an element of an object gets another name.
    """
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


def _sequences_around(paths: Iterable[Path], document: native.ValuesDocument) -> dict[Path, str]:
    """The containers of the source that hold something of the new checkpoint."""
    above = {path[:length] for path in paths for length in range(len(path))}
    return {tuple(at): kind for at, kind in document.sequences if tuple(at) in above}
