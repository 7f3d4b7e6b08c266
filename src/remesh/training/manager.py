"""`Manager`: when to save, what to keep, and how to resume as the same run.

It wires together what lies beside it and below: policies decide (`policies`), the catalog lists,
marks and removes (`catalog`), the recorder adds random numbers and a note (`resuming`), signals
and requests are received and progress reported (`watch`), and the engine saves and loads
(`remesh.checkpoint`). One commit holds everything.

What is collective. `resume`, `step`, `save`, `wait` and `close` are called by every rank. Whether
the step itself asks for a save, each rank knows alone. What one rank may know first (rank 0's
clock, a signal, a request, a failure in its background) is exchanged in one tiny all-gather, at
steps on which all agree: at each such step rank 0 says when the next one is, about a second later.
So all ranks save at the same step, and a failure anywhere is raised everywhere.

Saves. A save begins when the one before has ended on every rank, so at most one is in flight and
host memory is bounded by the arena of `remesh.Saver`. Rank 0 removes what no policy keeps in its
background, after the new checkpoint is committed; if that fails, it is raised like a failed save.

Resuming. Rank 0 lists and all follow. A damaged checkpoint is passed over, with the reason in log
and result. A mismatch, a newer format or a failing storage is raised: going back would hide it.

The end. The step of the last call of `step` is saved, unless its state has changed since, which
fingerprints of its tensors show (`fingerprints`). In one process one manager at a time saves to a
root: the next one of a root closes one that a cell of a notebook has left open.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import time
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from remesh import catalog
from remesh.background import SaveHandle, Saver
from remesh.catalog import CheckpointInfo
from remesh.checkpoint import Buffers
from remesh.checkpoint.arguments import check_count, check_flag, check_seconds, is_place
from remesh.checkpoint.local import describe_local, exchange_of
from remesh.core.state import Description, Joined
from remesh.elastic.training_job import TrainingJob
from remesh.errors import CheckpointExistsError, RemeshError, StateError
from remesh.events import Event, OnEvent, ignore
from remesh.exchange import run_on_all
from remesh.pipeline import Compress
from remesh.run_info import run_info
from remesh.storage import is_local, open_storage
from remesh.training import policies, resuming, rng
from remesh.training.memory import Memory, agree_on_directories
from remesh.training.policies import KeepPolicy, Note, RetentionDecision, SavePolicy
from remesh.training.resuming import Loaded, Recorder, Resumed, Source, digest_of
from remesh.training.rng import Randomness
from remesh.training.watch import Watch
from remesh.transform import Program, Transform, as_transform

if TYPE_CHECKING:
    from remesh.training.fingerprints import Fingerprint, Fingerprints
    from remesh.training.survivors import SurvivorState

EXIT_SECONDS = 10.0
"""How long a save in flight may still take when an exception ends the manager."""
REENTRY_SECONDS = 0.5
"""The same if the training function is entered again: the state is in memory."""

_LOGGER = logging.getLogger("remesh")

_Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Save:
    """A save that was begun, or the checkpoint from which the process resumed."""

    step: int
    state: str  # digest of the state
    began: float  # by this process's monotonic clock
    replaces_pinned: bool = False  # whether it takes the place of a pinned one, on rank 0


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The arguments of the last call of `Manager.step`."""

    step: int
    state: Any  # the user's state
    metrics: Mapping[str, float] | None
    fingerprint: Fingerprint | None  # of the state at that moment; None without torch

    def change(self) -> str:
        """The part of the state that was changed since; empty if none was."""
        return "" if self.fingerprint is None else self.fingerprint.changed(self.state)


class Manager:
    """Saves a job's state, removes old checkpoints and resumes, by policies. Collective.

    Use it as a context manager: leaving the block saves the last step and waits for that save. An
    exception that leaves the block, or a process that ends without `close`, gives up a save in
    flight. A manager for the root of another one that was not closed, as happens in notebooks,
    closes that one.

    Args:
        root: Directory or URL of the run's checkpoints; each gets a directory `step_<step>` there.
        every: When to save: a number of steps, or policies (`remesh.training.policies`). None for
            saves by `save` and requests only.
        keep: Number of checkpoints to keep, or policies (`remesh.training.policies`). None: all.
        randomness: The roles and generators of this process's random numbers.
        memory_every: Steps between two snapshots in the memory of the nodes, from which the job
            resumes after a crash of processes; None for none. It needs `remesh run`, and as much
            memory as two copies of what the ranks of a node save.
        memory_replicas: On how many further nodes each snapshot lies; each needs as much memory.
        save_at_end: Whether `close`, or the end of the block, saves the step of the last call of
            `step`, if `every` has not saved it and the state has not changed since.
        background: Write in the background. Otherwise a save returns when it is durable.
        group: See `remesh.save`.
        arena_bytes: See `remesh.Saver`.
        deadline: See `remesh.Saver`.
        buffers: See `remesh.save`; also for snapshots in memory.
        verify_replicas: See `remesh.save`.
        compress: See `remesh.save`.
        job: The job that `remesh.elastic.run` passes to the training function: `resume` then takes
            the state from the memory of the surviving processes, if they hold all of it.
        on_event: See `remesh.save`. Also called from background threads.

    Raises:
        OptionError: If an option has a wrong type, such as the text "1000" for `every`.
        StateError: If ranks disagree about the roles of their random numbers.
        ValueError: If signals are to be handled and this is not the main thread.
    """

    # What changes from step to step.
    _begun: _Save | None = None  # the newest save
    _handle: SaveHandle | None = None  # of that save, while it is in flight
    _saved: _Save | None = None  # the newest that is known to be committed
    _last: _LastStep | None = None  # if no save of it was begun
    _fingerprints: Fingerprints | None = None  # if torch is there
    _retention_error: Exception | None = None
    _stepped: int | None = None  # the step of the last call of `step`, or that was resumed
    _last_look: int | None = None
    _next_look: int | None = None
    _should_stop = False
    _closed = ""
    _memory: Memory | None = None  # of the nodes, if the job wants and has it
    _survivor: SurvivorState | None = None  # of this process, if it goes on from world to world
    # Steps of this run that are there and of no use: a save there takes their place.
    _superseded: frozenset[str] = frozenset()

    def __init__(  # noqa: PLR0913 - the options of a job's saves, each of which stands for itself
        self,
        root: str | os.PathLike[str],
        *,
        every: int | SavePolicy | Sequence[SavePolicy] | None = None,
        keep: int | KeepPolicy | Sequence[KeepPolicy] | None = None,
        randomness: Randomness | None = None,
        memory_every: int | None = None,
        memory_replicas: int = 0,
        save_at_end: bool = True,
        background: bool = True,
        group: Any = None,
        arena_bytes: int | None = None,
        deadline: float = 1800.0,
        buffers: Buffers | None = None,
        verify_replicas: bool = False,
        compress: Compress | None = None,
        job: TrainingJob | None = None,
        on_event: OnEvent = ignore,
    ) -> None:
        check_flag("Manager", "background", background)
        check_flag("Manager", "save_at_end", save_at_end)
        check_flag("Manager", "verify_replicas", verify_replicas)
        check_seconds("Manager", "deadline", deadline)
        if arena_bytes is not None:
            check_count("Manager", "arena_bytes", arena_bytes, 1)
        self._storage = open_storage(root)
        # A relative path means the same when the process has gone to another directory.
        self._root = self._storage.url if is_local(self._storage) else root
        self._every, self._keep = policies.save_policies(every), policies.keep_policies(keep)
        self._background, self._on_event = background, on_event
        self._exchange = exchange_of(group)
        self._saver = Saver(
            group=self._exchange,
            arena_bytes=arena_bytes,
            deadline=deadline,
            at_exit="abort",
            buffers=buffers,
            verify_replicas=verify_replicas,
            compress=compress,
            on_event=self._on_save_event,
        )
        self._recorder = Recorder(self._exchange, randomness or Randomness())
        place = self._storage.url, self._exchange.rank, self._exchange.world_size
        self._entry = 0 if job is None else job.entries
        _close_earlier(place, self._entry)
        self._saves_at_end = save_at_end
        # Until the first save, time counts from here, or from the last save of the resumed state.
        self._began = time.monotonic()
        self._is_cold = background and bool(self._every)
        self._watch = Watch(self._every, run_info().agent_socket)
        if job is not None and job.is_reentrant:
            # Here, for it needs torch, which a manager does without.
            from remesh.training.survivors import SurvivorState

            self._survivor = SurvivorState(job, self._exchange, self._recorder, buffers)
        if memory_every is not None:
            self._memory = self._open_memory(memory_every, memory_replicas, buffers)
        _OPEN[place] = self  # not before: a later manager closes what is here

    def _open_memory(self, every: int, num_replicas: int, buffers: Buffers | None) -> Memory | None:
        """The snapshots in memory; None if the agents have no directories for them. Collective."""
        check_count("Manager", "memory_every", every, 1)
        check_count("Manager", "memory_replicas", num_replicas, 0)
        directories = agree_on_directories(self._exchange, run_info().snapshot_dir)
        if not directories:
            return None
        return Memory(
            self._exchange,
            directories,
            str(self._root),
            self._recorder,
            every=every,
            num_replicas=num_replicas,
            buffers=buffers,
            on_event=self._on_event,
        )

    # What there is --------------------------------------------------------------------------------

    @property
    def run(self) -> str:
        """Names this run; the same after it is resumed."""
        return self._recorder.run

    @property
    def trackers(self) -> dict[str, object]:
        """Name → experiment tracker, whose run id is saved. Fill it on rank 0, or on all ranks."""
        return self._recorder.trackers

    @property
    def should_stop(self) -> bool:
        """True if the training is to end: a signal or request said so, and the state is saved."""
        return self._should_stop

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that this rank knows to be committed, or None."""
        if self._handle is not None and self._handle.progress().phase == "done":
            self._saved = self._begun
        return None if self._saved is None else self._saved.step

    @property
    def checkpoints(self) -> list[CheckpointInfo]:
        """The committed checkpoints by step, as this process sees them now. Not collective."""
        return catalog.list_checkpoints(self._storage)

    @property
    def latest(self) -> CheckpointInfo | None:
        """The newest that is not known to be damaged, or None. Not collective."""
        return catalog.newest_of(self.checkpoints)

    def retention_decisions(self) -> list[RetentionDecision]:
        """The decision of retention on each checkpoint now; nothing is touched. Not collective."""
        now = time.time()
        return policies.decide_retention(self.checkpoints, self._keep, run=self.run, now=now)

    # Saving ---------------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        own_seconds: float | None = None,
    ) -> bool:
        """Call this after each step: saves if a policy says so. Collective.

        Args:
            step: Steps done, the same on every rank; it grows from call to call.
            state: What the rest of the run depends on: a dict that names its parts, or one module
                or object with a state dict; see `remesh.save`.
            metrics: Numbers by which checkpoints are compared; those of rank 0 count.
            own_seconds: Time of this rank's own work of the step, without waiting for other ranks.
                It shows which rank is slow. The whole step, the default, takes as long on all.

        Returns:
            Whether a save was begun.

        Raises:
            RemeshError: As `remesh.save`; also, once on every rank, why a save in the background
                failed. The training may go on.
            AgentLostError: If the agent of this process has ended.
            WorldChangedError: If the training function is going to be entered again.
        """
        self._check_open("step")
        step = _check_step("step", step, state)
        fingerprint = self._mark(step, state, metrics)
        if self._saves_at_end:  # whether `every` asks for it or not: ranks may have other policies
            self._last = _LastStep(step, state, metrics, fingerprint)
        self._watch.keep_pace(step, own_seconds)
        self._watch.report(step, self.saved_step)
        if self._is_cold:
            self._warm(state)
        is_look = self._next_look is None or step >= self._next_look
        verdict = self._exchange_notes(step) if is_look else Note()
        reason = policies.due_by_step(self._every, step, self._stepped) or verdict.reason
        self._stepped = step
        if self._memory is not None and self._memory.is_due(step):
            self._memory.save(step, state, metrics)
        if reason:
            self._begin(step, state, metrics, None, reason)
            self._watch.answered()
        if verdict.stop or verdict.hold:
            self.wait()
            self._watch.report(step, self.saved_step, at_once=True, waits=verdict.hold)
        if verdict.stop:
            self._should_stop = True
        elif verdict.hold:
            self._hold(step, state, metrics)
        return bool(reason)

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Save now, whatever the policies say. Collective.

        A step that this manager has just saved or resumed from is not saved again if the state has
        not changed; with new `metrics` or `metadata` its checkpoint is replaced.

        Args are those of `step`; `metadata` is a JSON object to record beside the state.

        Raises:
            RemeshError: As `step`.
        """
        self._check_open("save")
        step = _check_step("save", step, state)
        self._begin(step, state, metrics, metadata, "asked for")

    def wait(self) -> None:
        """Wait for the save in flight, if there is one. Collective.

        Raises:
            RemeshError: Why it failed, on whichever rank.
        """
        self._check_open("wait")

        def end() -> bytes:
            self._end_save()
            return b""

        run_on_all(self._exchange, end)

    def _end_save(self) -> None:
        """Wait for this rank's part of the save in flight, and raise what failed."""
        if self._handle is not None:
            self._handle = None
            self._saver.wait()
            self._saved = self._begun
        error, self._retention_error = self._retention_error, None
        if error is not None:
            raise error

    def _begin(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, object] | None,
        reason: str,
    ) -> None:
        if self._last is not None and self._last.step == step:
            self._last = None
        full = Joined(state)
        what: dict[str, object] = dict(metadata or {})
        own: list[tuple[Description, _Save]] = []
        name = catalog.step_name(step)

        def prepare() -> bytes:
            self._watch.check_agent()
            self._end_save()
            may_be_pinned = step == self.saved_step and self._exchange.rank == 0
            is_pinned = may_be_pinned and catalog.keep_pin(self._storage, name)
            summary = self._recorder.describe(step, metrics, full, what)
            found = describe_local(full)
            own.append((found, _Save(step, digest_of(found), time.monotonic(), is_pinned)))
            return summary

        told = run_on_all(self._exchange, prepare)
        if self._exchange.rank == 0 and self._begun is None:
            rng.warn_of_differences(told)
        [(found, save)], saved = own, self._saved
        is_same = is_told = False
        if saved is not None and saved.step == step:
            what_is = b"more to tell" if metrics or metadata else b"nothing new"
            replies = run_on_all(self._exchange, lambda: what_is * (saved.state == save.state))
            is_same, is_told = all(replies), replies[0] == b"nothing new"  # what rank 0 has counts
        if is_same and is_told:
            _LOGGER.info("step %d is saved already, and the state has not changed", step)
            return
        if self._exchange.rank == 0:
            _LOGGER.info("saving step %d: %s", step, reason)
        place = catalog.place_of(self._root, name)
        overwrite = is_same or name in self._superseded
        self._begun = save
        options: dict[str, Any] = {"overwrite": overwrite, "metadata": what}
        try:
            if self._background:
                self._handle = self._saver.save_async(found, place, **options)
            else:
                self._saver.save(found, place, **options)
        except CheckpointExistsError as error:
            if self._saved is None:
                error.add_note("An earlier job has saved it: call `resume` to go on after that.")
            raise
        if not self._background:
            self._saved = save
            self.wait()

    def _mark(
        self, step: int, state: Any, metrics: Mapping[str, float] | None
    ) -> Fingerprint | None:
        """Note that a step is complete; the fingerprint of its tensors, if that is looked at."""
        is_wanted = self._survivor is not None or self._saves_at_end
        if not is_wanted or "torch" not in sys.modules:
            return None
        if self._fingerprints is None:
            from remesh.training.fingerprints import Fingerprints

            self._fingerprints = Fingerprints()
        fingerprint = self._fingerprints.take(state)
        if self._survivor is not None:
            saved_at = self._began if self._saved is None else self._saved.began
            self._survivor.mark(step, state, metrics, fingerprint, saved_at)
        return fingerprint

    def _warm(self, state: Any) -> None:
        """Get memory for the first save ready, now that optimizers have their state."""
        self._is_cold = False
        try:
            self._saver.warm(state)
        except StateError as error:
            _LOGGER.debug("the first save will fail: %s", error)  # and tell all ranks

    def _on_save_event(self, event: Event) -> None:
        """Listen to saves: when one is done on rank 0, it is time to tidy up."""
        try:
            self._on_event(event)
        finally:
            if event.point == "save.done" and event.rank == 0:
                try:
                    self._tidy_up()
                except Exception as error:  # noqa: BLE001 - raised on every rank by `wait`
                    error.add_note("The checkpoint was saved; removing older ones failed.")
                    self._retention_error = error

    def _tidy_up(self) -> None:
        """Rank 0, after a commit: pin a step that is saved again, remove what is not kept."""
        if self._begun is not None and self._begun.replaces_pinned:
            catalog.pin(catalog.place_of(self._root, catalog.step_name(self._begun.step)))
        policies.remove_unkept(self._storage, self.retention_decisions(), now=time.time())

    # Whether to save ------------------------------------------------------------------------------

    def _exchange_notes(self, step: int) -> Note:
        """Exchange notes. Collective. Raises the failure of a background save of any rank."""
        last_gap = 1 if self._last_look is None else step - self._last_look
        self._last_look = step
        size, seconds = self._exchange.world_size, self._watch.step_seconds
        next_look = policies.next_look(step, seconds, last_gap=last_gap, world_size=size)

        def note() -> bytes:
            is_saving = self._handle is not None and not self._handle.done()
            holds_state = self._survivor is not None and self._survivor.is_on
            reason, request = self._watch.asked(holds_state=holds_state, is_saving=is_saving)
            if not reason and self._exchange.rank == 0:
                last = self._began if self._begun is None else self._begun.began
                reason = policies.due_by_time(self._every, time.monotonic() - last)
            stop, hold = request == "save-and-stop", request in ("save-and-hold", "hold")
            failed = self._handle is not None and self._handle.progress().phase == "failed"
            failed = failed or self._retention_error is not None
            own = Note(reason, stop, hold, failed=failed, next_look=next_look)
            return msgspec.msgpack.encode(own)

        replies = run_on_all(self._exchange, note)
        verdict = policies.combine([msgspec.msgpack.decode(data, type=Note) for data in replies])
        self._next_look = verdict.next_look
        if verdict.failed:
            self.wait()
        return verdict

    def _hold(self, step: int, state: Any, metrics: Mapping[str, float] | None) -> None:
        """Wait until no rank has a request to wait any more: the processes are to be stopped.

        If one waits without a save, a save may be asked for after all: a node has to leave.
        """

        def holds() -> bytes:
            return (self._watch.wanted() or "").encode()

        while any(held := run_on_all(self._exchange, holds)):
            is_asked = any(b"save-and-hold" in one for one in held)
            if is_asked and self.saved_step != step:
                self._begin(step, state, metrics, None, "request of the agent")
                self.wait()
            self._watch.report(step, self.saved_step, at_once=is_asked, waits=True)
            time.sleep(0.1)

    # Resuming -------------------------------------------------------------------------------------

    def resume(
        self,
        state: Any,
        *,
        missing: Literal["error", "keep"] = "error",
        cast: bool = False,
        transform: Transform | Program | None = None,
    ) -> Resumed | None:
        """Load the newest checkpoint that can be loaded, into any layout. Collective.

        Args:
            state: Built like the state that was saved; it is filled as by `remesh.load`.
            missing: See `remesh.load`.
            cast: See `remesh.load`.
            transform: See `remesh.load`.

        Returns:
            What was loaded, or None if there is no checkpoint yet.

        Raises:
            CorruptCheckpointError: If there are checkpoints and none of them can be loaded.
            RemeshError: As `remesh.load`.
        """
        self._check_open("resume")
        _check_state("resume", state)
        rules = as_transform(transform)
        options = {"missing": missing, "cast": cast, "transform": rules, "on_event": self._on_event}
        self.wait()
        sources, incomplete = self._sources()
        loaded = resuming.load_newest(
            self._exchange, self._storage, sources, state, self._recorder, options
        )
        if loaded is None:
            return None
        self._go_on_from(loaded, state)
        self._secure(loaded, sources, state)
        source = loaded.source
        self._mark(source.note.step, state, source.metrics)
        passed_over = [(one.info.name, reason) for one, reason in loaded.passed_over]
        return Resumed(
            source.info,
            source.note.step,
            (*incomplete, *passed_over),
            loaded.seeded,
            source.note.trackers,
            loaded.report,
            from_memory=source.kind == "snapshot",
            live=source.kind == "live",
        )

    def _peek(self, state: Any) -> bool:
        """Fill a part of a state as `resume` would, if there is anything to resume. Collective."""
        options = {"missing": "error", "cast": False, "transform": None, "on_event": self._on_event}
        sources, _ = self._sources()
        # One that `resume` has failed to load would fill this part, and be taken for a good one.
        good = [source for source in sources if not source.info.problem] or sources
        args = self._exchange, self._storage, good, state, self._recorder, options
        return resuming.load_newest(*args) is not None

    def _sources(self) -> tuple[list[Source], list[tuple[str, str]]]:
        """The sources to resume from, the newest first; and the snapshots that fail, and why."""
        sources = resuming.stored_sources(self._exchange, self._storage, self._root)
        incomplete: list[tuple[str, str]] = []
        if self._memory is not None:
            kept, incomplete = self._memory.find()
            sources += kept
        if self._survivor is not None:
            sources += self._survivor.find()
        snapshot_every = None if self._memory is None else self._memory.every
        return resuming.in_order(sources, self._recorder.roles.grid, snapshot_every), incomplete

    def _go_on_from(self, loaded: Loaded, state: Any) -> None:
        """Become the run that saved what was loaded."""
        source, info = loaded.source, loaded.source.info
        is_live = source.kind == "live"
        parent = f"{info.path}#{info.save_id}"
        self._recorder.go_on_from(source.note, source.note.parent if is_live else parent)
        # What was not saved before the function was entered again is not saved now.
        self._began = time.monotonic() - source.unsaved_seconds
        self._begun = self._saved = None
        self._stepped = source.note.step
        self._next_look = self._last_look = None  # the steps may have gone back
        if not is_live:
            digest = digest_of(describe_local(state))
            self._saved = _Save(source.note.step, digest, self._began)
        self._superseded = frozenset(
            one.info.name for one, _ in loaded.passed_over if one.kind == "stored"
        )
        if self._exchange.rank == 0:
            seeded = "; ".join(loaded.seeded)
            seeded = f"; random numbers were seeded anew {seeded}" if seeded else ""
            _LOGGER.info("resumed from %s%s", info.path, seeded)

    def _secure(self, loaded: Loaded, sources: Sequence[Source], state: Any) -> None:
        """Save at once what came from memory, and give back memory that is no longer needed."""
        if self._memory is None:
            return
        source = loaded.source
        snapshots = [one.info.name for one in sources if one.kind == "snapshot"]
        if source.kind == "stored":
            self._memory.keep("")
        elif source.kind == "live":
            self._memory.keep(snapshots[0] if snapshots else "")
        else:
            self._memory.keep(source.info.name)
            step, saved = source.note.step, self._saved
            stored = [one.info.step for one in sources if one.kind == "stored"]
            newest = max((each for each in stored if each <= step), default=None)
            assert saved is not None
            self._saved = None if newest is None else replace(saved, step=newest)
            if newest != step:
                self._begin(step, state, source.metrics, None, "it was in memory only")

    # The end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Save the last step, wait for that, and give memory and signals back. Collective.

        Raises:
            RemeshError: Why the last save failed.
        """
        if self._closed:
            return
        try:
            self._save_last()
            if self._stepped is not None:
                self._watch.report(self._stepped, self.saved_step, at_once=True)
        finally:
            self._end("was closed")
            self._saver.close()

    def _end(self, reason: str) -> None:
        """Give signals back, and let no later call do anything."""
        if self._survivor is not None:
            self._survivor.close()
        self._watch.close()
        self._closed, self._last = reason, None

    def _save_last(self) -> None:
        """End the save in flight, and save the last step if it is not saved. Collective."""
        failure: RemeshError | None = None
        try:
            self.wait()
        except RemeshError as error:
            failure = error  # of an older step, if the last one is still to be saved
        last = self._last
        if self._wants_last():
            assert last is not None
            self._begin(last.step, last.state, last.metrics, None, "the training has ended")
            self.wait()
        if failure is not None:
            raise failure

    def _wants_last(self) -> bool:
        """True if policies save, and all ranks have the last step unchanged. Collective."""

        def look() -> bytes:
            last, saved = self._last, self._saved
            if last is None or (saved is not None and saved.step > last.step):
                return msgspec.msgpack.encode(None)
            is_periodic = policies.is_periodic(self._every)
            return msgspec.msgpack.encode((last.step, is_periodic, last.change()))

        kind = tuple[int, bool, str] | None
        replies = run_on_all(self._exchange, look)
        found = [msgspec.msgpack.decode(data, type=kind) for data in replies]
        known = [one for one in found if one is not None]
        if len(known) < len(found) or not any(is_periodic for _, is_periodic, _ in known):
            return False
        changes = [(step, rank, change) for rank, (step, _, change) in enumerate(known) if change]
        if changes and self._exchange.rank == 0:
            _LOGGER.warning(
                "step %d is not saved at the end: the state has changed since\nRank %d changed %s. "
                "Call Manager.step after each step, and after its last change",
                *changes[0],
            )
        return not changes and len({step for step, _, _ in known}) == 1

    def _check_open(self, call: str) -> None:
        """Refuse a call after the end."""
        if self._closed:
            raise StateError(f"Manager.{call}: this manager {self._closed}; make a new one.")

    def abandon(self, reason: str) -> None:
        """End without anything collective and without a new save; other ranks may be gone.

        Args:
            reason: What later calls of this manager say.
        """
        if self._handle is not None:
            # Why it fails is of no interest any more.
            wait([self._handle], EXIT_SECONDS if self._survivor is None else REENTRY_SECONDS)
            self._handle.cancel()
        self._end(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon("was closed by an exception")


_OPEN: weakref.WeakValueDictionary[_Place, Manager] = weakref.WeakValueDictionary()
"""The newest managers of this process, by root, rank and number of ranks."""


def _close_earlier(place: _Place, entry: int) -> None:
    """Close an older manager of this root that was abandoned. Not collective.

    One of an earlier entry of the training function may have been interrupted before its `with`.
    """
    older = _OPEN.get(place)
    if older is not None and not older._closed:  # noqa: SLF001
        if older._entry == entry:  # noqa: SLF001 - of this class
            _LOGGER.warning("an earlier Manager of %s was not closed; it is closed now", place[0])
        older.abandon("was replaced by a later Manager of the same root")


def _check_step(call: str, step: object, state: object) -> int:
    """The step; anything but a number of steps and a state, in this order, is refused."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        problem = f"the step is a number of steps, and not a {type(step).__name__}"
        if hasattr(state, "__index__"):
            problem = f"step and state are swapped; write manager.{call}(step, state)"
        raise StateError(f"Manager.{call}: {problem}.") from None
    _check_state(call, state)
    return number


def _check_state(call: str, state: object) -> None:
    """Refuse what is no state of a job."""
    if is_place(state):
        raise StateError(
            f"Manager.{call}: got the place {state!r} where the state is expected\nA manager finds "
            "the checkpoints below its root by itself; remesh.load(state, path) loads a given one."
        )
    has_state_dict = hasattr(state, "state_dict") and hasattr(state, "load_state_dict")
    if not has_state_dict and not isinstance(state, MutableMapping):
        raise StateError(
            f"Manager.{call}: the state is a dict or a module, and not a {type(state).__name__}\n"
            'Name its parts: {"model": model, "optimizer": optimizer}.'
        )
