"""Moving bytes between memory, storage and ranks, chunk by chunk, through bounded buffers.

Files are read and written through page-aligned buffers of a few MiB, one for each thread. That
costs one memcpy from or into cached memory and buys much: direct I/O at the disk's speed without a
page cache in between, digests taken while the bytes are hot, one path for every dtype, stride and
device, nothing unverified in the user's tensors, and memory that does not grow with the state.
Responses of object stores need no such buffer, for they lie in memory already.

`write_stream` and `read_runs` are the executors of one rank. Between ranks there is one engine,
`transfer`, whose sources are files (`read_together`) or live memory (`plan_between_memories`). What
they do is planned in `remesh.planner`. `write_collected` joins the two, for files that one rank
writes of tensors on several. `stage` also cuts writing in two, so that a trainer need only wait for
the first half.
"""

from remesh.pipeline.collect import Collection, SpreadMemory, write_collected
from remesh.pipeline.from_files import read_together
from remesh.pipeline.from_memory import MemoryTransfer, plan_between_memories
from remesh.pipeline.read import Destination, limits_for, read_runs
from remesh.pipeline.stage import has_digests, write_stream
from remesh.pipeline.transfer import machine
from remesh.pipeline.write import (
    Compress,
    FileLayout,
    FilePiece,
    StreamFiles,
    one_file,
    whole_files,
)

__all__ = [
    "Collection",
    "Compress",
    "Destination",
    "FileLayout",
    "FilePiece",
    "MemoryTransfer",
    "SpreadMemory",
    "StreamFiles",
    "has_digests",
    "limits_for",
    "machine",
    "one_file",
    "plan_between_memories",
    "read_runs",
    "read_together",
    "whole_files",
    "write_collected",
    "write_stream",
]
