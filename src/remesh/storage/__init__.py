"""Bytes by range: where checkpoints live.

A `Storage` is rooted at one place (a directory, a bucket prefix) and names files by relative paths
with forward slashes. It knows nothing of tensors. What it promises:

* `put` is atomic: a reader sees the old content, the new content or, before the first put, no
  file; never a part of it. With `overwrite=False` at most one of several writers succeeds.
* A call of `read` or `read_into` gives bytes of one file, even if another takes its name meanwhile.
* `create` makes a file of known size that is written by ranges, from several threads. It need not
  be visible, and has no promised content, before `Writer.finish` returns; afterwards it is
  durable.
* `sync` makes the existence of all finished files durable.

Direct I/O: a writer or reader may want buffers at aligned addresses and ranges at multiples of
`ALIGNMENT`. Callers that use `aligned_buffer` and such ranges (the end of the file excepted) get
the fast path where there is one; all other callers get correct results.

`open_storage` turns what a user wrote (a path or a URL) into a storage.
"""

from remesh.storage.base import ALIGNMENT, FileSystemSpace, Storage, Writer, aligned_buffer
from remesh.storage.base import Buffer as Buffer
from remesh.storage.base import Directory as Directory
from remesh.storage.base import StorageView as StorageView
from remesh.storage.base import map_memory as map_memory
from remesh.storage.base import touch as touch
from remesh.storage.local import LocalStorage
from remesh.storage.local import is_local as is_local
from remesh.storage.memory import MemoryStorage
from remesh.storage.messages import shown_url as shown_url
from remesh.storage.open import open_storage
from remesh.storage.workers import ask_together as ask_together

__all__ = [
    "ALIGNMENT",
    "FileSystemSpace",
    "LocalStorage",
    "MemoryStorage",
    "Storage",
    "Writer",
    "aligned_buffer",
    "open_storage",
]
