"""`remesh doctor`: what is installed, and whether a place is fit for checkpoints; without torch.

A few small files are made in the place, and removed. Whether all ranks of a job reach the same one,
each save finds out (`remesh.checkpoint.sharing`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
import numpy as np

from remesh import __version__
from remesh._repr import format_bytes
from remesh.cli import output
from remesh.core.host_memory import available_memory
from remesh.errors import CheckpointExistsError, RemeshError
from remesh.storage import Storage, is_local, open_storage, shown_url
from remesh.storage.local import IN_MEMORY, mount_of, open_direct

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

_FOLDER = ".remesh-doctor"


@dataclass(frozen=True, slots=True)
class PlaceCheck:
    """The result of one check."""

    name: str  # what was checked
    status: Literal["good", "slow", "bad"]
    """`good`; `slow`, if remesh works around it; `bad`, if saves there are not safe."""
    detail: str  # what was seen, and what follows


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


def check_place(storage: Storage) -> list[PlaceCheck]:
    """Check a place with small files, which are removed, with the directories made for them."""
    folder = f"{_FOLDER}-{secrets.token_hex(4)}"
    root = Path(storage.url) if is_local(storage) else None
    made = [] if root is None else [each for each in (root, *root.parents) if not each.exists()]
    try:
        return list(_checks(storage, folder))
    finally:
        storage.delete_many(storage.list(f"{folder}/"))
        with contextlib.suppress(OSError):  # they were not made, or others use them now
            for directory in made:
                directory.rmdir()


def _result(name: str, is_good: bool, good: str, bad: str) -> PlaceCheck:
    return PlaceCheck(name, "good" if is_good else "bad", good if is_good else bad)


def _checks(storage: Storage, folder: str) -> Iterator[PlaceCheck]:
    path, data = f"{folder}/file", np.arange(3 * 4096 + 5, dtype=np.uint8)
    began = time.monotonic()
    writer = storage.create(path, data.size)
    try:
        writer.write(0, data)
        writer.finish()
    finally:
        writer.abort()
    storage.sync()
    good = f"a small file is written and synced after {time.monotonic() - began:.3f} s"
    is_there = storage.read(path) == data.tobytes() and path in storage.list(path)
    bad = "a file that was just written reads differently"
    yield _result("write and read", is_there, good, bad)

    storage.put(f"{folder}/one", b"first", overwrite=False)
    is_refused = False
    try:
        storage.put(f"{folder}/one", b"second", overwrite=False)
    except CheckpointExistsError:
        is_refused = True
    bad = "two writers of one file both succeed: let one job at a time save to a directory"
    good = "the second writer of a file is refused"
    yield _result("exclusive creation", is_refused, good, bad)

    for content in (b"old", b"new"):
        storage.put(f"{folder}/two", content, overwrite=True)
    is_new = storage.read(f"{folder}/two") == b"new"
    bad = "a file that was just replaced reads as before"
    yield _result("atomic replacement", is_new, "a file is replaced in one step", bad)

    if is_local(storage):
        yield from _checks_of_file_system(Path(storage.url) / folder)
    space = storage.space()
    free = "no limit is known" if space is None else f"{space.free_bytes / 1e9:.1f} GB are free"
    yield PlaceCheck("room", "good", free)


def _checks_of_file_system(directory: Path) -> Iterator[PlaceCheck]:
    """Check what only a file system has."""
    file = directory / "file"
    kind, _source = mount_of(directory.stat().st_dev)
    if kind in IN_MEMORY:
        text = f"{kind} is memory: a restart of the machine loses what is saved here; use a disk"
        yield PlaceCheck("durability", "bad", text)
    try:
        os.link(file, directory / "link")
    except (OSError, AttributeError) as error:
        yield PlaceCheck("hard links", "slow", f"none ({error}); marker files take their place")
    else:
        yield PlaceCheck("hard links", "good", "commit records are created with them")
    descriptor = open_direct(file, os.O_RDONLY)
    if descriptor is None:
        text = "O_DIRECT is refused: bytes pass through the page cache"
        yield PlaceCheck("direct I/O", "slow", text)
    else:
        os.close(descriptor)
        text = "O_DIRECT works: saves do not fill the page cache"
        yield PlaceCheck("direct I/O", "good", text)
