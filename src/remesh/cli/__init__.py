"""The command line `remesh`.

A command lives in a module of its family and is imported when it is called for, so that looking at
a checkpoint loads neither torch nor the demo. Whatever goes wrong ends here: an error of remesh
becomes one line on stderr and an exit code, any other exception is a fault of remesh, which says so
and asks for a report, and Ctrl-C and a closed output end quietly.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import traceback
from typing import Any

import click

from remesh import __version__
from remesh.cli.output import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    EXIT_USAGE,
    example,
    exit_code_of,
    print_error,
)
from remesh.errors import RemeshError

_HOMES = {
    "ls": "remesh.cli.ls",
    "show": "remesh.cli.show",
    "verify": "remesh.cli.verify",
    "diff": "remesh.cli.diff",
    "convert": "remesh.cli.convert",
    "doctor": "remesh.cli.doctor",
    "repair": "remesh.cli.repairing",
    "latest": "remesh.cli.pruning",
    "pin": "remesh.cli.pruning",
    "unpin": "remesh.cli.pruning",
    "prune": "remesh.cli.pruning",
    "demo": "remesh.cli.demo",
    "run": "remesh.cli.run",
    "check": "remesh.cli.run",
    "master": "remesh.cli.master",
    "status": "remesh.cli.master",
    "node": "remesh.cli.master",
    "manifests": "remesh.cli.kubernetes",
    "operator": "remesh.cli.kubernetes",
}
"""The module of each command; the command has the same name there."""


class _Commands(click.Group):
    """The commands of the table above, and the one place where errors end."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_HOMES)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in _HOMES:
            return None
        command = getattr(importlib.import_module(_HOMES[cmd_name]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RemeshError as error:
            if ctx.params["debug"]:
                traceback.print_exception(error)
            print_error(str(error))
            ctx.exit(exit_code_of(error))
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except (click.UsageError, click.Abort, click.exceptions.Exit):
            raise
        except click.ClickException as error:
            error.show()
            ctx.exit(EXIT_USAGE)  # 1, click's own, is that of damage
        except Exception as error:  # noqa: BLE001 - Python's own end has the code of damage
            is_pipe = isinstance(error, OSError) and error.errno == errno.EPIPE
            if is_pipe or isinstance(error, BrokenPipeError):
                _forget_output()
                ctx.exit(EXIT_PIPE)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                print_error("the output cannot be written: the disk that it goes to is full")
                _forget_output()
                ctx.exit(EXIT_USAGE)
            traceback.print_exception(error)
            print_error(
                f"a fault of remesh, not of what it was given ({type(error).__name__}: {error}). "
                "Please report it with the lines above."
            )
            ctx.exit(EXIT_FAULT)


def _forget_output() -> None:
    """Discard what is still buffered, so that the interpreter does not complain when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


@click.command(
    cls=_Commands,
    name="remesh",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 80,
        "show_default": True,
    },
    epilog=example("remesh ls runs/step_00001000"),
)
@click.version_option(__version__, message="remesh %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(*, debug: bool) -> None:
    """Look at checkpoints of training jobs, check, convert and repair them, and tidy up.

    Results go to stdout, progress and errors to stderr. Exit codes: 0 all is well; 1 a checkpoint
    is damaged; 2 wrong usage, nothing there, or it cannot be read; 70 a fault
    of remesh itself.
    """
    # `_Commands.invoke` reads `debug`.


def main() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        # A stored name may hold what the terminal's encoding has no character for.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="remesh")
