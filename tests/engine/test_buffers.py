"""Buffers that differ between ranks, such as the statistics of BatchNorm: whose are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import remesh
from remesh.exchange import Exchange
from tests.engine.scenes import all_are, errors_of, errors_of_save
from tests.support import run_processes, run_ranks

Choice = Literal["rank0", "per_rank"]
CHOICES: list[Choice] = ["rank0", "per_rank"]


def model_of(rank: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with equal parameters and other statistics on every rank."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        norm: Any = model[1]
        norm.running_mean.fill_(rank)
        norm.running_var.fill_(2.0**rank)
        norm.num_batches_tracked.fill_(10 + rank)
    return model


def statistics_of(model: nn.Module) -> tuple[float, float, int]:
    norm: Any = model[1]  # type: ignore[index]
    values = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert all(len(set(value.reshape(-1).tolist())) == 1 for value in values)
    mean, variance, count = (float(value.reshape(-1)[0]) for value in values)
    return mean, variance, int(count)


def save(exchange: Exchange, path: Path, how: str, buffers: Choice | None) -> None:
    model: Any = model_of(exchange.rank)
    if how == "saver":
        model[1] = checkpoint_wrapper(model[1])
    state = {"model": model}
    if how == "save":
        remesh.save(state, path, buffers=buffers, group=exchange)
    elif how == "manager":
        with remesh.Manager(path, buffers=buffers, group=exchange) as manager:
            manager.save(1, state)
    else:
        with remesh.Saver(buffers=buffers, group=exchange) as saver:
            saver.save_async(state, path).result()
    assert statistics_of(state["model"]) == (exchange.rank, 2.0**exchange.rank, 10 + exchange.rank)


def load(exchange: Exchange, path: Path) -> tuple[float, float, int]:
    model = model_of(100)
    report = remesh.load({"model": model}, path, group=exchange)
    assert not [name for name in report.unexpected if name.startswith("model.")]
    assert (next(model.parameters()).detach() == 0.5).all()
    return statistics_of(model)


@pytest.mark.parametrize("how", ["save", "saver", "manager"])
def test_without_a_choice_the_error_names_it(how: str, tmp_path: Path) -> None:
    errors = errors_of(3, save, tmp_path, how, None)
    told = 'buffers="rank0" or "per_rank"'
    all_are(errors, remesh.errors.DivergedReplicaError, told)


OWN = [(float(rank), 2.0**rank, 10 + rank) for rank in range(5)]
EXPECTED: dict[Choice, dict[int, list[tuple[float, float, int]]]] = {
    "rank0": {world: [OWN[0]] * world for world in (1, 2, 3, 5)},
    "per_rank": {
        1: OWN[:1],
        2: OWN[:2],
        3: OWN[:3],
        5: [*OWN[:3], OWN[0], OWN[0]],
    },
}


@pytest.mark.parametrize("how", ["save", "saver", "manager"])
@pytest.mark.parametrize("buffers", CHOICES)
def test_the_chosen_buffers_are_loaded_in_every_world_size(
    buffers: Choice, how: str, tmp_path: Path
) -> None:
    run_ranks(3, save, tmp_path, how, buffers)
    place = tmp_path / "step_00000001" if how == "manager" else tmp_path
    for world_size, expected in EXPECTED[buffers].items():
        loaded = run_ranks(world_size, load, place)
        for found, wanted in zip(loaded, expected, strict=True):
            assert found == pytest.approx(wanted)


def test_a_push_gives_each_rank_its_own_again_and_again() -> None:
    def run(exchange: Exchange) -> None:
        source, target = model_of(exchange.rank), model_of(100)
        sides = {"model": source}, {"model": target}
        pushing = remesh.Resharder(*sides, buffers="per_rank", group=exchange)
        for count in (0, 7):
            source[1].num_batches_tracked.fill_(count + exchange.rank)  # type: ignore[index]
            assert pushing.push().plan_reused == bool(count)
            assert statistics_of(target) == (*OWN[exchange.rank][:2], count + exchange.rank)

    run_ranks(3, run)


@pytest.mark.parametrize(
    "names",
    [{"model.": "net."}, [f"model.{name} -> net.{name}" for name in model_of(0).state_dict()]],
)
def test_a_load_that_renames_gives_each_rank_its_own(names: Any, tmp_path: Path) -> None:
    def run(exchange: Exchange) -> tuple[float, float, int]:
        target = model_of(100)
        remesh.load({"net": target}, tmp_path, transform=names, group=exchange)
        return statistics_of(target)

    run_ranks(3, save, tmp_path, "save", "per_rank")
    assert run_ranks(3, run) == OWN[:3]


def test_parameters_that_differ_are_an_error_whatever_is_chosen() -> None:
    def state_of(rank: int) -> dict[str, nn.Module]:
        model = model_of(rank)
        with torch.no_grad():
            next(model.parameters()).fill_(rank)
        return {"model": model}

    errors = errors_of_save(2, state_of, buffers="rank0")
    all_are(errors, remesh.errors.DivergedReplicaError)


def train_sharded(path: str) -> list[tuple[float, float, int]]:
    """FSDP2 with BatchNorm: a step, a background save, and a load into a fresh model."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(rank: int) -> nn.Module:
        model = model_of(rank)
        fully_shard(model, mesh=mesh)
        return model

    model = sharded(dist.get_rank())
    with remesh.Saver() as saver:
        try:
            saver.save_async({"model": model}, f"{path}/none").result()
        except remesh.errors.DivergedReplicaError as error:
            assert "buffers=" in str(error)  # noqa: PT017 - in another process
        else:
            raise AssertionError
    found = []
    for buffers in CHOICES:
        with remesh.Saver(buffers=buffers) as saver:
            saver.save_async({"model": model}, f"{path}/{buffers}").result()
        fresh = sharded(50)
        remesh.load({"model": fresh}, f"{path}/{buffers}")
        found.append(statistics_of(fresh))
    return found


def train_replicated(path: str) -> None:
    """DDP with BatchNorm: rank 0 has the buffers that count."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = model_of(0)
    replicated = DistributedDataParallel(model)
    with torch.no_grad():
        norm: Any = model[1]  # type: ignore[index]
        norm.running_mean.fill_(dist.get_rank())
        norm.running_var.fill_(2.0 ** dist.get_rank())
    remesh.save({"model": replicated}, path)
    replicated.broadcast_buffers = False  # from now on, which ones count is not known
    try:
        remesh.save({"model": replicated}, path, overwrite=True)
    except remesh.errors.DivergedReplicaError as error:
        assert "buffers=" in str(error)  # noqa: PT017 - in another process
    else:
        raise AssertionError


def train_both(_exchange: Exchange, path: str) -> list[tuple[float, float, int]]:
    train_replicated(f"{path}/ddp")
    return train_sharded(path)


def test_sharded_training_saves_the_chosen_buffers_and_ddp_its_own(tmp_path: Path) -> None:
    for rank, found in enumerate(run_processes(2, train_both, str(tmp_path))):
        assert found == [OWN[0], OWN[rank]]
    checkpoint = remesh.Checkpoint(tmp_path / "ddp")
    assert checkpoint.read_array("model.1.running_mean").tolist() == [0.0] * 3
    assert checkpoint.read_array("model.1.running_var").tolist() == [1.0] * 3


def test_a_reshard_takes_the_chosen_buffers_and_not_those_of_each_rank() -> None:
    def push(exchange: Exchange) -> list[tuple[float, float, int]]:
        source, target = model_of(exchange.rank), model_of(100)
        state = {"model": source}
        resharder = remesh.Resharder(state, {"model": target}, group=exchange, buffers="rank0")
        found = []
        for _ in range(2):
            resharder.push()
            found.append(statistics_of(target))
            target.load_state_dict(model_of(100).state_dict())
        return found

    assert run_ranks(2, push) == [[(0.0, 1.0, 10)] * 2] * 2
