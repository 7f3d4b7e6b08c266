"""From what a user wrote to a storage.

The library for object stores is optional, and imported when a URL asks for it.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from remesh.errors import StorageError
from remesh.storage.base import Storage
from remesh.storage.local import LocalStorage
from remesh.storage.messages import shown_url

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"})
"""Schemes of the URLs of object stores."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def open_storage(place: str | os.PathLike[str] | Storage) -> Storage:
    """The storage that a path, a URL or a storage object names.

    Args:
        place: A `str` or `os.PathLike` local path; a `file://` URL; an `s3://`, `gs://` or `az://`
            URL, which takes the extra `remesh[s3]`; or a `Storage`, which is returned as it is.

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
    if scheme == "file":
        return _open_file(url, rest)
    if scheme not in OBJECT_SCHEMES:
        raise StorageError(
            f"{shown_url(url)!r}: the scheme {scheme!r} is not supported\nGive a local path, a "
            "file:// URL, s3://, gs:// or az://; mount a file system of another kind (HDFS, SFTP), "
            "or give an object of a subclass of remesh.storage.Storage"
        )
    try:
        from remesh.storage.object_store import ObjectStorage, open_bucket
    except ImportError as error:
        raise StorageError(
            f"{shown_url(url)!r} needs the library obstore\n"
            f"It cannot be imported ({error}). Install it with: pip install 'remesh[s3]'"
        ) from error
    return ObjectStorage(url, *open_bucket(url, scheme, rest))


def _open_file(url: str, rest: str) -> LocalStorage:
    host, slash, path = rest.partition("/")
    if host not in {"", "localhost"} or not slash:
        raise StorageError(
            f"{shown_url(url)!r} is not the URL of a local file; write file:///absolute/path, with "
            "three slashes"
        )
    return LocalStorage(slash + unquote(path))
