"""Save, load and resharded load: the drop-in, Megatron itself, and the disk's limit.

The state is that of `benchmarks.save_load` as `ShardedTensor`s, every tensor cut over the ranks in
rows; the resharded load asks for columns. `limit` is the same processes moving the same number of
bytes raw. All contestants take turns within each round; the figures are medians over the rounds.
Loads are cold. Needs `megatron-core`, of which two calls of CUDA are replaced on machines without.

CPU seconds are not compared: Megatron writes in processes of its own.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.contestants import megatron
from benchmarks.report import median, print_table, write_json
from benchmarks.save_load import (
    Options,
    drop_cache,
    measure,
    raw_read,
    raw_write,
    shapes_of,
)
from remesh.compat import megatron as here
from remesh.elastic.script import finish

DTYPES = {
    "model": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}


def make_data(gibibytes: float, dim: int, *, fill: bool) -> dict[str, torch.Tensor]:
    """This rank's shards by key."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = {}
    for name, shape in shapes_of(gibibytes).items():
        for kind, dtype in DTYPES.items():
            local = list(shape)
            local[dim] //= dist.get_world_size()
            tensor = torch.zeros(local, dtype=dtype)
            data[f"{kind}.{name}"] = tensor.uniform_(generator=generator) if fill else tensor
    return data


def described(package: ModuleType, data: dict[str, torch.Tensor], dim: int) -> dict[str, Any]:
    """The shards as one of the packages describes them."""
    offset = (dim, dist.get_rank(), dist.get_world_size())
    return {
        key: package.ShardedTensor.from_rank_offsets(key, tensor, offset)
        for key, tensor in data.items()
    }


def run_rank(rank: int, world_size: int, store: str, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    there = megatron()
    source = make_data(options.gibibytes, 0, fill=True)
    num_bytes = sum(tensor.nbytes for tensor in source.values())
    found: list[tuple[str, str, dict[str, float]]] = []

    for number in range(options.rounds):
        folder = Path(options.folder) / f"round-{number}"
        places = {name: folder / name for name in ("remesh", "remesh, torch_dist", "megatron-core")}
        if rank == 0:
            for place in places.values():
                place.mkdir(parents=True)
        dist.barrier()
        saves: dict[str, Callable[[], object]] = {
            "limit": lambda: raw_write(folder / "raw", num_bytes),  # noqa: B023
            "remesh": lambda: here.save(
                described(here, source, 0),
                places["remesh"],  # noqa: B023
                ("remesh", 1),
            ),
            "remesh, torch_dist": lambda: here.save(
                described(here, source, 0),
                places["remesh, torch_dist"],  # noqa: B023
                ("torch_dist", 1),
            ),
            "megatron-core": lambda: there.save(
                described(there, source, 0),
                str(places["megatron-core"]),  # noqa: B023
            ),
        }
        found += [("save", name, measure(action)) for name, action in saves.items()]
        for task, dim in (("load, same layout", 0), ("load, rows to columns", 1)):
            target = make_data(options.gibibytes, dim, fill=False)
            loads: dict[str, Callable[[], object]] = {
                "limit": lambda: raw_read(folder / "raw", num_bytes)  # noqa: B023
            }
            for name, place in places.items():
                package = there if name == "megatron-core" else here
                loads[name] = lambda package=package, place=place: package.load(  # type: ignore[misc]
                    described(package, target, dim),  # noqa: B023
                    str(place),
                )
            for name, action in loads.items():
                for tensor in target.values():
                    tensor.zero_()
                if rank == 0:
                    drop_cache(folder)
                found.append((task, name, measure(action)))
                if dim == 0 and name != "limit":
                    assert all(torch.equal(target[key], source[key]) for key in source), name
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        dist.barrier()
    if rank == 0:
        results.append((num_bytes * world_size, found))
    dist.destroy_process_group()
    finish()  # without a race between gloo's threads and the end of the interpreter


def rows_of(world_size: int, num_bytes: int, found: Any) -> list[dict[str, Any]]:
    """The medians of one world size."""
    rows = []
    for task in dict.fromkeys(task for task, _, _ in found):
        limit = median([m["seconds"] for t, name, m in found if (t, name) == (task, "limit")])
        for name in dict.fromkeys(name for t, name, _ in found if t == task):
            of = [m for t, n, m in found if (t, n) == (task, name)]
            seconds = median([m["seconds"] for m in of])
            rows.append(
                {
                    "ranks": world_size,
                    "task": task,
                    "contestant": name,
                    "seconds": seconds,
                    "times_limit": seconds / limit,
                    "bytes": num_bytes,
                    "read_per_needed": median([m["read"] for m in of]) / num_bytes,
                    "all_seconds": [m["seconds"] for m in of],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--folder", help="where to write; by default a temporary folder here")
    arguments = parser.parse_args()
    everything: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder or ".") as place:
            folder = str(Path(place).resolve())
            options = Options(arguments.gib, arguments.rounds, folder)
            results = mp.Manager().list()
            mp.spawn(run_rank, (world_size, f"{folder}/store", options, results), nprocs=world_size)
            everything += rows_of(world_size, *results[0])
    table = [
        [
            f"{row['ranks']} ranks, {row['task']}",
            row["contestant"],
            f"{row['seconds']:.2f} s",
            f"{row['times_limit']:.2f}",
            f"{row['read_per_needed']:.2f}" if row["task"].startswith("load") else "",
        ]
        for row in everything
    ]
    columns = ["", "contestant", "median", "x limit", "read/needed"]
    print_table(f"{arguments.gib} GiB of state, {arguments.rounds} rounds", columns, table)
    write_json("megatron", everything)


if __name__ == "__main__":
    main()
