"""What the operator counts of itself, for Prometheus."""

from __future__ import annotations

from collections import Counter as Counts

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from remesh.kubernetes.looking import Key
from remesh.kubernetes.resource import Phase


class Metrics:
    """The metrics of one operator.

    Attributes:
        jobs: Jobs by phase.
        look_seconds: Durations of looks.
        actions: Actions by kind.
        errors: Looks that failed.
        content_type: Of what `render` returns.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._phases: dict[Key, Phase] = {}
        own, prefix = self._registry, "remesh_operator_"
        self.jobs = Gauge(f"{prefix}jobs", "Jobs by phase", ["phase"], registry=own)
        self.look_seconds = Histogram(f"{prefix}look_seconds", "Durations of looks", registry=own)
        self.actions = Counter(f"{prefix}actions", "Actions by kind", ["kind"], registry=own)
        self.errors = Counter(f"{prefix}errors", "Looks that failed", registry=own)

    def see(self, key: Key, phase: Phase) -> None:
        """A job is in a phase."""
        if self._phases.get(key) is not phase:
            self._phases[key] = phase
            self._count()

    def forget(self, key: Key) -> None:
        """A job is gone."""
        self._phases.pop(key, None)
        self._count()

    def _count(self) -> None:
        counts = Counts(self._phases.values())
        for phase in Phase:
            self.jobs.labels(phase.value).set(counts[phase])

    def render(self) -> bytes:
        """The metrics as text."""
        return generate_latest(self._registry)
