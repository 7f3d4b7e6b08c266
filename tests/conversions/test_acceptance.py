"""Conversions at which other systems are known to have failed, each a test with what failed there.

Round trips mean: the state in the second layout is what the direct mapping says, and so is the
state that comes back from there.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

import remesh
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.conversions.jobs import Job
from tests.conversions.layouts import BY_NAME, MASTER, MOMENTS, Layout, random_state, whole_shapes
from tests.conversions.model import Chunk, Shape
from tests.conversions.simulated import check, filled, load, save
from tests.support import Raised, run_ranks, run_ranks_outcomes

SMALL = Shape(num_layers=1, num_experts=2, num_chosen=1)
DP2, DP4, TP4, PP4 = (BY_NAME[name] for name in ("dp2", "dp4", "tp4", "pp4"))
TP2_EP2 = BY_NAME["tp2.ep2"]
TP2_EP2_PP2 = Layout("tp2.ep2.pp2", data=2, tp=2, pp=2, ep=2)
ZERO2_EP2 = Layout("zero2.ep2", data=4, ep=2, kind="zero-flat")
ZERO2_TP2_EP2 = Layout("zero2.tp2.ep2", data=4, tp=2, ep=2, kind="zero-flat")


def round_trip(first: Layout, second: Layout, shape: Shape) -> remesh.Checkpoint:
    """Check a round trip; the checkpoint on the way back."""
    whole = random_state(shape, 11)
    moved = load(second, shape, save(filled(first, shape, whole)))
    check(moved, whole)
    storage = save(moved)
    check(load(first, shape, storage), whole)
    return remesh.Checkpoint(storage)


def states_of(checkpoint: remesh.Checkpoint) -> Counter[str]:
    """How many parameters have each kind of optimizer state."""
    names = (name for name in checkpoint.index if name.startswith("optimizer.state."))
    return Counter(name.rpartition(".")[2] for name in names)


def num_parameters(shape: Shape) -> int:
    return sum(not name.endswith("router_bias") for name in whole_shapes(shape))


def counted(shape: Shape) -> Counter[str]:
    """Every kind of optimizer state once for each parameter."""
    return Counter(dict.fromkeys((MASTER, *MOMENTS, "step"), num_parameters(shape)))


# -- round trips ----------------------------------------------------------------------------------


def layout_of(name: str) -> Layout:
    """Of a name such as d2t2; experts are shared by data-parallel ranks of their own."""
    size = {kind: int(number) for kind, number in zip(name[::2], name[1::2], strict=True)}
    ep = size.get("e", 1)
    return Layout(name, size.get("d", 1) * ep, size.get("t", 1), size.get("p", 1), ep)


THREE_LAYERS = Shape(num_layers=3, predicts_ahead=False, num_experts=2, num_chosen=1)
UPSTREAM = [("e2", "e4"), ("d2p2", "t4"), ("d2e2", "d4"), ("d2e2", "t2e2")]
"""Of the matrix that upstream runs, those that the product of `test_product.py` does not have."""

ROUND_TRIPS: dict[str, tuple[Layout, Layout, Shape]] = {
    "no moments are lost dp2 dp4": (DP2, DP4, SMALL),
    "no moments are lost tp2ep2 tp2ep2sd2": (TP2_EP2, ZERO2_TP2_EP2, SMALL),
    "no moments are lost dp2 tp2ep2sd2": (DP2, ZERO2_TP2_EP2, SMALL),
    "a further layer and uneven stages tp2ep2 vpp4": (
        TP2_EP2,
        Layout("vpp4", pp=2, chunks=4),
        Shape(num_layers=7, num_experts=2, num_chosen=1),
    ),
    **{
        f"three layers over stages tp2ep2 {name}": (TP2_EP2, BY_NAME[name], THREE_LAYERS)
        for name in ("pp2", "pp4", "vpp2x2")
    },
    "flat slices cross all boundaries dp2 sharding4 v2": (
        DP2,
        BY_NAME["zero-flat-4"],
        Shape(num_layers=2, hidden=7, inner=3, num_experts=3, vocabulary=11),
    ),
    "there and back dp2 sharding2ep2 dp2": (DP2, ZERO2_EP2, SMALL),
    **{
        f"into all parallelisms at once {name} tp2ep2pp2": (BY_NAME[name], TP2_EP2_PP2, SMALL)
        for name in ("dp2", "zero1-2", "zero-flat-2")
    },
    **{
        f"there and back {first} {second}": (
            layout_of(first),
            layout_of(second),
            Shape(num_layers=3, predicts_ahead=False),
        )
        for first, second in UPSTREAM
    },
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if first.name in dict(UPSTREAM) else ())
        for name, (first, _, _) in ROUND_TRIPS.items()
    ],
)
def test_round_trips(name: str) -> None:
    """No state of a parameter is lost, and none is stored twice."""
    first, second, shape = ROUND_TRIPS[name]
    assert states_of(round_trip(first, second, shape)) == counted(shape)


# -- offloaded moments ----------------------------------------------------------------------------


def test_moments_that_are_elsewhere_are_reported_and_then_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An optimizer that keeps some moments where its state dict does not look."""
    jobs = filled(DP2, SMALL, random_state(SMALL, 11))
    for job in jobs:
        del job.optimizer.optimizer.state[job.slots[0].tensor]
    with caplog.at_level(logging.WARNING, "remesh"):
        storage = save(jobs)
    assert "1 parameters have no state in the optimizer, others do" in caplog.text
    name = jobs[0].locals[0].name
    assert name in caplog.text

    def resume(exchange: Exchange) -> None:
        job = filled(DP4, SMALL, random_state(SMALL, 12))[exchange.rank]
        remesh.load(job.state(), storage, group=exchange)

    for outcome in run_ranks_outcomes(4, resume):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, remesh.MismatchError)
        assert f"optimizer.state.{name}.exp_avg" in outcome.error.missing


# -- files and dtypes -----------------------------------------------------------------------------


def test_files_are_found_by_the_index_sharding4_dp2(tmp_path: Path) -> None:
    """Names say nothing about the layout, and the directory may have moved."""
    whole = random_state(SMALL, 11)
    jobs = filled(BY_NAME["zero-flat-4"], SMALL, whole)

    def write(exchange: Exchange) -> None:
        remesh.save(jobs[exchange.rank].state(), tmp_path / "first", group=exchange)

    run_ranks(4, write)
    (tmp_path / "first").rename(tmp_path / "second")

    def read(exchange: Exchange) -> Job:
        job = Job(DP2, SMALL, exchange.rank)
        remesh.load(job.state(), tmp_path / "second", group=exchange, unexpected="error")
        job.step = 7
        return job

    check(run_ranks(2, read), whole)


def test_each_tensor_has_its_dtype_pure_sharding() -> None:
    storage = save(filled(BY_NAME["zero1-2"], SMALL, random_state(SMALL, 11)))
    index = remesh.Checkpoint(storage).index
    dtypes = {name: index[name].dtype for name in index}
    assert dtypes["model.embedding.weight"] == "bfloat16"
    assert dtypes["optimizer.state.embedding.weight.master"] == "float32"
    assert not any("grad" in name for name in dtypes)
    full = Chunk(SMALL, BY_NAME["dp1"].place(0, 0, SMALL))
    with pytest.raises(remesh.MismatchError, match="dtype bfloat16 is stored, float32 is wanted"):
        remesh.load({"model": full}, storage)


# -- tied and untied ------------------------------------------------------------------------------


def untied(tied: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state in which the head has copies of all that the embedding has."""
    heads = {
        key.replace("embedding.", "head."): tensor
        for key, tensor in tied.items()
        if "embedding." in key
    }
    return {**tied, **heads}


TIED = Shape(num_experts=2, num_chosen=1)
APART = Shape(num_experts=2, num_chosen=1, tied=False)


def test_tied_becomes_untied_by_two_statements_tp2ep2_pp4() -> None:
    """Weight, moments, master copy and step are there twice; without the statements all is told."""
    whole = random_state(TIED, 11)
    storage = save(filled(TP2_EP2, TIED, whole))
    twice = remesh.Transform("""
        model.embedding.weight -> model.embedding.weight
        model.embedding.weight -> model.head.weight
    """)
    check(load(PP4, APART, storage, transform=twice), untied(whole))
    with pytest.raises(remesh.MismatchError) as caught:
        load(PP4, APART, storage)
    assert "optimizer.state.head.weight.master" in caught.value.missing


def test_untied_becomes_tied_if_weights_are_equal_pp4_tp2ep2() -> None:
    whole = random_state(TIED, 11)
    storage = save(filled(PP4, APART, untied(whole)))
    jobs = load(TP2_EP2, TIED, storage, unexpected="ignore")
    check(jobs, whole)
    states = {f"optimizer.state.head.weight.{kind}" for kind in (MASTER, *MOMENTS, "step")}
    assert all(job.report and set(job.report.unexpected) == states for job in jobs)
    differing = untied(whole)
    differing["model.head.weight"] = differing["model.head.weight"] + 1
    storage = save(filled(PP4, APART, differing))
    with pytest.raises(remesh.MismatchError, match="the checkpoint has different values"):
        load(TP2_EP2, TIED, storage, unexpected="ignore")


# -- buffers, hooks -------------------------------------------------------------------------------


def test_buffers_on_one_side_only_are_reported_tp2ep2_pp4() -> None:
    whole = random_state(TIED, 11)
    storage = save(filled(TP2_EP2, TIED, whole))

    def resume(exchange: Exchange) -> remesh.checkpoint.RestoreReport:
        job = Job(PP4, TIED, exchange.rank)
        for module in job.module.modules():
            module._buffers.pop("router_bias", None)
        return remesh.load(job.state(), storage, group=exchange)

    expected = {f"model.layers.{n}.mixture.router_bias" for n in range(TIED.all_layers)}
    for report in run_ranks(4, resume):
        assert set(report.unexpected) == expected

    def save_without(exchange: Exchange) -> None:
        job = filled(TP2_EP2, TIED, whole)[exchange.rank]
        for module in job.module.modules():
            module._buffers.pop("router_bias", None)
        remesh.save(job.state(), less, group=exchange)

    less = MemoryStorage()
    run_ranks(4, save_without)
    with pytest.raises(remesh.MismatchError) as caught:
        load(PP4, TIED, less)
    assert set(caught.value.missing) <= expected
    assert caught.value.missing


def test_what_changes_after_staging_is_not_saved_tp2ep2_tp4(tmp_path: Path) -> None:
    """A callback that alters the router behind the step does not reach the checkpoint."""
    whole = random_state(SMALL, 11)
    jobs = filled(TP2_EP2, SMALL, whole)

    def write(exchange: Exchange) -> None:
        job = jobs[exchange.rank]
        with remesh.Saver(group=exchange) as saver:
            handle = saver.save_async(job.state(), tmp_path / "step")
            assert handle.staged
            for one in job.held():
                one.elements.zero_()
            handle.result()

    run_ranks(4, write)
    assert remesh.Checkpoint(tmp_path / "step").verify().ok

    def read(exchange: Exchange) -> Job:
        job = Job(TP4, SMALL, exchange.rank, step=7)
        remesh.load(job.state(), tmp_path / "step", group=exchange, unexpected="error")
        return job

    check(run_ranks(4, read), whole)


# -- sharded optimizers ---------------------------------------------------------------------------


def test_every_expert_has_its_states_once_dp2_sharding4_v1() -> None:
    shape = Shape(num_layers=1, predicts_ahead=False, num_experts=64, bias=False)
    whole = random_state(shape, 11)
    jobs = load(BY_NAME["zero1-4"], shape, save(filled(DP2, shape, whole)))
    check(jobs, whole)
    owners = Counter(name for job in jobs for slot in job.slots for name, _, _ in slot.stretches)
    experts = [f"layers.0.mixture.experts.{n}.down.weight" for n in range(64)]
    assert [owners[name] for name in experts] == [1] * 64
    assert states_of(remesh.Checkpoint(save(jobs))) == counted(shape)


# -- layers that lack something -------------------------------------------------------------------


def test_no_bias_no_configuration_another_import_path() -> None:
    shape = Shape(num_layers=1, num_experts=2, num_chosen=1, bias=False)
    assert not any(name.endswith(".bias") for name in whole_shapes(shape))
    whole = random_state(shape, 11)
    jobs = filled(TP2_EP2, shape, whole)
    for job in jobs:
        for module in job.module.modules():
            assert not hasattr(module, "config")
            elsewhere = {"__module__": "somewhere.else"}
            module.__class__ = type("Moved", (type(module),), elsewhere)
    check(load(DP2, shape, save(jobs)), whole)
