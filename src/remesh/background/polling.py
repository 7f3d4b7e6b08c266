"""When the ranks of a background save look at the storage.

Ranks learn through the storage how a save ends, so each looks again and again. The requests of the
whole job are bounded, whatever its size: the more ranks there are, the longer the time between two
looks of one, and the looks of different ranks are spread over that time. In a small job a rank
looks often at first, and less often the longer it waits.
"""

from __future__ import annotations

from dataclasses import dataclass

REQUESTS_PER_SECOND = 400.0
"""What all ranks that wait for the end ask of the storage, together."""

COORDINATOR_REQUESTS_PER_SECOND = 100.0
"""What rank 0 asks while it waits for the others."""

SHORTEST_SECONDS, LONGEST_SECONDS = 0.02, 1.0
"""Time between two looks, unless there are so many ranks that it must be longer."""

WAITED_SHARE = 0.05
"""In between, this share of the time that was waited already."""

_REQUESTS_OF_A_LOOK = 2
"""A rank that waits for the end reads the commit record and the note of a failure."""

_NAMES_OF_A_REQUEST = 1000
"""Object stores list so many names at a time."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When one rank looks."""

    first: float  # seconds from the moment when it begins to wait to its first look
    least: float  # seconds between two looks at least

    def pause(self, waited: float) -> float:
        """Seconds from the end of a look to the next one, when so many were waited already."""
        usual = min(max(waited * WAITED_SHARE, SHORTEST_SECONDS), LONGEST_SECONDS)
        return max(usual, self.least)


def schedule_of_waiting(rank: int, num_ranks: int) -> Schedule:
    """How a rank other than 0 looks for the end of the save."""
    least = num_ranks * _REQUESTS_OF_A_LOOK / REQUESTS_PER_SECOND
    # Ranks of a job begin to wait at about the same time.
    first = least * rank / num_ranks if least > SHORTEST_SECONDS else 0.0
    return Schedule(first, least)


def schedule_of_coordinator(num_ranks: int) -> Schedule:
    """How rank 0 looks for the notes of the others."""
    # The folder has a file and a note of each rank.
    num_requests = 1 + 2 * num_ranks // _NAMES_OF_A_REQUEST
    return Schedule(0.0, num_requests / COORDINATOR_REQUESTS_PER_SECOND)
