"""`remesh demo`: the whole story on one machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
from rich.console import Console


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Directory for checkpoints, logs and the picture; an earlier demo's is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def demo(*, out: Path, as_json: bool) -> None:
    r"""Train, kill a rank in the middle of a save, and resume in two other layouts.

    Trains a small transformer on the CPU with FSDP2 on 4 processes, kills one of them while it
    saves, and resumes from the newest committed checkpoint with FSDP2 on 2 processes and with
    tensor parallelism on 2. Takes a minute or two. The exit code is 0 if the losses after the
    resume are those of a run that nobody disturbed.

    \b
    Example:
        remesh demo --out demo-output
    """
    if importlib.util.find_spec("torch") is None:
        raise click.ClickException("the demo trains with torch: pip install 'remesh[torch]'")
    from remesh.demo import report, story

    console = Console(stderr=as_json, highlight=False)
    try:
        result = story.tell(out, console)
    except story.DemoError as error:
        raise click.ClickException(str(error)) from error
    report.show_result(console, result, out)
    if as_json:
        click.echo(result.to_json())
    if not result.passed:
        raise click.ClickException(report.verdict_text(result))
