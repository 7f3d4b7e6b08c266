"""Live resharding: remesh, storage, whole tensors, and the link's limit.

The state is that of `benchmarks.save_load`, every tensor a DTensor. `limit` is the same processes
moving the same bytes raw: every rank sends every other one what that lacks, as one batch of `isend`
and `irecv` of contiguous memory that is there already. What a rank has itself is no part of the
limit, and is copied by all others, also by `limit with local copies`. `pushed again` is a kept
`remesh.Resharder`, which hands messages over in memory that both ranks see; `over the network` is
the same through sockets, as between machines; `reshard` plans each time, `save and load` goes
through a directory, and `whole tensors` makes each with `full_tensor()` and takes this rank's
columns out of it. All take turns within each round; the figures are medians over the rounds.

Reported beside wall time: seconds relative to the limit, CPU seconds of all ranks together and
relative to those of the limit, bytes that travelled for each byte that a rank lacked, and the
memory that the messages of a rank took.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import remesh
from benchmarks.report import median, print_table, write_json
from benchmarks.save_load import measure, shapes_of
from remesh.core.geometry import Box
from remesh.elastic.script import finish
from remesh.pipeline import transfer

State = dict[str, DTensor]
KINDS = {
    "model": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}
CASES = ("rows to columns", "2D to columns", "to other ranks", "rows to columns, cast")


@dataclass(frozen=True)
class Options:
    gibibytes: float
    rounds: int
    folder: str
    only: str
    cases: tuple[str, ...]


def cut(gibibytes: float, mesh: DeviceMesh, dims: list[int], *, casts: bool = False) -> State:
    """This rank's part of the state; empty on a rank outside of the mesh."""
    if mesh.get_coordinate() is None:
        return {}
    placements = [Shard(dim) for dim in dims]
    state = {}
    for name, shape in shapes_of(gibibytes).items():
        for kind, dtype in KINDS.items():
            local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
            data = torch.rand(local).to(torch.bfloat16 if casts else dtype)
            state[f"{kind}.{name}"] = DTensor.from_local(data, mesh, placements, run_check=False)
    return state


def states_of(case: str, gibibytes: float) -> tuple[State, State]:
    """Source and target of a case on this rank."""
    ranks = torch.arange(dist.get_world_size())
    line, half = DeviceMesh("cpu", ranks), len(ranks) // 2
    if case == "2D to columns":
        plane = DeviceMesh("cpu", ranks.reshape(2, -1))
        return cut(gibibytes, plane, [0, 1]), cut(gibibytes, line, [1])
    if case == "to other ranks":
        before, after = DeviceMesh("cpu", ranks[:half]), DeviceMesh("cpu", ranks[half:])
        return cut(gibibytes, before, [0]), cut(gibibytes, after, [1])
    casts = case == "rows to columns, cast"
    return cut(gibibytes, line, [0]), cut(gibibytes, line, [1], casts=casts)


def boxes_of(state: Mapping[str, DTensor]) -> dict[str, tuple[Box, int]]:
    found = {}
    for name, tensor in state.items():
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        found[name] = Box(tuple(offset), tuple(shape)), tensor.element_size()
    return found


def bytes_between(source: State, target: State) -> list[list[int]]:
    """The bytes that each rank (row) has and each other rank (column) lacks."""
    world_size = dist.get_world_size()
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, (boxes_of(source), boxes_of(target)))
    table = [[0] * world_size for _ in range(world_size)]
    for sender, (held, _) in enumerate(told):
        for receiver, (_, wanted) in enumerate(told):
            if sender != receiver:
                for name, (box, itemsize) in held.items():
                    common = box.intersect(wanted[name][0]) if name in wanted else None
                    table[sender][receiver] += 0 if common is None else common.size * itemsize
    return table


def raw_exchange(table: list[list[int]]) -> Callable[[], None]:
    """Every rank sends every other one as many bytes as that lacks."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    ones = {n: torch.ones(table[rank][n], dtype=torch.uint8) for n in ranks if table[rank][n]}
    room = {n: torch.ones(table[n][rank], dtype=torch.uint8) for n in ranks if table[n][rank]}

    def move() -> None:
        operations = [dist.P2POp(dist.irecv, room[other], other) for other in room]
        operations += [dist.P2POp(dist.isend, ones[other], other) for other in ones]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    return move


def local_copies(source: State, target: State) -> Callable[[], None]:
    """Every rank copies what it has itself."""
    held, wanted = boxes_of(source), boxes_of(target)
    pairs = []
    for name in held.keys() & wanted.keys():
        (own, _), (box, _) = held[name], wanted[name]
        common = own.intersect(box)
        if common is not None:
            into = target[name].to_local()[common.relative_to(box).slices]
            pairs.append((into, source[name].to_local()[common.relative_to(own).slices]))

    def copy() -> None:
        for into, values in pairs:
            into.copy_(values)

    return copy


def through_whole_tensors(source: State, target: State) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for name, tensor in source.items():
        target[name].to_local().copy_(tensor.full_tensor().chunk(world_size, 1)[rank])


def through_storage(source: State, target: State, folder: Path) -> None:
    remesh.save(source, folder)
    remesh.load(target, folder)


def contestants_of(case: str, source: State, target: State, place: Path) -> dict[str, Any]:
    """What takes part in a case, by name."""
    casts = case.endswith("cast")
    pushing, sending = (remesh.Resharder(source, target, cast=casts) for _ in range(2))
    with mock.patch.object(transfer, "machine", return_value=""):
        sending.push()
    pushing.push()
    move, copy = raw_exchange(bytes_between(source, target)), local_copies(source, target)
    found = {
        "limit": move,
        "limit with local copies": lambda: (move(), copy()),
        "pushed again": pushing.push,
        "pushed again, over the network": sending.push,
        "reshard": lambda: remesh.reshard(source, target, cast=casts),
    }
    if case == "rows to columns":
        found["save and load"] = lambda: through_storage(source, target, place)
        found["whole tensors"] = lambda: through_whole_tensors(source, target)
    return found


def run_case(case: str, options: Options) -> list[dict[str, Any]]:
    """Let all contestants of a case take turns; what was measured of each."""
    source, target = states_of(case, options.gibibytes)
    place = Path(options.folder) / "saved"
    found: dict[str, list[dict[str, Any]]] = {}
    who = contestants_of(case, source, target, place)
    lacking = sum(map(sum, bytes_between(source, target)))
    for _ in range(options.rounds):
        for name, action in who.items():
            if options.only and name not in ("limit", *options.only.split(",")):
                continue
            reports: list[Any] = []
            found.setdefault(name, []).append(measure(lambda: reports.append(action())))  # noqa: B023
            found[name][-1]["report"] = reports[0]
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
    rows = []
    for name, of in found.items():
        report = of[0].pop("report")
        sent = getattr(report, "group_bytes_sent", None)
        rows.append(
            {
                "ranks": dist.get_world_size(),
                "case": case,
                "contestant": name,
                "seconds": median([one["seconds"] for one in of]),
                "times_limit": median([one["seconds"] for one in of])
                / median([one["seconds"] for one in found["limit"]]),
                "cpu_seconds": median([one["cpu"] for one in of]),
                "cpu_times_limit": median([one["cpu"] for one in of])
                / median([one["cpu"] for one in found["limit"]]),
                "sent_per_lacking": None if sent is None else sent / lacking,
                "bytes": lacking,
                "buffer_bytes": getattr(report, "buffer_bytes", None),
                "all_seconds": [one["seconds"] for one in of],
                "all_cpu_seconds": [one["cpu"] for one in of],
            }
        )
    return rows


def run_rank(rank: int, world_size: int, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    store = f"file://{options.folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size)
    for case in options.cases:
        if case == "2D to columns" and world_size < 4:
            continue
        found = run_case(case, options)
        if rank == 0:
            results.extend(found)
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
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, mp.Manager() as manager:
            results = manager.list()
            options = Options(
                arguments.gib, arguments.rounds, folder, arguments.only, tuple(arguments.cases)
            )
            mp.spawn(run_rank, (world_size, options, results), nprocs=world_size)
            rows += results
    print_table(
        f"{arguments.gib} GiB of state, {arguments.rounds} rounds",
        ["", "contestant", "median", "x limit", "CPU", "x limit", "sent/lacking", "buffers"],
        [
            [
                f"{row['ranks']} ranks, {row['case']}",
                row["contestant"],
                f"{row['seconds']:.3f} s",
                f"{row['times_limit']:.2f}",
                f"{row['cpu_seconds']:.3f} s",
                f"{row['cpu_times_limit']:.2f}",
                "" if row["sent_per_lacking"] is None else f"{row['sent_per_lacking']:.3f}",
                "" if row["buffer_bytes"] is None else f"{row['buffer_bytes'] / 2**20:.0f} MiB",
            ]
            for row in rows
        ],
    )
    write_json("reshard", {"gibibytes": arguments.gib, "rounds": arguments.rounds, "rows": rows})


if __name__ == "__main__":
    main()
