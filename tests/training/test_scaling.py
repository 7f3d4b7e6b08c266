"""Steps of one world size as steps of another."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.training import convert_step

small = st.integers(1, 32)


@given(st.integers(0, 10**6), small, small, small, small)
def test_rounding_keeps_to_the_samples(
    step: int, world: int, batch: int, world2: int, batch2: int
) -> None:
    sizes: dict[str, Any] = {"old_batch_size": batch, "new_batch_size": batch2}
    done = step * world * batch
    size = world2 * batch2
    down = convert_step(step, world, world2, rounding="down", **sizes)
    up = convert_step(step, world, world2, rounding="up", **sizes)
    assert down * size <= done <= up * size
    assert up - down == (done % size > 0)
    if done % size == 0:
        assert convert_step(step, world, world2, **sizes) == down
    else:
        with pytest.raises(ValueError, match=f"and {done % size} more"):
            convert_step(step, world, world2, **sizes)


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
    with pytest.raises(ValueError, match="at least 1, got -1 steps"):
        convert_step(-1, 1, 1)
    with pytest.raises(ValueError, match="; 0 ranks x 1 samples"):
        convert_step(1, 1, 0)
    with pytest.raises(ValueError, match="got 'nearest'"):
        convert_step(1, 1, 1, rounding="nearest")  # type: ignore[arg-type]
