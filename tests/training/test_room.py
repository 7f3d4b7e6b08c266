"""Old tensors beside new ones: what moves to the host, and what is given up."""

from __future__ import annotations

import pytest
import torch

from remesh.catalog import ManagerNote
from remesh.elastic.training_job import TrainingJob
from remesh.training import rng, survivors
from remesh.training.fingerprints import Fingerprints, named_tensors
from remesh.training.survivors import (
    HOST,
    Boundary,
    Keeper,
    bytes_by_device,
    make_room,
    must_move,
)

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ({GPU: 100, HOST: 1000}, set()),
        ({GPU: 99, HOST: 1000}, {GPU}),
        ({GPU: 99, HOST: 109}, None),
        ({GPU: 100, HOST: 9}, None),
        ({GPU: None, HOST: None}, set()),
        ({GPU: 0, HOST: None}, {GPU}),
    ],
)
def test_what_has_no_room_twice_moves_to_the_host(
    free: dict[torch.device, int | None], expected: set[torch.device] | None
) -> None:
    assert must_move({GPU: 100, HOST: 10}, free) == expected


def trained() -> dict[str, object]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "lists": [torch.ones(3)], "step": 1}


def test_the_tensors_of_a_state_are_found_and_shared_memory_counts_once() -> None:
    state = trained()
    own = torch.ones(5)
    tensors = [one for _, one in named_tensors(state | {"twice": [own, own[:2]]})]
    # Weight and bias with two moments and a step each, a list, and two that are one.
    assert bytes_by_device(tensors) == {HOST: 4 * (20 * 3 + 2 + 3 + 5)}


@pytest.mark.parametrize(("free", "is_kept"), [(10_000, True), (0, False), (None, True)])
def test_a_boundary_without_room_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int | None,
    is_kept: bool,
) -> None:
    monkeypatch.setattr(survivors, "free_bytes", lambda _device: free)
    job = TrainingJob(is_reentrant=True)
    state = trained()
    keeper = Keeper(state, Fingerprints().take(state))
    job.boundary = Boundary(ManagerNote(step=1, run="r"), {}, rng.Roles({}, 0), keeper, 0.0)
    job.make_room()
    assert (job.boundary is not None) == is_kept
    assert ("there is no room for both" in caplog.text) == (not is_kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_move_without_becoming_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 4, device="cuda")
    weight, version, values = model.weight, model.weight._version, model.weight.tolist()
    monkeypatch.setattr(survivors, "free_bytes", lambda device: 0 if device != HOST else None)
    assert make_room({"model": model})
    assert model.weight is weight
    assert (weight.device, weight._version, weight.tolist()) == (HOST, version, values)
