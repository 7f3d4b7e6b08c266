"""An S3 server in a thread of the test process, and buckets in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
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


class S3Server(ThreadedMotoServer):
    """moto looks for an object and makes it in two steps; stores do that in one.

    Args:
        ignored: Headers of requests that are ignored, as some stores do: `If-None-Match`, so that
            conditional puts succeed whatever there is, or `Range`, so that objects are given whole.

    Attributes:
        methods: The kinds of requests that it has got.
    """

    def __init__(self, *ignored: str) -> None:
        super().__init__(ip_address="127.0.0.1", port=0, verbose=False)
        self._ignored = [f"HTTP_{name.upper().replace('-', '_')}" for name in ignored]
        self.methods: list[str] = []

    @property
    def endpoint(self) -> str:
        host, port = self.get_host_and_port()
        return f"http://{host}:{port}"

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that are neither completed nor aborted."""
        with client_of(self.endpoint) as client:
            found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return sorted(upload["Key"] for upload in found)

    def _server_entry(self) -> None:
        lock = threading.Lock()
        app = DomainDispatcherApplication(create_backend_app)

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            self.methods.append(_kind(environ["REQUEST_METHOD"], environ["QUERY_STRING"]))
            for name in self._ignored:
                environ.pop(name, None)
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


def client_of(endpoint: str) -> Any:
    """A client of another make, to be closed by `with`."""
    import boto3

    return closing(boto3.client("s3", endpoint_url=endpoint))


@contextmanager
def s3_server(*ignored: str) -> Iterator[S3Server]:
    """A server with an empty bucket; the environment names it and its credentials."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server(*ignored)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ENVIRONMENT.items():
                patch.setenv(name, value)
            patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
            with client_of(server.endpoint) as client:
                client.create_bucket(Bucket=BUCKET)
                # moto has one set of buckets a process: a server that ended may have left uploads.
                for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
                    named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    client.abort_multipart_upload(Bucket=BUCKET, **named)
            yield server
    finally:
        server.stop()
