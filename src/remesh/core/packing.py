"""Columns of integers as few words, where they follow a pattern.

The cuts of a regular layout are arithmetic: offsets 0, 8, 16, ..., files 0, 1, 2, ..., shapes that
are all the same. A column is therefore packed as *runs*, each of which begins with a number and
goes on in equal steps. The first numbers, the steps and the lengths of the runs are columns
themselves, and packed again, so that the cells of a grid, which repeat a run many times, take a few
words as well. A column without a pattern is stored as it is, behind two words.

A packed column is a sequence of 64-bit words: `0, n` and n numbers, or `1, n` and the packed
columns of first numbers, steps and lengths.
"""

from __future__ import annotations

import numpy as np

from remesh.core.geometry import IntArray

MAX_DEPTH = 4
"""How deep packed columns may lie in each other."""

_MIN_ROWS = 12
"""Columns shorter than this are not worth a look."""


def pack(column: IntArray, depth: int = MAX_DEPTH) -> IntArray:
    """The words of a column."""
    plain = np.concatenate([np.array([0, len(column)], dtype=np.int64), column])
    if not depth or len(column) < _MIN_ROWS:
        return plain
    first = _starts_of_runs(column)
    if 3 * len(first) >= len(column):
        return plain
    counts = np.diff(np.append(first, len(column)))
    second = np.minimum(first + 1, len(column) - 1)
    steps = np.where(counts > 1, column[second] - column[first], 0)
    runs = [pack(part, depth - 1) for part in (column[first], steps, counts)]
    return np.concatenate([np.array([1, len(column)], dtype=np.int64), *runs])


def _starts_of_runs(column: IntArray) -> IntArray:
    """Where arithmetic runs begin: as long as possible, from the first number on."""
    steps = np.diff(column)
    changes = np.zeros(len(column), dtype=np.bool_)
    changes[2:] = steps[1:] != steps[:-1]
    # Behind the number at which a run begins, the step is new as well, and no run begins.
    places = np.arange(len(column))
    since = places - np.maximum.accumulate(np.where(changes, -1, places))
    begins = changes & (since % 2 == 1)
    begins[0] = True
    return np.flatnonzero(begins)


def unpack(words: IntArray, max_rows: int) -> IntArray:
    """The column of its words; ValueError if they are none, or of more than `max_rows` numbers."""
    column, end = _unpack(words, 0, max_rows, MAX_DEPTH)
    if end != len(words):
        raise ValueError(f"{len(words) - end} words too many")
    return column


def _unpack(words: IntArray, at: int, max_rows: int, depth: int) -> tuple[IntArray, int]:
    """The column whose words begin at a place, and where they end."""
    if at + 2 > len(words):
        raise ValueError("words are missing")
    kind, num_rows = words[at : at + 2].tolist()
    if not 0 <= num_rows <= max_rows:
        raise ValueError(f"{num_rows} numbers in {len(words)} words")
    at += 2
    if kind == 0:
        if at + num_rows > len(words):
            raise ValueError("words are missing")
        return words[at : at + num_rows], at + num_rows
    if kind != 1 or not depth:
        raise ValueError(f"packed as {kind}, {MAX_DEPTH - depth} deep")
    first, at = _unpack(words, at, num_rows, depth - 1)
    steps, at = _unpack(words, at, num_rows, depth - 1)
    counts, at = _unpack(words, at, num_rows, depth - 1)
    fits = len(first) == len(steps) == len(counts)
    if not fits or not ((counts > 0) & (counts <= num_rows)).all() or counts.sum() != num_rows:
        raise ValueError(f"runs that are not {num_rows} numbers")
    # Steps from number to number, also from the last of a run to the first of the next.
    column = np.repeat(steps, counts)
    last = first + steps * (counts - 1)
    column[np.cumsum(counts) - counts] = np.diff(first, prepend=0) - np.append(
        0, (last - first)[:-1]
    )
    return np.cumsum(column, out=column), at
