"""Where a checkpoint comes from: which code, which configuration, which machine, which checkpoint.

The revision of the code is read out of the files of its git repository, so no program is started
and none needs to be installed. Whether there were uncommitted changes cannot be known that way.
"""

from __future__ import annotations

import platform
import secrets
import socket
import sys
from pathlib import Path

import numpy as np

from remesh.catalog import Provenance
from remesh.core import values
from remesh.core.integrity import hex_digest
from remesh.run_info import run_info


def new_run() -> str:
    """A name for a run: the launcher's if it has one, and something that no other run has."""
    return f"{run_info().run_id or 'run'}-{secrets.token_hex(4)}"


def provenance(config_digest: str) -> Provenance:
    """The provenance of what this process saves, but for the parent."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    if "torch" in sys.modules:
        versions["torch"] = str(sys.modules["torch"].__version__)
    return Provenance(
        revision=git_revision(_script_directory()),
        config_digest=config_digest,
        host=socket.gethostname(),
        platform=platform.platform(),
        versions=versions,
    )


def digest_of(config: object) -> str:
    """A digest of a plain value that does not depend on the order of keys."""
    return hex_digest(values.encode(_sorted(config), "config"))


def _sorted(value: object) -> object:
    if type(value) is dict:
        items = ((key, _sorted(item)) for key, item in value.items())
        return dict(sorted(items, key=lambda item: repr(item[0])))
    if type(value) in {list, tuple}:
        assert isinstance(value, list | tuple)
        return type(value)(_sorted(item) for item in value)
    return value


def _script_directory() -> Path:
    """Where the program that runs lies; the working directory if it is not in a file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path.cwd() if file is None else Path(file).absolute().parent


def git_revision(directory: Path) -> str:
    """The commit that is checked out in the git repository around a directory.

    Empty if there is no repository, no commit, or the files cannot be read (which must not prevent
    a save).
    """
    for parent in (directory, *directory.parents):
        if (parent / ".git").exists():
            try:
                return _head(_git_directory(parent / ".git"))
            except (OSError, UnicodeDecodeError):
                return ""
    return ""


def _git_directory(entry: Path) -> Path:
    """Where the repository is: `.git` itself, or where it points to (worktrees, submodules)."""
    if entry.is_dir():
        return entry
    target = entry.read_text().removeprefix("gitdir:").strip()
    return entry.parent / target


def _head(git: Path) -> str:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    common = git / "commondir"
    shared = git / common.read_text().strip() if common.exists() else git
    for place in (git, shared):
        if (place / name).is_file():
            return (place / name).read_text().strip()
    packed = shared / "packed-refs"
    for line in packed.read_text().splitlines() if packed.exists() else ():
        commit, _, packed_name = line.partition(" ")
        if packed_name == name:
            return commit
    return ""
