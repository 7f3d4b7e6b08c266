"""The commit of background saves, explored whole: every order of the ranks' steps, and crashes.

Each member of a scenario (a rank of a save, a reader) is a thread that runs the real code and waits
at a gate before each operation of the storage that others can see. One gate is opened at a time. A
state is what is stored, and what each member has seen; from each state that is new, every next step
is tried: a member goes on, dies, sees its operation fail, or, once another one is dead, waits until
its deadline. A state that was seen before is not followed again, so the exploration ends.

What holds in every state: if there is a commit record, all that belongs to it is there and right.
Without a death, each state can still come to an end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

import remesh
from remesh.background import status_files
from remesh.background.writer import SaveWriter, Trainer, WriteTask
from remesh.checkpoint.agree import PlanCache, SaveOptions, agree
from remesh.errors import StorageError
from remesh.exchange import Exchange
from remesh.formats import native
from remesh.pipeline.arena import Arena, Chunk
from remesh.pipeline.stage import Stager
from remesh.pipeline.write import CHUNK_SIZE, Filled
from remesh.storage import Buffer, MemoryStorage, Storage, Writer
from remesh.storage.base import StorageView
from tests.engine.scenes import share_of
from tests.support import run_ranks

pytestmark = pytest.mark.timeout(600)

ROWS = 6
DEADLINE = 1.0
LIMIT = 120.0

_LOGGER = logging.getLogger("tests")

How = Literal["go", "fail", "die", "late", "tear"]
Choice = tuple[int, How]
Files = dict[str, Buffer]


class Died(BaseException):
    """A member is dead: none of its operations has an effect any more."""


@dataclass
class Member:
    """A thread that waits at a gate before each of its steps."""

    number: int
    world: World
    run: Callable[[Member], object]
    gate: str = ""  # where it waits; empty while it runs
    opened: How | None = None
    is_dead: bool = False
    is_late: bool = False
    has_ended: bool = False
    result: object = None
    seen: list[object] = field(default_factory=list)

    def wait(self, gate: str) -> How:
        """Wait until the world lets this member go on."""
        with self.world.changed:
            self.gate = gate
            self.world.changed.notify_all()
            assert self.world.changed.wait_for(lambda: self.opened or self.is_dead, LIMIT)
            how, self.opened, self.gate = self.opened, None, ""
            if how == "die":
                self.is_dead = True
            if self.is_dead or how is None:
                raise Died
            self.is_late = how == "late"
        if how == "fail":
            self.seen.append("fails")
            raise StorageError(f"injected at {gate}")
        return how

    def work(self) -> None:
        try:
            self.result = self.run(self)
        except BaseException as error:  # noqa: BLE001 - looked at when all have ended
            self.result = error
        with self.world.changed:
            self.has_ended = True
            self.world.changed.notify_all()


class Gated(StorageView):
    def __init__(self, storage: Storage, member: Member) -> None:
        super().__init__(storage)
        self._member = member

    def _do(self, what: str, path: str, action: Callable[[], Any]) -> Any:
        self._member.wait(f"{what} {path}")
        try:
            found = action()
        except remesh.RemeshError as error:
            self._member.seen.append((what, path, type(error).__name__))
            raise
        # What a file holds follows from its name and size; only the record is written again.
        is_record = path == native.RECORD_NAME and what == "read"
        short = native.decode_record(found, path).save_id if is_record else found
        self._member.seen.append((what, path, len(short) if isinstance(short, bytes) else short))
        return found

    def list(self, prefix: str = "") -> list[str]:
        return self._do("list", prefix, partial(super().list, prefix))  # type: ignore[no-any-return]

    def list_sizes(self, prefix: str = "") -> dict[str, int]:
        """See `Storage.list_sizes`; at one time, as object stores do."""
        sizes = self._storage.list_sizes
        return self._do("sizes", prefix, partial(sizes, prefix))  # type: ignore[no-any-return]

    def size(self, path: str) -> int:
        return self._do("size", path, partial(super().size, path))  # type: ignore[no-any-return]

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._do("read", path, partial(super().read, path, start, stop))  # type: ignore[no-any-return]

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        return self._do("read", path, partial(super().read_into, path, start, buffer))  # type: ignore[no-any-return]

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        self._do("put", path, partial(super().put, path, data, overwrite=overwrite))

    def delete(self, path: str) -> None:
        self._do("delete", path, partial(super().delete, path))

    def delete_many(self, paths: Sequence[str]) -> None:
        """See `Storage.delete_many`; at one time, as object stores do."""
        if paths:
            self._do("delete", " ".join(paths), partial(self._storage.delete_many, paths))

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> Writer:
        writer = super().create(path, num_bytes, overwrite=overwrite)
        return GatedWriter(writer, self._member, path, num_bytes)


@dataclass
class GatedWriter:
    """A data file: others see it once it is finished."""

    writer: Writer
    member: Member
    path: str
    num_bytes: int

    def write(self, position: int, data: Buffer) -> None:
        self.writer.write(position, data)

    def finish(self, num_bytes: int | None = None) -> None:
        how = self.member.wait(f"finish {self.path}")
        self.writer.finish(self.num_bytes // 2 if how == "tear" else num_bytes)
        self.member.seen.append(("finish", how))

    def abort(self) -> None:
        if not self.member.is_dead:
            self.writer.abort()


class World:
    """One run of a scenario, from its beginning to some state."""

    def __init__(self, scenario: Scenario) -> None:
        self.changed = threading.Condition()
        self.scenario = scenario
        self.storage = MemoryStorage()
        self.storage._files = dict(scenario.files)
        self.num_faults = 0
        self.members = [Member(number, self, run) for number, run in enumerate(scenario.members)]
        self.threads = [
            threading.Thread(target=member.work, name=f"member-{member.number}", daemon=True)
            for member in self.members
        ]
        for member, thread in zip(self.members, self.threads, strict=True):
            CLOCK.members[thread.name] = member
            thread.start()
            self.settle()

    def settle(self) -> None:
        """Wait until every member that was started stands at a gate or has ended."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: all(
                    member.gate or member.has_ended
                    for member, thread in zip(self.members, self.threads, strict=True)
                    if thread.ident is not None
                ),
                LIMIT,
            )

    def choices(self) -> list[Choice]:
        found: list[Choice] = []
        may_fail = self.num_faults < self.scenario.num_faults
        for member in self.members:
            if member.has_ended:
                continue
            found.append((member.number, "go"))
            if member.gate == "pause" and any(one.is_dead for one in self.members):
                found.append((member.number, "late"))
            if may_fail and member.number in self.scenario.mortal:
                found.append((member.number, "die"))
                if member.gate != "pause":
                    found.append((member.number, "fail"))
                if member.gate.startswith("finish"):
                    found.append((member.number, "tear"))
        return found

    def do(self, choice: Choice) -> None:
        number, how = choice
        self.num_faults += how in ("fail", "die", "tear")
        with self.changed:
            self.members[number].gate = ""
            self.members[number].opened = how
            self.changed.notify_all()
        self.settle()

    def state(self) -> object:
        """All that what comes next depends on."""
        stored = [
            (path, self.committed if path == native.RECORD_NAME else content.size)
            for path, content in sorted(self.storage._files.items())
        ]
        seen = tuple(
            (member.gate, member.has_ended, member.is_dead, shown(member.result), repr(member.seen))
            for member in self.members
        )
        return tuple(stored), seen, self.num_faults

    @property
    def committed(self) -> str:
        """The save whose checkpoint is there; empty if there is none."""
        if native.RECORD_NAME not in self.storage.list():
            return ""
        return native.decode_record(self.storage.read(native.RECORD_NAME), "").save_id

    def end(self) -> None:
        with self.changed:
            for member in self.members:
                member.is_dead = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join(LIMIT)
            assert not thread.is_alive()


def shown(result: object) -> str:
    """A result, without what differs between runs."""
    return type(result).__name__ if isinstance(result, BaseException) else repr(result)


@dataclass(frozen=True)
class End:
    committed: str  # the save whose checkpoint is there
    results: list[object]  # of the members


@dataclass(frozen=True)
class Scenario:
    """What is stored at first, who takes part, and how much may go wrong."""

    files: Files
    members: Sequence[Callable[[Member], object]]
    values: dict[str, float]  # save id → the value of all elements
    names: dict[str, str]  # save id → what the test calls it
    num_faults: int = 0
    mortal: Sequence[int] = ()  # who may die


@dataclass
class Explored:
    after: dict[object, set[object]] = field(default_factory=dict)
    ends: set[object] = field(default_factory=set)
    results: list[End] = field(default_factory=list)

    def stuck(self) -> set[object]:
        """States from which no end can be reached."""
        before: dict[object, set[object]] = {}
        for state, others in self.after.items():
            for other in others:
                before.setdefault(other, set()).add(state)
        reached, left = set(self.ends), list(self.ends)
        while left:
            for state in before.get(left.pop(), ()):
                if state not in reached:
                    reached.add(state)
                    left.append(state)
        return set(self.after) - reached


def explore(scenario: Scenario) -> Explored:
    """Try every order of steps, depth first; each new state is checked."""
    found = Explored()
    todo: list[tuple[tuple[Choice, ...], object]] = [((), None)]
    while todo:
        path, before = todo.pop()
        world = World(scenario)
        try:
            for choice in path:
                world.do(choice)
            while True:
                state = world.state()
                if before is not None:
                    found.after.setdefault(before, set()).add(state)
                if state in found.after:
                    break
                found.after[state] = set()
                check(world)
                choices = world.choices()
                if not choices:
                    found.ends.add(state)
                    results = [member.result for member in world.members]
                    found.results.append(End(scenario.names[world.committed], results))
                    break
                todo += [((*path, choice), state) for choice in choices[1:]]
                path, before = (*path, choices[0]), state
                world.do(choices[0])
        finally:
            world.end()
    _LOGGER.info("%d states, %d ends", len(found.after), len(found.ends))
    return found


def check(world: World) -> None:
    """What is committed is whole and right."""
    save_id = world.committed
    if save_id:
        files = tuple(sorted((path, one.size) for path, one in world.storage._files.items()))
        assert value_in(world.storage, save_id, files) == world.scenario.values[save_id]


_VALUES: dict[object, float] = {}


def value_in(storage: MemoryStorage, save_id: str, files: object) -> float:
    """The value of a checkpoint whose digests are right; each is read once."""
    key = save_id, files
    if key not in _VALUES:
        checkpoint = remesh.Checkpoint(storage)
        assert checkpoint.verify().ok
        _VALUES[key] = value_of(checkpoint)
    return _VALUES[key]


def value_of(checkpoint: remesh.Checkpoint) -> float:
    array = checkpoint.read_array("w")
    assert array.shape == (ROWS,)
    assert (array == array[0]).all()
    assert checkpoint.values["v"] == array[0]
    return float(array[0])


# ---------------------------------------------------------------------------------------------
# Members
# ---------------------------------------------------------------------------------------------


class Clock:
    """The time of a member: none passes, until it has waited for longer than the deadline."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}

    def monotonic(self) -> float:
        member = self.members.get(threading.current_thread().name)
        return 1e9 if member is not None and member.is_late else 0.0


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_files, "time", CLOCK)
    monkeypatch.setattr(status_files, "LOOKS_PER_PART", 1)  # all looks are alike
    monkeypatch.setattr(status_files, "HIDDEN_SECONDS", -1.0)  # what is gone is seen to be gone


def state_of(rank: int, num_ranks: int, value: float) -> dict[str, object]:
    return {"w": share_of("w", np.full(ROWS, value), rank, num_ranks), "v": value}


def ranks_of_save(
    storage: MemoryStorage, num_ranks: int, value: float
) -> tuple[str, list[Callable[[Member], object]]]:
    """A save that its ranks have agreed on and staged: its id, and the server of each rank."""

    def prepare(exchange: Exchange) -> tuple[WriteTask, list[Filled]]:
        options = SaveOptions(overwrite=True, in_background=True)
        state = state_of(exchange.rank, num_ranks, value)
        mine = agree(exchange, storage, state, options, cache=PlanCache(), emit=lambda *_: None)
        layout, filled = mine.stream.layout, list[Filled]()
        arena = Arena(layout.num_chunks * CHUNK_SIZE, CHUNK_SIZE)
        Stager(layout, arena).stage(filled.extend)
        task = WriteTask(
            format=native.FORMAT_NAME,
            save_id=mine.save_id,
            rank=exchange.rank,
            num_ranks=num_ranks,
            deadline=DEADLINE,
            place="",
            files=mine.stream.files,
            num_bytes=layout.num_bytes,
            parts=mine.stream.parts,
            kept=(),
            at_once=True,
            global_plan=mine.global_plan,
        )
        return task, filled

    prepared = run_ranks(num_ranks, prepare)
    return prepared[0][0].save_id, [partial(serve, task, filled) for task, filled in prepared]


def serve(task: WriteTask, filled: Sequence[Filled], member: Member) -> None:
    """The background part of a save on one rank."""
    chunks: dict[int, Chunk] = {one.chunk.slot: one.chunk for one in filled}

    storage = Gated(member.world.storage, member)
    trainer = Trainer(lambda _: None, lambda: None, lambda *_: None, lambda *_: None)
    writer = SaveWriter(task, storage, chunks.__getitem__, trainer)
    writer._status._wake = Pauses(member, writer)  # type: ignore[assignment]
    for one in filled:
        writer.fill(one.number, one.num_bytes, one.chunk.slot)
    writer.end_staging(None)
    writer.save()


class Pauses:
    """The pauses between two looks of a rank; how often it has looked in vain is not kept."""

    def __init__(self, member: Member, writer: SaveWriter) -> None:
        self._member, self._status = member, writer._status

    def wait(self, _seconds: float) -> None:
        self._member.seen[:] = ["waits", sorted(self._status._replies)]
        self._member.seen.append(self._member.wait("pause"))

    def clear(self) -> None:
        """No message wakes a rank up here."""


def read(member: Member) -> object:
    return value_of(remesh.Checkpoint(Gated(member.world.storage, member)))


def stored(value: float) -> tuple[MemoryStorage, str]:
    storage = MemoryStorage()
    remesh.save(state_of(0, 1, value), storage)
    return storage, remesh.Checkpoint(storage).record.save_id


# ---------------------------------------------------------------------------------------------
# Scenarios
# ---------------------------------------------------------------------------------------------


def one_save(num_ranks: int, num_faults: int) -> Scenario:
    storage, old = stored(1.0)
    save_id, members = ranks_of_save(storage, num_ranks, 2.0)
    values = {old: 1.0, save_id: 2.0}
    names = {old: "old", save_id: "new"}
    return Scenario(dict(storage._files), members, values, names, num_faults, range(num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_order_of_a_save_ends_with_its_commit(num_ranks: int) -> None:
    found = explore(one_save(num_ranks, 0))
    assert found.stuck() == set()
    assert {end.committed for end in found.results} == {"new"}
    assert all(result is None for end in found.results for result in end.results)


@pytest.mark.parametrize(
    ("num_ranks", "mortal"),
    [
        (1, [0]),
        (2, [0, 1]),
        pytest.param(3, [0], marks=pytest.mark.nightly),
        pytest.param(3, [1], marks=pytest.mark.nightly),  # rank 2 does what rank 1 does
    ],
)
def test_a_death_anywhere_leaves_the_old_checkpoint_or_the_new_one(
    num_ranks: int, mortal: list[int]
) -> None:
    found = explore(replace(one_save(num_ranks, 1), mortal=mortal))
    assert found.stuck() == set()
    assert {end.committed for end in found.results} == {"old", "new"}
    for end in found.results:
        assert end.committed == "new" or None not in end.results, end


def two_saves(num_faults: int, *others: Callable[[Member], object], num_ranks: int = 1) -> Scenario:
    """A save of some ranks, one of a single rank, and others at one place."""
    storage, old = stored(1.0)
    first, ranks = ranks_of_save(storage, num_ranks, 2.0)
    second, [other] = ranks_of_save(storage, 1, 3.0)
    values = {old: 1.0, first: 2.0, second: 3.0}
    names = {old: "old", first: "first", second: "second"}
    members = [*ranks, other, *others]
    mortal = range(num_ranks + 1)
    return Scenario(dict(storage._files), members, values, names, num_faults, mortal)


@pytest.mark.parametrize(
    ("num_ranks", "num_faults"),
    [
        (1, 0),
        pytest.param(1, 1, marks=pytest.mark.nightly),
        pytest.param(2, 0, marks=pytest.mark.nightly),
    ],
)
def test_two_saves_to_one_place(num_ranks: int, num_faults: int) -> None:
    found = explore(two_saves(num_faults, num_ranks=num_ranks))
    assert found.stuck() == set()
    for end in found.results:
        assert end.committed != "old" or None not in end.results
        errors = [result for result in end.results if result is not None]
        # A rank may see only that the other save has replaced the checkpoint of its own.
        assert num_faults or all("another save has replaced" in str(error) for error in errors)
        assert num_faults or end.results[0] is end.results[num_ranks] is None


def test_a_reader_beside_a_save() -> None:
    scenario = one_save(1, 1)
    found = explore(replace(scenario, members=[*scenario.members, read]))
    assert found.stuck() == set()
    # A checkpoint that was opened before the commit may have lost its files when it is read.
    seen = {shown(end.results[1]) for end in found.results}
    assert seen == {"1.0", "2.0", "CheckpointReplacedError"}


@pytest.mark.nightly
def test_a_reader_beside_two_saves() -> None:
    found = explore(two_saves(0, read))
    assert found.stuck() == set()
    seen = {shown(end.results[2]) for end in found.results}
    assert seen == {"1.0", "2.0", "3.0", "CheckpointReplacedError"}
