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
import os
import sys
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
from remesh.adapters.peft import (
    adapter_config,
    adapter_tensors,
    check_not_flat,
    merged_copy,
    peft_model,
)
from remesh.checkpoint.agree import PlanCache, SaveOptions
from remesh.checkpoint.arguments import is_place
from remesh.checkpoint.converting import describe_stored
from remesh.checkpoint.loading import open_shared
from remesh.checkpoint.local import (
    describe_local,
    describe_weights,
    exchange_of,
    memory_of,
    with_all_names,
)
from remesh.checkpoint.saving import save_agreed
from remesh.core.dtypes import BY_NAME, CarrierDType
from remesh.core.geometry import Box
from remesh.core.memory import CarrierArray, Memory
from remesh.core.sharded import ArrayLike, Part
from remesh.core.state import TENSOR_RECORD, Description, Role, TensorEntry, name_of
from remesh.core.strided import Layout
from remesh.errors import StateError, UnsupportedValueError
from remesh.events import ignore
from remesh.exchange import Exchange, run_on_all, run_on_one
from remesh.formats.decoding import decoded
from remesh.formats.huggingface import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    PthExport,
    SafetensorsExport,
    check_names,
)
from remesh.formats.table import Contents, place_of, writer_of
from remesh.pipeline.source import TensorSource, converted
from remesh.storage import Storage, open_storage

WeightFormat = Literal["safetensors", "pth"]

_FORMATS = {"safetensors": SafetensorsExport.name, "pth": PthExport.name}
_ENDINGS = (".safetensors", ".pth")

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


def export_weights(  # noqa: PLR0913 - the options of an export, each of which stands for itself
    source: Any,
    path: Any,
    *,
    dtype: str | torch.dtype | None = None,
    format: WeightFormat = "safetensors",  # noqa: A002 - the word for it, here and elsewhere
    name: str = "model",
    entry: str | None = "model",
    names: Callable[[str], str | None] | None = None,
    merge: bool = False,
    max_file_bytes: int = 5_000_000_000,
    config: Any = None,
    group: Any = None,
) -> ExportReport:
    """Write the weights of a live state or of a checkpoint for inference. Collective.

    Files of an earlier export of the same name are replaced. Of a model of peft, the adapters are
    written as peft's `save_pretrained` writes them: `adapter_model.safetensors` with
    `adapter_config.json`, in a folder of its name if an adapter is not called `default`.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> model = nn.Linear(2, 3)
        >>> export_weights(model, directory, dtype="float16", format="pth", name="small").files
        ('small.pth',)
        >>> torch.load(f"{directory}/small.pth")["weight"].dtype
        torch.float16

    Args:
        source: A module; a nested state, as for `remesh.save`; or the place of a checkpoint,
            also of another system that `remesh.load` reads.
        path: Directory of the files, the same on every rank; it need not exist.
        dtype: Element type of all floating-point tensors in the files; by default they keep theirs,
            as other tensors always do.
        format: `safetensors`, in several files with an index if there is much, or `pth`, one file
            that `torch.load` reads.
        name: Name of the files, without the ending: `model` gives `model.safetensors`, or
            `model-00001-of-00003.safetensors` and `model.safetensors.index.json`.
        entry: The entry of the state that holds the weights; it is not part of their names. None
            if the whole state, or the state that was saved, is weights. A module has no entries.
        names: What a weight is called in the files, given its name in the state; None leaves it
            out. By default it keeps its name.
        merge: Write all weights of a model of peft with its active adapters merged, even disabled
            ones, under the base model's names. The model is not changed; copies take memory.
        max_file_bytes: Bytes of tensors that a safetensors file has at most; a larger tensor has a
            file of its own.
        config: The model's configuration, to be written as `config.json`: a mapping, or an object
            with `to_dict()`, as those of Hugging Face models. If it says a `dtype`, that of the
            floating-point tensors in the files takes its place, if they have one.
        group: See `remesh.save`.

    Raises:
        ValueError: If there is no such format, or files cannot have the name.
        StateError: If there are no such weights, two get one name, a name is that of a wrapper
            which no other program knows (and `names` is None), adapters cannot be merged, weights
            would lie beside an adapter, or a value is too large for the dtype. In a file system,
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
    live = state if entry is None or place is not None else state.get(entry)
    model = peft_model(live)
    if model is not None:
        check_not_flat(live)
    if merge:
        live, config = _merged(model, config)
        state = live if entry is None else {entry: live}
    elif model is not None and names is None:
        return _export_adapters(model, path, dtype, format, group)
    if place is None:
        local = describe_weights(state) if format == "safetensors" else describe_local(state)
        replies = run_on_all(exchange, lambda: msgspec.msgpack.encode(_describe(local)))
        weights = _merge(replies)
    else:
        local = _describe_stored(exchange, place)
        weights = _describe(local)
    entries = source if isinstance(source, Mapping) else {weight.path[0] for weight in weights}
    tensors = _choose(weights, entry, names, dtype, sorted(map(str, entries)))
    boxes: dict[str, list[TensorEntry]] = {}  # of each tensor on this rank
    for one, _ in with_all_names(local.tensors):
        boxes.setdefault(one.name, []).append(one)
    storage = _opened(exchange, path, format, name)
    values = _config_values(config, tensors)
    limit = {"max_shard_bytes": max_file_bytes} if format == "safetensors" else {}
    options = SaveOptions(
        overwrite=True,
        metadata=json.loads(json.dumps(values)),
        compares="sampled",
        format=_FORMATS[format],
        format_options={"name": name, **limit},
    )
    description = Description(
        tensors=[one for tensor in tensors for one in _entries_of(tensor, boxes)]
    )
    save_agreed(description, storage, options, group=exchange, cache=PlanCache(), on_event=ignore)
    report = _report(exchange, storage, options, tensors, time.monotonic() - started)
    if exchange.rank == 0:
        size = report.num_bytes / 1e6
        _log.info("exported %.1f MB in %.2f s: %s", size, report.seconds, storage.url)
    return report


def _merged(model: Any, config: Any) -> tuple[Any, Any]:
    """The base of a model of peft, with its adapters merged, and its configuration, if given."""
    if model is None:
        raise StateError(
            "merge=True needs a live model of peft, which knows how its adapters are merged\n"
            "Load the checkpoint into the model, and export that, not its get_base_model()"
        )
    merged = merged_copy(model)
    is_its_own = config is not None and config is getattr(model, "config", None)
    return merged, merged.config if is_its_own else config


def _export_adapters(
    model: Any, path: Any, dtype: str | torch.dtype | None, kind: WeightFormat, group: Any
) -> ExportReport:
    """Write each adapter of a model of peft where peft does: in one file, beside what it is."""
    if kind != "safetensors":
        raise StateError("peft reads adapters from safetensors files\nLeave out format='pth'")
    reports = {}
    for adapter in model.peft_config:
        folder = "" if adapter == "default" else f"{adapter}/"
        if folder and not isinstance(path, str | os.PathLike):
            raise StateError(
                f"adapter {adapter} lies in a folder of its own; give the place as a path or a URL"
            )
        reports[folder] = export_weights(
            adapter_tensors(model, adapter),
            f"{os.fspath(path)}/{folder}" if folder else path,
            dtype=dtype,
            name=ADAPTER_NAME,
            entry=None,
            names=str,
            max_file_bytes=sys.maxsize,
            config=adapter_config(model, adapter),
            group=group,
        )
    return ExportReport(
        tuple(folder + file for folder, one in reports.items() for file in one.files),
        sum(one.num_tensors for one in reports.values()),
        sum(one.num_bytes for one in reports.values()),
        {},
        sum(one.seconds for one in reports.values()),
    )


def _opened(exchange: Exchange, path: Any, kind: WeightFormat, name: str) -> Storage:
    """The place of an export. Collective.

    A folder with an adapter is none for whole weights, to which from_pretrained would add it.
    """
    if "/" in name:
        raise ValueError(f"name={name!r}: names of files begin with it, so it has no '/'")
    storage = open_storage(path)
    is_whole = kind == "safetensors" and name != ADAPTER_NAME

    def look() -> bytes:
        if is_whole and storage.exists(ADAPTER_CONFIG_NAME):
            raise StateError(
                f"{ADAPTER_CONFIG_NAME}: from_pretrained would add this adapter to the weights\n"
                f"It lies in {storage.url}. Export the weights to another folder, or remove the "
                "adapter's files first"
            )
        return b""

    run_on_one(exchange, look)
    return storage


def _report(
    exchange: Exchange,
    storage: Storage,
    options: SaveOptions,
    tensors: Sequence[_Tensor],
    seconds: float,
) -> ExportReport:
    """What was written. Collective."""

    def look() -> bytes:
        there = writer_of(options.format).existing(storage, options.format_options)
        assert there is not None, "the files have just been written"
        return msgspec.msgpack.encode([path for path in there.paths if path.endswith(_ENDINGS)])

    # A .pth file has all names of a tensor.
    several = tensors if options.format == SafetensorsExport.name else ()
    return ExportReport(
        tuple(msgspec.msgpack.decode(run_on_one(exchange, look), type=list[str])),
        len(tensors),
        sum(math.prod(one.shape) * BY_NAME[one.dtype].itemsize for one in tensors),
        {alias: one.names[0] for one in several for alias in one.names[1:]},
        seconds,
    )


# Which weights there are --------------------------------------------------------------------------


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


def _config_values(config: Any, tensors: Sequence[_Tensor]) -> dict[str, Any]:
    """What `config.json` says, with the element type of the files: readers cast to what it says."""
    if config is None:
        return {}
    values = dict(config if isinstance(config, Mapping) else config.to_dict())
    kinds = {one.dtype for one in tensors if torch_dtype(one.dtype).is_floating_point}
    if len(kinds) == 1:
        values.update(dict.fromkeys(values.keys() & {"dtype", "torch_dtype"}, kinds.pop()))
    return values


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
    paths, records = description.paths, description.fixed | description.values.keys()
    weights = []
    for entry, names in with_all_names(description.tensors):
        # What tells of a tensor that is made of one with this name and others.
        is_inner = f"{entry.name.rpartition('.')[0]}.{TENSOR_RECORD}" in records
        path, *aliases = (paths.get(name, (name,)) for name in names)
        weights.append(
            _Weight(entry.name, path, entry.dtype, entry.global_shape, aliases, is_inner)
        )
    return weights


def _merge(replies: Sequence[bytes]) -> list[_Weight]:
    """The weights of all ranks, in order of first appearance."""
    found: dict[tuple[str, str], _Weight] = {}
    for reply in replies:
        for weight in msgspec.msgpack.decode(reply, type=list[_Weight]):
            found.setdefault((weight.name, name_of(weight.path)), weight)
    return list(found.values())


def _describe_stored(exchange: Exchange, source: Any) -> Description:
    """The tensors of a checkpoint as a state that all ranks have; they share what they read."""
    place = place_of(source)
    stored = open_shared(exchange, place)
    records = {
        name: value
        for name, value in stored.document.values.items()
        if name.endswith(f".{TENSOR_RECORD}")
    }
    document = msgspec.structs.replace(stored.document, values=records, lists={}, objects={})
    reader = TensorSource(decoded(place.storage, stored.index), stored.index, stored.identity)
    return describe_stored(Contents("", stored.index, document), reader)


def _choose(
    weights: Sequence[_Weight],
    entry: str | None,
    names: Callable[[str], str | None] | None,
    dtype: str | torch.dtype | None,
    entries: Sequence[str],
) -> list[_Tensor]:
    """The tensors that are exported, with their names in the files; the state has these entries."""
    dtype = None if dtype is None else str(dtype).removeprefix("torch.")
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
            tensors.append(_Tensor(tuple(called), weight.name, weight.dtype, kind, weight.shape))
    if names is None:
        check_names([name for tensor in tensors for name in tensor.names])
    if not tensors:
        raise StateError(
            f"there are no weights in entry {entry!r}; the state has "
            f"{', '.join(entries[:10]) or 'no entries'}\nName the one that holds them: entry=..."
        )
    return tensors


# The boxes of a rank ------------------------------------------------------------------------------


def _entries_of(tensor: _Tensor, boxes: Mapping[str, Sequence[TensorEntry]]) -> list[TensorEntry]:
    """This rank's boxes of a tensor as they are saved, under each name of it.

    All ranks name all tensors, so that these have one order.
    """
    none = TensorEntry(tensor.source, tensor.dtype, tensor.shape, (), Role.REPLICA)
    entries = []
    for entry in boxes.get(tensor.source, [none]):
        parts = tuple(
            Part(part.box, cast("ArrayLike", _Exported(memory_of(part.data, entry.name), tensor)))
            for part in entry.parts
        )
        entries.append(replace(entry, dtype=tensor.dtype, parts=parts))
    key = object()
    first = [replace(entry, name=tensor.names[0], alias_key=key) for entry in entries]
    return first + [replace(first[0], name=alias) for alias in tensor.names[1:]]


@dataclass(frozen=True, slots=True, eq=False)
class _Exported(Memory):
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
        values = np.empty(box.shape, self.memory.carrier)
        self.memory.copy_out(box, values)
        if tensor.dtype != tensor.source_dtype:
            given, values = values, converted(values, tensor.source_dtype, (tensor.dtype,))
            _check_range(tensor, given, values)
        into[...] = values


def _check_range(tensor: _Tensor, given: CarrierArray, values: CarrierArray) -> None:
    """Refuse numbers that a narrow dtype has not: they became infinite, or its largest."""
    dtype = torch_dtype(tensor.dtype)
    if dtype.itemsize > 1:
        # Bits are compared by numpy, in one thread: several ranks and writers do it at once.
        bits = np.dtype(f"u{dtype.itemsize}")
        [infinity] = torch.tensor([math.inf]).to(dtype).view(torch.uint8).numpy().view(bits)
        without_sign = bits.type(np.iinfo(bits).max >> 1)
        if ((values.view(bits) & without_sign) < infinity).all():
            return
    sizes = np.abs(converted(given, tensor.source_dtype, ("float64",)))
    largest = torch.finfo(dtype).max
    if ((sizes > largest) & (sizes < math.inf)).any():
        raise StateError(
            f"{tensor.names[0]}: has values beyond {tensor.dtype}, whose largest number is "
            f"{largest:g}\nExport with dtype='bfloat16', which reaches as far as float32, or with "
            "dtype=None, which keeps what is there"
        )
