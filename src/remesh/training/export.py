"""Weights for inference: Hugging Face safetensors files or a `.pth`, written from the shards.

An export is a save. The ranks learn which weights there are, from the live state or from a
checkpoint, and choose names and element types (`_choose`). Then each rank describes its boxes of
them under their new names, as memories that cast (`_Exported`), and saves the description in files
that may lie beside others (`remesh.formats.huggingface`).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import torch
from torch import nn

from remesh._repr import short_repr
from remesh.adapters.memory import torch_dtype
from remesh.checkpoint.agree import PlanCache, SaveOptions
from remesh.checkpoint.arguments import is_place
from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.local import describe_local, exchange_of, memory_of, with_all_names
from remesh.checkpoint.saving import save_agreed
from remesh.core.dtypes import BY_NAME, CarrierDType
from remesh.core.geometry import Box
from remesh.core.memory import CarrierArray, Memory, SourceMemory
from remesh.core.sharded import ArrayLike, Part
from remesh.core.state import TENSOR_RECORD, Description, Role, TensorEntry
from remesh.core.strided import Layout
from remesh.errors import StateError, UnsupportedValueError
from remesh.events import ignore
from remesh.exchange import Exchange, run_on_all, run_on_one
from remesh.formats.decoding import decoded
from remesh.formats.huggingface import (
    PthExport,
    SafetensorsExport,
    index_name,
    indexed_files,
)
from remesh.formats.table import place_of
from remesh.formats.whole_tensors import FileTensor, file_names, split_into_files
from remesh.pipeline.source import StoredMemory, TensorSource, converted
from remesh.storage import Storage, open_storage

WeightFormat = Literal["safetensors", "pth"]

_FORMATS = {"safetensors": SafetensorsExport.name, "pth": PthExport.name}

_log = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export."""

    files: tuple[str, ...]
    """Names of the weight files."""
    num_tensors: int
    """Tensors in them."""
    num_bytes: int
    """Bytes of these tensors."""
    tied: Mapping[str, str]
    """Names that are not in a safetensors file because they are another's: alias → name."""
    seconds: float
    """How long it took."""

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
        StateError: If there are no such weights, two get one name, peft has wrapped layers of the
            model (and `names` is None), or a value is too large for the dtype. In a file system,
            earlier files are still there then.
        UnsupportedValueError: If the format has no name for an element type.
        StorageError: If the storage fails.
        ExchangeError: If a rank died.
    """
    started = time.monotonic()
    if format not in _FORMATS:
        raise ValueError(f"format must be 'safetensors' or 'pth', got {format!r}")
    exchange = exchange_of(group)
    state, place = _live_or_stored(source, entry)
    if place is None:
        local = describe_local(state)
        weights = _merge(run_on_all(exchange, lambda: msgspec.msgpack.encode(_describe(local))))
    else:
        local = _describe_stored(exchange, place, entry)
        weights = _describe(local)
    entries = source if isinstance(source, Mapping) else {weight.path[0] for weight in weights}
    tensors = _choose(weights, entry, names, dtype, sorted(map(str, entries)))
    boxes: dict[str, list[TensorEntry]] = {}  # of each tensor on this rank
    for one, _ in with_all_names(local.tensors):
        boxes.setdefault(one.name, []).append(one)
    storage = open_storage(path)
    values = {} if config is None else config if isinstance(config, Mapping) else config.to_dict()
    options = SaveOptions(
        overwrite=True,
        metadata=json.loads(json.dumps(values)),
        compares="sampled",
        format=_FORMATS[format],
        format_options={"name": name, "max_shard_bytes": max_file_bytes},
    )
    description = Description(
        tensors=[one for tensor in tensors for one in _entries_of(tensor, boxes)]
    )
    save_agreed(description, storage, options, group=exchange, cache=PlanCache(), on_event=ignore)
    files = [FileTensor(tensor.names[0], tensor.dtype, tensor.shape) for tensor in tensors]
    limit = max_file_bytes if format == "safetensors" else None
    written = file_names(name, f".{format}", len(split_into_files(files, limit)))
    if len(written) > 1 and not storage.shares_files:
        written = _indexed_files(exchange, storage, name)
    report = ExportReport(
        tuple(written),
        len(tensors),
        sum(tensor.num_bytes for tensor in files),
        {alias: one.names[0] for one in tensors for alias in one.names[1:]}
        if format == "safetensors"
        else {},
        time.monotonic() - started,
    )
    if exchange.rank == 0:
        size = report.num_bytes / 1e6
        _log.info("exported %.1f MB in %.2f s: %s", size, report.seconds, storage.url)
    return report


def _indexed_files(exchange: Exchange, storage: Storage, name: str) -> list[str]:
    """The files of an export whose names have the id of the save."""

    def read() -> bytes:
        return msgspec.msgpack.encode(indexed_files(storage, index_name(name)))

    return msgspec.msgpack.decode(run_on_one(exchange, read), type=list[str])


# ---------------------------------------------------------------------------------------------
# Which weights there are
# ---------------------------------------------------------------------------------------------


class _Weight(msgspec.Struct, frozen=True):
    """A tensor of the source: stored name, path in the state, dtype, shape, and its aliases."""

    name: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    aliases: list[tuple[str | int, ...]]
    is_inner: bool  # whether a tensor is made of it and others


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the files."""

    names: tuple[str, ...]  # its names in the files; more than one if it is tied
    source: str  # its stored name in the state
    source_dtype: str  # name of its element type there
    dtype: str  # name of its element type in the files
    shape: tuple[int, ...]  # its whole shape


def _live_or_stored(source: Any, entry: str | None) -> tuple[Any, Any]:
    """A state with nothing but what is exported, or the place of a checkpoint."""
    if is_place(source):
        return {}, source
    if isinstance(source, nn.Module):
        return (source if entry is None else {entry: source}), None
    if isinstance(source, Mapping) and entry is not None:
        return {key: value for key, value in source.items() if key == entry}, None
    return source, None


def _describe(description: Description) -> list[_Weight]:
    """The weights of a description; those of a live state are on this rank."""
    paths = description.paths
    return [
        _Weight(
            entry.name,
            paths.get(entry.name, (entry.name,)),
            entry.dtype,
            entry.global_shape,
            [paths.get(alias, (alias,)) for alias in names[1:]],
            _record_of(entry.name) in description.fixed,
        )
        for entry, names in with_all_names(description.tensors)
    ]


def _record_of(name: str) -> str:
    """The name of what tells of a tensor that is made of one with this name and others."""
    return f"{name.rpartition('.')[0]}.{TENSOR_RECORD}"


def _merge(replies: Sequence[bytes]) -> list[_Weight]:
    """The weights of all ranks, in order of first appearance."""
    found: dict[str, _Weight] = {}
    for reply in replies:
        for weight in msgspec.msgpack.decode(reply, type=list[_Weight]):
            found.setdefault(weight.name, weight)
    return list(found.values())


def _describe_stored(exchange: Exchange, source: Any, entry: str | None) -> Description:
    """A checkpoint as a state; each rank holds whole tensors, of as many bytes as others."""
    place = place_of(source)
    stored = open_shared(exchange, place)
    index, path_of = stored.index, stored.document.path_of
    reader = TensorSource(decoded(place.storage, index), index, stored.identity)
    names_of = {name: [name] for name in index.tensors.names}
    for alias, name in index.aliases.items():
        names_of[name].append(alias)
    found = Description()
    loads = [0] * exchange.world_size
    for name, names in names_of.items():
        tensor, record = index[name], _record_of(name)
        found.paths.update({one: path_of(one) for one in names})
        found.fixed.update({record} if stored.has_value(record) else ())
        parts: tuple[Part, ...] = ()
        if entry is None or any(found.paths[one][0] == entry for one in names):
            rank = loads.index(min(loads))
            loads[rank] += tensor.num_bytes
            if rank == exchange.rank:
                whole = Box.whole(tensor.shape)
                memory = StoredMemory(reader, name, tensor.dtype, whole)
                parts = (Part(whole, cast("ArrayLike", memory)),)
        role = Role.MAIN if parts else Role.REPLICA
        found.tensors += [
            TensorEntry(one, tensor.dtype, tensor.shape, parts, role, alias_key=name)
            for one in names
        ]
    return found


def _choose(
    weights: Sequence[_Weight],
    entry: str | None,
    names: Callable[[str], str | None] | None,
    dtype: str | None,
    entries: Sequence[str],
) -> list[_Tensor]:
    """The tensors that are exported, with their names in the files; the state has these entries."""
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
            if names is None:
                _refuse_adapter(own)
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
            tensors.append(_Tensor(tuple(called), weight.name, weight.dtype, kind, weight.shape))
    if not tensors:
        raise StateError(
            f"there are no weights in entry {entry!r}; the state has "
            f"{', '.join(entries[:10]) or 'no entries'}\nName the one that holds them: entry=..."
        )
    return tensors


def _refuse_adapter(name: str) -> None:
    """Refuse a weight whose layer peft has wrapped: `from_pretrained` ignores such names."""
    if any(key == "base_layer" or key.startswith("lora_") for key in name.split(".")):
        raise StateError(
            f"{name}: a weight of a peft model, whose names from_pretrained ignores\n"
            "Export model.merge_and_unload(), or save the adapter alone by peft's "
            "model.save_pretrained(directory). If these names are wanted, say so: "
            "names=lambda name: name"
        )


# ---------------------------------------------------------------------------------------------
# The boxes of a rank
# ---------------------------------------------------------------------------------------------


def _entries_of(tensor: _Tensor, boxes: Mapping[str, Sequence[TensorEntry]]) -> list[TensorEntry]:
    """This rank's boxes of a tensor as they are saved, under each name of it.

    All ranks name all tensors, so that these have one order.
    """
    none = TensorEntry(tensor.source, tensor.dtype, tensor.shape, (), Role.REPLICA)
    entries = []
    for entry in boxes.get(tensor.source, [none]):
        parts = tuple(
            Part(
                part.box,
                cast("ArrayLike", _Exported(memory_of(part.data, entry.name), tensor)),
            )
            for part in entry.parts
        )
        entries.append(replace(entry, dtype=tensor.dtype, parts=parts))
    key = object()
    first = [replace(entry, name=tensor.names[0], alias_key=key) for entry in entries]
    return first + [replace(first[0], name=alias) for alias in tensor.names[1:]]


@dataclass(frozen=True, slots=True, eq=False)
class _Exported(SourceMemory):
    """A box of a tensor whose elements are cast, and must stay finite, on their way out."""

    memory: Memory  # the box
    tensor: _Tensor

    @property
    def carrier(self) -> CarrierDType:
        return BY_NAME[self.tensor.dtype].carrier

    @property
    def layout(self) -> Layout | None:
        return self.memory.layout

    def copy_out(self, box: Box, into: CarrierArray) -> None:
        tensor = self.tensor
        dtypes = () if tensor.dtype == tensor.source_dtype else (tensor.dtype,)
        values = np.empty(box.shape, self.memory.carrier)
        self.memory.copy_out(box, values)
        values = converted(values, tensor.source_dtype, dtypes)
        _check_finite(tensor, values)
        into[...] = values


def _check_finite(tensor: _Tensor, values: CarrierArray) -> None:
    """Refuse values that became infinite on their way into a narrow dtype."""
    dtype = torch_dtype(tensor.dtype)
    if not dtype.is_floating_point or dtype.itemsize > 2:
        return
    infinity = torch.tensor([math.inf]).to(dtype)
    if not infinity.float().isinf():
        return  # the type has none
    # Bits are compared by numpy, in one thread: several ranks and writers do it at once.
    kind = np.dtype(f"u{dtype.itemsize}")
    [bits] = infinity.view(torch.uint8).numpy().view(kind)
    without_sign = kind.type((1 << (8 * dtype.itemsize - 1)) - 1)
    if ((values.view(kind) & without_sign) == bits).any():
        raise StateError(
            f"{tensor.names[0]}: has infinite values as {tensor.dtype}, whose largest number is "
            f"{torch.finfo(dtype).max:g}\nExport with dtype='bfloat16' or 'float32', which reach "
            "further"
        )
