"""State between live layouts: disjoint groups, bad input, transformations, and repeated pushes.

`test_layout_pairs` has every layout to every other.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import remesh
from remesh.checkpoint import loading
from remesh.exchange import Exchange
from remesh.pipeline import from_memory
from tests.engine.scenes import all_are, errors_of, share_of
from tests.engine.test_layout_pairs import live_by
from tests.engine.test_transform_load import FUSE, Fused, Split
from tests.support import Died, Raised, run_processes, run_processes_outcomes, run_ranks


@pytest.fixture(params=["shared", "sent", "mixed"])
def messages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    live_by(request.param, monkeypatch)


def test_values_and_objects_come_along() -> None:
    def run(exchange: Exchange) -> dict[str, Any]:
        rank = exchange.rank
        source: Any = {}
        if rank < 2:
            source = {
                "step": 7,
                "name": "a",
                "rng": remesh.sharding.ShardedObject("rng", [rank], (2,), (rank,)),
            }
        target: dict[str, Any] = {"step": 0}
        if rank >= 2:
            target["rng"] = remesh.sharding.ShardedObject("rng", None, (2,), (rank - 2,))
        remesh.reshard(source, target, group=exchange)
        return {"step": target["step"], "rng": target["rng"].data if rank >= 2 else None}

    assert run_ranks(4, run) == [
        {"step": 7, "rng": None},
        {"step": 7, "rng": None},
        {"step": 7, "rng": [0]},
        {"step": 7, "rng": [1]},
    ]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 12))


def train_to_inference(exchange: Exchange) -> bool:
    """FSDP2 on ranks 0 and 1 with its optimizer becomes tensor parallel on ranks 2 and 3."""
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "rank"))
    is_trainer = exchange.rank < 2
    model = make_model()
    batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(1))
    if is_trainer:
        fully_shard(model, mesh=mesh["rank"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        source: Any = {"model": model, "optimizer": optimizer}
        target: Any = {}
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["rank"], plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        source, target = {}, {"model": model, "optimizer": optimizer}
    report = remesh.reshard(source, target, group=exchange).restored
    whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    whole += [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    gathered: list[Any] = [None] * exchange.world_size
    dist.all_gather_object(gathered, [tensor.detach().numpy().tobytes() for tensor in whole])
    assert is_trainer or not report.missing
    return all(tensors == gathered[0] for tensors in gathered)


def test_trainers_hand_their_state_to_other_processes() -> None:
    assert run_processes(4, train_to_inference) == [True] * 4


def trained(model: nn.Module) -> torch.optim.AdamW:
    """An optimizer that has taken two steps, the same on all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number + step + 1.0)
        optimizer.step()
    return optimizer


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything in model and optimizer, as bytes."""
    found: dict[str, Any] = {"lr": optimizer.param_groups[0]["lr"]}
    for name, parameter in model.named_parameters():
        tensors = {"weight": parameter, **optimizer.state[parameter]}
        for key, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[f"{name}.{key}"] = whole.detach().numpy().tobytes()
    return found


def fuse_live_and_from_disk(
    exchange: Exchange, folder: str, shard_source: bool, shard_target: bool
) -> bool:
    """Whether a live reshard through a fusing transformation does what save and load do."""
    torch.manual_seed(0)
    source = Split()
    if shard_source:
        fully_shard(source)
    source_state = {"model": source, "optimizer": trained(source)}
    transform = remesh.Transform(FUSE)
    found = []
    remesh.save(source_state, folder, group=exchange)
    for live in (False, True):
        target = Fused()
        if shard_target:
            fully_shard(target)
        optimizer = torch.optim.AdamW(target.parameters(), lr=5.0)
        state = {"model": target, "optimizer": optimizer}
        if live:
            remesh.reshard(source_state, state, transform=transform, group=exchange)
        else:
            remesh.load(state, folder, transform=transform, group=exchange)
        found.append(whole_state(target, optimizer))
    assert found[0]["lr"] == 1e-2
    assert len(found[0]) == 17
    return bool(found[0] == found[1])


def fuse_in_all_layouts(exchange: Exchange, folder: str) -> bool:
    return all(
        fuse_live_and_from_disk(exchange, f"{folder}/{source}{target}", source, target)
        for source in (False, True)
        for target in (False, True)
    )


def test_fusing_with_an_optimizer_is_what_save_and_load_do(tmp_path: Path) -> None:
    """The steps of what is fused must be equal, and lie on different ranks."""
    assert run_processes(2, fuse_in_all_layouts, str(tmp_path)) == [True, True]


def test_steps_that_differ_are_not_fused() -> None:
    transform = remesh.Transform(FUSE)
    first_values = Split()

    def run(exchange: Exchange) -> None:
        source, target = copy.deepcopy(first_values), Fused()
        optimizer = trained(source)
        optimizer.state[source.k.weight]["step"] += 1
        fused = torch.optim.AdamW(target.parameters(), lr=5.0)
        held: Any = {"model": source, "optimizer": optimizer}
        wanted: Any = {"model": target, "optimizer": fused}
        remesh.reshard(held, wanted, transform=transform, group=exchange)

    told = "optimizer.state.k.weight.step must hold the same values"
    all_are(errors_of(2, run), remesh.MismatchError, told)


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)], ids=["to columns", "to rows"])
def test_many_bytes_take_several_rounds(before: int, after: int, cast: bool) -> None:
    """Columns are contiguous where they arrive, rows where they leave."""
    whole = {str(n): n + np.arange(250_000.0).reshape(250, 1000) for n in range(12)}

    def run(exchange: Exchange) -> None:
        rank, nothing = exchange.rank, np.zeros((250, 1000), np.float32 if cast else np.float64)
        source = {name: share_of(name, one, rank, 2, before) for name, one in whole.items()}
        target = {name: share_of(name, nothing, rank, 2, after) for name in whole}
        pushing = remesh.Resharder(source, target, group=exchange, cast=cast)
        for step in range(2):
            for tensor in source.values():
                tensor.parts[0].data[...] += step
            assert pushing.push().buffer_bytes < 10 << 20
            for name, one in whole.items():
                wanted = np.split(one, 2, after)[rank] + step
                np.testing.assert_array_equal(target[name].parts[0].data, wanted)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(from_memory, "MESSAGE_BYTES", 1 << 20)
        run_ranks(2, run)


def half(rank: int) -> dict[str, Any]:
    return {"a": share_of("a", np.ones((4, 2)), rank, 2)}


def with_a_hole(rank: int) -> dict[str, Any]:
    return {"a": remesh.ShardedTensor.at_offset("a", np.ones((2, 2)), (5, 2), (2 * rank, 0))}


SHARED = np.zeros((4, 2))
Sides = Callable[[int], tuple[Any, Any]]
BAD: dict[str, tuple[type[Exception], Sides]] = {
    "a hole": (
        remesh.errors.CoverageError, lambda rank: (with_a_hole(rank), {"a": np.zeros((5, 2))})),
    "a missing name": (remesh.MismatchError, lambda rank: (half(rank), {"b": np.zeros((4, 2))})),
    "a shape": (remesh.MismatchError, lambda rank: (half(rank), {"a": np.zeros((4, 3))})),
    "a dtype": (
        remesh.MismatchError, lambda rank: (half(rank), {"a": np.zeros((4, 2), np.float32)})),
    "shared memory": (
        remesh.errors.StateError,
        lambda rank: ({"a": SHARED}, {"a": np.zeros((4, 2)) if rank else SHARED[:, :]})),
    "a transform of one rank": (
        remesh.errors.StateError,
        lambda rank: (half(rank), {"a" if rank else "b": np.zeros((4, 2))})),
}  # fmt: skip
"""What all ranks raise, and the source and target of each."""


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_found_on_all_ranks_before_a_byte_moves(case: str) -> None:
    kind, sides = BAD[case]
    targets: dict[int, Any] = {}

    def run(exchange: Exchange) -> None:
        source, target = sides(exchange.rank)
        targets[exchange.rank] = target
        rename = {"a": "b"} if "transform" in case and exchange.rank == 0 else None
        remesh.reshard(source, target, group=exchange, transform=rename)

    told = "the state does not fit the source state" if kind is remesh.MismatchError else ""
    all_are(errors_of(2, run), kind, told)
    for target in targets.values():
        assert not any(array.any() for array in target.values())


def grid(layout: str, rank: int, values: Any) -> dict[str, Any]:
    """This rank's part of a tensor in rows or columns over 2 ranks."""
    return {"a": share_of("a", values, rank, 2, dim=0 if layout == "rows" else 1)}


def fail_in_a_push(exchange: Exchange) -> remesh.Resharder:
    """Push three times, the second time with a failure on rank 1."""
    first = torch.arange(600_000.0, dtype=torch.float64).reshape(600, 1000)
    rank, is_failing = exchange.rank, False
    source, target = grid("rows", rank, first), grid("columns", rank, first * 0)

    def fail(event: Any) -> None:
        if is_failing and event.point == "load.run_read":
            raise RuntimeError("no more")

    pushing = remesh.Resharder(source, target, group=exchange, on_event=fail)
    for step in range(3):
        kept = pushing._transfer
        is_failing = rank == 1 and step == 1
        if step == 1:
            with pytest.raises(Exception, match="no more"):
                pushing.push()
        is_failing = False
        source["a"].parts[0].data[...] = first.chunk(2)[rank] + step
        pushing.push()
        assert torch.equal(target["a"].parts[0].data, first.chunk(2, 1)[rank] + step)
        is_same = kept is pushing._transfer
        assert is_same == (step == 2), "threads may still write into the buffers"
    return pushing


@pytest.mark.usefixtures("messages")
def test_a_push_that_failed_is_made_again() -> None:
    run_ranks(2, fail_in_a_push)


def die_in_a_push(exchange: Exchange) -> None:
    rank, values = exchange.rank, torch.ones(3000, 1000)

    def die(event: Any) -> None:
        if event.point == "load.run_read" and rank == 1:
            os._exit(9)

    sides = (grid("rows", rank, values), grid("columns", rank, values))
    remesh.reshard(*sides, group=exchange, on_event=die)


def check_that_the_other_learns(die: Callable[[Exchange], None]) -> None:
    survivor, dead = run_processes_outcomes(2, die)
    assert isinstance(dead, Died)
    assert isinstance(survivor, Raised)
    assert isinstance(survivor.error, remesh.errors.ExchangeError)


def test_ranks_learn_that_one_died_in_a_push() -> None:
    check_that_the_other_learns(die_in_a_push)


@pytest.mark.parametrize("change", ["nothing", "target", "source", "value", "layout"])
def test_a_push_sees_what_changed_on_one_rank(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is planned while nothing changes but elements; all else counts on any rank."""
    first = np.arange(24.0).reshape(4, 6)
    planned: list[int] = []
    plan = loading.plan_into

    def noted(*args: Any, **options: Any) -> Any:
        planned.append(1)
        return plan(*args, **options)

    monkeypatch.setattr("remesh.checkpoint.resharding.plan_into", noted)

    def run(exchange: Exchange) -> None:
        rank = exchange.rank
        source = {**grid("rows", rank, first), "step": 0}
        target = {**grid("columns", rank, first * 0), "step": -1}
        pushing = remesh.Resharder(source, target, group=exchange)
        pushing.push()
        pushing.push()
        values, after = first + 1, "columns"
        source["a"].parts[0].data[...] += 1
        match change if rank == 1 else "nothing":
            case "target":
                target.update(grid("columns", rank, first * 0))
            case "source":
                source.update(grid("rows", rank, values))
            case "layout":
                target.update(grid("rows", rank, first * 0))
                after = "rows"
        if change == "value":
            source["step"] = 5
        report = pushing.push()
        assert report.plan_reused == (change == "nothing")
        assert target["step"] == source["step"]
        expected = grid(after, rank, values)["a"].parts[0].data
        np.testing.assert_array_equal(target["a"].parts[0].data, expected)

    run_ranks(2, run)
    assert len(planned) == 2 * (1 if change == "nothing" else 2)


def test_replicas_share_the_sending() -> None:
    """Two ranks with copies of all tensors send half of them each."""

    def run(exchange: Exchange) -> int:
        names = [f"t{number}" for number in range(8)]
        rank = exchange.rank
        source = {name: np.ones((50, 4)) for name in names} if rank < 2 else {}
        target = {name: np.zeros((50, 4)) for name in names} if rank >= 2 else {}
        report = remesh.Resharder(source, target, group=exchange).push()
        assert all((array == 1).all() for array in target.values())
        return report.bytes_sent

    assert run_ranks(3, run) == [4 * 1600, 4 * 1600, 0]
