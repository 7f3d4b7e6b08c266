"""Megatron's own unit tests on the drop-in: none lacks a name, and what fails has a reason."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.compat.megatron.own_tests import files_of_tests, report, run_files
from tests.compat.megatron.own_tests.reasons import reason_of

SOURCES = "REMESH_MEGATRON_SOURCES"

WANT_OF_A_NAME = re.compile(
    r"cannot import name .* from '(megatron\.core\.dist_checkpointing|remesh\.)"
    r"|No module named '(megatron\.core\.dist_checkpointing|remesh\.)"
)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(SOURCES not in os.environ, reason=f"{SOURCES} names no checkout of Megatron-LM")
def test_megatrons_own_tests_pass_or_fail_for_a_reason() -> None:
    sources = Path(os.environ[SOURCES])
    lacking, unexplained = [], []
    for name, results in run_files(sources, files_of_tests(sources), "remesh"):
        print(report(name, results))
        lacking += [test for test, one in results.items() if WANT_OF_A_NAME.search(one.why)]
        unexplained += [
            test
            for test, one in results.items()
            if one.outcome not in {"passed", "skipped"} and not reason_of(test)
        ]
    assert (lacking, unexplained) == ([], [])
