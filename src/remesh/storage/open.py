"""From what a user wrote to a storage."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from remesh.errors import StorageError
from remesh.storage.local import LocalStorage
from remesh.storage.protocol import Storage

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def open_storage(place: str | os.PathLike[str] | Storage) -> Storage:
    """The storage that a path, a URL or a storage object names.

    Args:
        place: A `str` or `os.PathLike` local path, a `file://` URL, or a `Storage`, which is
            returned as it is.

    Raises:
        StorageError: If it is none of these, or if the URL's scheme is not supported.
    """
    if isinstance(place, os.PathLike):
        return LocalStorage(place)
    if isinstance(place, str):
        url = _URL.fullmatch(place)
        return LocalStorage(place) if url is None else _open_url(place, url[1].lower(), url[2])
    if isinstance(place, Storage):
        return place
    raise StorageError(
        f"a checkpoint's place is a path, a URL or a Storage, and not a {type(place).__name__}"
    )


def _open_url(url: str, scheme: str, rest: str) -> Storage:
    if scheme != "file":
        raise StorageError(
            f"{url!r}: the scheme {scheme!r} is not supported; give a local path, a file:// URL, "
            "or an object with the methods of remesh.storage.Storage"
        )
    host, slash, path = rest.partition("/")
    if host not in {"", "localhost"} or not slash:
        raise StorageError(
            f"{url!r} is not the URL of a local file; write file:///absolute/path, with three "
            "slashes"
        )
    return LocalStorage(slash + unquote(path))
