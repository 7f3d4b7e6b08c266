"""Steps, learning rates and accumulation after a change of the global batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

import remesh
from remesh.training.scaling import (
    GlobalBatch,
    ScalingDecision,
    apply_scaling,
    convert_step,
    decide_scaling,
)

small = st.integers(1, 32)


def test_each_rule() -> None:
    old, new = GlobalBatch(2, 16), GlobalBatch(8, 16)
    assert decide_scaling("none", old, new).lr_factor == 1.0
    assert decide_scaling("linear", old, new).lr_factor == 4.0
    assert decide_scaling("sqrt", old, new).lr_factor == 2.0
    assert decide_scaling("linear", new, old).lr_factor == 0.25
    kept = decide_scaling("accumulate", new, GlobalBatch(2, 8))
    assert (kept.new, kept.lr_factor) == (GlobalBatch(2, 8, accumulation=8), 1.0)
    with pytest.raises(ValueError, match="got 'cubic'"):
        decide_scaling("cubic", old, new)  # type: ignore[arg-type]


@given(small, small, small, small, small)
def test_accumulation_keeps_the_global_batch_or_says_what_would(
    world: int, batch: int, accumulation: int, world2: int, batch2: int
) -> None:
    old, new = GlobalBatch(world, batch, accumulation), GlobalBatch(world2, batch2)
    if old.num_samples % world2:
        with pytest.raises(ValueError, match=f"it does not divide among {world2} ranks"):
            decide_scaling("accumulate", old, new)
        return
    if old.num_samples % new.num_samples:
        with pytest.raises(ValueError, match="batch_size that does is") as caught:
            decide_scaling("accumulate", old, new)
        advised = int(str(caught.value).split("batch_size that does is ")[1].split(".")[0])
        new = GlobalBatch(world2, advised)
    decision = decide_scaling("accumulate", old, new)
    assert decision.new.num_samples == old.num_samples
    assert decision.new.world_size == world2


def two_groups(**options: Any) -> Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:1]},
        {"params": parameters[1:], "lr": 0.05},
    ]
    return SGD(groups, lr=0.1, **options)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "constant": lambda o: lrs.ConstantLR(o, 0.5, 6),
    "linear": lambda o: lrs.LinearLR(o, 0.1, 1.0, 9),
    "step": lambda o: lrs.StepLR(o, 3),
    "multistep": lambda o: lrs.MultiStepLR(o, [2, 7]),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda _step: 0.8),
    "polynomial": lambda o: lrs.PolynomialLR(o, 11, 2.0),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 8, eta_min=0.01),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, eta_min=0.01),
    "one cycle": lambda o: lrs.OneCycleLR(o, [0.4, 0.2], total_steps=14),
    "cyclic": lambda o: lrs.CyclicLR(o, [0.01, 0.02], [0.1, 0.3], 3),
    "swa": lambda o: SWALR(o, 0.02, anneal_epochs=4),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, 1.0, 6), lrs.CosineAnnealingLR(o, 9, eta_min=0.001)], [6]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.StepLR(o, 4)]),
}


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("num_before", [0, 5])
def test_every_later_learning_rate_is_multiplied(name: str, num_before: int) -> None:
    decision = decide_scaling("linear", GlobalBatch(2), GlobalBatch(6))
    plain, scaled = two_groups(momentum=0.9), two_groups(momentum=0.9)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (plain, scaled)]
    for number in range(13):
        if number == num_before:
            apply_scaling(decision, scaled, [schedulers[1]])
        factor = 3.0 if number >= num_before else 1.0
        assert rates(scaled) == pytest.approx([factor * rate for rate in rates(plain)])
        assert schedulers[1].get_last_lr() == pytest.approx(
            [factor * rate for rate in schedulers[0].get_last_lr()]
        )
        for optimizer, scheduler in zip((plain, scaled), schedulers, strict=True):
            optimizer.step()
            scheduler.step()


def test_a_scheduler_that_waits_for_a_plateau() -> None:
    decision = decide_scaling("linear", GlobalBatch(1), GlobalBatch(2))
    plain, scaled = two_groups(), two_groups()
    schedulers = [lrs.ReduceLROnPlateau(o, patience=0, min_lr=0.002) for o in (plain, scaled)]
    apply_scaling(decision, scaled, [schedulers[1]])
    for _ in range(6):
        for scheduler in schedulers:
            scheduler.step(1.0)
        assert rates(scaled) == pytest.approx([2 * rate for rate in rates(plain)])
    assert rates(scaled) == pytest.approx([0.004, 0.004])


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    optimizer = Adam([torch.nn.Parameter(torch.ones(2))], lr=rate)
    scheduler = lrs.StepLR(optimizer, 1, gamma=0.5)
    apply_scaling(decide_scaling("sqrt", GlobalBatch(1), GlobalBatch(4)), optimizer, [scheduler])
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.2)
    optimizer.step()
    scheduler.step()
    assert float(rate) == pytest.approx(0.1)
    assert float(scheduler.base_lrs[0]) == pytest.approx(0.2)


def test_a_learning_rate_may_be_a_number_of_numpy() -> None:
    optimizer = Adam([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["lr"] = np.float32(0.1)
    apply_scaling(decide_scaling("linear", GlobalBatch(1), GlobalBatch(2)), optimizer, [])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_decisions_are_logged_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = decide_scaling("none", GlobalBatch(2, 16), GlobalBatch(2, 16))
    optimizer = two_groups()
    remesh.save({"scaling": first.to_value()}, tmp_path / "a")

    state = {"scaling": first.to_value()}
    remesh.load(state, tmp_path / "a")
    stored = ScalingDecision.from_value(state["scaling"])
    assert stored == first
    second = decide_scaling("linear", stored.new, GlobalBatch(4, 16))
    with caplog.at_level(logging.INFO, "remesh"):
        apply_scaling(second, optimizer)
    assert rates(optimizer) == pytest.approx([0.2, 0.1])
    (message,) = caplog.messages
    assert message == (
        "global batch 2 ranks x 16 samples = 32 -> 4 ranks x 16 samples = 64; rule linear: "
        "learning rates x 2"
    )
    state["scaling"] = second.to_value()
    remesh.save(state, tmp_path / "b")
    values = remesh.Checkpoint(tmp_path / "b").values
    assert values["scaling.rule"] == "linear"
    assert values["scaling.lr_factor"] == 2.0
    assert values["scaling.new.world_size"] == 4


# ---------------------------------------------------------------------------------------------
# Steps of one world size as steps of another
# ---------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), small, small, small, small, small, small)
def test_rounding_keeps_to_the_samples(
    step: int, world: int, batch: int, accumulation: int, world2: int, batch2: int, rounds2: int
) -> None:
    sizes: dict[str, Any] = {
        "old_batch_size": batch,
        "new_batch_size": batch2,
        "old_accumulation": accumulation,
        "new_accumulation": rounds2,
    }
    done = step * world * batch * accumulation
    size = world2 * batch2 * rounds2
    down = convert_step(step, world, world2, rounding="down", **sizes)
    up = convert_step(step, world, world2, rounding="up", **sizes)
    assert down * size <= done <= up * size
    assert up - down == (done % size > 0)
    if done % size == 0:
        assert convert_step(step, world, world2, **sizes) == down
    else:
        with pytest.raises(ValueError, match=f"and {done % size} more"):
            convert_step(step, world, world2, **sizes)


@given(st.integers(0, 10**6), small, small)
def test_more_ranks_and_back(step: int, world: int, factor: int) -> None:
    fewer = convert_step(step * factor, world, world * factor)
    assert fewer == step
    assert convert_step(fewer, world * factor, world) == step * factor


def test_a_step_that_does_not_divide_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="and 32 more") as caught:
        convert_step(301, 2, 4, old_batch_size=16, new_batch_size=16)
    assert str(caught.value) == (
        "301 steps of 2 ranks x 16 samples are 9632 samples: 150 steps of 4 ranks x 16 samples, "
        "and 32 more\nrounding='down' goes on at step 150 and trains on these 32 again; "
        "rounding='up' goes on at step 151 and leaves out 32; a ResumableBatchSampler goes on at "
        "the sample"
    )
    with caplog.at_level(logging.WARNING, "remesh"):
        assert convert_step(301, 2, 4, rounding="down") == 150
        assert convert_step(301, 2, 4, rounding="up") == 151
    assert "and 2 more, which are trained on again: at step 150" in caplog.text
    assert "and 2 more; 2 are left out: at step 151" in caplog.text


def test_numbers_out_of_range() -> None:
    with pytest.raises(ValueError, match="cannot be negative, got -1"):
        convert_step(-1, 1, 1)
    with pytest.raises(ValueError, match="must be at least 1, got 0 ranks x 1 samples"):
        convert_step(1, 1, 0)
    with pytest.raises(ValueError, match="got 'nearest'"):
        convert_step(1, 1, 1, rounding="nearest")  # type: ignore[arg-type]
    assert GlobalBatch(2, 3, 4).num_samples == 24
    assert str(GlobalBatch(2, 3, 4)) == "2 ranks x 3 samples x 4 batches"
