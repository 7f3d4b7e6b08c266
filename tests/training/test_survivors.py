"""State that is taken from the memory of the ranks that go on; ranks are threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import remesh
from remesh.checkpoint.copies import sample_ranges
from remesh.core.sharded import ShardedTensor
from remesh.elastic.training_job import TrainingJob
from remesh.errors import WorldChangedError
from remesh.exchange import Alone, Exchange
from remesh.run_info import RunInfo
from remesh.sharding import DescribedOptimizer, LocalNonpersistentObject, NamedModule
from remesh.training import (
    Randomness,
    ResumableBatchSampler,
    ResumableSampler,
    Resumed,
    survivors,
)
from remesh.training import manager as manager_module
from remesh.training.policies import EverySeconds
from tests.support import run_processes, run_ranks


class Counting(torch.nn.Module):
    """A module whose extra state each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"forward": 0}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls["forward"] += 1
        return values

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Meter:
    """An object whose state has a tensor."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class World:
    """What a rank trains in one world: a whole model and a tensor that is cut among the ranks."""

    def __init__(
        self, exchange: Exchange, root: Path, job: TrainingJob, num_copies: int = 1
    ) -> None:
        self.exchange, self.job = exchange, job
        layers = (torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.0))
        self.model = torch.nn.Sequential(*layers, Counting())
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                values = torch.arange(parameter.numel()) + number
                parameter.copy_(values.reshape(parameter.shape).sin())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        # Too large to be copied at each boundary; no optimizer changes them.
        self.teacher = torch.nn.Linear(1000, 300, bias=False).requires_grad_(False)
        self.teacher.weight.zero_()
        self.book = torch.zeros(300_000)
        self.teacher.register_buffer("book", self.book)
        rank, size = exchange.rank, exchange.world_size
        sampler = ResumableSampler(1000, rank=rank, world_size=size)
        self.batches = ResumableBatchSampler(sampler, 12 // size)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": DescribedOptimizer(self.optimizer, {}),
            "average": self.average,
            "teacher": NamedModule(self.teacher, {"": "frozen"}),
            "lock": LocalNonpersistentObject(threading.Lock()),
            "scheduler": self.scheduler,
            "noise": torch.Generator(),
            "meter": Meter(),
            "batches": self.batches,
            "seen": [0],
            "step": 0,
        }
        if num_copies > 1:
            # Two ranks next to each other have the same rows.
            num_parts = size // num_copies
            first = rank // num_copies * (12 // num_parts)
            self.rows = torch.zeros(12 // num_parts, 2)
            self.state["rows"] = ShardedTensor.at_offset(
                "rows", self.rows, (12, 2), (first, 0), replica_id=None
            )
        self.manager = remesh.Manager(root, every=100, background=False, group=exchange, job=job)

    def forward(self) -> torch.Tensor:
        """The forward pass of a step, the same on all ranks. It changes the buffers."""
        next(iter(self.batches))
        self.state["meter"].total += torch.rand(1, generator=self.state["noise"])
        result: torch.Tensor = self.model(torch.eye(4)[:3] + self.state["step"])
        return result.sum()

    def make_step(self) -> None:
        self.forward().backward()  # type: ignore[no-untyped-call] # of torch
        self.optimizer.step()
        self.average.update_parameters(self.model)
        self.scheduler.step()
        self.batches.advance()
        self.state["step"] += 1
        self.state["seen"] = [self.state["step"]]
        if "rows" in self.state:
            self.rows.add_(1)
        self.manager.step(self.state["step"], self.state)

    def values(self) -> dict[str, Any]:
        """What must be the same after a change of the world."""
        moments = self.optimizer.state_dict()["state"]
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "average": copy.deepcopy(self.average.state_dict()),
            "moments": {key: value["exp_avg"].clone() for key, value in moments.items()},
            "rate": self.optimizer.param_groups[0]["lr"],
            "schedule": self.scheduler.last_epoch,
            "position": self.batches.sampler.position,
            "seen": list(self.state["seen"]),
            "noise": self.state["noise"].get_state(),
            "total": self.state["meter"].total.clone(),
            "step": self.state["step"],
        }


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_resumed(
    found: list[tuple[Resumed | None, World, dict[str, Any]]], **facts: object
) -> list[Resumed]:
    """All ranks have the values of the boundary again; `facts` are of what they resumed from."""
    resumed = [one for one, _, _ in found if one is not None]
    assert len(resumed) == len(found)
    for one, (_, world, expected) in zip(resumed, found, strict=True):
        assert {name: getattr(one, name) for name in facts} == facts
        assert_same(world.values(), expected)
    return resumed


def change(
    tmp_path: Path,
    *,
    before: int,
    after: list[int | None],
    leave: Callable[[World, int], None],
    num_copies: int = 1,
) -> list[tuple[Resumed | None, World, dict[str, Any]]]:
    """Train three steps, leave the world somewhere in the fourth, and resume in another world.

    `after` names the former rank of each rank that goes on; None is a new process. Of each: what it
    resumed from, its world, and the values at the boundary of rank 0.
    """
    jobs = [TrainingJob(is_reentrant=True) for _ in range(before)]
    values: list[dict[str, Any]] = [{} for _ in range(before)]

    def train(exchange: Exchange) -> None:
        world = World(exchange, tmp_path, jobs[exchange.rank], num_copies)
        for _ in range(3):
            world.make_step()
        values[exchange.rank] = world.values()
        leave(world, exchange.rank)
        world.manager.__exit__(WorldChangedError, None, None)

    def go_on(exchange: Exchange) -> tuple[Resumed | None, World]:
        old = after[exchange.rank]
        job = TrainingJob(is_reentrant=True) if old is None else jobs[old]
        world = World(exchange, tmp_path, job, num_copies)
        return world.manager.resume(world.state), world

    run_ranks(before, train)
    return [(*result, values[0]) for result in run_ranks(len(after), go_on)]


def in_forward(world: World, _rank: int) -> None:
    """Left in the forward pass, after buffers, learning rate and values have changed."""
    world.forward()
    world.scheduler.step()
    world.state["step"] = 77
    world.state["seen"].append(77)


@pytest.mark.parametrize(
    "after", [[0, 1], [1, 2], [None, 2, None], [0, 1, 2, None]], ids=["2", "1", "fresh", "more"]
)
def test_ranks_that_go_on_lose_no_step(tmp_path: Path, after: list[int | None]) -> None:
    found = change(tmp_path, before=3, after=after, leave=in_forward)
    resumed = assert_resumed(found, step=3, live=True, from_memory=False)
    assert [world.manager.run for _, world, _ in found] == [one.info.run for one in resumed]
    assert not list(tmp_path.iterdir())


def optimize(world: World, _rank: int) -> None:
    """Left after a step of the optimizer, and before the boundary."""
    world.forward().backward()  # type: ignore[no-untyped-call] # of torch
    world.optimizer.step()


def test_a_rank_that_was_changing_its_tensors_takes_those_of_another(tmp_path: Path) -> None:
    def leave(world: World, rank: int) -> None:
        (in_forward if rank == 1 else optimize)(world, rank)

    found = change(tmp_path, before=2, after=[0, 1], leave=leave)
    assert_resumed(found, live=True)


def test_a_rank_that_is_a_step_ahead_gives_its_step_to_all(tmp_path: Path) -> None:
    def leave(world: World, rank: int) -> None:
        if rank == 1:
            world.manager._exchange = _Dead()  # type: ignore[assignment]
            with pytest.raises(ConnectionError):
                world.make_step()  # the boundary comes before the first message

    found = change(tmp_path, before=2, after=[0, 1], leave=leave)
    assert [world.state["step"] for _, world, _ in found] == [4, 4]


class _Dead:
    """An exchange whose other ranks are gone."""

    rank, world_size = 1, 2

    def all_gather(self, _data: bytes) -> list[bytes]:
        raise ConnectionError("the others are gone")


def swap_in_averages(world: World, _rank: int = 0) -> None:
    for own, average in zip(world.model.parameters(), world.average.parameters(), strict=True):
        own.data.copy_(average.data + 1)


def set_moments(world: World, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for moments in world.optimizer.state.values():
        changed = change(moments["exp_avg"])
        if changed.data_ptr() != moments["exp_avg"].data_ptr():
            moments["exp_avg"] = changed


def of_teacher() -> torch.Tensor:
    return torch.ones(300, 1000)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (swap_in_averages, "model.0.weight"),
        (lambda world: world.average.update_parameters(world.model), "average.module.0.weight"),
        (lambda world: world.teacher.weight.numpy().fill(1), "teacher.weight"),
        (lambda world: setattr(world.teacher.weight, "data", of_teacher()), "teacher.weight"),
        (lambda world: world.teacher.weight.data.mul_(0.5).add_(of_teacher()), "teacher.weight"),
        (
            lambda world: torch._foreach_lerp_([world.teacher.weight], [of_teacher()], 0.5),
            "teacher.weight",
        ),
        (lambda world: world.book.data.add_(1), "teacher.book"),
        (
            lambda world: set_moments(world, lambda moment: moment.data.mul_(2)),
            "optimizer.state.0.exp_avg",
        ),
        (
            lambda world: set_moments(world, lambda moment: moment * 2),
            "optimizer.state.0.exp_avg",
        ),
        (
            lambda world: setattr(world.teacher, "weight", torch.nn.Parameter(of_teacher())),
            "teacher.weight",
        ),
        (lambda world: world.model.__setitem__(0, torch.nn.Linear(4, 4)), "model.0.weight"),
        (
            lambda world: setattr(world.model[1].running_mean, "data", torch.zeros(5)),
            "a tensor of shape (4,)",
        ),
        (lambda world: world.model[0].weight.detach().add_(1), "model.0.weight"),
    ],
)
def test_tensors_that_were_written_past_the_optimizer_are_not_taken(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    write: Callable[[World], None],
    name: str,
) -> None:
    found = change(tmp_path, before=2, after=[0, 1], leave=lambda world, _rank: write(world))
    assert [resumed for resumed, _, _ in found] == [None, None]
    what = name if name.startswith("a tensor") else f"state.{name}"
    assert f"step 3 is not taken from memory: {what}" in caplog.text


@pytest.mark.parametrize(
    ("leave", "sizes"),
    [
        pytest.param(optimize, {"before": 2}, id="all were changing their tensors"),
        pytest.param(swap_in_averages, {"before": 2}, id="tensors were written"),
        pytest.param(in_forward, {"before": 4, "num_copies": 2}, id="a part is gone"),
    ],
)
def test_a_step_that_memory_does_not_give_comes_from_storage(
    tmp_path: Path, leave: Callable[[World, int], None], sizes: dict[str, int]
) -> None:
    def save_and_leave(world: World, rank: int) -> None:
        world.manager.save(3, world.state)
        leave(world, rank)

    found = change(tmp_path, after=[0, 1], leave=save_and_leave, **sizes)
    for resumed in assert_resumed(found, step=3, live=False):
        reasons = [reason for _, reason in resumed.passed_over if "does not give step 3" in reason]
        assert len(reasons) == ("num_copies" in sizes)


def test_averages_that_were_swapped_out_again_have_changed_nothing(tmp_path: Path) -> None:
    def leave(world: World, _rank: int) -> None:
        own = [parameter.data.clone() for parameter in world.model.parameters()]
        swap_in_averages(world)
        for parameter, kept in zip(world.model.parameters(), own, strict=True):
            parameter.data.copy_(kept)

    found = change(tmp_path, before=2, after=[0, 1], leave=leave)
    assert_resumed(found, live=True)


def test_copies_that_differ_where_no_sample_is_are_not_taken(tmp_path: Path) -> None:
    """No fingerprint shows it: all bytes of the copies are compared."""

    def leave(world: World, rank: int) -> None:
        if rank == 1:
            world.teacher.weight.data.view(-1)[5_000] = 1

    assert not any(start <= 5_000 < stop for start, stop in sample_ranges((300, 1000), 4))
    found = change(tmp_path, before=2, after=[0, 1], leave=leave)
    assert [resumed for resumed, _, _ in found] == [None, None]


def test_tensors_that_had_to_move_are_looked_at_in_their_new_place(tmp_path: Path) -> None:
    job = TrainingJob(is_reentrant=True)
    world = World(Alone(), tmp_path, job)
    world.make_step()
    boundary = job.boundary
    weight = world.teacher.weight

    def move(_state: Any) -> bool:
        weight.data = weight.data.clone()
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survivors, "make_room", move)
        job.make_room()
    boundary.keeper.roll_back()
    weight.data.add_(1)
    with pytest.raises(survivors.ChangedError, match=r"state\.teacher\.weight"):
        boundary.keeper.roll_back()


def test_managers_come_and_go_while_optimizers_of_other_threads_step(tmp_path: Path) -> None:
    """Torch walks over the hooks of all optimizers meanwhile, and does not stand a change."""

    def come_and_go(*_: Any) -> None:
        remesh.Manager(tmp_path, job=TrainingJob(is_reentrant=True)).close()

    come_and_go()
    hooks = [register_optimizer_step_pre_hook(hook) for hook in (come_and_go, lambda *_: None)]
    try:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    finally:
        for hook in hooks:
            hook.remove()


def test_what_is_cut_is_taken_if_copies_of_all_parts_go_on(tmp_path: Path) -> None:
    found = change(tmp_path, before=4, after=[1, 2], leave=in_forward, num_copies=2)
    assert_resumed(found, live=True)
    assert_same([world.rows for _, world, _ in found], [torch.full((12, 2), 3.0)] * 2)


def leave_gathered(exchange: Exchange, root: str, evaluates: bool) -> None:
    """FSDP2, left in a forward pass that has gathered the parameters of the outermost module.

    So has an evaluation before the step was complete.
    """
    job = TrainingJob(is_reentrant=True)

    def build() -> tuple[torch.nn.Sequential, torch.optim.Optimizer, dict[str, Any]]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model.register_parameter("scale", torch.nn.Parameter(torch.rand(4)))
        for part in (*model, model):
            fully_shard(part)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, {"model": model, "optimizer": optimizer, "step": 0}

    model, optimizer, state = build()
    manager = remesh.Manager(root, group=exchange, job=job)
    model(torch.eye(4)).sum().backward()
    optimizer.step()
    if evaluates:
        with torch.no_grad():
            model(torch.eye(4))
    manager.step(1, state)
    expected = [copy.deepcopy(value.full_tensor()) for value in model.state_dict().values()]

    def leave(*_: object) -> None:
        raise WorldChangedError

    model[1].register_forward_pre_hook(leave)
    with pytest.raises(WorldChangedError):
        model(torch.eye(4))
    manager.abandon("the world changes")
    job.make_room()
    job.entries += 1
    model, _, state = build()
    resumed = remesh.Manager(root, group=exchange, job=job).resume(state)
    assert resumed is not None
    assert resumed.live
    assert_same([value.full_tensor() for value in model.state_dict().values()], expected)


@pytest.mark.parametrize("evaluates", [False, True])
def test_parameters_that_a_forward_pass_had_gathered_are_taken(
    tmp_path: Path, evaluates: bool
) -> None:
    run_processes(2, leave_gathered, str(tmp_path), evaluates)


def end_gathered(exchange: Exchange, root: str) -> None:
    """FSDP2, with an evaluation after the last step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fully_shard(model)
    with remesh.Manager(root, group=exchange, every=100) as manager:
        manager.step(1, {"model": model})
        with torch.no_grad():
            model(torch.eye(4))
    assert (Path(root) / "step_00000001").exists()


def test_a_step_before_an_evaluation_is_saved_at_the_end(tmp_path: Path) -> None:
    run_processes(2, end_gathered, str(tmp_path))


@pytest.mark.parametrize("stored", ["", "whole", "damaged"])
def test_random_numbers_of_a_lost_role_come_from_another_source_of_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str
) -> None:
    caplog.set_level("INFO", "remesh")

    def leave(world: World, rank: int) -> None:
        if stored:
            world.manager.save(3, world.state)
        if stored == "damaged":
            for file in tmp_path.glob("*/data-*/0*.safetensors"):
                file.unlink(missing_ok=True)
        in_forward(world, rank)

    found = change(tmp_path, before=2, after=[None, 1], leave=leave)
    assert_resumed(found, live=True, same_random=stored == "whole")
    seeded = "seeded anew on all ranks: numpy, python, torch (not stored)" in caplog.text
    assert seeded == (not stored)
    assert ("random numbers: " in caplog.text) == (stored == "damaged")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([None, 1], (3, False, True)),  # of the snapshot before
        ([0, 1], (4, True, True)),
        ([1], (4, True, False)),  # random numbers cannot go on in a world of another size
    ],
)
def test_a_process_that_dies_before_the_snapshot_of_its_step_is_complete(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: list[int | None],
    expected: tuple[int, bool, bool],
) -> None:
    info = RunInfo(snapshot_dir=str(tmp_path / "memory"))
    monkeypatch.setattr(manager_module, "run_info", lambda: info)
    monkeypatch.setattr(remesh, "Manager", partial(remesh.Manager, memory_every=1))

    def leave(world: World, _rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.manager, "_memory", _NeverDone())
            with pytest.raises(ConnectionError):
                world.make_step()

    for resumed, _, _ in change(tmp_path, before=2, after=after, leave=leave):
        assert resumed is not None
        assert (resumed.step, resumed.live, resumed.same_random) == expected


class _NeverDone:
    """Snapshots whose other ranks are gone."""

    def is_due(self, _step: int) -> bool:
        return True

    def save(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("the others are gone")


def test_random_numbers_of_a_role_come_from_any_rank_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the lowest of these ranks is gone."""
    one_role = Randomness(role={"dp": (0, 1)})
    monkeypatch.setattr(remesh, "Manager", partial(remesh.Manager, randomness=one_role))
    found = change(tmp_path, before=3, after=[1, 2, None], leave=in_forward)
    assert_resumed(found, live=True, same_random=True)


def test_what_cannot_be_watched_is_not_relied_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = TrainingJob(is_reentrant=True)
    with remesh.Manager(tmp_path, job=job) as manager:
        manager.step(1, {"table": np.zeros(1 << 20)})
        assert job.boundary is None
        assert "state.table (ndarray) has more than 1 MiB" in caplog.text
        job.is_changing, job.must_leave = True, True
        with pytest.raises(WorldChangedError):
            manager.step(2, {"table": np.zeros(1 << 20)})


class _Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class _Unfinished(Future[None]):
    """A save that does not get done."""

    def progress(self) -> SimpleNamespace:
        return SimpleNamespace(phase="writing")


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_failures_do_not_keep_a_save_from_being_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut_off: bool
) -> None:
    """A save every 4 s and a failure every 3 s; the first save may be cut off by one."""
    clock, job = _Clock(), TrainingJob(is_reentrant=True)
    monkeypatch.setattr(manager_module, "time", clock)
    monkeypatch.setattr(survivors, "time", clock)
    monkeypatch.setattr(manager_module, "REENTRY_SECONDS", 0.0)
    begun = []
    for entry in range(1, 5):
        state = {"step": 0}
        manager = remesh.Manager(tmp_path, every=EverySeconds(4), group=Alone(), job=job)
        manager.resume(state)
        if is_cut_off and entry == 2:
            monkeypatch.setattr(manager._saver, "save_async", lambda *_, **__: _Unfinished())
        state["step"] += 1
        clock.now += 3
        if manager.step(state["step"], state):
            begun.append(state["step"])
        if not (is_cut_off and entry == 2):
            manager.wait()
            manager.step(state["step"] + 1, state | {"step": state["step"] + 1})
        manager.abandon("the world changes")
    assert begun == ([3, 4] if is_cut_off else [3, 7])


@pytest.mark.parametrize("how", ["positional", "by name"])
def test_a_closure_is_a_part_of_the_step_that_changes_nothing(tmp_path: Path, how: str) -> None:
    """As Lightning steps: forward and backward pass are called by the optimizer."""
    job, seen = TrainingJob(is_reentrant=True), []
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer: Any = torch.optim.LBFGS([weight], max_iter=2)

    def compute() -> torch.Tensor:
        seen.append((job.is_changing, weight.item()))
        optimizer.zero_grad()
        loss = (weight - 3).square().sum()
        loss.backward()  # type: ignore[no-untyped-call] # of torch
        return loss

    with remesh.Manager(tmp_path, job=job) as manager:
        manager.step(1, {"weight": weight, "optimizer": optimizer})
        if how == "by name":
            optimizer.step(closure=compute)
        else:
            optimizer.step(compute)
    assert [changing for changing, _ in seen] == [False] + [True] * (len(seen) - 1)
    assert len({value for _, value in seen}) > 1
    assert not job.boundary.is_clean


def test_what_aborted_collectives_have_left_changes_nothing(tmp_path: Path) -> None:
    """On a device they end like any other, and the host goes on."""
    job = TrainingJob(is_reentrant=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = {"weight": weight, "optimizer": optimizer}
    with remesh.Manager(tmp_path, job=job) as manager:
        manager.step(1, state)
        weight.grad = torch.full((1,), 7.0)
        job.is_aborted = True
        with pytest.raises(WorldChangedError):
            optimizer.step()
        assert weight.item() == 1.0
        assert job.boundary.is_clean
        job.is_aborted = False
        optimizer.step()
        job.is_aborted = True  # by a collective of the optimizer, say
        with pytest.raises(WorldChangedError):
            manager.step(2, state)
        assert (job.boundary.note.step, job.boundary.is_clean) == (1, False)
        manager.abandon("the world changes")
