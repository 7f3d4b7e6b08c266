"""Transformations of names of each kind, resolved for all: against resolving every name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh import Transform
from remesh.errors import TransformError
from remesh.transform import Resolved, TensorInfo, expanded, numbered
from remesh.transform import resolve as resolving

SHAPES = {"w": (4, 4), "b": (4,), "gate": (4, 2), "up": (4, 2), "q": (2, 4)}
Infos = dict[str, TensorInfo | None]

STATEMENTS = [
    "m.layers.$L.w -> m.blocks.$L.w",
    "m.layers.$L.w^T -> m.layers.$L.w",
    "m.layers.$L.b -> m.blocks.$L.b, dtype=float32",
    "m.layers.$L.b -> _",
    "_ -> m.blocks.$L.b",
    "m.layers.$L.experts.$E.gate, m.layers.$L.experts.$E.up -> m.blocks.$L.e.$E.gu, axis=1",
    "m.layers.$L.experts.*.gate -> m.blocks.$L.gates, stack=0",
    "m.layers.*.q -> m.q, stack=0",
    "m.layers.$L.w -> m.layers.$L+1.w",
    "m.layers.$L.w, m.layers.$L.q -> m.blocks.$L.wq, axis=0",
    "m.layers.0.w -> m.first",
    "m.layers.1.w, m.layers.2.w -> m.pair, axis=0",
    "m.layers.$L.w -> m.shared",
    "m.layers.$L.w -> m.layer_$L.w",
    "m.layers.$L.experts.$E.up -> m.blocks.$E.e.$L.up",
    "m.layers.$L.experts.$L.up -> m.blocks.$L.diagonal",
    "m.layers.$L.q -> m.layers.$L.x^T",
    "m.layers.$L.x -> m.blocks.$L.x",
    "m.layers.$L.w, m.layers.0.q -> m.blocks.$L.wq, axis=0",
    "m.layers.$L.w -> m.blocks.$L.w, m.blocks.$L.v, axis=0",
    "m.blocks.$L.w -> m.layers.$L.w",
]


def _states(names: Infos, style: str) -> Infos:
    found: Infos = {}
    for name, info in names.items():
        short = name.removeprefix("m.")
        for slot in ("exp_avg", "step"):
            if style == "paddle":
                made = f"{name}.{'moment1_0' if slot == 'exp_avg' else 'beta1_pow_acc_0'}"
            elif style == "megatron":
                made = f"optimizer.state.{slot}.{short}"
            else:
                made = f"optimizer.state.{short}.{slot}"
            found[made] = TensorInfo("float32", ()) if slot == "step" else info
    return found


@st.composite
def _cases(draw: st.DrawFn) -> tuple[str, Infos, Infos, dict[str, Any]]:
    layers, experts = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    first = draw(st.sampled_from(["0", "8", "00"]))
    numbers = [str(int(first) + n) if first != "00" else f"{n:02}" for n in range(layers)]
    own = {f"m.layers.{n}.{part}": part for n in numbers for part in ("w", "b", "q")}
    own |= {
        f"m.layers.{n}.experts.{e}.{part}": part
        for n in numbers
        for e in range(experts)
        for part in ("gate", "up")
    }
    own["m.embed"] = "w"
    sources: Infos = {name: TensorInfo("float32", SHAPES[part]) for name, part in own.items()}
    for name in draw(st.lists(st.sampled_from(sorted(sources)), max_size=2)):
        if draw(st.booleans()):
            sources.pop(name, None)
        else:
            sources[name] = TensorInfo("float16", (4, 4), (2, 1))
    statements = draw(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=4))
    style = draw(st.sampled_from(["none", "torch", "paddle", "megatron"]))
    if style != "none":
        sources |= _states(sources, style)
        for name in draw(st.lists(st.sampled_from(sorted(sources)), max_size=1)):
            sources.pop(name, None)
    text = "\n".join(statements)
    try:
        targets: Infos = dict(Transform(text).resolve(sources).targets)
    except TransformError:
        targets = dict(sources)
    for name in draw(st.lists(st.sampled_from(sorted(targets)), max_size=3)):
        change = draw(st.sampled_from(["drop", "shape", "dtype", "value", "other"]))
        if change == "drop":
            targets.pop(name, None)
        elif change == "other":
            targets[f"{name}.9.x"] = TensorInfo("float32", (1,))
        else:
            dtype = "bfloat16" if change == "dtype" else "float32"
            info = TensorInfo(dtype, (5, 4) if change == "shape" else (4, 4))
            targets[name] = None if change == "value" else info
    if draw(st.booleans()):
        part = draw(st.sampled_from([f"s.{n}." for n in numbers] + ["optimizer.", ".w"]))
        targets = {name: info for name, info in targets.items() if part in name}
    options: dict[str, Any] = {
        "cast": draw(st.booleans()),
        "with_outputs": draw(st.booleans()),
        "resizes": draw(st.booleans()),
    }
    if draw(st.booleans()):
        options["aliases"] = {"m.head": "m.embed", f"m.tied.{numbers[-1]}.w": next(iter(sources))}
    return text, sources, targets, options


@contextmanager
def _every_name() -> Iterator[None]:
    with mock.patch.object(resolving, "sampled", return_value=None):
        yield


@contextmanager
def _some_names() -> Iterator[list[Resolved | None]]:
    """Samples of worlds however small; what came of them."""
    found: list[Resolved | None] = []

    def noted(*arguments: Any, **options: Any) -> Resolved | None:
        found.append(expanded.expanded(*arguments, **options))
        return found[-1]

    with (
        mock.patch.object(numbered, "MIN_NAMES", 0),
        mock.patch.object(numbered, "NAMES_A_GROUP", 0),
        mock.patch.object(numbered, "MAX_SHARE", 1.0),
        mock.patch.object(resolving, "expanded", noted),
    ):
        yield found


def _resolve(text: Any, sources: Infos, targets: Infos, options: dict[str, Any]) -> Resolved | str:
    try:
        return Transform(text).resolve(sources, targets, **options)
    except TransformError as error:
        return str(error)


def _assert_same(found: Resolved | str, expected: Resolved | str) -> None:
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        return
    assert found.targets == expected.targets
    assert found.sources == expected.sources
    for name in ("kept", "untouched", "missing", "conflicts", "resized", "deleted", "unused"):
        assert getattr(found, name) == getattr(expected, name), name
    assert sorted(found.unused_results) == sorted(expected.unused_results)
    assert set(found.plans) == set(expected.plans)
    assert len(found.plans) == len(expected.plans)
    for name, plan in expected.plans.items():
        assert found.sources_of(name) == plan.sources, name
        assert found.is_whole(name) == expected.is_whole(name)
        info = expected.targets[name]
        if info is not None and name not in expected.resized:
            assert found.regions(name) == expected.regions(name)
            assert found.checks(name) == expected.checks(name)


@settings(deadline=None)
@given(_cases())
def test_some_names_stand_for_all(case: tuple[str, Infos, Infos, dict[str, Any]]) -> None:
    with _every_name():
        expected = _resolve(*case)
    with _some_names():
        found = _resolve(*case)
    _assert_same(found, expected)


def _model(layers: int, experts: int) -> Infos:
    names = {
        f"m.layers.{n}.experts.{e}.{part}": TensorInfo("float32", SHAPES[part])
        for n in range(layers)
        for e in range(experts)
        for part in ("gate", "up")
    }
    return {**names, **_states(dict(names), "torch")}


FUSED = "m.layers.$L.experts.$E.gate, m.layers.$L.experts.$E.up -> m.blocks.$L.e.$E.gu, axis=1"
STACKED = "m.layers.$L.experts.*.gate -> m.blocks.$L.gates, stack=0"


@pytest.mark.parametrize(
    ("text", "num_kept"),
    [
        # Two layers of two experts, two weights of them with three names each.
        (FUSED, 2 * 2 * 2 * 3),
        # All experts of two layers.
        (STACKED, 2 * 7 * 2 * 3),
        # Layer 3 is like no other.
        (f"m.layers.3.experts.$E.up -> _\n{FUSED}", 3 * 2 * 2 * 3),
        # Neighbors: every layer, and two experts of each.
        ("m.layers.$L.experts.$E.up -> m.layers.$L+1.experts.$E.up", 11 * 2 * 2 * 3),
    ],
)
def test_few_names_are_kept_of_each_kind(text: str, num_kept: int) -> None:
    sources = _model(11, 7)
    with _some_names():
        sample = numbered.sampled(Transform(text).statements, sources, sources, {}, {})
    assert sample is not None
    assert len(sample.sources) == len(sample.targets) == num_kept


@pytest.mark.parametrize("text", [FUSED, STACKED])
def test_a_large_model_is_resolved_from_a_sample(text: str) -> None:
    sources = _model(11, 7)
    targets = Transform(text).resolve(sources).targets
    with _some_names() as whole:
        found = Transform(text).resolve(sources, targets, with_outputs=True)
    assert whole == [found]
    with _every_name():
        expected = Transform(text).resolve(sources, targets, with_outputs=True)
    _assert_same(found, expected)


def _turned(name: str) -> str:
    """Experts on another axis, counted from the next layer."""
    return re.sub(r"layers\.(\d+)\.experts", lambda m: f"blocks.{(int(m[1]) + 1) % 11}.e", name)


EXPERTS = re.compile(r"layers\.(\d+)\.experts\.(\d+)")


@pytest.mark.parametrize(
    "renames",
    [
        {"m.": "net."},
        {"": "all.", "m.layers.3.": None},
        {"m.layers.": "m.blocks.", "optimizer.": "opt.", "m.layers.7.experts.2.": "m.special."},
        {EXPERTS: r"e.\2.{l}.\1", "m.layers.2.experts.1.up": None},
        _turned,
        {name: EXPERTS.sub(r"blocks.\1.e.\2", name) for name in _model(11, 7)},
        {name: _turned(name) for name in _model(11, 7) if name.startswith("m.")},
        # Names that take each other's, and one that stays.
        {
            name: name.replace(".up", ".x").replace(".gate", ".up").replace(".x", ".gate")
            for name in _model(11, 7)
            if ".0." not in name
        }
        | {"m.layers.0.experts.3.up": "m.layers.0.experts.3.up"},
    ],
)
def test_renames_of_a_few_names_stand_for_all(renames: Any) -> None:
    sources = _model(11, 7)
    made = Transform(renames).resolve(sources).targets
    # What is deleted keeps its value, if it is a target.
    targets = {**made, **{name: info for name, info in sources.items() if ".layers.3." in name}}
    options = {"with_outputs": True}
    with _every_name():
        expected = _resolve(renames, sources, targets, options)
    with _some_names() as whole:
        found = _resolve(renames, sources, targets, options)
    assert whole == [found] != [None]
    _assert_same(found, expected)


def test_an_error_is_that_of_all_names() -> None:
    sources = _model(11, 7)
    targets: Infos = {"m.blocks.10.e.6.gu": TensorInfo("float32", (4, 5))}
    with _some_names(), pytest.raises(TransformError, match=r"target 'm.blocks.10.e.6.gu'"):
        Transform(FUSED).resolve(sources, targets)
