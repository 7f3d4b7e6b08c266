"""Snapshots in the memory of the nodes: how long each keeps the training waiting, and its bytes.

Each rank stands for a node: it has a directory of its own in `/dev/shm`, as the agent of a node
offers one. The state is that of `benchmarks.save_load`. A `remesh.Manager` with `memory_every=1`
makes a snapshot in each call of `step`, without and with a replica on the next node. `limit` is one
copy of each rank's part into memory that was touched before. Beside it stand a file of `torch.save`
for each rank and a checkpoint of `torch.distributed.checkpoint` (DCP) in the same memory, which is
what a job without snapshots can do; neither has digests or replicas.

A snapshot lies in new files; `new file` is what these alone cost: the same bytes, written raw.

Contestants take turns within each round. `first` is the first round; the other figures are medians
of the later ones. `held` are the bytes in memory after a snapshot, as a share of the state.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

import remesh
from benchmarks.report import median, print_table, write_json
from benchmarks.save_load import Options, local_bytes, make_state, measure
from remesh.elastic.script import finish
from remesh.run_info import SNAPSHOT_VARIABLE

Found = list[tuple[str, dict[str, float]]]
"""Contestant, and what was measured."""


@contextmanager
def manager_of(folder: Path, name: str, replicas: int) -> Iterator[remesh.Manager]:
    """A manager whose snapshots lie in a folder of this rank's node."""
    os.environ[SNAPSHOT_VARIABLE] = str(node_of(folder, name))
    node_of(folder, name).mkdir(parents=True)
    with remesh.Manager(
        folder / f"{name}-root",
        memory_every=1,
        memory_replicas=replicas,
        save_at_end=False,
    ) as manager:
        yield manager


def node_of(folder: Path, name: str) -> Path:
    return folder / f"{name}-{dist.get_rank()}"


def held(place: Path) -> int:
    """Bytes of memory behind a folder."""
    return sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())


def as_bytes(state: dict[str, Any], place: Path) -> None:
    """This rank's part as it lies in memory; the former file gives way once it is whole."""
    place.mkdir(exist_ok=True)
    with (place / "new").open("wb", buffering=0) as file:
        for one in state.values():
            file.write(one.to_local().view(torch.uint8).numpy())
    (place / "new").rename(place / "state")


def as_file(state: dict[str, Any], place: Path) -> None:
    """What `torch.save` makes of it, likewise."""
    place.mkdir(exist_ok=True)
    torch.save({name: one.to_local() for name, one in state.items()}, place / "new")
    (place / "new").rename(place / "state")


def as_dcp(state: dict[str, Any], folder: Path, number: int) -> None:
    """A checkpoint of DCP; the one before gives way."""
    dcp.save(state, checkpoint_id=folder / f"dcp-{number}")
    if dist.get_rank() == 0:
        shutil.rmtree(folder / f"dcp-{number - 1}", ignore_errors=True)


def run_rank(rank: int, world_size: int, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    folder = Path(options.folder)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    state = make_state(options.gibibytes, 0, True)
    copies = {name: one.to_local().clone() for name, one in state.items()}
    found: Found = []
    with ExitStack() as stack:
        managers = {"snapshot": stack.enter_context(manager_of(folder, "alone", 0))}
        if world_size > 1:
            with_replica = manager_of(folder, "replica", 1)
            managers["snapshot, 1 replica"] = stack.enter_context(with_replica)

        def copy() -> None:
            for name, one in state.items():
                copies[name].copy_(one.to_local())

        for number in range(options.rounds):
            for one in state.values():
                one.to_local().view(-1)[:: 1 << 16] += 1
            step = number + 1
            contestants: dict[str, Callable[[], object]] = {
                "limit": copy,
                "new file": lambda: as_bytes(state, node_of(folder, "raw")),
                **{
                    name: lambda manager=manager: manager.step(step, state)  # type: ignore[misc] # noqa: B023
                    for name, manager in managers.items()
                },
                "torch.save": lambda: as_file(state, node_of(folder, "file")),
                "torch DCP": lambda: as_dcp(state, folder, step),  # noqa: B023
            }
            for name, action in contestants.items():
                found.append((name, measure(action)))
        places = {"snapshot": "alone", "snapshot, 1 replica": "replica"}
        memory = {name: held(node_of(folder, places[name])) for name in managers}
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, memory)
    if rank == 0:
        total = {name: sum(one[name] for one in gathered) for name in memory}
        results.append((local_bytes(state) * world_size, found, total))
    dist.barrier()
    dist.destroy_process_group()
    finish()  # without a race between gloo's threads and the end of the interpreter


def rows_of(
    world_size: int, num_bytes: int, found: Found, memory: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """What each contestant came to."""
    of = {
        name: [measured for other, measured in found if other == name]
        for name in dict.fromkeys(name for name, _ in found)
    }
    limit = median([one["seconds"] for one in of["limit"][1:]])
    for name, runs in of.items():
        later = median([one["seconds"] for one in runs[1:]])
        yield {
            "ranks": world_size,
            "contestant": name,
            "bytes": num_bytes,
            "seconds": later,
            "times_limit": later / limit,
            "first": runs[0]["seconds"] / limit,
            "cpu_seconds": median([one["cpu"] for one in runs[1:]]),
            "held": memory[name] / num_bytes if name in memory else None,
            "all_seconds": [one["seconds"] for one in runs],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--folder", default="/dev/shm", help="memory to keep snapshots in")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
            options = Options(arguments.gib, arguments.rounds, place)
            results = mp.Manager().list()
            mp.spawn(run_rank, (world_size, options, results), nprocs=world_size)
            rows += rows_of(world_size, *results[0])
    print_table(
        f"{arguments.gib} GiB of state, {arguments.rounds} rounds; the limit is one copy",
        ["ranks", "contestant", "blocked", "x limit", "first", "CPU", "held"],
        [
            [
                str(row["ranks"]),
                row["contestant"],
                f"{row['seconds']:.2f} s",
                f"{row['times_limit']:.2f}",
                f"{row['first']:.2f}",
                f"{row['cpu_seconds']:.2f} s",
                "" if row["held"] is None else f"{row['held']:.2f}",
            ]
            for row in rows
        ],
    )
    write_json("snapshots", rows)


if __name__ == "__main__":
    main()
