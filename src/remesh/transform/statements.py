"""Text to statements: tokens first, then recursive descent without backtracking.

A statement has names left and right of its arrow and exactly one operator, which follows from its
attributes and from how many names there are.

The tokens are found by one regular expression. Its alternatives begin with different characters and
its repetitions are possessive, so a text of n characters costs time proportional to n.

::

    program    = statement*
    statement  = names "->" names ("," attribute)*
    names      = name ("," name)*
    name       = (NAME | STRING) ["[" INT ":" INT "]"] ["^T"]
    attribute  = FLAG | NAME "=" value
    value      = INT | NAME | STRING | "[" [INT ("," INT)*] "]"

A statement ends where no comma follows, so statements need nothing between them. On the right, a
name that is a FLAG (`fused_qkv`, `tie`, ...) and not the first is one; quote a tensor of that name.

All that can be checked without tensors is checked here: which attributes go together, how many
names an operator takes, that placeholders match, that nothing right of an arrow is transposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, NoReturn

from remesh.errors import TransformError
from remesh.transform.operators import (
    OPERATORS,
    Attribute,
    AttributeValue,
    Concat,
    Operator,
    Rename,
    Split,
)
from remesh.transform.syntax import (
    STAR,
    Name,
    Pieces,
    Problem,
    Span,
    Wildcard,
    are_many,
    nearest,
    shorten,
    text_error,
)

# ---------------------------------------------------------------------------------------------
# Statements
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement."""

    number: int  # its place among the statements as they were written, from 1
    text: str  # the text that it is part of
    span: Span  # where it stands there
    left: tuple[Name, ...]  # names left of the arrow
    right: tuple[Name, ...]  # names right of the arrow
    operator: Operator
    operator_span: Span  # where the attribute that says so stands, for errors
    is_reversed: bool = False  # whether left and right have been exchanged since it was written

    @property
    def adds(self) -> bool:
        """True if it says that targets keep their initial values: `_ -> ...`."""
        return self.left[0].is_nothing

    def turned(self) -> Statement:
        """The statement with left and right exchanged, and its operator turned around."""
        try:
            operator = self.operator.opposite()
        except Problem as problem:
            raise self.error(str(problem), self.operator_span, problem.hints) from None
        quoted = (replace(one, quoted=one.quoted or one.literal in _FLAGS) for one in self.left)
        return replace(
            self,
            left=self.right,
            right=tuple(quoted),  # where a flag might stand
            operator=operator,
            is_reversed=not self.is_reversed,
        )

    def error(
        self,
        message: str,
        span: Span | None = None,
        hints: Sequence[str] = (),
        expansions: Sequence[tuple[str, str]] = (),
    ) -> TransformError:
        """An error in it, or in some characters of it, after its expansions by macros."""
        notes = [f"{macro}: {shorten(text)}" for macro, text in expansions]
        if self.is_reversed:
            notes.insert(0, f"reversed: {shorten(str(self))}")
        return text_error(message, self.number, self.text, span or self.span, [*notes, *hints])

    def __str__(self) -> str:
        left, right = (", ".join(map(str, names)) for names in (self.left, self.right))
        return f"{left} -> {right}{self.operator}"


Statements = tuple[Statement, ...]

_FIELDS = {kind: frozenset(own.name for own in fields(kind)) for kind in OPERATORS}
_LED_BY = {name: kind for kind in OPERATORS for name in kind.leads}
_FLAGS = frozenset(name for name, kind in _LED_BY.items() if name not in _FIELDS[kind])
ATTRIBUTES = frozenset(_LED_BY).union(*_FIELDS.values())
"""The names of all attributes."""


def statement_of(
    number: int,
    text: str,
    span: Span,
    names: tuple[Sequence[Name], Sequence[Name]],
    attributes: Mapping[str, Attribute],
) -> Statement:
    """The statement of names left and right of an arrow and attributes, checked as a whole."""
    left, right = names
    for side, given in (("left", left), ("right", right)):
        for name in given:
            if name.is_nothing and len(given) > 1:
                raise Problem(f"_ must stand alone on the {side}", name.span)
            if name.is_nothing and name.transposed:
                raise Problem("_ is no tensor, so it has no axes", name.span)
    if left[0].is_nothing and right[0].is_nothing:
        raise Problem("_ on both sides does nothing", span)
    _check_placeholders([name for name in (*left, *right) if not name.is_nothing])
    leader = _leader(left, right, attributes)
    operator_span = span if leader is None else leader.span
    try:
        operator = _operator(left, right, leader, attributes)
    except Problem as problem:
        raise Problem(str(problem), problem.span or operator_span) from None
    return Statement(number, text, span, tuple(left), tuple(right), operator, operator_span)


def _check_placeholders(names: Sequence[Name]) -> None:
    """Every name must carry the same placeholders, or one would be repeated or lost."""
    wanted = frozenset[str]().union(*(name.placeholders for name in names))
    for name in names:
        lacking = sorted(wanted - name.placeholders)
        if lacking:
            raise Problem(f"this name lacks ${lacking[0]}, which others have", name.span)


def _leader(
    left: Sequence[Name], right: Sequence[Name], attributes: Mapping[str, Attribute]
) -> Attribute | None:
    """The attribute that says what a statement does; None if none does."""
    for one in attributes.values():
        if one.name not in ATTRIBUTES:
            hints = "".join(f"; {hint}" for hint in nearest(one.name, sorted(ATTRIBUTES)))
            raise Problem(f"unknown attribute {one.name!r}{hints}", one.span)
        is_flag = one.name in _FLAGS
        if is_flag != (one.value is True):
            form = "stands alone, without a value" if is_flag else "needs a value"
            raise Problem(f"{one.name} {form}", one.span)
        if left[0].is_nothing or right[0].is_nothing:
            raise Problem("a statement with _ takes no attributes", one.span)
    leaders = [one for one in attributes.values() if one.name in _LED_BY]
    # `axis` says what to do only if no flag does.
    return min(leaders, key=lambda one: one.name not in _FLAGS, default=None)


def _operator(
    left: Sequence[Name],
    right: Sequence[Name],
    leader: Attribute | None,
    attributes: Mapping[str, Attribute],
) -> Operator:
    if left[0].is_nothing or right[0].is_nothing:
        return Rename()
    reads_many, makes_many = are_many(left), are_many(right)
    kind = Rename if leader is None else _LED_BY[leader.name]
    if kind in (Rename, Split) and reads_many and makes_many:
        raise Problem(
            "several names on both sides: one side must be single (write $EXPERT_ID instead of *)"
        )
    if kind is Split and not makes_many:
        kind = Concat
    for other in attributes.values():
        if other is leader or other.name in _FIELDS[kind]:
            continue
        if leader is not None and other.name in _LED_BY:
            raise Problem(
                f"{leader.name} and {other.name} are two operators; write two statements",
                other.span,
            )
        owners = [one.title or one.leads[0] for one in OPERATORS if other.name in _FIELDS[one]]
        raise Problem(
            f"{other.name} belongs to {' or '.join(owners)}, not to this statement", other.span
        )
    if leader is None and (reads_many or makes_many):
        raise Problem(
            "several names on one side need axis= (or stack=, unstack=, tie, untie, or one of the "
            "fused_ macros)"
        )
    operator = kind.parse(left, right, attributes)
    return operator if kind is not Concat or reads_many else Rename()


# ---------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------

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
    """A piece of the text."""

    kind: str  # the name of its group in `_TOKEN`, or `end`
    text: str
    span: Span


def _tokens(text: str) -> list[Token]:
    """Cut a text into tokens, blanks and `#` comments left out, with a token `end` last.

    A token of digits alone is a name: whether it is a number depends on where it stands.
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
            tokens.append(Token(kind, match.group(), Span(match.start(), position)))
    if position != len(text):
        raise Problem(_complaint(text, position), Span(position, position + 1))
    tokens.append(Token("end", "", Span(position, max(position, 1))))
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


# ---------------------------------------------------------------------------------------------
# Names with wildcards
# ---------------------------------------------------------------------------------------------

WILDCARD = re.compile(r"\*|\$([A-Za-z_][A-Za-z0-9_]*)([+-][0-9]+)?")
_PREVIOUS_LAYER = "LAYER_ID_OFFSET"
_MAX_DIGITS = 18


def pieces_of(text: str, start: int, *, is_left: bool) -> Pieces:
    """A name that begins at `start` of its statement's text, cut at its wildcards."""
    if "*" not in text and "$" not in text:
        return (text,)
    pieces: list[str | Wildcard] = []
    done = 0
    for match in WILDCARD.finditer(text):
        if done < match.start():
            pieces.append(text[done : match.start()])
        span = Span(start + match.start(), start + match.end())
        before = pieces[-1] if pieces else ""
        after = text[match.end() : match.end() + 1]
        if isinstance(before, Wildcard) or before[-1:].isdigit() or after.isdigit():
            raise Problem("a wildcard needs something other than a digit on either side", span)
        pieces.append(_wildcard(match, span, is_left))
        done = match.end()
    if done < len(text):
        pieces.append(text[done:])
    return tuple(pieces)


def _wildcard(match: re.Match[str], span: Span, is_left: bool) -> Wildcard:
    if match.group() == STAR:
        return Wildcard(STAR)
    name, offset = match.group(1), match.group(2) or "0"
    if len(offset) > _MAX_DIGITS:
        raise Problem("this number is too long", span)
    if name == _PREVIOUS_LAYER:
        if match.group(2):
            raise Problem(f"${_PREVIOUS_LAYER} takes no number; write $LAYER_ID{offset}", span)
        return Wildcard("LAYER_ID", 0 if is_left else -1)
    if not name.isupper():
        raise Problem("a placeholder is written in capitals, such as $LAYER_ID", span)
    return Wildcard(name, int(offset))


# ---------------------------------------------------------------------------------------------
# Parsing
# ---------------------------------------------------------------------------------------------


def parse(text: str, first: int = 1) -> list[Statement]:
    """The statements of a text, numbered from `first`."""
    statements: list[Statement] = []
    try:
        parser = _Parser(text)
        while parser.token.kind != "end":
            statements.append(parser.statement(first + len(statements)))
    except Problem as problem:
        span = problem.span or Span(0, len(text))
        raise text_error(str(problem), first + len(statements), text, span) from None
    return statements


class _Parser:
    """Walks the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.position = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def fail_here(self, expected: str) -> NoReturn:
        token = self.token
        found = f"found {token.text!r}" if token.kind != "end" else "the text ends"
        raise Problem(f"expected {expected}, {found}", token.span)

    def take(self, kind: str, text: str | None = None) -> Token | None:
        """The next token if it is of this kind (and text), which is then behind us."""
        token = self.token
        if token.kind != kind or (text is not None and token.text != text):
            return None
        self.position += 1
        return token

    def need(self, kind: str, expected: str, text: str | None = None) -> Token:
        token = self.take(kind, text)
        if token is None:
            self.fail_here(expected)
        return token

    def span_from(self, start: Token) -> Span:
        """From a token to the last one that is behind us."""
        return Span(start.span.start, self.tokens[self.position - 1].span.stop)

    def statement(self, number: int) -> Statement:
        start = self.token
        left = [self.name("a name", is_left=True)]
        while self.take("mark", ","):
            left.append(self.name("a name after the comma", is_left=True))
        if self.token.text == "=":
            self.fail_here("'->' (if this is an attribute, a comma is missing before it)")
        self.need("arrow", "',' or '->'")
        right = [self.name("a name right of the arrow", is_left=False)]
        attributes: dict[str, Attribute] = {}
        while self.take("mark", ","):
            attribute = self.attribute()
            if attribute is None and attributes:
                self.fail_here("an attribute (names come before attributes)")
            if attribute is None:
                right.append(self.name("a name or an attribute after the comma", is_left=False))
            elif attribute.name in attributes:
                raise Problem(f"{attribute.name} is given twice", attribute.span)
            else:
                attributes[attribute.name] = attribute
        return statement_of(number, self.text, self.span_from(start), (left, right), attributes)

    def attribute(self) -> Attribute | None:
        token = self.token
        if token.kind != "name":
            return None
        following = self.tokens[self.position + 1]
        if following.kind == "mark" and following.text == "=":
            self.position += 2
            value = self.value()
            return Attribute(token.text, value, self.span_from(token))
        if token.text not in _FLAGS:
            return None
        self.position += 1
        return Attribute(token.text, True, token.span)

    def value(self) -> AttributeValue:
        token = self.token
        if self.take("mark", "["):
            numbers = self.integers()
            self.need("mark", "a whole number or ']'", "]")
            return numbers
        if token.kind not in {"string", "number", "name"}:
            self.fail_here("a value")
        self.position += 1
        if token.kind == "string":
            return token.text[1:-1]
        if token.kind == "number" or token.text.isdigit():
            return _integer(token)
        return token.text

    def integers(self) -> tuple[int, ...]:
        numbers: list[int] = []
        while (token := self.token).kind == "number" or token.text.isdigit():
            self.position += 1
            numbers.append(_integer(token))
            if not self.take("mark", ","):
                break
        return tuple(numbers)

    def name(self, expected: str, *, is_left: bool) -> Name:
        token = self.take("name") or self.take("string")
        if token is None:
            self.fail_here(expected)
        quoted = token.kind == "string"
        if not quoted and token.text.isdigit():
            raise Problem("a name of digits alone must be quoted", token.span)
        if quoted and len(token.text) == 2:
            raise Problem("a name cannot be empty", token.span)
        array = self.array_bounds() if self.take("mark", "[") else None
        transposed = self.take("transpose")
        if transposed and not is_left:
            raise Problem(
                "^T stands left of the arrow only; transpose in a statement of its own after this",
                transposed.span,
            )
        span = self.span_from(token)
        if quoted:
            pieces: Pieces = (token.text[1:-1],)
        else:
            pieces = pieces_of(token.text, token.span.start, is_left=is_left)
        return Name(pieces, span, array, transposed is not None, quoted)

    def array_bounds(self) -> tuple[int, int]:
        start = self.whole_number()
        self.need("mark", "':'", ":")
        stop = self.whole_number()
        span = self.span_from(start)
        self.need("mark", "']'", "]")
        bounds = _integer(start), _integer(stop)
        if bounds[0] >= bounds[1]:
            raise Problem(f"[{start.text}:{stop.text}] is empty", span)
        return bounds

    def whole_number(self) -> Token:
        if not self.token.text.isdigit():
            self.fail_here("a whole number")
        return self.need("name", "a whole number")


def _integer(token: Token) -> int:
    if len(token.text) > _MAX_DIGITS:
        raise Problem("this number is too long", token.span)
    return int(token.text)
