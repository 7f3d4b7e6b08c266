"""Saving beside the training: `Saver` keeps what is worth keeping between saves.

An asynchronous save has a foreground and a background.

* Foreground, collective: the ranks agree on who writes what, and each copies its share into its
  arena (`remesh.pipeline.stage`). Then `save_async` returns and the trainer may change everything.
* Background, on each rank alone: the arena's chunks are written, made durable and committed
  (`writer`), by a thread, or by a process that shares the arena. No collective is used, so the
  training's own are never disturbed.

A failure is raised by `result` of the handle, or by the saver's next save that has to wait for the
failed one, or by `close`, and never touches the previous checkpoint. A save raises it on every
rank, even if only one of them knew.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal, Self

from remesh.background.process import RemoteWriter, WriterProcess
from remesh.background.save import BackgroundSave, SaveHandle
from remesh.background.writer import SaveWriter, WriteTask
from remesh.checkpoint.agree import PlanCache, RankSavePlan, SaveOptions, agree
from remesh.checkpoint.arguments import check_choice, check_count, check_seconds
from remesh.checkpoint.buffers import Buffers
from remesh.checkpoint.local import (
    describe_local,
    device_staging,
    exchange_of,
    tensors_to_store,
)
from remesh.checkpoint.report import SaveReport
from remesh.checkpoint.saving import check_options, open_place, save_agreed
from remesh.core.host_memory import available_memory
from remesh.errors import OptionError, StorageError
from remesh.events import Emit, OnEvent, emitter, ignore, timed
from remesh.exchange import Exchange, Outcome, run_each, share_outcomes
from remesh.formats.native import FORMAT_NAME
from remesh.formats.writer import Part
from remesh.pipeline import Compress
from remesh.pipeline.arena import Arena
from remesh.pipeline.collect import stager_of
from remesh.pipeline.write import CHUNK_SIZE
from remesh.run_info import run_info
from remesh.storage import Storage, is_local

ARENA_SHARE = 0.5
"""Part of the available memory that the arenas of a machine take at most, if nothing is said."""

IDLE_SECONDS = 600.0
"""Seconds after its last save when the saver of `save_async` gives its memory back."""


class Saver:
    """Saves a job's state repeatedly, in the background.

    It keeps host memory for staging and the plan of the last layout. A save first waits for the one
    before.

    Args:
        state: A state like those to come: its memory is got ready in the background (see `warm`).
        group: See `remesh.save`.
        writer: What writes the staged state: threads of this process, or a separate process, which
            the trainer's GIL does not slow down, and which goes on if the trainer dies. A process
            opens the place by itself, so it takes a path or a URL and no `Storage`.
        arena_bytes: Host memory for staging on this rank; by default as much as its share of the
            state, but all ranks of a node together at most half of the memory that is free within
            the container's limits. With less than the rank's share, staging waits for the disk.
        deadline: Seconds that a background save waits for other ranks before it fails.
        format: See `remesh.save`.
        format_options: See `remesh.save`; a save may add some.
        at_exit: What happens to a save in flight if the interpreter ends without `close`: it waits
            for its end, or aborts it.
        buffers: See `remesh.save`.
        verify_replicas: See `remesh.save`.
        compress: See `remesh.save`.
        on_event: See `remesh.save`. Also called from background threads; with a writer process
            shortly after the moment, so what it raises may come too late to stop the save.

    Raises:
        OptionError: If an option has a wrong type or value, or there is no such writer here.
        StateError: If the format cannot be written.
    """

    def __init__(  # noqa: PLR0913 - the options of a job's saves, each of which stands for itself
        self,
        state: Any = None,
        *,
        group: Any = None,
        format: str = FORMAT_NAME,  # noqa: A002 - as in `remesh.save`
        format_options: Mapping[str, object] | None = None,
        writer: Literal["thread", "process"] = "thread",
        arena_bytes: int | None = None,
        deadline: float = 1800.0,
        at_exit: Literal["wait", "abort"] = "wait",
        buffers: Buffers | None = None,
        verify_replicas: bool = False,
        compress: Compress | None = None,
        on_event: OnEvent = ignore,
    ) -> None:
        if arena_bytes is not None:
            check_count("Saver", "arena_bytes", arena_bytes, 1)
        check_seconds("Saver", "deadline", deadline)
        check_choice("Saver", "writer", writer, ("thread", "process"))
        check_choice("Saver", "at_exit", at_exit, ("wait", "abort"))
        if writer == "process" and not hasattr(os, "memfd_create"):
            raise OptionError("Saver: writer='process' needs Linux; use writer='thread'.")
        self._group = group
        self._options = SaveOptions(
            buffers=buffers,
            verify_replicas=verify_replicas,
            format=format,
            format_options=format_options or {},
            keeps=True,
            compress=compress,
        )
        check_options(self._options)
        self._has_process = writer == "process"
        self._arena_bytes = arena_bytes
        self._deadline = deadline
        self._at_exit = at_exit
        self._on_event = on_event
        self._cache = PlanCache()
        self._begin_afresh()
        _ALL.add(self)
        if self._has_process:
            self._live_process()
        if state is not None:
            self.warm(state)

    def _begin_afresh(self) -> None:
        """Make what belongs to one process."""
        self._in_flight: SaveHandle | None = None
        self._using = threading.Lock()  # held while a save of `save_async` begins, or memory goes
        self._idle: threading.Timer | None = None
        self._process: WriterProcess | None = None
        self._arena = Arena(self._arena_bytes or CHUNK_SIZE, CHUNK_SIZE, shared=self._has_process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # An error on its way out matters more than how the last save ends.
        with nullcontext() if kind is None else suppress(Exception):
            self.close()

    @property
    def num_plans_reused(self) -> int:
        """How many saves used the plan of an earlier one."""
        return self._cache.hits

    @property
    def num_arena_bytes(self) -> int:
        """Host memory that is allocated for staging on this rank."""
        return self._arena.num_bytes

    @property
    def writer_process_id(self) -> int | None:
        """Id of the writer process, if there is one."""
        return None if self._process is None else self._process.process_id

    def warm(self, state: Any) -> None:
        """Prepare the memory for saves of `state`, in the background. Not collective.

        Call it when the state has its final size and the first steps run; the first save then
        finds memory that is touched already.
        """
        tensors = tensors_to_store(describe_local(state))
        num_bytes = int(tensors.boxes.num_bytes.sum()) + CHUNK_SIZE
        self._set_budget(num_bytes)
        devices = device_staging(tensors.memories)
        if devices is not None:
            self._arena.pin_with(devices[0])
        self._arena.warm_beside(num_bytes)

    def save(
        self,
        state: Any,
        path: Any,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
        format_options: Mapping[str, object] | None = None,
    ) -> SaveReport:
        """Like `remesh.save`, with the plan of earlier saves. Collective."""
        options = self._options_of(overwrite, metadata, format_options)
        exchange = exchange_of(self._group)
        run_each(exchange, self.wait)
        cache, on_event = self._cache, self._on_event
        return save_agreed(state, path, options, group=exchange, cache=cache, on_event=on_event)

    def save_async(
        self,
        state: Any,
        path: Any,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
        format_options: Mapping[str, object] | None = None,
    ) -> SaveHandle:
        """Save beside the training. Collective until it returns.

        Returns when the state is staged: it may be changed from then on. What fails before is
        raised here, on every rank; what fails afterwards by the handle's `result`, or by a later
        call of `save`, `save_async`, `wait` or `close`.

        Args are those of `remesh.save`.

        Raises:
            RemeshError: As `remesh.save`; also why the save that it waited for failed.
        """
        options = self._options_of(overwrite, metadata, format_options)
        return self._begin(state, path, options, self._group, self._on_event)

    def _options_of(
        self,
        overwrite: bool,
        metadata: Mapping[str, object] | None,
        format_options: Mapping[str, object] | None,
    ) -> SaveOptions:
        usual = self._options
        how = {**usual.format_options, **(format_options or {})}
        return replace(usual, overwrite=overwrite, metadata=metadata or {}, format_options=how)

    def _begin(
        self, state: Any, path: Any, options: SaveOptions, group: Any, on_event: OnEvent
    ) -> SaveHandle:
        begun, exchange = time.monotonic(), exchange_of(group)
        with Outcome() as opened:
            storage = open_place("save_async", state, path, options)
            if self._has_process:
                _place_for_process(path, storage)
            self.wait()
        share_outcomes(exchange, opened)
        emit = timed(emitter(on_event, exchange.rank), "save", exchange.rank, storage.url)
        options = replace(options, in_background=True)
        mine = agree(exchange, storage, state, options, cache=self._cache, emit=emit)
        save: BackgroundSave | None = None
        try:
            with Outcome() as started:
                if self._has_process:
                    self._live_process()
                self._set_budget(mine.stream.layout.num_bytes)
                save = self._start(exchange, path, storage, mine, emit, begun)
            share_outcomes(exchange, started)
        except BaseException as error:
            if save is not None:
                save.withdraw(error)
            mine.remove_kept(storage)
            raise
        assert save is not None
        self._in_flight = save.handle
        save.stage()
        # Not before the end, for until then memory and disk are busy with this save.
        self._arena.warm_beside(mine.stream.layout.num_bytes, lambda: wait([save.handle]))
        return save.handle

    def wait(self) -> None:
        """Wait for the save in flight, and raise why it failed, once."""
        if (handle := self._in_flight) is not None:
            wait([handle])
            self._in_flight = None
            if handle.cancelled():
                raise CancelledError(f"the save to {handle.url} was cancelled")
            if (error := handle.exception()) is not None:
                raise error

    def close(self) -> None:
        """Wait for the save in flight and give memory back. Raises why it failed."""
        try:
            self.wait()
        finally:
            if self._process is not None:
                self._process.close()
                self._process = None
            # A wait that was interrupted leaves a save that uses the chunks still.
            if self._in_flight is None or self._in_flight.done():
                self._arena.close()

    def _start(
        self,
        exchange: Exchange,
        path: Any,
        storage: Storage,
        mine: RankSavePlan,
        emit: Emit,
        begun: float,
    ) -> BackgroundSave:
        """Take all that a save needs from here on and that may be refused."""
        stream = mine.stream
        task = WriteTask(
            format=mine.options.format,
            save_id=mine.save_id,
            rank=exchange.rank,
            num_ranks=exchange.world_size,
            deadline=self._deadline,
            place=_place_for_process(path, storage) if self._has_process else storage.url,
            files=stream.files,
            num_bytes=stream.layout.num_bytes if stream.files.paths else 0,
            parts=stream.parts,
            kept=mine.kept,
            at_once=self._arena.num_ready_bytes < stream.layout.num_chunks * CHUNK_SIZE,
            global_plan=mine.global_plan,
        )
        devices = device_staging(piece.memory for piece in stream.layout.pieces)
        copies = None
        if devices is not None:
            pin, copies = devices
            self._arena.pin_with(pin)
        stager = stager_of(stream.layout, self._arena, copies, stream.collection)

        def remember(parts: Sequence[Part]) -> SaveReport:
            self._cache.history = mine.committed(storage, parts)
            return SaveReport.of(parts, time.monotonic() - begun)

        save = BackgroundSave(task, storage.url, stager, self._arena, emit, remember)
        writer = (
            RemoteWriter(self._live_process(), task, storage, save.trainer)
            if self._has_process
            else SaveWriter(task, storage, self._arena.chunk, save.trainer)
        )
        try:
            save.start(writer, daemon=self._at_exit == "abort")
        except BaseException as error:
            save.withdraw(error)  # its thread may have begun, and waits
            raise
        return save

    def _rest_later(self) -> None:
        """Give the memory back when no save has begun for `IDLE_SECONDS`."""
        if self._idle is not None:
            self._idle.cancel()
        # The saver does not live on for it.
        self._idle = threading.Timer(IDLE_SECONDS, _rest, [weakref.ref(self)])
        self._idle.daemon = True
        with suppress(RuntimeError, MemoryError):  # without a thread the memory stays
            self._idle.start()

    def _rest(self) -> None:
        with self._using:
            is_busy = self._in_flight is not None and not self._in_flight.done()
            if self._arena.is_warming or is_busy:
                self._rest_later()
            else:
                self._arena.close()

    def _live_process(self) -> WriterProcess:
        """The writer process; another one, with new memory, if it died."""
        if self._process is not None and self._process.is_lost:
            self._process.close()
            self._process = None
            self._arena.close()
        if self._process is None:
            self._process = WriterProcess(self._arena.file, CHUNK_SIZE)
        return self._process

    def _set_budget(self, num_bytes: int) -> None:
        """Let the arena hold a rank's share of a save, if the machine has room."""
        if self._arena_bytes is None:
            rounded = -(-num_bytes // CHUNK_SIZE) * CHUNK_SIZE
            # None if the system does not say what is free.
            free = int((available_memory() or 0) * ARENA_SHARE)
            free //= max(run_info().local_world_size, 1)
            self._arena.grow(min(rounded, self._arena.num_bytes + free))


_ALL: weakref.WeakSet[Saver] = weakref.WeakSet()


def _after_fork() -> None:
    """Leave what savers have to the parent: its threads, its writer processes and their memory."""
    for saver in _ALL:
        if saver._process is not None:  # noqa: SLF001 - of this module, as what follows
            saver._process.leave()  # noqa: SLF001
        saver._begin_afresh()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork)


def _rest(saver: weakref.ref[Saver]) -> None:
    if (alive := saver()) is not None:
        alive._rest()  # noqa: SLF001 - of this module


def _place_for_process(path: Any, storage: Storage) -> str:
    """How another process opens what the caller named."""
    if is_local(storage) and path is not storage:
        return storage.url
    if isinstance(path, str):
        return path
    raise StorageError(
        f"{storage.url}: a writer process opens the place by itself\nPass a path or a URL and not "
        "a Storage, or use Saver(writer='thread')"
    )


class _DefaultGroup:
    """Stands for the default group among the keys of `_SAVERS`."""


_SAVERS: weakref.WeakKeyDictionary[object, Saver] = weakref.WeakKeyDictionary()
"""The savers that `save_async` keeps between calls, one for each group, as long as that lives."""


def _saver_of(group: Any) -> Saver:
    key = _DefaultGroup if group is None else group
    if key not in _SAVERS:
        _SAVERS[key] = Saver()
    return _SAVERS[key]


def save_async(  # noqa: PLR0913 - each option stands for itself
    state: Any,
    path: Any,
    *,
    format: str = FORMAT_NAME,  # noqa: A002 - as in `remesh.save`
    format_options: Mapping[str, object] | None = None,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
    buffers: Buffers | None = None,
    verify_replicas: bool = False,
    compress: Compress | None = None,
    group: Any = None,
    on_event: OnEvent = ignore,
) -> SaveHandle:
    """Save in the background. Collective until it returns.

    The same as `save_async` of one `Saver` for the group, which keeps memory and plan for the next
    save: the memory for ten minutes, and both until the group ends. Make a `Saver` to choose its
    memory, its writer, or its behaviour at exit.

    Args are those of `remesh.save`, and errors those of `Saver.save_async`.
    """
    options = SaveOptions(
        overwrite=overwrite,
        metadata=metadata or {},
        buffers=buffers,
        verify_replicas=verify_replicas,
        format=format,
        format_options=dict(format_options or {}),
        compress=compress,
    )
    saver = _saver_of(group)
    with saver._using:  # noqa: SLF001 - of this module, as what follows
        handle = saver._begin(state, path, options, group, on_event)  # noqa: SLF001
        saver._rest_later()  # noqa: SLF001
    return handle
