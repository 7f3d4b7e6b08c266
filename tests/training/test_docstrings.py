"""The examples in the docstrings of what training scripts use."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from remesh.training import export, sampling, trackers


@pytest.mark.parametrize("module", [export, sampling, trackers])
def test_examples_show_what_they_say(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert (found.failed, found.attempted > 0) == (0, True)
