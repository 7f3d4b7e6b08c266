"""Save to and load from an object store, beside the limit of the store and of the way to it.

The store is a server on this machine that keeps objects in memory (`benchmarks.s3_server`), with
added round trips of 0, 30 and 100 ms. `limit` is the same processes moving the same number of bytes
with obstore alone: each rank one object, in parts, with the part size and the number of requests
under way that are fastest of several. It drops what it reads; `limit, copied` reads the same way
and copies each part once to where it belongs in an array. s5cmd takes part if it is installed, from
and to files in memory. All contestants take turns within each round; the figures are medians over
the rounds.

The state is that of `benchmarks.save_load`, cut in rows over the ranks. `asked` is the number of
bytes that the server was asked for, of all ranks together, per byte of the state: 1 if each byte
is read once. Content is not signed, as over https, where TLS protects it; there is no TLS here.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from obstore.store import S3Store

import remesh
from benchmarks.contestants import Shards
from benchmarks.report import median, print_table, write_json
from benchmarks.s3_server import BUCKET, Running, environment, running
from benchmarks.save_load import check, local_shards, measure, shapes_of
from remesh.elastic.script import finish

SETTINGS = ((8 << 20, 8), (8 << 20, 32), (16 << 20, 8), (16 << 20, 16))
"""Bytes of a part, and parts under way at a time, of which the limit takes the fastest."""


@dataclass(frozen=True)
class Options:
    gibibytes: float
    rounds: int
    delays: tuple[int, ...]
    folder: str
    endpoint: str


@dataclass
class Found:
    """What was measured: for each delay, task and contestant one row a round."""

    server: Running
    delay: int = 0
    rows: list[tuple[int, str, str, dict[str, float]]] = field(default_factory=list)

    def take(self, task: str, name: str, action: Callable[[], object]) -> float:
        """Measure one action of all ranks; returns its seconds."""
        dist.barrier()
        if dist.get_rank() == 0:
            self.server.counts()
        measured = measure(action)
        dist.barrier()
        if dist.get_rank() == 0:
            counts = self.server.counts()
            measured["asked"] = counts.pop("bytes out", 0)
            counts.pop("bytes in", 0)
            measured["requests"] = sum(counts.values())
        if name:
            self.rows.append((self.delay, task, name, measured))
        return measured["seconds"]


class Raw:
    """obstore alone: one object of this rank."""

    def __init__(self, num_bytes: int) -> None:
        self.store = S3Store(BUCKET, client_options={"allow_http": True})
        self.data = np.ones(num_bytes, np.uint8)
        self.path = f"raw/{dist.get_rank()}"

    def put(self, part_bytes: int, number: int) -> None:
        """Write it."""
        obstore.put(
            self.store,
            self.path,
            self.data.data,
            use_multipart=True,
            chunk_size=part_bytes,
            max_concurrency=number,
        )

    def get(self, part_bytes: int, number: int, *, copies: bool = False) -> None:
        """Read it, and drop what was read or copy it into the array."""

        def get(start: int) -> None:
            end = min(start + part_bytes, self.data.size)
            found = obstore.get_range(self.store, self.path, start=start, end=end)
            assert len(found) == end - start
            if copies:
                self.data[start:end] = np.frombuffer(memoryview(found), np.uint8)

        with ThreadPoolExecutor(number) as threads:
            list(threads.map(get, range(0, self.data.size, part_bytes)))


def fastest(found: Found, action: Callable[[int, int], None]) -> functools.partial[None]:
    """The action with the settings that are fastest, the same on all ranks."""
    tries = [functools.partial(action, *setting) for setting in SETTINGS]
    tries[0]()
    seconds = [found.take("", "", one) for one in tries]
    return tries[seconds.index(min(seconds))]


def s5cmd(options: Options, folder: Path, task: str) -> None:
    """Copy this rank's file to the store, or from it."""
    file, remote = str(folder / f"{dist.get_rank()}"), f"s3://{BUCKET}/s5/{dist.get_rank()}"
    pair = (file, remote) if task == "save" else (remote, file)
    command = ["s5cmd", "--endpoint-url", options.endpoint, "cp", "-c", "16", "-p", "16", *pair]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure_delay(found: Found, options: Options, folder: Path, source: Shards) -> None:
    """All rounds at one distance."""
    world_size = dist.get_world_size()
    raw = Raw(sum(data.nbytes for data in source.data.values()))
    put, get = fastest(found, raw.put), fastest(found, raw.get)
    get_copied = functools.partial(raw.get, *get.args, copies=True)
    has_s5cmd = shutil.which("s5cmd") is not None
    (folder / f"{dist.get_rank()}").write_bytes(raw.data.data if has_s5cmd else b"")
    for number in range(options.rounds):
        name = f"{world_size}-{found.delay}-{number}"
        url = f"s3://{BUCKET}/{name}"
        state = source.dtensors()
        found.take("save", "limit", put)
        found.take("save", "remesh", functools.partial(remesh.save, state, url))
        loads = {"load, same layout": 0, **({"load, rows to columns": 1} if world_size > 1 else {})}
        for task, dim in loads.items():
            target = local_shards(options.gibibytes, dim, fill=False)
            state = target.dtensors()
            found.take(task, "limit", get)
            found.take(task, "limit, copied", get_copied)
            found.take(task, "remesh", functools.partial(remesh.load, state, url))
            if not dim:
                check(source, target, "remesh")
        if has_s5cmd:
            for task in ("save", "load, same layout"):
                found.take(task, "s5cmd", functools.partial(s5cmd, options, folder, task))
        dist.barrier()
        if dist.get_rank() == 0:
            paths = [one["path"] for one in obstore.list(raw.store, name).collect()]
            obstore.delete(raw.store, paths)


def run_rank(rank: int, world_size: int, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment(options.endpoint))
    os.environ["AWS_UNSIGNED_PAYLOAD"] = "true"
    store = f"file://{options.folder}/store-{world_size}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size)
    found = Found(Running(options.endpoint))
    source = local_shards(options.gibibytes, 0, fill=True)
    small = {"x": torch.zeros(8)}
    remesh.save(small, f"s3://{BUCKET}/warm-{world_size}")  # what is imported first
    remesh.load(small, f"s3://{BUCKET}/warm-{world_size}")
    folder = Path(options.folder)
    for delay in options.delays:
        if rank == 0:
            found.server.delay(delay / 1000)
        found.delay = delay
        dist.barrier()
        measure_delay(found, options, folder, source)
    if rank == 0:
        found.server.delay(0.0)
        results.extend(found.rows)
    dist.barrier()
    dist.destroy_process_group()
    finish()


def rows_of(world_size: int, num_bytes: int, found: list[Any]) -> list[dict[str, Any]]:
    """The medians of each contestant at each task and distance."""
    rows = []
    for delay, task in dict.fromkeys((delay, task) for delay, task, _, _ in found):
        of = {
            name: [m for d, t, n, m in found if (d, t, n) == (delay, task, name)]
            for name in dict.fromkeys(n for d, t, n, _ in found if (d, t) == (delay, task))
        }
        limit = median([one["seconds"] for one in of["limit"]])
        for name, measured in of.items():
            seconds = median([one["seconds"] for one in measured])
            rows.append(
                {
                    "ranks": world_size,
                    "delay_ms": delay,
                    "task": task,
                    "contestant": name,
                    "seconds": seconds,
                    "times_limit": seconds / limit,
                    "cpu_seconds": median([one["cpu"] for one in measured]),
                    "asked": median([one["asked"] for one in measured]) / num_bytes,
                    "requests": median([one["requests"] for one in measured]),
                    "peak": median([one["peak"] for one in measured]),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--delays", type=int, nargs="*", default=[0, 30, 100], help="in ms")
    arguments = parser.parse_args()
    num_bytes = 14 * sum(math.prod(shape) for shape in shapes_of(arguments.gib).values())
    rows: list[dict[str, Any]] = []
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for world_size in arguments.ranks:
        with running() as server, tempfile.TemporaryDirectory(dir=memory) as folder:
            delays = tuple(arguments.delays)
            options = Options(arguments.gib, arguments.rounds, delays, folder, server.endpoint)
            results = mp.Manager().list()
            mp.spawn(run_rank, (world_size, options, results), nprocs=world_size)
            rows += rows_of(world_size, num_bytes, list(results))
    table = [
        [
            f"{row['ranks']} ranks, {row['delay_ms']} ms, {row['task']}",
            row["contestant"],
            f"{row['seconds']:.2f} s",
            f"{row['times_limit']:.2f}",
            f"{row['cpu_seconds']:.2f} s",
            f"{row['asked']:.2f}" if "load" in row["task"] else "",
            f"{row['requests']:.0f}",
            f"{row['peak'] / 2**20:.0f} MiB",
        ]
        for row in rows
    ]
    columns = ["", "contestant", "median", "x limit", "CPU", "asked", "requests", "memory"]
    title = f"{num_bytes / 2**30:.2g} GiB of state, {arguments.rounds} rounds"
    print_table(title, columns, table)
    result = {"gibibytes": num_bytes / 2**30, "rounds": arguments.rounds, "rows": rows}
    write_json("object_store", result)


if __name__ == "__main__":
    main()
