"""The buckets that a process uses.

A bucket is opened once, for all storages in it. To open one takes the client library milliseconds.
The first request then waits for the name service, for TCP and for TLS, and the first conditional
put for what the store does about conditions. A job saves to one bucket again and again, so what is
open stays open (`open_bucket`): storages in one bucket share the connections and what was found out
about the store.

A bucket is opened again if anything has changed that it was opened with: the environment, a file
with credentials, or the process, because connections do not outlive a fork.

Credentials, region and endpoint come from the environment, as `obstore` reads it:
`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`,
`AWS_ENDPOINT_URL`; `GOOGLE_APPLICATION_CREDENTIALS`; `AZURE_STORAGE_ACCOUNT_NAME`,
`AZURE_STORAGE_ACCOUNT_KEY`; or the identity that the machine or pod has. None of them is ever put
into a message.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from obstore import store as stores
from obstore.exceptions import BaseError

from remesh.errors import StorageError
from remesh.storage.messages import explain, shown_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

FAILURES = (BaseError, OSError, ValueError)
"""What the client library raises."""

RETRIES: RetryConfig = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=180),
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=8),
        "base": 2,
    },
}
"""A failed request is repeated, with growing pauses, for three minutes at most: also one that was
not answered before its timeout."""

CLIENT: ClientConfig = {
    # Endpoints are https:// unless the user has written something else.
    "allow_http": True,
    "connect_timeout": timedelta(seconds=10),
    "timeout": timedelta(seconds=120),
}
"""The timeout is that of a whole request, which moves one part or less."""

MAX_OPEN = 16
"""Buckets that stay open at a time."""

_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_GOOGLE_DEFAULT = "~/.config/gcloud/application_default_credentials.json"
_KINDS = {
    "s3": stores.S3Store,
    "s3a": stores.S3Store,
    "gs": stores.GCSStore,
    "gcs": stores.GCSStore,
}


@dataclass(slots=True, eq=False)
class Bucket:
    """State that the storages of a process in one bucket share."""

    store: ObjectStore  # the obstore store with its connections
    latency: float = 0.0
    """Seconds of the fastest request that read, a small one mostly; 0 before the first."""
    honours_conditions: bool | None = None
    """Whether the store refuses a put under the condition that there is no such object, if there is
    one; None before that is known."""


def open_bucket(url: str, scheme: str, rest: str) -> tuple[Bucket, str]:
    """The bucket of a URL, and how the paths of objects below the URL begin in it.

    The scheme is in small letters. The rest follows `://`; keys of S3 and Google Cloud are taken as
    they are written, and not percent-decoded.
    """
    name, _, key = rest.partition("/")
    prefix = key.strip("/")
    kind = _KINDS.get(scheme)
    if not name:
        raise StorageError(f"{shown_url(url)!r} names no bucket; write {scheme}://bucket/path")
    if kind is not None and "***@" in shown_url(url):
        raise StorageError(
            f"{shown_url(url)!r}: user information in the URL of a bucket is not used\nWrite "
            f"{scheme}://bucket/path and set the credentials in the environment"
        )
    try:
        if kind is None:  # it may name the account and the container in several ways
            return _bucket(None, url, _surroundings()), ""
        if prefix and {"", ".", ".."} & {*prefix.split("/")}:
            raise ValueError("a path has names joined by single slashes, without '.' or '..'")
        return _bucket(kind, name, _surroundings()), f"{prefix}/" if prefix else ""
    except FAILURES as error:
        raise explain("open", url, error) from None


@lru_cache(MAX_OPEN)
def _bucket(
    kind: type[stores.S3Store | stores.GCSStore] | None, name: str, _made_in: Hashable
) -> Bucket:
    options: Any = {"client_options": CLIENT, "retry_config": RETRIES}
    if kind is None:
        return Bucket(stores.AzureStore.from_url(name, **options))
    if kind is stores.S3Store:
        options |= _signing(os.environ)
    return Bucket(kind(name, **options))


def _surroundings() -> Hashable:
    """The surroundings that a store is made from, equal as long as it may be used."""
    environment = tuple(sorted(os.environ.items()))
    # Those of other stores are read again when they are needed, or not from files.
    named = [value for name, value in environment if name.startswith("GOOGLE_")]
    files = (*named, os.path.expanduser(_GOOGLE_DEFAULT))
    return os.getpid(), environment, tuple(map(_version, files))


def _version(path: str) -> Hashable:
    """The version of a file, which changes with its content; None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _signing(environment: Mapping[str, str]) -> dict[str, bool]:
    """Leave the content out of the signature of requests, unless the user has chosen.

    TLS protects the content already, and SHA-256 takes most of the processor time of an upload.
    """
    is_chosen = "AWS_UNSIGNED_PAYLOAD" in environment
    is_plain = any(environment.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return {} if is_chosen or is_plain else {"unsigned_payload": True}
