"""The names of files in a storage: relative paths that stay below its root.

Such paths come out of checkpoint files, which any program may have written, so each is checked
before it is used. A path has components that are not empty and not `.` or `..`, joined by forward
slashes; that alone keeps it below the root.
"""

from __future__ import annotations

from remesh.errors import StorageError

HIDDEN = ".remesh-put-"
"""How the names of files begin that a writer makes beside the final one; they are never listed."""


def check_path(path: str) -> str:
    """The path itself; StorageError if it does not name a file below the root."""
    if "\0" in path or any(part in {"", ".", ".."} for part in path.split("/")):
        raise StorageError(
            f"{path!r} is not a path inside a storage: use names joined by single slashes, without "
            "'.' or '..'\nIf it came out of a checkpoint, that checkpoint is damaged or hostile; "
            "do not load it"
        )
    return path


def prefix_directory(prefix: str) -> str:
    """The directory, "" for the root, that holds every path that begins with `prefix`."""
    directory = prefix.rpartition("/")[0]
    return check_path(directory) if "/" in prefix else ""
