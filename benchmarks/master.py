"""A real master and simulated nodes: one full rendezvous, then steady heartbeats.

The master is a process of its own, with its journal on disk. The nodes are coroutines of this
process, which ask it over HTTP as agents do: each joins, waits for its assignment, puts or gets the
address of the round's TCPStore, and then sends a heartbeat every two seconds, with one rank.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import print_table, write_json
from remesh.elastic.protocol import PROTOCOL_VERSION

BEAT_SECONDS = 2.0
COLUMNS = (
    *("nodes", "meet, s", "its CPU, s", "again, s", "its CPU, s", "beats/s", "median, ms"),
    *("p99, ms", "CPU a beat, µs", "peak, MB"),
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
        session: Asks the master.
        num_nodes: How many there are.
    """

    def __init__(self, session: aiohttp.ClientSession, num_nodes: int) -> None:
        self._session = session
        self.num_nodes = num_nodes
        self.num_requests = 0
        self.latencies: list[float] = []
        self.num_late = 0
        self._round = 0

    async def ask(self, name: str, body: dict[str, object]) -> Any:
        """The master's reply to a request."""
        self.num_requests += 1
        async with self._session.post(f"/v{PROTOCOL_VERSION}/{name}", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    def speaker(self, number: int) -> dict[str, object]:
        """The fields with which the requests of a node begin."""
        return {"node_id": number, "incarnation": f"a{number}", "round": self._round}

    async def join(self, number: int) -> None:
        """Join the next round until there is a place, and find its store."""
        after, wait, reply = self._round, 0.0, None
        while reply is None or reply["type"] != "Assignment":
            reply = await self.ask(
                "join",
                {
                    "name": f"node-{number}",
                    "node_id": number,
                    "incarnation": f"a{number}",
                    "address": "10.0.0.1",
                    "num_processes": 8,
                    "after_round": after,
                    "settings": {"min_nodes": self.num_nodes, "max_nodes": self.num_nodes},
                    "wait": wait,
                },
            )
            wait = 30.0
        speaker = self.speaker(number) | {"round": reply["round"]}
        if reply["node_rank"] == 0:
            await self.ask("put", speaker | {"key": "store", "value": "10.0.0.1:1"})
        else:
            stored = await self.ask("get", speaker | {"key": "store", "wait": 30.0})
            assert stored["value"] is not None

    async def rendezvous(self) -> float:
        """Seconds until every node has its place."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(self.num_nodes):
                group.create_task(self.join(number))
        self._round += 1
        return time.monotonic() - began

    async def beat(self, number: int, until: float) -> None:
        """Beat every two seconds, each node at its own moment."""
        due = time.monotonic() + BEAT_SECONDS * number / self.num_nodes
        step = 0
        while due < until:
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            step += 1
            rank = {"step": step, "age": 0.1, "step_seconds": 1.0, "saved_step": None}
            began = time.monotonic()
            reply = await self.ask(
                "beat", self.speaker(number) | {"ranks": {str(number * 8): rank}}
            )
            assert reply["restart"] is None, reply
            self.latencies.append(time.monotonic() - began)
            due += BEAT_SECONDS
            if time.monotonic() > due:
                self.num_late += 1
                due = time.monotonic()

    async def beats(self, seconds: float) -> float:
        """Seconds that heartbeats of about so long took."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(self.num_nodes):
                group.create_task(self.beat(number, began + seconds))
        return time.monotonic() - began


async def measure(url: str, pid: int, num_nodes: int, seconds: float) -> dict[str, float]:
    """Let nodes meet twice, and beat in between."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        nodes = Nodes(session, num_nodes)
        start = usage_of(pid)
        first = await nodes.rendezvous()
        met, num_to_meet = usage_of(pid), nodes.num_requests
        beating = await nodes.beats(seconds)
        beaten = usage_of(pid)
        again = await nodes.rendezvous()
        end = usage_of(pid)
    num_beats = len(nodes.latencies)
    latencies = sorted(nodes.latencies)
    cost = (beaten.processor_seconds - met.processor_seconds) / num_beats
    return {
        "nodes": num_nodes,
        "rendezvous_seconds": first,
        "rendezvous_processor_seconds": met.processor_seconds - start.processor_seconds,
        "rendezvous_requests": num_to_meet,
        "again_seconds": again,
        "again_processor_seconds": end.processor_seconds - beaten.processor_seconds,
        "beats_per_second": num_beats / beating,
        "late_beats": nodes.num_late,
        "beat_median_seconds": latencies[num_beats // 2],
        "beat_p99_seconds": latencies[num_beats * 99 // 100],
        "beat_processor_seconds": cost,
        "beats_per_second_of_a_core": 1 / cost,
        "peak_bytes": end.peak_bytes,
    }


def run(num_nodes: int, seconds: float) -> dict[str, float]:
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
            return asyncio.run(measure(url, master.pid, num_nodes, seconds))
        finally:
            master.terminate()
            master.communicate()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--seconds", type=float, default=20.0, help="of heartbeats")
    options = parser.parse_args(arguments)
    results = [run(num_nodes, options.seconds) for num_nodes in options.nodes]
    print_table(
        "A master and simulated nodes",
        COLUMNS,
        [
            [
                f"{result['nodes']:.0f}",
                f"{result['rendezvous_seconds']:.1f}",
                f"{result['rendezvous_processor_seconds']:.1f}",
                f"{result['again_seconds']:.1f}",
                f"{result['again_processor_seconds']:.1f}",
                f"{result['beats_per_second']:.0f}",
                f"{result['beat_median_seconds'] * 1000:.1f}",
                f"{result['beat_p99_seconds'] * 1000:.1f}",
                f"{result['beat_processor_seconds'] * 1e6:.0f}",
                f"{result['peak_bytes'] / 1e6:.0f}",
            ]
            for result in results
        ],
    )
    write_json("master", results)


if __name__ == "__main__":
    main()
