"""Save and load of a training state: remesh, its peers (`contestants`), and the disk's limit.

The state is Llama-shaped, model in bfloat16 with float32 master weights and two Adam moments (14
bytes a parameter), every tensor cut in rows over the ranks. It is loaded into the same layout, into
columns, and by another number of ranks; what remesh saved as ranges of flattened tensors, as ZeRO
cuts them, is loaded into columns as well. `limit` is the same processes moving the same number of
bytes raw: direct I/O in 4 MiB blocks from touched memory, preallocated, fsync. All contestants take
turns within each round; the figures are medians over the rounds. Loads are cold: what was written
is dropped from the page cache first.

Reported beside wall time: seconds relative to the limit, CPU seconds of all ranks, the memory of
all ranks together at its peak above what they had before, relative to the state (a writer process
that is forked is not counted, a file that is mapped is), and for loads the bytes read for each byte
that was needed (as counted by the kernel: `rchar` of /proc/self/io, which knows nothing of maps).
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import remesh
from benchmarks import contestants
from benchmarks.chart import bar_chart, group_rows
from benchmarks.contestants import Contestant, Shards
from benchmarks.report import median, print_table, write_json
from remesh.elastic.script import finish
from remesh.storage import LocalStorage, aligned_buffer

BLOCK = 4 << 20


@dataclass(frozen=True)
class Options:
    gibibytes: float
    rounds: int
    folder: str


def shapes_of(gibibytes: float) -> dict[str, tuple[int, int]]:
    """Llama-like parameters that come to about the given size with their optimizer state."""
    hidden, layers = (1024 if gibibytes >= 0.4 else 256), 1
    num_parameters = gibibytes * 2**30 / 14
    while (12 * layers * hidden * hidden + 2 * 8192 * hidden) < num_parameters * 0.98:
        layers += 1
    shapes = {"embed.weight": (8192, hidden), "lm_head.weight": (8192, hidden)}
    for layer in range(layers):
        prefix = f"layers.{layer}."
        shapes[prefix + "attention.qkv.weight"] = (3 * hidden, hidden)
        shapes[prefix + "attention.out.weight"] = (hidden, hidden)
        shapes[prefix + "mlp.gate_up.weight"] = (16 * hidden // 3 // 16 * 16, hidden)
        shapes[prefix + "mlp.down.weight"] = (hidden, 8 * hidden // 3 // 16 * 16)
    return shapes


def make_state(gibibytes: float, dim: int, fill: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(dist.get_rank())
    state: dict[str, Any] = {}
    for name, shape in shapes_of(gibibytes).items():
        for kind, dtype in (
            ("model", torch.bfloat16),
            ("master", torch.float32),
            ("exp_avg", torch.float32),
            ("exp_avg_sq", torch.float32),
        ):
            local = list(shape)
            local[dim] //= dist.get_world_size()
            data = torch.zeros(local, dtype=dtype)
            if fill:
                data.uniform_(generator=generator)
            state[f"{kind}.{name}"] = DTensor.from_local(data, mesh, [Shard(dim)], run_check=False)
    return state


def local_bytes(state: dict[str, Any]) -> int:
    return sum(t.to_local().nbytes for t in state.values())


def raw_write(folder: Path, num_bytes: int) -> None:
    buffer = aligned_buffer(BLOCK)
    buffer[:] = 1
    rank = dist.get_rank()
    writer = LocalStorage(folder).create(f"raw-{rank}", num_bytes)
    for start in range(0, num_bytes - BLOCK + 1, BLOCK):
        writer.write(start, buffer)
    writer.finish()


def raw_read(folder: Path, num_bytes: int) -> None:
    buffer = aligned_buffer(BLOCK)
    storage = LocalStorage(folder)
    for start in range(0, num_bytes, BLOCK):
        storage.read_into(f"raw-{dist.get_rank()}", start, buffer)


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def io_bytes(what: str) -> int:
    """Bytes that this process has read: `rchar` by calls, `read_bytes` from the disk."""
    return int(Path("/proc/self/io").read_text().split(f"{what}: ")[1].split("\n")[0])


def cpu_seconds() -> float:
    """Of this process and of those that it started, as far as they have ended."""
    usages = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def memory_bytes(what: str) -> int:
    """Memory of this process: `VmRSS` now, `VmHWM` at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) << 10


def measure(action: Callable[[], object]) -> dict[str, float]:
    """Wall seconds of the slowest rank; CPU seconds, bytes read and peak of all ranks together.

    Files that are mapped count among the bytes from the disk alone.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes("VmRSS")
    dist.barrier()
    cpu, read, disk = cpu_seconds(), io_bytes("rchar"), io_bytes("read_bytes")
    started = time.perf_counter()
    action()
    seconds = torch.tensor([time.perf_counter() - started])
    sums = torch.tensor(
        [
            cpu_seconds() - cpu,
            io_bytes("rchar") - read,
            io_bytes("read_bytes") - disk,
            max(memory_bytes("VmHWM") - before, 0),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return {
        "seconds": seconds.item(),
        "cpu": sums[0].item(),
        "read": sums[1].item(),
        "disk": sums[2].item(),
        "peak": sums[3].item(),
    }


Found = list[tuple[str, str, dict[str, float]]]
"""Task, contestant, and what was measured."""

ALONE = Contestant(
    "remesh, each for itself",
    lambda _shards, _folder: None,
    lambda shards, folder: remesh.load(shards.dtensors(), folder, share_reads=False),
)
"""remesh without sharing what ranks read; it has no checkpoint of its own."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the turn of each contestant at each task.

    Attributes:
        folder: Where the files of the round are.
        found: What was measured.
    """

    folder: Path
    found: Found

    def save(self, source: Shards, who: list[Contestant]) -> None:
        """Let all contestants save."""
        num_bytes = sum(data.nbytes for data in source.data.values())
        self._take("save", "limit", lambda: raw_write(self.folder / "raw", num_bytes))
        for one in who:
            self._take("save", one.name, partial(one.save, source, place_of(self.folder, one)))

    def load(self, task: str, target: Shards, who: list[Contestant]) -> None:
        """Let all contestants fill the target."""
        num_bytes = sum(data.nbytes for data in target.data.values())
        self._take(task, "limit", lambda: raw_read(self.folder / "raw", num_bytes))
        for one in who:
            for data in target.data.values():
                data.zero_()
            self._take(task, one.name, partial(one.load, target, place_of(self.folder, one)))

    def _take(self, task: str, name: str, action: Callable[[], object]) -> None:
        if task != "save":
            dist.barrier()
            if dist.get_rank() == 0:
                drop_cache(self.folder)
        self.found.append((task, name, measure(action)))


def place_of(folder: Path, contestant: Contestant) -> Path:
    return folder / contestant.name.partition(",")[0].replace(" ", "-")


def local_shards(gibibytes: float, dim: int, *, fill: bool) -> Shards:
    state = make_state(gibibytes, dim, fill)
    return Shards({name: tensor.to_local() for name, tensor in state.items()}, dim)


def as_flat_ranges(shards: Shards) -> dict[str, Any]:
    """The same bytes as ranges of flattened tensors, one on each rank, as ZeRO cuts them."""
    world_size, rank, cut = dist.get_world_size(), dist.get_rank(), {}
    for name, data in shards.data.items():
        shape, _ = shards.shape_and_offset(data)
        size = math.prod(shape) // world_size
        cut[name] = remesh.ShardedTensor.from_rank_offsets_flat(
            name, data.view(-1), shape, flattened_range=slice(rank * size, (rank + 1) * size)
        )
    return cut


def same_world(folder: Path, options: Options) -> Found:
    """Save, and load with as many ranks. The files of the last round stay."""
    found: Found = []
    who = contestants.that_run(folder / "trial")
    resharding = [one for one in who if one.reshards]
    world_size = dist.get_world_size()
    source = local_shards(options.gibibytes, 0, fill=True)
    for number in range(options.rounds):
        turn = Round(folder / str(number), found)
        turn.save(source, who)
        target = local_shards(options.gibibytes, 0, fill=False)
        turn.load("load, same layout", target, who)
        check(source, target, "the last contestant")
        target = local_shards(options.gibibytes, 1, fill=False)
        both = [*resharding, ALONE] if world_size > 1 else resharding
        turn.load("load, rows to columns", target, both)
        if world_size > 1:
            remesh.save(as_flat_ranges(source), turn.folder / "remesh", overwrite=True)
            remesh_alone = [one for one in resharding if one.name == "remesh"]
            turn.load("load, flattened to tensor parallel", target, remesh_alone)
            remesh.save(source.dtensors(), turn.folder / "remesh", overwrite=True)
        dist.barrier()
        if dist.get_rank() == 0 and number + 1 < options.rounds:
            shutil.rmtree(turn.folder)
        dist.barrier()
    return found


def other_world(folder: Path, options: Options, saved_by: int) -> Found:
    """Load what another number of ranks has saved."""
    found: Found = []
    who = [one for one in contestants.that_run(folder / "other-trial") if one.reshards]
    target = local_shards(options.gibibytes, 0, fill=False)
    turn = Round(Path(options.folder) / f"world-{saved_by}" / str(options.rounds - 1), found)
    shutil.rmtree(turn.folder / "raw", ignore_errors=True)
    dist.barrier()
    raw_write(turn.folder / "raw", sum(data.nbytes for data in target.data.values()))
    for _ in range(options.rounds):
        turn.load(f"load what {saved_by} ranks saved", target, who)
    return found


def run_rank(rank: int, world_size: int, saved_by: int, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    folder = Path(options.folder) / f"world-{world_size}"
    store = f"file://{options.folder}/store-{world_size}-{saved_by}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size)
    if saved_by == world_size:
        found = same_world(folder, options)
    else:
        found = other_world(folder, options, saved_by)
    if rank == 0:
        results.extend(found)
    dist.barrier()
    dist.destroy_process_group()
    finish()  # without a race between gloo's threads and the end of the interpreter


def check(source: Shards, target: Shards, contestant: str) -> None:
    for name, data in source.data.items():
        assert torch.equal(data, target.data[name]), (contestant, name)


def rows_of(world_size: int, num_bytes: int, found: Found) -> list[dict[str, Any]]:
    """The medians of each contestant at each task."""
    rows = []
    for task in dict.fromkeys(task for task, _, _ in found):
        limit = median([m["seconds"] for t, name, m in found if (t, name) == (task, "limit")])
        for name in dict.fromkeys(name for t, name, _ in found if t == task):
            of = [m for t, n, m in found if (t, n) == (task, name)]
            seconds = median([m["seconds"] for m in of])
            rows.append(
                {
                    "ranks": world_size,
                    "task": f"{world_size} rank{'s' * (world_size > 1)}, {task}",
                    "contestant": name,
                    "seconds": seconds,
                    "times_limit": seconds / limit,
                    "cpu_seconds": median([m["cpu"] for m in of]),
                    "bytes": num_bytes,
                    "peak_per_state": median([m["peak"] for m in of]) / num_bytes,
                    "read_per_needed": median([m["read"] for m in of]) / num_bytes,
                    "all_seconds": [m["seconds"] for m in of],
                }
            )
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print the table, write the figures and draw the chart."""
    table = [
        [
            row["task"],
            row["contestant"],
            f"{row['seconds']:.2f} s",
            f"{row['times_limit']:.2f}",
            f"{row['cpu_seconds']:.2f} s",
            f"{row['peak_per_state']:.2f}",
            f"{row['read_per_needed']:.2f}" if "load" in row["task"] else "",
        ]
        for row in rows
    ]
    columns = ["", "contestant", "median", "x limit", "CPU", "peak/state", "read/needed"]
    print_table(title, columns, table)
    write_json("save_load", rows)
    groups = group_rows(rows, "times_limit")
    chart = bar_chart(f"Seconds, as multiples of the limit: {title}", groups, limit=1, longest=6)
    Path("bench-output/save_load.svg").write_text(chart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--folder", help="where to write; by default a temporary folder here")
    arguments = parser.parse_args()
    sizes = arguments.ranks
    worlds = [(size, size) for size in sizes]
    worlds += [pair for pair in ((2, 4), (4, 2)) if set(pair) <= set(sizes)]
    shapes = shapes_of(arguments.gib).values()
    num_bytes = 14 * sum(math.prod(shape) for shape in shapes)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder or ".") as place:
        options = Options(arguments.gib, arguments.rounds, str(Path(place).resolve()))
        for world_size, saved_by in worlds:
            results = mp.Manager().list()
            mp.spawn(run_rank, (world_size, saved_by, options, results), nprocs=world_size)
            rows += rows_of(world_size, num_bytes, list(results))
    show(rows, f"{num_bytes / 2**30:.2g} GiB of state, {arguments.rounds} rounds")


if __name__ == "__main__":
    main()
