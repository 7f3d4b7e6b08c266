"""Whether there is room for what the ranks of a save are going to write."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

from remesh._repr import format_bytes
from remesh.core.geometry import IntArray
from remesh.errors import NoSpaceError
from remesh.storage import FileSystemSpace


def check_space(spaces: Sequence[FileSystemSpace | None], num_bytes: IntArray, url: str) -> None:
    """Check that there is room for all files that share a file system; in rank order."""
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for space, size in zip(spaces, num_bytes.tolist(), strict=True):
        if space is not None:
            needed[space.identity] += size
            free[space.identity] = min(space.free_bytes, free.get(space.identity, space.free_bytes))
    for identity, size in needed.items():
        if size > free[identity]:
            existing = next(one.existing for one in spaces if one and one.identity == identity)
            raise NoSpaceError(
                f"{url}: the state needs {format_bytes(size)}, {format_bytes(free[identity])} are "
                "free there\n"
                f"Nothing was written. {_space_advice(url, existing)}"
            )


def _space_advice(url: str, existing: str) -> str:
    """Advice where there is too little room; a directory that is missing may be a mount."""
    missing = os.path.relpath(url, existing).split("/") if existing else []
    if len(missing) > 1:
        return (
            f"{existing}/{missing[0]} does not exist: if it is a mount point, mount it; otherwise "
            f"free some space in {existing}, or save elsewhere."
        )
    return "Free some space, or save elsewhere."
