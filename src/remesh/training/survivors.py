"""The state of a job in the memory of its processes, for `Manager(job=...)`.

At a step boundary, where `Manager.step` is called, the tensors of a rank are complete. They stay
as they are until an optimizer changes them, which a hook of torch's optimizers notices. So a rank
whose training function is interrupted in the forward or backward pass still holds the state of the
last boundary, and nothing was copied for it. What else may change meanwhile is small and is copied
at the boundary: buffers of modules, hyperparameters of optimizers, random numbers, plain values,
and the state dicts of other objects, such as schedulers and samplers.

Other writes are possible: averaged weights that are swapped in, a momentum encoder that moves in
the forward pass. So a fingerprint of all tensors is taken at the boundary (`fingerprints`), and
compared before they are used; and copies that several ranks hold are compared in full. If anything
differs, the step comes from the next source.

A device computes after the host has queued the work, collectives of NCCL too, and one that is
aborted ends as if it were done: what is queued behind it computes with what it left. So the host
waits for the device at two places, before an optimizer begins and at the boundary.

When the function is entered again, each rank offers the step of its boundary. The newest step of
which the ranks that offer it hold everything is brought into the new layout by live resharding; a
rank that offers nothing, or another step, takes part with an empty source. Before that, each rank
rolls its old state back to the boundary. The old tensors are held until all ranks have filled the
new ones, so both need room at the same time. Before the function is entered it is looked whether
each device has that. Where an accelerator has not, the old tensors move to host memory; where the
host has not either, they are given up, and the state comes from the next source.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from remesh.adapters.cuda import finish_work
from remesh.catalog import CheckpointInfo, ManagerNote, step_name
from remesh.checkpoint import Buffers, RestoreReport
from remesh.checkpoint.resharding import Resharder
from remesh.core.host_memory import available_memory
from remesh.core.sharded import Part, ShardedObject, ShardedTensor, ShardedTensorFactory
from remesh.elastic.training_job import TrainingJob
from remesh.errors import CheckpointNotFoundError, MismatchError, StateError, WorldChangedError
from remesh.exchange import Exchange, run_on_all
from remesh.training import rng
from remesh.training.fingerprints import (
    SMALL,
    Fingerprint,
    Fingerprints,
    described,
    named_tensors,
    num_bytes,
    plain,
)
from remesh.training.resuming import Recorder, Source, with_rows

_LOGGER = logging.getLogger("remesh")

HOST = torch.device("cpu")

MAX_COPY = SMALL
"""Bytes of a leaf that are copied at each boundary; of a larger one a fingerprint is taken."""


class NotWatchedError(Exception):
    """Changes of a leaf would not be seen, so the state in memory cannot be relied on."""


class ChangedError(Exception):
    """A tensor was changed after the boundary, and not by an optimizer."""


class _Recovery(Resharder):
    """Compares all copies in full: one of them may have been changed unseen."""

    compares = "equal"


@dataclass(slots=True)
class Boundary:
    """The state of a rank when its last step was complete."""

    note: ManagerNote
    streams: Mapping[str, rng.Stream]  # random numbers as they were
    roles: rng.Roles
    keeper: Keeper  # gives the state as it was
    saved_at: float
    """When the last save began that was committed, by this process's monotonic clock."""
    is_clean: bool = True  # whether no optimizer has begun to change it

    def make_room(self) -> bool:
        """Leave room for the next state; False if this one has to be given up for it."""
        step = self.note.step
        try:
            is_kept = not self.is_clean or self.keeper.make_room()
        except Exception as error:  # noqa: BLE001 - a device may be in any state after an abort
            _LOGGER.warning("step %d is given up in memory: %s", step, error)
            return False
        if not is_kept:
            _LOGGER.warning("step %d is given up in memory: there is no room for both", step)
        return is_kept


class Offer(msgspec.Struct, frozen=True):
    """The step that a rank has in memory."""

    note: ManagerNote  # of the boundary
    role: list[int]  # coordinates of its role
    unsaved_seconds: float = 0.0  # see `Source`


class SurvivorState:
    """The memory of this process, from entry to entry; the job holds the boundary."""

    def __init__(
        self, job: TrainingJob, exchange: Exchange, recorder: Recorder, buffers: Buffers | None
    ) -> None:
        self._job = job
        self._exchange = exchange
        self._recorder = recorder
        self._buffers = buffers
        self.is_on = True  # whether the state can be relied on, for all its changes are seen
        self._optimizers: set[int] = set()  # ids of those in the state
        self._devices: set[str] = set()  # CUDA devices that hold any of it
        _OPEN.add(self)

    def watches(self, optimizer: Optimizer) -> bool:
        """True if a step of an optimizer changes what is held here."""
        return not self._optimizers or id(optimizer) in self._optimizers

    def begin_change(self) -> None:
        """Note that an optimizer begins to change tensors.

        Raises:
            WorldChangedError: If what it would change them by may be wrong.
        """
        if not self._job.is_changing:
            self._finish_work()
            self._job.is_changing = True
            if self._job.is_aborted:  # since the line before, and nothing is changed yet
                self._job.is_changing = False
                raise WorldChangedError("the world of the job changes")
        if self._job.boundary is not None:
            self._job.boundary.is_clean = False

    def mark(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None,
        fingerprint: Fingerprint,
        saved_at: float,
    ) -> None:
        """A step is complete on this rank.

        Raises:
            WorldChangedError: If the training function has to be left.
        """
        if self.is_on:
            used = {sample.device for sample in fingerprint.samples}
            self._devices = {str(device) for device in used if device.type == "cuda"}
            try:
                keeper = Keeper(state, fingerprint)
                self._optimizers = keeper.optimizers
                streams = self._recorder.streams()
                streams = {name: stream.frozen() for name, stream in streams.items()}
                note = self._recorder.note(step, metrics, streams)
                self._finish_work()
                self._job.boundary = Boundary(note, streams, self._recorder.roles, keeper, saved_at)
            except NotWatchedError as problem:
                self.is_on, self._job.boundary, self._devices = False, None, set()
                _LOGGER.warning("the state is not taken from live memory: %s", problem)
        self._job.end_change()

    def _finish_work(self) -> None:
        """Wait until the devices have done what this thread has queued, if it is done as it should.

        Raises:
            WorldChangedError: If it was not, as collectives were aborted meanwhile.
        """
        # A graph that is captured computes nothing yet.
        if self._devices and not torch.cuda.is_current_stream_capturing():
            finish_work(sorted(self._devices))
        if self._job.is_aborted:
            raise WorldChangedError("the world of the job changes")

    def find(self) -> list[Source]:
        """The steps that ranks offer. Collective."""
        boundary, state, own = self._job.boundary, None, None
        if boundary is not None and boundary.is_clean and self.is_on:
            try:
                state = boundary.keeper.roll_back()
            except ChangedError as problem:
                _LOGGER.warning("step %d is not taken from memory: %s", boundary.note.step, problem)
            else:
                role = [coordinate for coordinate, _ in boundary.roles.own.values()]
                own = Offer(boundary.note, role, time.monotonic() - boundary.saved_at)
        replies = run_on_all(self._exchange, lambda: msgspec.msgpack.encode(own))
        steps: dict[int, dict[int, Offer]] = defaultdict(dict)
        for rank, reply in enumerate(replies):
            offer = msgspec.msgpack.decode(reply, type=Offer | None)
            if offer is not None:
                steps[offer.note.step][rank] = offer
        return [self._source(offers, state) for offers in steps.values()]

    def _source(self, offers: Mapping[int, Offer], state: Any) -> Source:
        """A step as `Manager.resume` wants it, with the ranks that offer it."""
        note = next(iter(offers.values())).note
        num_roles = math.prod(size for _, size in note.role_grid)
        if len({tuple(offer.role) for offer in offers.values()}) < num_roles:
            note = msgspec.structs.replace(note, streams=())  # not those of every role are there
        info = CheckpointInfo(
            name=step_name(note.step),
            path=f"live memory of {len(offers)} ranks",
            step=note.step,
            run=note.run,
            world_size=len(offers),
            metrics=note.metrics,
            note=note,
        )
        source: Any = {}
        own = self._exchange.rank
        if own in offers:
            # Of several ranks with one role, the first gives its random numbers.
            boundary, role = self._job.boundary, offers[own].role
            is_first = role not in [one.role for rank, one in offers.items() if rank < own]
            streams = boundary.streams if note.streams and is_first else {}
            source = with_rows(state, rng.rows_of(streams, replace(boundary.roles, replica=0)))

        def load(target: Any, **options: Any) -> RestoreReport:
            recovery = _Recovery(
                source,
                target,
                missing=options["missing"],
                cast=options["cast"],
                buffers=self._buffers,
                group=self._exchange,
                on_event=options["on_event"],
            )
            try:
                return recovery.push().restored
            except (StateError, MismatchError) as error:
                raise CheckpointNotFoundError(
                    f"the memory of {len(offers)} ranks does not give step {note.step}: {error}"
                ) from error

        return Source(
            info,
            load,
            "live",
            unsaved_seconds=max(offer.unsaved_seconds for offer in offers.values()),
        )

    def close(self) -> None:
        """Watch no optimizer any more. The boundary stays."""
        _OPEN.discard(self)


_OPEN: set[SurvivorState] = set()
"""Those that watch optimizers. Any thread may change it: it is copied before it is walked over."""


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Note that an optimizer begins to change tensors; its arguments, if they are others now.

    An optimizer that is given a closure changes nothing until that has returned for the first time:
    it is the forward and the backward pass.
    """
    memories = [memory for memory in _OPEN.copy() if memory.watches(optimizer)]
    if not memories:
        return None

    def begin_change() -> None:
        for memory in memories:
            memory.begin_change()

    closure = kwargs["closure"] if "closure" in kwargs else (*args, None)[1]
    if not callable(closure):
        begin_change()
        return None

    def compute() -> Any:
        loss = closure()
        begin_change()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": compute}
    return (args[0], compute, *args[2:]), kwargs


# Once and for ever: while an optimizer steps in any thread, torch walks over all these hooks, and
# the step fails if one comes or goes.
register_optimizer_step_pre_hook(_before_step)


class Keeper:
    """Copies what may change outside of optimizers, and notices if other tensors do."""

    def __init__(self, state: Any, fingerprint: Fingerprint) -> None:
        self.optimizers: set[int] = set()  # ids of those in the state
        self._fingerprint = fingerprint
        self._copied: dict[int, torch.Tensor] = {}  # by id, so that it stays theirs
        self._reorder: list[Callable[[], object]] = []  # put objects back into their places
        self._restore: list[Callable[[], object]] = []  # put copied values back
        self._rebuild = self.keep(state, "state")

    def roll_back(self) -> Any:
        """The state as it was."""
        with torch.no_grad():
            for put in self._reorder:
                put()
            state = self._rebuild()
            changed = self._fingerprint.changed(state, self._copied)
            if changed:
                raise ChangedError(f"{changed} was changed outside of an optimizer")
            for put in self._restore:
                put()
        return state

    def make_room(self) -> bool:
        state = self.roll_back()
        is_kept = make_room(state)
        self._fingerprint = Fingerprints().take(state)  # tensors may have moved
        return is_kept

    def keep(self, node: Any, name: str) -> Callable[[], Any]:
        """Keep a node of the state; how to get it later."""
        match node:
            case torch.nn.Module():
                self._keep_module(node, name)
            case Optimizer():
                self._keep_optimizer(node)
            case torch.Tensor():
                self._copy_if_small(node)
            case Mapping():
                parts = {key: self.keep(value, f"{name}.{key}") for key, value in node.items()}
                return lambda: {key: get() for key, get in parts.items()}
            case list() | tuple():
                kind = type(node)
                items = [self.keep(value, f"{name}.{place}") for place, value in enumerate(node)]
                return lambda: kind([get() for get in items])
            case ShardedTensor():
                boxes, arrays = [one.box for one in node.parts], [one.data for one in node.parts]
                data = self.keep(arrays, name)
                return lambda: replace(node, parts=tuple(map(Part, boxes, data())))
            case ShardedObject() | ShardedTensorFactory():
                data = self.keep(node.data, name)
                return lambda: replace(node, data=data())
            case np.ndarray():
                array = _copied(node, name, node)
                return lambda: array
            case torch.Generator():
                drawn = node.get_state()
                self._restore.append(lambda: node.set_state(drawn))
            case _ if (inner := described(node)) is not node:
                self.keep(inner, name)
            case _ if hasattr(node, "state_dict") and hasattr(node, "load_state_dict"):
                kept = _copied(node.state_dict(), name, node)
                self._restore.append(lambda: node.load_state_dict(copy.deepcopy(kept)))
            case _:
                value = copy.deepcopy(node)
                return lambda: value
        return lambda: node

    def _keep_module(self, module: torch.nn.Module, name: str) -> None:
        for part in module.modules():
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
                self._keep_extra_state(part, name)
            for key, buffer in part._buffers.items():  # noqa: SLF001 - and their places
                if buffer is not None:
                    self._keep_buffer(part._buffers, key, buffer)  # noqa: SLF001
        self._reorder.append(lambda: _shard_again(module))

    def _keep_extra_state(self, part: torch.nn.Module, name: str) -> None:
        kept = _copied(part.get_extra_state(), name, part)
        self._restore.append(lambda: part.set_extra_state(copy.deepcopy(kept)))

    def _keep_buffer(
        self, place: dict[str, torch.Tensor | None], key: str, buffer: torch.Tensor
    ) -> None:
        """Keep a buffer; a new one may be put in its place before it is needed."""

        def put() -> None:
            place[key] = buffer

        self._reorder.append(put)
        self._copy_if_small(buffer)

    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers.add(id(optimizer))
        kept = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

        def put() -> None:
            for group, values in zip(optimizer.param_groups, kept, strict=True):
                group.update(values)

        self._restore.append(put)

    def _copy_if_small(self, tensor: torch.Tensor) -> None:
        if num_bytes(tensor) > MAX_COPY:
            return
        kept = tensor.detach().clone()
        self._copied.update({id(part): part for part in plain([tensor])})

        def put() -> None:
            if (tensor.shape, tensor.dtype) != (kept.shape, kept.dtype):
                raise ChangedError(f"a tensor of shape {tuple(kept.shape)} has another shape now")
            tensor.detach().copy_(kept)

        self._restore.append(put)


def _copied(taken: Any, name: str, owner: object) -> Any:
    """A copy of what an object gives of itself, without what autograd knows of it."""
    held = [*_arrays_of(taken)]
    tensors = [one for one in held if isinstance(one, torch.Tensor)]
    arrays = [one for one in held if isinstance(one, np.ndarray)]
    if sum(map(num_bytes, tensors)) + sum(one.nbytes for one in arrays) > MAX_COPY:
        raise NotWatchedError(
            f"{name} ({type(owner).__name__}) has more than {MAX_COPY >> 20} MiB that may "
            "change unseen\nGive it to the state as tensors of torch, or as a module"
        )
    return copy.deepcopy(taken, {id(one): one.detach().clone() for one in tensors})


def _arrays_of(node: Any) -> Iterator[Any]:
    """The tensors and arrays in a state dict."""
    if isinstance(node, torch.Tensor | np.ndarray):
        yield node
    elif isinstance(node, Mapping | list | tuple):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _arrays_of(value)


def _shard_again(module: torch.nn.Module) -> None:
    """Bring modules of FSDP2 back that an exception has left unsharded."""
    if any(hasattr(part, "reshard") and hasattr(part, "unshard") for part in module.modules()):
        # `reshard` would leave what a forward pass has gathered, if the root was interrupted in it.
        module.state_dict()


def bytes_by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, int]:
    """The memory that tensors take on each device; memory that two share counts once."""
    sizes: dict[torch.device, dict[int, int]] = defaultdict(dict)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[tensor.device][storage.data_ptr()] = storage.nbytes()
    return {device: sum(found.values()) for device, found in sizes.items()}


def free_bytes(device: torch.device) -> int | None:
    """The bytes that a device has room for; None if that is not known."""
    if device == HOST:
        return available_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return None


def must_move(
    held: Mapping[torch.device, int], free: Mapping[torch.device, int | None]
) -> set[torch.device] | None:
    """The devices whose tensors have to move to the host, as there is no room for a second state.

    None if the host has no room for what it would hold.
    """
    moving = {
        device
        for device, size in held.items()
        if device != HOST and (room := free[device]) is not None and room < size
    }
    needed = held.get(HOST, 0) + sum(held[device] for device in moving)
    room = free[HOST]
    return None if room is not None and room < needed else moving


def make_room(state: Any) -> bool:
    """Move tensors of a state to the host if need be; False if there is no room there either."""
    tensors = plain([tensor for _, tensor in named_tensors(state)])
    held = bytes_by_device(tensors)
    moving = must_move(held, {device: free_bytes(device) for device in {HOST, *held}})
    if moving is None:
        return False
    for tensor in tensors:
        if tensor.device in moving:
            tensor.data = tensor.data.to(HOST)  # neither its identity nor its version changes
    return True
