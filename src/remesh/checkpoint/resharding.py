"""State from layout to layout between live processes, without storage.

Resharding is a save and a load with the disk left out. The ranks agree on the source state as they
would for a save: who holds which box, every element exactly once, and the copies of a box divided
among their holders by bytes. The plan of that save as an index, in which a file stands for the
memory of a rank, is what the target state is compared with and planned against as for a load. So
all that holds for loading holds here: any layout, and a mismatch is found on all ranks before a
byte moves.

Only then the paths part: what a rank has itself it copies, and the rest is sent from rank to rank
through buffers of bounded size (`remesh.pipeline.from_memory`).

Who pushes weights again and again keeps a `Resharder`. As long as the tensors of both states are
where they were, and all values of the source what they were, on all ranks, the ranks tell each
other so and move the bytes: nothing is compared, planned or asked for. Otherwise all is planned
anew.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import msgspec
import numpy as np

from remesh._repr import short_repr
from remesh.checkpoint.agree import (
    PlanCache,
    RankSavePlan,
    SaveOptions,
    agree,
    describe_to_store,
)
from remesh.checkpoint.arguments import check_choice, check_target
from remesh.checkpoint.buffers import Buffers
from remesh.checkpoint.copies import Compares
from remesh.checkpoint.loading import OnRead, checked_options, fill_planned, plan_into
from remesh.checkpoint.local import (
    DeviceInUse,
    LocalTensors,
    agree_on_devices,
    describe_local,
    device_in_use,
    exchange_of,
    finish_device_work,
)
from remesh.checkpoint.match import RankLoadPlan
from remesh.checkpoint.report import RestoreReport
from remesh.checkpoint.stored import LIVE, StoredState
from remesh.core import values
from remesh.core.collector import gc_paused
from remesh.core.index import Index
from remesh.core.sharded import ArrayLike
from remesh.core.state import Description
from remesh.core.strided import Layout
from remesh.errors import StateError
from remesh.events import OnEvent, emitter, ignore
from remesh.exchange import Outcome, run_on_all, run_on_one, share_outcomes
from remesh.formats import native
from remesh.pipeline import Destination
from remesh.pipeline.from_memory import MemoryTransfer, plan_between_memories
from remesh.planner import LoadPlan
from remesh.storage import MemoryStorage
from remesh.transform import Program, Transform


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """The result of a reshard on this rank."""

    restored: RestoreReport
    """The result for each name."""
    bytes_sent: int
    """Bytes of tensor data that this rank sent to others."""
    bytes_received: int
    """Bytes of tensor data that it received from others."""
    bytes_local: int
    """Bytes that it had itself."""
    group_bytes_sent: int
    """Bytes of tensor data that all ranks sent."""
    buffer_bytes: int
    """Memory that the messages took, the most at any time."""
    plan_reused: bool
    """Whether nothing was planned, since all was where it was at the last time."""
    seconds: float
    """Wall time."""

    __repr__ = short_repr


def reshard(
    source_state: Any,
    target_state: Any,
    *,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["ignore", "error"] = "ignore",
    cast: bool = False,
    transform: Transform | Program | None = None,
    buffers: Buffers | None = None,
    group: Any = None,
    on_event: OnEvent = ignore,
) -> ReshardReport:
    """Copy a state from one layout into another between live processes. Collective.

    Every rank of the group passes its part of the source and its part of the target; a rank that
    has none of one passes `{}`. The two must not share memory: the source is read while the target
    is filled. To repeat it, keep a `Resharder`.

    Args:
        source_state: The state to copy, as for `remesh.save`.
        target_state: The state to fill, as for `remesh.load`.
        missing: See `remesh.load`.
        unexpected: See `remesh.load`.
        cast: See `remesh.load`.
        transform: See `remesh.load`.
        buffers: See `remesh.save`; of the source.
        group: See `remesh.save`.
        on_event: Called at `save.described` and `save.planned` for the source, and at the points in
            `remesh.events.LOAD_POINTS` from `load.planned` on.

    Returns:
        What became of each name on this rank, and what moved. `restored.bytes_read` counts what
        this rank took of its own source, for itself and for others.

    Raises:
        OptionError: If an option has a wrong type or value.
        StateError: If the source cannot be saved, or the target cannot be loaded into, or they
            share elements in memory. Nothing was changed.
        MismatchError: If they do not fit. Nothing was changed.
        ExchangeError: If a rank died.
    """
    return Resharder(
        source_state,
        target_state,
        missing=missing,
        unexpected=unexpected,
        cast=cast,
        transform=transform,
        buffers=buffers,
        group=group,
        on_event=on_event,
    ).push()


class Resharder:
    """Reshards live state repeatedly, for instance weights from trainers to inference ranks.

    It keeps the plan and the buffers. Each push inspects both states again, so their layouts, their
    memory and their values may change; then a new plan is made. Copies of a tensor that several
    ranks hold are compared only when a plan is made, not with every push. Args are those of
    `reshard`.

    Attributes:
        target_state: The target, filled by the last push.
    """

    compares: ClassVar[Compares] = "sampled"

    def __init__(
        self,
        source_state: Any,
        target_state: Any,
        *,
        missing: Literal["error", "keep"] = "error",
        unexpected: Literal["ignore", "error"] = "ignore",
        cast: bool = False,
        transform: Transform | Program | None = None,
        buffers: Buffers | None = None,
        group: Any = None,
        on_event: OnEvent = ignore,
    ) -> None:
        check_target("reshard", target_state)
        if buffers is not None:
            check_choice("reshard", "buffers", buffers, get_args(Buffers))
        self.target_state = target_state
        self._source_state = source_state
        self._options = checked_options("reshard", missing, unexpected, cast, transform)
        self._buffers = buffers
        self._exchange = exchange_of(group)
        self._emit = emitter(on_event, self._exchange.rank)
        self._cache = PlanCache()
        self._transfer: MemoryTransfer | None = None  # of the last push
        self._last: tuple[RankLoadPlan, tuple[object, ...]] | None = None
        """The plan of a push that can be made again, and what it depends on (`_facts`)."""

    def push(self) -> ReshardReport:
        """Copy the current source into the target. Collective.

        Returns:
            What was done on this rank.

        Raises:
            StateError: See `reshard`.
            MismatchError: See `reshard`.
            ExchangeError: If a rank died.
        """
        started = time.monotonic()
        try:
            again = self._push_again()
            restored = again or self._push_planned()
        except BaseException:
            # Threads of a push that was given up may still write into its buffers.
            self._transfer = self._last = None
            raise
        transfer = self._transfer
        assert transfer is not None
        seconds = time.monotonic() - started
        return ReshardReport(
            dataclasses.replace(restored, seconds=seconds),
            transfer.plan.outgoing.num_bytes,
            transfer.plan.incoming.num_bytes,
            transfer.bytes_local,
            transfer.group_bytes_sent,
            transfer.buffer_bytes,
            again is not None,
            seconds,
        )

    def _push_again(self) -> RestoreReport | None:
        """Move the bytes as in the last push; None if anything is not as it was. Collective."""
        last, is_same = self._last, False
        makes = self._options.transform is not None
        with Outcome() as looked, gc_paused():
            if last is not None:
                _, tensors, document = describe_to_store(
                    self._source_state, self._buffers, self._exchange.rank
                )
                plan, facts = last
                target = describe_local(self.target_state, plan.names, self._exchange.rank)
                is_same = facts == _facts(tensors, document, target)
            looked.reply = bytes([is_same, makes])
        replies = share_outcomes(self._exchange, looked)
        if any(reply[1] != makes for reply in replies):
            raise StateError("reshard: ranks disagree about transform; pass it on all or none")
        if not all(reply[0] for reply in replies):
            return None
        assert last is not None
        assert self._transfer is not None

        def begin() -> None:
            self._emit("save.described")
            finish_device_work(tensors.memories)
            if self._exchange.rank == 0:
                self._emit("save.planned")

        given, before = tensors.given(self._cache.rows), [begin, *last[0].before]
        plan = dataclasses.replace(last[0], description=target, before=before)
        read = partial(self._read, given, None)
        return fill_planned(plan, self._exchange, read, self._emit)

    def _push_planned(self) -> RestoreReport:
        """Plan and move the bytes. Collective."""
        self._last = None
        stored, agreed = self._agree_on_source()
        given = agreed.tensors.given(self._cache.rows)
        read = partial(self._read, given, stored.index)
        plan, compared = plan_into(
            self.target_state,
            stored,
            self._exchange,
            self._options,
            read=read,
            reserved=_layouts_of(agreed.tensors),
        )
        # Described before they are filled, as the next push will find them.
        facts = _facts(agreed.tensors, agreed.document, plan.description)
        restored = fill_planned(plan, self._exchange, read, self._emit)
        if not compared:
            self._last = plan, facts
        return restored

    def _read(
        self,
        given: LocalTensors,
        index: Index | None,
        plan: LoadPlan,
        destinations: Sequence[Destination],
        on_read: OnRead,
    ) -> bool:
        """What a load does to read: planned, or without an index as the last time. Collective."""
        if index is not None:
            self._transfer = self._plan_transfer(index, plan, destinations, given)
        assert self._transfer is not None
        self._transfer.execute(self._exchange, given.memories, destinations, on_read)
        return False

    def _agree_on_source(self) -> tuple[StoredState, RankSavePlan]:
        """The state of all ranks, as if it were stored; what they agreed on. Collective."""
        options = SaveOptions(shares_place=False, buffers=self._buffers, compares=self.compares)
        exchange, cache = self._exchange, self._cache
        agreed = agree(
            exchange, MemoryStorage(), self._source_state, options, cache=cache, emit=self._emit
        )

        def tell() -> bytes:
            assert cache.plan is not None
            index = cache.plan.index_of_holders(exchange.world_size).encode()
            return msgspec.msgpack.encode((index, agreed.on_rank_0.saved.document.encode()))

        encoded, document = msgspec.msgpack.decode(
            run_on_one(exchange, tell), type=tuple[bytes, bytes]
        )
        found = native.ValuesDocument.decode(document, LIVE)
        index = dataclasses.replace(Index.decode(encoded, LIVE), aliases=found.aliases)
        return StoredState(LIVE, index, found, rank=exchange.rank), agreed

    def _plan_transfer(
        self,
        index: Index,
        plan: LoadPlan,
        destinations: Sequence[Destination],
        given: LocalTensors,
    ) -> MemoryTransfer:
        """How this rank gets what it wants. Collective."""
        memories = (*given.memories, *(to.memory for to in destinations))
        replies = run_on_all(
            self._exchange, lambda: msgspec.msgpack.encode(device_in_use(memories))
        )
        in_use = [msgspec.msgpack.decode(reply, type=DeviceInUse) for reply in replies]
        return plan_between_memories(
            self._exchange,
            index,
            plan.regions,
            len(destinations),
            given.boxes,
            device=agree_on_devices(self._exchange, in_use),
        )


def _facts(tensors: LocalTensors, document: bytes, target: Description) -> tuple[object, ...]:
    """All that the plan of a push depends on, for this rank; compared, never sent."""
    boxes = tensors.boxes
    columns = (boxes.tensors.dtypes, boxes.tensors.shapes, boxes.tensor)
    return (
        document,
        boxes.tensors.names,
        *(one.tobytes() for one in (*columns, boxes.offsets, boxes.extents, tensors.roles)),
        [_place_of(part) for part in tensors.parts],
        [(one.name, one.dtype, one.global_shape, one.alias_key) for one in target.tensors],
        [(part.box, _place_of(part.data)) for one in target.tensors for part in one.parts],
        list(target.values),
        [values.encode(target.values[name]) for name in sorted(target.fixed)],
        target.optional,
        target.merged_lists,
        target.dropped,
        [element.unique_name for element in target.objects],
    )


def _place_of(array: ArrayLike) -> object:
    """Where the elements of an array lie; equal to nothing if that is not known."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"], array.strides, array.shape, array.dtype
    tensor: Any = array
    if not hasattr(tensor, "data_ptr"):
        return object()
    return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype, tensor.device


def _layouts_of(tensors: LocalTensors) -> list[tuple[str, Layout]]:
    """Name and layout of each tensor that has one."""
    table = tensors.boxes
    names = [table.tensors.names[row] for row in table.tensor.tolist()]
    layouts = [memory.layout for memory in tensors.memories]
    return [(name, one) for name, one in zip(names, layouts, strict=True) if one is not None]
