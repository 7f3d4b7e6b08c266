"""Weights for inference: Hugging Face safetensors files or a `.pth`, written from the shards.

1. The ranks learn which weights there are, from the live state or from a checkpoint, and all plan
   the same: which tensor goes into which file, and who writes which file (`weight_files`).
2. They go through rounds. In each, a rank wants the next few megabytes of its files, as boxes of
   the tensors in their new dtype; `remesh.reshard` brings them from the ranks that hold them, or
   `remesh.load` from the checkpoint; and the rank appends them to its file. No rank ever holds a
   whole file, or a whole tensor.
3. When all files are written, they get their names, and the index, which says that they belong
   together, comes last.

On a local or mounted file system a file is written under a hidden name, made durable and renamed,
so a reader sees the old file or the new one. Object stores show an object when it is complete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
import torch
from torch import nn

from remesh._repr import short_repr
from remesh.adapters.memory import torch_dtype
from remesh.checkpoint import load
from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.local import describe_local, exchange_of, split_aliases
from remesh.checkpoint.sharing import check_arrived, check_same_place
from remesh.dtypes import BY_NAME
from remesh.errors import StateError, UnsupportedValueError
from remesh.exchange import Exchange, run_on_all, run_on_one
from remesh.formats.table import Source
from remesh.formats.torch_archive import TorchArchive
from remesh.formats.weight_files import (
    Content,
    FileTensor,
    SafetensorsContent,
    Span,
    assign_files,
    file_names,
    plan_rounds,
    split_into_files,
)
from remesh.geometry import boxes_of_flat_range
from remesh.resharding import reshard
from remesh.sharded import Part, ShardedTensor
from remesh.state import TENSOR_RECORD
from remesh.storage import Buffer, Storage, Writer, aligned_buffer, is_local, open_storage
from remesh.storage.local_io import sync_directory

WeightFormat = Literal["safetensors", "pth"]

ROUND_BYTES = 64 << 20
"""Bytes that a rank gets in a round: enough that the rounds' overhead does not count."""

_CHUNK_BYTES = 4 << 20
_SUFFIX = {"safetensors": ".safetensors", "pth": ".pth"}
_CONTENTS: Mapping[str, Callable[[Sequence[FileTensor]], Content]] = {
    "safetensors": SafetensorsContent,
    "pth": TorchArchive,
}
_TEMPORARY = ".remesh-export-"

_log = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        files: Names of the weight files.
        num_tensors: Tensors in them.
        num_bytes: Bytes of these tensors.
        tied: Names that are not in a safetensors file because they are another's: alias → name.
        seconds: How long it took.
    """

    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    tied: Mapping[str, str]
    seconds: float

    __repr__ = short_repr


def export_weights(
    source: Any,
    path: Any,
    *,
    dtype: str | None = "float16",
    format: WeightFormat = "safetensors",  # noqa: A002 - the word for it, here and elsewhere
    name: str = "model",
    entry: str | None = "model",
    names: Callable[[str], str | None] | None = None,
    max_file_bytes: int = 5_000_000_000,
    config: Any = None,
    group: Any = None,
) -> ExportReport:
    """Write the weights of a live state or of a checkpoint for inference. Collective.

    Files of an earlier export of the same name are replaced.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> export_weights(nn.Linear(2, 3), directory, format="pth", name="small").files
        ('small.pth',)
        >>> torch.load(f"{directory}/small.pth")["weight"].dtype
        torch.float16

    Args:
        source: A module; a nested state, as for `remesh.save`; or the place of a checkpoint,
            also of another system that `remesh.load` reads.
        path: Directory of the files, the same on every rank; it need not exist.
        dtype: Element type of all floating-point tensors in the files; None keeps theirs. Other
            tensors always keep theirs.
        format: `safetensors`, in several files with an index if there is much, or `pth`, one file
            that `torch.load` reads.
        name: Name of the files, without the ending: `model` gives `model.safetensors`, or
            `model-00001-of-00003.safetensors` and `model.safetensors.index.json`.
        entry: The entry of the state that holds the weights; it is not part of their names. None
            if the whole state, or the state that was saved, is weights. A module has no entries.
        names: What a weight is called in the files, given its name in the state; None leaves it
            out. By default it keeps its name.
        max_file_bytes: Bytes of tensors that a safetensors file has at most; a larger tensor has a
            file of its own.
        config: The model's configuration, to be written as `config.json`: a mapping, or an object
            with `to_dict()`, as those of Hugging Face models.
        group: See `remesh.save`.

    Raises:
        ValueError: If there is no such format.
        StateError: If there are no such weights, two get one name, or a value is too large for the
            dtype. In a file system, earlier files are still there then.
        UnsupportedValueError: If the format has no name for an element type.
        StorageError: If the storage fails.
        ExchangeError: If a rank died.
    """
    started = time.monotonic()
    if format not in _CONTENTS:
        raise ValueError(f"format must be 'safetensors' or 'pth', got {format!r}")
    exchange = exchange_of(group)
    state, place = _live_or_stored(source, entry)
    replies = run_on_all(exchange, lambda: _encode(_describe(state)))
    weights = _merge(replies) if place is None else _stored_weights(exchange, place)
    entries = source if isinstance(source, Mapping) else {weight.path[0] for weight in weights}
    tensors = _choose(weights, entry, names, dtype, sorted(map(str, entries)))
    limit = max_file_bytes if format == "safetensors" else None
    files = split_into_files(tensors, limit)
    called = file_names(name, _SUFFIX[format], len(files))
    contents = [_CONTENTS[format](file) for file in files]
    numbers = assign_files([content.num_bytes for content in contents], exchange.world_size)

    def fetch(target: dict[str, Any]) -> None:
        if place is None:
            reshard(state, target, cast=True, group=exchange)
        else:
            load(target, place, cast=True, group=exchange)

    storage = open_storage(path)
    job = _Job(storage, exchange, files, contents, called)
    try:
        job.begin(numbers[exchange.rank])
        job.write(numbers, fetch)
        small_files = _small_files(format, name, config, files, called)
        job.publish(numbers, small_files, name, _SUFFIX[format])
    except BaseException:
        job.abort()
        raise
    aliases = [tensor.names for tensor in tensors] if format == "safetensors" else []
    report = ExportReport(
        tuple(called),
        len(tensors),
        sum(tensor.num_bytes for tensor in tensors),
        {alias: first for first, *rest in aliases for alias in rest},
        time.monotonic() - started,
    )
    if exchange.rank == 0:
        size = report.num_bytes / 1e6
        _log.info("exported %.1f MB in %.2f s: %s", size, report.seconds, storage.url)
    return report


# ---------------------------------------------------------------------------------------------
# Which weights there are
# ---------------------------------------------------------------------------------------------


class _Weight(msgspec.Struct, frozen=True):
    """A tensor of the source: stored name, path in the state, dtype, shape, and its aliases.

    `is_inner` says that a tensor is made of it and others.
    """

    name: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    aliases: list[tuple[str | int, ...]]
    is_inner: bool


def _live_or_stored(source: Any, entry: str | None) -> tuple[Any, Any]:
    """A state with nothing but what is exported, or the place of a checkpoint."""
    if isinstance(source, str | os.PathLike | Storage | Source):
        return {}, source
    if isinstance(source, nn.Module):
        return (source if entry is None else {entry: source}), None
    if isinstance(source, Mapping) and entry is not None:
        return {key: value for key, value in source.items() if key == entry}, None
    return source, None


def _encode(weights: list[_Weight]) -> bytes:
    return msgspec.msgpack.encode(weights)


def _describe(state: Any) -> list[_Weight]:
    """What this rank holds."""
    description = describe_local(state)
    kept, aliases = split_aliases(description.tensors)
    paths = description.paths
    others: dict[str, list[tuple[str | int, ...]]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(paths.get(alias, (alias,)))
    found = {
        entry.name: _Weight(
            entry.name,
            paths.get(entry.name, (entry.name,)),
            entry.dtype,
            entry.global_shape,
            others.get(entry.name, []),
            _record_of(entry.name) in description.fixed,
        )
        for entry in kept
    }
    return list(found.values())


def _record_of(name: str) -> str:
    """The name of what tells of a tensor that is made of one with this name and others."""
    return f"{name.rpartition('.')[0]}.{TENSOR_RECORD}"


def _merge(replies: Sequence[bytes]) -> list[_Weight]:
    """What all ranks hold together, in order of first appearance."""
    found: dict[str, _Weight] = {}
    for reply in replies:
        for weight in msgspec.msgpack.decode(reply, type=list[_Weight]):
            found.setdefault(weight.name, weight)
    return list(found.values())


def _stored_weights(exchange: Exchange, place: Any) -> list[_Weight]:
    """What a checkpoint holds."""
    stored = open_shared(exchange, place)
    index, path_of = stored.index, stored.document.path_of
    others: dict[str, list[tuple[str | int, ...]]] = {}
    for alias, name in index.aliases.items():
        others.setdefault(name, []).append(path_of(alias))
    return [
        _Weight(
            name,
            path_of(name),
            index[name].dtype,
            index[name].shape,
            others.get(name, []),
            stored.has_value(_record_of(name)),
        )
        for name in index.tensors.names
    ]


def _choose(
    weights: Sequence[_Weight],
    entry: str | None,
    names: Callable[[str], str | None] | None,
    dtype: str | None,
    entries: Sequence[str],
) -> list[FileTensor]:
    """The tensors that are exported, with their names in the files; the state has these entries.

    Raises:
        StateError: If there are none, or two have one name.
    """
    if dtype is not None and not torch_dtype(dtype).is_floating_point:
        raise StateError(f"weights cannot be exported as {dtype}; choose a floating-point dtype")
    owner_of: dict[str, str] = {}
    tensors = []
    for weight in weights:
        called = []
        for path in (weight.path, *weight.aliases):
            if entry is not None and (path[0] != entry or len(path) == 1):
                continue
            own = ".".join(map(str, path[0 if entry is None else 1 :]))
            new = own if names is None else names(own)
            if new is not None:
                called.append(new)
                if owner_of.setdefault(new, own) != own:
                    raise StateError(
                        f"{owner_of[new]} and {own} would both be called {new} in the files\n"
                        "Let `names` give them different names, or leave one out by None"
                    )
        if called:
            if weight.is_inner:
                raise UnsupportedValueError(
                    f"{weight.name}: weight files have no form for tensors made of others\n"
                    "Dequantise the model, or leave it out of the files: let `names` give None"
                )
            if BY_NAME[weight.dtype].is_opaque:
                raise UnsupportedValueError(
                    f"{weight.name}: weight files have no name for elements of type "
                    f"{weight.dtype}\nLeave it out of the files: let `names` give None for it"
                )
            is_float = torch_dtype(weight.dtype).is_floating_point
            kind = dtype if dtype is not None and is_float else weight.dtype
            tensors.append(FileTensor(tuple(called), weight.name, kind, weight.shape))
    if not tensors:
        raise StateError(
            f"there are no weights in entry {entry!r}; the state has "
            f"{', '.join(entries[:10]) or 'no entries'}\nName the one that holds them: entry=..."
        )
    return tensors


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


class _Stream:
    """A file that is written from its beginning to its end, in aligned chunks."""

    def __init__(self, writer: Writer, num_bytes: int) -> None:
        self._writer = writer
        self._num_bytes = num_bytes
        self._chunk: Buffer | None = None
        self._filled = 0
        self._position = 0

    def append(self, data: bytes | Buffer) -> None:
        """Write more bytes."""
        source = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
        while len(source):
            if self._chunk is None:
                self._chunk = aligned_buffer(min(_CHUNK_BYTES, self._num_bytes - self._position))
            part = source[: len(self._chunk) - self._filled]
            self._chunk[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            source = source[len(part) :]
            if self._filled == len(self._chunk):
                self._writer.write(self._position, self._chunk)
                self._position += self._filled
                self._chunk, self._filled = None, 0

    def finish(self) -> None:
        """All is written: make it durable."""
        assert self._position == self._num_bytes, "the file is not complete"
        self._writer.finish()

    def abort(self) -> None:
        """Give the file up."""
        self._writer.abort()


@dataclass(slots=True)
class _Job:
    """One rank's side of an export; its methods are the steps. All but `abort` are collective."""

    storage: Storage
    exchange: Exchange
    files: Sequence[Sequence[FileTensor]]
    contents: Sequence[Content]
    called: Sequence[str]
    streams: dict[int, _Stream] = field(default_factory=dict, init=False)
    checksums: dict[int, list[int]] = field(default_factory=dict, init=False)
    tag: str = field(default_factory=lambda: secrets.token_hex(4), init=False)

    def begin(self, numbers: Sequence[int]) -> None:
        """Create this rank's files, which reserves their room."""
        check_same_place(
            [url.decode() for url in run_on_all(self.exchange, self.storage.url.encode)]
        )

        def create() -> bytes:
            for number in numbers:
                content, name = self.contents[number], self._written_name(number)
                if name == self.called[number]:
                    self.storage.delete(name)
                writer = self.storage.create(name, content.num_bytes)
                self.streams[number] = _Stream(writer, content.num_bytes)
                self.checksums[number] = []
            return b""

        run_on_all(self.exchange, create)

    def write(
        self, numbers: Sequence[Sequence[int]], fetch: Callable[[dict[str, Any]], None]
    ) -> None:
        """Go through the rounds; `fetch` fills a state of boxes on all ranks."""
        plans = [plan_rounds(self.files, one, ROUND_BYTES) for one in numbers]
        mine = plans[self.exchange.rank]
        for turn in range(max(map(len, plans))):
            spans = mine[turn] if turn < len(mine) else []
            elements = [self._room_for(span) for span in spans]
            fetch(self._target(spans, elements))

            def append(spans: list[Span] = spans, elements: list[torch.Tensor] = elements) -> bytes:
                for span, values in zip(spans, elements, strict=True):
                    self._append(span, values)
                return b""

            run_on_all(self.exchange, append)

    def publish(
        self,
        numbers: Sequence[Sequence[int]],
        small_files: Mapping[str, bytes],
        name: str,
        suffix: str,
    ) -> None:
        """Give all files their names; the small ones, whose last is the index, come last."""
        tags = [tag.decode() for tag in run_on_all(self.exchange, self._finish)]

        def see() -> bytes:
            check_arrived(
                self.storage,
                "",
                (
                    (rank, self._written_name(number, tag), self.contents[number].num_bytes)
                    for rank, (tag, own) in enumerate(zip(tags, numbers, strict=True))
                    for number in own
                ),
            )
            return b""

        index = f"{name}{suffix}.index.json"

        def make_way() -> bytes:
            # Without its index no reader takes old and new files for one model.
            if len(self.files) > 1:
                self.storage.delete(index)
            return b""

        def complete() -> bytes:
            for small, data in small_files.items():
                self.storage.put(small, data, overwrite=True)
            pattern = re.compile(re.escape(name) + r"(-\d{5}-of-\d{5})?" + re.escape(suffix))
            for file in self.storage.list():
                is_old_file = pattern.fullmatch(file) and file not in self.called
                is_old_index = file == index and index not in small_files
                if is_old_file or is_old_index or file.startswith(f"{_TEMPORARY}{name}"):
                    self.storage.delete(file)
            return b""

        if self.exchange.world_size > 1:
            run_on_one(self.exchange, see)
        run_on_one(self.exchange, make_way)
        run_on_all(self.exchange, self._rename)
        run_on_one(self.exchange, complete)

    def abort(self) -> None:
        """Remove what this rank has written under hidden names."""
        for number, stream in self.streams.items():
            with suppress(OSError):  # the error that led here is the one to report
                stream.abort()
                if self._written_name(number) != self.called[number]:
                    self.storage.delete(self._written_name(number))

    def _written_name(self, number: int, tag: str = "") -> str:
        """The name under which a file is written, by this rank or by that of another tag."""
        name, tag = self.called[number], tag or self.tag
        return f"{_TEMPORARY}{name}-{tag}" if is_local(self.storage) else name

    def _room_for(self, span: Span) -> torch.Tensor:
        dtype = torch_dtype(self.files[span.file][span.tensor].dtype)
        return torch.empty(span.stop - span.start, dtype=dtype)

    def _target(self, spans: Sequence[Span], elements: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The state that is to be filled: the boxes of some spans."""
        target: dict[str, Any] = {}
        for span, values in zip(spans, elements, strict=True):
            tensor = self.files[span.file][span.tensor]
            parts, done = [], 0
            for box in boxes_of_flat_range(tensor.shape, span.start, span.stop):
                parts.append(Part(box, values[done : done + box.size].view(box.shape)))
                done += box.size
            if parts:
                target[str(len(target))] = ShardedTensor(
                    tensor.source, tensor.shape, tuple(parts), replica_id=1
                )
        return target

    def _append(self, span: Span, values: torch.Tensor) -> None:
        """Write a part of a tensor, and what comes before and after it."""
        content, stream = self.contents[span.file], self.streams[span.file]
        tensor, checksums = self.files[span.file][span.tensor], self.checksums[span.file]
        _check_finite(tensor, values)
        if span.start == 0:
            if span.tensor == 0:
                stream.append(content.head())
            stream.append(content.before(span.tensor))
            checksums.append(0)
        data = cast("Buffer", values.view(torch.uint8).numpy())
        checksums[-1] = zlib.crc32(data.data, checksums[-1])
        stream.append(data)
        if span.stop == tensor.num_elements:
            stream.append(content.after(span.tensor, checksums[-1]))
            if span.tensor == len(self.files[span.file]) - 1:
                stream.append(content.tail(checksums))

    def _finish(self) -> bytes:
        for stream in self.streams.values():
            stream.finish()
        self.storage.sync()
        return self.tag.encode()

    def _rename(self) -> bytes:
        if is_local(self.storage):
            root = Path(self.storage.url)
            for number in self.streams:
                (root / self._written_name(number)).replace(root / self.called[number])
            sync_directory(root)
        self.streams.clear()
        return b""


def _check_finite(tensor: FileTensor, values: torch.Tensor) -> None:
    """Refuse values that became infinite on their way into a narrow dtype.

    Raises:
        StateError: If there are any.
    """
    if values.is_floating_point() and BY_NAME[tensor.dtype].itemsize < 4:
        elements = values if values.itemsize > 1 else values.float()
        if bool(elements.isinf().any()):
            largest = torch.finfo(values.dtype).max
            raise StateError(
                f"{tensor.names[0]}: has infinite values as {tensor.dtype}, whose largest number "
                f"is {largest:g}\nExport with dtype='bfloat16' or 'float32', which reach further"
            )


def _small_files(
    format_name: str,
    name: str,
    config: Any,
    files: Sequence[Sequence[FileTensor]],
    called: Sequence[str],
) -> dict[str, bytes]:
    """The files that rank 0 writes last: the configuration, and the index of several files."""
    small: dict[str, bytes] = {}
    if config is not None:
        values = config if isinstance(config, Mapping) else config.to_dict()
        small["config.json"] = (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
    if len(files) > 1:
        tensors = [tensor for file in files for tensor in file]
        places = {
            tensor.names[0]: file_name
            for file, file_name in zip(files, called, strict=True)
            for tensor in file
        }
        index = {
            "metadata": {
                "total_size": sum(tensor.num_bytes for tensor in tensors),
                "total_parameters": sum(tensor.num_elements for tensor in tensors),
            },
            "weight_map": dict(sorted(places.items())),
        }
        small[f"{name}{_SUFFIX[format_name]}.index.json"] = json.dumps(index, indent=2).encode()
    return small
