"""How step time, goodput and the number of ranks have changed, for the charts of the page.

A trend is a list of samples of bounded length. When it is full, every second sample is dropped and
the samples that follow are twice as far apart, so that it always covers the whole job.
"""

from __future__ import annotations

from statistics import median

import msgspec

from remesh.elastic import progress
from remesh.elastic.progress import TrainingProgress
from remesh.elastic.rendezvous import Rendezvous

MAX_SAMPLES = 240
"""Samples of a trend, at most."""
FIRST_INTERVAL = 1.0
"""Seconds between the samples of a job that has just begun, at least."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A job at one time."""

    time: float  # when, in seconds since the epoch
    num_ranks: int  # ranks of the world
    step: int | None  # the highest step of any rank
    step_seconds: float | None  # the usual duration of a step
    goodput: float | None  # the goodput until then


class Trend(msgspec.Struct, frozen=True):
    """Samples of a job, oldest first."""

    samples: tuple[Sample, ...] = ()
    interval: float = FIRST_INTERVAL
    """Seconds between two of them, at least, if the number of ranks stays the same."""


def num_ranks(nodes: Rendezvous) -> int:
    """The ranks of the nodes that are in the world."""
    return sum(node.num_processes for node in nodes.world if node.id in nodes.active)


def is_resized(before: Rendezvous | None, after: Rendezvous) -> bool:
    """True if a world begins, breaks, or has no member any more."""
    return before is None or (
        after.world is not before.world
        or after.broken is not before.broken
        or bool(after.active) != bool(before.active)
    )


def sample(known: TrainingProgress | None, ranks: int, now: float) -> Sample:
    """A job now, from what is known of its training and the number of its ranks."""
    if known is None:
        return Sample(now, ranks, None, None, None)
    usual = median(known.recent) if known.recent else None
    return Sample(now, ranks, known.last_step, usual, progress.goodput(known, now))


def extend(trend: Trend, new: Sample) -> Trend:
    """The trend with a new sample, unless the last one is too near."""
    samples, interval = trend.samples, trend.interval
    is_near = bool(samples) and new.time - samples[-1].time < interval
    if is_near and new.num_ranks == samples[-1].num_ranks:
        return trend
    samples = (*samples, new)
    if len(samples) > MAX_SAMPLES:
        samples, interval = (*samples[:-1:2], new), 2 * interval
    return Trend(samples, interval)
