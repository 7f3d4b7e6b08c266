"""A store with the S3 protocol that keeps objects in memory, to measure clients with.

It speaks what clients need to save and load: objects with ranges and conditions, multipart uploads,
copies, listings and bulk deletion. It checks no signatures. A thread serves each connection, and
bytes go straight between the socket and the memory, so that the store takes little of the
processors that it shares with the clients.

`/-/delay?SECONDS` makes it as far away as that: every connection begins, and every answer leaves,
one round trip later. The bytes are as fast as before, as on a long wide link. `/-/counts` tells how
many requests of each kind arrived, and how many bytes of objects left, and begins to count anew.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

BUCKET = "bucket"
Parts = list[memoryview]


@dataclass(frozen=True)
class Object:
    """The bytes of an object, in the parts that it was uploaded in."""

    parts: Parts
    size: int
    etag: str
    headers: dict[str, str]
    modified: float = field(default_factory=time.time)

    def range(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop)."""
        for part in self.parts:
            if start < len(part) and stop > 0:
                yield part[max(start, 0) : stop]
            start, stop = start - len(part), stop - len(part)


class Store:
    """All objects and unfinished uploads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, dict[int, memoryview]] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.counts: Counter[str] = Counter()
        self.delay = 0.0
        self.number = 0

    def put(self, key: str, parts: Parts, headers: dict[str, str], *, only_new: bool) -> Object:
        """Make an object; the one that is there if only a new one is to be made."""
        with self.lock:
            self.number += 1
            if only_new and key in self.objects:
                return self.objects[key]
            etag = hashlib.md5(str(self.number).encode()).hexdigest()
            made = Object(parts, sum(map(len, parts)), f'"{etag}"', headers)
            self.objects[key] = made
            return made


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = 1 << 16
    server: Server

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def setup(self) -> None:
        """Accept a connection."""
        super().setup()
        time.sleep(self.server.store.delay)

    def read_body(self) -> memoryview:
        """The content of a request."""
        body = memoryview(bytearray(int(self.headers.get("Content-Length") or 0)))
        filled = 0
        while filled < len(body):
            count = self.rfile.readinto(body[filled:])
            if not count:
                raise ConnectionError("the body ends early")
            filled += count
        return body

    def answer(
        self, status: int, body: bytes | Parts = b"", headers: dict[str, str] | None = None
    ) -> None:
        """Send an answer."""
        parts = [memoryview(body)] if isinstance(body, bytes) else body
        self.send_response_only(status)
        sent = {"Content-Length": str(sum(map(len, parts))), **(headers or {})}
        for name, value in sent.items():
            self.send_header(name, value)
        time.sleep(self.server.store.delay)
        self.end_headers()
        if self.command != "HEAD":
            for part in parts:
                self.connection.sendall(part)

    def error(self, status: int, code: str) -> None:
        """Send the answer to a request that failed."""
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def count(self, kind: str, num_bytes: int = 0) -> None:
        """Count a request, and bytes of objects that it moves."""
        store = self.server.store
        with store.lock:
            store.counts[kind] += 1
            store.counts["bytes out" if kind == "get" else "bytes in"] += num_bytes

    def read_request(self) -> tuple[str, dict[str, str]]:
        """The key, which is empty for the bucket, and the query."""
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query, True).items()}
        return unquote(url.path).lstrip("/").partition("/")[2], query

    def do_PUT(self) -> None:
        """Object, copy or part."""
        key, query = self.read_request()
        body, store = self.read_body(), self.server.store
        kept = {n: v for n, v in self.headers.items() if n.lower().startswith("x-amz-meta-")}
        if source := self.headers.get("x-amz-copy-source"):
            self.count("copy")
            found = store.objects.get(unquote(source).lstrip("/").partition("/")[2])
            if found is None:
                return self.error(404, "NoSuchKey")
            made = store.put(key, found.parts, found.headers, only_new=False)
            return self.answer(200, f"<R><ETag>{made.etag}</ETag></R>".encode())
        if "uploadId" in query:
            self.count("part", len(body))
            store.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return self.answer(200, headers={"ETag": f'"{query["partNumber"]}"'})
        self.count("put", len(body))
        only_new = self.headers.get("If-None-Match") == "*"
        made = store.put(key, [body], kept, only_new=only_new)
        if made.parts[0] is not body:
            return self.error(412, "PreconditionFailed")
        return self.answer(200, headers={"ETag": made.etag})

    def do_POST(self) -> None:
        """Beginning and end of an upload; bulk deletion."""
        key, query = self.read_request()
        body, store = self.read_body(), self.server.store
        if "delete" in query:
            self.count("delete")
            tree = ET.fromstring(bytes(body))
            keys = [one.text or "" for one in tree.iter() if one.tag.endswith("Key")]
            for one in keys:
                store.objects.pop(one, None)
            gone = "".join(f"<Deleted><Key>{escape(one)}</Key></Deleted>" for one in keys)
            return self.answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
        if "uploads" in query:
            self.count("create")
            with store.lock:
                store.number += 1
                number = str(store.number)
                store.uploads[number] = {}
            return self.answer(200, f"<R><UploadId>{number}</UploadId></R>".encode())
        self.count("complete")
        parts = store.uploads.pop(query["uploadId"])
        made = store.put(key, [parts[one] for one in sorted(parts)], {}, only_new=False)
        return self.answer(200, f"<R><ETag>{escape(made.etag)}</ETag></R>".encode())

    def do_DELETE(self) -> None:
        """Object or upload."""
        key, query = self.read_request()
        self.count("delete")
        if "uploadId" in query:
            self.server.store.uploads.pop(query["uploadId"], None)
        else:
            self.server.store.objects.pop(key, None)
        self.answer(204)

    def do_HEAD(self) -> None:
        """Facts of an object."""
        self.do_GET()

    def do_GET(self) -> None:
        """Object, listing, or one of the requests that no store has."""
        key, query = self.read_request()
        store = self.server.store
        if self.path.startswith("/-/delay"):
            store.delay = float(urlsplit(self.path).query)
            return self.answer(200)
        if self.path.startswith("/-/counts"):
            with store.lock:
                counts, store.counts = dict(store.counts), Counter()
            return self.answer(200, json.dumps(counts).encode())
        if not key:
            self.count("list")
            return self.answer(200, self.listing(query.get("prefix", ""), "delimiter" in query))
        found = store.objects.get(key)
        if found is None:
            self.count(self.command.lower())
            return self.error(404, "NoSuchKey")
        start, stop, status = 0, found.size, 200
        headers = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.modified, usegmt=True),
            "Accept-Ranges": "bytes",
            **found.headers,
        }
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last or stop) + 1, stop), 206
            if start >= found.size:
                return self.error(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.size}"
        if self.command == "HEAD":
            self.count("head")
            return self.answer(status, b"", {**headers, "Content-Length": str(stop - start)})
        self.count("get", stop - start)
        return self.answer(status, list(found.range(start, stop)), headers)

    def listing(self, prefix: str, delimited: bool) -> bytes:
        """All objects below a prefix in one page."""
        objects = sorted(self.server.store.objects.items())
        entries, folders = [], dict[str, None]()
        for key, one in objects:
            if not key.startswith(prefix):
                continue
            folder, slash, _ = key[len(prefix) :].partition("/")
            if delimited and slash:
                folders[prefix + folder + "/"] = None
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(one.modified))
            entries.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                f"<ETag>{one.etag}</ETag><Size>{one.size}</Size></Contents>"
            )
        entries += [
            f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders
        ]
        return (
            '<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>'
            f"{''.join(entries)}</ListBucketResult>"
        ).encode()


class Server(ThreadingHTTPServer):
    """Accepts connections."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.store = Store()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may hang up."""


def _serve(told: Any) -> None:
    with suppress(KeyboardInterrupt), Server() as server:
        told.send(server.server_address[1])
        server.serve_forever()


@dataclass(frozen=True)
class Running:
    """A store in a process of its own."""

    endpoint: str

    def ask(self, path: str) -> Any:
        """The answer to a request that is not of the protocol."""
        with urllib.request.urlopen(f"{self.endpoint}/-/{path}") as answer:
            return json.loads(answer.read() or b"null")

    def delay(self, seconds: float) -> None:
        """Be as far away as that."""
        self.ask(f"delay?{seconds}")

    def counts(self) -> dict[str, int]:
        """Requests of each kind and bytes since the last call."""
        found: dict[str, int] = self.ask("counts")
        return found


@contextmanager
def running() -> Iterator[Running]:
    """A store, empty at first."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield Running(f"http://127.0.0.1:{here.recv()}")
    finally:
        process.terminate()
        process.join()


def environment(endpoint: str) -> dict[str, str]:
    """What clients need to reach it."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


if __name__ == "__main__":
    with running() as store:
        print(store.endpoint, flush=True)
        threading.Event().wait()
