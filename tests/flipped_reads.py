"""Reads of storages that give one wrong bit, as on a bad link; what lies there stays right."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import numpy as np
import pytest

from remesh.storage import Buffer, LocalStorage, MemoryStorage

Choose = Callable[[str, int], int | None]
"""Given the path of a file and how many bytes are read: the bit that flips, or None."""


def flip_reads(
    monkeypatch: pytest.MonkeyPatch, kind: type[LocalStorage | MemoryStorage], choose: Choose
) -> None:
    """Let reads of all storages of a kind give one wrong bit where `choose` says so."""
    read, read_into = kind.read, kind.read_into

    def read_flipped(self: object, path: str, start: int = 0, stop: int | None = None) -> bytes:
        data = read(self, path, start, stop)  # type: ignore[arg-type]
        return _flipped(data, choose(path, len(data)))

    def read_into_flipped(self: object, path: str, start: int, buffer: Buffer) -> int:
        num_bytes = read_into(self, path, start, buffer)  # type: ignore[arg-type]
        data = _flipped(buffer[:num_bytes].tobytes(), choose(path, num_bytes))
        buffer[:num_bytes] = np.frombuffer(data, np.uint8)
        return num_bytes

    monkeypatch.setattr(kind, "read", read_flipped)
    monkeypatch.setattr(kind, "read_into", read_into_flipped)


def first_readings(pattern: str, num_flips: int, flipped: list[str]) -> Choose:
    """The first readings of files that match a pattern are wrong, or all if the number is -1.

    `flipped` gets the path of each.
    """

    def choose(path: str, num_bytes: int) -> int | None:
        if not num_bytes or not fnmatchcase(path, pattern) or len(flipped) == num_flips:
            return None
        flipped.append(path)
        return 8 * (len(flipped) * 7 % num_bytes) + 5

    return choose


def _flipped(data: bytes, bit: int | None) -> bytes:
    if bit is None:
        return data
    wrong = bytearray(data)
    wrong[bit // 8] ^= 1 << bit % 8
    return bytes(wrong)
