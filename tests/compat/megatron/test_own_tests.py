"""Megatron's own unit tests on the drop-in: none lacks a name, and what fails has a reason."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.compat.megatron.own_tests import files_of_tests, report, run_file
from tests.compat.megatron.own_tests.reasons import reason_of

SOURCES = os.environ.get("REMESH_MEGATRON_SOURCES", "")
"""A checkout of Megatron-LM (https://github.com/NVIDIA/Megatron-LM)."""

WANT_OF_A_NAME = re.compile(
    r"cannot import name .* from '(megatron\.core\.dist_checkpointing|remesh\.)"
    r"|No module named '(megatron\.core\.dist_checkpointing|remesh\.)"
)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not SOURCES, reason="REMESH_MEGATRON_SOURCES names no checkout of Megatron-LM")
@pytest.mark.parametrize("name", files_of_tests(Path(SOURCES)) if SOURCES else [""])
def test_megatrons_own_tests_pass_or_fail_for_a_reason(name: str) -> None:
    results = run_file(Path(SOURCES), name)
    print(report(name, results))
    assert results, "no test of the file was run"
    lacking = [test for test, one in results.items() if WANT_OF_A_NAME.search(one.why)]
    unexplained = [
        test
        for test, one in results.items()
        if one.outcome not in {"passed", "skipped"} and not reason_of(test)
    ]
    assert (lacking, unexplained) == ([], [])
