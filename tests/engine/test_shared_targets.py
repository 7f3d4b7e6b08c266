"""Targets that share memory: a load refuses by name what it cannot fill with all that is stored.

Ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import remesh
from remesh.exchange import Exchange
from tests.engine.scenes import all_are, errors_of, errors_of_load, saved
from tests.support import run_ranks

Views = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def filled_like(views: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Different values for each element of each view."""
    starts = range(1, 1000 * len(views), 1000)
    return {
        name: torch.arange(float(start), start + view.numel()).reshape(view.shape)
        for start, (name, view) in zip(starts, views.items(), strict=True)
    }


DISJOINT: dict[str, Views] = {
    "halves": lambda z: {"x": z[:12], "y": z[12:]},
    "every second": lambda z: {"x": z[::2], "y": z[1::2]},
    "columns": lambda z: {k: z.view(4, 6)[:, 2 * n : 2 * n + 2] for n, k in enumerate("qkv")},
    "columns, transposed": lambda z: {k: z.view(4, 6)[:, n::3].T for n, k in enumerate("qkv")},
    "skewed": lambda z: {"x": z.as_strided((2, 3), (3, 2)), "y": z[1:2], "w": z[8:]},
}
SHARED: dict[str, Views] = {
    "an end": lambda z: {"x": z[:3], "y": z[2:]},
    "one more dim": lambda z: {"x": z, "y": z.unsqueeze(-1)},
    "transposed": lambda z: {"x": z.view(4, 6), "y": z.view(4, 6).T},
    "every second and third": lambda z: {"x": z[::2], "y": z[1::3]},
    "a row of all": lambda z: {"x": z.view(4, 6), "y": z.view(4, 6)[2]},
    "other elements": lambda z: {"x": z, "y": z.view(torch.int32)[5:7]},
    "the same name": lambda z: {"x": z[:3], "y": z[:3]},
}


@pytest.mark.parametrize("case", DISJOINT)
def test_disjoint_views_of_one_memory_are_filled(case: str) -> None:
    views = DISJOINT[case](torch.zeros(24))
    expected = filled_like(views)
    remesh.load(views, saved(expected))
    for name, view in views.items():
        assert torch.equal(view, expected[name]), name


@pytest.mark.parametrize("case", SHARED)
def test_views_that_share_memory_are_refused_whatever_is_stored(case: str) -> None:
    """Equal values do not help, unless both are one view."""
    memory = torch.arange(1.0, 25.0)
    storage = saved(SHARED[case](memory))
    target = torch.zeros(24)
    views = SHARED[case](target)
    if case == "the same name":
        remesh.load(views, storage)
        assert torch.equal(views["x"], memory[:3])
        return
    with pytest.raises(remesh.MismatchError, match=r"\b[xy] and [xy]: different views"):
        remesh.load(views, storage)
    assert not target.any()


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(5).unfold(0, 3, 1),
        torch.zeros(3).expand(3, 3),
        torch.zeros(7).as_strided((3, 3), (1, 2)),
        np.lib.stride_tricks.sliding_window_view(np.zeros(5, np.float32), 3, writeable=True),
    ],
    ids=["unfold", "expand", "as_strided", "window"],
)
def test_a_target_that_overlaps_itself_is_refused_by_its_name(target: Any) -> None:
    stored = torch.arange(9.0).reshape(3, 3)
    with pytest.raises(remesh.errors.StateError, match="t: several elements of this"):
        remesh.load({"t": target}, saved({"t": stored}))


def test_views_of_what_is_converted_are_refused() -> None:
    memory = torch.zeros(4, dtype=torch.float64)
    storage = saved({"x": torch.ones(3), "y": torch.ones(3)})
    with pytest.raises(remesh.MismatchError, match=r"[xy] and [xy]: different views"):
        remesh.load({"x": memory[:3], "y": memory[1:]}, storage, cast=True)
    fused = remesh.Transform("a, b -> x, axis=0")
    storage = saved({"a": torch.ones(1), "b": torch.ones(2), "y": torch.ones(2)})
    float_memory = torch.zeros(4)
    with pytest.raises(remesh.MismatchError, match=r"[xy] and [xy]: different views"):
        remesh.load({"x": float_memory[:3], "y": float_memory[2:]}, storage, transform=fused)
    state = {"x": float_memory[:3], "y": float_memory[2:].new_zeros(2)}
    remesh.load(state, storage, transform=fused)
    assert float_memory.tolist() == [1, 1, 1, 0]


def test_parts_of_one_tensor_in_one_memory() -> None:
    """Each element has its place, however often it is named; but no two elements have the same."""
    whole = torch.arange(24.0).reshape(6, 4)
    storage = saved({"w": whole})
    memory = torch.zeros(6, 4)

    def part(rows: slice, start: int) -> remesh.ShardedTensor:
        return remesh.ShardedTensor.at_offset("w", memory[rows], (6, 4), (start, 0))

    remesh.load({"a": part(slice(0, 4), 0), "b": part(slice(2, 6), 2)}, storage)
    assert torch.equal(memory, whole)
    with pytest.raises(remesh.MismatchError, match="w: different views"):
        remesh.load({"a": part(slice(0, 4), 0), "b": part(slice(2, 6), 1)}, storage)


@st.composite
def views_of_a_buffer(draw: st.DrawFn) -> tuple[int, int, int]:
    start, step = draw(st.integers(0, 11)), draw(st.integers(1, 4))
    return start, step, draw(st.integers(1, (11 - start) // step + 1))


@given(st.lists(views_of_a_buffer(), min_size=2, max_size=4), st.booleans())
def test_a_load_that_returns_has_filled_everything(
    places: list[tuple[int, int, int]], differ: bool
) -> None:
    """Either all tensors hold what is stored for them, or the load fails and changes nothing."""
    memory = np.full(12, -1.0)
    state = {
        str(n): memory[start : start + stride * (size - 1) + 1 : stride]
        for n, (start, stride, size) in enumerate(places)
    }
    stored = {
        name: 7.0 + differ * (int(name) * 100 + np.arange(len(view)))
        for name, view in state.items()
    }
    # What names one view is one tensor.
    views = set(places)
    if differ and len(views) < len(places):
        can_be_filled = False
    else:
        elements = {start + stride * k for start, stride, size in places for k in range(size)}
        can_be_filled = len(elements) == sum(size for *_, size in views)
    try:
        remesh.load(state, saved(stored))
    except remesh.MismatchError:
        assert not can_be_filled
        assert (memory == -1).all()
    else:
        assert can_be_filled
        for name, view in state.items():
            np.testing.assert_array_equal(view, stored[name])


def test_one_rank_whose_targets_share_memory_stops_all() -> None:
    storage = saved({"x": torch.ones(3), "y": torch.zeros(3)})
    memory = [torch.full((6,), 9.0) for _ in range(3)]
    cuts = (3, 2, 3)
    states = [{"x": m[:3], "y": m[cut : cut + 3]} for m, cut in zip(memory, cuts, strict=True)]
    all_are(errors_of_load(states, storage), remesh.MismatchError, "x and y: different views")
    assert [set(one.tolist()) for one in memory] == [{9.0}] * 3


# ---------------------------------------------------------------------------------------------
# Live
# ---------------------------------------------------------------------------------------------


def test_a_target_between_the_elements_of_the_source() -> None:
    memory = torch.arange(8.0)
    remesh.reshard({"x": memory[::2]}, {"x": memory[1::2]})
    assert memory.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    with pytest.raises(
        remesh.errors.StateError, match="x of the source and y of the target"
    ) as caught:
        remesh.reshard(
            {"x": memory[::2], "y": torch.ones(4)}, {"x": torch.zeros(4), "y": memory[:4]}
        )
    assert len(str(caught.value).splitlines()[0]) <= 100
    assert memory.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("differ", [False, True])
def test_tied_targets_of_sources_on_another_rank(differ: bool) -> None:
    """They are brought here to be compared."""
    memory = torch.zeros(6)
    targets: dict[str, Any] = {"a": memory, "b": memory}

    def run(exchange: Exchange) -> None:
        value = torch.arange(6.0)
        source = {"a": value, "b": value + differ}
        sides: tuple[Any, Any] = (source, {}) if exchange.rank else ({}, targets)
        pushing = remesh.Resharder(*sides, group=exchange)
        for add in range(2):
            for tensor in source.values():
                tensor.add_(add)
            report = pushing.push()
            assert exchange.rank or memory.tolist() == [n + add for n in range(6)]
        assert not report.plan_reused, "what is compared is read anew"

    if not differ:
        run_ranks(2, run)
        return
    all_are(errors_of(2, run), remesh.MismatchError, "tied in the state")
    assert not memory.any()
