"""Live resharding from rows to columns: remesh, storage, whole tensors, and the link's limit.

The state is that of `benchmarks.save_load`, every tensor a DTensor. `limit` is the same processes
moving the same bytes raw: every rank sends every other one what that lacks, as one batch of
`isend` and `irecv` of contiguous memory that is there already. `pushed again` is a kept
`remesh.Resharder`, `reshard` plans each time, `save and load` goes through a directory, and `whole
tensors` makes each with `full_tensor()` and takes this rank's columns out of it. All take turns
within each round; the figures are medians over the rounds.

Reported beside wall time: seconds relative to the limit, CPU seconds of rank 0, bytes that
travelled for each byte that a rank lacked, and the most memory that a rank took above the two
states.
"""

from __future__ import annotations

import argparse
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
import torch.multiprocessing as mp

import remesh
from benchmarks.report import median, print_table, write_json
from benchmarks.save_load import local_bytes, make_state
from remesh.script import finish


@dataclass(frozen=True)
class Options:
    gibibytes: float
    rounds: int
    folder: str
    only: str


def raw_exchange(num_bytes: int) -> Callable[[], None]:
    """Every rank sends every other one its columns of its rows."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    others = [other for other in range(world_size) if other != rank]
    size = num_bytes // world_size
    leaving = {other: torch.ones(size, dtype=torch.uint8) for other in others}
    arriving = {other: torch.ones(size, dtype=torch.uint8) for other in others}

    def move() -> None:
        operations = [dist.P2POp(dist.irecv, arriving[other], other) for other in others]
        operations += [dist.P2POp(dist.isend, leaving[other], other) for other in others]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return move


def through_whole_tensors(source: dict[str, Any], target: dict[str, Any]) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for name, tensor in source.items():
        target[name].to_local().copy_(tensor.full_tensor().chunk(world_size, 1)[rank])


def through_storage(source: dict[str, Any], target: dict[str, Any], folder: Path) -> None:
    remesh.save(source, folder)
    remesh.load(target, folder)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_rank(rank: int, world_size: int, store: str, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    source = make_state(options.gibibytes, 0, fill=True)
    target = make_state(options.gibibytes, 1, fill=True)
    num_bytes = local_bytes(source)
    pushing = remesh.Resharder(source, target)
    before = peak_bytes()
    report = pushing.push()
    facts = {
        "bytes": num_bytes,
        "sent_per_lacking": report.group_bytes_sent / (num_bytes * (world_size - 1)),
        "buffer_bytes": report.buffer_bytes,
        "peak_above": peak_bytes() - before,
    }
    folder = Path(options.folder)
    found: list[tuple[str, float, float]] = []
    limit = raw_exchange(num_bytes)
    for number in range(options.rounds):
        place = folder / f"{world_size}-{number}"
        contestants: dict[str, Callable[[], object]] = {
            "limit": limit,
            "pushed again": pushing.push,
            "reshard": lambda: remesh.reshard(source, target),
            "save and load": lambda: through_storage(source, target, place),  # noqa: B023
            "whole tensors": lambda: through_whole_tensors(source, target),
        }
        for name, action in contestants.items():
            if options.only and name not in options.only.split(","):
                continue
            dist.barrier()
            started, cpu = time.perf_counter(), time.process_time()
            action()
            spent = time.process_time() - cpu
            dist.barrier()
            found.append((name, time.perf_counter() - started, spent))
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
    results[rank] = (facts, found)
    dist.barrier()
    dist.destroy_process_group()
    finish()  # without a race between gloo's threads and the end of the interpreter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--folder", help="where checkpoints go; default: a temporary one")
    parser.add_argument("--only", default="", help="contestants, with commas between them")
    arguments = parser.parse_args()
    rows, everything = [], []
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, mp.Manager() as manager:
            results = manager.dict()
            options = Options(arguments.gib, arguments.rounds, folder, arguments.only)
            store = f"{folder}/store"
            mp.spawn(run_rank, (world_size, store, options, results), nprocs=world_size)
            facts, found = results[0]
        limit = median([seconds for name, seconds, _ in found if name == "limit"])
        for name in dict.fromkeys(name for name, *_ in found):
            of = [seconds for other, seconds, _ in found if other == name]
            spent = median([cpu for other, _, cpu in found if other == name])
            row = {"ranks": world_size, "contestant": name, "seconds": median(of), "cpu": spent}
            everything.append(row | facts | {"all_seconds": of})
            is_pushed = name == "pushed again"
            rows.append(
                [
                    f"{world_size} ranks",
                    name,
                    f"{median(of):.3f} s",
                    f"{median(of) / limit:.2f}",
                    f"{spent:.3f} s",
                    f"{facts['sent_per_lacking']:.3f}" if is_pushed else "",
                    f"{facts['peak_above'] / 2**20:.0f} MiB" if is_pushed else "",
                ]
            )
    columns = ["", "contestant", "median", "x limit", "CPU", "sent/lacking", "memory above"]
    print_table(f"{arguments.gib} GiB of state, {arguments.rounds} rounds", columns, rows)
    write_json("reshard", everything)


if __name__ == "__main__":
    main()
