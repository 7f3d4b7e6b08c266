"""The option `--transform`: statements or renames, as text or in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from remesh.errors import StateError
from remesh.transform import Transform

_Command = TypeVar("_Command", bound=Callable[..., Any])


def transform_option(what: str) -> Callable[[_Command], _Command]:
    """The option, with what its help begins with."""
    return click.option(
        "--transform",
        metavar="FILE|TEXT",
        callback=lambda _ctx, _parameter, text: None if text is None else read_transform(text),
        help=f"{what}: statements (docs/transform.md); or, in JSON, old names or prefixes to new "
        "ones or null.",
    )


def read_transform(text: str) -> Transform:
    """The transformation in a text, or in the file that it names."""
    where, is_renames = "--transform", text.lstrip().startswith("{")
    if not is_renames and "->" not in text:
        where, is_renames = text, text.endswith(".json")
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise StateError(
                f"{where}: no statement such as 'a -> b', no renames such as "
                f'\'{{"model.": ""}}\'\nThere is no file with them: {error}'
            ) from error
    return Transform(json_object(text, where) if is_renames else text)


def json_object(text: str | bytes, where: str) -> Mapping[str, object]:
    """The object in a text of JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StateError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise StateError(f"{where}: must hold a JSON object, not {type(found).__name__}")
    return found
