"""The state of a job in the memory of its processes, for `Manager(job=...)`.

At a step boundary, where `Manager.step` is called, the tensors of a rank are complete. They stay
as they are until an optimizer changes them, which a hook of torch's optimizers notices. So a rank
whose training function is interrupted in the forward or backward pass still holds the state of the
last boundary, and nothing was copied for it. What else may change meanwhile is small and is copied
at the boundary: buffers of modules, hyperparameters of optimizers, random numbers, plain values,
and the state dicts of other objects, such as schedulers and samplers.

When the function is entered again, each rank offers the step of its boundary. The newest step of
which the ranks that offer it hold everything is brought into the new layout by live resharding; a
rank that offers nothing, or another step, takes part with an empty source. Before that, each rank
rolls its old state back to the boundary. The old tensors are held until all ranks have filled the
new ones, so both need room at the same time: `room` sees to that before the function is entered.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from remesh.catalog import CheckpointInfo, ManagerNote, step_name
from remesh.checkpoint import Buffers
from remesh.errors import CheckpointNotFoundError, MismatchError, StateError
from remesh.exchange import Exchange, run_on_all
from remesh.resharding import reshard
from remesh.sharded import ShardedTensor
from remesh.training import resuming, rng
from remesh.training.resuming import Source
from remesh.training.room import bytes_by_device, make_room, tensors_of
from remesh.training_job import TrainingJob

_LOGGER = logging.getLogger("remesh")

MAX_COPY = 1 << 20
"""Bytes of a leaf that are copied at each boundary; a larger one is watched by its version."""


class NotWatchedError(Exception):
    """Changes of a leaf would not be seen, so the state in memory cannot be relied on."""


class ChangedError(Exception):
    """A tensor was changed after the boundary, and not by an optimizer."""


@dataclass(slots=True)
class Boundary:
    """What a rank held when its last step was complete.

    Attributes:
        step: The step.
        note: What a save would have recorded then.
        parent: What `Manager` had as the parent of its saves.
        roll_back: Gives the state as it was.
        rows: Random numbers, as they are saved.
        role: Coordinates of this rank's role.
        is_clean: Whether no optimizer has begun to change it.
    """

    step: int
    note: ManagerNote
    parent: str
    roll_back: Callable[[], Any]
    rows: Callable[[], Mapping[str, ShardedTensor]]
    role: list[int]
    is_clean: bool = True

    def make_room(self) -> bool:
        """Leave room for the next state; False if this one has to be given up for it."""
        try:
            is_kept = not self.is_clean or make_room(self.roll_back())
        except Exception as error:  # noqa: BLE001 - a device may be in any state after an abort
            _LOGGER.warning("step %d is given up in memory: %s", self.step, error)
            return False
        if not is_kept:
            _LOGGER.warning("step %d is given up in memory: there is no room for both", self.step)
        return is_kept


class Offer(msgspec.Struct, frozen=True):
    """What a rank has in memory.

    Attributes:
        step: The step; None if it has nothing.
        note: Of the boundary, as JSON.
        parent: See `Boundary`.
        role: See `Boundary`.
        world_size: Ranks of the world that it was in.
    """

    step: int | None
    note: bytes = b""
    parent: str = ""
    role: list[int] = []


def steps_on_offer(offers: list[Offer]) -> dict[int, list[int]]:
    """The ranks that offer each step, from the newest step to the oldest."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        if offer.step is not None:
            ranks[offer.step].append(rank)
    return dict(sorted(ranks.items(), reverse=True))


def has_all_roles(offers: list[Offer], note: ManagerNote) -> bool:
    """Whether the random numbers of every role of a boundary are there."""
    found = {tuple(offer.role) for offer in offers}
    return len(found) == int(np.prod([size for _, size in note.role_grid], dtype=np.int64))


class LiveMemory:
    """The memory of this process, from entry to entry.

    Args:
        job: The job; it holds the boundary.
        exchange: The ranks.
        buffers: See `remesh.save`.

    Attributes:
        is_on: Whether the state can be relied on; it cannot if its changes are not seen.
    """

    def __init__(self, job: TrainingJob, exchange: Exchange, buffers: Buffers | None) -> None:
        self._job = job
        self._exchange = exchange
        self._buffers = buffers
        self.is_on = True
        self._optimizers: set[int] = set()  # ids of those in the state
        self._parts: dict[torch.nn.Module, list[torch.nn.Module]] = {}
        _OPEN.add(self)

    def watches(self, optimizer: Optimizer) -> bool:
        """Whether a step of an optimizer changes what is held here."""
        return not self._optimizers or id(optimizer) in self._optimizers

    def begin_change(self) -> None:
        """Note that an optimizer begins to change tensors."""
        self._job.is_changing = True
        if self._job.boundary is not None:
            self._job.boundary.is_clean = False

    def mark(
        self,
        step: int,
        state: Any,
        note: Callable[[], ManagerNote],
        parent: str,
        rows: Callable[[], Mapping[str, ShardedTensor]],
        roles: rng.Roles,
    ) -> None:
        """A step is complete on this rank.

        Raises:
            WorldChangedError: If the training function has to be left.
        """
        if not self.is_on:
            self._job.end_change()
            return
        try:
            keeper = _Keeper(self._parts)
            rebuild = keeper.keep(state, "state")
            self._optimizers = keeper.optimizers
            role = [coordinate for coordinate, _ in roles.own.values()]
            self._job.boundary = Boundary(
                step, note(), parent, keeper.roll_back(rebuild), rows, role
            )
        except NotWatchedError as problem:
            self.is_on, self._job.boundary = False, None
            _LOGGER.warning("the state is not taken from live memory: %s", problem)
        self._job.end_change()

    def find(self) -> list[Source]:
        """What the ranks hold, the newest first. Collective."""
        boundary = self._job.boundary
        state: Any = None
        if boundary is not None and boundary.is_clean and self.is_on:
            try:
                state = boundary.roll_back()
            except ChangedError as problem:
                _LOGGER.warning("step %d is not taken from memory: %s", boundary.step, problem)
        has_state = boundary is not None and state is not None

        def offer() -> bytes:
            if not has_state:
                return msgspec.msgpack.encode(Offer(None))
            note = msgspec.json.encode(boundary.note)
            return msgspec.msgpack.encode(
                Offer(boundary.step, note, boundary.parent, boundary.role)
            )

        replies = run_on_all(self._exchange, offer)
        offers = [msgspec.msgpack.decode(reply, type=Offer) for reply in replies]
        steps = steps_on_offer(offers).items()
        return [self._source(step, ranks, offers, state) for step, ranks in steps]

    def _source(self, step: int, ranks: list[int], offers: list[Offer], state: Any) -> Source:
        """A step as `Manager.resume` wants it."""
        first = offers[ranks[0]]
        note = msgspec.json.decode(first.note, type=ManagerNote)
        if not has_all_roles([offers[rank] for rank in ranks], note):
            note = msgspec.structs.replace(note, streams=())
        info = CheckpointInfo(
            name=step_name(step),
            path=f"live memory of {len(ranks)} ranks",
            step=step,
            run=note.run,
            created="",
            num_bytes=0,
            world_size=len(ranks),
            save_id="",
            metrics=note.metrics,
            note=note,
        )
        boundary = self._job.boundary
        source: Any = {}
        if self._exchange.rank in ranks:
            rows = boundary.rows() if note.streams else {}
            source = resuming.with_rows(state, rows)

        def load(target: Any, **options: Any) -> Any:
            try:
                return reshard(
                    source,
                    target,
                    missing=options["missing"],
                    cast=options["cast"],
                    buffers=self._buffers,
                    group=self._exchange,
                    on_report=options["on_report"],
                    on_event=options["on_event"],
                )
            except (StateError, MismatchError) as error:
                raise CheckpointNotFoundError(
                    f"the memory of {len(ranks)} ranks does not give step {step}: {error}"
                ) from error

        held = sum(bytes_by_device(list(tensors_of(source))).values())
        return Source(info, load, kind="live", parent=first.parent, held_bytes=held)

    def close(self) -> None:
        """Watch no optimizer any more. The boundary stays."""
        _OPEN.discard(self)


_OPEN: set[LiveMemory] = set()
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


@dataclass(slots=True)
class _Keeper:
    """Copies what may change outside of optimizers.

    Attributes:
        parts: The modules below each module, which take long to list; filled here.
        checks: Raise `ChangedError` if a tensor is not what it was.
        restore: Put copies back.
        optimizers: Ids of the optimizers that were found.
    """

    parts: dict[torch.nn.Module, list[torch.nn.Module]]
    checks: list[Callable[[], None]] = field(default_factory=list)
    restore: list[Callable[[], object]] = field(default_factory=list)
    optimizers: set[int] = field(default_factory=set)

    def roll_back(self, rebuild: Callable[[], Any]) -> Callable[[], Any]:
        """Gives the state as it is now, whenever it is called."""

        def state() -> Any:
            for check in self.checks:
                check()
            with torch.no_grad():
                for put in self.restore:
                    put()
            return rebuild()

        return state

    def keep(self, node: Any, name: str) -> Callable[[], Any]:
        """Keep a node of the state; how to get it later."""
        match node:
            case torch.nn.Module():
                self._keep_module(node, name)
            case Optimizer():
                self._keep_optimizer(node)
            case torch.Tensor():
                self._watch(node, name)
            case Mapping():
                parts = {key: self.keep(value, f"{name}.{key}") for key, value in node.items()}
                return lambda: {key: get() for key, get in parts.items()}
            case list() | tuple():
                kind = type(node)
                items = [self.keep(value, f"{name}.{place}") for place, value in enumerate(node)]
                return lambda: kind([get() for get in items])
            case ShardedTensor():
                return self._keep_sharded(node, name)
            case np.ndarray():
                return self._keep_array(node, name)
            case torch.Generator():
                drawn = node.get_state()
                self.restore.append(lambda: node.set_state(drawn))
            case _ if hasattr(node, "state_dict") and hasattr(node, "load_state_dict"):
                self._keep_object(node, name)
            case _:
                value = copy.deepcopy(node)
                return lambda: value
        return lambda: node

    def _keep_module(self, module: torch.nn.Module, name: str) -> None:
        if module not in self.parts:
            self.parts[module] = list(module.modules())
        parts = self.parts[module]
        for part in parts:
            for key, buffer in part._buffers.items():  # noqa: SLF001 - and their places
                if buffer is not None:
                    self._keep_buffer(part._buffers, key, buffer, name)  # noqa: SLF001
        own = [part._parameters.values() for part in parts]  # noqa: SLF001
        parameters = [one for values in own for one in values if one is not None]
        versions = [parameter._version for parameter in parameters]  # noqa: SLF001

        def check() -> None:
            for parameter, version in zip(parameters, versions, strict=True):
                if parameter._version != version:  # noqa: SLF001
                    raise ChangedError(f"a parameter of {name} was changed outside of an optimizer")

        self.checks.append(check)
        self.restore.append(lambda: _shard_again(module))

    def _keep_buffer(
        self, place: dict[str, torch.Tensor | None], key: str, buffer: torch.Tensor, name: str
    ) -> None:
        """Keep a buffer; a new one may be put in its place before it is needed."""

        def put() -> None:
            place[key] = buffer

        self.restore.append(put)
        self._watch(buffer, f"a buffer of {name}, {key},")

    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers.add(id(optimizer))
        kept = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

        def put() -> None:
            for group, values in zip(optimizer.param_groups, kept, strict=True):
                group.update(values)

        self.restore.append(put)

    def _keep_object(self, node: Any, name: str) -> None:
        taken = node.state_dict()
        if _size_of(taken) > MAX_COPY:
            raise NotWatchedError(
                f"{name} ({type(node).__name__}) has more than {MAX_COPY >> 20} MiB that may "
                "change unseen\nGive its tensors to the state as a module"
            )
        kept = copy.deepcopy(taken)
        self.restore.append(lambda: node.load_state_dict(copy.deepcopy(kept)))

    def _keep_sharded(self, node: ShardedTensor, name: str) -> Callable[[], Any]:
        for part in node.parts:
            if isinstance(part.data, torch.Tensor):
                self._watch(part.data, name)
            else:
                self._keep_array(np.asarray(part.data), name)
        return lambda: node

    def _keep_array(self, array: Any, name: str) -> Callable[[], Any]:
        if array.nbytes > MAX_COPY:
            raise NotWatchedError(
                f"{name} is an array of more than {MAX_COPY >> 20} MiB that may change unseen\n"
                "Give a tensor of torch to the state"
            )
        kept = array.copy()
        self.restore.append(lambda: np.copyto(array, kept))
        return lambda: array

    def _watch(self, tensor: torch.Tensor, name: str) -> None:
        """Keep a small tensor; of a large one note how often it was changed."""
        if tensor.nbytes <= MAX_COPY:
            self._copy(tensor)
            return
        version = tensor._version  # noqa: SLF001

        def check() -> None:
            if tensor._version != version:  # noqa: SLF001
                raise ChangedError(f"{name} was changed outside of an optimizer")

        self.checks.append(check)

    def _copy(self, tensor: torch.Tensor) -> None:
        # Also one whose version stays: batch norm changes its statistics without counting that.
        kept = tensor.detach().clone()
        self.restore.append(lambda: tensor.detach().copy_(kept))


def _size_of(node: Any) -> int:
    """Bytes of the tensors and arrays in a state dict."""
    if isinstance(node, torch.Tensor | np.ndarray):
        return int(node.nbytes)
    if isinstance(node, Mapping):
        return sum(map(_size_of, node.values()))
    return sum(map(_size_of, node)) if isinstance(node, list | tuple) else 0


def _shard_again(module: torch.nn.Module) -> None:
    """Bring modules of FSDP2 back that an exception has left unsharded."""
    parts: Iterable[Any] = module.modules()
    for part in parts:
        if hasattr(part, "reshard") and hasattr(part, "unshard"):
            part.reshard()
