"""An S3 server in a thread of the test process, and buckets in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from moto.server import ThreadedMotoServer
from werkzeug.serving import make_server

BUCKET = "checkpoints"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing-key",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class AtomicServer(ThreadedMotoServer):
    """moto looks for an object and makes it in two steps; stores do that in one.

    Args:
        ignores_conditions: Whether conditional puts succeed whatever there is, as some stores let
            them.
        ignores_ranges: Whether objects are given whole where a part is asked for.
    """

    def __init__(self, *, ignores_conditions: bool = False, ignores_ranges: bool = False) -> None:
        super().__init__(ip_address="127.0.0.1", port=0, verbose=False)
        self._ignores_ranges = ignores_ranges
        self._ignores_conditions = ignores_conditions
        self.methods: list[str] = []

    def _server_entry(self) -> None:
        lock = threading.Lock()
        app = DomainDispatcherApplication(create_backend_app)

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            self.methods.append(_kind(environ["REQUEST_METHOD"], environ["QUERY_STRING"]))
            if self._ignores_conditions:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if self._ignores_ranges:
                environ.pop("HTTP_RANGE", None)
            if environ["REQUEST_METHOD"] != "PUT":
                return app(environ, start)
            with lock:
                return app(environ, start)

        self._server = make_server(
            self._ip_address, self._port, answer, threaded=True, request_handler=MotoRequestHandler
        )
        self._server_ready_event.set()
        self._server.serve_forever()


def _kind(method: str, query: str) -> str:
    """The method of a request, LIST for those that list, and DELETE for those that remove many."""
    if "list-type" in query:
        return "LIST"
    return "DELETE" if method == "POST" and query.startswith("delete") else method


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where the server listens, and the kinds of requests that it has got."""

    endpoint: str
    methods: list[str]

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that are neither completed nor aborted."""
        import boto3

        client = boto3.client("s3", endpoint_url=self.endpoint)
        try:
            found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        finally:
            client.close()
        return sorted(upload["Key"] for upload in found)


@contextmanager
def s3_server(
    *, ignores_conditions: bool = False, ignores_ranges: bool = False
) -> Iterator[S3Server]:
    """A server with an empty bucket; the environment names it and its credentials."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = AtomicServer(ignores_conditions=ignores_conditions, ignores_ranges=ignores_ranges)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ENVIRONMENT.items():
                patch.setenv(name, value)
            patch.setenv("AWS_ENDPOINT_URL", endpoint)
            make_bucket(endpoint)
            yield S3Server(endpoint, server.methods)
    finally:
        server.stop()


def make_bucket(endpoint: str, name: str = BUCKET) -> None:
    """Make an empty bucket."""
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    try:
        client.create_bucket(Bucket=name)
        # moto has one set of buckets a process: a server that has ended may have left uploads.
        for upload in client.list_multipart_uploads(Bucket=name).get("Uploads", []):
            named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            client.abort_multipart_upload(Bucket=name, **named)
    finally:
        client.close()
