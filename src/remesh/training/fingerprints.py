"""Whether the tensors of a state are what they were at an earlier moment, without a copy of them.

Torch counts writes to a tensor (`_version`), but not those through `tensor.data`, through numpy or
in kernels of others. So a fingerprint has, of each tensor, its address, its version and a sample of
its memory: all of a small one, and else 32 words of 4 bytes, spread evenly. A write that misses
all words of a sample is not noticed.

It is taken at each step, so it must be cheap. The state is walked, and lists of addresses, sizes
and versions are made. While addresses and sizes stay, so do the addresses of all samples. Host
memory is then read by one gather of numpy, straight from these addresses. On other devices the
samples are views that one call joins on the device. They stay there until they are compared, so
that the host does not wait for the device at a step.

A fingerprint holds no tensor: it never keeps memory alive that the training gives back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import Optimizer

from remesh.core.geometry import IntArray
from remesh.core.integrity import hex_digest
from remesh.core.sharded import ShardedTensor
from remesh.core.state import Joined

SMALL = 1 << 20
"""Bytes up to which buffers of modules are no part of a fingerprint. A forward pass changes them,
and they are small enough to be copied."""

HOST = "cpu"
"""Type of the device whose memory is read directly."""

SAMPLES = 32
"""Words in the sample of a tensor; elements on a device."""

WHOLE_BYTES = 256
"""Bytes of a tensor up to which its sample is all of it."""

_Place = tuple[int, int, bool]
"""Address, bytes, and whether the elements are contiguous."""

_Places = tuple[list[int], list[int], list[bool]]
"""The same of many tensors."""

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_BYTES, _VERSION = attrgetter("nbytes"), attrgetter("_version")

_Kind = tuple[torch.device, torch.dtype]


class Fingerprints:
    """Takes fingerprints of a state, step after step. For one thread."""

    def __init__(self) -> None:
        self._plan = _Plan(([], [], []), {}, (), {})

    def take(self, state: Any) -> Fingerprint:
        """The fingerprint of a state as it is now."""
        found: list[torch.Tensor] = []
        _walk(state, found)
        return self.take_of(found)

    def take_of(self, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        """The fingerprint of tensors as they are now."""
        tensors = plain(tensors)
        places = _places_of(tensors)
        if places != self._plan.places:
            self._plan = _plan(tensors, places, self._plan.extents)
        plan = self._plan
        host = [addresses.read() for addresses in plan.host]
        devices = {kind: _join(tensors, numbers) for kind, numbers in plan.devices.items()}
        return Fingerprint(plan, _versions_of(tensors), host, devices)


def _walk(node: Any, found: list[torch.Tensor]) -> None:
    """Collect the tensors of a state, in an order that depends on the state alone."""
    match node:
        case torch.Tensor():
            found.append(node)
        case torch.nn.Module():
            for part in node.modules():
                own = part._parameters.values()  # noqa: SLF001
                found += [tensor for tensor in own if tensor is not None]
                buffers = part._buffers.values()  # noqa: SLF001
                found += [one for one in buffers if one is not None and one.nbytes > SMALL]
        case Optimizer():
            kept: list[Any] = []
            for values in node.state.values():
                kept += values.values() if isinstance(values, dict) else [values]
            if set(map(type, kept)) <= _PLAIN:
                found += kept
            else:
                _walk(kept, found)
        case Mapping():
            for value in node.values():
                _walk(value, found)
        case list() | tuple():
            for value in node:
                _walk(value, found)
        case ShardedTensor():
            found += [part.data for part in node.parts if isinstance(part.data, torch.Tensor)]


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """The tensors at a moment: where they lay, how often they were written, and samples."""

    plan: _Plan
    versions: list[int]
    host: list[npt.NDArray[Any]]
    devices: dict[_Kind, torch.Tensor]

    def digest(self) -> str:
        """A text that changes when any of this changes."""
        samples = [*self.host, *map(_bytes_on_host, self.devices.values())]
        facts = repr((self.plan.places, self.versions)).encode()
        return hex_digest(facts + b"".join(sample.tobytes() for sample in samples))

    def changed(self, state: Any, but: Collection[int] = ()) -> str:
        """The name of the first tensor that has changed, but for those with these ids; or empty."""
        found: list[torch.Tensor] = []
        _walk(state, found)
        tensors = plain(found)
        if len(tensors) != len(self.versions):
            return "a tensor that was added or removed"
        may = np.array([id(tensor) in but for tensor in tensors], dtype=bool)
        for number in np.flatnonzero(self.differs(tensors) & ~may).tolist():
            for name, tensor in named_tensors(state, "state"):
                if any(part is tensors[number] for part in _parts_of_subclass(tensor)):
                    return name
            return "a tensor"
        return ""

    def differs(self, tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.bool_]:
        """Which of as many tensors are not what they were."""
        facts = zip(*_places_of(tensors), _versions_of(tensors), strict=True)
        before = zip(*self.plan.places, self.versions, strict=True)
        # Where memory has moved, nothing can be read any more.
        is_there = np.array([a == b for a, b in zip(facts, before, strict=True)], dtype=bool)
        differs = ~is_there
        for addresses, words in zip(self.plan.host, self.host, strict=True):
            chosen = is_there[addresses.owner]
            owner = addresses.owner[chosen]
            differs[owner[addresses.read(chosen) != words[chosen]]] = True
        for kind, sample in self.devices.items():
            numbers = self.plan.devices[kind]
            parts = torch.split(sample, [_num_samples(tensors[number]) for number in numbers])
            kept = [place for place, number in enumerate(numbers) if is_there[number]]
            if kept:
                own = [numbers[place] for place in kept]
                now = _bytes_on_host(_join(tensors, own))
                old = _bytes_on_host(torch.cat([parts[place] for place in kept]))
                width = kind[1].itemsize
                owner = np.repeat(own, [len(parts[place]) * width for place in kept])
                differs[owner[now != old]] = True
        return differs


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Where the samples of some tensors are."""

    places: _Places
    extents: dict[_Place, int]  # bytes of contiguous host memory that were found to be there
    host: Sequence[_Addresses]
    devices: dict[_Kind, list[int]]  # numbers of the tensors on each device


@dataclass(frozen=True, slots=True, eq=False)
class _Addresses:
    """Words of host memory. They may be read while the tensors lie where they lay."""

    owner: IntArray
    base: int
    index: IntArray
    dtype: npt.DTypeLike

    def read(self, chosen: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[Any]:
        index = self.index if chosen is None else self.index[chosen]
        if not len(index):
            return np.empty(0, self.dtype)
        memory = np.asarray(_Memory(self.base, int(index.max()) + 1, self.dtype))
        return memory.take(index)


class _Memory:
    """Memory from an address on, as an array; only parts of it need be there."""

    def __init__(self, address: int, length: int, dtype: npt.DTypeLike) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (length,),
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }


def _plan(tensors: Sequence[torch.Tensor], places: _Places, known: Mapping[_Place, int]) -> _Plan:
    extents: dict[_Place, int] = {}
    host = np.zeros(len(tensors), np.int64)
    devices: dict[_Kind, list[int]] = defaultdict(list)
    for number, (tensor, place) in enumerate(zip(tensors, zip(*places, strict=True), strict=True)):
        extent = known.get(place)
        if extent is None and _has_memory(tensor, place):
            if tensor.device.type != HOST:
                devices[tensor.device, tensor.dtype].append(number)
                continue
            extent = _num_spanned(tensor) * tensor.itemsize
        if extent is not None:
            host[number] = extent
            if place[2]:
                extents[place] = extent
    address = np.array(places[0], np.int64)
    # Words where they are aligned, and bytes of what is left.
    in_words = np.where(address % 4 == 0, host // 4, 0)
    words = _spread(address, in_words, np.uint32)
    rest = _spread(address + in_words * 4, host - in_words * 4, np.uint8)
    return _Plan(places, extents, (words, rest), dict(devices))


def _has_memory(tensor: torch.Tensor, place: _Place) -> bool:
    """True if all elements are in memory: FSDP and others give back that of a tensor they keep."""
    if not place[0] or not place[1]:
        return False
    storage = tensor.untyped_storage()
    end = (tensor.storage_offset() + _num_spanned(tensor)) * tensor.itemsize
    return bool(storage.data_ptr()) and storage.nbytes() >= end


def _num_spanned(tensor: torch.Tensor) -> int:
    """Elements of memory from the first element of a tensor to the last."""
    if tensor.is_contiguous():
        return tensor.numel()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _spread(start: IntArray, count: IntArray, dtype: npt.DTypeLike) -> _Addresses:
    """Samples of ranges of words."""
    width = np.dtype(dtype).itemsize
    sampled = np.where(count * width <= WHOLE_BYTES, count, np.minimum(count, SAMPLES))
    owner = np.repeat(np.arange(len(count)), sampled)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sampled) - sampled, sampled)
    word = place * (count[owner] - 1) // np.maximum(sampled - 1, 1)[owner]
    address = start[owner] + word * width
    base = int(address.min(initial=np.iinfo(np.int64).max))
    return _Addresses(owner, base, (address - base) // width, dtype)


def _join(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    """The samples of tensors of one device and dtype."""
    with torch.no_grad():
        return torch.cat([_view(tensors[number]) for number in numbers])


def _view(tensor: torch.Tensor) -> torch.Tensor:
    if _num_samples(tensor) < SAMPLES or tensor.nbytes <= WHOLE_BYTES:
        sample = tensor.reshape(-1)
    else:
        step = (_num_spanned(tensor) - 1) // (SAMPLES - 1)
        sample = tensor.as_strided((SAMPLES,), (step,), tensor.storage_offset())
    return sample.view(torch.uint8) if sample.itemsize == 1 else sample


def _num_samples(tensor: torch.Tensor) -> int:
    return tensor.numel() if tensor.nbytes <= WHOLE_BYTES else min(tensor.numel(), SAMPLES)


def _bytes_on_host(sample: torch.Tensor) -> npt.NDArray[np.uint8]:
    taken: npt.NDArray[np.uint8] = sample.view(torch.uint8).cpu().numpy()
    return taken


def plain(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors of which subclasses consist, such as the local one of a DTensor."""
    if set(map(type, tensors)) <= _PLAIN:
        return tensors
    # Of a DTensor; the general way takes longer.
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return local if set(map(type, local)) <= _PLAIN else _parts_of(local)


def _parts_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part for tensor in tensors for part in _parts_of_subclass(tensor)]


def _parts_of_subclass(tensor: Any) -> Iterator[torch.Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts_of_subclass(getattr(tensor, name))
    else:
        yield tensor


def _places_of(tensors: Sequence[torch.Tensor]) -> _Places:
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        return addresses, list(map(_BYTES, tensors)), [one.is_contiguous() for one in tensors]
    except (RuntimeError, NotImplementedError):
        found = [_place_of(tensor) for tensor in tensors]
        return [one[0] for one in found], [one[1] for one in found], [one[2] for one in found]


def _place_of(tensor: torch.Tensor) -> _Place:
    try:
        return tensor.data_ptr(), tensor.nbytes, tensor.is_contiguous()
    except (RuntimeError, NotImplementedError):
        return 0, 0, False  # a sparse tensor, say, has no memory of its own


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # tensors made in inference mode have none
        return [-1 if one.is_inference() else one._version for one in tensors]  # noqa: SLF001


def named_tensors(node: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state that a process holds, with their names there."""
    match node:
        case torch.Tensor():
            yield name, node
        case torch.nn.Module():
            for key, tensor in (*node.named_parameters(), *node.named_buffers()):
                yield f"{name}.{key}", tensor
        case Optimizer():
            yield from named_tensors([*node.state.values()], f"{name}.state")
        case Mapping():
            for key, value in node.items():
                yield from named_tensors(value, f"{name}.{key}")
        case list() | tuple():
            for number, value in enumerate(node):
                yield from named_tensors(value, f"{name}.{number}")
        case ShardedTensor():
            for part in node.parts:
                yield from named_tensors(part.data, name)
        case Joined():
            yield from named_tensors([node.state, node.beside], name)
