"""Save and load of a training state: remesh, torch.distributed.checkpoint, and the disk's limit.

The state is Llama-shaped, model in bfloat16 with float32 master weights and two Adam moments (14
bytes a parameter), every tensor sharded over the ranks. `limit` is the same processes moving the
same number of bytes raw: direct I/O in 4 MiB blocks from touched memory, preallocated, fsync. All
contestants take turns within each round; the figures are medians over the rounds. Loads are cold:
what was written is dropped from the page cache first.

Reported beside wall time: seconds relative to the limit, CPU seconds of all ranks, and for loads
the bytes read for each byte that was needed (as counted by the kernel: `rchar` of /proc/self/io).
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import remesh
from benchmarks.report import median, print_table, write_json
from remesh.storage import LocalStorage, aligned_buffer

BLOCK = 4 << 20


@dataclass(frozen=True)
class Options:
    gibibytes: float
    rounds: int
    folder: str


def shapes_of(gibibytes: float) -> dict[str, tuple[int, int]]:
    """Llama-like parameters that come to about the given size with their optimizer state."""
    hidden, layers = 1024, 4
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


def bytes_read_by_kernel() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split("\n")[0])


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(action: Callable[[], object]) -> dict[str, float]:
    """Wall seconds of the slowest rank; CPU seconds and bytes read of all ranks together."""
    dist.barrier()
    cpu, read, started = cpu_seconds(), bytes_read_by_kernel(), time.perf_counter()
    action()
    seconds = torch.tensor([time.perf_counter() - started])
    sums = torch.tensor([cpu_seconds() - cpu, float(bytes_read_by_kernel() - read)])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return {"seconds": seconds.item(), "cpu": sums[0].item(), "read": sums[1].item()}


def run_rank(rank: int, world_size: int, store: str, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    source = make_state(options.gibibytes, 0, fill=True)
    num_bytes = local_bytes(source)
    found: list[tuple[str, str, dict[str, float]]] = []
    for number in range(options.rounds):
        folder = Path(options.folder) / f"round-{number}"
        saves: dict[str, Callable[[], object]] = {
            "limit": lambda: raw_write(folder / "raw", num_bytes),  # noqa: B023
            "remesh": lambda: remesh.save(source, folder / "remesh"),  # noqa: B023
            "torch dcp": lambda: dcp.save(source, checkpoint_id=folder / "dcp"),  # noqa: B023
        }
        found += [("save", name, measure(action)) for name, action in saves.items()]
        for layout, dim in (("load, same layout", 0), ("load, rows to columns", 1)):
            target = make_state(options.gibibytes, dim, fill=False)
            loads: dict[str, Callable[[], object]] = {
                "limit": lambda: raw_read(folder / "raw", num_bytes),  # noqa: B023
                "remesh": lambda: remesh.load(target, folder / "remesh"),  # noqa: B023
                "torch dcp": lambda: dcp.load(target, checkpoint_id=folder / "dcp"),  # noqa: B023
            }
            if world_size > 1 and dim == 1:
                loads["remesh, each for itself"] = lambda: remesh.load(  # type: ignore[assignment]
                    target,  # noqa: B023
                    folder / "remesh",  # noqa: B023
                    share_reads=False,
                )
            for name, action in loads.items():
                for tensor in target.values():
                    tensor.to_local().zero_()
                if rank == 0:
                    drop_cache(folder)
                found.append((layout, name, measure(action)))
                if dim == 0:
                    check(source, target, name)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        dist.barrier()
    if rank == 0:
        results.append((world_size, num_bytes * world_size, found))
    dist.destroy_process_group()


def check(source: dict[str, Any], target: dict[str, Any], contestant: str) -> None:
    if contestant != "limit":
        for name, tensor in source.items():
            assert torch.equal(tensor.to_local(), target[name].to_local()), (contestant, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--folder", help="where to write; by default a temporary folder here")
    arguments = parser.parse_args()
    rows, everything = [], []
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder or ".") as place:
            folder = str(Path(place).resolve())
            options = Options(arguments.gib, arguments.rounds, folder)
            results = mp.Manager().list()
            store = f"{folder}/store"
            mp.spawn(run_rank, (world_size, store, options, results), nprocs=world_size)
            _, num_bytes, found = results[0]
        for task in dict.fromkeys(task for task, _, _ in found):
            limit = median([m["seconds"] for t, name, m in found if (t, name) == (task, "limit")])
            for name in dict.fromkeys(name for t, name, _ in found if t == task):
                of = [m for t, n, m in found if (t, n) == (task, name)]
                seconds = median([m["seconds"] for m in of])
                ratio = seconds / limit
                row = {
                    "ranks": world_size,
                    "task": task,
                    "contestant": name,
                    "seconds": seconds,
                    "times_limit": ratio,
                    "cpu_seconds": median([m["cpu"] for m in of]),
                    "bytes": num_bytes,
                    "read_per_needed": median([m["read"] for m in of]) / num_bytes,
                    "all_seconds": [m["seconds"] for m in of],
                }
                everything.append(row)
                rows.append(
                    [
                        f"{world_size} ranks, {task}",
                        name,
                        f"{seconds:.2f} s",
                        f"{ratio:.2f}",
                        f"{row['cpu_seconds']:.2f} s",
                        f"{row['read_per_needed']:.2f}" if task.startswith("load") else "",
                    ]
                )
    columns = ["", "contestant", "median", "x limit", "CPU", "read/needed"]
    print_table(f"{arguments.gib} GiB of state, {arguments.rounds} rounds", columns, rows)
    write_json("save_load", everything)


if __name__ == "__main__":
    main()
