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
the fast path where there is one; everybody else gets correct results.

`open_storage` turns what a user wrote (a path or a URL) into a storage.
"""

from remesh.storage.buffers import ALIGNMENT, aligned_buffer, map_memory, touch
from remesh.storage.distance import is_remote
from remesh.storage.local import LocalStorage
from remesh.storage.memory import MemoryStorage
from remesh.storage.open import open_storage
from remesh.storage.paths import check_path
from remesh.storage.protocol import Buffer, FileSystemSpace, Storage, Writer
from remesh.storage.shown import shown_url
from remesh.storage.sizes import (
    Directory,
    DirectoryListing,
    FileFacts,
    SizedListing,
    list_sizes,
)

__all__ = [
    "ALIGNMENT",
    "Buffer",
    "Directory",
    "DirectoryListing",
    "FileFacts",
    "FileSystemSpace",
    "LocalStorage",
    "MemoryStorage",
    "SizedListing",
    "Storage",
    "Writer",
    "aligned_buffer",
    "check_path",
    "is_remote",
    "list_sizes",
    "map_memory",
    "open_storage",
    "shown_url",
    "touch",
]
