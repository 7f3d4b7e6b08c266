"""docs/transform.md, run as a reader would run it, and its recipes on states with optimizers."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from remesh import Transform
from remesh.errors import TransformError
from tests.transform.simulated import Array

PAGE = Path(__file__).parents[2] / "docs" / "transform.md"
SLOTS = ("exp_avg", "exp_avg_sq", "master_param")


@functools.cache
def run_page() -> dict[str, object]:
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), namespace)
    return namespace


def recipe(name: str) -> Transform:
    found = run_page()[name]
    return Transform(found) if isinstance(found, str) else found  # type: ignore[return-value]


def test_every_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_page.cache_clear()
    run_page()
    printed = capsys.readouterr().out
    assert "qk -> q^T, k^T, axis=1\n" in printed
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown in printed


def test_every_attribute_is_documented() -> None:
    from remesh.transform.statements import ATTRIBUTES

    text = PAGE.read_text()
    assert [name for name in ATTRIBUTES if f"{name}=" not in text and f"`{name}`" not in text] == []


def with_states(weights: dict[str, tuple[int, ...]], **counts: float) -> dict[str, Array]:
    """Weights of these shapes and an optimizer's states of them, all different numbers."""
    state: dict[str, Array] = {}
    start = 0
    for name, shape in weights.items():
        for full in (f"model.{name}", *(f"optimizer.state.{name}.{slot}" for slot in SLOTS)):
            size = int(np.prod(shape))
            state[full] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
            start += size
        state[f"optimizer.state.{name}.step"] = np.full((), counts.get("step", 5), np.float32)
    return state


def under_model(transform: Transform) -> Transform:
    """The same statements for a state that has the weights under `model.`."""
    text = re.sub(r"\b(layers|embed|lm_head)\.", r"model.\1.", str(transform))
    return Transform(text)


def assert_equal(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_fused_llama_with_its_optimizer() -> None:
    dim, head = 12, 3
    shapes = {"q": 8 * head, "k": 2 * head, "v": 2 * head, "gate": 20, "up": 20}
    weights = {
        f"layers.{n}.{name}_proj.weight": (rows, dim)
        for n in (0, 1)
        for name, rows in shapes.items()
    }
    state = with_states({**weights, "norm.weight": (dim,)})
    fuse = under_model(recipe("FUSE_LLAMA"))
    fused = fuse.apply(state)
    assert len(fused) == 5 * len(SLOTS) + 10
    for name in ("model.{}.weight", *(f"optimizer.state.{{}}.weight.{slot}" for slot in SLOTS)):
        q, k, v = (state[name.format(f"layers.1.{x}_proj")] for x in "qkv")
        groups = [
            part
            for n in range(2)
            for part in (q[12 * n : 12 * n + 12], k[3 * n : 3 * n + 3], v[3 * n : 3 * n + 3])
        ]
        np.testing.assert_array_equal(
            fused[name.format("layers.1.qkv_proj")], np.concatenate(groups)
        )
    assert_equal(fuse.reversed().apply(fused), state)
    assert_equal(under_model(recipe("UNFUSE_LLAMA")).apply(fused), state)


def test_grouped_experts_with_their_optimizer() -> None:
    experts = [(1, 0), (1, 1), (1, 2), (3, 0)]
    weights: dict[str, tuple[int, ...]] = {}
    for layer, expert in experts:
        name = f"layers.{layer}.experts.{expert}"
        weights |= {f"{name}.gate_proj.weight": (4, 8), f"{name}.up_proj.weight": (4, 8)}
        weights[f"{name}.down_proj.weight"] = (8, 4)
    state = with_states(weights)
    group = under_model(recipe("GROUP_EXPERTS"))
    grouped = group.apply(state)
    assert grouped["model.layers.1.experts.gate_up_proj"].shape == (3, 8, 8)
    assert grouped["optimizer.state.layers.3.experts.down_proj.exp_avg"].shape == (1, 8, 4)
    np.testing.assert_array_equal(
        grouped["optimizer.state.layers.1.experts.gate_up_proj.exp_avg"][2],
        np.concatenate(
            [
                state[f"optimizer.state.layers.1.experts.2.{name}_proj.weight.exp_avg"].T
                for name in ("gate", "up")
            ],
            1,
        ),
    )
    like = {name: np.empty_like(array) for name, array in state.items()}
    assert_equal(group.reversed().apply(grouped, like), state)


def test_tied_and_untied_embeddings_with_their_optimizer() -> None:
    untie, tie = under_model(recipe("UNTIE")), under_model(recipe("TIE"))
    tied = with_states({"embed.weight": (8, 4)})
    untied = untie.apply(tied)
    assert len(untied) == 2 * len(tied)
    assert_equal(tie.apply(untied), tied)
    assert_equal(untie.reversed().apply(untied), tied)

    trained = dict(untied)
    trained["optimizer.state.lm_head.weight.exp_avg"] = trained["model.embed.weight"] + 1
    with pytest.raises(TransformError, match="32 of 32 elements differ"):
        tie.apply(trained)
    assert_equal(under_model(recipe("KEEP_EMBEDDING")).apply(trained), tied)
