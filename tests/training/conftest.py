"""What all tests of training share."""

from __future__ import annotations

import pytest

from tests.training.example import wait_for_last_saves


@pytest.fixture(autouse=True)
def _last_saves_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_last_saves(monkeypatch)
