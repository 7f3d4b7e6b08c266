"""Three users' first hours, with the wheel in a new environment and without the repository."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.first_hour import engineer, environment, operator, student
from tests.first_hour.environment import Environment
from tests.first_hour.hour import Hour

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment, one for all workers of a run."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    return environment.make(place / "first-hour")


@pytest.mark.parametrize(
    ("play", "with_torch"),
    [(student.play, True), (engineer.play, True), (operator.play, False)],
    ids=["student", "engineer", "operator"],
)
def test_a_first_hour_has_no_surprises(
    play: Callable[[Hour], None], with_torch: bool, installed: Path, tmp_path: Path
) -> None:
    hour = Hour(Environment(installed, with_torch), tmp_path)
    where = hour.run("python -c 'import remesh; print(remesh.__file__)'")
    assert where.startswith(str(installed)), where
    play(hour)
    assert hour.surprises == [], "\n\n".join(hour.surprises)
