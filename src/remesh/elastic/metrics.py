"""The metrics of a job, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from remesh.elastic.status import TROUBLE, Status

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def render_metrics(status: Status, num_requests: int, *, journal_failing: bool) -> bytes:
    """The text that Prometheus scrapes."""
    return generate_latest(_Found(_metrics(status, num_requests, failing=journal_failing)))


class _Found(list[Metric], Collector):
    """Metrics as the library takes them."""

    def collect(self) -> Iterable[Metric]:
        return self


def _metrics(status: Status, num_requests: int, *, failing: bool) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, float | None], ...] = (
        ("remesh_round", "Number of the current round", status.round),
        ("remesh_goodput_ratio", "Share of the time that moved the training on", status.goodput),
        ("remesh_step", "Highest step of any rank", status.step),
        ("remesh_step_age_seconds", "Time since any rank finished a step", status.step_age),
        ("remesh_saved_step", "Step of the newest checkpoint", status.saved_step),
        ("remesh_running", "Whether the job runs", float(status.phase == "running")),
        ("remesh_succeeded", "Whether the job has succeeded", float(status.phase == "succeeded")),
        ("remesh_journal_failing", "Whether the master cannot write its journal", float(failing)),
    )
    for name, text, value in gauges:
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)
    num_failed = sum(len(failed.failures) for failed in status.failures)
    for name, text, count in (
        ("remesh_restarts", "Rounds after the first", max(status.round - 1, 0)),
        ("remesh_requests", "Requests since the master started", num_requests),
        ("remesh_process_failures", "Processes that failed", num_failed),
    ):
        yield CounterMetricFamily(name, text, value=count)
    nodes = GaugeMetricFamily("remesh_nodes", "Nodes by state", labels=["state"])
    for state in TROUBLE:
        nodes.add_metric([state], status.nodes_by_state.get(state, 0))
    steps = GaugeMetricFamily("remesh_rank_step", "Last step of a rank", labels=["rank"])
    seconds = GaugeMetricFamily(
        "remesh_rank_step_seconds", "Duration of a rank's own work of a step", labels=["rank"]
    )
    for rank in status.ranks:
        steps.add_metric([str(rank.rank)], rank.step)
        if rank.step_seconds is not None:
            seconds.add_metric([str(rank.rank)], rank.step_seconds)
    yield from (nodes, steps, seconds)
