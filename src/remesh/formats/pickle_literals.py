"""What the numbers and texts in a pickle are, by their bytes, and the error for what is none."""

from __future__ import annotations

MAX_INT_BYTES = 1024
"""Bytes of the longest integer that is read; longer ones Python does not even show in decimal."""
MAX_DIGITS = 2400


class MalformedError(ValueError):
    """The pickle is none."""


def describe(error: Exception) -> str:
    """An error in a few words, however much of a file it quotes."""
    text = str(error)
    return (
        text[:80] if isinstance(error, MalformedError) else f"{type(error).__name__}: {text[:60]}"
    )


def integer(text: bytes) -> int:
    """The integer that a line of digits is."""
    if len(text) > MAX_DIGITS:
        raise MalformedError("an integer of too many digits")
    return int(text.removesuffix(b"L"))


def long_of(data: bytes) -> int:
    """The integer of its bytes, the lowest first."""
    if len(data) > MAX_INT_BYTES:
        raise MalformedError(f"an integer of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


def utf8(data: bytes) -> str:
    """The text of its bytes in UTF-8."""
    return data.decode("utf-8", "surrogatepass")


def ascii_of(data: bytes) -> str:
    """The text of its bytes, which are ASCII."""
    return data.decode("ascii")
