"""A master that serves, for tests that need no other policy or journal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.elastic.agents import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as master:
        yield master
