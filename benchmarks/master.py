"""A real master and simulated nodes: one full rendezvous, heartbeats, another rendezvous.

The master is a process of its own, with its journal on disk. The nodes are coroutines of this
process, each with a session of its own: each joins, waits for its assignment, and then sends
heartbeats with eight ranks, one a second as agents do.

Both sides share this machine, so wall times say little about the master when it is busy. What it
costs is measured as its own processor time: the heartbeats that one core can take in a second are
one over the processor time of a heartbeat.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.report import print_table, write_json
from remesh.elastic.nodes import Settings
from remesh.elastic.progress import RankProgress
from remesh.elastic.protocol import (
    PROTOCOL_VERSION,
    Assignment,
    Beat,
    Instruction,
    Join,
)

NUM_RANKS = 8
COUNT = "remesh_requests_total "
COLUMNS = (
    *("nodes", "meet, s", "its CPU, s", "again, s", "its CPU, s", "beats/s"),
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


class Nodes:
    """The simulated nodes.

    Args:
        wires: Their sessions with the master.
    """

    def __init__(self, wires: Sequence[aiohttp.ClientWebSocketResponse]) -> None:
        self._wires = wires
        self.num_beats = 0
        self._round = 0

    async def meet(self, number: int) -> None:
        """Join the next round, and wait until there is a place."""
        wire, count = self._wires[number], len(self._wires)
        join = Join(
            name=f"node-{number}",
            node_id=number,
            incarnation=f"a{number}",
            address="10.0.0.1",
            num_processes=NUM_RANKS,
            after_round=self._round,
            settings=Settings(min_nodes=count, max_nodes=count),
        )
        await wire.send_bytes(msgspec.msgpack.encode(join))
        while True:
            data = await wire.receive_bytes()
            content = msgspec.msgpack.decode(data, type=Instruction).content
            if isinstance(content, Assignment) and content.round > self._round:
                return

    async def rendezvous(self) -> float:
        """Seconds until every node has its place."""
        began = time.monotonic()
        await asyncio.gather(*map(self.meet, range(len(self._wires))))
        self._round += 1
        return time.monotonic() - began

    async def beat(self, number: int, until: float) -> None:
        """Beat for a node, again and again."""
        step = 0
        while time.monotonic() < until:
            step += 1
            report = RankProgress(step=step, time=-0.1, step_seconds=1.0)
            beat = Beat(
                node_id=number,
                incarnation=f"a{number}",
                round=self._round,
                ranks={number * NUM_RANKS + local: report for local in range(NUM_RANKS)},
            )
            await self._wires[number].send_bytes(msgspec.msgpack.encode(beat))
            self.num_beats += 1
            await asyncio.sleep(1.0)

    async def beats(self, seconds: float) -> float:
        """Seconds that heartbeats of about so long took."""
        began = time.monotonic()
        numbers = range(len(self._wires))
        await asyncio.gather(*(self.beat(number, began + seconds) for number in numbers))
        return time.monotonic() - began


async def connect(
    http: aiohttp.ClientSession, few: asyncio.Semaphore
) -> aiohttp.ClientWebSocketResponse:
    while True:
        try:
            async with few:
                return await http.ws_connect(f"/v{PROTOCOL_VERSION}/session")
        except aiohttp.ServerDisconnectedError:
            continue  # this process was too slow to ask for it, and agents ask again


def size_of(url: str) -> int:
    """Bytes of what the master sends."""
    with urllib.request.urlopen(url, timeout=600) as reply:
        return len(reply.read())


def num_messages(url: str, least: int = 0) -> int:
    """Messages that the master has taken, once these are as many as wanted."""
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=600) as reply:
            lines = reply.read().decode().splitlines()
        found = next(int(float(line.split()[1])) for line in lines if line.startswith(COUNT))
        if found >= least:
            return found
        time.sleep(0.1)


async def measure(url: str, pid: int, num_nodes: int, seconds: float) -> dict[str, Any]:
    """Let nodes meet twice, and beat in between."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        start, began = usage_of(pid), time.monotonic()
        few = asyncio.Semaphore(500)
        wires = await asyncio.gather(*(connect(http, few) for _ in range(num_nodes)))
        connecting = time.monotonic() - began
        nodes = Nodes(wires)
        first = await nodes.rendezvous()
        before = await asyncio.to_thread(num_messages, url)
        met = usage_of(pid)
        beating = await nodes.beats(seconds)
        await asyncio.to_thread(num_messages, url, before + nodes.num_beats)
        beaten = usage_of(pid)
        status, page = [
            await asyncio.to_thread(size_of, f"{url}/v{PROTOCOL_VERSION}/{name}")
            for name in ("status", "status?page")
        ]
        shown = usage_of(pid)
        again = await nodes.rendezvous()
        end = usage_of(pid)
    cost = (beaten.processor_seconds - met.processor_seconds) / nodes.num_beats
    return {
        "nodes": num_nodes,
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


def run(num_nodes: int, seconds: float) -> dict[str, Any]:
    """Measure with a master of its own."""
    with tempfile.TemporaryDirectory() as directory:
        command = [str(Path(sys.executable).with_name("remesh")), "master", "--port", "0"]
        command += ["--state", f"{directory}/job.json"]
        command += ["--heartbeat-timeout", "600"]
        with (Path(directory) / "log").open("w") as log:
            master = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert master.stdout is not None
            url = master.stdout.readline().strip()
            return asyncio.run(measure(url, master.pid, num_nodes, seconds))
        finally:
            master.terminate()
            master.communicate()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--seconds", type=float, default=20.0, help="of heartbeats")
    options = parser.parse_args(arguments)
    results = []
    for count in options.nodes:
        results.append(run(count, options.seconds))
        print_table("A master and simulated nodes", COLUMNS, [cells_of(one) for one in results])
    write_json("master", results)


def cells_of(result: dict[str, Any]) -> list[str]:
    """The cells of a row of the table."""
    return [
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
