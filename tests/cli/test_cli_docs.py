"""docs/cli.md shows every command, and what it shows is so."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import click
import pytest

from remesh.cli import cli

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text()
COMMANDS = cli.list_commands(click.Context(cli))


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="argparse of Python 3.13 lists the options of torchrun anew"
)
def test_outputs_are_current() -> None:
    updated = runpy.run_path(str(DOCS / "update_cli.py"))["updated"](PAGE)

    assert updated == PAGE, "docs/cli.md is out of date; run python docs/update_cli.py"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    assert f"\n## remesh {name}\n" in PAGE
    assert f"$ remesh {name} --help\nUsage: remesh {name} " in PAGE


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_every_help_ends_with_an_example(name: str | None) -> None:
    context = click.Context(cli, info_name="remesh")
    command = cli if name is None else cli.get_command(context, name)
    assert command is not None
    help_text = command.get_help(click.Context(command, info_name=name or "remesh"))

    _, found, example = help_text.partition("\n  Example:\n")

    assert found
    assert re.fullmatch(r"(    remesh \S.*\n?)+", example)
    assert "\\b" not in help_text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
