"""`save_state_dict` and `load_state_dict`: numbers, transformations, and what does not fit."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

import remesh
from remesh.compat.flex_checkpoint import (
    clear_async_save_task_queue,
    load_state_dict,
    save_state_dict,
)
from remesh.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DivergedReplicaError,
    StateError,
    StorageError,
)
from remesh.exchange import Alone, Exchange
from tests.compat.flex_layouts import Weights, cut, filled, flat, numbers, whole
from tests.support import run_ranks


def _state(rank: int, axis: int, cut_at: int) -> Weights:
    """A weight that is cut, and the three kinds of state of an optimizer that cuts flat tensors.

    One is shared by both ranks, one is all on rank 0, and a count is on both.
    """
    moments = whole({"w.moment1_0": numbers((4, 6), 50), "v.moment1_0": numbers((2, 2), 90)})
    begin, end = (0, cut_at) if rank == 0 else (cut_at, 24)
    state = {
        "w": cut("w", numbers((4, 6)), axis, rank, 2),
        "w.moment1_0": flat(moments["w.moment1_0"], begin, end),
        **whole({"w.beta1_pow_acc_0": torch.tensor([0.9])}),
    }
    if rank == 0:
        state["v.moment1_0"] = flat(moments["v.moment1_0"], 0, 4)
    return state


def _round_trip(exchange: Exchange, path: Path) -> None:
    save_state_dict(_state(exchange.rank, 0, 9), path, exchange)
    load = partial(load_state_dict, path=path, process_group=exchange, offload=True)
    filled(load, _state(1 - exchange.rank, 1, 17))


def test_another_layout(tmp_path: Path) -> None:
    run_ranks(2, _round_trip, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path / "0")
    assert len(checkpoint.index) == 4
    assert torch.equal(checkpoint.read("w.moment1_0"), numbers((4, 6), 50))


def value_at(path: Path, unique_id: int | None = None) -> float:
    target = weight_of(0)
    load_state_dict(target, path, unique_id=unique_id)
    return target["w"].local_tensor.item()


def weight_of(value: float) -> Weights:
    return whole({"w": torch.tensor([float(value)])})


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
    (tmp_path / "2").write_text("not a directory")
    with pytest.raises(StorageError):  # by the save, or when the queue is cleared
        _save_in_background(weights, tmp_path)
    clear_async_save_task_queue()  # it was raised once
    assert value_at(tmp_path) == 2


def _save_in_background(weights: Weights, path: Path) -> None:
    save_state_dict(weights, path, async_save=True)
    clear_async_save_task_queue()


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


def _faulty(exchange: Exchange, path: Path) -> None:
    with pytest.raises(DivergedReplicaError, match="w"):  # a shard that nobody declared
        save_state_dict(weight_of(exchange.rank), path, exchange)
    weights = weight_of(1)
    if exchange.rank == 1:
        weights["w"].key = "v"
    for use in (save_state_dict, load_state_dict):
        with pytest.raises(StateError, match="calls itself 'v'"):
            use(weights, path, exchange)


def test_a_faulty_weight_is_refused_on_all_ranks(tmp_path: Path) -> None:
    save_state_dict(weight_of(0), tmp_path)
    run_ranks(2, _faulty, tmp_path)
    assert len(list(tmp_path.rglob("remesh.json"))) == 1
