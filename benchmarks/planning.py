"""Planning time and metadata for simulated worlds: no processes, no data, the real planner.

Every rank of a world holds a dim-0 shard of each of 1,000 tensors (FSDP2). Measured in one
process: what one rank does to describe its part, what rank 0 does to decode and plan the save and
to build and encode the index, the bytes that cross the network and lie in the index, and what one
rank does to open the index and to plan a load: of the dim-0 shard that it has in a quarter of the
world, and of a dim-1 shard of everything (row to column, which touches every piece). Each world has
a process of its own; times are those of its CPU, for other work on the machine does not concern
them. Peak memory is that of rank 0, up to the encoded index, and that of the whole process.
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
from remesh.formats import native
from remesh.formats.framing import Part
from remesh.formats.native_writer import build_index
from remesh.geometry import Box, IntArray
from remesh.index import Index
from remesh.integrity import BLOCK_SIZE
from remesh.planner import ReadLimits, SavePlan, plan_load, plan_save
from remesh.state import Role
from remesh.tables import BoxTable, TensorTable

HIDDEN = 4096
HEADER_BYTES = 4096


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
    num_bytes = plan.boxes.num_bytes
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


def measure(num_tensors: int, world_size: int) -> dict[str, float]:
    tensors = tensors_of(num_tensors, world_size)
    describe_seconds, _ = timed(lambda: local_boxes_of(tensors, 0, world_size))
    messages = [local_boxes_of(tensors, rank, world_size) for rank in range(world_size)]
    # What all ranks share is sent by one of them.
    messages[1:] = [message.without_shared() for message in messages[1:]]
    bytes_sent = len(msgspec.msgpack.encode(messages[-1]))
    decode_seconds, local_boxes = timed(lambda: decode_local_boxes(messages))
    messages.clear()
    plan_seconds, plan = timed(lambda: plan_save(local_boxes))
    local_boxes.clear()
    assign_seconds, assignments = timed(lambda: plan.assignments(world_size))
    parts = parts_of(plan, assignments)
    num_pieces = len(plan.boxes)
    index_seconds, index = timed(lambda: build_index(plan.boxes, assignments, parts, {}))
    encode_seconds, encoded = timed(index.encode)
    peak_save = peak_bytes()
    plan, assignments, parts, index = None, [], [], None
    open_seconds, opened = timed(lambda: Index.decode(encoded, "index"))
    rows = rows_of(opened, max(world_size // 4, 1))
    rows_seconds, _ = timed(lambda: plan_load(opened, rows, ReadLimits()))
    # The last column is where most pieces are cut by the ends of windows.
    columns = max(HIDDEN // world_size, 1)
    load_seconds, load_plan = max(
        (
            timed(lambda: plan_load(opened, columns_of(opened, number, columns), ReadLimits()))  # noqa: B023
            for number in (0, HIDDEN // columns - 1)
        ),
        key=lambda found: found[0],
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
        "load_bytes_read_a_rank": load_plan.bytes_read,
        "num_reads_a_rank": load_plan.num_runs,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1024, 16384])
    parser.add_argument("--tensors", type=int, default=1000)
    arguments = parser.parse_args()
    results = [measure_apart(arguments.tensors, world_size) for world_size in arguments.ranks]
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
    write_json("planning", {"worlds": results, "growth": growth})


if __name__ == "__main__":
    main()
