"""Paths of names that a conversion has changed."""

from __future__ import annotations

import pytest

from remesh.checkpoint.transformed import renamed_path, renamed_sequences
from remesh.core.state import Path

GROUP: Path = ("optimizer", "param_groups", 0, "lr")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("adam.param_groups.0.lr", GROUP, ("adam", "param_groups", 0, "lr")),
        ("0.weight", ("model", "0.weight"), ("0.weight",)),
        ("a.b.0.weight", ("model", "0.weight"), ("a", "b", "0.weight")),
        ("model.blocks.0.w", ("model", "layers.0.w"), ("model", "blocks.0.w")),
        ("opt.state.qk.step", ("opt", "state", "q", "step"), ("opt", "state", "qk", "step")),
        ("y", ("x",), ("y",)),
    ],
)
def test_a_new_name_keeps_the_keys_that_it_has(name: str, old: Path, new: Path) -> None:
    assert renamed_path(name, old) == new


def test_lists_of_a_state_move_with_what_is_in_them() -> None:
    sequences: list[tuple[Path, str]] = [(("optimizer", "param_groups"), "list"), (("x",), "tuple")]
    moved: dict[Path, Path] = {GROUP: ("adam", "param_groups", 0, "lr"), ("x", 0): ("x", 0)}
    expected = {("adam", "param_groups"): "list", ("x",): "tuple"}
    assert renamed_sequences(moved, sequences) == expected
