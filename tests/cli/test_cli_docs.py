"""The pages about commands: every command is shown, and what is shown is so."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

import remesh
from remesh.cli import cli

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text()
UPDATE = runpy.run_path(str(DOCS / "update_cli.py"))
RUNBOOK = "how-to/broken-checkpoint.md"
COMMANDS = cli.list_commands(click.Context(cli))
[TORCH] = re.findall(r"^torch==(.*)", (DOCS.parent / "constraints.txt").read_text(), re.MULTILINE)
"""With its options of torchrun the page is made."""


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="argparse of Python 3.13 lists the options of torchrun anew"
)
@pytest.mark.skipif(
    not version("torch").startswith(TORCH), reason="torchrun of another torch has other options"
)
@pytest.mark.parametrize("name", UPDATE["PAGES"])
def test_outputs_are_current(name: str) -> None:
    page = (DOCS / name).read_text()

    assert UPDATE["updated"](name) == page, f"{name} is out of date; run python docs/update_cli.py"


@pytest.mark.parametrize("what", [r"## remesh (\S+)", r"\$ remesh (\S+) --help"])
def test_the_page_has_a_section_with_the_help_of_each_command_and_no_other(what: str) -> None:
    assert set(re.findall(rf"^{what}$", PAGE, re.MULTILINE)) == set(COMMANDS)


def test_the_runbook_leads_to_checkpoints_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replaced = UPDATE["save_broken"](tmp_path)
    embed = np.arange(48, dtype=np.float32).reshape(8, 6) / 8 - 3
    for command in re.findall(r"\$ remesh (repair \S+ --to .*)", (DOCS / RUNBOOK).read_text()):
        _, path, _, target, *_ = command.split()
        done = CliRunner().invoke(cli, command.split())
        report = json.loads(
            CliRunner().invoke(cli, f"repair {path} --dry-run --json".split()).stdout
        )
        assert done.exit_code == (0 if report["is_complete"] else 1), (command, done.output)

        checkpoint = remesh.Checkpoint(target)
        assert checkpoint.verify().ok, command
        rows = np.full((8, 6), -1, np.float32)
        state: dict[str, Any] = {
            "model": {
                "embed": remesh.ShardedTensor.from_rank_offsets("model.embed.weight", rows),
                "norm": {"weight": np.zeros(6, np.float16)},
            },
            "step": 0,
        }
        remesh.load(state, target, missing="keep", unexpected="ignore")
        assert (state["model"]["norm"]["weight"] == 1).all(), command
        is_lost = "model.embed.weight" in {tensor["name"] for tensor in report["lost"]}
        kept = np.full((8, 6), -1, np.float32) if is_lost else embed
        np.testing.assert_array_equal(rows, kept)
        assert state["step"] == (0 if path.startswith("lost-values") else 1000), command
    assert len(replaced) == 10


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_every_help_ends_with_an_example_and_says_something_of_each_option(
    name: str | None,
) -> None:
    context = click.Context(cli, info_name="remesh")
    command = cli if name is None else cli.get_command(context, name)
    assert command is not None
    help_text = command.get_help(click.Context(command, info_name=name or "remesh"))

    _, found, example = help_text.partition("\n  Example:\n")

    assert found
    assert re.fullmatch(r"(    remesh \S.*\n?)+", example)
    assert "\\b" not in help_text
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert [one.name for one in options if not one.help] == []
