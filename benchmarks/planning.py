"""Planning time and metadata for simulated worlds: no processes, no data, the real planner.

Every rank of a world holds a dim-0 shard of each of 1,000 tensors (FSDP2). Measured in one
process: what one rank does to describe its part, what rank 0 does to decode and plan the save and
to build and encode the index, the bytes that cross the network and lie in the index, and what one
rank does to open the index and to plan a load: of the dim-0 shard that it has in a quarter of the
world, and of a dim-1 shard of everything (row to column, which touches every piece), with what it
says to share reads. Each world has a process of its own; times are those of its CPU, for other work
on the machine does not concern them. Peak memory is that of rank 0, up to the encoded index, and
that of the whole process.

Also what it takes to open an index of random cuts, which have no pattern. The figures of the
largest world are printed with their goals.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import msgspec
import numpy as np

from benchmarks.report import print_table, write_json
from remesh.checkpoint.local_boxes import BoxesMessage, decode_local_boxes, encode_local_boxes
from remesh.core.geometry import Box, IntArray
from remesh.core.index import Index, StoredFile
from remesh.core.integrity import BLOCK_SIZE
from remesh.core.state import Role
from remesh.core.tables import BoxTable, TensorTable
from remesh.formats import native
from remesh.formats.native_writer import build_index
from remesh.formats.writer import Part
from remesh.planner import ReadLimits, SavePlan, plan_load, plan_save
from remesh.planner.assignment import touched_windows

HIDDEN = 4096
HEADER_BYTES = 4096
RANDOM_TENSORS, RANDOM_PIECES, RANDOM_FILES = 500, 921, 2048
GOALS = {
    "save": 3.0,
    "load": 1.0,
    "peak": 2e9,
    "index": 60e6,
    "open": 0.1,
    "random": 0.05,
    "growth": 1.0,
}
"""Seconds of one CPU, bytes, and the exponent with which the index grows with the ranks."""


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = action()
    return time.process_time() - started, result


def tensors_of(num_tensors: int, world_size: int) -> TensorTable:
    rows = max(HIDDEN, world_size)
    return TensorTable.of(
        [(f"model.layers.{n}.weight", "float32", (rows, HIDDEN)) for n in range(num_tensors)]
    )


def local_boxes_of(tensors: TensorTable, rank: int, world_size: int) -> BoxesMessage:
    """What a rank sends to rank 0."""
    rows = int(tensors.shapes[0, 0]) // world_size
    row = np.arange(len(tensors))
    boxes = BoxTable(
        tensors,
        row,
        np.tile(np.array([rank * rows, 0]), (len(row), 1)),
        np.tile(np.array([rows, HIDDEN]), (len(row), 1)),
    )
    return encode_local_boxes(boxes, np.full(len(boxes), int(Role.EQUAL), dtype=np.int64))


def parts_of(plan: SavePlan, assignments: list[IntArray]) -> list[list[Part]]:
    """What ranks would say of their files."""
    parts = []
    num_bytes = plan.cuts.num_bytes.rows
    for rank, rows in enumerate(assignments):
        ends = HEADER_BYTES + np.cumsum(num_bytes[rows])
        positions = ends - num_bytes[rows]
        size = int(ends[-1])
        digests = np.zeros((-(-size // BLOCK_SIZE), 2), dtype=np.uint64)
        path = native.data_path("0" * 12, rank)
        parts.append([Part(path, size, positions.tobytes(), digests.tobytes())])
    return parts


def rows_of(index: Index, world_size: int) -> BoxTable:
    """A dim-0 shard of every tensor, of the last rank of a world."""
    tensors = index.tensors
    rows = int(tensors.shapes[0, 0]) // world_size
    box = Box(((world_size - 1) * rows, 0), (rows, HIDDEN))
    return BoxTable.of(tensors, [(row, box) for row in range(len(tensors))])


def columns_of(index: Index, number: int, columns: int) -> BoxTable:
    """A dim-1 shard of every tensor."""
    tensors = index.tensors
    rows = int(tensors.shapes[0, 0])
    box = Box((0, number * columns), (rows, columns))
    return BoxTable.of(tensors, [(row, box) for row in range(len(tensors))])


def plan_columns(index: Index, number: int, columns: int) -> tuple[int, int, int]:
    """Plan a load of columns: bytes read, reads, and regions that were planned one by one."""
    plan = plan_load(index, columns_of(index, number, columns), ReadLimits())
    touched_windows(index, plan)
    return plan.bytes_read, plan.num_runs, len(plan.runs.regions)


def random_index() -> Index:
    """Tensors in random pieces, each of which lies in a random file."""
    rng = np.random.default_rng(0)
    rows, num_pieces = 1 << 16, RANDOM_TENSORS * RANDOM_PIECES
    tensors = TensorTable.of(
        [(f"model.layers.{n}.weight", "float32", (rows, 64)) for n in range(RANDOM_TENSORS)]
    )
    cuts = [
        np.sort(rng.choice(np.arange(1, rows), RANDOM_PIECES - 1, replace=False))
        for _ in range(RANDOM_TENSORS)
    ]
    offset = np.concatenate([np.append(0, cut) for cut in cuts])
    extent = np.concatenate([np.diff(cut, prepend=0, append=rows) for cut in cuts])
    boxes = BoxTable(
        tensors,
        np.repeat(np.arange(RANDOM_TENSORS), RANDOM_PIECES),
        np.stack([offset, np.zeros_like(offset)], axis=1),
        np.stack([extent, np.full_like(extent, 64)], axis=1),
    )
    file = np.sort(rng.integers(0, RANDOM_FILES, num_pieces))
    order = rng.permutation(num_pieces)
    ends = np.cumsum(boxes.num_bytes[order])
    begins = ends - boxes.num_bytes[order]
    position = np.empty(num_pieces, dtype=np.int64)
    position[order] = begins - begins[np.searchsorted(file, file)]
    of = np.empty(num_pieces, dtype=np.int64)
    of[order] = file
    sizes = np.bincount(file, weights=boxes.num_bytes[order], minlength=RANDOM_FILES)
    files = tuple(StoredFile(f"{n}.safetensors", int(size)) for n, size in enumerate(sizes))
    return Index.of(boxes, of, position, files)


def measure_random() -> dict[str, float]:
    """What it takes to open an index without a pattern: the median of several times."""
    encoded = random_index().encode()
    times = sorted(timed(lambda: Index.decode(encoded, "index"))[0] for _ in range(9))
    return {
        "pieces": RANDOM_TENSORS * RANDOM_PIECES,
        "index_bytes": len(encoded),
        "open_seconds": times[4],
    }


def measure(num_tensors: int, world_size: int) -> dict[str, float]:
    tensors = tensors_of(num_tensors, world_size)
    describe_seconds, _ = timed(lambda: local_boxes_of(tensors, 0, world_size))
    messages = [local_boxes_of(tensors, 0, world_size)]
    # What all ranks share is sent by one of them.
    others = range(1, world_size)
    messages += [
        msgspec.structs.replace(local_boxes_of(tensors, rank, world_size), shared=b"")
        for rank in others
    ]
    bytes_sent = len(msgspec.msgpack.encode(messages[-1]))
    decode_seconds, local_boxes = timed(lambda: decode_local_boxes(messages))
    messages.clear()
    plan_seconds, plan = timed(lambda: plan_save(local_boxes))
    local_boxes.clear()
    assign_seconds, assignments = timed(lambda: plan.assignments(world_size))
    parts = parts_of(plan, assignments)
    num_pieces = len(plan.cuts)
    index_seconds, index = timed(lambda: build_index(plan.cuts, assignments, parts, {}))
    encode_seconds, encoded = timed(index.encode)
    peak_save = peak_bytes()
    plan, assignments, parts, index = None, [], [], None
    open_seconds, opened = timed(lambda: Index.decode(encoded, "index"))
    rows = rows_of(opened, max(world_size // 4, 1))
    rows_seconds, _ = timed(lambda: plan_load(opened, rows, ReadLimits()))
    # The last column is where most pieces are cut by the ends of windows.
    columns = max(HIDDEN // world_size, 1)
    load_seconds, (bytes_read, num_reads, num_planned) = max(
        timed(lambda: plan_columns(opened, number, columns))  # noqa: B023
        for number in (0, HIDDEN // columns - 1)
    )
    return {
        "ranks": world_size,
        "tensors": num_tensors,
        "pieces": num_pieces,
        "describe_seconds_a_rank": describe_seconds,
        "save_seconds_rank_0": sum(
            (decode_seconds, plan_seconds, assign_seconds, index_seconds, encode_seconds)
        ),
        "bytes_sent_a_rank": bytes_sent,
        "index_bytes": len(encoded),
        "open_seconds_a_rank": open_seconds,
        "load_rows_seconds_a_rank": rows_seconds,
        "load_seconds_a_rank": load_seconds,
        "load_bytes_read_a_rank": bytes_read,
        "num_reads_a_rank": num_reads,
        "num_regions_planned": num_planned,
        "peak_save_bytes": peak_save,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """Most memory that this process has taken so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_apart(num_tensors: int, world_size: int) -> dict[str, float]:
    """`measure` in a process of its own, so that its peak memory is that of this world."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, num_tensors, world_size).result()


def growth_of(results: list[dict[str, float]]) -> dict[str, list[float]]:
    """For each figure its exponents: how it grows from world to world, against the pieces."""
    figures = ("save_seconds_rank_0", "index_bytes", "load_seconds_a_rank", "peak_bytes")
    return {
        name: [
            math.log(large[name] / small[name]) / math.log(large["pieces"] / small["pieces"])
            for small, large in pairwise(results)
        ]
        for name in figures
    }


def goals_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures that have a goal: those of the largest world, and what worlds have in common."""
    before, world = result["worlds"][-2:]
    ranks = f"{world['ranks']:,} ranks"
    grown = [math.log(world[key] / before[key]) for key in ("index_bytes", "ranks")]
    found = [
        (f"save: rank 0, {ranks}", "save", world["save_seconds_rank_0"]),
        (f"load of columns, {ranks}", "load", world["load_seconds_a_rank"]),
        (f"peak of the process, {ranks}", "peak", world["peak_bytes"]),
        (f"index, which every rank gets, {ranks}", "index", world["index_bytes"]),
        (f"open, {ranks}", "open", world["open_seconds_a_rank"]),
        ("growth of the index with the ranks", "growth", grown[0] / grown[1]),
        ("open, random cuts", "random", result["random"]["open_seconds"]),
    ]
    return [
        {"figure": figure, "unit": UNITS.get(goal, "s"), "value": value, "goal": GOALS[goal]}
        for figure, goal, value in found
    ]


def shown(value: float, unit: str) -> str:
    """A figure with its unit."""
    if unit == "bytes":
        return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
    return f"ranks^{value:.2f}" if unit == "exponent" else f"{value:.2g} s"


UNITS = {"peak": "bytes", "index": "bytes", "growth": "exponent"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 64, 1024, 16384])
    parser.add_argument("--tensors", type=int, default=1000)
    arguments = parser.parse_args()
    results = [measure_apart(arguments.tensors, world_size) for world_size in arguments.ranks]
    random = measure_random()
    growth = growth_of(results)
    print_table(
        f"Planning for {arguments.tensors} tensors",
        [
            *("ranks", "pieces", "save, rank 0", "sent a rank", "peak, rank 0", "index", "open"),
            *("load rows", "load columns", "peak"),
        ],
        [
            [
                f"{r['ranks']:,}",
                f"{r['pieces']:,}",
                f"{r['save_seconds_rank_0']:.3f} s",
                f"{r['bytes_sent_a_rank']:,} B",
                f"{r['peak_save_bytes'] / 1e9:.2f} GB",
                f"{r['index_bytes'] / 1e6:.1f} MB",
                f"{r['open_seconds_a_rank']:.3f} s",
                f"{r['load_rows_seconds_a_rank']:.3f} s",
                f"{r['load_seconds_a_rank']:.3f} s",
                f"{r['peak_bytes'] / 1e9:.2f} GB",
            ]
            for r in results
        ],
    )
    print_table(
        "Growth: x in figure ~ pieces^x, between each world and the one before",
        ["figure", *(f"{r['ranks']:,} ranks" for r in results[1:])],
        [[name, *(f"{x:.2f}" for x in exponents)] for name, exponents in growth.items()],
    )
    result: dict[str, Any] = {"worlds": results, "growth": growth, "random": random}
    result["goals"] = goals_of(result)
    print_table(
        "Goals",
        ["figure", "measured", "goal"],
        [
            [one["figure"], *(shown(one[key], one["unit"]) for key in ("value", "goal"))]
            for one in result["goals"]
        ],
    )
    write_json("planning", result)


if __name__ == "__main__":
    main()
