"""Text to tokens.

One regular expression is walked over the text once. Its alternatives begin with different
characters and its repetitions are possessive, so a text of n characters costs time proportional
to n, whatever it holds.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NAME, STRING, NUMBER, ARROW, TRANSPOSE, MARK, END = (
    "name",
    "string",
    "number",
    "arrow",
    "transpose",
    "mark",
    "end",
)

_TOKEN = re.compile(
    r"""
    (?P<blank>[ \t\r\n\f\v]++|\#[^\n]*+)
  | (?P<arrow>->)
  | (?P<number>-[0-9]++)
  | (?P<transpose>\^T(?![A-Za-z0-9_.*$]))
  | (?P<name>(?:[A-Za-z0-9_.*]++|\$[A-Za-z_][A-Za-z0-9_]*+(?:[+-][0-9]++)?+)++)
  | (?P<string>'[^'\n]*+'|"[^"\n]*+")
  | (?P<mark>[=:,\[\]])
    """,
    re.VERBOSE,
)


class Token(NamedTuple):
    """A piece of the text: what kind it is of, its characters, and where they are."""

    kind: str
    text: str
    start: int
    stop: int


class LexError(Exception):
    """A character that begins no token.

    Attributes:
        position: Where it is.
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def lex(text: str) -> list[Token]:
    """Cut a text into tokens, blanks and `#` comments left out, with an END token last.

    A token of digits alone is a NAME: whether it is a number depends on where it stands.

    Raises:
        LexError: If a character begins no token.
    """
    tokens: list[Token] = []
    position = 0
    for match in _TOKEN.finditer(text):
        if match.start() != position:
            break
        position = match.end()
        kind = match.lastgroup
        assert kind is not None
        if kind != "blank":
            tokens.append(Token(kind, match.group(), match.start(), position))
    if position != len(text):
        raise LexError(_complaint(text, position), position)
    tokens.append(Token(END, "", position, position))
    return tokens


def _complaint(text: str, position: int) -> str:
    character = text[position]
    if character in "'\"":
        return "this quote is not closed on its line"
    message = f"unexpected character {character!r}"
    if text.startswith("<-", position):
        return f"{message}: arrows point right, from sources to targets"
    if character == "^":
        return f"{message}: the transpose mark is ^T, after a name"
    if character == "-":
        return f"{message}: a name with a hyphen must be quoted"
    if character.isprintable() and not character.isascii():
        return f"{message}: a name with characters other than A-Z, a-z, 0-9, _ and . must be quoted"
    return message
