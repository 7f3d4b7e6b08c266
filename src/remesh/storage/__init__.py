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

from remesh.storage.buffers import ALIGNMENT, aligned_buffer
from remesh.storage.buffers import map_memory as map_memory
from remesh.storage.buffers import touch as touch
from remesh.storage.distance import ask_meanwhile as ask_meanwhile
from remesh.storage.distance import ask_together as ask_together
from remesh.storage.distance import flow_for as flow_for
from remesh.storage.distance import is_local as is_local
from remesh.storage.distance import is_remote as is_remote
from remesh.storage.distance import latency_of as latency_of
from remesh.storage.local import LocalStorage
from remesh.storage.memory import MemoryStorage
from remesh.storage.open import open_storage
from remesh.storage.optional import Directory as Directory
from remesh.storage.optional import DirectoryListing as DirectoryListing
from remesh.storage.optional import FileFacts as FileFacts
from remesh.storage.optional import SizedListing as SizedListing
from remesh.storage.optional import buffer_bytes_for as buffer_bytes_for
from remesh.storage.optional import delete_files as delete_files
from remesh.storage.optional import list_directory as list_directory
from remesh.storage.optional import list_sizes as list_sizes
from remesh.storage.optional import list_with_sizes as list_with_sizes
from remesh.storage.optional import read_range as read_range
from remesh.storage.paths import check_path as check_path
from remesh.storage.protocol import Buffer as Buffer
from remesh.storage.protocol import CopiedFiles as CopiedFiles
from remesh.storage.protocol import FileSystemSpace, Storage, Writer
from remesh.storage.protocol import SharedFiles as SharedFiles
from remesh.storage.shown import shown_url as shown_url
from remesh.storage.view import StorageView as StorageView

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
