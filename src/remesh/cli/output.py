"""The output of all commands, and the codes with which they end.

Results go to stdout, progress and errors to stderr. A table puts its names in the last column, as
`ls -l` does, so a name of any length is never cut, and a long one breaks no other column. Text that
comes out of a checkpoint is printed with its control characters escaped.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import pprint
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

import click
import numpy as np
from rich.console import Console

from remesh.core.values import UnresolvedValue
from remesh.errors import (
    CorruptCheckpointError,
    CoverageError,
    MismatchError,
    RemeshError,
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
"""The option that all commands have."""

_Item = TypeVar("_Item")

all_option = click.option("--all", "show_all", is_flag=True, help="Do not cut long lists.")
"""The option of commands whose lists may be long; JSON is always complete."""

MAX_ROWS = 500
"""Rows of a table that are printed without `--all`."""
MAX_NAMES = 8
"""Names in a cell or a sentence that are printed without `--all`."""
_TOO_LONG = 10**4300
"""Python neither prints nor reads the decimal digits of such integers."""

EXIT_DAMAGED = 1
EXIT_DIFFERENT = 1
"""The sides of `diff` differ."""
EXIT_USAGE = 2
EXIT_FAULT = 70
"""An exception that remesh does not raise on purpose: a fault of its own."""
EXIT_INTERRUPTED = 130
"""A shell's code for a process that Ctrl-C ended."""
EXIT_PIPE = 141
"""A shell's code for a process whose output was closed."""


def exit_code_of(error: RemeshError) -> int:
    """The exit code that an error means."""
    if isinstance(error, CorruptCheckpointError | CoverageError | MismatchError):
        return EXIT_DAMAGED
    return EXIT_USAGE


def print_error(message: str) -> None:
    """Print an error on one line of stderr; where, and what to do, on lines below it."""
    first, *others = map(printable, message.splitlines() or [""])
    click.echo(f"{click.style('error:', fg='red', bold=True)} {first}", err=True)
    for line in others:
        click.echo(line if line.startswith("  ") else f"  {line}", err=True)


def example(*lines: str) -> str:
    """The end of a command's help: commands to try, which click must not join into a paragraph."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


@contextmanager
def needs(command: str, extra: str) -> Iterator[None]:
    """Name the extra that installs what the imports of a command do not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{command} needs {error.name}: pip install 'remesh[{extra}]'"
        raise click.ClickException(text) from error


class Number(click.FloatRange):
    """A number of a range, as an option; click takes NaN for one of any range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not finite.", param, ctx)
        return found


# ---------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Text with control characters escaped, since a checkpoint may come from anywhere."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def format_shape(shape: Sequence[int]) -> str:
    """A shape as torch prints it: `[4096, 512]`."""
    return f"[{', '.join(map(str, shape))}]"


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str], *, show_all: bool) -> str:
    """Names with commas between them, the first few of many."""
    shown = names if show_all else names[:MAX_NAMES]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def format_count(count: int) -> str:
    """A count with three digits and a unit, as parameters are counted: `1.24 G`; exact if short."""
    if count < 10_000:
        return str(count)
    size, unit = float(count), ""
    for unit in ("k", "M", "G", "T", "P"):  # noqa: B007 - read after the loop
        size /= 1000
        if size < 999.5:
            break
    return f"{size:.3g} {unit}"


def format_time(created: str) -> str:
    """The time of a commit record, for people."""
    return created.replace("T", " ").replace("+00:00", " UTC")


def format_value(value: object, write: Callable[[object], str] = repr) -> str:
    """A stored value in Python's notation, as `write` writes it."""
    try:
        return write(value)
    except ValueError:  # of an integer that is too long
        return write(json_value(value))


laid_out = functools.partial(pprint.pformat, sort_dicts=False)
"""For `format_value`: in lines."""


def cut(text: str, length: int = 60) -> str:
    """A text, cut after `length` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def type_name(value: object) -> str:
    """The name of the type of a stored value."""
    return value.type_name if isinstance(value, UnresolvedValue) else type(value).__name__


# ---------------------------------------------------------------------------------------------
# JSON
# ---------------------------------------------------------------------------------------------


def json_value(value: object) -> object:
    """A value as what JSON knows.

    Sequences and sets become lists, keys become text, bytes hex digits, complex numbers pairs;
    NaN and infinities become the strings "nan", "inf" and "-inf", integers of more than
    4300 digits hex text; anything else its text.
    """
    match value:
        case int() if abs(value) >= _TOO_LONG:
            return hex(value)
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case complex():
            return [json_value(value.real), json_value(value.imag)]
        case bytes():
            return value.hex()
        case np.inexact() if value.dtype.char in "gG":
            pass  # long doubles: Python has no such numbers
        case np.generic() | np.ndarray():
            return json_value(value.tolist())
        case Mapping():
            keys = {format_value(key, str) for key in value}
            text = str if len(keys) == len(value) else repr  # as 1 and "1" have one text
            return {format_value(key, text): json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [json_value(item) for item in value]
        case set() | frozenset():
            return [json_value(item) for item in sorted(value, key=format_value)]
        case UnresolvedValue():
            return json_value(value.payload)
        case argparse.Namespace() | types.SimpleNamespace():
            return json_value(vars(value))
    return str(value)


def print_json(document: Mapping[str, object]) -> None:
    """A JSON document on stdout, in ASCII, so that it is valid in any encoding."""
    click.echo(_laid_out(json_value(document), ""))


def _laid_out(value: object, indent: str) -> str:
    """JSON text with a line for each item, except that lists of plain items, as shapes, are one."""
    inner = f"{indent}  "
    if isinstance(value, dict) and value:
        items = [
            f"{inner}{json.dumps(key)}: {_laid_out(item, inner)}" for key, item in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = [f"{inner}{_laid_out(item, inner)}" for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


# ---------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------


class _Console(Console):
    """A console that leaves a broken pipe to us; rich would end with the code of damage."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@functools.lru_cache(maxsize=1)
def _console(stream: TextIO) -> Console:
    """The console for results: it never wraps or cuts a line, and has colours on terminals only."""
    return _Console(file=stream, soft_wrap=True, highlight=False, markup=False, emoji=False)


def line(*texts: str, style: str | None = None) -> None:
    """Print results, a line each, with control characters escaped; `style` is one of rich."""
    _console(sys.stdout).out("\n".join(map(printable, texts)), style=style)


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], indent: str = ""
) -> list[str]:
    """The lines of a table; each title follows `<` or `>`, the side to which it is aligned."""
    cells = [[column[1:] for column in columns], *(list(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if column[0] == ">" else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        for row in cells
    ]
    return [f"{indent}{line}".rstrip() for line in aligned]


def print_table(
    columns: Sequence[str],
    items: Sequence[_Item],
    row: Callable[[_Item], Sequence[str]],
    *,
    indent: str = "",
    show_all: bool = True,
    style: Callable[[_Item], str | None] = lambda _: None,
) -> None:
    """Print a table of items, the titles in bold."""
    shown = items if show_all else items[:MAX_ROWS]
    titles, *lines = table_lines(columns, [row(item) for item in shown], indent)
    line(titles, style="bold")
    printed = zip(shown, lines, strict=True)
    for each, alike in itertools.groupby(printed, lambda one: style(one[0])):
        line(*(own for _, own in alike), style=each)
    _print_rest(len(items), show_all=show_all)


def print_list(texts: Sequence[str], *, show_all: bool) -> None:
    """Print texts, a line each, the first of many."""
    if texts:
        line(*(f"  {text}" for text in (texts if show_all else texts[:MAX_ROWS])))
    _print_rest(len(texts), show_all=show_all)


def _print_rest(num_rows: int, *, show_all: bool) -> None:
    rest = 0 if show_all else num_rows - MAX_ROWS
    if rest > 0:
        line(f"  ... and {rest} more; --all lists them")


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names of facts and what they are, a line each."""
    width = max(len(name) for name, _ in facts)
    line(*(f"  {name.ljust(width)}  {fact}" for name, fact in facts))
