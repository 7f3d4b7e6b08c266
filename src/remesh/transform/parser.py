"""Text to statements: tokens first, then recursive descent without backtracking.

The tokens are found by one regular expression. Its alternatives begin with different characters and
its repetitions are possessive, so a text of n characters costs time proportional to n.

::

    program    = statement*
    statement  = names "->" names ("," attribute)*
    names      = name ("," name)*
    name       = (NAME | STRING) ("[" INT ":" INT "]" | "[" label ("," label)* "]")* ["^T"]
    attribute  = FLAG | NAME "=" value
    value      = INT | NAME | STRING | "[" [INT ("," INT)*] "]"

A statement ends where no comma follows, so statements need nothing between them. On the right, a
name that is a FLAG (`fused_qkv`, `tie`, ...) and not the first is one; quote a tensor of that name.

All that can be checked without tensors is checked here: which attributes go together, how many
names an operator takes, that placeholders match, that nothing right of an arrow is transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from remesh.errors import TransformError
from remesh.transform.messages import shorten, text_error
from remesh.transform.operator_base import Attribute, AttributeValue, Problem
from remesh.transform.operators import operator_of
from remesh.transform.patterns import form_of
from remesh.transform.renames import Rename
from remesh.transform.syntax import FLAGS, NOTHING, STAR, Name, Span, Statement, Wildcard

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
_WILDCARD = re.compile(r"\*|\$([A-Za-z_][A-Za-z0-9_]*)([+-][0-9]+)?")
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.*]|\$[A-Z][A-Z0-9_]*(?:[+-][0-9]+)?)+")
_PREVIOUS_LAYER = "LAYER_ID_OFFSET"
_MAX_DIGITS = 18


Program = (
    str
    | Iterable[str]
    | Mapping[str, str]
    | Mapping[str, str | None]
    | Mapping[re.Pattern[str], str]
    | Mapping[str | re.Pattern[str], str | None]
    | Rename
)
"""A text of statements, several texts, a dict of renames, or a function from name to name."""


def parse(program: Program) -> tuple[Statement, ...]:
    """Parse a program into statements."""
    given: Any = program
    texts: list[Any]
    if isinstance(given, str):
        texts = [given]
    elif isinstance(given, Mapping):
        texts = rename_statements(given)
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        texts = list(given)
    else:
        raise TransformError(
            "a transformation is a Transform, statements as text, or a dict of renames\nThis is "
            f"of type {type(given).__name__}"
        )
    parsed: list[Statement] = []
    for text in texts:
        if not isinstance(text, str):
            raise TransformError(
                f"a list of statements holds texts; {shorten(repr(text))} is of type "
                f"{type(text).__name__}"
            )
        parsed += _Parser(text, len(parsed) + 1).program()
    return tuple(parsed)


def rename_statements(renames: Mapping[Any, Any], *, literal: bool = False) -> list[str]:
    """The statements of a dict of renames, which happen all at once.

    A name that is both old and new is first read into a temporary name, as statements run in order.
    With `literal`, no name holds placeholders, and what becomes None is deleted.
    """
    old_of: dict[str, str] = {}
    deleted = [f"{_written(old, literal)} -> _" for old in renames if literal and not renames[old]]
    renames = {old: new for old, new in renames.items() if not literal or new}
    for old, new in renames.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise TransformError(f"a dict of renames holds names, not {old!r}: {new!r}")
        if new in old_of:
            raise TransformError(f"{old_of[new]!r} and {old!r} are both renamed to {new!r}")
        old_of[new] = old
    has_wildcards = not literal and any("$" in name for pair in renames.items() for name in pair)
    forms = {_form(new) for new in old_of} if has_wildcards else set()
    wildcard_forms = {_form(new) for new in old_of if "$" in new} if has_wildcards else set()
    first, rest = [], []
    for old, new in renames.items():
        own = old_of.get(old)
        reassigned = has_wildcards and _form(old) in (forms if "$" in old else wildcard_forms)
        source = old
        if reassigned or (own is not None and own != old):
            source = f"_renamed.{old}"
            first.append(f"{_written(old, literal)} -> {_written(source, literal)}")
        rest.append(f"{_written(source, literal)} -> {_written(new, literal)}")
    return [*first, *deleted, *rest]


def _form(name: str) -> str:
    return form_of(_WILDCARD.sub("0", name))[0]


def _written(name: str, literal: bool) -> str:
    """A name of a dict of renames as statements spell it: quoted if it must be."""
    has_wildcard = literal and ("*" in name or "$" in name)
    if not has_wildcard and _PLAIN.fullmatch(name) and not name.isdigit() and name != NOTHING:
        return name
    quote = '"' if "'" in name else "'"
    if quote in name or "\n" in name:
        raise TransformError(
            f"{name!r} cannot be renamed: it holds both kinds of quotes, or a line break"
        )
    return f"{quote}{name}{quote}"


class Token(NamedTuple):
    """A piece of the text: what kind it is of, its characters, and where they are."""

    kind: str
    text: str
    start: int
    stop: int


def _tokens(text: str, number: int) -> list[Token]:
    """Cut a text into tokens, blanks and `#` comments left out, with an END token last.

    A token of digits alone is a NAME: whether it is a number depends on where it stands.
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
        span = Span(position, position + 1)
        raise text_error(_complaint(text, position), number, text, span)
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


@dataclass(slots=True)
class _Draft:
    """A statement while it is read."""

    start: int
    left: list[Name]
    right: list[Name]
    attributes: dict[str, Attribute]


class _Parser:
    """Walks the tokens of one text."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        self.tokens = _tokens(text, number)
        self.position = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def fail(self, message: str, span: Span) -> NoReturn:
        raise text_error(message, self.number, self.text, span)

    def fail_here(self, expected: str) -> NoReturn:
        token = self.token
        found = f"found {token.text!r}" if token.kind != END else "the text ends"
        self.fail(f"expected {expected}, {found}", Span(token.start, max(token.stop, 1)))

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

    def program(self) -> list[Statement]:
        statements = []
        while self.token.kind != END:
            statements.append(self.statement())
            self.number += 1
        return statements

    def statement(self) -> Statement:
        draft = _Draft(self.token.start, [], [], {})
        draft.left.append(self.name("a name", is_left=True))
        while self.take(MARK, ","):
            draft.left.append(self.name("a name after the comma", is_left=True))
        if self.token.text == "=":
            self.fail_here("'->' (if this is an attribute, a comma is missing before it)")
        self.need(ARROW, "',' or '->'")
        draft.right.append(self.name("a name right of the arrow", is_left=False))
        while self.take(MARK, ","):
            self.attribute_or_name(draft)
        return self.finish(draft)

    def attribute_or_name(self, draft: _Draft) -> None:
        token = self.token
        following = self.tokens[min(self.position + 1, len(self.tokens) - 1)]
        if token.kind == NAME and following.text == "=" and following.kind == MARK:
            self.position += 2
            value = self.value()
            stop = self.tokens[self.position - 1].stop
            attribute = Attribute(token.text, value, Span(token.start, stop))
        elif token.kind == NAME and token.text in FLAGS:
            self.position += 1
            attribute = Attribute(token.text, True, Span(token.start, token.stop))
        elif draft.attributes:
            self.fail_here("an attribute (names come before attributes)")
        else:
            draft.right.append(self.name("a name or an attribute after the comma", is_left=False))
            return
        if attribute.name in draft.attributes:
            self.fail(f"{attribute.name} is given twice", attribute.span)
        draft.attributes[attribute.name] = attribute

    def value(self) -> AttributeValue:
        token = self.token
        if self.take(MARK, "["):
            numbers = self.integers("']'")
            self.need(MARK, "',' or ']'", "]")
            return numbers
        if token.kind not in {STRING, NUMBER, NAME}:
            self.fail_here("a value")
        self.position += 1
        if token.kind == STRING:
            return token.text[1:-1]
        if token.kind == NUMBER or token.text.isdigit():
            return self.integer(token)
        return token.text

    def integers(self, closing: str) -> tuple[int, ...]:
        numbers: list[int] = []
        while (token := self.token).kind == NUMBER or token.text.isdigit():
            self.position += 1
            numbers.append(self.integer(token))
            if not self.take(MARK, ","):
                break
        if self.token.text != "]":
            self.fail_here(f"a whole number or {closing}")
        return tuple(numbers)

    def integer(self, token: Token) -> int:
        if len(token.text) > _MAX_DIGITS:
            self.fail("this number is too long", Span(token.start, token.stop))
        return int(token.text)

    def name(self, expected: str, *, is_left: bool) -> Name:
        token = self.take(NAME) or self.take(STRING)
        if token is None:
            self.fail_here(expected)
        span = Span(token.start, token.stop)
        quoted = token.kind == STRING
        if not quoted and token.text.isdigit():
            self.fail("a name of digits alone must be quoted", span)
        if quoted and len(token.text) == 2:
            self.fail("a name cannot be empty", span)
        array, axes = None, None
        while self.take(MARK, "["):
            if self.tokens[self.position].text.isdigit() and array is None:
                array = self.array_bounds()
            elif axes is None:
                axes = self.labels()
            else:
                self.fail_here("'^T' or ','")
        transposed = self.take(TRANSPOSE)
        span = Span(token.start, self.tokens[self.position - 1].stop)
        if transposed and not is_left:
            self.fail(
                "^T stands left of the arrow only; transpose in a statement of its own after this",
                Span(transposed.start, transposed.stop),
            )
        pieces = (token.text[1:-1],) if quoted else self.pieces(token, is_left)
        return Name(pieces, span, array, axes, transposed is not None, quoted)

    def array_bounds(self) -> tuple[int, int]:
        start = self.need(NAME, "a whole number")
        self.need(MARK, "':'", ":")
        stop = self.need(NAME, "a whole number")
        span = Span(start.start, stop.stop)
        self.need(MARK, "']'", "]")
        if not stop.text.isdigit():
            self.fail("expected a whole number", Span(stop.start, stop.stop))
        bounds = self.integer(start), self.integer(stop)
        if bounds[0] >= bounds[1]:
            self.fail(f"[{start.text}:{stop.text}] is empty", span)
        return bounds

    def labels(self) -> tuple[str, ...]:
        labels = [self.need(NAME, "the label of an axis, or bounds such as 0:8").text]
        while self.take(MARK, ","):
            labels.append(self.need(NAME, "the label of an axis").text)
        closing = self.need(MARK, "',' or ']'", "]")
        if len(set(labels)) < len(labels):
            span = Span(closing.start, closing.stop)
            self.fail(f"two axes have the same label in [{', '.join(labels)}]", span)
        return tuple(labels)

    def pieces(self, token: Token, is_left: bool) -> tuple[str | Wildcard, ...]:
        text = token.text
        if "*" not in text and "$" not in text:
            return (text,)
        pieces: list[str | Wildcard] = []
        done = 0
        for match in _WILDCARD.finditer(text):
            if done < match.start():
                pieces.append(text[done : match.start()])
            before = pieces[-1] if pieces else ""
            after = text[match.end() : match.end() + 1]
            if isinstance(before, Wildcard) or before[-1:].isdigit() or after.isdigit():
                span = Span(token.start + match.start(), token.start + match.end())
                self.fail("a wildcard needs something other than a digit on either side", span)
            pieces.append(self.wildcard(match, token, is_left))
            done = match.end()
        if done < len(text):
            pieces.append(text[done:])
        return tuple(pieces)

    def wildcard(self, match: re.Match[str], token: Token, is_left: bool) -> Wildcard:
        if match.group() == STAR:
            return Wildcard(STAR)
        span = Span(token.start + match.start(), token.start + match.end())
        name, offset = match.group(1), match.group(2) or "0"
        if len(offset) > _MAX_DIGITS:
            self.fail("this number is too long", span)
        if name == _PREVIOUS_LAYER:
            if match.group(2):
                self.fail(f"${_PREVIOUS_LAYER} takes no number; write $LAYER_ID{offset}", span)
            return Wildcard("LAYER_ID", 0 if is_left else -1)
        if not name.isupper():
            self.fail("a placeholder is written in capitals, such as $LAYER_ID", span)
        return Wildcard(name, int(offset))

    def finish(self, draft: _Draft) -> Statement:
        """Check a statement as a whole and find its operator."""
        stop = self.tokens[self.position - 1].stop
        span = Span(draft.start, stop)
        self.check_nothing(draft.left, "left")
        self.check_nothing(draft.right, "right")
        if draft.left[0].is_nothing and draft.right[0].is_nothing:
            self.fail("_ on both sides does nothing", span)
        self.check_placeholders([*draft.left, *draft.right])
        try:
            operator, operator_span = operator_of(draft.left, draft.right, draft.attributes)
        except Problem as problem:
            self.fail(str(problem), problem.span or span)
        return Statement(
            self.number,
            self.text,
            span,
            tuple(draft.left),
            tuple(draft.right),
            operator,
            operator_span or span,
        )

    def check_nothing(self, names: Sequence[Name], side: str) -> None:
        for name in names:
            if not name.is_nothing:
                continue
            if len(names) > 1:
                self.fail(f"_ must stand alone on the {side}", name.span)
            if name.transposed or name.axes:
                self.fail("_ is no tensor, so it has no axes", name.span)

    def check_placeholders(self, names: Sequence[Name]) -> None:
        """Every name must carry the same placeholders, or one would be repeated or lost."""
        tensors = [name for name in names if not name.is_nothing]
        wanted = frozenset[str]().union(*(name.placeholders for name in tensors))
        for name in tensors:
            lacking = sorted(wanted - name.placeholders)
            if lacking:
                self.fail(f"this name lacks ${lacking[0]}, which others have", name.span)
