"""A real master and simulated nodes: one full rendezvous, heartbeats, another rendezvous.

The master is a process of its own, with its journal on disk. The nodes are coroutines of this
process, which send it the requests of agents, as frames or by HTTP: each joins, waits for its
assignment, puts or gets the address of the round's TCPStore, and then sends heartbeats with eight
ranks, the next one when the last one is answered. Up to some number of nodes each has a connection
of its own. Beyond, they share connections, and their requests follow each other there without a
pause.

Both sides share this machine, so wall times say little about the master when it is busy. What it
costs is measured as its own processor time: the requests that one core can answer in a second are
one over the processor time of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec

from benchmarks.report import print_table, write_json
from remesh.elastic import frames
from remesh.elastic.protocol import (
    PROTOCOL_VERSION,
    Assignment,
    Beat,
    Get,
    Join,
    Put,
    RankReport,
    Request,
    Sender,
    name_of,
    reply_of,
)
from remesh.elastic.rendezvous import Settings

NUM_RANKS = 8
OWN_CONNECTIONS = 10_000
"""Nodes that have connections of their own; more of them share."""
SHARED_CONNECTIONS = 1000
COLUMNS = (
    *("encoding", "nodes", "meet, s", "its CPU, s", "again, s", "its CPU, s", "beats/s"),
    *("CPU a beat, µs", "beats/s of a core", "peak, MB", "status, MB", "page, kB"),
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the master has used up to now."""

    processor_seconds: float
    peak_bytes: int


def usage_of(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    status = Path(f"/proc/{pid}/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), int(peak) * 1024)


class Wire(Protocol):
    """Sends requests to the master."""

    async def ask(self, number: int, request: Request[Any]) -> Any:
        """The reply to a request of a node."""


@dataclass(frozen=True, slots=True)
class HttpWire:
    """Requests as JSON over HTTP."""

    session: aiohttp.ClientSession

    async def ask(self, _number: int, request: Request[Any]) -> Any:
        """The reply to a request."""
        kind, body = type(request), msgspec.json.encode(request)
        path, headers = (
            f"/v{PROTOCOL_VERSION}/{name_of(kind)}",
            {"Content-Type": "application/json"},
        )
        while True:
            try:
                async with self.session.post(path, data=body, headers=headers) as response:
                    text = await response.read()
                    assert response.status == 200, text
                return msgspec.json.decode(text, type=reply_of(kind))
            except aiohttp.ClientConnectionError:
                continue  # this process was too slow to send it, and agents send it again


class FramedConnection(asyncio.Protocol):
    """A connection that speaks frames; requests may follow each other without a pause."""

    def __init__(self) -> None:
        self._data = b""
        self._unsent: list[bytes] = []
        self._replies: deque[asyncio.Future[tuple[int, bytes]]] = deque()
        self.is_framed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        wanted = f"Connection: Upgrade\r\nUpgrade: {frames.UPGRADE}"
        target = f"/v{PROTOCOL_VERSION}/{frames.NAME}"
        transport.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n{wanted}\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        """Some replies have come."""
        if not self.is_framed.done():
            assert data.startswith(b"HTTP/1.1 101 "), data
            self.is_framed.set_result(None)
            return
        found, self._data = frames.split(self._data + data, frames.MAX_REPLY_BYTES)
        for reply in found:
            self._replies.popleft().set_result(reply)

    def send(self, body: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """The status and body of the reply to a request."""
        loop = asyncio.get_running_loop()
        if not self._unsent:
            loop.call_soon(self._flush)
        self._unsent.append(frames.pack(body))
        reply = loop.create_future()
        self._replies.append(reply)
        return reply

    def _flush(self) -> None:
        self.transport.write(b"".join(self._unsent))
        self._unsent = []


@dataclass(frozen=True, slots=True)
class FramesWire:
    """Requests as frames."""

    connections: Sequence[FramedConnection]

    @classmethod
    async def open(cls, url: str, count: int) -> FramesWire:
        """So many new connections."""
        loop, parts = asyncio.get_running_loop(), urlsplit(url)
        few = asyncio.Semaphore(500)

        async def connect() -> FramedConnection:
            async with few:
                host, port = parts.hostname, parts.port
                _, connection = await loop.create_connection(FramedConnection, host, port)
                await connection.is_framed
                return connection

        return cls(await asyncio.gather(*(connect() for _ in range(count))))

    async def ask(self, number: int, request: Request[Any]) -> Any:
        """The reply to a request of a node."""
        body = msgspec.msgpack.encode(request)
        status, text = await self.connections[number % len(self.connections)].send(body)
        assert status == 200, text
        return msgspec.msgpack.decode(text, type=reply_of(type(request)))


class Nodes:
    """The simulated nodes.

    Args:
        wire: Asks the master.
        num_nodes: How many there are.
        shares: Whether nodes share connections, so that none may wait for long.
    """

    def __init__(self, wire: Wire, num_nodes: int, *, shares: bool) -> None:
        self._wire = wire
        self._shares = shares
        self.num_nodes = num_nodes
        self.num_beats = 0
        self._round = 0

    async def ask(self, number: int, request: Request[Any]) -> Any:
        """The reply to a request of a node."""
        return await self._wire.ask(number, request)

    async def join(self, number: int, wait: float) -> Any:
        """The reply to the request of a node to join."""
        settings = Settings(min_nodes=self.num_nodes, max_nodes=self.num_nodes)
        request = Join(
            name=f"node-{number}",
            node_id=number,
            incarnation=f"a{number}",
            address="10.0.0.1",
            num_processes=NUM_RANKS,
            after_round=self._round,
            settings=settings,
            wait=wait,
        )
        return await self.ask(number, request)

    async def meet(self, number: int) -> None:
        """Join the next round until there is a place, and find its store."""
        reply = None if self._shares else await self.join(number, 0.0)
        while not isinstance(reply, Assignment):
            reply = await self.join(number, 30.0)
        sender = Sender(node_id=number, incarnation=f"a{number}", round=reply.round)
        if reply.node_rank == 0:
            await self.ask(number, Put(**sender, key="store", value="10.0.0.1:1"))
        else:
            stored = await self.ask(number, Get(**sender, key="store", wait=30.0))
            assert stored.value is not None

    async def rendezvous(self) -> float:
        """Seconds until every node has its place."""
        began = time.monotonic()
        if self._shares:
            await asyncio.gather(*(self.join(number, 0.0) for number in range(self.num_nodes)))
        await asyncio.gather(*(self.meet(number) for number in range(self.num_nodes)))
        self._round += 1
        return time.monotonic() - began

    async def beat(self, first: int, stride: int, until: float) -> None:
        """Beat for some nodes, again and again."""
        step = 0
        while time.monotonic() < until:
            step += 1
            report = RankReport(step=step, age=0.1, step_seconds=1.0)
            beats = [
                Beat(
                    node_id=number,
                    incarnation=f"a{number}",
                    round=self._round,
                    ranks={number * NUM_RANKS + local: report for local in range(NUM_RANKS)},
                )
                for number in range(first, self.num_nodes, stride)
            ]
            numbers = (beat.node_id for beat in beats)
            for reply in await asyncio.gather(*map(self.ask, numbers, beats)):
                assert reply.restart is None, reply
            self.num_beats += len(beats)

    async def beats(self, seconds: float) -> float:
        """Seconds that heartbeats of about so long took."""
        began = time.monotonic()
        stride = SHARED_CONNECTIONS if self._shares else self.num_nodes
        until = began + seconds
        await asyncio.gather(*(self.beat(first, stride, until) for first in range(stride)))
        return time.monotonic() - began


def size_of(url: str) -> int:
    """Bytes of what the master sends."""
    with urllib.request.urlopen(url, timeout=600) as reply:
        return len(reply.read())


async def measure(
    url: str, pid: int, encoding: str, num_nodes: int, seconds: float
) -> dict[str, Any]:
    """Let nodes meet twice, and beat in between."""
    shares = num_nodes > OWN_CONNECTIONS
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=SHARED_CONNECTIONS if shares else 0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        wire: Wire = HttpWire(session)
        start = usage_of(pid)
        began = time.monotonic()
        if encoding == "frames":
            wire = await FramesWire.open(url, SHARED_CONNECTIONS if shares else num_nodes)
        connecting = time.monotonic() - began
        nodes = Nodes(wire, num_nodes, shares=shares)
        first = await nodes.rendezvous()
        met = usage_of(pid)
        beating = await nodes.beats(seconds)
        beaten = usage_of(pid)
        status, page = [
            await asyncio.to_thread(size_of, f"{url}/v{PROTOCOL_VERSION}/{name}")
            for name in ("status", "overview")
        ]
        shown = usage_of(pid)
        again = await nodes.rendezvous()
        end = usage_of(pid)
    cost = (beaten.processor_seconds - met.processor_seconds) / nodes.num_beats
    return {
        "encoding": encoding,
        "nodes": num_nodes,
        "connections": SHARED_CONNECTIONS if shares else num_nodes,
        "rendezvous_seconds": connecting + first,
        "rendezvous_processor_seconds": met.processor_seconds - start.processor_seconds,
        "again_seconds": again,
        "again_processor_seconds": end.processor_seconds - shown.processor_seconds,
        "beats_per_second": nodes.num_beats / beating,
        "beat_processor_seconds": cost,
        "beats_per_second_of_a_core": 1 / cost,
        "status_bytes": status,
        "page_bytes": page,
        "peak_bytes": end.peak_bytes,
    }


def run(encoding: str, num_nodes: int, seconds: float) -> dict[str, Any]:
    """Measure with a master of its own."""
    with tempfile.TemporaryDirectory() as directory:
        command = [str(Path(sys.executable).with_name("remesh")), "master", "--port", "0"]
        command += ["--state", f"{directory}/job.sqlite", "--max-rate", "1000000"]
        command += ["--heartbeat-timeout", "600"]
        with (Path(directory) / "log").open("w") as log:
            master = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert master.stdout is not None
            url = master.stdout.readline().strip()
            return asyncio.run(measure(url, master.pid, encoding, num_nodes, seconds))
        finally:
            master.terminate()
            master.communicate()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--shared", type=int, nargs="*", default=[100_000], help="frames only")
    parser.add_argument("--seconds", type=float, default=20.0, help="of heartbeats")
    options = parser.parse_args(arguments)
    cases = [(encoding, count) for count in options.nodes for encoding in ("http", "frames")]
    cases += [("frames", count) for count in options.shared]
    results = []
    for case in cases:
        results.append(run(*case, options.seconds))
        print_table("A master and simulated nodes", COLUMNS, [cells_of(one) for one in results])
    write_json("master", results)


def cells_of(result: dict[str, Any]) -> list[str]:
    """The cells of a row of the table."""
    return [
        result["encoding"],
        f"{result['nodes']}",
        f"{result['rendezvous_seconds']:.1f}",
        f"{result['rendezvous_processor_seconds']:.1f}",
        f"{result['again_seconds']:.1f}",
        f"{result['again_processor_seconds']:.1f}",
        f"{result['beats_per_second']:.0f}",
        f"{result['beat_processor_seconds'] * 1e6:.0f}",
        f"{result['beats_per_second_of_a_core']:.0f}",
        f"{result['peak_bytes'] / 1e6:.0f}",
        f"{result['status_bytes'] / 1e6:.1f}",
        f"{result['page_bytes'] / 1e3:.0f}",
    ]


if __name__ == "__main__":
    main()
