"""Requests and replies as binary frames on a kept connection, where HTTP would cost more than they.

A client asks for it with an HTTP request, in which its token is checked once for the connection:

    GET /v2/frames HTTP/1.1
    Connection: Upgrade
    Upgrade: remesh-frames/1
    Authorization: Bearer TOKEN

If the reply is `101 Switching Protocols`, both send frames from then on. With any other reply the
connection stays one of HTTP, as with a master of another version or behind a proxy.

A frame has a header of six bytes, in little-endian order: the length of its body (four bytes) and
the HTTP status of a reply (two bytes; 0 in a request). The body is MessagePack of the same messages
that HTTP carries as JSON (`remesh.elastic.protocol`); a request is told from others by its tag,
`type`. The next request of a connection is read when the one before it is answered.
"""

from __future__ import annotations

import http
import http.client
import socket
import struct
import time
from collections.abc import Mapping

from remesh.elastic.protocol import PROTOCOL_VERSION

UPGRADE = "remesh-frames/1"
"""What a client asks for: the frames of this version."""
NAME = "frames"
"""The last part of the path at which it does."""
HEADER = struct.Struct("<IH")
MAX_REPLY_BYTES = 64 << 20
"""Larger replies are no replies of a master."""


class FrameError(ConnectionError):
    """The bytes of a connection are no frame."""


def pack(body: bytes, status: int = 0) -> bytes:
    """A frame; the status of a request is 0."""
    return HEADER.pack(len(body), status) + body


def split(data: bytes, most: int) -> tuple[list[tuple[int, bytes]], bytes]:
    """The statuses and bodies of the whole frames at the beginning of some bytes, and the rest."""
    found, at, size = [], 0, len(data)
    while size - at >= HEADER.size:
        length, status = HEADER.unpack_from(data, at)
        if length > most:
            raise FrameError(f"a frame of {length} bytes is announced, at most {most} are allowed")
        begin = at + HEADER.size
        if size - begin < length:
            break
        at = begin + length
        found.append((status, data[begin:at]))
    return found, data[at:]


def upgrade(
    connection: http.client.HTTPConnection, path: str, headers: Mapping[str, str | bytes]
) -> bool:
    """Ask for frames on a new connection; whether both ends speak them from now on."""
    wanted = {**headers, "Connection": "Upgrade", "Upgrade": UPGRADE}
    connection.request("GET", f"{path}/v{PROTOCOL_VERSION}/{NAME}", headers=wanted)
    response = connection.getresponse()
    response.read()
    return response.status == http.HTTPStatus.SWITCHING_PROTOCOLS


def exchange(wire: socket.socket, body: bytes, ends: float) -> tuple[int, bytes]:
    """Send a request; the status and the body of its reply.

    `ends` is when it is given up, by the monotonic clock.
    """
    wire.sendall(pack(body))
    data = b""
    while True:
        found, _rest = split(data, MAX_REPLY_BYTES)
        if found:
            return found[0]
        # 0 would mean not to wait at all.
        wire.settimeout(max(ends - time.monotonic(), 0.001))
        more = wire.recv(1 << 16)
        if not more:
            raise ConnectionResetError("the master has closed the connection")
        data += more
