"""How sizes, names, values and tables are printed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import remesh
from remesh._repr import format_bytes
from remesh.catalog import natural_key
from remesh.cli import output
from remesh.core.values import UnresolvedValue

from .conftest import Run


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (33_554_432, "33.6 MB"),
        (1_500_000_000, "1.5 GB"),
        (10**12, "1.0 TB"),
        (10**19, "10000.0 PB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@settings(deadline=None)
@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    shown = output.printable(text)

    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


@pytest.mark.parametrize(
    ("names", "in_order"),
    [
        (["step_10", "step_9"], ["step_9", "step_10"]),
        (["10", "9", "a", "09"], ["09", "9", "10", "a"]),
        (["l.2.w", "l.10.w", "l.2.b", "l"], ["l", "l.2.b", "l.2.w", "l.10.w"]),
    ],
)
def test_natural_order(names: list[str], in_order: list[str]) -> None:
    # Equal numbers keep the order in which they come.
    assert sorted(sorted(names), key=natural_key) == in_order


@settings(deadline=None)
@given(st.lists(st.text(), max_size=6))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    assert sorted(sorted(names, key=natural_key)) == sorted(names)


def test_values_of_unknown_types_are_shown_as_what_they_were_called() -> None:
    dtype = UnresolvedValue("torch.dtype", "torch.dtype", "torch.bfloat16")
    mode = UnresolvedValue("enum", "train.Mode", "FAST")
    size = UnresolvedValue("torch.Size", "torch.Size", [2, 3])

    assert output.format_value({"a": [dtype], "b": (mode, 1)}) == (
        "{'a': [torch.bfloat16], 'b': (train.Mode('FAST'), 1)}"
    )
    assert output.cut(repr(size)) == "torch.Size([2, 3])"
    assert output.type_name(mode) == "train.Mode"
    assert output.json_value([dtype, mode, size]) == ["torch.bfloat16", "FAST", [2, 3]]


def test_long_texts_are_cut() -> None:
    assert output.cut("x" * 21, 20) == f"{'x' * 17}..."
    assert output.cut("x" * 20, 20) == "x" * 20


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_printed_json_is_what_was_given(value: object) -> None:
    document = {"value": output.json_value(value)}

    assert json.loads(output._laid_out(document, "")) == document


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:
    monkeypatch.setattr(output, "MAX_ROWS", 3)
    remesh.save({f"w{n}": np.zeros(2) for n in range(5)}, tmp_path / "ck")

    shown = run("ls", tmp_path / "ck").stdout
    assert shown.endswith("w2\n  ... and 2 more; --all lists them\n")
    assert "w4" in run("ls", tmp_path / "ck", "--all").stdout
    assert [output.format_count(n) for n in (9999, 10_000, 999_499, 999_500, 7 * 10**9)] == [
        "9999",
        "10 k",
        "999 k",
        "1 M",
        "7 G",
    ]
