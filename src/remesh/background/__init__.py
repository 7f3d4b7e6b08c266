"""Background saves: the trainer stages, and a thread or a process writes and commits.

A save has two sides, which call each other:

* `save`, the trainer's: copies this rank's share into the arena, and has the `SaveHandle`.
* `writer`: writes the chunks, waits for the other ranks and commits. Ranks find each other through
  small files in the storage (`status_files`), never by collectives.

The writer runs in a thread, or in a process (`process`), to which calls go through a socket.
`saver` keeps what is worth keeping between saves: start reading there.

`__all__` is what documentation names here; `Saver` and `save_async`, which scripts type, it names
at the top level.
"""

from remesh.background.save import Progress, SaveHandle
from remesh.background.saver import Saver as Saver
from remesh.background.saver import save_async as save_async

__all__ = ["Progress", "SaveHandle"]
