"""`remesh demo`: the whole story on one machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
from rich.console import Console

from remesh.cli.output import example, print_error

EXIT_FAILED = 1
"""Something is not as the demo promises."""


@click.command(epilog=example("remesh demo --out demo-output"))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-output"),
    help="Directory for checkpoints, logs and the picture; an earlier demo's is replaced.",
)
def demo(*, out: Path) -> None:
    """Train, kill a rank in the middle of a save, and resume in two other layouts.

    Trains a small transformer on the CPU with FSDP2 on 4 processes, kills one of them while it
    saves, and resumes from the newest committed checkpoint with FSDP2 on 2 processes and with
    tensor parallelism on 2. At last a rank is killed under `remesh run`, and the others go on.
    Takes a minute or two. The exit code is 0 if all losses are those of an
    undisturbed run, 1 if not, 2 if the directory cannot be used.
    """
    if not all(importlib.util.find_spec(name) for name in ("torch", "aiohttp")):
        raise click.ClickException(
            "the demo trains with torch under `remesh run`: pip install 'remesh[torch,elastic]'"
        )
    from remesh.demo import story

    console = Console(highlight=False)
    context = click.get_current_context()
    try:
        result = story.tell(out, console)
    except story.DemoError as error:
        print_error(str(error))
        context.exit(EXIT_FAILED)
    story.show_result(console, result, out)
    if not result.passed:
        context.exit(EXIT_FAILED)
