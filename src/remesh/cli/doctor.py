"""`remesh doctor`: what is installed, and whether a place is fit for checkpoints; without torch."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import asdict

import click

from remesh import __version__
from remesh._repr import format_bytes
from remesh.cli import output
from remesh.core.host_memory import available_memory
from remesh.errors import RemeshError
from remesh.storage import open_storage, shown_url
from remesh.storage.checks import PlaceCheck, check_place

_PACKAGES = {
    "numpy": "",
    "torch": "training jobs and remesh run; pip install 'remesh[torch]'",
    "obstore": "s3://, gs:// and az:// URLs; pip install 'remesh[s3]'",
    "zstandard": "saves with compress=; pip install 'remesh[compress]'",
    "aiohttp": "remesh run and remesh master; pip install 'remesh[elastic]'",
    "prometheus-client": "the metrics of the master; pip install 'remesh[elastic]'",
    "kopf": "remesh operator; pip install 'remesh[kubernetes]'",
    "lightkube": "remesh operator; pip install 'remesh[kubernetes]'",
}
"""Distribution → what is missing without it."""


@click.command(epilog=output.example("remesh doctor", "remesh doctor /mnt/runs"))
@click.argument("place", metavar="[DIR]", required=False)
@output.json_option
@click.pass_context
def doctor(ctx: click.Context, *, place: str | None, as_json: bool) -> None:
    """Show what is installed here, and try out DIR as a place for checkpoints.

    DIR is a directory or URL. Small files are written there, made durable, replaced, linked and
    removed. The exit code is 1 if checkpoints are not safe there, else 0.
    """
    checks: list[PlaceCheck] = []
    if place is not None:
        try:
            checks += check_place(open_storage(place))
        except RemeshError as error:
            checks.append(PlaceCheck("write and read", "bad", str(error)))
    if as_json:
        output.print_json(
            {
                "kind": "doctor",
                "versions": _versions(),
                "place": None if place is None else shown_url(place),
                "trials": [asdict(check) for check in checks],
            }
        )
    else:
        _print(place, checks)
    if any(check.status == "bad" for check in checks):
        ctx.exit(output.EXIT_DAMAGED)


def _versions() -> dict[str, str]:
    """Versions of remesh, Python and of all packages that it may use; empty if not installed."""
    found = {"remesh": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _print(place: str | None, checks: Sequence[PlaceCheck]) -> None:
    output.line("installed", style="bold")
    versions = _versions()
    facts = [
        (name, version or f"not installed: needed for {_PACKAGES[name]}")
        for name, version in versions.items()
    ]
    memory = available_memory()
    facts += [
        ("system", platform.platform()),
        ("free memory", "unknown" if memory is None else format_bytes(memory)),
    ]
    output.print_facts(facts)
    if place is None:
        output.line("", "remesh doctor DIR tries out a place for checkpoints.")
        return
    output.line("", shown_url(place), style="bold")
    output.print_table(
        ("<result", "<tried", "<seen"),
        checks,
        lambda check: (check.status, check.name, check.detail),
        indent="  ",
    )
