"""Whether the tensors of a state are what they were at an earlier moment, without a copy of them.

Torch counts writes to a tensor (`_version`), but not those through `tensor.data`, through numpy or
in kernels of others. So a fingerprint has, of each tensor, its address, its version and a sample of
its memory: all of a small one, and else 32 elements, spread evenly. A write that misses all of
these is not noticed.

It is taken at each step, so it must be cheap. The state is walked, and lists of addresses, sizes
and versions are made. The samples are views that one call joins for each device and dtype. They
stay on their device until they are compared, so that the host does not wait for it at a step.

A fingerprint holds no tensor: it never keeps memory alive that the training gives back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import Optimizer

from remesh.adapters import DescribedOptimizer, NamedModule
from remesh.core.integrity import hex_digest
from remesh.core.sharded import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

SMALL = 1 << 20
"""Bytes up to which buffers of modules are no part of a fingerprint. A forward pass changes them,
and they are small enough to be copied."""

NUM_SAMPLES = 32
"""Elements in the sample of a tensor."""

WHOLE_BYTES = 256
"""Bytes of a tensor up to which its sample is all of it."""

_Place = tuple[int, int, tuple[int, ...]]
"""Address, bytes and strides; zeros for a tensor without memory of its own, as a sparse one."""
_Kinds = dict[tuple[torch.device, torch.dtype], tuple[list[int], list[int | None]]]
"""Numbers of the tensors of each device and dtype, and the steps of their samples."""

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_BYTES, _VERSION = attrgetter("nbytes"), attrgetter("_version")
_STRIDES = torch.Tensor.stride
_NO_MEMORY = (RuntimeError, ValueError)  # that of a lazy module is a ValueError


class Fingerprints:
    """Takes fingerprints of a state, step after step. For one thread."""

    def __init__(self, whole_bytes: int = WHOLE_BYTES) -> None:
        self._whole_bytes = whole_bytes
        # As long as no tensor moves, their memory is where it was.
        self._places: list[_Place] = []
        self._kinds: _Kinds = {}

    def take(self, state: Any) -> Fingerprint:
        """The fingerprint of a state as it is now."""
        found: list[torch.Tensor] = []
        _walk(state, found)
        tensors = plain(found)
        places = _places_of(tensors)
        if places != self._places:
            self._places, self._kinds = places, self._kinds_of(tensors, places)
        kinds = [*self._kinds.values()]
        samples = [_join([tensors[number] for number in own], steps) for own, steps in kinds]
        return Fingerprint(places, _versions_of(tensors), kinds, samples)

    def _kinds_of(self, tensors: Sequence[torch.Tensor], places: Sequence[_Place]) -> _Kinds:
        kinds: _Kinds = defaultdict(lambda: ([], []))
        for number, (tensor, place) in enumerate(zip(tensors, places, strict=True)):
            if all(place[:2]) and not tensor.is_quantized and _has_memory(tensor):
                numbers, steps = kinds[tensor.device, tensor.dtype]
                numbers.append(number)
                steps.append(_step_of(tensor, self._whole_bytes))
        return kinds


def _walk(node: Any, found: list[torch.Tensor]) -> None:
    """Collect the tensors of a state, in an order that depends on the state alone."""
    match node := described(node):
        case torch.Tensor():
            found.append(node)
        case torch.nn.Module():
            for part in node.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()  # the parameters that an evaluation has left gathered
                own = part._parameters.values()  # noqa: SLF001
                found += [tensor for tensor in own if tensor is not None]
                buffers = part._buffers.values()  # noqa: SLF001
                found += [one for one in buffers if one is not None and num_bytes(one) > SMALL]
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

    places: list[_Place]
    versions: list[int]
    kinds: list[tuple[list[int], list[int | None]]]  # see `_Kinds`
    samples: list[torch.Tensor]  # of each kind, joined

    def digest(self) -> str:
        """A text that changes when any of this changes but the addresses."""
        sampled = {
            number
            for numbers, steps in self.kinds
            for number, step in zip(numbers, steps, strict=True)
            if step is not None
        }
        # One that was never written may be made anew, with other values, each time it is asked for.
        places = [
            place if number in sampled and not version else place[1:]
            for number, (place, version) in enumerate(zip(self.places, self.versions, strict=True))
        ]
        facts = repr((places, self.versions)).encode()
        return hex_digest(facts + b"".join(_host_bytes(one).tobytes() for one in self.samples))

    def changed(self, state: Any, but: Collection[int] = ()) -> str:
        """The name of the first tensor that has changed, but for those with these ids; or empty."""
        found: list[torch.Tensor] = []
        _walk(state, found)
        tensors = plain(found)
        if len(tensors) != len(self.versions):
            return "a tensor that was added or removed"
        may = np.array([id(tensor) in but for tensor in tensors], dtype=bool)
        for number in np.flatnonzero(self.differs(tensors) & ~may).tolist():
            for name, tensor in named_tensors(state):
                if any(part is tensors[number] for part in _parts_of_subclass(tensor)):
                    return name
            return "a tensor"
        return ""

    def differs(self, tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.bool_]:
        """Which of as many tensors are not what they were."""
        facts = zip(_places_of(tensors), _versions_of(tensors), strict=True)
        before = zip(self.places, self.versions, strict=True)
        # Where memory has moved, nothing can be read any more.
        is_there = np.array([a == b for a, b in zip(facts, before, strict=True)], dtype=bool)
        differs = ~is_there
        for (numbers, steps), sample in zip(self.kinds, self.samples, strict=True):
            kept = [place for place, number in enumerate(numbers) if is_there[number]]
            if kept:
                own = [numbers[place] for place in kept]
                # As they were: a tensor may have another size now.
                sizes = [
                    self.places[number][1] // sample.itemsize if step is None else NUM_SAMPLES
                    for number, step in zip(numbers, steps, strict=True)
                ]
                parts = torch.split(sample, sizes)
                now = _host_bytes(
                    _join([tensors[number] for number in own], [steps[place] for place in kept])
                )
                then = _host_bytes(torch.cat([parts[place] for place in kept]))
                width = sample.itemsize
                owner = np.repeat(own, [sizes[place] * width for place in kept])
                differs[owner[now != then]] = True
        return differs


def _has_memory(tensor: torch.Tensor) -> bool:
    """True if all elements are in memory: FSDP and others give back that of a tensor they keep."""
    storage = tensor.untyped_storage()
    end = (tensor.storage_offset() + _num_spanned(tensor)) * tensor.itemsize
    return bool(storage.data_ptr()) and storage.nbytes() >= end


def _num_spanned(tensor: torch.Tensor) -> int:
    """Elements of memory from the first element of a tensor to the last."""
    if tensor.is_contiguous():
        return tensor.numel()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _join(tensors: Sequence[torch.Tensor], steps: Sequence[int | None]) -> torch.Tensor:
    """The samples of tensors of one device and dtype."""
    shape = (NUM_SAMPLES,)
    with torch.no_grad():
        samples = [
            tensor.reshape(-1)
            if step is None
            else tensor.as_strided(shape, (step,), tensor.storage_offset())
            for tensor, step in zip(tensors, steps, strict=True)
        ]
        if samples[0].itemsize == 1:
            samples = [sample.view(torch.uint8) for sample in samples]
        return torch.cat(samples)


def _step_of(tensor: torch.Tensor, whole_bytes: int) -> int | None:
    """Elements of memory from one of the sample to the next; None if the sample is the whole."""
    if tensor.numel() < NUM_SAMPLES or tensor.nbytes <= whole_bytes:
        return None
    return (_num_spanned(tensor) - 1) // (NUM_SAMPLES - 1)


def _host_bytes(sample: torch.Tensor) -> npt.NDArray[np.uint8]:
    taken: npt.NDArray[np.uint8] = sample.view(torch.uint8).cpu().numpy()
    return taken


def num_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; 0 if it has no memory of its own, as a sparse one."""
    return _place_of(tensor)[1]


def plain(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors of which subclasses consist, such as the local one of a DTensor."""
    if set(map(type, tensors)) <= _PLAIN:
        return tensors
    # Of a DTensor; the general way takes longer.
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    if set(map(type, local)) <= _PLAIN:
        return local
    return [part for tensor in local for part in _parts_of_subclass(tensor)]


def _parts_of_subclass(tensor: Any) -> Iterator[torch.Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts_of_subclass(getattr(tensor, name))
    else:
        yield tensor


def _places_of(tensors: Sequence[torch.Tensor]) -> list[_Place]:
    try:
        addresses = map(torch.Tensor.data_ptr, tensors)
        return list(zip(addresses, map(_BYTES, tensors), map(_STRIDES, tensors), strict=True))
    except _NO_MEMORY:
        return [_place_of(tensor) for tensor in tensors]


def _place_of(tensor: torch.Tensor) -> _Place:
    try:
        return tensor.data_ptr(), tensor.nbytes, tensor.stride()
    except _NO_MEMORY:
        return 0, 0, ()


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # tensors made in inference mode have none
        return [-1 if one.is_inference() else one._version for one in tensors]  # noqa: SLF001


def described(node: Any) -> Any:
    """What a description in a state is of; other parts of a state as they are."""
    match node:
        case NamedModule():
            return node.module
        case DescribedOptimizer():
            return [node.optimizer, *node.stands_for] if node.stands_for else node.optimizer
        case ShardedTensorFactory() | ShardedObject():
            return node.data
        case LocalNonpersistentObject():
            return None
    return node


def named_tensors(node: Any, name: str = "state") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state that a process holds, with their names there."""
    parts: Iterable[tuple[object, Any]] = ()
    match node := described(node):
        case torch.Tensor():
            yield name, node
        case torch.nn.Module():
            parts = (*node.named_parameters(), *node.named_buffers())
        case Optimizer():
            groups = [{**group, "params": None} for group in node.param_groups]
            parts = [("state", [*node.state.values()]), ("param_groups", groups)]
        case Mapping():
            parts = node.items()
        case list() | tuple():
            parts = enumerate(node)
        case ShardedTensor():
            for part in node.parts:
                yield from named_tensors(part.data, name)
        case _ if hasattr(node, "state_dict") and hasattr(node, "load_state_dict"):
            parts = node.state_dict().items()
    for key, part in parts:
        yield from named_tensors(part, f"{name}.{key}")
