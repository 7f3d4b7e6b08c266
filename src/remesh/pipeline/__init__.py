"""Moving bytes between memory, storage and ranks, chunk by chunk, through bounded buffers.

Files are read and written through page-aligned buffers of a few MiB, one for each thread. That
costs one memcpy from or into cached memory and buys much: direct I/O at the disk's speed without a
page cache in between, digests taken while the bytes are hot, one path for every dtype, stride and
device, nothing unverified in the user's tensors, and memory that does not grow with the state.
Responses of object stores need no such buffer, for they lie in memory already.

`write_staged` and `read_runs` are the executors of one rank. Between ranks there is one engine,
`transfer`, whose sources are files (`read_together`) or live memory (`plan_between_memories`). What
they do is planned in `remesh.planner`. A `Collection` joins the two, for files that one rank writes
of tensors on several. `stage` also cuts writing in two, so that a trainer need only wait for the
first half.
"""

from remesh.pipeline.collect import Collection as Collection
from remesh.pipeline.from_files import read_together as read_together
from remesh.pipeline.read import Destination as Destination
from remesh.pipeline.stage import write_staged as write_staged
from remesh.pipeline.write import Compress as Compress
from remesh.pipeline.write import FileLayout as FileLayout
from remesh.pipeline.write import FilePiece as FilePiece
from remesh.pipeline.write import StreamFiles as StreamFiles
