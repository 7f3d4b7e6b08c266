"""Moving bytes between memory and storage, chunk by chunk, through bounded buffers.

Both directions copy through page-aligned buffers of a few MiB, one for each thread. That costs one
memcpy from or into cached memory and buys much: direct I/O at the disk's speed without a page
cache in between, digests taken while the bytes are hot, one path for every dtype, stride and
device, nothing unverified in the user's tensors, and memory that does not grow with the state.

`write_file` and `read_runs` are the executors of one rank, `read_together` that of several; what
they do is planned in `remesh.planner`, and `dealing` says who reads for whom. `arena` and `stage`
cut writing in two, so that a trainer need only wait for the first half.
"""

from remesh.pipeline.dealing import (
    LOCAL_EXCHANGE_COST,
    REMOTE_EXCHANGE_COST,
    Dealer,
    deal,
    deal_if_it_pays,
    deal_to_owners,
)
from remesh.pipeline.read import Want, read_runs
from remesh.pipeline.share import read_together, read_watched
from remesh.pipeline.watch import Patience
from remesh.pipeline.write import FileLayout, FilePiece, WrittenFile, write_file

__all__ = [
    "LOCAL_EXCHANGE_COST",
    "REMOTE_EXCHANGE_COST",
    "Dealer",
    "FileLayout",
    "FilePiece",
    "Patience",
    "Want",
    "WrittenFile",
    "deal",
    "deal_if_it_pays",
    "deal_to_owners",
    "read_runs",
    "read_together",
    "read_watched",
    "write_file",
]
