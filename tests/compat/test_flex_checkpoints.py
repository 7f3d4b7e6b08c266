"""`save_state_dict` and `load_state_dict`: numbers, transformations, and what does not fit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

import remesh
from remesh.compat.flex_checkpoint import (
    clear_async_save_task_queue,
    load_state_dict,
    make_replicated_sharded_weight,
    save_state_dict,
)
from remesh.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DivergedReplicaError,
    MismatchError,
    StateError,
    StorageError,
)
from remesh.exchange import Alone, Exchange
from tests.compat.flex_layouts import Weights, cut, emptied, flat, numbers
from tests.support import run_ranks


def _save_then_load(exchange: Exchange, path: Path) -> None:
    rank, full = exchange.rank, numbers((4, 6))
    moment = make_replicated_sharded_weight("w.moment1_0", full + 50)
    save_state_dict(
        {"w": cut("w", full, 0, rank, 2), moment.key: flat(moment, *[(0, 9), (9, 24)][rank])},
        path,
        exchange,
    )
    wanted: Weights = {
        "w": cut("w", full, 1, rank, 2),
        moment.key: flat(cut(moment.key, full + 50, 1, rank, 2), 0, 12),
    }
    target = {key: emptied(weight) for key, weight in wanted.items()}
    load_state_dict(target, path, exchange, offload=True)
    for key, weight in wanted.items():
        assert torch.equal(target[key].local_tensor, weight.local_tensor)


def test_another_layout(tmp_path: Path) -> None:
    run_ranks(2, _save_then_load, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path / "0")
    assert sorted(checkpoint.index) == ["w", "w.moment1_0"]
    assert torch.equal(checkpoint.read("w.moment1_0"), numbers((4, 6)) + 50)


def _optimizer_state(rank: int, cut_at: int) -> Weights:
    """The three kinds that an optimizer has which cuts flattened tensors.

    One parameter is shared by both ranks, one is all on rank 0, and a count is on both.
    """
    shared = make_replicated_sharded_weight("w.moment1_0", numbers((3, 4)))
    begin, end = (0, cut_at) if rank == 0 else (cut_at, 12)
    state = {shared.key: flat(shared, begin, end)}
    if rank == 0:
        owned = make_replicated_sharded_weight("v.moment1_0", numbers((2, 2), 50))
        state[owned.key] = flat(owned, 0, 4)
    count = make_replicated_sharded_weight("w.beta1_pow_acc_0", torch.tensor([0.9]))
    return {**state, count.key: count}


def _optimizer_round_trip(exchange: Exchange, path: Path) -> None:
    save_state_dict(_optimizer_state(exchange.rank, 5), path, exchange)
    wanted = _optimizer_state(1 - exchange.rank, 10)
    target = {key: emptied(weight) for key, weight in wanted.items()}
    load_state_dict(target, path, exchange)
    for key, weight in wanted.items():
        assert torch.equal(target[key].local_tensor, weight.local_tensor), key


def test_documented_kinds_of_optimizer_state(tmp_path: Path) -> None:
    run_ranks(2, _optimizer_round_trip, tmp_path)


def value_at(path: Path, unique_id: int | None = None) -> float:
    target = {"w": make_replicated_sharded_weight("w", torch.zeros(1))}
    load_state_dict(target, path, unique_id=unique_id)
    return target["w"].local_tensor.item()


def weight_of(value: float) -> Weights:
    return {"w": make_replicated_sharded_weight("w", torch.tensor([float(value)]))}


def test_numbers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint is there; there are: none"):
        value_at(tmp_path)
    save_state_dict(weight_of(0), tmp_path)
    save_state_dict(weight_of(1), str(tmp_path))
    save_state_dict(weight_of(7), tmp_path, unique_id=7)
    save_state_dict(weight_of(8), tmp_path)
    assert [value_at(tmp_path, number) for number in (0, 1, 7, 8)] == [0, 1, 7, 8]
    assert value_at(tmp_path) == 8
    save_state_dict(weight_of(70), tmp_path, unique_id=7)
    assert (value_at(tmp_path), value_at(tmp_path, 7)) == (8, 70)
    with pytest.raises(
        CheckpointNotFoundError, match=r"(?s)no checkpoint 2 .*there are: 0, 1, 7, 8"
    ):
        value_at(tmp_path, 2)
    with pytest.raises(StateError, match="unique_id=-1"):
        save_state_dict(weight_of(0), tmp_path, unique_id=-1)


def test_a_save_that_failed_takes_no_number(tmp_path: Path) -> None:
    with pytest.raises(CoverageError):
        save_state_dict({"w": cut("w", numbers((4,)), 0, 1, 2)}, tmp_path)
    save_state_dict(weight_of(3), tmp_path)
    assert value_at(tmp_path, 0) == 3


def test_a_checkpoint_of_remesh_itself(tmp_path: Path) -> None:
    remesh.save({"w": torch.tensor([5.0])}, tmp_path / "plain")
    assert value_at(tmp_path / "plain") == 5


def test_what_is_no_sharded_weight_goes_to_the_engine(tmp_path: Path) -> None:
    module, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_state_dict({"model": module, "step": 4}, tmp_path)
    state = {"model": other, "step": 0}
    load_state_dict(state, tmp_path)
    assert torch.equal(other.weight, module.weight)
    assert state["step"] == 4


def test_asynchronous(tmp_path: Path) -> None:
    weights = weight_of(1)
    save_state_dict(weights, tmp_path, async_save=True)
    weights["w"].local_tensor.fill_(2)
    save_state_dict(weights, tmp_path, async_save=True)
    weights["w"].local_tensor.fill_(3)
    clear_async_save_task_queue()
    assert [value_at(tmp_path, number) for number in (0, 1)] == [1, 2]


def _save_in_background(weights: Weights, path: Path) -> None:
    save_state_dict(weights, path, async_save=True)
    clear_async_save_task_queue()


def test_a_failed_asynchronous_save_is_raised_once(tmp_path: Path) -> None:
    save_state_dict(weight_of(1), tmp_path, async_save=True)
    clear_async_save_task_queue()
    (tmp_path / "1").write_text("not a directory")
    with pytest.raises(StorageError):
        _save_in_background(weight_of(2), tmp_path)
    clear_async_save_task_queue()
    assert value_at(tmp_path) == 1


class _Group(Alone):
    """A process group of this process alone, which the test can see go."""


@pytest.mark.parametrize("async_save", [False, True])
def test_nothing_is_kept_of_a_group_whose_queue_is_clear(tmp_path: Path, async_save: bool) -> None:
    group = _Group()
    gone = weakref.ref(group)
    save_state_dict(weight_of(1), tmp_path, group, async_save=async_save)
    save_state_dict(weight_of(2), tmp_path, group, async_save=async_save)
    if async_save:
        clear_async_save_task_queue(group)
    del group
    gc.collect()
    assert gone() is None
    assert [value_at(tmp_path, number) for number in (0, 1)] == [1, 2]


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    shared = numbers((3, 2))
    names = ("embed.weight", "lm_head.weight")
    save_state_dict({n: make_replicated_sharded_weight(n, shared) for n in names}, tmp_path)
    assert dict(remesh.Checkpoint(tmp_path / "0").index.aliases) == {names[1]: names[0]}
    untied = {n: make_replicated_sharded_weight(n, torch.zeros(3, 2)) for n in names}
    load_state_dict(untied, tmp_path)
    assert all(torch.equal(weight.local_tensor, shared) for weight in untied.values())


def test_statements(tmp_path: Path) -> None:
    parts = {"q": numbers((2, 3)), "k": numbers((2, 3), 6)}
    weights = {key: make_replicated_sharded_weight(key, part) for key, part in parts.items()}
    weights["q.moment1_0"] = make_replicated_sharded_weight("q.moment1_0", numbers((2, 3), 20))
    weights["k.moment1_0"] = make_replicated_sharded_weight("k.moment1_0", numbers((2, 3), 26))
    save_state_dict(weights, tmp_path)
    target = {
        "qk": make_replicated_sharded_weight("qk", torch.zeros(4, 3)),
        "qk.moment1_0": make_replicated_sharded_weight("qk.moment1_0", torch.zeros(4, 3)),
    }
    load_state_dict(target, tmp_path, aoa_config={"aoa_statements": ["q, k -> qk, axis=0"]})
    assert torch.equal(target["qk"].local_tensor, numbers((4, 3)))
    assert torch.equal(target["qk.moment1_0"].local_tensor, numbers((4, 3), 20))


def test_what_does_not_fit(tmp_path: Path) -> None:
    save_state_dict(weight_of(1), tmp_path)
    target = {**weight_of(5), "v": make_replicated_sharded_weight("v", torch.zeros(1))}
    with pytest.raises(MismatchError, match="v") as caught:
        load_state_dict(target, tmp_path)
    assert caught.value.missing == ("v",)
    assert target["w"].local_tensor.item() == 5


def _undeclared(exchange: Exchange, path: Path) -> None:
    weights = {"w": make_replicated_sharded_weight("w", torch.full((4,), float(exchange.rank)))}
    with pytest.raises(DivergedReplicaError, match="w"):
        save_state_dict(weights, path, exchange)


def test_a_shard_that_nobody_declared_is_refused(tmp_path: Path) -> None:
    run_ranks(2, _undeclared, tmp_path)
    assert not list(tmp_path.rglob("remesh.json"))


def _faulty_on_one_rank(exchange: Exchange, path: Path) -> None:
    weights = weight_of(1)
    if exchange.rank == 1:
        weights["w"].key = "v"
    for use in (save_state_dict, load_state_dict):
        with pytest.raises(StateError, match="calls itself 'v'"):
            use(weights, path, exchange)


def test_a_faulty_weight_of_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    save_state_dict(weight_of(0), tmp_path)
    run_ranks(2, _faulty_on_one_rank, tmp_path)
