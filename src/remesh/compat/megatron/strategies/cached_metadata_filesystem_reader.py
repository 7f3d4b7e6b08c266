"""A reader of torch.distributed.checkpoint that reads `.metadata` of a checkpoint once a process.

For code that calls torch.distributed.checkpoint itself; the drop-in's own loads do not use it.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reads files; readers of one checkpoint share its metadata until `clear_metadata_cache`."""

    # The interface clears it through the class, so it is the class that has it.
    _metadata_cache: ClassVar[dict[str, Metadata]] = {}

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._known: dict[str, Metadata] = self._metadata_cache if cache_metadata else {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        place = os.fspath(os.path.abspath(self.path))
        if place not in self._known:
            self._known[place] = super().read_metadata(*args, **kwargs)
        return self._known[place]

    @classmethod
    def clear_metadata_cache(cls) -> None:
        cls._metadata_cache.clear()
