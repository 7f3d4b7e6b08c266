"""Background saves: the trainer stages, and a thread or a process writes and commits.

A save has two sides, which talk in the messages of `protocol` and in nothing else:

* `client`, in the trainer: copies this rank's share into the arena, and has the `SaveHandle`.
* `server`, beside the trainer: writes the chunks, waits for the other ranks and commits. Ranks find
  each other through small files in the storage (`status_files`), never by collectives.

A server in a thread gets the messages as calls. One in a process gets them through a socket, of
which `process` has both ends. `saver` keeps what is worth keeping between saves: start reading
there.

`__all__` is what documentation names here; `Saver` and `save_async`, which scripts type, it names
at the top level.
"""

from remesh.background.client import Progress, SaveHandle
from remesh.background.saver import Saver as Saver
from remesh.background.saver import save_async as save_async

__all__ = ["Progress", "SaveHandle"]
