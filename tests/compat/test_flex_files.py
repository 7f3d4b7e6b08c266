"""`get_rank_to_files` in one process; tests/compat/test_flex_gloo.py has it in several."""

from __future__ import annotations

import logging

import pytest

from remesh.compat.flex_checkpoint import LocalTensorIndex, Metadata, get_rank_to_files
from remesh.errors import CorruptCheckpointError


def stored(*boxes: tuple[str, int, str]) -> Metadata:
    """Metadata of one-dim boxes: name, offset, file."""
    return Metadata({}, {LocalTensorIndex(name, (offset,)): file for name, offset, file in boxes})


CHECKPOINT = [
    stored(("a", 0, "0_0.distcp"), ("b", 0, "1_0.distcp"), ("a", 4, "1_0.distcp")),
    stored(("c", 0, "2_0.distcp")),
]
FILES = ["0_0.distcp", "1_0.distcp", "2_0.distcp"]


def files_of(*names: str, **options: bool) -> object:
    return get_rank_to_files(
        CHECKPOINT, FILES, dict.fromkeys(names), None, use_dist=False, **options
    )


def test_each_needed_file_once_and_in_order() -> None:
    assert files_of("a", "b") == ({0: ["0_0.distcp", "1_0.distcp"]}, set(), {})
    assert files_of("b", "c") == ({0: ["1_0.distcp", "2_0.distcp"]}, set(), {})


def test_names_that_are_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "remesh"):
        assert files_of("a", "x", "y") == ({0: ["0_0.distcp", "1_0.distcp"]}, {"x", "y"}, {})
        assert "lacks x, y" in caplog.text
        assert files_of("x") == ({}, {"x"}, {})
        assert "no data file" in caplog.text


def test_master_weights_under_their_other_name() -> None:
    metadata = [
        stored(("opt.w_0_fp32_master_0", 0, "0_0.distcp"), ("opt.master_weights.v_0", 0, "f"))
    ]
    wanted = dict.fromkeys(["opt.master_weights.w_0", "opt.v_0_fp32_master_0", "opt.v_0_fp32"])
    wanted["opt.w_0_fp32_master_0"] = None
    arguments = (metadata, ["0_0.distcp", "f"], wanted, None, False)
    assert get_rank_to_files(*arguments) == (
        {0: ["0_0.distcp"]},
        {"opt.v_0_fp32"},
        {
            "opt.master_weights.w_0": "opt.w_0_fp32_master_0",
            "opt.v_0_fp32_master_0": "opt.master_weights.v_0",
        },
    )
    _, missing, renamed = get_rank_to_files(*arguments, mw_name_compatibility=False)
    assert missing == wanted.keys() - {"opt.w_0_fp32_master_0"}
    assert renamed == {}


@pytest.mark.parametrize(
    ("metadata", "files", "name", "message"),
    [
        (CHECKPOINT, FILES[:1], "b", r"no rank can open 1_0\.distcp"),
        ([CHECKPOINT[1]] * 2, FILES, "a", "twice"),
    ],
)
def test_a_checkpoint_that_is_not_whole(
    metadata: list[Metadata], files: list[str], name: str, message: str
) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        get_rank_to_files(metadata, files, {name: None}, None, use_dist=False)
