"""Planning time and metadata for simulated worlds: no processes, no data, the real planner.

Every rank of a world holds a dim-0 shard of each of 1,000 tensors (FSDP2). Measured in one
process: what one rank does to describe its part, what rank 0 does to decode and plan the save and
to build and encode the index, the bytes that cross the network and lie in the index, and what one
rank does to plan loading a dim-1 shard of everything (row to column, which touches every piece).

`--dcp` adds torch.distributed.checkpoint's planners on the same pieces, for small worlds.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.report import print_table, write_json
from remesh.formats import native
from remesh.geometry import Box, IntArray
from remesh.index import BoxTable, Index, TensorTable, decode_columns, encode_columns
from remesh.integrity import BLOCK_SIZE
from remesh.planner import Holdings, ReadLimits, SavePlan, plan_load, plan_save
from remesh.state import Role

HIDDEN = 4096
HEADER_BYTES = 4096


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def tensors_of(num_tensors: int, world_size: int) -> TensorTable:
    rows = max(HIDDEN, world_size)
    return TensorTable.of(
        [(f"model.layers.{n}.weight", "float32", (rows, HIDDEN)) for n in range(num_tensors)]
    )


def holdings_of(tensors: TensorTable, rank: int, world_size: int) -> bytes:
    """What a rank sends to rank 0."""
    rows = int(tensors.shapes[0, 0]) // world_size
    box = Box((rank * rows, 0), (rows, HIDDEN))
    boxes = BoxTable.of(tensors, [(row, box) for row in range(len(tensors))])
    roles = np.full(len(boxes), int(Role.EQUAL), dtype=np.int64)
    return encode_columns({**boxes.columns(), "role": roles})


def decode_holdings(data: bytes) -> Holdings:
    columns, _ = decode_columns(data, "holdings")
    return Holdings(BoxTable.from_columns(columns), columns["role"])


def parts_of(plan: SavePlan, assignments: list[IntArray]) -> list[native.Part]:
    """What ranks would say of their files."""
    parts = []
    num_bytes = plan.boxes.num_bytes
    for rank, rows in enumerate(assignments):
        ends = HEADER_BYTES + np.cumsum(num_bytes[rows])
        positions = ends - num_bytes[rows]
        size = int(ends[-1])
        digests = np.zeros((-(-size // BLOCK_SIZE), 2), dtype=np.uint64)
        path = native.data_path("0" * 12, rank)
        parts.append(native.Part(path, size, positions.tobytes(), digests.tobytes()))
    return parts


def measure(num_tensors: int, world_size: int) -> dict[str, float]:
    tensors = tensors_of(num_tensors, world_size)
    describe_seconds, _ = timed(lambda: holdings_of(tensors, 0, world_size))
    messages = [holdings_of(tensors, rank, world_size) for rank in range(world_size)]
    decode_seconds, holdings = timed(lambda: [decode_holdings(data) for data in messages])
    plan_seconds, plan = timed(lambda: plan_save(holdings))
    assign_seconds, assignments = timed(lambda: plan.assignments(world_size))
    parts = parts_of(plan, assignments)
    index_seconds, index = timed(lambda: native.build_index(plan.boxes, assignments, parts, {}))
    encode_seconds, encoded = timed(index.encode)
    open_seconds, _ = timed(lambda: Index.decode(encoded, "index"))
    columns = max(HIDDEN // world_size, 1)
    wanted = BoxTable.of(
        index.boxes.tensors,
        [(row, Box((0, 0), (int(tensors.shapes[row, 0]), columns))) for row in range(num_tensors)],
    )
    load_seconds, load_plan = timed(lambda: plan_load(index, wanted, ReadLimits()))
    return {
        "ranks": world_size,
        "tensors": num_tensors,
        "pieces": len(plan.boxes),
        "describe_seconds_a_rank": describe_seconds,
        "save_seconds_rank_0": sum(
            (decode_seconds, plan_seconds, assign_seconds, index_seconds, encode_seconds)
        ),
        "bytes_sent_a_rank": len(messages[0]),
        "index_bytes": len(encoded),
        "open_seconds_a_rank": open_seconds,
        "load_seconds_a_rank": load_seconds,
        "num_reads_a_rank": load_plan.num_runs,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 64, 1024])
    parser.add_argument("--tensors", type=int, default=1000)
    arguments = parser.parse_args()
    results = [measure(arguments.tensors, world_size) for world_size in arguments.ranks]
    print_table(
        f"Planning for {arguments.tensors} tensors",
        ["ranks", "pieces", "save, rank 0", "sent a rank", "index", "open", "load plan a rank"],
        [
            [
                f"{r['ranks']:,}",
                f"{r['pieces']:,}",
                f"{r['save_seconds_rank_0']:.3f} s",
                f"{r['bytes_sent_a_rank'] / 1e3:.0f} kB",
                f"{r['index_bytes'] / 1e6:.1f} MB",
                f"{r['open_seconds_a_rank']:.3f} s",
                f"{r['load_seconds_a_rank']:.3f} s",
            ]
            for r in results
        ],
    )
    write_json("planning", results)


if __name__ == "__main__":
    main()
